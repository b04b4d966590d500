"""The preconditioner: beside its twin in NumPy, and what must hold whatever the data are."""

import itertools
import re

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit import amp, assert_unchanged, split_at
from mxnet import gluon
from plays import STATIC, TWO
from problems import IS_NUMPY_LIKE, Dense, Tied, Words, array, distance, flat, parameters, values

from gluon_svrg import Nystrom, SVRGTrainer, saving
from gluon_svrg.curvature.direction import Direction
from gluon_svrg.curvature.nystrom import NystromApproximation, inverse_of
from gluon_svrg.curvature.preconditioner import Step, _products
from gluon_svrg.curvature.step_size import DEFAULT, StepSizeController, Sums
from gluon_svrg.curvature.threads import one_thread, openblas
from gluon_svrg.prox import L1, Prox

REGRESSION = Dense("regression", samples=205, features=6, seed=3)
CLASSES = Dense("classification", samples=205, seed=4)
LAYERS = Dense("classification", hidden=(4,), samples=205, seed=5)  # not convex
STEEP = Dense("regression", samples=205, features=1, seed=3)
STEEP.X *= 20  # along one of two weights
RARE = Dense("regression", samples=205, features=6, seed=3)
RARE.X *= np.where(np.arange(205) % 50 == 7, 30, 1)[:, None]
BATCHES = CLASSES.batches(9)  # 205 = 22 * 9 + 7
UNSCALED = ("unscaled early", "unscaled")  # by the user, before the reduction or after it


class Run:
    """A trainer, by default of a network with BatchNorm."""

    batches = BATCHES

    def __init__(self, problem=CLASSES, net=None, dtype="float64", devices=None, **kwargs):
        kwargs = {"optimizer": "nag", "settings": {}, "preconditioner": Nystrom(), **kwargs}
        net, self.devices = net or with_norm(), devices
        self.net, self.loss_of, self.trainer = kit.make(problem, dtype, devices, net=net, **kwargs)
        if devices:
            self.loss_of = problem.closure(net, dtype, devices, split_at([0.3]))

    @property
    def controller(self):
        return self.trainer._method.preconditioner.controller

    def refresh(self, **kwargs):
        return self.trainer.update_full_grads(self.loss_of, self.batches, **kwargs)

    def jump(self, factor=30.0):
        """Move far away, as a rate that is too high does."""
        for p in self.trainer._params:
            for data in p.list_data():
                data *= factor

    def play(self, actions):
        for action in actions:
            if isinstance(action, str):
                getattr(self, action)()
            else:
                kit.one_epoch(self.trainer, self.loss_of, self.batches[:action])

    def everything(self):
        found, momentum = kit.everything(self.trainer, self.net), self.trainer.optimizer.momentum
        return {**found, "history": self.trainer.history, "momentum": momentum}


def with_norm(units=(4, 6)):
    layers = gluon.nn.Dense(6, in_units=units[0]), gluon.nn.BatchNorm(in_channels=units[1])
    net = kit.sequence(*layers, gluon.nn.Dense(3, in_units=units[1]))
    net.cast("float64")
    return net


