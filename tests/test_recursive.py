"""SARAH, STORM and MARS: identities, and what their twins do not show."""

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from kit import assert_unchanged, everything
from loops import plain_step
from mxnet import gluon
from problems import Dense, array, contexts, distance, parameters, values

from gluon_svrg import MARSTrainer, SARAHTrainer, STORMTrainer, schedule

PROBLEM = Dense("classification", hidden=(5,), seed=41)
BATCHES = PROBLEM.batches(5)
ALL = np.arange(len(PROBLEM.X))
RATE = {"learning_rate": 0.2}
DEVICES = [None, contexts(2), contexts(3)]
#: With settings of their own; the last two need no reference gradient for vectors.
METHODS = {
    "SARAH": (SARAHTrainer, oracle.SARAH, {}),
    "STORM": (STORMTrainer, oracle.STORM, {"mixing": 0.3}),
    "MARS": (MARSTrainer, oracle.MARS, {"gamma": 0.1, "clip": 0.1}),
    "all of MARS": (MARSTrainer, oracle.MARS, {"gamma": 0.1, "include_vectors": True}),
    "approximate": (MARSTrainer, oracle.MARS, {"gamma": 0.1, "exact": False, "clip": 0.2}),
}


@pytest.fixture(params=METHODS.values(), ids=METHODS)
def method(request):
    return request.param


def make(cls, devices=None, dtype="float64", optimizer="sgd", settings=RATE, **kwargs):
    net = PROBLEM.network(dtype, devices)
    trainer = cls(net.collect_params(), optimizer, settings, **kwargs)
    return net, PROBLEM.closure(net, dtype, devices), trainer


def step(trainer, loss_of, index):
    return trainer.step(len(index), closure=lambda: loss_of(index))


def descended(steps):
    """The weights after some steps of gradient descent."""
    twin, optimizer = oracle.Method(PROBLEM.gradient, PROBLEM.initial), oracle.SGD(0.2)
    for _ in range(steps):
        twin.step(optimizer, ALL)
    return twin.weights


# --- identities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", DEVICES)
def test_sarah_with_full_minibatches_is_gradient_descent(devices):
    net, loss_of, trainer = make(SARAHTrainer, devices)
    trainer.update_full_grads(loss_of, BATCHES)
    for _ in range(12):
        step(trainer, loss_of, ALL)
    assert distance(values(net), descended(12)) < 1e-12


@pytest.mark.parametrize("devices", DEVICES)
def test_page_that_always_refreshes_is_gradient_descent(devices):
    net, loss_of, trainer = make(SARAHTrainer, devices)
    loopless = schedule.Loopless(1.0)
    for number in range(12):
        assert loopless.due(trainer)
        trainer.update_full_grads(loss_of, [ALL])  # its large minibatch
        step(trainer, loss_of, BATCHES[number % 5])
    # MXNet rounds 1 / batch_size to float32, and 5 is not 23
    assert distance(values(net), descended(12)) < 1e-8


@pytest.mark.parametrize(
    "cls, own",
    [
        (STORMTrainer, {"mixing": 1}),
        (MARSTrainer, {"gamma": 0, "clip": None}),
        (MARSTrainer, {"beta": 0, "clip": 1e9, "include_vectors": True}),
        (MARSTrainer, {"gamma": 0, "clip": None, "exact": False}),
    ],
)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("optimizer", ["adam", "adadelta", "signum"])
def test_the_plain_optimizer(cls, own, devices, optimizer):
    """Bit for bit."""
    settings = {} if optimizer == "adadelta" else {"learning_rate": 0.05}
    kwargs = {"update_on_kvstore": False}
    net, loss_of, trainer = make(cls, devices, "float32", optimizer, settings, **own, **kwargs)
    twin, twin_loss_of, plain = make(
        gluon.Trainer, devices, "float32", optimizer, settings, **kwargs
    )
    for index in [*BATCHES, *BATCHES]:
        step(trainer, loss_of, index)
        plain_step(plain, lambda: twin_loss_of(index), len(index))
    for device in devices or [None]:
        assert_unchanged(values(net, device), values(twin, device))


def test_spider_is_where_its_twin_is():
    """A refresh in the middle of an epoch, by the count of steps."""
    net, loss_of, trainer = make(SARAHTrainer)
    twin, optimizer = oracle.SARAH(PROBLEM.gradient, PROBLEM.initial), oracle.SGD(**RATE)
    every = schedule.EverySteps(3)
    for number in range(13):
        if every.due(trainer):
            assert number % 3 == 0
            trainer.update_full_grads(loss_of, BATCHES)
            twin.refresh(BATCHES)
        step(trainer, loss_of, BATCHES[number % 5])
        twin.step(optimizer, BATCHES[number % 5])
    assert distance(values(net), twin.weights) < 1e-12


