"""What every method must pass, each against its twin in NumPy, and what some must; see `plays`."""

from dataclasses import replace
from functools import partial

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import HYBRIDIZE, assert_unchanged, backward, everything, plain_step, split_at
from mxnet import gluon
from plays import BATCHES, CASES, PARTLY, PARTS, PROBLEM, SETTINGS, STATIC, TWO, Play, each_method
from problems import Dense, contexts, distance, parameters, values

from gluon_svrg import MARSTrainer, SAGTrainer, SARAHTrainer, STORMTrainer
from gluon_svrg.passes import combine


@kit.table("count, hybridize", (1, None), (1, STATIC), (2, {}), (3, None), (3, HYBRIDIZE[2]))
@each_method
def test_trajectory(case, count, hybridize):
    """Uneven minibatches, unevenly over the devices: of 5 entries the first of three gets none."""
    split = split_at([0.1, 0.5][3 - count :])
    Play(case, devices=contexts(count), hybridize=hybridize, split=split).run()


@each_method
def test_trajectory_in_float32(case):
    """With large layers, which MXNet computes in other ways."""
    problem = Dense("classification", hidden=(200,), features=500, seed=42)
    Play(case, problem, devices=TWO, dtype="float32").run(2e-5)


@each_method
def test_minibatches_of_many_sizes(case, monkeypatch):
    """What is compiled for the first sizes does for all others; only some calls are kept."""
    monkeypatch.setattr(combine, "_SEVERAL", 4)
    monkeypatch.setattr(combine, "_MOST", 12)
    for name in ("_known", "_quick"):
        monkeypatch.setattr(combine, name, {})
    problem = Dense("classification", hidden=(5,), seed=46, samples=66)
    play = Play(case, problem)
    play.shares = [np.split(np.arange(66), np.cumsum(range(1, 11)))]
    play.run(parts=(range(11), range(10, -1, -1)))
    most = 1 if case.twin is oracle.MARS and case.gradients == 2 else combine._SEVERAL + 2
    assert max(map(len, combine._known.values())) == most
    compiled = [each for known in combine._known.values() for each in known.values()]
    assert max(len(each._calls) for each in compiled) <= combine._MOST + 1


@pytest.mark.parametrize("how, devices", [("step", None), ("step", TWO), ("add", TWO)])
@each_method
def test_the_scale_of_the_losses_does_not_matter(case, how, devices):
    """AMP's; it changes from update to update."""
    play = Play(case, how=how, devices=devices, dtype="float32")
    scaler = kit.scale_losses(play.trainer)
    for count, numbers in enumerate(((1, 2), (3, 0), (1, 4), (0, 1), (2, 3), (0, 2), (3, 1))):
        if count in (2, 5):
            play.refresh()
        scaler._loss_scale = scaler._next_loss_scale = 2.0 ** (6 + count % 4)
        if how == "step":
            play.update(numbers[0])
            continue
        for number in numbers:
            play.correct(number)
        batches, rows = play.of_all(numbers)
        play.trainer.step(sum(map(len, batches)))
        kit.clear(play.net)
        play.twin.step(play.optimizer, *batches, rows=rows)
    assert play.distance() < 2e-5


@each_method
def test_frozen_parameters(case):
    """They stay where they are, and the method goes on for the others."""
    play = Play(case)
    parameters(play.net)[0].grad_req = parameters(play.net)[3].grad_req = "null"
    frozen = PROBLEM.initial[0], PROBLEM.initial[3]

    def gradient(weights, index):
        (_, first, second, _), count = PROBLEM.gradient([frozen[0], *weights, frozen[1]], index)
        return [first, second], count

    play.twin = case.make_twin(gradient, PROBLEM.initial[1:3])
    for number, order in enumerate(PARTS):
        if number:
            play.refresh()
        play.epoch(order)
    first, *moved, last = values(play.net)
    assert distance(moved, play.twin.weights) < 1e-10
    assert_unchanged([first, last], frozen)
    play.trainer.discard_snapshot()
    play.require("null")
    with pytest.raises(ValueError, match="all are frozen"):
        play.refresh()
    plain = RuntimeError, "its loss depends on no parameter"  # as any loss of `gluon.Trainer`
    error, message = plain if case.needs_refresh else (ValueError, "all are frozen")
    with pytest.raises(error, match=message):
        play.update(0)


