"""Gradients of minibatches in a table: SAGA, SAG, and the stored gradients of SVRG."""

from contextlib import nullcontext

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import backward, split_at
from mxnet import gluon
from plays import BATCHES, PROBLEM, TWO, WITH_STORED, Play
from problems import contexts, distance, values

from gluon_svrg.variance import variance

TABLES = {name: WITH_STORED[name] for name in ("SAGA", "SAG", "stored")}
each_table = pytest.mark.parametrize("case", TABLES.values(), ids=TABLES)
both = pytest.mark.parametrize("case", [TABLES["SAGA"], TABLES["SAG"]], ids=["SAGA", "SAG"])


@both
@pytest.mark.parametrize("count, refresh, small", [(1, 0, 99), (1, 0, 0), (2, 1, 0), (3, 0, 99)])
def test_the_mean_is_that_of_the_rows(case, count, refresh, small, monkeypatch):
    """Each row is the gradient at the weights of its last visit. Indices may have gaps."""
    monkeypatch.setattr("gluon_svrg.passes.columns.SMALL", small)
    play = Play(case, devices=contexts(count), split=split_at([0.1, 0.5][3 - count :]))
    if refresh:
        play.refresh()
    for number in (3, 3, 0, 4, 0, 0, 1, 4, 3):
        index, row = BATCHES[number], np.int64(number if refresh else 10 * number)
        play.trainer.step(len(index), closure=lambda: play.loss_of(index), batch_index=row)
        play.twin.step(play.optimizer, index, rows=[(0, row)])
        assert distance(kit.full_gradients(play.trainer, play.net), play.twin.mean) < 1e-12


def test_the_mean_of_the_table_does_not_drift():
    """Where nothing moves, steps leave it: ``(g - r) + S`` is exact, ``(S + g) - r`` is not."""
    play = Play(TABLES["SAGA"], dtype="float32", settings={"learning_rate": 0.0})
    play.refresh()
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
    play, drawn = Play(case, lock_random=True), set()
    play.refresh()
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
    with pytest.raises(ValueError, match=r"batch_index=0 was used since the last update already"):
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
        backward(lambda: play.loss_of(BATCHES[0]))
    refused = pytest.raises(RuntimeError, match="was the data reshuffled")
    with nullcontext() if others == "weights_have_moved" else refused:
        play.trainer.step(5, closure=lambda: play.loss_of(BATCHES[2]), batch_index=1)


@both
def test_two_trainers_that_share_a_network(case):
    """Without a refresh, the weights of the other one are not known at the first visit."""
    play = Play(case)
    play.trainer = case.make_trainer(play.net[1].collect_params())
    other = gluon.Trainer(play.net[0].collect_params(), "sgd", {"learning_rate": 0.1})
    with kit.noticed() as texts:
        for number in (*range(5), *range(5)):
            play.step_alone(number)
            other.step(5)
    assert not texts


@each_table
def test_a_row_of_as_many_entries_on_other_devices(case):
    play = Play(case, devices=TWO, split=split_at([0.4]))
    play.refresh()
    other = PROBLEM.closure(play.net, "float64", TWO, split_at([0.6]))
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
