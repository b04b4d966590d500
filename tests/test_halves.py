"""The halves of a step, micro-batches under ``grad_req='add'``, and what live gradients hold."""

from contextlib import nullcontext

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, backward, split_at
from mxnet import autograd
from plays import BATCHES, PARTLY, PROBLEM, STATIC, TWO, WITH_STORED, Play, each_method, scale, ways
from problems import Partly, array, distance, parameters, values

from gluon_svrg.variance import variance

RATE = {"learning_rate": 0.05}


@pytest.mark.parametrize(
    "how, devices, hybridize",
    [("halves", None, STATIC), ("halves", TWO, None), ("add", None, {}), ("add", TWO, STATIC)],
)
@each_method
def test_a_clip_between_the_halves(case, how, devices, hybridize):
    """It changes the update, and no mean gradient, and no row."""
    Play(case, how=how, devices=devices, hybridize=hybridize).run()


LAST = Partly("classification", hidden=(5,), seed=49, reached_from=20)  # by the last minibatch


@ways
@each_method
def test_a_layer_that_no_minibatch_reaches_moves_by_its_mean(case, how, devices):
    """With ``ignore_stale_grad=True``, as long as an earlier loss has reached it."""
    for problem in (PARTLY, LAST):
        Play(case, problem, how, devices, settings=RATE, ignores_stale=True).run()


@pytest.mark.parametrize("refreshed", [False, True])
@pytest.mark.parametrize("how", ["step", "halves", "add"])
@each_method
def test_a_layer_that_no_minibatch_reaches_is_stale(case, how, refreshed):
    """As with `gluon.Trainer`; minibatches that accumulate may reach different ones."""
    play = Play(case, PARTLY, how, settings=RATE, refreshed=refreshed)
    for _ in range(2):
        with pytest.raises(UserWarning, match="has not been updated by backward since last"):
            play.update(*((0, 2) if how == "add" else (0,)))
        kit.clear(play.net)
        play.follow(*((1, 0) if how == "add" else (4,)))


@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("is_half", [False, True])
@each_method
def test_a_stale_gradient_can_be_tried_again(case, is_half, devices):
    """Without the stale ones. Gradients are reduced once."""
    play = Play(case, PARTLY, devices=devices, settings=RATE, refreshed=True)
    update = play.trainer.update if is_half else play.trainer.step
    for number in (1, 0, 3, 2, 0):
        play.correct(number)
        if is_half:
            play.trainer.allreduce_grads()
        if number in (0, 2):
            with pytest.raises(UserWarning, match="has not been updated by backward since last"):
                update(5)
        update(5, True)
        batches, rows = play.of_all([number])
        play.twin.step(play.optimizer, *batches, rows=rows, batch_size=5)
        assert play.distance() < 1e-10


@pytest.mark.parametrize("include_vectors", [False, True])
def test_approximate_mars_moves_by_the_last_minibatch(include_vectors):
    """Not by an earlier one, although there is momentum and decay."""
    case = WITH_STORED["approximate MARS"]
    play = Play(case, PARTLY, ignores_stale=True, include_vectors=include_vectors)
    play.step_alone(1)
    seen = []
    for number in (0, 2):  # neither reaches the first layer
        before = values(play.net)
        play.step_alone(number)
        seen.append([np.any(a != b) for a, b in zip(before, values(play.net))])
    assert seen == [[True, include_vectors, True, True], [False, False, True, True]]
    assert not any(map(np.any, kit.full_gradients(play.trainer, play.net)[:2]))


@each_method
def test_a_parameter_that_no_loss_depends_on_stays(case):
    """Although its weight decays."""
    play, unused = Play(case), PROBLEM.network()
    params = [*parameters(play.net), *parameters(unused)]
    play.trainer = case.make_trainer(params, optimizer_params={**RATE, "wd": 0.1})
    play.ignores_stale, before = True, values(unused)
    for number in range(5):
        if number == 2:
            play.refresh()
        play.step_alone(number)
    assert_unchanged(values(unused), before)


@pytest.mark.parametrize("name", ["SVRG", "SARAH", "STORM", "MARS"])
@pytest.mark.parametrize("how, devices", [("step", TWO), ("add", None), ("add", TWO)])
def test_a_backward_at_the_snapshot(name, how, devices):
    """It writes gradients, or adds them, as the user has set, and leaves no mark behind."""
    settings = {"settings": RATE, "ignores_stale": True, "refreshed": True}
    play = Play(WITH_STORED[name], PARTLY, how, devices, **settings)
    play.epoch((1, 3))
    kit.clear(play.net)
    backward(lambda: play.loss_of(BATCHES[4]))
    with play.trainer.at_snapshot():
        backward(lambda: play.loss_of(BATCHES[1]))
    expected, _ = PARTLY.gradient(play.twin.reference, BATCHES[1])
    if how == "add":
        expected = plus(expected, PARTLY.gradient(play.twin.weights, BATCHES[4])[0])
    assert distance(kit.gradients(play.net), expected) < 1e-10
    if how == "add":
        kit.clear(play.net)
    play.follow(0, 2)  # which do not reach the first layer


