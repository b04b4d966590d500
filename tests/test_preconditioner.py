"""The preconditioner: beside its twin in NumPy, and what must hold whatever the data are."""

import re

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import assert_unchanged, everything
from loops import backward, split_at
from mxnet import gluon
from plays import STATIC, TWO
from problems import IS_NUMPY_LIKE, Dense, Tied, Words, array, distance, flat, parameters, values

from gluon_svrg import Nystrom, SVRGTrainer, saving
from gluon_svrg.prox import L1

REGRESSION = Dense("regression", samples=205, features=6, seed=3)
CLASSES = Dense("classification", samples=205, features=6, seed=4)
LAYERS = Dense("classification", hidden=(4,), samples=205, seed=5)  # not convex
BATCHES = REGRESSION.batches(9)  # 205 = 22 * 9 + 7
NAG = "nag" if hasattr(mx.gluon.Parameter, "list_device") else "nag of 1.9.1"


LOOSE = 1e-5  # where rounding grows from step to step


class Pair:
    """A trainer and its twin, from the same weights; `how` tells how an update is made."""

    def __init__(self, problem=REGRESSION, optimizer="nag", how="step", *, rank=50, devices=None,
                 dtype="float64", size=None):  # fmt: skip
        self.how, self.devices, self.size = how, devices, size
        self.net = problem.network(dtype, devices)
        split = {"split": split_at([0.3])} if devices else {}
        self.loss_of = problem.closure(self.net, dtype, devices, **split)
        if how == "means":
            loss_of = self.loss_of
            self.loss_of = lambda index: loss_of(index).mean()
        settings = {"optimizer_params": {"wd": 0.05}, "preconditioner": Nystrom(rank)}
        self.trainer = SVRGTrainer(self.net.collect_params(), optimizer, **settings)
        for p in parameters(self.net):
            p.wd_mult = 2.0 if p is self.net[0].bias else 1.0
            p.grad_req = "add" if how == "add" else "write"
        self.order = [parameters(self.net).index(p) for p in self.trainer._params]
        shapes = [problem.initial[n].shape for n in self.order]
        ends = np.cumsum([*map(np.prod, shapes)])[:-1]

        def mean(w, batches):
            pieces = [x.reshape(shape) for x, shape in zip(np.split(w, ends), shapes)]
            weights = [pieces[self.order.index(n)] for n in range(len(pieces))]
            found = [problem.loss_and_gradient(weights, index) for index in batches]
            scales = [1 / len(index) if how == "means" else 1 for index in batches]
            entries = sum(count * scale for (*_, count), scale in zip(found, scales))
            loss = sum(loss * scale for (loss, *_), scale in zip(found, scales))
            grads = sum(self.vector(g) * scale for (_, g, _), scale in zip(found, scales))
            return loss / entries, grads / entries, round(entries)

        decays = [np.full(p.shape, p.wd_mult * oracle.rounded(0.05)) for p in parameters(self.net)]
        optimizer, eps = NAG if optimizer == "nag" else optimizer, float(np.finfo(dtype).eps)
        self.settings = self.vector(decays), rank, eps, optimizer
        self.mean = mean
        self.start_over()

    def start_over(self):
        self.twin = oracle.Nystrom(self.mean, self.vector(values(self.net)), *self.settings)

    @property
    def curvature(self):
        return self.trainer._method.preconditioner.curvature

    def vector(self, arrays):
        """In the order of the trainer, by which random vectors are drawn."""
        return flat([arrays[n] for n in self.order])

    def refresh(self):
        stored = {"store_grads": True} if self.how == "stored" else {}
        loss = self.trainer.update_full_grads(self.loss_of, BATCHES, **stored)
        self.twin.refresh(BATCHES)
        return loss

    def step(self, *numbers):
        batches = [BATCHES[n] for n in numbers]
        size = self.size or sum(map(len, batches))
        if self.how in ("halves", "add"):
            for index in batches:
                self.trainer.correct_grads(lambda: self.loss_of(index))
            self.trainer.allreduce_grads()
            self.trainer.update(size)
        else:
            has_row = self.how == "stored" and self.trainer.has_snapshot
            row = {"batch_index": numbers[0]} if has_row else {}
            self.trainer.step(size, closure=lambda: self.loss_of(*batches), **row)
        if self.how == "add":
            kit.clear(self.net)
        self.twin.step(*batches)

    def epoch(self, count=23):
        together = 2 if self.how == "add" else 1
        for first in range(0, count, together):
            self.step(*range(first, min(first + together, count)))

    def jump(self, amount):
        """Both are moved far away, as a rate that is too high does."""
        move = amount * np.random.RandomState(1).randn(len(self.twin.w))
        self.twin.w = self.twin.w + move
        parts = np.split(move, np.cumsum([p.list_data()[0].size for p in self.trainer._params]))
        for p, part in zip(self.trainer._params, parts):
            for data in p.list_data():
                data[:] = data.asnumpy() + part.reshape(p.shape)

    def check(self, tolerance=1e-8):
        """Weights on each device, rate, momentum, L, N, trust and P."""
        found, twin, optimizer = self.curvature, self.twin, self.trainer.optimizer
        for device in self.devices or [None]:
            assert distance([self.vector(values(self.net, device))], [twin.w]) < tolerance
        numbers = [self.trainer.learning_rate, optimizer.momentum, found.L, found.N, found.trust]
        expected = [twin.rate, twin.momentum, twin.L, twin.N, twin.T]
        np.testing.assert_allclose(numbers, expected, 10 * tolerance)
        P = [found.P(e, -1.0) if found.P else e for e in np.eye(len(twin.w))]
        assert distance(P, twin.P) < 10 * tolerance


