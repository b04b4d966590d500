"""`trainer.history`: a dict for each refresh, for a table and a plot."""

import kit
import numpy as np
import pandas
import pytest
from plays import WITH_STORED, Play
from problems import Dense, contexts, values

from gluon_svrg import schedule

PROBLEM = Dense("classification", hidden=(5,), seed=50)
COLUMNS = ["data_passes", "steps", "mean_loss", "gradient_norm", "learning_rate", "coefficient"]


@pytest.fixture(params=WITH_STORED.values(), ids=WITH_STORED)
def case(request):
    return request.param


def trained(case, devices=None):
    """Two steps, and refreshes with steps between; what the history must be."""
    play, expected = Play(case, PROBLEM, devices=devices), []
    losses = PROBLEM.closure(plain := PROBLEM.network())
    everyone = np.arange(len(PROBLEM.X))
    assert play.trainer.history == []
    for steps, order in [(2, (1, 3)), (5, (4, 0, 2)), (6, (0,))]:
        play.epoch(order)
        play.trainer.set_learning_rate(0.05 / steps)
        play.optimizer.learning_rate = 0.05 / steps
        now = values(play.net)
        PROBLEM.assign(plain, now)
        mean_loss = play.refresh()
        gradient = [g / len(everyone) for g in PROBLEM.gradient(now, everyone)[0]]
        expected.append(
            {
                "data_passes": play.trainer.grad_evaluations / len(everyone),
                "steps": steps,
                "mean_loss": float(losses(everyone).asnumpy().mean(dtype="float64")),
                "gradient_norm": np.sqrt(sum(np.sum(g**2) for g in gradient)),
                "learning_rate": 0.05 / steps,
                "coefficient": getattr(play.trainer, "coefficient", None),
            }
        )
        assert play.trainer.history[-1]["mean_loss"] == mean_loss
    return play, expected


@pytest.mark.parametrize("devices", [None, contexts(2)])
def test_a_line_for_each_refresh(case, devices):
    play, expected = trained(case, devices)
    found = pandas.DataFrame(play.trainer.history)
    assert list(found.columns) == COLUMNS
    pandas.testing.assert_frame_equal(found, pandas.DataFrame(expected), rtol=1e-6)
    kinds = {type(value) for line in play.trainer.history for value in line.values()}
    assert kinds <= {int, float, type(None)}


def test_it_is_saved(case, tmp_path):
    play, _ = trained(case)
    play.trainer.save_states(tmp_path / "states")
    other = Play(case, PROBLEM)
    PROBLEM.assign(other.net, values(play.net))
    other.trainer.load_states(tmp_path / "states")
    assert other.trainer.history == play.trainer.history
    for each in (play, other):
        each.epoch((2, 0))
        each.refresh()
    assert len(play.trainer.history) == 4
    assert other.trainer.history == play.trainer.history


def test_an_error_leaves_it(case):
    play, _ = trained(case)
    before = [dict(line) for line in play.trainer.history]
    with pytest.raises(KeyError, match="mine"):
        play.trainer.update_full_grads(kit.failing(play.loss_of, 6), play.batches)
    with pytest.raises(FloatingPointError):
        play.trainer.update_full_grads(lambda index: play.loss_of(index) * np.inf, play.batches)
    assert play.trainer.history == before
    play.trainer.discard_snapshot()
    assert play.trainer.history == before


def test_schedules_of_the_coefficient():
    """No line where no snapshot was taken."""
    play = Play(WITH_STORED["SVRG"], PROBLEM, coefficient=schedule.Linear(0.75, 3))
    for _ in range(3):
        play.refresh()
    play.trainer.coefficient = schedule.Until(3)
    assert np.isnan(play.refresh())
    assert [line["coefficient"] for line in play.trainer.history] == [0.75, 0.5, 0.25]
