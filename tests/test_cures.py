"""What users get wrong: each message says what to do, before anything is computed."""

import subprocess
import sys
import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from problems import array

from gluon_svrg import SAGATrainer, SAGTrainer, STORMTrainer, SVRGTrainer
from gluon_svrg.estimator import FullGradHandler, SVRGBatchProcessor
from gluon_svrg.schedule import Loopless
from gluon_svrg.variance import variance

X, Y = np.arange(12.0).reshape(4, 3) / 10, np.ones((4, 1))


def make(cls=SVRGTrainer, initialize=True, **options):
    net = gluon.nn.Dense(1, in_units=3)
    if initialize:
        net.initialize()
    loss_fn = gluon.loss.L2Loss()

    def loss_of(x, y):
        return loss_fn(net(x), y)

    trainer = cls(net.collect_params(), "sgd", {"learning_rate": 0.01}, **options)
    return net, trainer, loss_of


def batch():
    return array(X, "float32"), array(Y, "float32")


# --- errors --------------------------------------------------------------------------------------


def test_a_data_iter_and_a_closure_of_two_arguments():
    _, trainer, loss_of = make()
    data = mx.io.NDArrayIter(X.astype("float32"), Y.astype("float32"), 2)
    with pytest.raises(TypeError, match="each of its batches is one object"):
        trainer.update_full_grads(loss_of, data)
    to_np = (lambda a: a.as_np_ndarray()) if mx.util.is_np_array() else (lambda a: a)
    trainer.update_full_grads(lambda b: loss_of(to_np(b.data[0]), to_np(b.label[0])), data)


def test_a_dataset():
    _, trainer, loss_of = make()
    data = gluon.data.ArrayDataset(X.astype("float32"), Y.astype("float32"))
    with pytest.raises(TypeError, match="whose items are samples"):
        trainer.update_full_grads(loss_of, data)


@pytest.mark.parametrize("make_data", [tuple, list, lambda found: (X, Y), lambda found: found[0]])
def test_one_minibatch_is_no_data(make_data):
    _, trainer, loss_of = make()
    for closure in (loss_of, lambda: loss_of(*batch())):
        with pytest.raises(TypeError, match=r"The data is a \w+ of arrays.* this is one minibatch"):
            trainer.update_full_grads(closure, make_data(batch()))
    assert not trainer.has_snapshot
    trainer.update_full_grads(lambda X: loss_of(X, batch()[1]), [batch()[0]])  # of one array each
    with pytest.raises(TypeError, match="this is one minibatch"):
        variance(trainer, loss_of, batch())


@pytest.mark.parametrize("name", ["store_grads"])
def test_a_flag_that_is_none(name):
    _, trainer, loss_of = make()
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'x'"):
        trainer.update_full_grads(loss_of, [batch()], **{name: "x"})
    assert not trainer.has_snapshot


def test_a_network_that_is_not_initialized():
    with pytest.raises(RuntimeError, match=r"is not initialized. Call net.initialize\(\)"):
        make(initialize=False)


def test_a_step_inside_record_is_called_a_step():
    _, trainer, loss_of = make()
    with autograd.record(), pytest.raises(RuntimeError, match=r"^step\(\) was called inside"):
        trainer.step(4, closure=lambda: loss_of(*batch()))


def test_the_variance_of_a_plain_trainer():
    net, _, loss_of = make()
    plain = gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises(TypeError, match="needs a trainer of this package, got Trainer"):
        variance(plain, loss_of, [batch()])


@pytest.mark.parametrize("seed", [-1, None, "a", 0.5, True])
def test_the_seed_of_coins(seed):
    with pytest.raises((TypeError, ValueError), match="seed must be"):
        Loopless(0.5, seed)


@pytest.mark.parametrize("probability", ["a", None, True])
def test_the_probability_of_coins(probability):
    with pytest.raises(TypeError, match="probability must be a number"):
        Loopless(probability)


def test_nccl_where_there_is_none():
    if mx.runtime.Features().is_enabled("NCCL"):
        pytest.skip("this build of MXNet has NCCL")
    with pytest.raises(ValueError, match="built with NCCL"):
        make(kvstore="nccl")


# --- Estimator -----------------------------------------------------------------------------------