class Pair(Run):
    """A trainer and its twin, from the same weights; `how` tells how an update is made."""

    def __init__(self, problem=REGRESSION, optimizer="nag", how="step", *, rank=50, size=None,
                 dtype="float64", devices=None, l1=0.0, wd=0.05):  # fmt: skip
        self.how, self.size, net = how, size, problem.network(dtype, devices)
        kwargs = {"settings": {"wd": wd}, "preconditioner": Nystrom(rank)}
        if l1:
            kwargs["prox"] = {net[0].weight: L1(l1)}
        super().__init__(problem, net, dtype, devices, optimizer=optimizer, **kwargs)
        if how == "means":
            loss_of, self.loss_of = self.loss_of, lambda index: loss_of(index).mean()
        if how in ("scaled", *UNSCALED):  # by AMP
            self.scaler = kit.scale_losses(self.trainer)
        net[0].bias.wd_mult = 2.0
        for p in parameters(net):
            p.grad_req = "add" if how == "add" else "write"
        self.order = [parameters(net).index(p) for p in self.trainer._params]
        shapes = [problem.initial[n].shape for n in self.order]
        ends = np.cumsum([*map(np.prod, shapes)])[:-1]

        def mean(w, batches):
            pieces = [x.reshape(shape) for x, shape in zip(np.split(w, ends), shapes)]
            weights = [pieces[self.order.index(n)] for n in range(len(pieces))]
            found = [problem.loss_and_gradient(weights, index) for index in batches]
            if how == "means":
                found = [(x / n, [grad / n for grad in grads], 1) for x, grads, n in found]
            losses, grads, counts = zip(*found)
            total = sum(counts)
            return sum(losses) / total, sum(map(self.vector, grads)) / total, total

        decays = [np.full(p.shape, oracle.rounded(p.wd_mult * wd)) for p in parameters(net)]
        l1s = [np.full(p.shape, l1 * (p is net[0].weight)) for p in parameters(net)]
        about = rank, float(np.finfo(dtype).eps), optimizer, DEFAULT
        self.make_twin = lambda: oracle.Nystrom(
            mean, self.vector(values(net)), self.vector(decays), *about,
            oracle.L1InMetric(self.vector(l1s)),
        )  # fmt: skip
        self.twin = self.make_twin()

    def vector(self, arrays):
        """In the order of the trainer, by which random vectors are drawn."""
        return flat([arrays[n] for n in self.order])

    def refresh(self):
        self.twin.refresh(BATCHES)
        return super().refresh(store_grads=self.how == "stored")

    def jump(self, factor=30.0):
        self.twin.w = factor * self.twin.w
        if not self.twin.made:
            self.twin.start = self.twin.w
        super().jump(factor)

    def step(self, *numbers):
        batches, row = [BATCHES[n] for n in numbers], {}
        size = self.size or sum(map(len, batches))
        if self.how in ("scaled", *UNSCALED):
            scale = 2.0 ** (9 + self.trainer._progress.steps % 5)
            self.scaler._loss_scale = self.scaler._next_loss_scale = scale
        if self.how in ("halves", "add", *UNSCALED):
            for index in batches:
                self.trainer.correct_grads(lambda: self.loss_of(index))
            if self.how == "unscaled early":
                amp.unscale(self.trainer)
            self.trainer.allreduce_grads()
            if self.how == "unscaled":
                amp.unscale(self.trainer)
            self.trainer.update(size)
        else:
            if self.how == "stored" and self.trainer.has_snapshot:
                row = {"batch_index": numbers[0]}
            self.trainer.step(size, closure=lambda: self.loss_of(*batches), **row)
        if self.how == "add":
            kit.clear(self.net)
        self.twin.step(*batches, size=1 if self.how == "means" and not self.size else size)

    def epoch(self, count=23):
        together = 2 if self.how == "add" else 1
        for first in range(0, count, together):
            self.step(*range(first, min(first + together, count)))

    def check(self, tolerance):
        """Weights on each device, rate, momentum, L, N, noise budget and P."""
        found, twin = self.controller, self.twin
        for device in self.devices or [None]:
            assert distance([self.vector(values(self.net, device))], [twin.w]) < tolerance
        numbers = found.rate, self.trainer.optimizer.momentum, found.L, found.N, found.noise_budget
        expected = twin.rate, twin.momentum, twin.L, twin.N, twin.T
        np.testing.assert_allclose(numbers, expected, 10 * tolerance)
        P = [oracle.multiplied(found.P, e) if found.P else e for e in np.eye(len(twin.w))]
        assert distance(P, twin.P) < 10 * tolerance

    def train(self, epochs=5, plain=True, tolerance=1e-8):
        """It stays with its twin; the last line of `history` is what the twin knows, too."""
        for epoch in range(epochs):
            if epoch or not plain:
                self.refresh()
                line, twin = self.trainer.history[-1], self.twin
                names = ("learning_rate", "momentum", "curvature", "noise")
                expected = twin.rate, twin.momentum, twin.L, twin.N
                np.testing.assert_allclose([line[n] for n in names], expected, 10 * tolerance)
                assert self.trainer.learning_rate == line["learning_rate"]
            self.epoch()
            self.check(tolerance)
        assert sum(line["went_back"] for line in self.trainer.history) == self.twin.backs


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("optimizer", ["nag", "sgd"])
@pytest.mark.parametrize("problem, bound", [(REGRESSION, 1e-8), (CLASSES, 1e-7), (LAYERS, 1e-5)])
def test_trajectory(problem, bound, optimizer, plain):
    """Where the loss is not convex, rounding grows from step to step."""
    Pair(problem, optimizer).train(plain=plain, tolerance=bound)


@pytest.mark.filterwarnings("ignore:An epoch has")  # where two mini-batches make one step
@kit.table(
    "settings",
    {"rank": 0},
    {"rank": 2},
    {"problem": STEEP},
    *({"how": how, "l1": l1} for how in ("scaled", *UNSCALED) for l1 in (0.0, 0.02)),
    {"how": "unscaled", "size": 1000},
    {"l1": 0.02},
    {"l1": 0.02, "optimizer": "sgd", "devices": TWO},
    {"l1": 0.02, "problem": LAYERS},
    {"l1": 0.02, "how": "halves", "size": 1},
    {"problem": RARE},
    {"wd": 40.0},
    *({"how": how, "devices": TWO} for how in ("step", "halves", "add", "stored")),
    *({"how": how, "size": size} for how in ("step", "means") for size in (1, 1000)),
    *({"problem": problem, "dtype": "float32"} for problem in (REGRESSION, CLASSES)),
)
def test_trajectory_in_every_way(settings):
    """The direction depends on the loss entries of a minibatch, and not on the batch size."""
    tolerance = 1e-5 if settings.get("problem") is LAYERS else 1e-7
    Pair(**settings).train(tolerance=5e-4 if "dtype" in settings else tolerance)


