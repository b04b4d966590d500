"""What every method's trainer must pass, each against its twin in NumPy.

A new method is one line in `CASES`.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Optional

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from kit import assert_unchanged, everything
from loops import plain_step, split_at
from mxnet import gluon
from problems import Dense, array, contexts, distance, parameters, values

import gluon_svrg
from gluon_svrg.variance import variance

PROBLEM = Dense("classification", hidden=(5,), seed=40)
BATCHES = PROBLEM.batches(5)  # 23 = 4 * 5 + 3
LARGE = Dense("classification", hidden=(200,), features=500, seed=42)
SETTINGS = {"learning_rate": 0.05, "momentum": 0.5, "wd": 0.01}
TWO = contexts(2)


@dataclass
class Case:
    """A method: its trainer and its twin.

    Attributes
    ----------
    trainer : str
        Its name in `gluon_svrg`.
    twin : callable
        Its class in `oracle`.
    settings : dict
        Keyword arguments of both, all their own.
    gradients : int
        How many of each minibatch a step takes.
    indexed : bool
        Whether a step names the minibatch's row of a table.
    needs_refresh : bool
        Whether it is the plain optimizer until the first call of `update_full_grads`.
    plain : dict, optional
        Settings with which it is the plain optimizer bit for bit, refreshed or not.
    """

    trainer: str
    twin: Callable[..., oracle.Method]
    settings: Dict[str, Any] = field(default_factory=dict)
    gradients: int = 2
    indexed: bool = False
    needs_refresh: bool = False
    plain: Optional[Dict[str, Any]] = None

    @property
    def cls(self):
        return getattr(gluon_svrg, self.trainer)

    def make_twin(self, gradient=PROBLEM.gradient, weights=PROBLEM.initial):
        return self.twin(gradient, weights, **self.settings)

    def make_trainer(self, params, optimizer="sgd", optimizer_params=SETTINGS, **kwargs):
        return self.cls(params, optimizer, optimizer_params, **{**self.settings, **kwargs})

    def row(self, number):
        """The arguments of `step` and `correct_grads` that name the minibatch."""
        return {"batch_index": number} if self.indexed else {}


CASES = {
    "SVRG": Case("SVRGTrainer", oracle.SVRG, needs_refresh=True, plain={"coefficient": 0}),
    "alpha-SVRG": Case(
        "SVRGTrainer",
        oracle.SVRG,
        {"coefficient": 0.7},
        needs_refresh=True,
        plain={"coefficient": 0},
    ),
    "SAGA": Case("SAGATrainer", oracle.SAGA, gradients=1, indexed=True),
    "SAG": Case("SAGTrainer", oracle.SAG, gradients=1, indexed=True),
    "SARAH": Case("SARAHTrainer", oracle.SARAH, needs_refresh=True),
    "STORM": Case("STORMTrainer", oracle.STORM, {"mixing": 0.3}, plain={"mixing": 1}),
    "MARS": Case(
        "MARSTrainer",
        oracle.MARS,
        {"gamma": 0.1, "clip": 0.1},
        plain={"gamma": 0, "clip": None},
    ),
    "approximate MARS": Case(
        "MARSTrainer",
        oracle.MARS,
        {"gamma": 0.1, "exact": False, "include_vectors": True},
        gradients=1,
        plain={"gamma": 0, "clip": None},
    ),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    return request.param


def start(
    case, dtype="float64", devices=None, hybridize=None, split=None, problem=PROBLEM, **kwargs
):
    """A network, its loss and a trainer; the loss is split over devices as given."""
    net = problem.network(dtype, devices, hybridize=hybridize)
    loss_of = problem.closure(net, dtype, devices, split)
    return net, loss_of, case.make_trainer(net.collect_params(), **kwargs)


def steps(case, trainer, loss_of, numbers, batches=BATCHES):
    for number in numbers:
        index = batches[number]
        trainer.step(len(index), closure=lambda: loss_of(index), **case.row(number))


def orders(epochs, seed=0):
    """The minibatches in a new order each epoch; they themselves stay as they are."""
    rng = np.random.RandomState(seed)
    return [rng.permutation(len(BATCHES)) for _ in range(epochs)]


def follow(case, net, loss_of, trainer, twin, optimizer, tolerance, device=None):
    """An epoch without a refresh, and two refreshes; the trainer is where its twin is."""
    initial = oracle.copied(twin.weights)
    for epoch, order in enumerate(orders(5)):
        if epoch in (1, 3):
            trainer.update_full_grads(loss_of, BATCHES)
            twin.refresh(BATCHES)
        for number in order:
            steps(case, trainer, loss_of, [number])
            twin.step(optimizer, BATCHES[number], rows=[number])
        assert distance(values(net, device), twin.weights) < tolerance, f"epoch {epoch}"
    assert distance(twin.weights, initial) > 0.01  # it did move


# --- variance ------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [None, split_at([0.4])], ids=["one device", "two devices"])
def test_variance_and_bias(case, split):
    devices = None if split is None else TWO
    net, loss_of, trainer = start(case, devices=devices, split=split)
    twin, optimizer = case.make_twin(), oracle.SGD(**SETTINGS)
    if case.indexed or case.needs_refresh:
        trainer.update_full_grads(loss_of, BATCHES)
        twin.refresh(BATCHES)
    for number in (3, 0, 4):
        steps(case, trainer, loss_of, [number])
        twin.step(optimizer, BATCHES[number], rows=[number])
    before = everything(trainer, net)
    found = variance(trainer, loss_of, BATCHES)
    assert_unchanged(before, everything(trainer, net))

    counts = np.array(list(map(len, BATCHES)), dtype=float)
    plain = [_flat(PROBLEM.gradient(twin.weights, index)[0]) for index in BATCHES]
    estimates = []
    for number, index in enumerate(BATCHES):
        other = copy.deepcopy(twin)
        v = other.estimate(index, number)
        estimates.append(_flat(other.advance(v, [index], [number])))
    plain, estimates = (np.array(rows) / counts[:, None] for rows in (plain, estimates))
    for name, rows in (("plain", plain), ("estimate", estimates)):
        centred = rows - np.average(rows, axis=0, weights=counts)
        expected = np.average((centred**2).sum(axis=1), weights=counts)
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-6, err_msg=name)
    bias = np.linalg.norm(np.average(estimates - plain, axis=0, weights=counts))
    np.testing.assert_allclose(found.bias, bias, rtol=1e-6, atol=1e-10)
    is_unbiased = case.trainer == "SVRGTrainer" or case.trainer == "SAGATrainer"
    assert (found.bias < 1e-9) == is_unbiased


def _flat(grads):
    return np.concatenate([np.ravel(grad) for grad in grads])


# --- trajectories --------------------------------------------------------------------------------


@pytest.mark.parametrize("hybridize", kit.HYBRIDIZE)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_trajectory(case, count, hybridize):
    """Uneven minibatches, unevenly over the devices: of 5 entries the first of three gets none."""
    devices = contexts(count)
    split = split_at([0.1, 0.5][3 - count :])
    net, loss_of, trainer = start(case, devices=devices, hybridize=hybridize, split=split)
    twin, optimizer = case.make_twin(), oracle.SGD(**SETTINGS)
    follow(case, net, loss_of, trainer, twin, optimizer, 1e-10, devices[-1])
    for device in devices:
        assert distance(values(net, device), twin.weights) < 1e-10


@pytest.mark.parametrize("devices", [None, TWO])
def test_trajectory_in_float32(case, devices):
    net, loss_of, trainer = start(case, "float32", devices)
    twin, optimizer = case.make_twin(), oracle.SGD(**SETTINGS)
    follow(case, net, loss_of, trainer, twin, optimizer, 2e-5, devices and TWO[1])


@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 2e-5)])
def test_trajectory_with_large_layers(case, dtype, tolerance, devices):
    """MXNet 1.9.1 has faster sums for them."""
    net, loss_of, trainer = start(case, dtype, devices, problem=LARGE)
    twin, optimizer = case.make_twin(LARGE.gradient, LARGE.initial), oracle.SGD(**SETTINGS)
    follow(case, net, loss_of, trainer, twin, optimizer, tolerance, devices and TWO[1])


class Fed:
    """An optimizer for a twin: `gluon.Trainer` on a network of its own, fed the gradients."""

    def __init__(self, name, settings):
        self.net = PROBLEM.network("float32")
        self.trainer = gluon.Trainer(self.net.collect_params(), name, settings)

    def step(self, weights, grads, batch_size):
        for p, grad in zip(parameters(self.net), grads):
            p.grad()[:] = array(grad, "float32")
            p.data()._fresh_grad = True
        self.trainer.step(batch_size)
        for w, value in zip(weights, values(self.net)):
            w[:] = value


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("nag", {"learning_rate": 0.05, "momentum": 0.5}),
        ("adadelta", {"rho": 0.5, "epsilon": 1e-2}),  # it overwrites the gradients
        ("rmsprop", {"learning_rate": 0.01}),
    ],
)
def test_any_optimizer(case, optimizer, settings):
    kwargs = {"optimizer": optimizer, "optimizer_params": settings}
    net, loss_of, trainer = start(case, "float32", **kwargs)
    follow(case, net, loss_of, trainer, case.make_twin(), Fed(optimizer, settings), 2e-5)


@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("problem", [PROBLEM, LARGE], ids=["small", "large"])
def test_the_scale_of_the_losses_does_not_matter(case, problem, devices):
    """AMP's; it changes in the middle."""
    settings = {"problem": problem, "update_on_kvstore": False}
    net, loss_of, trainer = start(case, "float32", devices, **settings)
    scaler = kit.scale_losses(trainer)
    twin = case.make_twin(problem.gradient, problem.initial)
    optimizer = oracle.SGD(**SETTINGS)
    for epoch, order in enumerate(orders(4)):
        if epoch in (1, 3):
            trainer.update_full_grads(loss_of, BATCHES)
            twin.refresh(BATCHES)
        for number in order:
            scaler._loss_scale = scaler._next_loss_scale = 2.0 ** (6 + (epoch + number) % 4)
            steps(case, trainer, loss_of, [number])
            twin.step(optimizer, BATCHES[number], rows=[number])
    assert distance(values(net, devices and TWO[1]), twin.weights) < 2e-5


