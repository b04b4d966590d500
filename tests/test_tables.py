"""Gradients of minibatches in a table: SAGA, SAG, stored gradients of SVRG; the exact variance."""

import copy
from contextlib import nullcontext
from functools import partial

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from mxnet import gluon
from plays import BATCHES, CASES, PROBLEM, TWO, WITH_STORED, Play
from problems import array, contexts, distance, flat, parameters, values

from gluon_svrg import MARSTrainer, SAGATrainer, SVRGTrainer
from gluon_svrg.variance import variance

TABLES = {name: WITH_STORED[name] for name in ("SAGA", "SAG", "stored")}
each_table = pytest.mark.parametrize("case", TABLES.values(), ids=TABLES)
both = pytest.mark.parametrize("case", [TABLES["SAGA"], TABLES["SAG"]], ids=["SAGA", "SAG"])


@both
@pytest.mark.parametrize("count, refresh, small", [(1, 0, 99), (1, 0, 0), (2, 1, 0), (3, 0, 99)])
def test_the_mean_is_that_of_the_rows(case, count, refresh, small, monkeypatch):
    """Each row is the gradient at the weights of its last visit. Indices may have gaps."""
    monkeypatch.setattr("gluon_svrg.passes.columns.SMALL", small)
    split = kit.split_at([0.1, 0.5][3 - count :])
    play = Play(case, devices=contexts(count), split=split, refreshed=refresh)
    for number in (3, 3, 0, 4, 0, 0, 1, 4, 3):
        index, row = BATCHES[number], np.int64(number if refresh else 10 * number)
        play.trainer.step(len(index), closure=lambda: play.loss_of(index), batch_index=row)
        play.twin.step(play.optimizer, index, rows=[(0, row)])
        assert distance(kit.full_gradients(play.trainer, play.net), play.twin.mean) < 1e-12


def test_the_mean_of_the_table_does_not_drift():
    """Where nothing moves, steps leave it: ``(g - r) + S`` is exact, ``(S + g) - r`` is not."""
    settings = {"learning_rate": 0.0}
    play = Play(TABLES["SAGA"], dtype="float32", settings=settings, refreshed=True)
    before = kit.full_gradients(play.trainer, play.net)
    for _ in range(300):
        play.step_alone(4)  # 3 of 23 loss entries
    assert distance(kit.full_gradients(play.trainer, play.net), before) == 0


def test_the_progress_bar_shows_the_bytes(capfd):
    size = 4 * sum(value.size for value in PROBLEM.initial) / 1e6
    _, loss_of, trainer = kit.make(PROBLEM, "float32", deferred=True)
    for data, words in ((iter(BATCHES), f"{size:.3g} MB each"), (BATCHES, f"{5 * size:.3g} MB")):
        trainer.update_full_grads(loss_of, data, store_grads=True, progress=True)
        assert f"storing {words}" in capfd.readouterr().err


@kit.table(
    "index, error, message",
    (5, IndexError, "batch_index is 5, and the gradients of 5 mini-batches are stored"),
    (-1, IndexError, "batch_index is -1"),
    (1.0, TypeError, "batch_index, .*, must be a whole number, got float"),
    (True, TypeError, "got bool"),
    (4, ValueError, r"Mini-batch 4 had \[3\] loss entries .* gradient .* returned \[5\]"),
)
@each_table
def test_a_wrong_index(case, index, error, message):
    play, drawn = Play(case, lock_random=True, refreshed=True), set()
    for _ in range(2):  # before and after the check of the first row
        with play.refuses(error, message):
            play.trainer.step(5, closure=lambda: play.loss_of(BATCHES[0]), batch_index=index)
        drawn.add(mx.nd.random.uniform(shape=(1,)).asscalar())
        play.follow(1)
    assert len(drawn) == 2  # random numbers go on after an error


@both
def test_indices_without_a_refresh(case):
    play = Play(case, how="add")
    with pytest.raises(IndexError, match=r"batch_index is -1, .* position of a mini-batch"):
        play.trainer.correct_grads(lambda: play.loss_of(BATCHES[0]), batch_index=-1)
    play.correct(0)
    with pytest.raises(ValueError, match=r"batch_index=0 was used since the last update: call"):
        play.correct(0)
    play.correct(1)
    play.trainer.step(10)
    play.twin.step(play.optimizer, *BATCHES[:2], rows=[0, 1])
    assert play.distance() < 1e-12


