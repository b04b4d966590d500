"""The halves of a step, micro-batches, and what stays from one update to the next."""

import warnings

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, everything
from loops import plain_step
from mxnet import autograd, gluon
from plays import HOWS, WITH_STORED, Play, ways
from problems import Dense, array, contexts, distance, parameters, values
from test_methods import SETTINGS

PROBLEM = Dense("classification", hidden=(5,), seed=48)
TWO = contexts(2)
STATIC = {"static_alloc": True, "static_shape": True}
RATE = {"learning_rate": 0.05}


@pytest.fixture(params=WITH_STORED.values(), ids=WITH_STORED)
def case(request):
    return request.param


@pytest.mark.parametrize("how, devices", [("halves", None), ("halves", TWO), ("add", TWO)])
def test_a_clip_between_the_halves(case, how, devices):
    """It changes the update, and no mean gradient, and no row."""
    Play(case, PROBLEM, how, devices).run()


class Deferred(Dense):
    def network(self, dtype="float64", devices=None, hybridize=None):
        return super().network(dtype, devices, deferred=True, hybridize=hybridize)


@pytest.mark.parametrize("devices", [None, TWO])
def test_micro_batches_before_there_are_weights(case, devices):
    """All loss entries since the last update count, also of minibatches before the first update."""
    play = Play(case, Deferred("classification", hidden=(5,), seed=48), "add", devices)
    for number in (0, 4, 1):
        play.correct(number)
    play.twin.weights = values(play.net, play.device)
    play.trainer.step(5 + 3 + 5)
    kit.clear(play.net)
    batches, rows = play.of_all((0, 4, 1))
    play.twin.step(play.optimizer, *batches, rows=rows)
    play.epoch((2, 3, 1))
    play.refresh()
    play.epoch((0, 4, 1))
    assert play.distance() < 1e-10


# --- parameters that only some minibatches reach -------------------------------------------------


class Partly(Dense):
    """Two of its minibatches do not reach the first layer."""

    @staticmethod
    def is_cut(index):
        return index[0] in (0, 10)

    def closure(self, net, dtype="float64", devices=None):
        loss_function = self.loss_function()

        def loss_of(index):
            losses = []
            for part, device in zip(np.array_split(index, len(devices or [0])), devices or [None]):
                hidden = net[0](array(self.X[part], dtype, device))
                hidden = hidden.detach() if self.is_cut(index) else hidden
                losses.append(loss_function(net[1](hidden), array(self.y[part], dtype, device)))
            return losses if devices else losses[0]

        return loss_of

    def gradient(self, weights, index):
        (first, second, *rest), count = super().gradient(weights, index)
        return [*((0 * first, 0 * second) if self.is_cut(index) else (first, second)), *rest], count


PARTLY = Partly("classification", hidden=(5,), seed=49)


@ways
def test_a_layer_that_no_minibatch_reaches_moves_by_its_mean(case, how, devices):
    """With ``ignore_stale_grad=True``, as long as an earlier loss has reached it."""
    Play(case, PARTLY, how, devices, settings=RATE, ignores_stale=True).run()