@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("hybridize", [None, {"static_alloc": True, "static_shape": True}])
def test_micro_batches_accumulate(case, devices, hybridize):
    """Under ``grad_req='add'``: two estimates, one update."""
    net, loss_of, trainer = start(case, devices=devices, hybridize=hybridize)
    for p in parameters(net):
        p.grad_req = "add"
    twin, optimizer = case.make_twin(), oracle.SGD(**SETTINGS)
    batches = PROBLEM.batches(4)  # 5 of 4, and 3
    for epoch in range(4):
        if epoch in (1, 3):
            trainer.update_full_grads(loss_of, batches)
            twin.refresh(batches)
        for pair in ((0, 5), (3, 1), (2, 4)):
            parts = [batches[number] for number in pair]
            for number, part in zip(pair, parts):
                trainer.correct_grads(lambda: loss_of(part), **case.row(number))
            trainer.step(sum(map(len, parts)))
            kit.clear(net)
            twin.step(optimizer, *parts, rows=pair)
    assert distance(values(net, devices and TWO[1]), twin.weights) < 1e-10


def test_frozen_parameters(case):
    """They stay where they are, and the method goes on for the others."""
    net, loss_of, trainer = start(case)
    parameters(net)[0].grad_req = parameters(net)[3].grad_req = "null"
    frozen = PROBLEM.initial[0], PROBLEM.initial[3]

    def gradient(weights, index):
        (_, first, second, _), count = PROBLEM.gradient([frozen[0], *weights, frozen[1]], index)
        return [first, second], count

    twin, optimizer = case.make_twin(gradient, PROBLEM.initial[1:3]), oracle.SGD(**SETTINGS)
    for epoch, order in enumerate(orders(4)):
        if epoch in (1, 3):
            trainer.update_full_grads(loss_of, BATCHES)
            twin.refresh(BATCHES)
        for number in order:
            steps(case, trainer, loss_of, [number])
            twin.step(optimizer, BATCHES[number], rows=[number])
    first, *moved, last = values(net)
    assert distance(moved, twin.weights) < 1e-10
    assert_unchanged([first, last], frozen)