def train(pair, epochs=5, plain=True, tolerance=1e-8):
    """It stays with its twin; the last line of `history` is what the twin knows, too."""
    for epoch in range(epochs):
        if epoch or not plain:
            pair.refresh()
            line, twin = pair.trainer.history[-1], pair.twin
            names = ("learning_rate", "momentum", "curvature", "noise")
            expected = [twin.rate, twin.momentum, twin.L, twin.N]
            np.testing.assert_allclose([line[n] for n in names], expected, 10 * tolerance)
        pair.epoch()
        pair.check(tolerance)
    assert sum(line["went_back"] for line in pair.trainer.history) == pair.twin.backs


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("optimizer", ["nag", "sgd"])
@pytest.mark.parametrize("problem", [REGRESSION, CLASSES, LAYERS])
def test_trajectory(problem, optimizer, plain):
    train(Pair(problem, optimizer), plain=plain, tolerance=LOOSE if problem is LAYERS else 1e-8)


@pytest.mark.parametrize(
    "how, settings",
    [
        *(("step", {"rank": rank}) for rank in (0, 2)),
        *((how, {"devices": TWO}) for how in ("step", "halves", "add", "stored")),
        *((how, {"problem": CLASSES}) for how in ("halves", "add", "stored")),
        *((how, {"size": size}) for how in ("step", "means") for size in (1, 1000)),
    ],
)
def test_trajectory_in_every_way(how, settings):
    """The direction depends on the loss entries of a minibatch, and not on the batch size."""
    train(Pair(how=how, **settings))


@pytest.mark.parametrize("problem", [REGRESSION, CLASSES])
def test_trajectory_in_float32(problem):
    train(Pair(problem, dtype="float32"), tolerance=5e-4)


