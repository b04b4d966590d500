"""Interrupts, a second thread, and what is freed when a training ends."""

import contextlib
import gc
import itertools
import sys
import threading
import weakref
from pathlib import Path

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, plain_step
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray
from plays import WITH_STORED, Play
from problems import Dense, array, values

import gluon_svrg
from gluon_svrg import SVRGTrainer
from gluon_svrg.saving import file_format
from gluon_svrg.saving.values import decode

PROBLEM = Dense("regression", hidden=(3,), samples=6, seed=33)
BATCHES = PROBLEM.batches(3)
DEADLINE = 60  # seconds, for what takes one
PAUSE = 0.5  # seconds, in which another thread begins


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


def interrupted(number, call, functions=None):
    """Call something, interrupt it at a line of the package or of `functions`; False if none."""
    package, lines = str(Path(gluon_svrg.__file__).parent), itertools.count(1)

    def trace(frame, event, _):
        if event == "line" and next(lines) == number:
            raise KeyboardInterrupt
        is_there = functions is None or frame.f_code.co_name in functions
        return trace if is_there and frame.f_code.co_filename.startswith(package) else None

    sys.settrace(trace)
    try:
        call()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)


class Begun(Play):
    """A training that has a reference, and whatever of it a file or a user sees."""

    def __init__(self, case, path):
        mx.random.seed(1)
        settings = {"learning_rate": 0.1, "momentum": 0.9}
        with mx.name.NameManager():  # files of all have the same names
            super().__init__(case, PROBLEM, dtype="float32", settings=settings, lock_random=False)
        self.path, self.shares = path, [BATCHES]
        self.refresh()
        self.step_alone(0)
        self.step_alone(1)

    def method(self):
        """The state of the method, as a file has it."""
        self.trainer.save_states(self.path)
        _, parts, arrays = file_format.unpack(self.path.read_bytes())
        return repr(decode(parts["method"], arrays, range(4)))

    def seen(self):
        """The first call of the trainer puts right what an interrupt has left."""
        self.trainer.save_states(self.path)
        modes = autograd.is_recording(), autograd.is_training()
        content = self.path.read_bytes().split(b"\n", 3)[3]  # without its checksum
        arrays = [*values(self.net), *kit.gradients(self.net)]
        return content, modes, [each.tobytes() for each in arrays]


def test_an_interrupted_refresh_of_a_preconditioner():
    """The next steps still have the old snapshot, as after an error in the pass."""
    ends = []
    for is_late in (False, True):
        settings = {"optimizer": "nag", "settings": {}, "preconditioner": gluon_svrg.Nystrom(2)}
        net, loss_of, trainer = kit.make(PROBLEM, **settings)

        def refresh(closure=loss_of, trainer=trainer):
            trainer.update_full_grads(closure, BATCHES)

        refresh()
        kit.one_epoch(trainer, loss_of, BATCHES * 2 + BATCHES[:1])
        if is_late:
            assert interrupted(1, refresh, ["end_epoch"])
        else:
            with pytest.raises(KeyError):
                refresh(kit.failing(loss_of, 1))
        kit.one_epoch(trainer, loss_of, BATCHES[::-1] * 3)
        ends.append([trainer.learning_rate, *values(net)])
    assert_unchanged(*ends)


STRIDE = 37
IN_MOVED = ("_on_updated", "moved", "commit", "drop")  # after the weights have moved
MANY = [pytest.param(first, marks=pytest.mark.slow) for first in range(2, STRIDE + 1)]


@pytest.mark.parametrize("first", [1, *MANY])
@pytest.mark.parametrize("name", ["SVRG", "stored", "SAGA", "STORM"])
def test_an_interrupted_refresh(name, first, tmp_path):
    """At any line: there is all of the new snapshot, or none of it."""
    case, before = WITH_STORED[name], methods()
    begun = Begun(case, tmp_path / "states")
    old = begun.seen()
    begun.refresh()
    new, kinds = begun.seen(), []
    for number in itertools.count(first, STRIDE):
        begun = Begun(case, tmp_path / "states")
        if not interrupted(number, begun.refresh):
            break
        now = begun.seen()
        kinds.append(now == new)
        assert kinds[-1] or now == old, number
        assert methods() == before
    assert not kinds[0] and sorted(kinds) == kinds