@kit.table(
    "backs, script",
    (0, [19, 2, 18, *("refresh", 0, 1, 2), *("refresh", 0, 1, 2, 3), "refresh", "refresh", 4]),
    (1, [1.1, 0, 12 / 11, "refresh"]),  # the loss has fallen, but not with the weight decay
    (0, [1.2, 0, 11 / 12, "refresh"]),  # it has risen, but not with the weight decay
    (0, [*[*range(23), "refresh"] * 3, *range(23), 1.1, *[3] * 13]),  # a small rise
    (0, [*range(23), "refresh", *range(8), 1.6, *[3] * 13]),  # to below the loss at the start
    (0, [*range(23), "refresh", 2.6, *[3] * 9]),  # a rise of three steps, not of eight
    (0, [*range(23), "refresh", *[22] * 6]),  # smaller mini-batches than before
    (1, [*range(4), "refresh"] * 4),  # a pair of steps before and after L is known
    (0, [*range(16), "refresh", *[*range(20)] * 3]),  # the rate falls, rises, and falls again
)
def test_trajectory_by_hand(backs, script):
    """Refreshes, also in mid-measurement; jumps by factors; steps, the largest gradient first."""
    pair = Pair()
    for action in script:
        if action == "refresh":
            pair.refresh()
        else:
            (pair.jump if isinstance(action, float) else pair.step)(action)
    pair.check(1e-8)
    assert pair.twin.backs == backs


def test_the_largest_curvature_in_float32():
    """Where P has all directions, its inverse along one is no difference of far larger numbers."""
    run = Run(REGRESSION, REGRESSION.network("float32"), "float32")
    run.play([23, "refresh", 1])
    part, size = run.trainer._method.preconditioner, sum(p.data().size for p in run.trainer._params)
    U, _ = np.linalg.qr(np.random.RandomState(0).randn(size, size))
    part.controller.P = P = NystromApproximation(U.T, np.array([1e3, *np.ones(size - 1)]), 1e-5)
    part._upload()
    v = 100 * U[:, 0]
    put(part._network, v)
    part._direction.apply(1.0, 1.0, 1.0, 0.0)
    found = flat([p.grad().asnumpy() for p in run.trainer._params])
    np.testing.assert_allclose(found, inverse_of(P)(v), rtol=0, atol=1e-4)


def put(network, row):
    """Set the gradients of a network."""
    ends = np.cumsum([p.data().size for p in network.trainable])
    for p, piece in zip(network.trainable, np.split(row, ends[:-1])):
        p.grad()[:] = array(piece.reshape(p.shape), p.dtype)


def test_a_rise_of_the_penalty_is_one_of_the_objective():
    run = Run()
    run.play([23, "refresh", 1])
    part = run.trainer._method.preconditioner
    part._direction.products(1)[:] = [1.0, 1.0, 1.0, 2.0, 0.0]  # the slope is the fourth
    part._pending = [Step(3.0, None, None, None)]
    part.read(is_refresh=True)
    assert part.controller.loss_increases[-1] == 2 + 3 + 1 / 2


def test_products_of_0_6():
    eight = Sums(squared=0.0, cross=3.0, along=4.0, moved=5.0, slope=6.0)
    assert Sums(*_products({"products": np.arange(8.0).reshape(2, 4)})) == eight
    assert Sums(*_products({"products": np.array([[7.0]])})) == Sums(7.0)
    with pytest.raises(KeyError):
        _products({"products": np.zeros(6)})


def test_threads_of_products():
    """In one thread where a penalty is computed, and as many as before after that."""
    get, assign = openblas() or pytest.skip("NumPy has another library than OpenBLAS")
    before = get()
    try:
        assign(2)
        with pytest.raises(KeyError), one_thread():
            assert get() == 1
            raise KeyError
        assert get() == 2
    finally:
        assign(before)


def test_at_the_minimum():
    """Rounding is no curvature, and no reason to go back or for a new sketch."""
    run = Run(REGRESSION, REGRESSION.network("float32"), "float32", settings={"wd": 0.01})
    run.play([23, "refresh"] * 24)
    first, *_, last = run.trainer.history
    assert last["curvature"] < first["curvature"] and run.trainer.num_snapshots == 24
    assert run.controller.probes == 2


