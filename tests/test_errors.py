"""What users get wrong, interrupts, a second thread: messages say what to do, nothing changes."""

import contextlib
import gc
import itertools
import re
import sys
import threading
import weakref
from functools import partial
from pathlib import Path

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, failing, noticed, plain_step
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray
from plays import BATCHES, CASES, PROBLEM, WITH_STORED, Play
from problems import Dense, array, contexts, parameters, values

import gluon_svrg
from gluon_svrg import SAGATrainer, SAGTrainer, SVRGTrainer
from gluon_svrg.prox import L1
from gluon_svrg.saving import file_format
from gluon_svrg.saving.values import decode
from gluon_svrg.schedule import EveryEpochs

DATASET = gluon.data.ArrayDataset(PROBLEM.X, PROBLEM.y)
make = partial(kit.make, PROBLEM)


class Begun(Play):
    """A training before its first step, or with a snapshot, and its data in minibatches."""

    batches = None

    def __init__(self, held):
        super().__init__(CASES["SVRG"])
        loss_function, self.held = PROBLEM.loss_function(), held
        self.of_index = self.loss_of
        self.loss_of = lambda X, y: loss_function(self.net(X), y)
        self.batches = [(array(PROBLEM.X[i]), array(PROBLEM.y[i])) for i in BATCHES]
        if held:
            self.refresh()
            self.step()

    def closure(self):
        return self.loss_of(*self.batches[0])

    def refresh(self, closure=None, data=None, **options):
        closure = self.loss_of if closure is None else closure
        data = self.batches if data is None else data
        return self.trainer.update_full_grads(closure, data, **options)

    def step(self, closure=None, size=5):
        return self.trainer.step(size, closure=self.closure if closure is None else closure)

    def set(self, **attributes):
        for name, value in attributes.items():
            setattr(self.trainer, name, value)

    def correct(self, closure=None):
        return self.trainer.correct_grads(closure or self.closure)


@pytest.fixture(params=[False, True], ids=["before the first step", "with a snapshot"])
def begun(request):
    return Begun(request.param)


class Short(list):
    """Minibatches that end before their length."""

    def __iter__(self):
        return iter(self[1:])


def other_minibatches(begun):
    batches = itertools.cycle([begun.batches[0], begun.batches[-1]])
    return lambda *_: begun.loss_of(*next(batches))


def spoiled(begun, value):
    """The data, with a value that is not finite in the last minibatch."""
    X = PROBLEM.X[BATCHES[-1]].copy()
    X[1, 2] = value
    return [*begun.batches[:-1], (array(X), begun.batches[-1][1])]


def unrelated(loss):
    x = array(np.ones(loss.shape))
    x.attach_grad()
    return x * 2


def of_numpy(begun):
    return gluon.loss.L2Loss()(begun.net(begun.batches[0][0])[:, 0], PROBLEM.y[:5])


FOUR_OF_5 = "is 5, and this pass .*had 4 mini-batches"
ONE = r"The data is a \w+ of arrays.* this is one mini-batch"