def refresh_and_discard(play):
    play.refresh()
    play.trainer.discard_snapshot()
    assert play.trainer.snapshot is play.trainer.full_grads is None


#: Methods whose factors make them plain, with what is done between two parts of the training; and
#: those that are plain without a snapshot.
FACTORS = [(name, case.plain) for name, case in CASES.items() if case.plain]
FACTORS.append(("MARS", {"beta": 0, "clip": 1e9, "include_vectors": True}))
BESIDE = [("sgd", None, Play.refresh), ("adam", TWO, Play.refresh), ("adadelta", TWO, None)]
WITHOUT = [("sgd", None, refresh_and_discard), ("sgd", TWO, None)]


@kit.table(
    "name, own, optimizer, devices, between",
    *((*factors, *way) for factors in FACTORS for way in BESIDE),
    *((name, {}, *way) for name in ("SVRG", "SARAH") for way in WITHOUT),
)
def test_the_plain_optimizer(name, own, optimizer, devices, between):
    """It is `gluon.Trainer`, bit for bit; on one device also for layers that are not reached."""
    case, settings = CASES[name], SETTINGS if optimizer == "sgd" else {}
    problem = PROBLEM if devices else PARTLY
    kwargs = {"update_on_kvstore": None if case.trainer == "SVRGTrainer" else False}
    own = {"optimizer": optimizer, "optimizer_params": settings, **kwargs, **own}
    play = Play(case, problem, dtype="float32", devices=devices, ignores_stale=True, **own)
    kwargs.update(optimizer=optimizer, settings=settings)
    net, loss_of, plain = kit.make(problem, "float32", devices, cls=gluon.Trainer, **kwargs)
    for number, order in enumerate(PARTS):
        if number and between:
            between(play)
        for each in order:
            play.step_alone(each)
            index = BATCHES[each]
            plain_step(plain, lambda: loss_of(index), len(index), ignore_stale_grad=True)
    for device in devices or [None]:
        assert_unchanged(values(play.net, device), values(net, device))


@each_method
def test_never_silently_plain(case):
    """The user's own backward gives no estimate, except where the method is the plain optimizer."""
    play = Play(case)
    trainer, message = play.trainer, r"needs .* gradients.*: pass step\(.* correct_grads"
    calls = (lambda: trainer.step(5), trainer.allreduce_grads, lambda: trainer.update(5))
    for action in (None, play.refresh, None, trainer.discard_snapshot):
        if action:
            action()
        for call in calls:
            backward(lambda: play.loss_of(BATCHES[0]))
            if case.needs_refresh and not trainer.has_snapshot:
                call()
                continue
            with play.refuses(RuntimeError, message):
                call()
        play.step_alone(0)


@each_method
def test_counters_and_the_loss_that_a_step_returns(case):
    play = Play(case, refreshed=True)
    trainer = play.trainer
    assert (trainer.num_snapshots, trainer.inner_steps, trainer.grad_evaluations) == (1, 0, 23)
    play.epoch((0, 1))  # the first may compute losses once more, to check
    before, play.loss_of = trainer.grad_evaluations, kit.counted(play.loss_of)
    for number in (2, 4):
        expected = PROBLEM.closure(play.net)(BATCHES[number]).asnumpy()
        np.testing.assert_array_equal(play.step_alone(number).asnumpy(), expected)
    assert len(play.loss_of.calls) == 2 * case.gradients
    assert trainer.grad_evaluations - before == case.gradients * (5 + 3)
    assert (trainer.num_snapshots, trainer.inner_steps) == (1, 4)
    play.refresh()
    assert (trainer.num_snapshots, trainer.inner_steps) == (2, 0)
    play.update(0)
    trainer.discard_snapshot()
    assert (trainer.num_snapshots, trainer.inner_steps, trainer.has_snapshot) == (2, 0, False)