@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize(
    "when, amount",
    [("before the first refresh", 20), ("at a refresh", 20), ("in mid-epoch", 20),
     ("in mid-epoch", 1)],
)  # fmt: skip
def test_going_back(when, amount, devices):
    """To the snapshot or to the start; the training goes on from there, and more slowly."""
    pair = Pair(devices=devices)
    start = values(pair.net)
    pair.epoch()
    if when != "before the first refresh":
        pair.refresh()
        pair.epoch()
        lowest, start = pair.refresh(), values(pair.net)
        pair.epoch(11)
    taken, L = pair.trainer.num_snapshots, pair.curvature.L
    pair.jump(amount)
    if when == "in mid-epoch":
        while not pair.twin.backs:
            pair.step(0)
        pair.check()
    else:
        loss = pair.refresh()
        assert_unchanged(values(pair.net), start)
        assert pair.trainer.inner_steps == 0
        assert pair.trainer.history[-1]["went_back"] == 1
    if when == "at a refresh":
        assert (loss, pair.trainer.num_snapshots) == (lowest, taken)
        assert pair.trainer.history[-1]["mean_loss"] > 10 * loss
        assert pair.curvature.L >= 4 * L
    train(pair, plain=when == "in mid-epoch")
    assert pair.curvature.loss < pair.curvature.first_loss


def test_a_new_start():
    """After `discard_snapshot` nothing is left of what was learned, and no momentum."""
    pair = Pair()
    train(pair, epochs=3)
    pair.trainer.discard_snapshot()
    pair.start_over()
    pair.trainer.history.clear()
    train(pair, epochs=3)


def test_refreshes_in_large_chunks():
    found = []
    for size in (9, 70):
        pair = Pair()
        for _ in range(4):
            pair.epoch()
            pair.trainer.update_full_grads(pair.loss_of, REGRESSION.batches(size))
        found.append(values(pair.net))
    assert distance(*found) < 1e-9


# --- files ---------------------------------------------------------------------------------------

#: What is done before a file is written: refreshes, jumps far away, and numbers of steps.
PHASES = {
    "before the first step": [],
    "in the first measurement": [1],
    "before the first refresh": [4],
    "before the sketch": [3, "refresh"],
    "in mid-sketch": [3, "refresh", 1],
    "between the sketch and the powers": [3, "refresh", 2],
    "in mid-epoch": [3, "refresh", 11],
    "at a refresh": [3, "refresh", 23, "refresh"],
    "gone back at a refresh": [3, "refresh", 23, "jump", "refresh"],
    "gone back in mid-epoch": [3, "refresh", 11, "jump", 14, 2],
    "gone back to the start": [3, "jump", "refresh", 1],
    "before the second sketch": ["refresh", 9, "refresh", 3, "refresh", 1],
}


FILES = Dense("classification", samples=205, seed=6)


class Run:
    """A trainer alone, of a network with BatchNorm."""

    def __init__(self, rank=50, deferred=False, **kwargs):
        units = (0, 0) if deferred else (4, 6)
        self.net = kit.sequence(
            gluon.nn.Dense(6, activation="tanh", in_units=units[0]),
            gluon.nn.BatchNorm(in_channels=units[1]),
            gluon.nn.Dense(3, in_units=units[1]),
        )
        self.net.cast("float64")
        kwargs = {"preconditioner": Nystrom(rank), **kwargs}
        self.trainer = SVRGTrainer(self.net.collect_params(), "nag", {"wd": 0.05}, **kwargs)
        self.loss_of = FILES.closure(self.net)

    def play(self, actions):
        for action in actions:
            if action == "refresh":
                self.trainer.update_full_grads(self.loss_of, FILES.batches(9))
            elif action == "jump":
                for p in self.trainer._params:
                    p.set_data(30 * p.data())
            else:
                kit.one_epoch(self.trainer, self.loss_of, FILES.batches(9)[:action])

    def everything(self):
        found, momentum = everything(self.trainer, self.net), self.trainer.optimizer.momentum
        return {**found, "history": self.trainer.history, "momentum": momentum}


@pytest.mark.parametrize("phase", PHASES)
def test_resumed_in_every_phase(phase, tmp_path):
    """Into a new trainer, into one with deferred parameters, and into one that was used."""
    straight, used = Run(), Run()
    straight.play(PHASES[phase])
    straight.trainer.save_states(tmp_path / "states")
    straight.net.save_parameters(str(tmp_path / "weights"))
    straight.play([14, "refresh", 23, "refresh", 5])
    used.play([2, "refresh", 5])
    for run in (Run(), Run(deferred=True), used):
        run.trainer.load_states(tmp_path / "states")
        run.net.load_parameters(str(tmp_path / "weights"))
        run.play([14, "refresh", 23, "refresh", 5])
        assert_unchanged(straight.everything(), run.everything())