def estimator(cls):
    from mxnet.gluon.contrib.estimator import Estimator

    net, trainer, _ = make(cls)
    processor = SVRGBatchProcessor()
    made = Estimator(net, gluon.loss.L2Loss(), trainer=trainer, batch_processor=processor)
    made.logger.setLevel("ERROR")
    data = gluon.data.ArrayDataset(X.astype("float32"), Y.astype("float32"))
    return made, trainer, gluon.data.DataLoader(data, batch_size=2)


def test_storm_in_an_estimator_needs_no_handler():
    made, trainer, data = estimator(STORMTrainer)
    made.fit(data, epochs=2)
    assert trainer.inner_steps == 4


def test_svrg_in_an_estimator_needs_its_handler():
    made, _, data = estimator(SVRGTrainer)
    with pytest.raises(RuntimeError, match="needs a FullGradHandler"):
        made.fit(data, epochs=1)


@pytest.mark.parametrize("handlers", [True, False])
def test_saga_in_an_estimator_is_refused_before_a_pass(handlers):
    made, trainer, data = estimator(SAGATrainer)
    chosen = [FullGradHandler(data, update_freq=1)] if handlers else []
    with pytest.raises(TypeError, match="which an Estimator does not tell"):
        made.fit(data, epochs=1, event_handlers=chosen)
    assert trainer.num_snapshots == 0


# --- warnings ------------------------------------------------------------------------------------

warns = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pytest.warns passes MXNet's on


@warns
def test_a_mean_loss_that_is_divided_again():
    """Several minibatches in a row; one alone may be the last of an epoch."""
    _, trainer, loss_of = make()
    for _ in range(4):
        trainer.step(4, closure=lambda: loss_of(*batch()).mean())
    with pytest.warns(UserWarning, match="one loss entry for each .* batch_size is 4") as caught:
        trainer.step(4, closure=lambda: loss_of(*batch()).mean())
    assert [w.filename for w in caught if "loss entry" in str(w.message)] == [__file__]
    for _ in range(6):
        trainer.step(4, closure=lambda: loss_of(*batch()).mean())  # once
    _, trainer, loss_of = make()
    for _ in range(6):
        trainer.step(1, closure=lambda: loss_of(*batch()).mean())


@warns
def test_an_output_that_is_returned():
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize()
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01})

    def closure():
        output = net(batch()[0])
        return (output**2).sum(axis=1), output

    with pytest.warns(UserWarning, match="Everything that it returns is differentiated"):
        trainer.step(4, closure=closure)
    trainer.step(4, closure=closure)  # once


@pytest.mark.parametrize("value", [0, -32, "32", None, float("nan")])
@pytest.mark.parametrize("name", ["step", "update"])
def test_a_batch_size_that_is_none(name, value):
    """It is checked before anything changes."""
    _, trainer, loss_of = make()
    trainer.update_full_grads(loss_of, [batch()])
    before = trainer.grad_evaluations
    with pytest.raises((TypeError, ValueError), match="batch_size must be"):
        if name == "step":
            trainer.step(value, closure=lambda: loss_of(*batch()))
        else:
            trainer.update(value)
    assert trainer.grad_evaluations == before


def test_arguments_in_the_other_order():
    _, trainer, loss_of = make()
    with pytest.raises(TypeError, match="arguments in the other order"):
        trainer.update_full_grads([batch()], loss_of)
    with pytest.raises(TypeError, match="must be a DataLoader, or a list of minibatches, got None"):
        trainer.update_full_grads(loss_of, None)