@each_method
def test_the_history_has_a_line_for_each_refresh(case):
    """An error adds none. Tests of files see that it is saved."""
    play, expected = Play(case), []
    losses, everyone = PROBLEM.closure(plain := PROBLEM.network()), np.arange(23)
    assert play.trainer.history == []
    for steps, order in [(2, (1, 3)), (5, (4, 0, 2)), (6, (0,))]:
        play.epoch(order)
        play.optimizer.learning_rate = play.trainer.learning_rate = 0.05 / steps
        PROBLEM.assign(plain, now := values(play.net))
        mean_loss = play.refresh()
        gradient = [g / 23 for g in PROBLEM.gradient(now, everyone)[0]]
        assert mean_loss == pytest.approx(losses(everyone).asnumpy().mean(dtype="float64"), 1e-6)
        assert play.distance() < 1e-10  # a rate that is set takes effect in the next step
        line = {
            "data_passes": play.trainer.grad_evaluations / 23,
            "steps": steps,
            "mean_loss": mean_loss,
            "gradient_norm": pytest.approx(np.sqrt(sum(np.sum(g**2) for g in gradient))),
            "learning_rate": pytest.approx(0.05 / steps),
            "coefficient": getattr(play.trainer, "coefficient", None),
        }
        expected.append(line)
    with pytest.raises(FloatingPointError, match="not finite"):
        play.refresh_alone(lambda index: play.loss_of(index) * np.inf, BATCHES)
    play.trainer.discard_snapshot()
    assert play.trainer.history == expected


def fail_everywhere(play, number):
    """In the closure, at each of its calls, and in the data, also by Ctrl-C; nothing changes."""
    trainer, net, index = play.trainer, play.net, BATCHES[number]
    before, grads = everything(trainer, net), _grads(net)
    is_plain = play.case.needs_refresh and not trainer.has_snapshot
    for error in (KeyError, KeyboardInterrupt):
        for good_calls in range(1 if is_plain else play.case.gradients):
            bad = kit.failing(play.loss_of, good_calls, error)
            with pytest.raises(error, match="mine"):
                play.step_alone(number, closure=lambda: bad(index))
            assert_unchanged(before, everything(trainer, net))
        with pytest.raises(error, match="mine"):
            play.refresh_alone(kit.failing(play.loss_of, 3, error), BATCHES)
    with pytest.raises(IndexError, match="out of bounds"):
        play.refresh_alone(play.loss_of, [*BATCHES, np.array([99])])
    assert_unchanged(before, everything(trainer, net))
    if play.how == "add":
        assert_unchanged(grads, _grads(net))


def _grads(net):
    params = [p for p in net.collect_params().values() if p.grad_req != "null"]
    return [grad.asnumpy() for p in params for grad in p.list_grad()]


@kit.table("devices, refreshed, how", (None, 1, "step"), (TWO, 1, "add"), (None, 0, "add"))
@each_method
def test_an_error_leaves_everything_unchanged(case, devices, refreshed, how):
    problem, found = Dense("classification", hidden=(6,)), []
    problem.network = lambda dtype, devices, hybridize: kit.with_norm(devices, hybridize)
    for fails in (False, True):
        mx.random.seed(1)
        play = Play(case, problem, how, devices, dtype="float32")
        play.step_alone(3)  # the first step shares running statistics
        if refreshed:
            play.refresh_alone(play.loss_of, BATCHES)
        for number in (2, 0, 4):
            if fails:
                fail_everywhere(play, number)
            kit.clear(play.net)
            play.step_alone(number)
        found.append(everything(play.trainer, play.net))
    assert_unchanged(*found)


