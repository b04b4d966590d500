"""SARAH, STORM and MARS: what is not common to all methods."""

from functools import partial

import kit
import pytest
from kit import assert_unchanged
from plays import BATCHES, CASES, PROBLEM, TWO, Play, mars
from problems import distance, parameters, values

from gluon_svrg import MARSTrainer, SAGTrainer, SARAHTrainer, STORMTrainer

METHODS = {name: CASES[name] for name in ("SARAH", "STORM", "MARS", "approximate MARS")}
METHODS["approximate MARS of matrices"] = mars(gamma=0.1, exact=False, clip=0.2)
each_method = pytest.mark.parametrize("case", METHODS.values(), ids=METHODS)


@each_method
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
            with pytest.raises(RuntimeError, match="keeps no weights"), trainer.at_snapshot():
                pass
        check_mean(play)
    play.refresh()
    check_mean(play)
    play.update(0)
    check_mean(play)


def check_mean(play):
    if play.case is METHODS["MARS"]:
        assert play.trainer.full_grads is None
        return
    found, expected = kit.full_gradients(play.trainer, play.net), play.twin.mean
    if play.case is METHODS["approximate MARS of matrices"]:  # vectors are left alone
        assert not found[1].any() and not found[3].any()
        found, expected = found[::2], expected[::2]
    assert distance(found, expected) < 1e-12


COMPRESSION = {"compression_params": {"type": "2bit", "threshold": 0.5}}


make = partial(kit.make, PROBLEM, devices=TWO)
test_arguments_that_are_refused = kit.refusals(
    (lambda: make(cls=SARAHTrainer, **COMPRESSION), ValueError, "would stay forever"),
    (lambda: make(cls=MARSTrainer, exact=False, **COMPRESSION), ValueError, "would stay forever"),
    (lambda: make(cls=STORMTrainer, mixing=1.5), ValueError, "mixing .* and at most 1, got 1.5"),
    (lambda: make(cls=MARSTrainer, gamma=-1), ValueError, "gamma must be .*, at least 0, got -1"),
    (lambda: make(cls=MARSTrainer, beta=1.0), ValueError, "beta .* 1, in float32 too, got 1.0"),
    (lambda: make(cls=MARSTrainer, exact="no"), TypeError, "must be True or False, got 'no'"),
    (lambda: make(cls=SAGTrainer, **COMPRESSION), ValueError, "SAGTrainer cannot compress"),
)


@each_method
def test_calls_that_are_refused(case):
    play = Play(case)
    trainer, loss_of = play.trainer, play.loss_of
    with pytest.raises(ValueError, match="no use for stored gradients"):
        trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    with pytest.raises(TypeError, match="batch_index names a stored gradient"):
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=0)


def test_files_of_exact_mars_are_refused_by_approximate_mars(tmp_path):
    play, other = Play(METHODS["MARS"]), Play(METHODS["approximate MARS"])
    play.epoch((0, 1))
    play.trainer.save_states(tmp_path / "states")
    with pytest.raises(ValueError, match="it has weights, unlike"):
        other.trainer.load_states(tmp_path / "states")
    other.follow(0, 1)  # nothing was changed