@pytest.mark.parametrize("again", [False, True])
def test_an_index_without_stored_gradients(again):
    """Before any refresh it has no effect; and it may be left out."""
    play = Play(TABLES["stored"])
    play.trainer.step(5, closure=lambda: play.loss_of(BATCHES[1]), batch_index=7)
    play.twin.step(play.optimizer, BATCHES[1])
    if again:
        play.refresh()
    for number in (1, 3, 1):
        play.trainer.step(5, closure=lambda: play.loss_of(BATCHES[number]))
        play.twin.step(play.optimizer, BATCHES[number])
        play.follow(number)
    play.trainer.update_full_grads(play.loss_of, BATCHES)  # this one stores nothing
    with play.refuses(RuntimeError, r"update_full_grads\(closure, data, store_grads=True\)"):
        play.step_alone(0)


@pytest.mark.parametrize("looks", [False, True])
@each_table
def test_reshuffled_data_are_found_by_the_first_step_after_each_refresh(case, looks):
    """At the weights of the rows. An overflow, or a look at other weights, confirms nothing."""
    play = Play(case)
    for data in (BATCHES, BATCHES[::-1]):
        play.refresh_alone(play.loss_of, data)
        if looks:
            before = values(play.net)
            kit.move(play.net, 0.01)
            variance(play.trainer, play.loss_of, data)
            PROBLEM.assign(play.net, before)
        play.trainer.correct_grads(lambda: play.loss_of(data[1]) * np.nan, batch_index=1)
        with play.refuses(RuntimeError, r"mini-batch 1 differs .* was the data reshuffled"):
            play.trainer.step(5, closure=lambda: play.loss_of(data[2]), batch_index=1)
        counted = kit.counted(play.loss_of)
        for moves, expected in ((False, 2), (False, 1), (True, 2)):
            if moves:  # by the user: the rows are still those of the refresh
                play.refresh_alone(play.loss_of, data)
                kit.move(play.net, 0.01)
            counted.calls.clear()
            play.trainer.step(5, closure=lambda: counted(data[1]), batch_index=1)
            assert len(counted.calls) == expected


def test_stored_gradients_in_a_file(tmp_path):
    """They are compared once more: the data may be others. Devices must be as many."""
    play, other, of_two = (Play(TABLES["stored"], devices=each) for each in (None, None, TWO))
    play.refresh()
    play.update(0)
    play.trainer.save_states(tmp_path / "states")
    PROBLEM.assign(other.net, values(play.net))
    other.trainer.load_states(tmp_path / "states")
    with pytest.raises(RuntimeError, match="reshuffled"):
        other.trainer.step(5, closure=lambda: other.loss_of(BATCHES[1]), batch_index=0)
    with pytest.raises(ValueError, match="stored gradients are for 1 devices, and there are 2"):
        of_two.trainer.load_states(tmp_path / "states")


@pytest.mark.parametrize("others", ["stay", "weights_have_moved", "statistics_have_moved"])
@each_table
def test_the_first_row(case, others):
    """Where others' weights have moved, its losses prove nothing; no training reads statistics."""
    net = kit.with_norm()
    play, play.loss_of = Play(case), PROBLEM.closure(net, "float32")
    play.trainer = case.make_trainer(net[2].collect_params())
    play.refresh()
    if others == "weights_have_moved":
        net[0].bias.set_data(net[0].bias.data() + 1)
    elif others == "statistics_have_moved":
        kit.backward(lambda: play.loss_of(BATCHES[0]))
    refused = pytest.raises(RuntimeError, match="was the data reshuffled")
    with nullcontext() if others == "weights_have_moved" else refused:
        play.trainer.step(5, closure=lambda: play.loss_of(BATCHES[2]), batch_index=1)


def test_no_check_of_the_first_row():
    """With the lock off, no weights are kept for it."""
    play = Play(TABLES["SAGA"], lock_random=False)
    for batch in (BATCHES[0], BATCHES[2]):
        play.trainer.step(5, closure=lambda batch=batch: play.loss_of(batch), batch_index=0)
    assert play.trainer._method.taken_at._point is None