#: Mistakes in data, in calls, and in what a closure is given, by the error that they get.
MISTAKES = {
    TypeError: {
        "a closure without arguments for a loader": (
            lambda b: b.refresh(b.closure, gluon.data.DataLoader(DATASET, batch_size=5)),
            r"with the 2 items of a batch, but its signature is \(\).*lambda: loss_of\(X, y\)"),
        "a closure with arguments for a step": (
            lambda b: b.step(b.loss_of),
            r"called with no arguments, .* \(X, y\).*closure=lambda: loss_of\(X, y\)"),
        "a data iter": (
            lambda b: b.refresh(data=mx.io.NDArrayIter(PROBLEM.X, PROBLEM.y, 5)),
            "each of its batches is one object"),
        "a dataset": (lambda b: b.refresh(data=DATASET), "whose items are samples"),
        "one minibatch": (lambda b: b.refresh(data=b.batches[0]), ONE),
        "one in a list": (lambda b: b.refresh(data=[*b.batches[0]]), ONE),
        "one of NumPy": (lambda b: b.refresh(data=(PROBLEM.X, PROBLEM.y)), ONE),
        "one array": (lambda b: b.refresh(data=b.batches[0][0]), ONE),
        "one without arguments": (lambda b: b.refresh(b.closure, b.batches[0]), ONE),
        "no iterable": (lambda b: b.refresh(data=3), "a list of mini-batches, got int"),
        "the other order": (lambda b: b.refresh(b.batches, b.loss_of), "in the other order"),
        "a flag": (lambda b: b.refresh(store_grads="x"), "must be True or False, got 'x'"),
        "a closure by position": (lambda b: b.trainer.step(5, b.closure), "is ignore_stale_grad"),
        "a loss": (lambda b: b.step(b.closure()), "must be a function that returns the loss"),
        "a loss for a refresh": (lambda b: b.refresh(b.closure()), "closure must be a function"),
        "a coefficient": (lambda b: b.set(coefficient="1"), "must be a number, got str"),
        "an index alone": (lambda b: b.trainer.step(5, batch_index=0), "needs the closure"),
    },
    ValueError: {
        "no data": (lambda b: b.refresh(data=[]), "no data"),
        "an iterator that is used up": (lambda b: b.refresh(data=iter([])), "no data"),
        "a lock": (lambda b: b.set(lock_random="yes"), "True, False or 'auto', got 'yes'"),
        "a size of 0": (lambda b: b.step(size=0), "batch_size must be finite, above 0, got 0"),
        "a size of nan": (lambda b: b.step(size=float("nan")), "batch_size must be"),
        "NumPy": (lambda b: b.refresh(data=[(PROBLEM.X, PROBLEM.y)]), "no array of MXNet, such as"),
        "a size to update with": (lambda b: b.trainer.update(0), "batch_size must be"),
    },
    FloatingPointError: {
        "a NaN": (lambda b: b.refresh(data=spoiled(b, np.nan)), "full gradient is not finite"),
        "infinity": (lambda b: b.refresh(data=spoiled(b, np.inf)), "full gradient is not finite"),
    },
    RuntimeError: {
        "a part of the data": (lambda b: b.refresh(data=Short(b.batches)), FOUR_OF_5),
        "other minibatches": (
            lambda b: b.refresh(other_minibatches(b)),
            r"\[5\] loss entries per device .* \[3\] when called again.*draws a mini-batch"),
    },
    mx.base.MXNetError: {
        "a dtype": (lambda b: b.step(lambda: b.net(array(PROBLEM.X, "float32"))), "have one dtype"),
        "integers": (lambda b: b.step(lambda: b.net(array(PROBLEM.X, "uint8"))), "have one dtype"),
    },
    AssertionError: {
        "labels of NumPy": (lambda b: b.step(lambda: of_numpy(b)), "no array of MXNet, such as"),
        "its own": (lambda b: b.step(failing(b.closure, 0, AssertionError)), "^mine$"),
    },
    OSError: {
        "data": (lambda b: b.refresh(data=map(failing(tuple, 1, OSError), b.batches)), "^mine$")},
}  # fmt: skip


@pytest.mark.parametrize("error, name", [(e, name) for e in MISTAKES for name in MISTAKES[e]])
def test_mistakes(begun, error, name):
    call, message = MISTAKES[error][name]
    with noticed(), begun.refuses(error, message):
        call(begun)
    begun.step()


def test_a_loader_that_goes_on_after_a_break(begun):
    """MXNet's does with workers, on 2.0."""
    data = gluon.data.SimpleDataset(np.arange(23))
    data = gluon.data.DataLoader(data, batch_size=5, num_workers=1, thread_pool=True)
    for _ in data:
        break

    def refresh():
        return begun.refresh(lambda index: begun.of_index(index.asnumpy().astype(int)), data)

    if mx.__version__.startswith("2"):
        with begun.refuses(RuntimeError, FOUR_OF_5):
            refresh()
    assert refresh() == begun.refresh()


