"""Interrupts, a second thread, and what is freed when a training ends."""

import contextlib
import gc
import sys
import threading
import weakref

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, everything
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray
from problems import Dense, array, distance, parameters, values

from gluon_svrg import SAGATrainer, STORMTrainer, SVRGTrainer

PROBLEM = Dense("regression", hidden=(3,), samples=6, seed=33)
ALL, BATCHES = np.arange(len(PROBLEM.X)), PROBLEM.batches(3)
DEADLINE = 60  # seconds, for what takes one
PAUSE = 0.5  # seconds, in which another thread begins
PLACES = 50


class Interrupt(BaseException):
    """As KeyboardInterrupt, that would end the tests."""


def begun(cls=SVRGTrainer):
    """A trainer with a snapshot or a table, whose network has moved."""
    net, loss_of, trainer = kit.make(PROBLEM, cls=cls, rate=0.01)
    trainer.update_full_grads(loss_of, BATCHES)
    step(trainer, loss_of)
    return net, loss_of, trainer


def step(trainer, loss_of, closure=None, number=0):
    row = {"batch_index": number} if isinstance(trainer, SAGATrainer) else {}
    closure = closure or (lambda: loss_of(BATCHES[number]))
    trainer.step(3, closure=closure, **row)


def assert_usable(net, loss_of, trainer):
    """It has the gradient of its snapshot, and another refresh and another step work."""
    if trainer.snapshot is not None and type(trainer) is SVRGTrainer:
        there = [trainer.snapshot[p][0].asnumpy() for p in parameters(net)]
        expected = [g / len(ALL) for g in PROBLEM.gradient(there, ALL)[0]]
        assert distance(kit.full_gradients(trainer, net), expected) < 1e-9
    step(trainer, loss_of)
    before = values(net)
    trainer.update_full_grads(loss_of, BATCHES)
    expected = [g / len(ALL) for g in PROBLEM.gradient(before, ALL)[0]]
    assert distance(kit.full_gradients(trainer, net), expected) < 1e-9
    assert_unchanged(before, values(net))
    step(trainer, loss_of)
    assert distance(values(net), before) > 0


# --- interrupts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("good_calls", [0, 1])
@pytest.mark.parametrize("cls", [SVRGTrainer, SAGATrainer, STORMTrainer])
def test_an_interrupt_in_the_closure_or_the_data(cls, good_calls):
    net, loss_of, trainer = begun(cls)
    before = everything(trainer, net)

    def closure(*args):
        calls.append(args)
        if len(calls) > good_calls:
            raise KeyboardInterrupt
        return loss_of(*(args or BATCHES[:1]))

    def data():
        yield from BATCHES[:good_calls]
        raise KeyboardInterrupt

    for call in (
        lambda: step(trainer, loss_of, closure),
        lambda: trainer.update_full_grads(closure, BATCHES),
        lambda: trainer.update_full_grads(loss_of, data()),
    ):
        if cls is SAGATrainer and good_calls and call.__code__.co_names[0] == "step":
            continue  # a step calls its closure once
        calls = []
        with pytest.raises(KeyboardInterrupt):
            call()
        assert_unchanged(before, everything(trainer, net))
    assert_usable(net, loss_of, trainer)


class Places:
    """Raises at one of the places of the package where Python handles interrupts."""

    def __init__(self, place=None):
        self.place, self.passed = place, 0

    def __call__(self, frame, event, argument):
        name = frame.f_globals.get("__name__", "")
        if event in ("call", "c_return") and name.startswith("gluon_svrg"):
            self.passed += 1
            if self.passed - 1 == self.place:
                raise Interrupt

    @contextlib.contextmanager
    def watched(self):
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


def interrupted(call, places):
    """Interrupt a call at random places, each time anew."""
    call()
    everywhere = Places()
    with everywhere.watched():
        call()
    for place in np.random.RandomState(0).randint(0, everywhere.passed, places):
        with contextlib.suppress(Interrupt), Places(place).watched():
            call()
        autograd.set_recording(False)  # MXNet's own, at the end of `autograd.record`
        autograd.set_training(False)
        yield place


# What an interrupt meets inside of a destructor, Python reports and drops.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("cls", [SVRGTrainer, SAGATrainer])
def test_interrupts_at_random_places_of_a_refresh(cls):
    net, loss_of, trainer = begun(cls)
    live = values(net)
    for _ in interrupted(lambda: trainer.update_full_grads(loss_of, BATCHES), PLACES):
        assert_unchanged(live, values(net))
        assert_usable(net, loss_of, trainer)
        PROBLEM.assign(net, live)


def test_gradients_are_put_back_though_mxnet_records():
    """After an interrupt at the end of `autograd.record`, it still does."""
    net, loss_of, trainer = begun()
    before = kit.gradients(net)

    def data():
        yield BATCHES[0]
        autograd.set_recording(True)
        raise Interrupt

    try:
        with pytest.raises(Interrupt):
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