@each_table
def test_a_row_of_as_many_entries_on_other_devices(case):
    play = Play(case, devices=TWO, split=kit.split_at([0.4]), refreshed=True)
    other = PROBLEM.closure(play.net, "float64", TWO, kit.split_at([0.6]))
    with pytest.raises(ValueError, match=r"had \[2, 3\] .* returned \[3, 2\]"):
        play.trainer.step(5, closure=lambda: other(BATCHES[0]), batch_index=0)


@both
def test_a_step_needs_an_index_and_there_is_no_snapshot(case):
    play = Play(case)
    trainer, closure = play.trainer, lambda: play.loss_of(BATCHES[0])
    with pytest.raises(RuntimeError, match="the table is empty"):
        variance(trainer, play.loss_of, BATCHES)
    for call in (lambda: trainer.step(5, closure=closure), lambda: trainer.correct_grads(closure)):
        with pytest.raises(TypeError, match=r"(step|correct_grads).. needs batch_index"):
            call()
    play.refresh()
    assert (trainer.has_snapshot, trainer.wants_snapshot, trainer.snapshot) == (0, 0, None)
    message = rf"at_snapshot\(\) needs a snapshot, and {case.trainer}"
    with pytest.raises(RuntimeError, match=message), trainer.at_snapshot():
        pass


# --- the variance over a data set, against NumPy on enumerated minibatches -----------------------
make = partial(kit.make, PROBLEM)


def cosine_distance(rows):
    """The mean over pairs of rows that are not zero."""
    units = [row / np.linalg.norm(row) for row in rows if row.any()]
    pairs = [1 - a @ b for i, a in enumerate(units) for j, b in enumerate(units) if i != j]
    return np.mean(pairs) if pairs else np.nan