def test_files_of_others(tmp_path):
    """Of another rank, of a trainer without a preconditioner, and the other way round."""
    runs = [Run(), Run(2), Run(preconditioner=None)]
    for number, run in enumerate(runs):
        run.play([3])
        run.trainer.save_states(tmp_path / str(number))
    for number, run in enumerate(runs):
        before = run.everything()
        for other in {0, 1, 2} - {number}:
            with pytest.raises(ValueError, match=r"saved with SVRG.*, and this trainer uses SVRG"):
                run.trainer.load_states(tmp_path / str(other))
        assert_unchanged(before, run.everything())


def nan_like(value):
    return saving.ByParameter((n, np.full_like(x, np.nan)) for n, x in value.items())


#: What a state has in the place of its own.
CRAFTED = [
    lambda state: {"L": np.nan},
    lambda state: {"trust": "high"},
    lambda state: {"last_d": nan_like(state["last_d"])},
    lambda state: {"last_d": saving.ByParameter({0: state["last_d"][0]})},
    lambda state: {"P": {**state["P"], "S": state["P"]["S"][1:]}},
    lambda state: {"P": {**state["P"], "rho": 0.0}},
    lambda state: {"P": {**state["P"], "U": {**state["P"]["U"]}}},
    lambda state: {"P": {**state["P"], "kind": "Curvature"}},
    lambda state: {"pending": [np.ones((2, 2))]},
    lambda state: {"start": {"weights": nan_like(state["last_d"]), "frozen": {}}},
]


@pytest.mark.parametrize("craft", CRAFTED)
def test_crafted_states_change_nothing(craft, tmp_path, monkeypatch):
    run = Run()
    run.play([3, "refresh", 11])
    part, before = run.trainer._method.preconditioner, run.everything()
    good = part.state()
    bad = [{**good, **craft(good)}, *({k: v for k, v in good.items() if k != n} for n in good)]
    for state in bad[: None if craft is CRAFTED[0] else 1]:
        with monkeypatch.context() as patch:
            patch.setattr(part, "state", lambda: state)
            run.trainer.save_states(tmp_path / "states")
        with pytest.raises(ValueError, match="Nothing was changed"):
            run.trainer.load_states(tmp_path / "states")
    assert_unchanged(before, run.everything())
    run.trainer.save_states(tmp_path / "states")
    run.trainer.load_states(tmp_path / "states")


# --- errors --------------------------------------------------------------------------------------


def make(optimizer="nag", settings=(), problem=REGRESSION, dtype="float32", **kwargs):
    kwargs = {"preconditioner": Nystrom(), "settings": dict(settings), **kwargs}
    return kit.make(problem, dtype, kwargs.pop("devices", None), optimizer=optimizer, **kwargs)


SCHEDULER = mx.lr_scheduler.FactorScheduler(3)


@pytest.mark.parametrize(
    "error, message, arguments",
    [
        (
            TypeError,
            "must be a Nystrom, as in Nystrom\\(\\), got type",
            {"preconditioner": Nystrom},
        ),
        *(
            (ValueError, f"needs the optimizer 'nag' or 'sgd', got {name}", {"optimizer": given})
            for name, given in (("Adam", "adam"), ("LARS", "lars"), ("SGLD", mx.optimizer.SGLD()))
        ),
        *(
            (ValueError, f"sets the {name} itself. Leave {name} out", {"settings": {name: 0.1}})
            for name in ("learning_rate", "momentum")
        ),
        *(
            (ValueError, f"does not work with {name}", arguments)
            for name, value in (("lr_scheduler", SCHEDULER), ("clip_gradient", 1.0))
            for arguments in (
                {"settings": {name: value}},
                {"optimizer": mx.optimizer.SGD(**{name: value})},
            )
        ),
        (ValueError, "with compression_params", {"compression_params": {"type": "2bit"}}),
        (ValueError, "update_on_kvstore=True the kvstore keeps", {"update_on_kvstore": True}),
        (ValueError, "'dist_async' never reduces gradients", {"kvstore": "dist_async"}),
        (ValueError, "needs coefficient=1", {"coefficient": 0.5}),
        (ValueError, "needs coefficient=1", {"coefficient": lambda index: 1.0}),
        (ValueError, "prox does not work with a preconditioner", {"prox": L1(0.1)}),
    ],
)
def test_arguments(error, message, arguments):
    with pytest.raises(error, match=message):
        make(devices=TWO, **arguments)