@pytest.mark.parametrize("grad_req, first", [("write", 0), ("add", -1)])
@pytest.mark.parametrize("devices, hybridize", [(None, STATIC), (TWO, {}), (TWO, None)])
@each_method
def test_running_statistics_move_once_a_minibatch(case, first, grad_req, devices, hybridize):
    """Not by refreshes, checks, variances and passes elsewhere; also those of other parameters."""
    nets = [kit.with_dropout(devices, hybridize, norm=True) for _ in range(2)]
    norms = [net[0] for net in nets]
    statistics = [[*n.running_mean.list_data(), *n.running_var.list_data()] for n in norms]
    loss_of, plain = (PROBLEM.closure(net, "float32", devices) for net in nets)
    params = [p for layer in list(nets[0])[first:] for p in layer.collect_params().values()]
    for p in params:
        p.grad_req = grad_req if p.grad_req == "write" else p.grad_req
    play = Play(case)  # for its rows
    play.trainer, play.loss_of = case.make_trainer(params, update_on_kvstore=False), loss_of
    with kit.noticed():  # it draws random numbers
        for count, number in enumerate((1, 3, 1, 4, 0, 2, 3, 1)):
            if count in (2, 4):
                play.refresh_alone(loss_of, BATCHES)
                variance(play.trainer, loss_of, BATCHES)
            play.correct(number)
            if grad_req == "write" or count % 2:
                play.trainer.step(5)
                kit.clear(nets[0])
            backward(lambda: plain(BATCHES[number]))
            mx.nd.waitall()
            if count == 1:  # the devices' statistics are made equal when the kvstore starts
                for mine, others in zip(*statistics):
                    others[:] = mine
    assert_unchanged(*([a.asnumpy() for a in each] for each in statistics))


@pytest.mark.parametrize("name", ["SAGA", "SAG", "SARAH", "STORM", "MARS", "approximate MARS"])
def test_methods_whose_state_moves(name):
    """They need the reduced gradient; and all parameters must accumulate, or none."""
    play = Play(WITH_STORED[name])
    parameters(play.net)[0].grad_req = "add"
    play.refresh()
    play.update(0)
    kit.clear(play.net)
    play.correct(1)
    # Otherwise V would be of the last minibatch for some parameters, and C of all.
    with play.refuses(RuntimeError, "grad_req='add' and others 'write'"):
        play.correct(2)
    with play.refuses(RuntimeError, r"update\(\) needs allreduce_grads\(\) before"):
        play.trainer.update(5)
    play.trainer.step(5)
    kit.clear(play.net)
    play.step_alone(2)


@each_method
def test_the_users_own_backward_before_the_update(case):
    """It is added to the optimizer's gradient, but methods that compute that refuse it."""
    history = History(case, True, None)
    history.refresh()
    history.hold(0)
    backward(lambda: history.loss_of(BATCHES[1]))
    history.others, _ = PROBLEM.gradient(history.twin.weights, BATCHES[1])
    history.finish(1.0)
    assert history.distance() < 1e-10


@each_method
def test_the_users_own_backward(case):
    """It adds before an estimate and after it, and a refresh leaves all of it."""
    play = Play(case, how="add", refreshed=True)
    own, _ = PROBLEM.gradient(PROBLEM.initial, BATCHES[1])
    backward(lambda: play.loss_of(BATCHES[1]))
    play.correct(0)
    expected = plus(own, play.twin.estimate(BATCHES[0], (0, 0)))
    assert distance(kit.gradients(play.net), expected) < 1e-10
    backward(lambda: play.loss_of(BATCHES[1]))
    before = kit.gradients(play.net)
    assert distance(before, plus(own, expected)) < 1e-10
    play.refresh()
    assert_unchanged(before, kit.gradients(play.net))