@pytest.mark.parametrize("split", [None, kit.split_at([0.4])], ids=["one device", "two devices"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_numpy(case, split):
    """Of v and of the control variate g - v; on one device, a table has empty rows."""
    play = Play(case, how="add" if split else "step", devices=split and TWO, split=split)
    if case.needs_refresh or (case.indexed and split):
        play.refresh()
    play.epoch((3, 0, 4))
    play.correct(1)
    before = kit.everything(play.trainer, play.net), kit.gradients(play.net)
    found = variance(play.trainer, play.loss_of, BATCHES)  # changes nothing, also in mid-step
    kit.assert_unchanged(before[0], kit.everything(play.trainer, play.net))
    kit.assert_unchanged(before[1], kit.gradients(play.net))
    play.trainer.step(5)  # the gradients are still fresh
    counts, now = np.array(list(map(len, BATCHES))), play.twin.weights
    plain = [flat(PROBLEM.gradient(now, index)[0]) for index in BATCHES]
    estimates = []
    for number, index in enumerate(BATCHES):
        twin, row = copy.deepcopy(play.twin), (0, number)
        estimates.append(flat(twin.advance(twin.estimate(index, row), [index], [row])))
    g, v = (np.array(rows) / counts[:, None] for rows in (plain, estimates))
    mean, bias = (np.average(rows, axis=0, weights=counts) for rows in (g, g - v))

    def covariance(these, those):
        these, those = (x - np.average(x, axis=0, weights=counts) for x in (these, those))
        return np.average((these * those).sum(axis=1), weights=counts)

    expected = {
        "plain": covariance(g, g),
        "estimate": covariance(v, v),
        "ratio": covariance(v, v) / covariance(g, g),
        "noise": covariance(g, g) / (mean @ mean),
        "gradient_norm": np.linalg.norm(mean),
        "cosine_distance_plain": cosine_distance(g),
        "cosine_distance_estimate": cosine_distance(v),
        "minibatches": len(BATCHES),
    }
    moved = flat(now) - flat(play.twin.reference) if case.gradients == 2 else np.nan
    expected["distance"] = np.linalg.norm(moved)
    if case.trainer in ("SVRGTrainer", "SAGATrainer"):
        ends = np.cumsum([w.size for w in now])[:-1]
        parts = [(g, g - v), *zip(*(np.split(x, ends, axis=1) for x in (g, g - v)))]
        best, *of_each = (covariance(x, c) / covariance(c, c) for x, c in parts)
        factor = oracle.rounded(case.settings.get("coefficient", 1))
        expected["best_coefficient"] = factor * best
        coefficients = [found.best_coefficients[p] for p in parameters(play.net)]
        np.testing.assert_allclose(coefficients, factor * np.array(of_each), rtol=1e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(found.bias, np.linalg.norm(bias), rtol=1e-9, atol=1e-10)
    is_unbiased = case.trainer == "SVRGTrainer" or (case.trainer == "SAGATrainer" and split)
    assert (found.bias < 1e-9) == bool(is_unbiased)


def regression(data, dtype, **kwargs):
    net = gluon.nn.Dense(1, in_units=2, use_bias=False, dtype=dtype)
    net.initialize(mx.init.Zero())
    trainer = SVRGTrainer(net.collect_params(), "sgd", **kwargs)
    batches = [(array([x], dtype), array([[y]], dtype)) for x, y in data]
    loss_function = gluon.loss.L2Loss()

    def loss_of(X, y):
        return loss_function(net(X), y)

    trainer.update_full_grads(loss_of, batches)
    return variance(trainer, loss_of, batches)


@kit.table("targets", (1, 1, 0, 0), (0, 0, 0), (2, 0), (1, 0, -3, 0), (1, 2, -1, 4, 0, -2), ids=str)
def test_cosines_of_gradients_that_have_a_direction(targets):
    """A zero gradient has none: pairs with one are left out, and of no pair the mean is nan."""
    data = [([1.0, k % 3], float(y)) for k, y in enumerate(targets)]
    found = regression(data, "float64", coefficient=0.5)
    plain = np.array([[-y, -y * (k % 3)] for k, y in enumerate(targets)], dtype=float)
    for rows, name in ((plain, "plain"), (plain - 0.5 * (plain - plain.mean(axis=0)), "estimate")):
        value = getattr(found, f"cosine_distance_{name}")
        np.testing.assert_allclose(value, cosine_distance(rows), atol=1e-12, err_msg=name)


def test_noise_where_there_is_no_gradient():
    found = regression([([1.0, 0.0], sign) for sign in (1, -1)], "float32")
    assert (found.plain, found.gradient_norm, found.noise) == (1.0, 0.0, np.inf)


def test_random_numbers_after_a_variance():
    """They do not follow from the seeds of rows, where the lock was turned off later as well."""
    _, loss_of, trainer = make(cls=SAGATrainer, lock_random=True)
    trainer.update_full_grads(loss_of, BATCHES)
    trainer.lock_random, found = False, []
    for seed in (1, 2):
        mx.random.seed(seed)
        variance(trainer, loss_of, BATCHES)
        found.append(mx.nd.random.uniform().asscalar())
    assert found[0] != found[1]


def test_errors_of_a_variance():
    """The message about a coefficient of 0 does not deny the snapshot."""
    _, loss_of, trainer = make()
    with pytest.raises(RuntimeError, match="there is no snapshot"):
        variance(trainer, loss_of, PROBLEM.batches(4))
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    with pytest.raises(ValueError, match="no data to compute a variance"):
        variance(trainer, loss_of, [])
    with pytest.raises(TypeError, match="closure must be a function"):
        variance(trainer, 3, PROBLEM.batches(4))
    trainer.coefficient = 0
    with pytest.raises(RuntimeError, match=r"as it is set up here, SVRG corrects no gradients"):
        variance(trainer, loss_of, PROBLEM.batches(7))
    net, loss_of, _ = make()
    trainer = MARSTrainer([layer.bias for layer in net], "sgd")
    trainer.step(5, closure=lambda: loss_of(PROBLEM.batches(5)[0]))
    with pytest.raises(RuntimeError, match=r"MARS corrects no gradients.*include_vectors"):
        variance(trainer, loss_of, PROBLEM.batches(5))


def test_dropout_under_the_lock_and_without():
    """At the reference there is none under the lock. MXNet's own random numbers go on."""
    net, drawn, batches = kit.with_dropout(), set(), PROBLEM.batches(7)
    for cls, lock_random in ((SVRGTrainer, True), (SAGATrainer, True), (SVRGTrainer, False)):
        _, loss_of, trainer = make("float32", net=net, cls=cls, lock_random=lock_random)
        trainer.update_full_grads(loss_of, batches)
        for _ in range(2):
            ratio = variance(trainer, loss_of, batches).ratio
            assert ratio < 1e-10 if lock_random else ratio > 0.5
            drawn.add(mx.nd.random.uniform(shape=(1,)).asscalar())
    assert len(drawn) == 6