#: What a closure returns, or does. Backward accepts none of it.
BAD = {
    "None": (lambda loss: None, TypeError, "returned None.*return loss"),
    "a number": (lambda loss: 0.5, TypeError, "returned float.*NDArray"),
    "more than losses": (lambda loss: [loss, 3], TypeError, "returned int, .*by other means"),
    "nothing": (lambda loss: (), ValueError, "empty tuple"),
    "detached": (lambda loss: loss.detach(), RuntimeError, "depends on no parameter"),
    "unrelated": (unrelated, ValueError, "none of the trainer's parameters"),
    "used up": (lambda loss: loss.backward() or loss, RuntimeError, r"backward\(\) itself"),
    "not computed": (lambda loss: array(np.ones(loss.shape)), RuntimeError, "cannot be differ"),
    "elsewhere": (lambda loss: loss.copyto(contexts(4)[3]), ValueError,
                  r"loss on \w+\(3\).*parameters are on \w+\(0\)"),
}  # fmt: skip


@pytest.mark.parametrize("bad, error, message", BAD.values(), ids=BAD)
@pytest.mark.parametrize("method", ["step", "correct", "refresh"])
def test_bad_closures(begun, method, bad, error, message):
    """In either pass of a step, at any minibatch of a refresh."""
    call = getattr(begun, method)
    for good_calls in (0, 1, 6) if method == "refresh" else range(1 + begun.held):
        left = itertools.repeat(True, good_calls)

        def closure(*batch, left=left):
            loss = begun.loss_of(*(batch or begun.batches[0]))
            return loss if next(left, False) else bad(loss)

        with noticed(), begun.refuses(error, message):
            call(closure)
    if begun.held:  # what the call has left behind is not taken for an estimate
        with begun.refuses(RuntimeError, "needs SVRG gradients"):
            begun.trainer.step(5)
    begun.step()


def test_before_shapes_are_known():
    net, loss_of, trainer = make(deferred=True)
    with pytest.raises(ValueError, match="no data"):
        trainer.update_full_grads(loss_of, iter([]))
    with pytest.raises(TypeError, match=r"with the 2 items of a batch, but its signature is \(\)"):
        trainer.update_full_grads(lambda: net(array(PROBLEM.X)), [(BATCHES[0], BATCHES[0])])
    for call in (lambda: trainer.step(5), lambda: trainer.update(5), trainer.allreduce_grads):
        with pytest.raises(RuntimeError, match=r"If none has passed .*pass step\(.*closure"):
            call()
    trainer.step(5, closure=lambda: loss_of(BATCHES[0]))


CALLS = {
    "step": lambda b: b.step(),
    "correct_grads": lambda b: b.correct(),
    "update_full_grads": lambda b: b.refresh(),
    "at_snapshot": lambda b: b.trainer.at_snapshot().__enter__(),
    "discard_snapshot": lambda b: b.trainer.discard_snapshot(),
    "save_states": lambda b: b.trainer.save_states("never-written"),
    "update": lambda b: b.trainer.update(5),
    "allreduce_grads": lambda b: b.trainer.allreduce_grads(),
}


@pytest.mark.parametrize("name", CALLS)
def test_inside_other_blocks(name):
    begun, message = Begun(held=True), rf"^{name}\(\) was called inside .*Take it out of the block"
    with autograd.record(), begun.refuses(RuntimeError, message):
        CALLS[name](begun)
    with begun.trainer.at_snapshot(), pytest.raises(RuntimeError, match=r"trainer\.at_snapshot"):
        CALLS[name](begun)
    begun.step()