@pytest.mark.parametrize("rank, error", [(-1, ValueError), (2.5, TypeError), (True, TypeError)])
def test_ranks(rank, error):
    with pytest.raises(error, match="rank must be"):
        Nystrom(rank)


def test_what_the_preconditioner_sets():
    _, loss_of, trainer = make()
    with pytest.raises(RuntimeError, match=r"Leave set_learning_rate\(\) out, or the precond"):
        trainer.set_learning_rate(0.1)
    with pytest.raises(RuntimeError, match="sets the learning rate, anew at each refresh"):
        trainer.learning_rate = 0.1
    with pytest.raises(ValueError, match="needs coefficient=1"):
        trainer.coefficient = 0.5
    backward(lambda: loss_of(BATCHES[0]))
    for name in ("step", "allreduce_grads", "update"):
        with pytest.raises(RuntimeError, match=rf"{name}\(\) needs the closure of each minibatch"):
            getattr(trainer, name)(*[9][name == "allreduce_grads" :])


@pytest.mark.parametrize(
    "error, message, change",
    [
        (TypeError, "float32 or float64, got float16", lambda net: net.cast("float16")),
        (TypeError, "got float32 and float64", lambda net: net[0].cast("float64")),
        (ValueError, "has an lr_mult", lambda net: setattr(net[1].bias, "lr_mult", 0.5)),
        *[(ValueError, "is sparse", lambda net: net)][IS_NUMPY_LIKE:],
    ],
)
def test_parameters(error, message, change):
    problem = Words("sparse gradient", 23) if message == "is sparse" else LAYERS
    net, loss_of, trainer = make(problem=problem)
    change(net)
    with pytest.raises(error, match=message):
        trainer.step(9, closure=lambda: loss_of(BATCHES[0]))


@pytest.mark.parametrize(
    "error, message, make_loss",
    [
        (RuntimeError, "No direction was found in which the loss curves", lambda output: output),
        (RuntimeError, "No direction was found", lambda output: -(output**2)),
        (FloatingPointError, "Are the data finite", lambda output: output**2 * np.nan),
        (FloatingPointError, "Are the data finite", lambda output: (output * 1e30) ** 2),
    ],
)
def test_losses_without_a_curvature(error, message, make_loss):
    net, _, trainer = make()
    X, before = array(REGRESSION.X, "float32"), values(net)
    with pytest.raises(error, match=message):
        for _ in range(10):
            trainer.step(1, closure=lambda: make_loss(net(X)))
    assert_unchanged(before, values(net))


def test_flat_minibatches():
    """They tell nothing of the curvature; the training goes on with what is known."""
    _, loss_of, trainer = make(problem=CLASSES)

    def flat(index):
        return 0 * loss_of(index)

    for number in range(9):
        trainer.step(9, closure=lambda: (loss_of if number == 7 else flat)(BATCHES[number]))
    trainer.update_full_grads(loss_of, BATCHES)
    L = trainer._method.preconditioner.curvature.L
    kit.one_epoch(trainer, flat, BATCHES)
    found = trainer._method.preconditioner.curvature
    assert found.L == L > 0 and found.P is None and found.job is None