@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("when", ["before the first refresh", "at a refresh", "in mid-epoch"])
def test_going_back(when, devices):
    """To the snapshot or to the start; the training goes on from there, and more slowly."""
    pair = Pair(devices=devices)
    start = values(pair.net)
    pair.epoch()
    if when != "before the first refresh":
        pair.refresh()
        pair.epoch()
        lowest, start = pair.refresh(), values(pair.net)
        pair.epoch(11)
        for each in (pair.controller, pair.twin):  # then L is kept, and N learned
            each.L, each.N = 10 * each.L, each.N / 10
    taken, L = pair.trainer.num_snapshots, pair.controller.L_at_reset
    if when == "in mid-epoch":
        pair.jump(10.0)
        for _ in range(14):
            pair.step(0)
        assert pair.twin.backs
        pair.check(1e-8)
    else:
        pair.jump()
        loss = pair.refresh()
        assert_unchanged(values(pair.net), start)
        assert (pair.trainer.inner_steps, pair.trainer.history[-1]["went_back"]) == (0, 1)
    if when == "at a refresh":
        assert (loss, pair.trainer.num_snapshots) == (lowest, taken)
        assert pair.trainer.history[-1]["mean_loss"] == lowest
        assert pair.controller.L >= 4 * L
    pair.train(plain=when != "before the first refresh")
    assert pair.controller.loss < pair.controller.first_loss


def test_a_step_that_fails():
    """Without an update nothing is learned from it; and from an update, once."""
    pair = Pair()
    pair.train(3)
    part = pair.trainer._method.preconditioner
    part.commit(part._pending[-1])  # as an interrupt repeats it
    with pytest.raises(ZeroDivisionError):
        pair.trainer.step(kit.Indivisible(9), closure=lambda: pair.loss_of(BATCHES[4]))
    pair.train(2, plain=False)