# --- what can be seen ----------------------------------------------------------------------------


def test_what_the_snapshot_is(method):
    """The weights before the last step, and the mean gradient that the next step leans on."""
    cls, twin_cls, own = method
    net, loss_of, trainer = make(cls, **own)
    twin, optimizer = twin_cls(PROBLEM.gradient, PROBLEM.initial, **own), oracle.SGD(**RATE)
    assert not trainer.has_snapshot and trainer.snapshot is None and trainer.full_grads is None
    if cls is SARAHTrainer:
        trainer.update_full_grads(loss_of, BATCHES)
        twin.refresh(BATCHES)
    for count, index in enumerate(BATCHES[2:], 1):
        before = values(net)
        step(trainer, loss_of, index)
        twin.step(optimizer, index)
        assert trainer.has_snapshot and trainer.inner_steps == count
        exact = own.get("exact", True)
        if exact:
            there = [trainer.snapshot[p][0].asnumpy() for p in parameters(net)]
            assert_unchanged(there, before)
            with trainer.at_snapshot():
                assert_unchanged(values(net), before)
        else:
            assert trainer.snapshot is None
            with pytest.raises(RuntimeError, match="keeps no weights"), trainer.at_snapshot():
                pass
        if cls is MARSTrainer and exact:
            assert trainer.full_grads is None
            continue
        mean = kit.full_gradients(trainer, net)
        if cls is MARSTrainer:  # vectors are left alone
            assert not mean[1].any() and not mean[3].any()
            assert distance(mean[::2], twin.mean[::2]) < 1e-12
        else:
            assert distance(mean, twin.mean) < 1e-12


def test_vectors_are_left_to_the_plain_optimizer():
    """To the last bit, where the weights do not move either."""
    net, loss_of, trainer = make(MARSTrainer, dtype="float32", gamma=0.5, clip=0.01)
    twin, twin_loss_of, plain = make(gluon.Trainer, dtype="float32")
    for number, index in enumerate(BATCHES):
        trainer.correct_grads(lambda: loss_of(index))
        trainer.allreduce_grads()
        with mx.autograd.record():
            loss = twin_loss_of(index)
        loss.backward()
        for p, q in list(zip(parameters(net), parameters(twin)))[1::2]:
            np.testing.assert_array_equal(p.grad().asnumpy(), q.grad().asnumpy())
        for p, q in list(zip(parameters(net), parameters(twin)))[::2]:
            norm = np.linalg.norm(p.grad().asnumpy() / len(index))
            assert norm < 0.01 * (1 + 1e-5)
            assert np.linalg.norm(q.grad().asnumpy() / len(index)) > 0.02  # there was some to clip
        trainer.update(len(index))
        plain.step(len(index))
        PROBLEM.assign(twin, values(net))
        assert trainer.inner_steps == number + 1


# --- steps that do not happen --------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("devices", DEVICES[:2])
def test_a_step_that_amp_skips(method, devices, first):
    """The first one as well, which has no reference yet."""
    cls, _, own = method
    found = []
    for overflows in (False, True):
        kwargs = {"update_on_kvstore": False, "lock_random": False}
        net, loss_of, trainer = make(cls, devices, "float32", **kwargs, **own)
        scaler = kit.scale_losses(trainer)
        if cls is SARAHTrainer:
            trainer.update_full_grads(loss_of, BATCHES)
        for number, index in enumerate(BATCHES):
            if overflows and number == (0 if first else 3):

                def too_large():
                    losses = loss_of(index)
                    return [x * 1e38 for x in losses] if devices else losses * 1e38

                before = values(net)
                trainer.step(len(index), closure=too_large)
                assert_unchanged(values(net), before)
            scaler._loss_scale = scaler._next_loss_scale = 2.0**8
            step(trainer, loss_of, index)
        found.append(everything(trainer, net))
        for name in ("grad_evaluations", "inner_steps"):
            found[-1].pop(name)
    assert_unchanged(*found)


def test_an_estimate_that_is_not_used_does_not_count(method):
    """Under ``grad_req='write'`` the next one takes its place, and C is its own."""
    cls, _, own = method
    found = []
    for twice in (False, True):
        net, loss_of, trainer = make(cls, lock_random=False, **own)
        if cls is SARAHTrainer:
            trainer.update_full_grads(loss_of, BATCHES)
        for index in BATCHES:
            if twice:
                trainer.correct_grads(lambda: loss_of(BATCHES[0]))
            step(trainer, loss_of, index)
        found.append(values(net))
    assert distance(*found) < 1e-12