# --- whatever the network and the data -----------------------------------------------------------

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
    net, shape = Tied("classification", (4, 4)).network("float32"), (4,)
    if name in NETWORKS:
        net, (layers, shape) = gluon.nn.HybridSequential(), NETWORKS[name]
        net.add(*layers(), gluon.nn.Dense(3))
        net.initialize()
    if hybridize is not None:
        net.hybridize(**hybridize)
    settings = {"preconditioner": Nystrom(), "lock_random": lock if lock == "auto" else bool(lock)}
    trainer = SVRGTrainer(net.collect_params(), "nag", {}, **settings)
    loss_of, losses = gluon.loss.SoftmaxCrossEntropyLoss(), []

    def closure(index):
        X = array(FILES.X[index].reshape(-1, *shape), "float32")
        return loss_of(net(X), array(FILES.y[index], "float32"))

    with kit.noticed() as texts:
        for _ in range(4):
            kit.one_epoch(trainer, closure, FILES.batches(41))
            losses.append(trainer.update_full_grads(closure, FILES.batches(41)))
    assert (
        np.isfinite(losses).all()
        and losses[-1] < trainer._method.preconditioner.curvature.first_loss + 1e-5
    )
    assert [text[:10] for text in texts] == ["The losses"] * (name == "dropout" and lock == "auto")


def test_statistics_move_as_without_it():
    """Those of BatchNorm before all other layers: they depend on the minibatches alone."""
    found = []
    for kwargs in ({"preconditioner": Nystrom(), "settings": {}}, {"rate": 0.1}):
        net = kit.sequence(gluon.nn.BatchNorm(in_channels=4), gluon.nn.Dense(3, in_units=4))
        _, loss_of, trainer = kit.make(FILES, "float32", net=net, **kwargs)
        for _ in range(2):
            kit.one_epoch(trainer, loss_of, FILES.batches(41))
            trainer.update_full_grads(loss_of, FILES.batches(41))
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
NO_RATE = (
    "No direction was found in which|gradients beside the .* not finite|full gradient is not fin"
)


@given(
    rows=st.sampled_from(list(ROWS)),
    loss=st.sampled_from(list(LOSSES)),
    start=st.sampled_from([0.0, 10.0]),
    rank=st.sampled_from([50, 0]),
    size=st.sampled_from([8, 32]),
    optimizer=st.sampled_from(["nag", "sgd"]),
    seed=st.integers(0, 1000),
)
def test_never_away(rows, loss, start, rank, size, optimizer, seed):
    """After a last refresh the loss is below the first one, or an error says why there is no rate.

    An error comes from a start far away only, where all is flat or infinite.
    """
    rng = np.random.RandomState(seed)
    X = ROWS[rows](rng, rng.randn(160, 5))
    z = X @ (rng.randn(5) / np.abs(X).mean(axis=0))
    y = z + rng.randn(160)
    if loss == "logistic":
        y = rng.rand(160) < 1 / (1 + np.exp(-z))
    elif loss == "Poisson":
        y = rng.poisson(2, 160)
    net = gluon.nn.Dense(1, in_units=5)
    net.initialize(mx.init.Zero())
    net.weight.set_data(array(start * rng.randn(1, 5), "float32"))

    def loss_of(index):
        return LOSSES[loss](net(array(X[index], "float32")), array(y[index, None], "float32"))

    kwargs = {"preconditioner": Nystrom(rank), "kvstore": None}
    trainer = SVRGTrainer(net.collect_params(), optimizer, {}, **kwargs)
    found = []
    try:
        for _ in range(5):
            kit.one_epoch(trainer, loss_of, np.split(rng.permutation(160), range(size, 160, size)))
            found.append(trainer.update_full_grads(loss_of, np.arange(160).reshape(10, 16)))
    except (RuntimeError, FloatingPointError) as error:
        assert start and re.search(NO_RATE, str(error))
    first = trainer._method.preconditioner.curvature.first_loss
    assert sorted(found, reverse=True) == found and (not found or found[0] <= first)