@pytest.mark.parametrize("devices", [contexts(1), TWO])
@pytest.mark.parametrize("kind", ["an error", "an overflow"])
@each_method
def test_a_step_without_an_update_moves_nothing(case, kind, devices):
    """Neither the reference nor m nor the table; also the first step, which has no reference."""
    found = []
    for fails in (False, True):
        play = Play(case, devices=devices, dtype="float32")
        scaler = kit.scale_losses(play.trainer) if kind == "an overflow" else None
        for count, number in enumerate((1, 4, 1, 0, 3, 0)):
            if count == 3:
                play.refresh_alone(play.loss_of, BATCHES)
            if fails and count in (0, 1, 3, 4):
                step_without_an_update(play, number, scaler)
            if scaler:
                scaler._loss_scale = scaler._next_loss_scale = 2.0**8
            play.step_alone(number)
        found.append(everything(play.trainer, play.net))
        for name in ("grad_evaluations", "inner_steps"):  # of the other steps as well
            found[-1].pop(name)
    assert_unchanged(*found)


def step_without_an_update(play, number, scaler):
    before, index = values(play.net), BATCHES[number]
    if scaler:
        is_compared = play.case.indexed and not play.trainer.inner_steps  # with the row's losses
        for factor in (np.nan, np.inf, *([] if is_compared else [1e38])):
            play.step_alone(number, closure=lambda: [x * factor for x in play.loss_of(index)])
    else:
        with pytest.raises(ZeroDivisionError):
            play.step_alone(number, kit.Indivisible(len(index)))
        if play.trainer.has_snapshot or not play.case.needs_refresh:
            with pytest.raises(RuntimeError, match=r"needs .* gradients"):
                play.trainer.step(5)
    assert_unchanged(before, values(play.net))


@each_method
def test_a_file_of_gluon_trainer_starts_anew(case, tmp_path):
    _, loss_of, plain = kit.make(PROBLEM, cls=gluon.Trainer, settings=SETTINGS)
    plain_step(plain, lambda: loss_of(BATCHES[0]), 5)
    plain.save_states(str(tmp_path / "states"))
    play = Play(case, refreshed=True)
    play.epoch((0, 1, 2))
    assert play.trainer.inner_steps == 3
    play.trainer.load_states(tmp_path / "states")
    assert (play.trainer.inner_steps, play.trainer.has_snapshot) == (0, False)
    assert case.needs_refresh or case.indexed or play.trainer.full_grads is None


RECURSIVE = {name: CASES[name] for name in ("SARAH", "STORM", "MARS", "approximate MARS")}
OF_MATRICES = {"gamma": 0.1, "exact": False, "clip": 0.2}
RECURSIVE["MARS of matrices"] = replace(CASES["approximate MARS"], settings=OF_MATRICES)
each_recursive = pytest.mark.parametrize("case", RECURSIVE.values(), ids=RECURSIVE)


@each_recursive
def test_what_the_snapshot_is(case):
    """The weights before the last step, and the mean gradient that the next step leans on."""
    play = Play(case)
    trainer, net = play.trainer, play.net
    assert not trainer.has_snapshot and trainer.snapshot is trainer.full_grads is None
    if case.needs_refresh:
        play.refresh()
    for count, number in enumerate((2, 3, 4), 1):
        before = values(net)
        play.update(number)
        assert trainer.has_snapshot and trainer.inner_steps == count
        if case.gradients == 2:
            assert_unchanged([trainer.snapshot[p][0].asnumpy() for p in parameters(net)], before)
            with trainer.at_snapshot():
                assert_unchanged(values(net), before)
        else:
            assert trainer.snapshot is None
            with pytest.raises(RuntimeError, match="has none now"), trainer.at_snapshot():
                pass
        check_mean(play)
    play.refresh()
    check_mean(play)
    play.update(0)
    check_mean(play)


