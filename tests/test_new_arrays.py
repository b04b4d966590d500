"""Parameters that get new arrays in mid-training, with other values or with the same."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from kit import assert_unchanged, everything
from plays import WITH_STORED, Play
from problems import Dense, contexts, parameters, values

PROBLEM = Dense("classification", hidden=(5,), seed=45)
TWO = contexts(2)
NAMES_BOTH = r"update_full_grads\(\).*discard_snapshot\(\)"
ways = pytest.mark.parametrize("how, devices", [("step", None), ("halves", TWO), ("add", None)])


@pytest.fixture(params=WITH_STORED.values(), ids=WITH_STORED)
def case(request):
    return request.param


def begun(case, how, devices, refresh=True, hybridize=None):
    """A training whose method has a state, unless it needs a refresh for it."""
    play = Play(case, PROBLEM, how, devices, hybridize)
    if refresh:
        play.refresh()
    play.epoch((1, 3, 1, 0))
    assert play.distance() < 1e-10
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


def test_new_values_before_the_first_step(case):
    play = Play(case, PROBLEM)
    initialize(play)
    follow(play)


def cast(play):
    play.net.cast("float64")


def reset(play):
    for parameter in parameters(play.net):
        move = parameter.reset_device if hasattr(parameter, "reset_device") else parameter.reset_ctx
        move(play.devices or [mx.cpu(0)])


def initialize_and_load(play):
    before = values(play.net)
    initialize(play)
    PROBLEM.assign(play.net, before)
    play.twin.weights = before


def switch(play):
    """New arrays of gradients alone."""
    now = parameters(play.net)[0].grad_req
    play.require("add" if now == "write" else "write")
    play.require(now)


@pytest.mark.parametrize("change", [cast, reset, initialize_and_load, switch])
@ways
def test_the_same_values_in_new_arrays(case, how, devices, change):
    play = begun(case, how, devices)
    arrays = [[*p.list_data(), *p.list_grad()] for p in parameters(play.net)]
    change(play)
    for row, parameter in zip(arrays, parameters(play.net)):
        assert parameter.list_grad()[-1] is not row[-1]
    follow(play)
    change(play)
    play.refresh()
    follow(play)


def set_data(play, weights, folder):
    PROBLEM.assign(play.net, weights)


def load_parameters(play, weights, folder):
    other = PROBLEM.network()
    PROBLEM.assign(other, weights)
    other.save_parameters(str(folder / "weights"))
    play.net.load_parameters(str(folder / "weights"), ctx=play.devices)


@pytest.mark.parametrize("assign", [set_data, load_parameters])
@ways
def test_other_values_in_the_same_arrays(case, how, devices, assign, tmp_path):
    """They are legal: the reference is where it was."""
    play = begun(case, how, devices)
    rng = np.random.RandomState(0)
    play.twin.weights = [w + 0.1 * rng.randn(*w.shape) for w in values(play.net)]
    assign(play, oracle.copied(play.twin.weights), tmp_path)
    follow(play)