@pytest.mark.parametrize("refreshed", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_a_layer_that_no_minibatch_reaches_is_stale(case, how, refreshed):
    """As with `gluon.Trainer`; minibatches that accumulate may reach different ones."""
    play = Play(case, PARTLY, how, settings=RATE)
    if refreshed:
        play.refresh()
    for _ in range(2):
        with pytest.raises(UserWarning, match="has not been updated by backward since last"):
            play.update(*((0, 2) if how == "add" else (0,)))
        kit.clear(play.net)
        play.update(*((1, 0) if how == "add" else (4,)))
        assert play.distance() < 1e-10


# --- the snapshot --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SVRG", "SARAH", "STORM", "MARS"])
@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("how", ["step", "add"])
def test_a_backward_at_the_snapshot(name, how, devices):
    """It writes gradients, or adds them, as the user has set."""
    play = Play(WITH_STORED[name], PROBLEM, how, devices)
    play.refresh()
    play.epoch((1, 3))
    kit.clear(play.net)

    def backward(number):
        with autograd.record():
            loss = play.loss_of(play.batches[number])
        autograd.backward(loss)

    backward(2)
    with play.trainer.at_snapshot():
        backward(0)
    expected, _ = PROBLEM.gradient(play.twin.reference, play.batches[0])
    if how == "add":
        before, _ = PROBLEM.gradient(play.twin.weights, play.batches[2])
        expected = [a + b for a, b in zip(before, expected)]
    found = [sum(grad.asnumpy() for grad in p.list_grad()) for p in parameters(play.net)]
    assert distance(found, expected) < 1e-10


@pytest.mark.parametrize(
    "grad_req, devices, hybridize",
    [("write", None, {}), ("write", TWO, STATIC), ("add", TWO, None)],
)
@pytest.mark.parametrize("part", ["all", "the last layer"])
def test_running_statistics_move_once_a_minibatch(case, part, grad_req, devices, hybridize):
    """Not by a refresh or a check, and not by a pass elsewhere; also those of other parameters."""
    nets = [kit.with_dropout(devices, hybridize, norm=True) for _ in range(2)]
    statistics = [
        (*net[0].running_mean.list_data(), *net[0].running_var.list_data()) for net in nets
    ]
    loss_of, plain = (PROBLEM.closure(net, "float32", devices) for net in nets)
    params = list((nets[0] if part == "all" else nets[0][-1]).collect_params().values())
    for p in params:
        p.grad_req = grad_req if p.grad_req == "write" else p.grad_req
    trainer, batches = case.make_trainer(params, update_on_kvstore=False), PROBLEM.batches(5)
    stored = {"store_grads": True} if case is WITH_STORED["stored"] else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it draws random numbers
        for count, number in enumerate((1, 3, 1, 4, 0, 2, 3, 1)):
            index = batches[number]
            if count in (2, 4):
                trainer.update_full_grads(loss_of, batches, **stored)
            row = {} if stored and count < 2 else case.row(number)
            trainer.correct_grads(lambda: loss_of(index), **row)
            if grad_req == "write" or count % 2:
                trainer.step(len(index))
                kit.clear(nets[0])
            with autograd.record():
                losses = plain(index)
            autograd.backward(losses)
            mx.nd.waitall()
            if count == 1:  # the devices' statistics are made equal when the kvstore starts
                for mine, others in zip(*statistics):
                    others[:] = mine
    assert_unchanged(*([a.asnumpy() for a in each] for each in statistics))


# --- files ---------------------------------------------------------------------------------------


@ways
def test_resume_between_updates(case, how, devices, tmp_path):
    """Of each update on, to the last bit: what a file holds is all that the next one needs."""
    plan = [(1, 3), (0, 4), "refresh", (2, 0), (1, 3), (4, 2)]

    def finish(play, begin, save=False):
        for number, each in enumerate(plan[begin:], begin):
            if save:
                play.trainer.save_states(tmp_path / f"{number}.states")
                play.net.save_parameters(str(tmp_path / f"{number}.weights"))
            if each == "refresh":
                play.refresh()
            else:
                play.update(*(each if how == "add" else each[:1]))
        return everything(play.trainer, play.net)

    expected = finish(Play(case, PROBLEM, how, devices, dtype="float32"), 0, save=True)
    for begin in range(1, len(plan)):
        play = Play(case, PROBLEM, how, devices, dtype="float32")
        play.net.load_parameters(str(tmp_path / f"{begin}.weights"), ctx=devices)
        play.trainer.load_states(tmp_path / f"{begin}.states")
        assert_unchanged(expected, finish(play, begin))


def test_a_file_of_gluon_trainer_starts_anew(case, tmp_path):
    net = PROBLEM.network()
    plain, plain_loss_of = (
        gluon.Trainer(net.collect_params(), "sgd", SETTINGS),
        PROBLEM.closure(net),
    )
    plain_step(plain, lambda: plain_loss_of(np.arange(5)), 5)
    plain.save_states(str(tmp_path / "states"))
    play = Play(case, PROBLEM)
    play.refresh()
    play.epoch((0, 1, 2))
    assert play.trainer.inner_steps == 3
    play.trainer.load_states(tmp_path / "states")
    assert (play.trainer.inner_steps, play.trainer.has_snapshot) == (0, False)
    play.epoch((3,))
    assert play.trainer.full_grads is None or not case.needs_refresh