@pytest.mark.parametrize("at, calls", [("_reset", 0), ("_reset", 1), ("upload", 0), ("upload", 3)])
def test_an_interrupt_while_it_learns(at, calls, monkeypatch):
    """The next step sets the rate, and gives the direction the P of a sketch or an outlier."""
    run = Run(RARE, RARE.network())
    run.play([11, "refresh"])
    cls, counted = {"_reset": StepSizeController, "upload": Direction}[at], itertools.count()
    function = getattr(cls, at)

    def interrupted(*args, **kwargs):
        if next(counted) == calls:
            raise KeyboardInterrupt
        function(*args, **kwargs)

    monkeypatch.setattr(cls, at, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.play([60])
    part = run.trainer._method.preconditioner
    run.play([1])
    T = part.controller.P.inverse_root()[1]
    np.testing.assert_allclose(part._direction.given["T"].asnumpy(), T, rtol=1e-5)
    run.play([11])
    assert part.controller.probe is None and part.controller.rate > 0


@pytest.mark.parametrize("calls", [2, 3])
def test_an_interrupt_while_it_learns_what_a_sample_is(calls, monkeypatch):
    """The next update tells it again."""
    run, counted, index = Run(settings={"wd": 0.5}), itertools.count(), BATCHES[0]

    def interrupted(*args, **kwargs):
        if next(counted) == calls:  # the first two are those of `bind`
            raise KeyboardInterrupt
        upload(*args, **kwargs)

    upload = Direction.upload
    monkeypatch.setattr(Direction, "upload", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.trainer.step(5, closure=lambda: run.loss_of(index))
    run.trainer.step(5, closure=lambda: run.loss_of(index))
    part = run.trainer._method.preconditioner
    np.testing.assert_array_equal(part._direction.given["wd"].asnumpy()[0], part.decays)
    assert part.per_sample == len(index) / 5


def test_a_refresh_that_fails():
    """Nothing is learned from it, also not from the steps before it."""
    run, plain = (Run(RARE, RARE.network()) for _ in range(2))
    for each in (run, plain):
        each.play([23, "refresh", 23, "refresh", 11])
    with pytest.raises(KeyError):
        run.trainer.update_full_grads(kit.failing(run.loss_of, 3), run.batches)
    assert_unchanged(run.everything(), plain.everything())


@pytest.mark.parametrize("prox", [None, L1(0.01)])
def test_an_overflow_of_amp(prox):
    """The scaler sees it, in a step as in a refresh, and the weights do not go back."""
    run = Run(net=CLASSES.network(), prox=prox)
    run.play(["refresh", 23, "refresh", 11])
    scaler, trainer = kit.scale_losses(run.trainer), run.trainer

    def unscaled_step():
        trainer.correct_grads(lambda: 100 * run.loss_of(BATCHES[0]))
        amp.unscale(trainer)
        trainer.step(9)

    actions = (lambda: run.play([1]), 1023), (unscaled_step, 1021), (run.refresh, 1023)
    for action, power in actions:
        before = values(run.net)
        scaler._loss_scale = scaler._next_loss_scale = 2.0**power
        action()
        assert_unchanged(values(run.net), before)
        assert scaler._next_loss_scale < 2.0**power
    assert run.trainer.num_snapshots == 3 and not run.trainer.history[-1]["went_back"]


def test_rounding_of_losses_is_no_divergence():
    """Losses in float32 of weights in float64, as Gluon's are on MXNet 2.0: at the minimum."""
    run = Run(net=CLASSES.network())
    loss_of = run.loss_of
    run.loss_of = lambda index: loss_of(index).astype("float32")
    run.play([23, "refresh"] * 15)
    assert not any(line["went_back"] for line in run.trainer.history)
    assert run.trainer.num_snapshots == 15


@pytest.mark.parametrize("plain", [True, False])
def test_a_new_start(plain):
    """After `discard_snapshot` nothing is left of what was learned; the rank stays."""
    pair = Pair(rank=2)
    pair.train(3)
    pair.trainer.discard_snapshot()
    pair.twin = pair.make_twin()
    pair.train(3, plain)


def test_a_layer_that_is_frozen_no_more():
    """All is measured anew, with its weights."""
    run = Run(LAYERS, LAYERS.network())
    run.net[0].weight.grad_req = "null"
    run.play([3])
    run.net[0].weight.grad_req = "write"
    run.play(["jump", "refresh", 5])
    assert run.controller.P.U.shape == (3, 35)


@pytest.mark.parametrize("prox", [None, L1(0.0)])
@pytest.mark.parametrize("factor", [np.nan, 1e25])  # float64 could hold the square of the latter
@pytest.mark.parametrize("actions", [[3], [3, "refresh", 11]])
def test_a_gradient_that_is_not_finite(actions, factor, prox):
    """Its step is left out, with one warning; after four in a row the weights go back."""
    run, plain = (Run(net=CLASSES.network(), prox=prox) for _ in range(2))
    for each in (run, plain):
        each.play(actions)
    loss_of = run.loss_of
    for count in (1, 3, 4):
        run.loss_of = lambda index: factor * loss_of(index)
        with kit.noticed() as texts:
            run.play([count])
            run.loss_of = loss_of
            run.play([6])
        assert [text[:28] for text in texts] == ["The gradient of a mini-batch"] * (count == 1)
        assert run.controller.rollbacks == (count == 4)
        plain.play([6])
        if count == 1:
            assert distance(values(run.net), values(plain.net)) < 0.2


def test_a_clip_in_a_file_of_gluon_trainer(tmp_path):
    """The direction is not clipped, as its rate and momentum are not those of the file."""
    run, plain = Run(), CLASSES.network()
    trainer = gluon.Trainer(plain.collect_params(), "nag", {"momentum": 0.9, "clip_gradient": 1.0})
    trainer.save_states(str(tmp_path / "states"))
    run.play([11, "refresh", 3])
    run.trainer.load_states(tmp_path / "states")
    run.play([1])
    assert run.trainer.optimizer.clip_gradient is None


@pytest.mark.parametrize("actions", [[3], [3, "refresh", 3]])
def test_a_full_gradient_that_is_not_finite(actions):
    """It is told, and nothing changes, before the first snapshot as well."""
    run = Run(net=CLASSES.network())
    run.play(actions)
    loss_of, before = run.loss_of, run.everything()
    run.loss_of = lambda index: (np.nan if index[0] == 9 else 1.0) * loss_of(index)
    with pytest.raises(FloatingPointError, match=r"full gradient is not finite.*No snapshot"):
        run.refresh()
    assert_unchanged(before, run.everything())
    run.loss_of = loss_of
    run.play([23, "refresh"])


def test_all_values_go_back():
    """The statistics of BatchNorm, too."""
    run = Run()
    parameters = [*run.net.collect_params().values()]
    before = [p.data().asnumpy() for p in parameters]
    run.play([3])
    run.jump(np.inf)
    run.refresh()
    assert_unchanged(before, [p.data().asnumpy() for p in parameters])


@kit.table(
    "actions, entries",
    ([3], 3 * 9 + 2 * 4 * 9),  # four gradients for three products, of two minibatches
    ([3, "refresh"], 99 + 205),
    ([3, "refresh", 5], 304 + 5 * 2 * 9 + 2 * 4 * 9 + 2 * 4 * 9),  # and a sketch of rank 3
    ([3, "jump", "refresh"], 99 + 205),
)
def test_all_gradients_are_counted(actions, entries):
    run = Run(net=CLASSES.network(), lock_random=False)
    run.play(actions)
    assert run.trainer.grad_evaluations == entries
    run.loss_of, start = kit.counted(run.loss_of), run.trainer._method.preconditioner.start
    run.refresh()
    assert len(run.loss_of.calls) == 23 * (1 if start is None else 2)  # compared with the start


#: What is done before a file is written.
PHASES = {
    "before the first step": [],
    "in the first measurement": [1],
    "before the first refresh": [4],
    "before the sketch": [3, "refresh"],
    "in mid-sketch": [3, "refresh", 1],
    "between the sketch and the powers": [3, "refresh", 2],
    "in mid-epoch": [3, "refresh", 11],
    "in a long epoch, with steps that are not read": [23, "refresh", 23, "refresh", 11],
    "at a refresh": [3, "refresh", 23, "refresh"],
    "gone back at a refresh": [3, "refresh", 23, "jump", "refresh"],
    "gone back in mid-epoch": [3, "refresh", 11, "jump", 14, 2],
    "gone back to the start": [3, "jump", "refresh", 1],
    "before the second sketch": ["refresh", 9, "refresh", 3, "refresh", 1],
}


@pytest.mark.parametrize("phase", PHASES)
def test_resumed_in_every_phase(phase, tmp_path):
    """Into a new trainer, into one with deferred parameters, and into one that was used."""
    straight, used, more = Run(), Run(), [14, "refresh", 23, "refresh", 5]
    straight.play(PHASES[phase])
    straight.trainer.save_states(tmp_path / "states")
    straight.net.save_parameters(str(tmp_path / "weights"))
    straight.play(more)
    used.play([2, "refresh", 5])
    for run in (Run(), Run(net=with_norm(units=(0, 0))), used):
        run.trainer.load_states(tmp_path / "states")
        run.net.load_parameters(str(tmp_path / "weights"))
        run.play(more)
        assert_unchanged(straight.everything(), run.everything())


def test_what_does_not_fit_changes_nothing(tmp_path, monkeypatch):
    """A file of another rank, or of no preconditioner, or with a crafted state."""
    run, path = Run(), tmp_path / "states"
    run.play([3, "refresh", 11])
    part, before = run.trainer._method.preconditioner, run.everything()
    for other in (Run(preconditioner=Nystrom(2)), Run(preconditioner=None)):
        other.play([3])
        for these, those in ((run, other), (other, run)):
            these.trainer.save_states(path)
            with pytest.raises(ValueError, match=r"a trainer of SVRG.*, and this one uses SVRG"):
                those.trainer.load_states(path)
    good = part.state()
    nan = saving.ByParameter((n, np.full_like(x, np.nan)) for n, x in good["P"]["U"].items())
    crafted = {"P": {**good["P"], "z": 0.0}}, {"start": {"weights": nan, "frozen": {}}}
    without = ({name: good[name] for name in good if name != key} for key in good)
    for bad in (*({**good, **own} for own in crafted), *without):
        with monkeypatch.context() as patch:
            patch.setattr(part, "state", lambda: bad)
            run.trainer.save_states(path)
        with pytest.raises(ValueError, match="Nothing was changed"):
            run.trainer.load_states(path)
    assert_unchanged(before, run.everything())


SGD, SCHEDULER = mx.optimizer.SGD, mx.lr_scheduler.FactorScheduler(3)
SPARSE, ON_2 = Words("sparse gradient", 205), int(IS_NUMPY_LIKE)  # MXNet 2.0 has no sparse arrays


def play(change=lambda run: None, steps=16, **kwargs):
    run = Run(**{"net": CLASSES.network("float32"), **kwargs}, dtype="float32")
    change(run)
    run.play([steps, "refresh"])


def play_with_loss(of_outputs, steps=16):
    def change(run):
        run.loss_of = lambda index: of_outputs(run.net(array(CLASSES.X[index], "float32")))

    play(change, steps)


def change_too_early():
    run = Run()
    run.trainer.correct_grads(lambda: run.loss_of(BATCHES[0]))
    kit.clear(run.net)
    run.trainer.allreduce_grads()


test_errors = kit.refusals(
    (lambda: Nystrom(2.5), TypeError, "rank must be a whole number"),
    (lambda: Nystrom(-1), ValueError, "rank must be 0 or more"),
    (lambda: Run(preconditioner=Nystrom), TypeError, r"as in Nystrom\(\), got type"),
    (lambda: Run(optimizer="adam"), ValueError, "'nag' or 'sgd', got Adam"),
    (lambda: Run(optimizer=mx.optimizer.SGLD()), ValueError, "'nag' or 'sgd', got SGLD"),
    (lambda: Run(settings={"learning_rate": 0.1}), ValueError, "sets the learning_rate"),
    (lambda: Run(settings={"momentum": 0.9}), ValueError, "sets the momentum itself"),
    (lambda: Run(optimizer=SGD(lr_scheduler=SCHEDULER)), ValueError, "with lr_scheduler"),
    (lambda: Run(settings={"lr_scheduler": SCHEDULER}), ValueError, "with lr_scheduler"),
    (lambda: Run(optimizer=SGD(clip_gradient=1.0)), ValueError, "with clip_gradient"),
    (lambda: Run(settings={"clip_gradient": 1.0}), ValueError, "with clip_gradient"),
    (lambda: Run(compression_params={"type": "2bit"}), ValueError, "with compression"),
    (lambda: Run(update_on_kvstore=True), ValueError, "update_on_kvstore=True"),
    (lambda: Run(kvstore="dist_async"), ValueError, "'dist_async' never reduces"),
    (lambda: Run(coefficient=0.5), ValueError, "needs coefficient=1"),
    (lambda: setattr(Run().trainer, "coefficient", 0.5), ValueError, "needs coefficient=1"),
    (lambda: Run(prox=Prox()), NotImplementedError, "needs a method value"),
    (lambda: Run(optimizer=SGD(learning_rate=0.3)), ValueError, "sets the learning_rate"),
    (lambda: Run(optimizer=mx.optimizer.NAG(momentum=0.5)), ValueError, "sets the momentum"),
    (lambda: Run().trainer.set_learning_rate(1), RuntimeError, "Leave set_learning_rate"),
    (lambda: Run().trainer.step(9), RuntimeError, r"step\(\) needs SVRG grad"),
    (lambda: Run().trainer.allreduce_grads(), RuntimeError, r"grads\(\) needs SVRG gr"),
    (change_too_early, RuntimeError, "SVRG computes the optimizer's"),
    (lambda: play(lambda run: run.net.cast("float16")), TypeError, "got float16"),
    (lambda: play(lambda run: run.net[0].bias.cast("float64")), TypeError, "and float64"),
    (lambda: play(lambda run: setattr(run.net[0].bias, "lr_mult", 0.5)), ValueError, "an lr_mult"),
    *[(lambda: play(problem=SPARSE, net=SPARSE.network()), ValueError, "is sparse")][ON_2:],
    (lambda: play_with_loss(lambda out: out), FloatingPointError, "No direction"),
    (lambda: play_with_loss(lambda out: -(out**2)), FloatingPointError, "No direction"),
    (lambda: play_with_loss(lambda out: out * np.nan), FloatingPointError, "data finite"),
    (lambda: play_with_loss(lambda out: out * np.nan, 0), FloatingPointError, "full gradient"),
    (lambda: play_with_loss(lambda out: (out * 1e30) ** 2), FloatingPointError, "data finite"),
)


def test_another_weight_decay():
    """It is told at the next refresh, and `discard_snapshot` begins anew with it."""
    run = Run()
    run.play([3, "refresh", 9])
    run.trainer.optimizer.wd = 0.3
    before = run.everything()
    with pytest.raises(ValueError, match=r"weight decay has changed.*Call discard_snapshot\(\)"):
        run.refresh()
    assert_unchanged(before, run.everything())
    run.trainer.discard_snapshot()
    run.play([3, "refresh", 9])


@kit.table(
    "rank, before, steps",
    (50, ["flat", 6, "curved", 2, "refresh"], 0),
    (0, [*["empty"] * 12, 2, "refresh"], 0),
    (50, ["refresh", 9, "refresh", 9, "refresh"], 2),  # until there is a second sketch
)
def test_flat_minibatches(rank, before, steps):
    """They and empty ones tell nothing; the training goes on with what is known, or a bound."""
    run = Run(preconditioner=Nystrom(rank))
    loss_of = run.loss_of
    run.empty = lambda: run.trainer.step(1, closure=lambda: loss_of(BATCHES[0])[:0])
    run.flat = lambda: setattr(run, "loss_of", lambda index: 0 * loss_of(index))
    run.curved = lambda: setattr(run, "loss_of", loss_of)
    run.play(before)
    L, P = run.controller.L, run.controller.P
    run.play([steps, "flat", 23])
    found = run.controller
    expected = L * (P.S[0] + P.rho) / found.P.rho if steps else L
    assert 0 < expected == pytest.approx(found.L) and found.probe is None
    assert (found.P is P) == (not steps)


#: Layers, and the shape in which they take 4 features.
NETWORKS = {
    "dropout": (lambda: [gluon.nn.BatchNorm(), gluon.nn.Dense(9), gluon.nn.Dropout(0.5)], (4,)),
    "convolution": (lambda: [gluon.nn.Conv2D(4, 2), gluon.nn.BatchNorm()], (1, 2, 2)),
    "LSTM": (lambda: [gluon.rnn.LSTM(4, layout="NTC")], (2, 2)),
}
WAYS = [(name, "auto", how) for name in (*NETWORKS, "shared") for how in (None, STATIC)]


@pytest.mark.parametrize("name, lock, hybridize", [*WAYS, *(("dropout", on, {}) for on in (0, 1))])
def test_networks(name, lock, hybridize):
    """They are deferred, but for the one with shared layers."""
    problem = Tied("classification", (4, 4), samples=205)
    net, (layers, shape) = problem.network("float32"), NETWORKS.get(name, (None, (4,)))
    if layers is not None:
        net = gluon.nn.HybridSequential()
        net.add(*layers(), gluon.nn.Dense(3))
        net.initialize()
        problem.X = problem.X.reshape(-1, *shape)
    if hybridize is not None:
        net.hybridize(**hybridize)
    run = Run(problem, net, "float32", lock_random=lock if lock == "auto" else bool(lock))
    run.batches = problem.batches(41)
    with kit.noticed() as texts:
        found = [(run.play([5, "refresh"]), run.controller.P) for _ in range(4)]
    texts = [text for text in texts if not text.startswith("An epoch has 5 steps")]
    losses = [line["mean_loss"] for line in run.trainer.history]
    assert np.isfinite(losses).all() and losses[-1] <= 1.4
    L, rho = run.trainer.history[0]["curvature"], next(P.rho for _, P in found if P)
    assert L < 2.5 and rho < 8  # other masks in each gradient would look like curvature
    assert [text[:10] for text in texts] == ["The losses"] * (name == "dropout" and lock == "auto")


@pytest.mark.parametrize("first", [0, 1])  # the first layer that is trained
def test_statistics_move_as_without_it(first):
    """Those of BatchNorm before all other layers: they depend on the minibatches alone."""
    found = []
    for part in (Nystrom(), None):
        net = kit.sequence(gluon.nn.BatchNorm(in_channels=4), gluon.nn.Dense(3, in_units=4))
        run = Run(net=net, dtype="float32")
        run.trainer = SVRGTrainer(net[first:].collect_params(), "nag", preconditioner=part)
        run.play([23, "refresh"] * 2)
        found.append([net[0].running_mean.data().asnumpy(), net[0].running_var.data().asnumpy()])
    assert_unchanged(*found)


ROWS = {
    "Student": lambda rng, X: rng.standard_t(1.5, X.shape),
    "log-normal": lambda rng, X: np.exp(1.5 * X),
    "unscaled": lambda rng, X: X * 10.0 ** rng.uniform(-3, 3, X.shape[1]),
    "outlier": lambda rng, X: X * np.where(np.arange(len(X)) == 7, 1e3, 1)[:, None],
    "shifted": lambda rng, X: 100 + X,
}
LOSSES = {
    "squared": gluon.loss.L2Loss(),
    "Huber": gluon.loss.HuberLoss(),
    "logistic": gluon.loss.SigmoidBinaryCrossEntropyLoss(),
    "Poisson": lambda output, y: (mx.np if IS_NUMPY_LIKE else mx.nd).exp(output) - y * output,
}
NO_RATE = "No direction was found|gradients beside the .* not finite|full gradient is not finite"


@pytest.mark.filterwarnings("ignore:An epoch has 5", "ignore:The (curvature along|gradient of)")
@example("shifted", "Huber", 0.0, 0, 8, "sgd", 0)  # at the start, minibatches are flat
@given(
    rows=st.sampled_from([*ROWS]),
    loss=st.sampled_from([*LOSSES]),
    start=st.sampled_from([0.0, 10.0]),
    rank=st.sampled_from([50, 0]),
    size=st.sampled_from([8, 32]),
    optimizer=st.sampled_from(["nag", "sgd"]),
    seed=st.integers(0, 1000),
)
def test_never_away(rows, loss, start, rank, size, optimizer, seed):
    """A last refresh finds a lower loss than the first one; far away, an error may say why not."""
    rng, problem = np.random.RandomState(seed), Dense("regression", samples=160)
    problem.X = ROWS[rows](rng, problem.X)
    z = problem.X @ (rng.randn(4, 1) / np.abs(problem.X).mean(axis=0)[:, None])
    problem.y = {
        "logistic": rng.rand(160, 1) < 1 / (1 + np.exp(-z)), "Poisson": rng.poisson(2, (160, 1))
    }.get(loss, z + rng.randn(160, 1))  # fmt: skip
    problem.loss_function = lambda: LOSSES[loss]
    problem.initial = [start * rng.randn(1, 4), np.zeros(1)]
    net, kwargs = problem.network("float32"), {"preconditioner": Nystrom(rank)}
    run = Run(problem, net, "float32", optimizer=optimizer, **kwargs)
    first = np.mean(run.loss_of(np.arange(160)).asnumpy(), dtype="float64")
    try:
        for _ in range(5):
            run.batches = problem.batches(size, rng.permutation(160))
            run.play([160, "refresh"])
    except (RuntimeError, FloatingPointError) as error:
        assert (start or loss == "Poisson") and re.search(NO_RATE, str(error))
    else:
        last = np.mean(run.loss_of(np.arange(160)).asnumpy(), dtype="float64")
        assert last <= first * (1 + 1e-5 * np.sign(first))


def test_more_data_are_no_divergence():
    """Draws that grow: the loss of the new data is above all that was known."""
    problem = Dense("regression", samples=205, features=6, seed=3)
    problem.y[100:] += 50
    run = Run(problem, problem.network())
    run.batches = problem.batches(5)[:20]
    run.play([20, "refresh", 20, "refresh", 20])
    run.batches = problem.batches(5)
    loss = run.refresh()
    assert run.trainer.history[-1]["objective"] == pytest.approx(loss)
    run.play([41, "refresh", 41, "refresh"])
    assert not any(line["went_back"] for line in run.trainer.history)
    assert run.trainer.num_snapshots == 5
