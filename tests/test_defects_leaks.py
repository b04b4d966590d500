"""What a training used is freed when its names are gone, without the garbage collector."""

import contextlib
import gc
import weakref

import mxnet as mx
import pytest
from gluon_svrg.passes.interrupts import uninterrupted
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray
from problems import Dense, array

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("regression", samples=6, seed=36)
BATCHES = PROBLEM.batches(3)

# 1.9.1: a parameter knows its trainer, and the trainer its parameters, whichever trainer it is.
NO_CYCLE = hasattr(gluon.Parameter, "list_device")


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


def make(cls=SVRGTrainer):
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
    for _ in range(2):
        trainer.update_full_grads(loss_of, BATCHES)
        for index in BATCHES:
            trainer.step(3, closure=lambda: loss_of(index))


def fail(loss_of, trainer):
    """A refresh that raises, after one that did not; and a step."""

    def bad(index):
        if index is BATCHES[1]:
            raise ZeroDivisionError
        return loss_of(index)

    train(loss_of, trainer)
    for call in (
        lambda: trainer.update_full_grads(bad, BATCHES),
        lambda: trainer.step(3, closure=lambda: bad(BATCHES[1])),
    ):
        try:
            call()
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError("the closure has raised nothing")


def look(loss_of, trainer):
    """All that gives something out, and takes it back."""
    train(loss_of, trainer)
    with trainer.at_snapshot():
        loss_of(BATCHES[0])
    trainer.correct_grads(lambda: loss_of(BATCHES[0]))
    assert trainer.snapshot and trainer.full_grads
    trainer.update(3)


def survivors(use, cls=SVRGTrainer):
    """What of a training is left without a collector."""
    params, loss_of, trainer = make(cls)
    use(loss_of, trainer)
    references = {"trainer": weakref.ref(trainer), "parameter": weakref.ref(params[0])}
    del params, loss_of, trainer
    return [name for name, reference in references.items() if reference() is not None]


def test_a_training_of_gluon_is_freed_where_mxnet_has_no_cycle():
    with no_collector():
        left = survivors(plain, gluon.Trainer)
    assert left == ([] if NO_CYCLE else ["trainer", "parameter"])


@pytest.mark.parametrize("use", [plain, train, fail, look])
def test_a_training_is_freed_where_one_of_gluon_is(use):
    with no_collector():
        left = survivors(use)
        expected = survivors(plain, gluon.Trainer)
    assert left == expected


@pytest.mark.parametrize("use", [train, fail, look])
def test_a_discarded_snapshot_is_freed(use):
    """On both versions: nothing but what `gluon.Trainer` needs is left."""
    with no_collector():
        _, loss_of, trainer = make()
        trainer.step(3, closure=lambda: loss_of(BATCHES[0]))
        before = arrays()
        use(loss_of, trainer)
        trainer.discard_snapshot()
        assert arrays() <= before


@pytest.mark.parametrize("use", [train, fail, look])
def test_repeated_refreshes_and_errors_leave_no_arrays(use):
    with no_collector():
        _, loss_of, trainer = make()
        use(loss_of, trainer)
        before = arrays()
        for _ in range(3):
            use(loss_of, trainer)
        assert arrays() <= before


def test_what_failing_work_used_is_freed():
    used = []

    def work():
        thing = gluon.Parameter("w", shape=(1,))
        used.append(weakref.ref(thing))
        raise ZeroDivisionError

    with no_collector():
        with contextlib.suppress(ZeroDivisionError):
            uninterrupted(work)
        assert used[0]() is None


class Losses(list):
    """Losses that can be referred to weakly."""


@pytest.mark.parametrize("store_grads", [False, True])
def test_a_refresh_keeps_nothing_of_the_losses_that_it_computes_twice(store_grads):
    """Nothing is differentiated there, so that they would keep what they were computed from."""
    net = PROBLEM.network()
    single, found = PROBLEM.closure(net), []

    def loss_of(index):
        losses = Losses([single(index)])
        found.append(weakref.ref(losses))
        return losses

    def data():
        for number in range(5):
            assert sum(losses() is not None for losses in found) == number
            yield BATCHES[0]

    with no_collector():
        trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        trainer.update_full_grads(loss_of, data(), store_grads=store_grads)
    assert len(found) > 5
