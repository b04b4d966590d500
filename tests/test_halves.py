"""The halves of a step, micro-batches, and what stays from one update to the next."""

import warnings

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, everything
from loops import plain_step
from mxnet import autograd, gluon
from plays import HOWS, WITH_STORED, Play
from problems import Dense, contexts, distance, parameters, values
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


class Heads(Dense):
    """Two linear models. A minibatch trains one of them, and the last minibatch both."""

    def __init__(self):
        super().__init__("regression", seed=49)
        self.initial = [*self.initial, *(2 * w for w in self.initial)]

    def network(self, dtype="float64", devices=None, hybridize=None):
        net = gluon.nn.HybridSequential()
        for _ in range(2):
            net.add(gluon.nn.Dense(1, in_units=4, dtype=dtype))
        net.initialize(ctx=devices)
        self.assign(net, self.initial)
        return net

    def trained(self, index):
        return [[0], [1], [0], [1], [0, 1]][index[0] // 5]

    def closure(self, net, dtype="float64", devices=None):
        heads = [super(Heads, self).closure(net[n], dtype, devices) for n in range(2)]

        def loss_of(index):
            losses = [heads[n](index) for n in self.trained(index)]
            return sum(losses) if devices is None else list(map(sum, zip(*losses)))

        return loss_of

    def gradient(self, weights, index):
        zeros, found = [np.zeros((1, 4)), np.zeros(1)], []
        for n, pair in enumerate([weights[:2], weights[2:]]):
            is_trained = n in self.trained(index)
            found += super().gradient(pair, index)[0] if is_trained else zeros
        return found, len(index)


@pytest.mark.parametrize("how, devices", [("step", None), ("halves", TWO), ("add", None)])
def test_a_head_that_no_minibatch_reaches_moves_by_its_mean(case, how, devices):
    """With ``ignore_stale_grad=True``, as long as an earlier loss has reached it."""
    settings = {"settings": RATE, "ignores_stale": True}
    Play(case, Heads(), how, devices, **settings).run()


@pytest.mark.parametrize("refreshed", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_a_head_that_no_minibatch_reaches_is_stale(case, how, refreshed):
    """As with `gluon.Trainer`; minibatches that accumulate may reach different ones."""
    play = Play(case, Heads(), how, settings=RATE)
    if refreshed:
        play.refresh()
    for _ in range(2):
        with pytest.raises(UserWarning, match="has not been updated by backward since last"):
            play.update(*((0, 2) if how == "add" else (0,)))
        kit.clear(play.net)
        play.update(*((0, 1) if how == "add" else (4,)))
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
    "how, devices, hybridize", [("step", None, {}), ("halves", TWO, STATIC), ("add", TWO, None)]
)
@pytest.mark.parametrize("part", ["all", "the last layer"])
def test_running_statistics_move_once_a_minibatch(case, part, how, devices, hybridize):
    """Not by a refresh or a check, and not by a pass elsewhere; also those of other parameters."""
    nets = [kit.with_dropout(devices, hybridize, norm=True) for _ in range(2)]
    loss_of, plain = (PROBLEM.closure(net, "float32", devices) for net in nets)
    params = list((nets[0] if part == "all" else nets[0][-1]).collect_params().values())
    for p in params:
        p.grad_req = "add" if how == "add" and p.grad_req == "write" else p.grad_req
    trainer = case.make_trainer(params, update_on_kvstore=False)
    batches, stores = PROBLEM.batches(5), case is WITH_STORED["stored"]
    stored = {"store_grads": True} if stores else {}

    def statistics(net):
        mx.nd.waitall()
        layer = net[0]
        return [*layer.running_mean.list_data(), *layer.running_var.list_data()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it draws random numbers
        for count, number in enumerate((1, 3, 1, 4, 0, 2, 3, 1)):
            index = batches[number]
            if count in (2, 4):
                trainer.update_full_grads(loss_of, batches, **stored)
            row = case.row(number) if not stores or trainer.has_snapshot else {}
            if how == "step":
                trainer.step(len(index), closure=lambda: loss_of(index), **row)
            else:
                trainer.correct_grads(lambda: loss_of(index), **row)
                if how == "halves" or count % 2:
                    trainer.allreduce_grads()
                    trainer.update(len(index))
                    kit.clear(nets[0])
            with autograd.record():
                losses = plain(index)
            autograd.backward(losses)
            if count == 1:  # the devices' statistics are made equal when the kvstore starts
                for mine, others in zip(statistics(nets[0]), statistics(nets[1])):
                    others[:] = mine
    assert_unchanged(*([a.asnumpy() for a in statistics(net)] for net in nets))


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how, devices", [("step", None), ("halves", TWO), ("add", None)])
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
