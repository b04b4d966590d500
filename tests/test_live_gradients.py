"""What the live gradients hold between the halves of a step, and arrays that are new."""

from contextlib import nullcontext

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, backward
from mxnet import autograd
from plays import BATCHES, CASES, PROBLEM, TWO, Play, each_method, ways
from problems import array, distance, parameters, values


def played(case=CASES["SVRG"], how="step", devices=None, refresh=True):
    """A training whose method has a state, unless it needs a refresh for it."""
    play = Play(case, PROBLEM, how, devices)
    if refresh:
        play.refresh()
    play.follow(1, 3, 1, 0)
    return play


@pytest.mark.parametrize("where", ["at the weights", "at the snapshot", "after the reduction"])
@pytest.mark.parametrize("devices", [None, TWO], ids=["one", "two"])
@pytest.mark.parametrize("finish, size", [("step", [5]), ("allreduce_grads", []), ("update", [5])])
def test_a_backward_between_the_halves(finish, size, devices, where):
    """As of two trainers that correct one loss: one with `lr_mult` does that, as the error says."""
    play = played(devices=devices)
    play.correct(0)
    if where == "after the reduction":
        play.trainer.allreduce_grads()
    with play.trainer.at_snapshot() if where == "at the snapshot" else nullcontext():
        backward(lambda: play.loss_of(BATCHES[1]))
    before = values(play.net)
    with pytest.raises(RuntimeError, match=r"(?s)a backward has overwritten it.*lr_mult"):
        getattr(play.trainer, finish)(*size)
    assert_unchanged(before, values(play.net))
    play.follow(2, 3, 0)


def test_a_backward_that_is_allowed():
    """Elsewhere, and for an input alone."""
    play, x = played(), array(PROBLEM.X)
    x.attach_grad()
    play.correct(0)
    with autograd.record():
        y = play.net(x)
    autograd.grad(y, [x])
    other = PROBLEM.closure(PROBLEM.network())
    backward(lambda: other(BATCHES[1]))
    play.trainer.step(5)
    play.twin.step(play.optimizer, BATCHES[0])
    assert play.distance() < 1e-10


def gathered(net):
    """Predictions of two devices, and one loss on the first."""
    loss_function = PROBLEM.loss_function()

    def loss_of(index):
        outputs = [
            net(array(PROBLEM.X[part], device=device)).as_in_context(TWO[0]).as_nd_ndarray()
            for part, device in zip(np.array_split(index, 2), TWO)
        ]
        joined = mx.nd.concat(*outputs, dim=0)
        joined = joined.as_np_ndarray() if mx.util.is_np_array() else joined
        return loss_function(joined, array(PROBLEM.y[index], device=TWO[0]))

    return loss_of


@each_method
def test_a_loss_that_is_gathered_on_one_device(case):
    play = Play(case, devices=TWO)
    play.loss_of = gathered(play.net)
    play.run()


@pytest.mark.parametrize("name", ["STORM", "SAGA"])
def test_an_estimate_that_is_zero_is_not_one_that_was_dropped(name):
    """As of a minibatch whose loss is masked: it counts, with its five entries."""
    play = Play(CASES[name], how="add")
    for number, factor in enumerate((0.0, 1.0)):
        row = play.row(number)
        play.trainer.correct_grads(lambda: play.loss_of(BATCHES[number]) * factor, **row)
    grads = kit.gradients(play.net)
    play.trainer.step(10)
    assert distance([10 * g for g in kit.full_gradients(play.trainer, play.net)], grads) < 1e-12


@pytest.mark.parametrize("change", ["grad_req", "dtype"])
@each_method
def test_new_arrays_between_the_halves_of_a_step(case, change):
    play = Play(case)
    play.refresh()
    play.correct(0)
    if change == "dtype":
        play.net.cast("float32")
    else:
        play.require("add")
    with pytest.raises(RuntimeError, match="the parameters have new gradients since"):
        play.trainer.step(4)


def initialize(play, chosen=slice(None)):
    """New values in new arrays, as for the next fold of a cross-validation."""
    for parameter in parameters(play.net)[chosen]:
        parameter.initialize(mx.init.Normal(0.3), force_reinit=True, ctx=play.devices)
    play.twin.weights = values(play.net)


def assert_refused(play):
    """The message names both ways to go on."""
    for call in (play.step_alone, play.correct):
        with play.refuses(RuntimeError, r"update_full_grads\(\).*discard_snapshot\(\)"):
            call(2)


@ways
@each_method
@pytest.mark.parametrize("chosen", [slice(None), slice(2, 3)], ids=["all", "one"])
def test_new_values_in_new_arrays(case, how, devices, chosen):
    """The full gradient, the table, or the state of steps alone, is that of another network."""
    play = played(case, how, devices, refresh=False)
    for go_on in (Play.discard, Play.refresh, Play.discard):
        initialize(play, chosen)
        if play.trainer.num_snapshots or not case.needs_refresh:  # the plain optimizer has no state
            assert_refused(play)
        go_on(play)
        play.follow(2, 3, 0)


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
@each_method
def test_the_same_values_in_new_arrays(case, how, devices, change):
    play = played(case, how, devices)
    grads = [p.list_grad()[0] for p in parameters(play.net)]
    change(play)
    assert not any(p.list_grad()[0] is grad for p, grad in zip(parameters(play.net), grads))
    play.follow(2, 3, 0)
    change(play)
    play.refresh()
    change(play)
    play.follow(2, 3, 0)


@each_method
def test_other_values_in_the_same_arrays(case, tmp_path):
    """They are legal, too: the reference is where it was."""
    play = played(case, "halves", TWO)
    PROBLEM.assign(play.net, [w + 0.1 * np.sign(w) for w in values(play.net)])
    play.twin.weights = values(play.net)
    play.follow(2, 3, 0)
    PROBLEM.network().save_parameters(str(tmp_path / "weights"))
    play.net.load_parameters(str(tmp_path / "weights"), ctx=TWO)
    play.twin.weights = values(play.net)
    play.follow(2, 3, 0)