ONE_OF_TWO = """
import os, warnings
import mxnet as mx
from mxnet import gluon
from gluon_svrg import SVRGTrainer
net = gluon.nn.Dense(1, in_units=3)
net.initialize()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    SVRGTrainer(net.collect_params(), "sgd", kvstore="device")
print("said" if any("exchanges nothing" in str(w.message) for w in caught) else "silent")
"""


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_worker_of_several_without_their_kvstore(workers, tmp_path):
    """In a real job, whose workers end by themselves."""
    program = tmp_path / "train.py"
    program.write_text(ONE_OF_TWO)
    command = [sys.executable, "-m", "gluon_svrg", "launch", "-n", str(workers), "-s", "1", "--"]
    done = subprocess.run(
        [*command, sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("said" if workers > 1 else "silent") == workers


@pytest.mark.parametrize("cls", [SAGATrainer, SAGTrainer])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_table_over_reshuffled_data_and_no_refresh(cls, devices):
    """The first row is computed again, at its own weights, when its minibatch comes again."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(5, in_units=3), gluon.nn.BatchNorm(in_channels=5))
    net.add(gluon.nn.Dropout(0.5), gluon.nn.Dense(1, in_units=5))
    ctx = [mx.cpu(n) for n in range(devices)]
    net.initialize(ctx=ctx)
    loss_fn = gluon.loss.L2Loss()
    rng = np.random.RandomState(0)
    batches = [(rng.randn(8, 3), rng.randn(8, 1)) for _ in range(3)]
    trainer = cls(net.collect_params(), "sgd", {"learning_rate": 0.01}, lock_random=True)

    def epoch(order):
        for index, number in enumerate(order):
            X, y = ([array(part, "float32", device)
                     for part, device in zip(np.array_split(values, devices), ctx)]
                    for values in batches[number])  # fmt: skip
            trainer.step(
                8, closure=lambda: [loss_fn(net(x), t) for x, t in zip(X, y)], batch_index=index
            )

    for _ in range(3):
        epoch([0, 1, 2])  # no warning, and the check is not counted
    assert trainer.grad_evaluations == 3 * 24
    trainer.discard_snapshot()
    epoch([0, 1, 2])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", UserWarning)
        epoch([1, 2, 0])
    (text,) = (str(w.message) for w in seen if w.category is UserWarning)
    assert "computed again at the weights of its first visit" in text
    assert "pass lock_random=True" in text  # dropout differs as well
    epoch([2, 0, 1])  # once


# --- mistakes whose messages were those of Python or MXNet ---------------------------------------


def loader():
    data = gluon.data.ArrayDataset(X.astype("float32"), Y.astype("float32"))
    return gluon.data.DataLoader(data, batch_size=2)


def augmented(net):
    def loss_of(x, y):
        noise = array(np.random.rand(*x.shape), "float32")
        return gluon.loss.L2Loss()(net(x + noise), y)

    return loss_of


RAW = {
    "a closure without arguments for a loader": (
        lambda net, trainer, loss_of: trainer.update_full_grads(
            lambda: loss_of(*batch()), loader()
        ),
        TypeError,
        r"called with the 2 items of a batch, but its signature is \(\).*lambda: loss_of\(X, y\)",
    ),
    "a closure with arguments for a step": (
        lambda net, trainer, loss_of: trainer.step(4, closure=loss_of),
        TypeError,
        r"called with no arguments, .* \(x, y\).*closure=lambda: loss_of\(X, y\)",
    ),
    "the network as parameters": (
        lambda net, trainer, loss_of: SVRGTrainer(net, "sgd"),
        ValueError,
        r"SVRGTrainer\(net.collect_params\(\), ...\)",
    ),
    "a coefficient by name": (
        lambda net, trainer, loss_of: make(coefficient="linear"),
        TypeError,
        r"schedule.Linear\(0.75",
    ),
    "an argument of another library": (
        lambda net, trainer, loss_of: SVRGTrainer(net.collect_params(), "sgd", {"lr": 0.1}),
        TypeError,
        "SGD takes no argument 'lr'. Did you mean 'learning_rate'",
    ),
    "an argument that is misspelled": (
        lambda net, trainer, loss_of: SVRGTrainer(net.collect_params(), "adam", {"beta_1": 0.9}),
        TypeError,
        "Did you mean 'beta1'",
    ),
    "an optimizer that is misspelled": (
        lambda net, trainer, loss_of: SVRGTrainer(net.collect_params(), "sdg"),
        ValueError,
        "no optimizer 'sdg'. Did you mean 'sgd'",
    ),
    "a rate beside a scheduler": (
        lambda net, trainer, loss_of: SVRGTrainer(
            net.collect_params(), "sgd", {"lr_scheduler": mx.lr_scheduler.FactorScheduler(5)}
        ).set_learning_rate(0.1),
        UserWarning,
        "that of the optimizer's FactorScheduler",
    ),
    "augmentation in the closure": (
        lambda net, trainer, loss_of: trainer.update_full_grads(augmented(net), loader()),
        RuntimeError,
        "must compute the same each time: .*augment data",
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_mistakes(name):
    """One message, the right one; a warning before it would be an error here."""
    call, error, message = RAW[name]
    net, trainer, loss_of = make()
    with pytest.raises(error, match=message):
        call(net, trainer, loss_of)
    trainer.step(4, closure=lambda: loss_of(*batch()))
