"""Interrupts, a second thread, and what is freed when a training ends."""

import contextlib
import gc
import threading
import weakref

import kit
import mxnet as mx
import pytest
from kit import assert_unchanged
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray
from problems import Dense, array

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("regression", hidden=(3,), samples=6, seed=33)
BATCHES = PROBLEM.batches(3)
DEADLINE = 60  # seconds, for what takes one
PAUSE = 0.5  # seconds, in which another thread begins


# --- interrupts ----------------------------------------------------------------------------------


def test_gradients_are_put_back_though_mxnet_records():
    """After an interrupt at the end of `autograd.record`, it still does."""
    net, loss_of, trainer = kit.make(PROBLEM)
    trainer.correct_grads(lambda: loss_of(BATCHES[0]))
    before = kit.gradients(net)

    def data():
        yield BATCHES[0]
        autograd.set_recording(True)
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.update_full_grads(loss_of, data())
    finally:
        autograd.set_recording(False)
    assert_unchanged(before, kit.gradients(net))


# --- threads -------------------------------------------------------------------------------------


def methods():
    owners = gluon.Parameter, gluon.Block, gluon.HybridBlock, gluon.Trainer, NDArray, autograd
    return [dict(vars(owner)) for owner in owners]


def of_the_last_layer():
    """A trainer that looks for the parameters of the other one while it refreshes."""
    net = PROBLEM.network()
    trainer = SVRGTrainer(net[1].collect_params(), "sgd", {"learning_rate": 0.1})
    loss_of = PROBLEM.closure(net)

    def refresh(at_first=lambda: None):
        waits = iter([at_first])
        closure = lambda index: (loss_of(index), next(waits, int)())[0]  # noqa: E731
        trainer.update_full_grads(closure, BATCHES)

    return refresh, trainer


def test_no_method_of_mxnet_stays_patched_where_two_refreshes_overlap():
    """The second begins while the first is at work, and ends after it."""
    before, first_is_done = methods(), threading.Event()
    (first, one), (second, other) = of_the_last_layer(), of_the_last_layer()
    ends_later = (lambda: first_is_done.wait(DEADLINE),)
    thread = threading.Thread(target=second, args=ends_later, daemon=True)
    first(lambda: (thread.start(), thread.join(PAUSE)))
    first_is_done.set()
    thread.join(DEADLINE)
    assert methods() == before
    assert one.snapshot and other.snapshot


def test_no_method_of_mxnet_stays_patched_after_an_error():
    before, (refresh, trainer) = methods(), of_the_last_layer()
    with pytest.raises(ZeroDivisionError):
        refresh(lambda: 1 / 0)
    refresh()
    with pytest.raises(ZeroDivisionError):
        trainer.step(4, closure=lambda: 1 / 0)
    assert methods() == before


# --- what is freed -------------------------------------------------------------------------------


@contextlib.contextmanager
def no_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def arrays():
    """How many arrays there are."""
    mx.nd.waitall()
    return sum(isinstance(found, NDArray) for found in gc.get_objects())


def of_two_parameters(cls=SVRGTrainer):
    """A trainer of parameters that belong to no block: blocks have cycles of their own."""
    params = [gluon.Parameter(name, shape=shape) for name, shape in (("w", (4, 1)), ("b", (1,)))]
    for parameter in params:
        parameter.initialize()
    weight, bias = params

    def loss_of(index):
        X, y = array(PROBLEM.X[index], "float32"), array(PROBLEM.y[index], "float32")
        dot = mx.np.dot if mx.util.is_np_array() else mx.nd.dot
        return (dot(X, weight.data()) + bias.data() - y) ** 2

    return params, loss_of, cls(params, "sgd", {"learning_rate": 0.01, "momentum": 0.9})


def plain(loss_of, trainer):
    with autograd.record():
        loss = loss_of(BATCHES[0])
    loss.backward()
    trainer.step(3)


def train(loss_of, trainer):
    """All that gives something out, and takes it back."""
    for _ in range(2):
        trainer.update_full_grads(loss_of, BATCHES)
        for index in BATCHES:
            trainer.step(3, closure=lambda: loss_of(index))
    with trainer.at_snapshot():
        loss_of(BATCHES[0])
    trainer.correct_grads(lambda: loss_of(BATCHES[0]))
    assert trainer.snapshot and trainer.full_grads
    trainer.update(3)


def fail(loss_of, trainer):
    """A refresh that raises, after one that did not; and a step."""
    train(loss_of, trainer)
    for call in (
        lambda: trainer.update_full_grads(kit.failing(loss_of, 1), BATCHES),
        lambda: trainer.step(3, closure=kit.failing(lambda: loss_of(BATCHES[0]), 1)),
    ):
        with contextlib.suppress(KeyError):  # `pytest.raises` would keep the traceback
            call()
            raise AssertionError("the closure has raised nothing")


def survivors(use, cls):
    """What of a training is left without a collector."""
    params, loss_of, trainer = of_two_parameters(cls)
    use(loss_of, trainer)
    references = {"trainer": weakref.ref(trainer), "parameter": weakref.ref(params[0])}
    del params, loss_of, trainer
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize("use", [plain, train, fail])
def test_a_training_is_freed_where_one_of_gluon_is(use):
    """On 1.9.1 a parameter knows its trainer, and the trainer its parameters."""
    with no_collector():
        expected = survivors(plain, gluon.Trainer)
        assert survivors(use, SVRGTrainer) == expected
    is_2 = hasattr(gluon.Parameter, "list_device")
    assert expected == ([] if is_2 else ["trainer", "parameter"])


@pytest.mark.parametrize("use", [train, fail])
def test_refreshes_and_errors_leave_no_arrays(use):
    """And a snapshot that is discarded leaves none that `gluon.Trainer` would not need."""
    with no_collector():
        _, loss_of, trainer = of_two_parameters()
        trainer.step(3, closure=lambda: loss_of(BATCHES[0]))
        plain_count = arrays()
        use(loss_of, trainer)
        before = arrays()
        for _ in range(3):
            use(loss_of, trainer)
        assert arrays() <= before
        trainer.discard_snapshot()
        assert arrays() <= plain_count
