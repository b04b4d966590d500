"""Parameters that get new arrays in mid-training, with other values or with the same."""

import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, everything
from plays import WITH_STORED, Play, ways
from problems import Dense, parameters, values

PROBLEM = Dense("classification", hidden=(5,), seed=45)
NAMES_BOTH = r"update_full_grads\(\).*discard_snapshot\(\)"


@pytest.fixture(params=WITH_STORED.values(), ids=WITH_STORED)
def case(request):
    return request.param


def begun(case, how, devices, refresh=True):
    """A training whose method has a state, unless it needs a refresh for it."""
    play = Play(case, PROBLEM, how, devices)
    if refresh:
        play.refresh()
    follow(play, (1, 3, 1, 0))
    return play


def follow(play, order=(2, 3, 0)):
    play.epoch(order)
    assert play.distance() < 1e-10


def initialize(play, chosen=slice(None)):
    """New values in new arrays, as for the next fold of a cross-validation."""
    for parameter in parameters(play.net)[chosen]:
        parameter.initialize(mx.init.Normal(0.3), force_reinit=True, ctx=play.devices)
    play.twin.weights = values(play.net)


def assert_refused(play):
    """Nothing changes; the message names both ways to go on."""
    before, index = everything(play.trainer, play.net), play.batches[2]
    with pytest.raises(RuntimeError, match=NAMES_BOTH):
        play.trainer.step(5, closure=lambda: play.loss_of(index), **play.row(2))
    with pytest.raises(RuntimeError, match=NAMES_BOTH):
        play.correct(2)
    assert_unchanged(before, everything(play.trainer, play.net))


def discard(play):
    play.trainer.discard_snapshot()
    play.twin = play.case.make_twin(PROBLEM.gradient, values(play.net))


@ways
@pytest.mark.parametrize("chosen", [slice(None), slice(2, 3)], ids=["all", "one"])
def test_new_values_after_a_refresh(case, how, devices, chosen):
    """The full gradient, or the table, is that of another network."""
    play = begun(case, how, devices)
    for go_on in (Play.refresh, discard):
        initialize(play, chosen)
        assert_refused(play)
        go_on(play)
        follow(play)


@ways
def test_new_values_without_a_refresh(case, how, devices):
    """The state of steps alone; the plain optimizer has none, and goes on."""
    play = begun(case, how, devices, refresh=False)
    initialize(play)
    if not case.needs_refresh:
        assert_refused(play)
        discard(play)
    follow(play)


def cast(play):
    play.net.cast("float64")


def reset(play):
    for p in parameters(play.net):
        getattr(p, "reset_device", p.reset_ctx)(play.devices or [mx.cpu(0)])


def initialize_and_load(play):
    before = values(play.net)
    initialize(play)
    PROBLEM.assign(play.net, before)
    play.twin.weights = before


def switch(play):
    """New arrays of gradients alone."""
    for other in ("write", "add") if play.how == "add" else ("add", "write"):
        play.require(other)


@pytest.mark.parametrize("change", [cast, reset, initialize_and_load, switch])
@ways
def test_the_same_values_in_new_arrays(case, how, devices, change):
    """They are legal."""
    play = begun(case, how, devices)
    grads = [p.list_grad()[0] for p in parameters(play.net)]
    change(play)
    assert not any(p.list_grad()[0] is grad for p, grad in zip(parameters(play.net), grads))
    follow(play)
    change(play)
    play.refresh()
    follow(play)


@ways
def test_other_values_in_the_same_arrays(case, how, devices, tmp_path):
    """They are legal, too: the reference is where it was."""
    play, rng = begun(case, how, devices), np.random.RandomState(0)
    PROBLEM.assign(play.net, [w + 0.1 * rng.randn(*w.shape) for w in values(play.net)])
    play.twin.weights = values(play.net)
    follow(play)
    other = PROBLEM.network()
    other.save_parameters(str(tmp_path / "weights"))
    play.net.load_parameters(str(tmp_path / "weights"), ctx=devices)
    play.twin.weights = values(play.net)
    follow(play)