test_arguments = kit.refusals(
    (lambda: SVRGTrainer(PROBLEM.network(), "sgd"), ValueError, "of Parameters"),
    (lambda: make(net=gluon.nn.Dense(1, in_units=3)), RuntimeError, "not initialized. Call net.in"),
    (lambda: make(settings={"lr": 1}), TypeError, "no argument 'lr'.*'learning_r"),
    (lambda: make(coeficient=1), TypeError, "^SVRGTrainer .* 'coeficient'. Did you mean 'coef"),
    (lambda: make(update_freq=2), TypeError, r"'update_freq'. Call update_full_gra"),
    (lambda: make(store_grads=True), TypeError, "Only a refresh takes it"),
    (lambda: make(optimizer="adam", settings={"beta_1": 0.9}), TypeError, "Did you mean 'beta1'"),
    (lambda: make(settings={"kwargs": {}}), TypeError, "SGD takes no argument 'kwargs'"),
    (lambda: make(optimizer="sdg"), ValueError, "no optimizer 'sdg'. Did you mean 'sgd'"),
    (lambda: make(optimizer=mx.optimizer.NAG), TypeError, "the class NAG, .* such as 'nag', or an"),
    (lambda: make(optimizer=0.1), TypeError, "is float, expected a name such as 'sgd'"),
    (lambda: make(lock_random=1), ValueError, "lock_random must be"),
    (lambda: make(coefficient="linear"), TypeError, "a number, got str"),
    (lambda: make(coefficient=np.nan), ValueError, "finite, at least 0, got nan"),
    (lambda: make(coefficient=True), TypeError, "got bool"),
    (lambda: make(coefficient=lambda index: -0.1), ValueError, "at least 0, got -0.1"),
)


def reshape(p):
    p._shape = (2, 2)
    p.initialize(force_reinit=True)