def test_m_is_taken_before_gradients_are_clipped():
    found = []
    for clips in (False, True):
        net, loss_of, trainer = make(STORMTrainer, mixing=0.3)
        for index in BATCHES:
            trainer.correct_grads(lambda: loss_of(index))
            trainer.allreduce_grads()
            if clips:
                for p in parameters(net):
                    p.grad()[:] = p.grad() * 0.01
            trainer.set_learning_rate(0.2 if not clips else 0.0)
            trainer.update(len(index))
            PROBLEM.assign(net, PROBLEM.initial)
        found.append(kit.full_gradients(trainer, net))
    assert distance(*found) < 1e-12


# --- without a refresh ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pytest.warns passes MXNet's own on
@pytest.mark.parametrize("cls", [STORMTrainer, MARSTrainer])
def test_random_numbers_are_found(cls):
    """At the first step with a reference, where no refresh has looked for them."""
    net = kit.with_dropout()
    trainer = cls(net.collect_params(), "sgd", RATE)
    loss_of = PROBLEM.closure(net, "float32")
    step(trainer, loss_of, BATCHES[0])
    with pytest.warns(UserWarning, match="random"):
        step(trainer, loss_of, BATCHES[1])
    assert trainer.lock_random == "auto"
    before = trainer.grad_evaluations
    step(trainer, loss_of, BATCHES[2])
    assert trainer.grad_evaluations - before == 2 * 5


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("cls, twin_cls, own", list(METHODS.values())[1:3])
def test_an_operator_that_ignores_the_gradient_of_its_head(cls, twin_cls, own, resumed, tmp_path):
    """SoftmaxOutput gives its own gradient, whatever it is asked for."""

    def begin():
        net = PROBLEM.network("float32")

        def loss_of(index):
            X, y = array(PROBLEM.X[index], "float32"), array(PROBLEM.y[index], "float32")
            scores = net(X).as_nd_ndarray()
            return mx.nd.SoftmaxOutput(scores, y.as_nd_ndarray())

        return net, loss_of, cls(net.collect_params(), "sgd", RATE, **own)

    def gradient(weights, index):  # a loss entry for each class
        return PROBLEM.gradient(weights, index)[0], 3 * len(index)

    net, loss_of, trainer = begin()
    twin, optimizer = twin_cls(gradient, PROBLEM.initial, **own), oracle.SGD(**RATE)
    for number, index in enumerate(BATCHES):
        if resumed and number == 3:
            trainer.save_states(tmp_path / "states")
            trained = values(net)
            net, loss_of, trainer = begin()
            PROBLEM.assign(net, trained)
            trainer.load_states(tmp_path / "states")
        step(trainer, loss_of, index)
        twin.step(optimizer, index, batch_size=len(index))
    assert distance(values(net), twin.weights) < 1e-5


@pytest.mark.parametrize(
    "cls, twin_cls, own",
    [
        (STORMTrainer, oracle.STORM, {"mixing": 0.2}),
        (MARSTrainer, oracle.MARS, {"gamma": 0.03, "clip": None, "include_vectors": True}),
    ],
)
def test_factors_of_float64(cls, twin_cls, own):
    """Losses in float32, as those of MXNet 2.0 are, cannot hold 0.8 and what follows from gamma."""
    settings = {"learning_rate": 0.25}  # which float32 holds
    net, loss_of, trainer = make(cls, settings=settings, **own)
    twin, optimizer = twin_cls(PROBLEM.gradient, PROBLEM.initial, **own), oracle.SGD(0.25)
    for index in PROBLEM.batches(8)[:2] * 4:
        step(trainer, lambda index: loss_of(index).astype("float32"), index)
        twin.step(optimizer, index)
    assert distance(values(net), twin.weights) < 1e-14


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls, own, message",
    [
        (SARAHTrainer, {"compression_params": {"type": "2bit"}}, "would stay forever"),
        (STORMTrainer, {"compression_params": {"type": "2bit"}}, "would stay forever"),
        (
            MARSTrainer,
            {"compression_params": {"type": "2bit"}, "exact": False},
            "would stay forever",
        ),
        (STORMTrainer, {"mixing": 1.5}, "mixing must be finite, at least 0 and at most 1, got 1.5"),
        (STORMTrainer, {"mixing": float("nan")}, "mixing must be finite"),
        (MARSTrainer, {"gamma": -1}, "gamma must be finite, at least 0, got -1"),
        (MARSTrainer, {"beta": 1.0}, "beta must be below 1, in float32 too, got 1.0"),
        (MARSTrainer, {"clip": 0}, "clip must be finite, above 0, got 0"),
        (SARAHTrainer, {"update_on_kvstore": True}, "SARAHTrainer needs the reduced gradient"),
        (STORMTrainer, {"kvstore": "dist_async"}, "STORMTrainer needs the reduced gradient"),
    ],
)
def test_arguments_that_are_refused(cls, own, message):
    with pytest.raises(ValueError, match=message):
        make(cls, contexts(2), **own)