class History(Play):
    """A training whose twin knows what the live gradients hold.

    An update consists of the minibatches since the last one that were not dropped; their estimates
    may stay in the gradients when they do not count any more.
    """

    def __init__(self, case, adds, devices):
        split = split_at([0.4]) if devices else None
        super().__init__(case, PROBLEM, "add" if adds else "step", devices, split=split)
        self.adds = adds
        self.forget()

    def forget(self):
        """The gradients are zero, or will be overwritten."""
        self.numbers, self.total, self.others = [], None, None

    def leave(self):
        """The minibatches do not count any more; their estimates stay."""
        if self.total is not None:
            self.others = plus(self.total, self.others)
        self.numbers, self.total = [], None

    def clear(self):
        kit.clear(self.net)
        self.forget()

    def hold(self, number):
        if self.adds and self.case.indexed and number in self.numbers:
            return
        if not self.adds:
            self.forget()
        self.correct(number)
        self.total = plus(self.twin.estimate(BATCHES[number], (0, number)), self.total)
        self.numbers.append(number)

    def finish(self, factor):
        if self.others is not None and self.case.replaces_grads:
            with pytest.raises(RuntimeError, match="finds other gradients"):
                self.trainer.step(10)
            self.clear()
            self.discard()
            return
        if factor != 1 and self.case.replaces_grads:
            self.trainer.allreduce_grads()
            scale(self.net, factor)
            self.trainer.update(10)
        else:
            scale(self.net, factor)
            self.trainer.step(10)
        batches, rows = self.of_all(self.numbers)
        grads = plus(self.twin.advance(self.total, batches, rows), self.others)
        self.optimizer.step(self.twin.weights, [factor * g for g in grads], 10)
        self.clear()

    def act(self, kind, number, rng, path):
        if kind == "hold":
            self.hold(number)
        elif kind in ("step", "clip"):
            if not self.numbers:
                self.hold(number)
            self.finish(0.5 if kind == "clip" else 1.0)
        elif kind == "zero":
            self.clear() if self.adds else self.hold(number)
        else:
            if kind == "discard":
                self.discard()
            elif kind == "refresh":
                self.refresh()
            else:
                self.trainer.save_states(path)
                self.trainer.load_states(path)
            self.leave()
            if not self.adds or rng.rand() < 0.5:
                self.clear()


def plus(arrays, others):
    return list(arrays) if others is None else [a + b for a, b in zip(arrays, others)]


KINDS = ["hold"] * 8 + ["step"] * 5 + ["clip"] * 2 + ["zero", "refresh", "discard", "file"]
MANY = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(27, 500)]


@pytest.mark.parametrize("seed", [*range(27), *MANY])
def test_a_random_history(seed, tmp_path):
    """Of minibatches, drops, refreshes and files."""
    rng = np.random.RandomState(seed)
    name = list(WITH_STORED)[seed % len(WITH_STORED)]
    adds, devices = rng.rand() < 0.7, TWO if rng.rand() < 0.3 else None
    history = History(WITH_STORED[name], adds, devices)
    for number in range(25):
        history.act(rng.choice(KINDS), rng.randint(5), rng, tmp_path / "states")
        assert history.distance() < 1e-9, f"{name}, {adds}, {devices}, seed {seed}, {number}"


def played(case=WITH_STORED["SVRG"], how="step", devices=None, refreshed=True):
    """A training whose method has a state, unless it needs a refresh for it."""
    play = Play(case, PROBLEM, how, devices, refreshed=refreshed)
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


@each_method
def test_a_loss_that_is_gathered_on_one_device(case):
    """Predictions of two devices, and one loss on the first."""
    play, loss_function = Play(case, devices=TWO), PROBLEM.loss_function()

    def gathered(index):
        parts = zip(np.array_split(index, 2), TWO)
        outputs = (play.net(array(PROBLEM.X[part], device=device)) for part, device in parts)
        outputs = [each.as_in_context(TWO[0]).as_nd_ndarray() for each in outputs]
        joined = mx.nd.concat(*outputs, dim=0)
        joined = joined.as_np_ndarray() if mx.util.is_np_array() else joined
        return loss_function(joined, array(PROBLEM.y[index], device=TWO[0]))

    play.loss_of = gathered
    play.run()


@pytest.mark.parametrize("name", ["STORM", "SAGA"])
def test_an_estimate_that_is_zero_is_not_one_that_was_dropped(name):
    """As of a minibatch whose loss is masked: it counts, with its five entries."""
    play = Play(WITH_STORED[name], how="add")
    for number, factor in enumerate((0.0, 1.0)):
        row = play.row(number)
        play.trainer.correct_grads(lambda: play.loss_of(BATCHES[number]) * factor, **row)
    grads = kit.gradients(play.net)
    play.trainer.step(10)
    assert distance([10 * g for g in kit.full_gradients(play.trainer, play.net)], grads) < 1e-12


@pytest.mark.parametrize("change", ["grad_req", "dtype"])
@each_method
def test_new_arrays_between_the_halves_of_a_step(case, change):
    play = Play(case, refreshed=True)
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


@ways
@each_method
@pytest.mark.parametrize("chosen", [slice(None), slice(2, 3)], ids=["all", "one"])
def test_new_values_in_new_arrays(case, how, devices, chosen):
    """The full gradient, the table, or the state of steps alone, is that of another network."""
    play = played(case, how, devices, refreshed=False)
    for go_on in (Play.discard, Play.refresh, Play.discard):
        initialize(play, chosen)
        if play.trainer.num_snapshots or not case.needs_refresh:  # the plain optimizer has no state
            for call in (play.step_alone, play.correct):
                with play.refuses(RuntimeError, r"update_full_grads\(\).*discard_snapshot\(\)"):
                    call(2)
        if play.trainer.inner_steps:  # a refresh that fails drops what belongs to other arrays
            with pytest.raises(KeyError):
                play.trainer.update_full_grads(kit.failing(play.loss_of, 3), play.batches)
            assert not case.needs_refresh or play.trainer.inner_steps == 0
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