def check_mean(play):
    if play.case is RECURSIVE["MARS"]:
        assert play.trainer.full_grads is None
        return
    found, expected = kit.full_gradients(play.trainer, play.net), play.twin.mean
    if play.case is RECURSIVE["MARS of matrices"]:  # vectors are left alone
        assert not found[1].any() and not found[3].any()
        found, expected = found[::2], expected[::2]
    assert distance(found, expected) < 1e-12


COMPRESSION = {"compression_params": {"type": "2bit", "threshold": 0.5}}
make = partial(kit.make, PROBLEM, devices=TWO)
test_arguments_that_are_refused = kit.refusals(
    (lambda: make(cls=SARAHTrainer, **COMPRESSION), ValueError, "keep the errors"),
    (lambda: make(cls=MARSTrainer, exact=False, **COMPRESSION), ValueError, "keep the errors"),
    (lambda: make(cls=STORMTrainer, mixing=1.5), ValueError, "mixing .* and at most 1, got 1.5"),
    (lambda: make(cls=MARSTrainer, gamma=-1), ValueError, "gamma must be .*, at least 0, got -1"),
    (lambda: make(cls=MARSTrainer, beta=1.0), ValueError, "beta .* 1, in float32 too, got 1.0"),
    (lambda: make(cls=MARSTrainer, exact="no"), TypeError, "must be True or False, got 'no'"),
    (lambda: make(cls=SAGTrainer, **COMPRESSION), ValueError, "SAGTrainer cannot compress"),
)


@each_recursive
def test_calls_that_are_refused(case):
    play = Play(case)
    trainer, loss_of = play.trainer, play.loss_of
    with pytest.raises(ValueError, match="no use for stored gradients"):
        trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    with pytest.raises(TypeError, match="batch_index names a stored gradient"):
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=0)


def test_files_of_exact_mars_are_refused_by_approximate_mars(tmp_path):
    play, other = Play(RECURSIVE["MARS"]), Play(RECURSIVE["approximate MARS"])
    play.epoch((0, 1))
    play.trainer.save_states(tmp_path / "states")
    with pytest.raises(ValueError, match="it has weights, unlike"):
        other.trainer.load_states(tmp_path / "states")
    other.follow(0, 1)  # nothing was changed


problems = st.builds(
    Dense,
    st.sampled_from(["regression", "classification"]),
    hidden=st.lists(st.integers(1, 5), max_size=2),
    samples=st.integers(2, 17),
    features=st.integers(1, 4),
    seed=st.integers(0, 99),
)


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@given(
    problem=problems,
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=2),
    coefficient=st.sampled_from([0.25, 1.0]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_at_the_snapshot(hybridize, problem, sizes, coefficient, dtype):
    """The estimate is the full gradient, in which samples weigh alike, however they are cut."""
    net, loss_of, trainer = kit.make(problem, dtype, hybridize=hybridize)
    eps = np.finfo(dtype).eps
    total, count = problem.gradient(problem.initial, np.arange(len(problem.X)))
    losses = loss_of(np.arange(count)).asnumpy().astype("float64")
    for size in sizes:
        mean_loss = trainer.update_full_grads(loss_of, problem.batches(size))
        assert mean_loss == pytest.approx(losses.mean(), rel=100 * eps)
        mean = kit.full_gradients(trainer, net)
        assert distance(mean, [grad / count for grad in total]) < 1000 * eps
    trainer.coefficient = coefficient
    for index in problem.batches(sizes[0]):
        backward(lambda: loss_of(index))
        plain = kit.gradients(net)
        trainer.correct_grads(lambda: loss_of(index))
        pairs = [(g, len(index) * mu) for g, mu in zip(plain, mean)]
        expected = [(1 - coefficient) * g + coefficient * mu for g, mu in pairs]
        scale = max(np.abs(g).max() for g in plain + expected)
        for estimate, value in zip(kit.gradients(net), expected):
            assert np.abs(estimate - value).max() <= 4 * eps * scale
