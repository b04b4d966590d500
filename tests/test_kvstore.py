"""What travels over a kvstore: its order, when one worker is late, and how much at once."""

import numpy as np
import pytest
import worker_kvstore
from cluster import run_cluster
from union import assert_close, assert_identical

from gluon_svrg import MARSTrainer, SAGATrainer, SAGTrainer, SARAHTrainer, STORMTrainer

#: The methods whose state moves with a step.
MOVING = {
    SAGATrainer: {},
    SAGTrainer: {},
    SARAHTrainer: {},
    STORMTrainer: {"mixing": 0.3},
    MARSTrainer: {"exact": False},
}


def run(folder, task, **settings):
    return run_cluster(folder, task, worker="worker_kvstore.py", **settings)


@pytest.mark.parametrize("way", ["halves", "add"])
@pytest.mark.parametrize("cls", MOVING)
def test_one_worker_is_late(cls, way, tmp_path):
    """The other one must not begin an exchange before the last one of the same key has ended."""
    settings = {"cls": cls.__name__, "own": MOVING[cls], "way": way}
    found = run(tmp_path, "halves", **settings)
    assert_identical(found)
    _, alone = worker_kvstore.halves(**settings, kvstore=None)
    assert_close(found[0], alone, 1e-12)


@pytest.mark.parametrize("begin", ["own backward", "refresh"])
def test_many_parameters(begin, tmp_path):
    """No gradient overtakes the weights at the start, and no number is left out of the sums."""
    found = run(tmp_path, "many_parameters", begin=begin)
    assert_identical(found)
    _, alone = worker_kvstore.many_parameters(begin, kvstore=None)
    assert_close(found[0], alone, 1e-12)


def test_no_gradient_overtakes_the_weights(tmp_path):
    """Where the first gradient is computed before the weights are shared, as by `gluon.Trainer`."""
    for found in run(tmp_path, "start", workers=4):
        assert_close(found, dict.fromkeys(found, np.ones((3, 2))), 0)


def test_dist_async_takes_the_snapshot_at_the_weights_of_the_servers(tmp_path):
    assert_identical(run(tmp_path, "refresh_late"))


@pytest.mark.parametrize("kvstore", ["dist_sync", "dist_async", "exchange"])
def test_sums_of_many_numbers(kvstore, tmp_path):
    """They are those of float64, to the last bit."""
    found = run(tmp_path, "numbers", kvstore=kvstore)
    for each in found:
        np.testing.assert_array_equal(each["sums"], found[0]["given"] + found[1]["given"])