def test_the_rest_by_hand(case):
    """`correct_grads`, `allreduce_grads` and `update` are `step`."""
    found = []
    for by_hand in (False, True):
        net, loss_of, trainer = start(case, devices=TWO, update_on_kvstore=False)
        for epoch, order in enumerate(orders(3)):
            if epoch == 1:
                trainer.update_full_grads(loss_of, BATCHES)
            for number in order:
                index = BATCHES[number]
                if by_hand:
                    trainer.correct_grads(lambda: loss_of(index), **case.row(number))
                    trainer.allreduce_grads()
                    trainer.update(len(index))
                else:
                    steps(case, trainer, loss_of, [number])
        found.append(everything(trainer, net))
    assert_unchanged(*found)


# --- the plain optimizer -------------------------------------------------------------------------


def assert_plain(case, refresh, devices=None, **settings):
    kwargs = {"update_on_kvstore": False}
    net, loss_of, trainer = start(case, "float32", devices, **kwargs, **settings)
    twin = PROBLEM.network("float32", devices)
    twin_loss_of = PROBLEM.closure(twin, "float32", devices)
    plain = gluon.Trainer(twin.collect_params(), "sgd", SETTINGS, **kwargs)
    for epoch, order in enumerate(orders(3)):
        if epoch == 1 and refresh:
            trainer.update_full_grads(loss_of, BATCHES)
        for number in order:
            steps(case, trainer, loss_of, [number])
            index = BATCHES[number]
            plain_step(plain, lambda: twin_loss_of(index), len(index))
    for device in devices or [None]:
        assert_unchanged(values(net, device), values(twin, device))