def test_types_that_are_refused():
    with pytest.raises(TypeError, match="mixing must be a number, got str"):
        make(STORMTrainer, mixing="0.1")
    with pytest.raises(TypeError, match="exact must be True or False, got 'no'"):
        make(MARSTrainer, exact="no")


def test_compression_with_exact_mars():
    net, loss_of, trainer = make(
        MARSTrainer,
        contexts(2),
        "float32",
        compression_params={"type": "2bit", "threshold": 0.5},
        update_on_kvstore=False,
    )
    for index in BATCHES:
        step(trainer, loss_of, index)
    assert distance(values(net, contexts(2)[0]), values(net, contexts(2)[1])) == 0


def test_calls_that_are_refused(method):
    cls, _, own = method
    _, loss_of, trainer = make(cls, **own)
    with pytest.raises(ValueError, match="no use for stored gradients"):
        trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    with pytest.raises(TypeError, match="batch_index names a stored gradient"):
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=0)
    trainer.update_full_grads(loss_of, BATCHES)
    trainer.correct_grads(lambda: loss_of(BATCHES[0]))
    with pytest.raises(RuntimeError, match=r"update\(\) needs allreduce_grads\(\) before"):
        trainer.update(5)
    step(trainer, loss_of, BATCHES[0])
    with pytest.raises(RuntimeError, match="closure"):
        trainer.step(5)


@pytest.mark.parametrize("cls", [STORMTrainer, MARSTrainer])
def test_the_first_step_needs_a_closure_too(cls):
    """It is part of what the next one is compared with."""
    _, loss_of, trainer = make(cls)
    with mx.autograd.record():
        loss = loss_of(BATCHES[0])
    loss.backward()
    for call in (lambda: trainer.step(5), trainer.allreduce_grads, lambda: trainer.update(5)):
        with pytest.raises(RuntimeError, match=r"For the plain optimizer use gluon\.Trainer"):
            call()
    step(trainer, loss_of, BATCHES[0])
    trainer.discard_snapshot()  # starts anew
    assert not trainer.has_snapshot
    with pytest.raises(RuntimeError, match=r"For the plain optimizer use gluon\.Trainer"):
        trainer.step(5)


def test_parameters_that_change(method):
    """What was kept is of other parameters then."""
    cls, _, own = method
    net, loss_of, trainer = make(cls, **own)
    trainer.update_full_grads(loss_of, BATCHES)
    step(trainer, loss_of, BATCHES[0])
    parameters(net)[0].grad_req = "null"
    with pytest.raises(RuntimeError, match="is of grad_req='null' now"):
        step(trainer, loss_of, BATCHES[1])
    trainer.discard_snapshot()
    before = values(net)
    for index in BATCHES:
        step(trainer, loss_of, index)
    after = values(net)
    assert_unchanged(before[:1], after[:1])
    assert distance(before[1:], after[1:]) > 0


def test_states_of_another_kind(tmp_path):
    _, loss_of, trainer = make(MARSTrainer)
    for index in BATCHES:
        step(trainer, loss_of, index)
    trainer.save_states(tmp_path / "states")
    for cls, own, message in [
        (MARSTrainer, {"exact": False}, "it has the weights before the last step"),
        (STORMTrainer, {}, "MARS"),
    ]:
        _, other_loss_of, other = make(cls, **own)
        with pytest.raises(ValueError, match=message):
            other.load_states(tmp_path / "states")
        step(other, other_loss_of, BATCHES[0])  # nothing was changed


def test_a_parameter_that_no_loss_depends_on(method):
    """It stays where it is; one that some do moves by its mean gradient."""
    cls, _, own = method
    net, unused = PROBLEM.network(), PROBLEM.network()
    params = [*parameters(net), *parameters(unused)]
    trainer = cls(params, "sgd", {**RATE, "wd": 0.1}, **own)
    loss_of = PROBLEM.closure(net)
    if cls is SARAHTrainer:
        trainer.update_full_grads(loss_of, BATCHES)
    before = values(unused)
    for index in BATCHES:
        trainer.step(len(index), ignore_stale_grad=True, closure=lambda: loss_of(index))
    assert_unchanged(values(unused), before)
    with pytest.raises(UserWarning, match="not been updated by backward"):
        step(trainer, loss_of, BATCHES[0])


# --- workers -------------------------------------------------------------------------------------