CHANGES = {
    "shape": (reshape, r"float64 \(2, 2\) .* now and was float64 \(5, 4\) .* then"),
    "device": (lambda p: getattr(p, "reset_device", p.reset_ctx)(contexts(2)[1]),
               r"on \w+\(1\) now and was .* on \w+\(0\) then"),
    "frozen": (lambda p: setattr(p, "grad_req", "null"), "with grad_req='null' now"),
    "dtype": (lambda p: p.cast("float32"), "float32 .* now and was float64 .* then"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_parameters_that_changed(change, message):
    begun = Begun(held=True)
    change(parameters(begun.net)[0])
    with pytest.raises(RuntimeError, match=f"changed since the snapshot: .*{message}.*Take a new"):
        begun.step()


def test_parameters_that_were_frozen_then():
    begun = Begun(held=False)
    weight = parameters(begun.net)[0]
    weight.grad_req = "null"
    begun.refresh()
    weight.grad_req = "write"
    with pytest.raises(RuntimeError, match="with grad_req='null' then"):
        begun.step()
    begun.refresh()
    begun.step()
    assert weight in begun.trainer.full_grads


def squares(begun, X, y):
    return (begun.net(X)[:, :1] - y) ** 2


def ask(begun, before_each_step, data=None):
    refresh = EveryEpochs(2)
    for _ in range(30):
        if refresh.due(begun.trainer):
            begun.refresh(data=data)
        for _ in range(1 if before_each_step else 3):
            begun.step()


def sum_then_each(begun, data=None):
    begun.refresh(lambda X, y, *_: begun.loss_of(X, y).sum(), data)
    begun.step()


def stored(begun, row):
    begun.refresh(store_grads=True)
    for _ in range(12):
        begun.trainer.step(5, closure=begun.closure, **row)


#: What trains, but probably not as it was meant to, and the warning.
WATCHED = {
    "a mean": (lambda b: b.step(lambda: b.closure().mean()), "one loss .* and batch_size is 5"),
    "output": (lambda b: b.step(lambda: (b.closure(), b.net(b.batches[0][0]))), "differentiated"),
    "a sum in a refresh": (sum_then_each, "one loss entry for a minibatch, and this step has 5"),
    "labels": (lambda b: b.refresh(lambda X, y: squares(b, X, y.reshape((1, -1)))),
               r"samples have the shape \(5, 5\)"),
    "rows": (lambda b: stored(b, {}), "each took two gradients"),
    "epochs": (lambda b: ask(b, True), "asked before each of the last 20 steps"),
    "a coefficient": (lambda b: b.set(coefficient=2), "coefficient is 2. .* and at 2 as much"),
}  # fmt: skip


@pytest.mark.parametrize("name", WATCHED)
def test_what_is_probably_a_mistake(name):
    """A warning, once; of a mean not at once, as one alone may be the last of an epoch."""
    begun, (program, message) = Begun(held=False), WATCHED[name]
    with noticed() as texts:
        for _ in range(1 if name == "a coefficient" else 12):
            program(begun)
    (text,) = texts
    assert re.search(message, text)


#: What looks like it, and is no mistake.
FINE = {
    "labels of that shape": lambda b: b.refresh(
        lambda X, y, z: squares(b, X, z), [[*b.batches[0], array(np.ones((5, 5)))]]
    ),
    "single samples": lambda b: sum_then_each(
        b, [[X[:1], y[:1], array(np.ones((3, 1)))] for X, y in b.batches]
    ),
    "dicts": lambda b: b.refresh(lambda batch: b.loss_of(*batch["Xy"]), [{"Xy": b.batches[0]}]),
    "rows": lambda b: stored(b, {"batch_index": 0}),
    "rows of a coefficient of 0": lambda b: (b.set(coefficient=0), stored(b, {})),
    "epochs": lambda b: ask(b, False),
    "epochs of a step": lambda b: ask(b, True, b.batches[:1]),
    "a large coefficient": lambda b: b.set(coefficient=1.9),
}


@pytest.mark.parametrize("name", FINE)
def test_no_false_alarm(name):
    with noticed() as texts:
        FINE[name](Begun(held=False))
    assert texts == []


@pytest.mark.parametrize("cls, devices", [(SAGATrainer, 2), (SAGTrainer, 1)])
def test_a_table_over_reshuffled_data_and_no_refresh(cls, devices):
    """The first row is computed again, at its own weights, when its minibatch comes again."""
    where, batches = contexts(devices), PROBLEM.batches(8)[:2]
    kwargs = {"net": kit.with_dropout(where, norm=True), "lock_random": True}
    _, loss_of, trainer = make("float32", where, cls=cls, rate=0.01, **kwargs)

    def epoch(order):
        for index, number in enumerate(order):
            trainer.step(8, closure=lambda: loss_of(batches[number]), batch_index=index)

    for _ in range(3):
        epoch([0, 1])  # no warning, and the check is not counted
    assert trainer.grad_evaluations == 3 * 16
    trainer.discard_snapshot()
    epoch([0, 1])
    with noticed() as texts:
        epoch([1, 0])
        epoch([0, 1])
    (text,) = texts
    assert "computed again at the weights of its first visit" in text
    assert "pass lock_random=True" in text


# --- interrupts, a second thread, and what is freed when a training ends -------------------------
SMALL = Dense("regression", hidden=(3,), samples=6, seed=33)
THREES = SMALL.batches(3)
DEADLINE = 60  # seconds, for what takes one
PAUSE = 0.5  # seconds, in which another thread begins


def test_gradients_are_put_back_though_mxnet_records():
    """After an interrupt at the end of `autograd.record`, it still does."""
    net, loss_of, trainer = kit.make(SMALL)
    trainer.correct_grads(lambda: loss_of(THREES[0]))
    before = kit.gradients(net)

    def data():
        yield THREES[0]
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


class Interrupted(Play):
    """A training that has a reference, and whatever of it a file or a user sees."""

    def __init__(self, case, path):
        mx.random.seed(1)
        settings = {"learning_rate": 0.1, "momentum": 0.9}
        with mx.name.NameManager():  # files of all have the same names
            super().__init__(case, SMALL, dtype="float32", settings=settings, lock_random=False)
        self.path, self.shares = path, [THREES]
        self.refresh()
        self.step_alone(0)
        self.step_alone(1)

    def method(self):
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


@pytest.mark.parametrize("prox", [None, {".*weight": L1(1e-3)}])
def test_an_interrupted_refresh_of_a_preconditioner(prox):
    """The next steps still have the old snapshot, as after an error in the pass."""
    ends = []
    for is_late in (False, True):
        own = {"preconditioner": gluon_svrg.Nystrom(2), "prox": prox}
        net, loss_of, trainer = kit.make(SMALL, optimizer="nag", settings={}, **own)

        def refresh(closure=loss_of, trainer=trainer):
            trainer.update_full_grads(closure, THREES * 9)

        refresh()
        kit.one_epoch(trainer, loss_of, THREES * 9 + THREES[:1])
        if is_late:
            assert interrupted(1, refresh, ["end_epoch"])
        else:
            with pytest.raises(KeyError):
                refresh(kit.failing(loss_of, 1))
        kit.one_epoch(trainer, loss_of, THREES[::-1] * 3)
        refresh()
        ends.append([*trainer.history[-1].values(), *values(net)])
    assert_unchanged(*ends)


STRIDE = 37
IN_MOVED = ("_run_update", "moved", "commit", "drop")  # after the weights have moved
MANY = [pytest.param(first, marks=pytest.mark.slow) for first in range(2, STRIDE + 1)]


@pytest.mark.parametrize("first", [1, *MANY])
@pytest.mark.parametrize("name", ["SVRG", "stored", "SAGA", "STORM"])
def test_an_interrupted_refresh(name, first, tmp_path):
    """At any line: there is all of the new snapshot, or none of it."""
    case, before = WITH_STORED[name], methods()
    play = Interrupted(case, tmp_path / "states")
    old = play.seen()
    play.refresh()
    new, kinds = play.seen(), []
    for number in itertools.count(first, STRIDE):
        play = Interrupted(case, tmp_path / "states")
        if not interrupted(number, play.refresh):
            break
        now = play.seen()
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
        play = Interrupted(WITH_STORED[name], tmp_path / "states")
        seen = [play.method()]
        is_complete = not interrupted(number, lambda: play.step_alone(0), functions)
        seen.append(play.method())
        for each in (0, 1, 0, 1)[seen[0] != seen[1] :]:
            play.step_alone(each)
        return is_complete, *seen, [play.method(), *map(np.ndarray.tobytes, values(play.net))]

    _, old, new, end = run(0)
    for number in itertools.count(1):
        is_complete, _, now, later = run(number)
        assert now == old or (now, later) == (new, end), number
        if is_complete:
            break
    assert old != new and number > 20


def test_an_interrupted_block_at_the_snapshot(tmp_path):
    play = Interrupted(WITH_STORED["SVRG"], tmp_path / "states")
    old = play.seen()

    def look():
        with play.trainer.at_snapshot():
            play.loss_of(THREES[0])

    for number in itertools.count(1):
        if not interrupted(number, look):
            break
        assert play.seen() == old, number
        look()
    assert number > 20


def methods():
    owners = gluon.Parameter, gluon.Block, gluon.HybridBlock, gluon.Trainer, NDArray, autograd
    return [dict(vars(owner)) for owner in owners]


def of_the_last_layer():
    """A trainer that looks for the parameters of the other one while it refreshes."""
    net = SMALL.network()
    trainer = SVRGTrainer(net[1].collect_params(), "sgd", {"learning_rate": 0.1})
    loss_of = SMALL.closure(net)

    def refresh(at_first=lambda: None):
        waits = iter([at_first])
        closure = lambda index: (loss_of(index), next(waits, int)())[0]  # noqa: E731
        trainer.update_full_grads(closure, THREES)

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
        X, y = array(SMALL.X[index], "float32"), array(SMALL.y[index, 0], "float32")
        return ((X * weight.data()).sum(axis=1) + bias.data() - y) ** 2

    return params, loss_of, cls(params, "sgd", {"learning_rate": 0.01, "momentum": 0.9})


def plain(loss_of, trainer):
    plain_step(trainer, lambda: loss_of(THREES[0]), 3)


def train(loss_of, trainer):
    """All that gives something out, and takes it back."""
    kit.train(trainer, loss_of, THREES)
    with trainer.at_snapshot():
        loss_of(THREES[0])
    trainer.correct_grads(lambda: loss_of(THREES[0]))
    assert trainer.snapshot and trainer.full_grads
    trainer.update(3)


def fail(loss_of, trainer):
    """A refresh that raises, after one that did not; and a step."""
    train(loss_of, trainer)
    for call in (
        lambda: trainer.update_full_grads(kit.failing(loss_of, 1), THREES),
        lambda: trainer.step(3, closure=kit.failing(lambda: loss_of(THREES[0]), 1)),
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
    trainer.step(3, closure=lambda: loss_of(THREES[0]))
    plain_count = number_of_arrays()
    use(loss_of, trainer)
    before = number_of_arrays()
    for _ in range(3):
        use(loss_of, trainer)
    assert number_of_arrays() <= before
    trainer.discard_snapshot()
    assert number_of_arrays() <= plain_count