@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize("devices", [None, TWO])
def test_factors_of_the_plain_optimizer(case, devices, refresh):
    if case.plain is None:
        pytest.skip("no factors make it the plain optimizer")
    assert_plain(case, refresh, devices, **case.plain)


@pytest.mark.parametrize("devices", [None, TWO])
def test_plain_without_a_refresh(case, devices):
    if not case.needs_refresh:
        pytest.skip("it needs no refresh")
    assert_plain(case, False, devices)


def test_plain_after_the_snapshot_is_discarded(case):
    if not case.needs_refresh:
        pytest.skip("it needs no refresh")
    net, loss_of, trainer = start(case, "float32")
    twin = PROBLEM.network("float32")
    twin_loss_of = PROBLEM.closure(twin, "float32")
    plain = gluon.Trainer(twin.collect_params(), "sgd", SETTINGS)
    steps(case, trainer, loss_of, range(5))
    for index in BATCHES:
        plain_step(plain, lambda: twin_loss_of(index), len(index))
    trainer.update_full_grads(loss_of, BATCHES)
    trainer.discard_snapshot()
    assert trainer.snapshot is None
    steps(case, trainer, loss_of, range(5))
    for index in BATCHES:
        plain_step(plain, lambda: twin_loss_of(index), len(index))
    assert_unchanged(values(net), values(twin))


# --- what else must hold -------------------------------------------------------------------------


def test_counters(case):
    _, loss_of, trainer = start(case)
    before = trainer.grad_evaluations
    trainer.update_full_grads(loss_of, BATCHES)
    assert (trainer.num_snapshots, trainer.inner_steps) == (1, 0)
    sizes = [len(batch) for batch in BATCHES]
    assert trainer.grad_evaluations - before == sum(sizes)
    steps(case, trainer, loss_of, [0, 1])  # more may be evaluated at first, to check
    before = trainer.grad_evaluations
    counting = kit.counted(loss_of)
    steps(case, trainer, counting, [2, 4])
    assert len(counting.calls) == 2 * case.gradients
    assert trainer.grad_evaluations - before == case.gradients * (5 + 3)
    assert (trainer.num_snapshots, trainer.inner_steps) == (1, 4)


def test_the_loss_is_that_at_the_current_weights(case):
    _, loss_of, trainer = start(case)
    for refresh in (False, True):
        if refresh:
            trainer.update_full_grads(loss_of, BATCHES)
        for number in (0, 3, 4):
            index = BATCHES[number]
            expected = loss_of(index).asnumpy()
            loss = trainer.step(len(index), closure=lambda: loss_of(index), **case.row(number))
            np.testing.assert_array_equal(loss.asnumpy(), expected)


def saved(trainer, net, folder):
    trainer.save_states(folder / "states")
    net.save_parameters(str(folder / "weights"))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("refreshed", [True, False])
def test_resume_in_mid_epoch(case, refreshed, devices, optimizer, tmp_path):
    """Bit for bit, over a refresh as well, with running statistics and dropout."""

    def begin(seed):
        mx.random.seed(seed)
        net = kit.with_dropout(devices, hybridize={}, norm=True)
        params = {"learning_rate": 0.05}
        trainer = case.make_trainer(
            net.collect_params(), optimizer, params, lock_random=True, update_on_kvstore=False
        )
        return net, PROBLEM.closure(net, "float32", devices), trainer

    def finish(net, loss_of, trainer):
        mx.random.seed(7)
        steps(case, trainer, loss_of, [4, 1])
        trainer.update_full_grads(loss_of, BATCHES)
        steps(case, trainer, loss_of, [0, 3, 2])
        return everything(trainer, net)

    net, loss_of, trainer = begin(1)
    steps(case, trainer, loss_of, range(5))
    if refreshed:
        trainer.update_full_grads(loss_of, BATCHES)
        steps(case, trainer, loss_of, [2, 0, 3])
    saved(trainer, net, tmp_path)
    resumed, resumed_loss_of, resumed_trainer = begin(2)
    resumed.load_parameters(str(tmp_path / "weights"), ctx=devices)
    if devices:  # a file of weights holds the mean of the devices' running statistics
        net.load_parameters(str(tmp_path / "weights"), ctx=devices)
    resumed_trainer.load_states(tmp_path / "states")
    straight = finish(net, loss_of, trainer)
    assert_unchanged(straight, finish(resumed, resumed_loss_of, resumed_trainer))