@pytest.mark.parametrize("functions", [IN_MOVED, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["SAGA", "SAG", "SARAH", "STORM", "MARS", "approximate MARS"])
def test_an_interrupted_step(name, functions, tmp_path):
    """At any line: the method has all of its next state, or none of it, and training goes on."""

    def run(number):
        """What the method keeps before and after a step, and all after three more."""
        begun = Begun(WITH_STORED[name], tmp_path / "states")
        seen = [begun.method()]
        is_complete = not interrupted(number, lambda: begun.step_alone(0), functions)
        seen.append(begun.method())
        for each in (0, 1, 0, 1)[seen[0] != seen[1] :]:
            begun.step_alone(each)
        return is_complete, *seen, [begun.method(), *map(np.ndarray.tobytes, values(begun.net))]

    _, old, new, end = run(0)
    for number in itertools.count(1):
        is_complete, _, now, later = run(number)
        assert now == old or (now, later) == (new, end), number
        if is_complete:
            break
    assert old != new and number > 20


def test_an_interrupted_block_at_the_snapshot(tmp_path):
    begun = Begun(WITH_STORED["SVRG"], tmp_path / "states")
    old = begun.seen()

    def look():
        with begun.trainer.at_snapshot():
            begun.loss_of(BATCHES[0])

    for number in itertools.count(1):
        if not interrupted(number, look):
            break
        assert begun.seen() == old, number
        look()
    assert number > 20


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
    for fail in (lambda: first(lambda: 1 / 0), lambda: one.step(4, closure=lambda: 1 / 0)):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert methods() == before


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def number_of_arrays():
    mx.nd.waitall()
    return sum(isinstance(found, NDArray) for found in gc.get_objects())


def of_two_parameters(cls=SVRGTrainer):
    """A trainer of parameters that belong to no block: blocks have cycles of their own."""
    params = [gluon.Parameter(name, shape=shape) for name, shape in (("w", (4,)), ("b", (1,)))]
    for parameter in params:
        parameter.initialize()
    weight, bias = params

    def loss_of(index):
        X, y = array(PROBLEM.X[index], "float32"), array(PROBLEM.y[index, 0], "float32")
        return ((X * weight.data()).sum(axis=1) + bias.data() - y) ** 2

    return params, loss_of, cls(params, "sgd", {"learning_rate": 0.01, "momentum": 0.9})


def plain(loss_of, trainer):
    plain_step(trainer, lambda: loss_of(BATCHES[0]), 3)


def train(loss_of, trainer):
    """All that gives something out, and takes it back."""
    kit.train(trainer, loss_of, BATCHES)
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
def test_a_training_is_freed_where_one_of_gluon_is(use, no_collector):
    """On 1.9.1 a parameter knows its trainer, and the trainer its parameters."""
    expected = survivors(plain, gluon.Trainer)
    assert survivors(use, SVRGTrainer) == expected
    assert expected == ([] if hasattr(gluon.Parameter, "list_device") else ["trainer", "parameter"])


@pytest.mark.parametrize("use", [train, fail])
def test_refreshes_and_errors_leave_no_arrays(use, no_collector):
    """And a snapshot that is discarded leaves none that `gluon.Trainer` would not need."""
    _, loss_of, trainer = of_two_parameters()
    trainer.step(3, closure=lambda: loss_of(BATCHES[0]))
    plain_count = number_of_arrays()
    use(loss_of, trainer)
    before = number_of_arrays()
    for _ in range(3):
        use(loss_of, trainer)
    assert number_of_arrays() <= before
    trainer.discard_snapshot()
    assert number_of_arrays() <= plain_count