@pytest.mark.parametrize("hybridize", kit.HYBRIDIZE)
def test_running_statistics_move_as_with_gluon_trainer(case, hybridize):
    """A pass elsewhere does not move them. The weights do not move here."""
    found = []
    for plain in (True, False):
        mx.random.seed(1)
        net = kit.with_norm(hybridize=hybridize)
        loss_of = PROBLEM.closure(net, "float32")
        params, still = net.collect_params(), {"learning_rate": 0.0}
        if plain:
            trainer = gluon.Trainer(params, "sgd", still)
            for index in [*BATCHES, *BATCHES]:
                plain_step(trainer, lambda: loss_of(index), len(index))
        else:
            trainer = case.make_trainer(params, "sgd", still)
            steps(case, trainer, loss_of, range(5))
            trainer.update_full_grads(loss_of, BATCHES)
            steps(case, trainer, loss_of, range(5))
        mx.nd.waitall()
        found.append([net[1].running_mean.data().asnumpy(), net[1].running_var.data().asnumpy()])
    assert_unchanged(*found)


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize("devices", [None, TWO])
def test_an_error_leaves_everything_unchanged(case, devices, refresh, grad_req):
    """In the closure or the data: training goes on as if nothing had happened."""
    found = []
    for fails in (False, True):
        mx.random.seed(1)
        net = kit.with_norm(devices)
        for p in net.collect_params().values():
            p.grad_req = p.grad_req if p.grad_req == "null" else grad_req
        loss_of = PROBLEM.closure(net, "float32", devices)
        trainer = case.make_trainer(net.collect_params(), update_on_kvstore=False)
        steps(case, trainer, loss_of, [3])  # the first step shares running statistics
        if refresh:
            trainer.update_full_grads(loss_of, BATCHES)
        for number in (2, 0, 4):
            index = BATCHES[number]
            before = everything(trainer, net)
            passes = case.gradients if refresh or not case.needs_refresh else 1
            for good_calls in range(passes if fails else 0):
                bad = kit.failing(loss_of, good_calls)
                with pytest.raises(KeyError, match="mine"):
                    trainer.step(len(index), closure=lambda: bad(index), **case.row(number))
                assert_unchanged(before, everything(trainer, net))
            if fails:
                with pytest.raises(KeyError, match="mine"):
                    trainer.update_full_grads(kit.failing(loss_of, 3), BATCHES)
                with pytest.raises(IndexError, match="out of bounds"):
                    trainer.update_full_grads(loss_of, [*BATCHES, np.array([99])])
                assert_unchanged(before, everything(trainer, net))
            kit.clear(net)
            steps(case, trainer, loss_of, [number])
        found.append(everything(trainer, net))
    assert_unchanged(*found)


def test_an_update_that_fails_moves_nothing(case):
    """Neither the reference nor m nor the table; the step can be made again."""
    found = []
    for fails in (False, True):
        net, loss_of, trainer = start(case)
        trainer.update_full_grads(loss_of, BATCHES)
        for number in (1, 4, 1, 0):
            index = BATCHES[number]
            if fails:
                size = kit.Indivisible(len(index))
                with pytest.raises(ZeroDivisionError):
                    trainer.step(size, closure=lambda: loss_of(index), **case.row(number))
            steps(case, trainer, loss_of, [number])
        found.append(everything(trainer, net))
        found[-1].pop("grad_evaluations")  # of the steps that failed as well
    assert_unchanged(*found)


def test_a_step_that_amp_skips_moves_nothing(case):
    found = []
    for overflows in (False, True):
        net, loss_of, trainer = start(case, "float32")
        scaler = kit.scale_losses(trainer)
        trainer.update_full_grads(loss_of, BATCHES)
        for number in (1, 4, 1, 0):
            index = BATCHES[number]
            if overflows and trainer.inner_steps > 1:
                trainer.step(len(index), closure=lambda: loss_of(index) * 1e38, **case.row(number))
            scaler._loss_scale = scaler._next_loss_scale = 2.0**8
            steps(case, trainer, loss_of, [number])
        found.append(everything(trainer, net))
        for name in ("grad_evaluations", "inner_steps"):
            found[-1].pop(name)
    assert_unchanged(*found)
