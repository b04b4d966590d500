"""The losses of a closure: their order, their number, their sum, and random numbers in them."""

import itertools
from contextlib import nullcontext
from functools import partial

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import HYBRIDIZE, assert_unchanged, noticed
from mxnet import gluon
from mxnet.gluon import nn, rnn
from plays import BATCHES, PROBLEM, TWO, WITH_STORED, Play, each_method, ways
from problems import IS_NUMPY_LIKE, Dense, array, contexts, distance, values

from gluon_svrg import SAGATrainer, STORMTrainer, SVRGTrainer

#: Approximate MARS takes one gradient of a minibatch, and has none before to compare it with.
COMPARING = {name: case for name, case in WITH_STORED.items() if case.gradients > 1 or case.indexed}
comparing = pytest.mark.parametrize("case", COMPARING.values(), ids=COMPARING)


@ways
@each_method
def test_samples_in_another_order_at_each_call(case, how, devices):
    """The sum of the losses is the same: no warning, no error, in refreshes, steps and rows."""
    dtype = "float64" if how == "halves" else "float32"
    play = Play(case, how=how, devices=devices, dtype=dtype)
    loss_of, rng = play.loss_of, np.random.RandomState(0)
    play.loss_of = lambda index: loss_of(rng.permutation(index))
    play.run({"float64": 1e-10, "float32": 2e-5}[dtype])


@each_method
def test_several_losses_on_a_device(case):
    """As of several tasks: all of their entries count."""
    play = Play(case)
    loss_of = play.loss_of
    play.loss_of = lambda index: [loss_of(index[:1]), loss_of(index[1:])]
    play.run()


@each_method
def test_a_last_minibatch_of_one_sample(case):
    """33 samples in minibatches of 8, all divided by 8, as in Gluon's examples: no warning."""
    problem = Dense("classification", hidden=(5,), seed=47, samples=33)
    play = Play(case, problem)
    play.shares = [problem.batches(8)]
    for epoch in range(8):
        if epoch in (1, 5):
            play.refresh()
        for number, index in enumerate(play.batches):
            play.step_alone(number, 8)
            play.twin.step(play.optimizer, index, rows=[(0, number)], batch_size=8)
        assert play.distance() < 1e-10


def kept(losses, limit):
    """The losses above a limit, as ``losses[losses > limit]``."""
    classic = losses.as_nd_ndarray()
    found = mx.nd.contrib.boolean_mask(classic, classic > limit)
    return found.as_np_ndarray() if IS_NUMPY_LIKE else found


@comparing
def test_a_mask_that_depends_on_the_weights(case):
    """The number of losses differs at the reference: the error names the cause, and the cure."""
    play = Play(case)
    loss_of = play.loss_of
    limit = np.median(loss_of(play.batches[0]).asnumpy())
    play.loss_of = lambda index: kept(loss_of(index), limit)
    play.refresh()
    kit.move(play.net, 3.0)
    with play.refuses((RuntimeError, ValueError), r"(?s)mask.*[Mm]ultipl"):
        play.step_alone(0)

    def multiplied(index):
        losses = loss_of(index)
        return losses * (losses > limit)

    play.loss_of = multiplied
    play.refresh()
    play.epoch((0, 4, 1))


@pytest.mark.parametrize("first", [0, 1])
@each_method
def test_a_minibatch_without_losses(case, first):
    """As of an empty selection: it moves nothing, and training goes on as without it."""
    play = Play(case, settings={"learning_rate": 0.05})
    loss_of, none = play.loss_of, len(BATCHES)
    play.shares = [[*BATCHES, BATCHES[0][:0]]]
    play.loss_of = lambda index: loss_of(index) if len(index) else loss_of(BATCHES[0])[:0]
    with mx.util.np_shape(True):
        if first:
            play.refresh()
        for number in (none, 1, none, 3)[first:]:
            if number < none:
                play.update(number)
                continue
            before = values(play.net)
            play.step_alone(number, 5)
            assert_unchanged(before, values(play.net))
        assert play.distance() < 1e-10
        play.run()


@pytest.mark.parametrize("lock_random", [True, False, "auto"])
def test_losses_in_bfloat16(lock_random):
    """NumPy does not have it, and sees whole numbers."""
    play = Play(WITH_STORED["stored"], dtype="float32", lock_random=lock_random)
    loss_of, found = play.loss_of, []
    for dtype in (np.dtype([("bfloat16", np.uint16)]), "float32"):
        play.loss_of = lambda index: loss_of(index).as_nd_ndarray().astype(dtype)
        found.append(play.refresh_alone(play.loss_of, BATCHES))
    assert found[0] == pytest.approx(found[1], rel=1e-2)
    play.step_alone(0)


@each_method
def test_dropout_is_found_once_and_locked(case):
    """By a refresh; by methods that need none, in their first steps."""
    play, net, seen = Play(case), kit.with_dropout(), []
    loss_of = PROBLEM.closure(net, "float32")
    play.trainer = case.make_trainer(net.collect_params())

    def watched(index):
        loss = loss_of(index)
        seen.append((index[0], float(loss.asnumpy().sum())))
        return loss

    play.loss_of = watched
    with noticed() as texts:
        if case.needs_refresh or case.indexed:
            play.refresh()
        play.epoch((0, 1))
    assert len(texts) == 1 or case not in COMPARING.values()
    with noticed() as later:
        for number in (2, 0):
            play.refresh()
            of_row = [loss for start, loss in seen if start == play.batches[number][0]][-1]
            seen.clear()
            play.update(number)
            losses = {loss for _, loss in seen} | ({of_row} if case.indexed else set())
            assert max(losses) == pytest.approx(min(losses), rel=1e-5)  # the same numbers
            play.epoch((3, 1))
            seen.clear()
    (text,) = texts + later
    assert "lock_random" in text


def draws_a_minibatch(play):
    batches = itertools.cycle([play.batches[n] for n in (1, 3, 2)])
    return lambda *index: play.loss_of(next(batches))


def uses_random_numbers(play):
    rng = np.random.RandomState(1)
    return lambda index=play.batches[1]: play.loss_of(index) * array(rng.rand(len(index)))


@pytest.mark.parametrize("bad", [draws_a_minibatch, uses_random_numbers])
@each_method
def test_a_refresh_finds_a_closure_that_does_not_repeat(case, bad):
    play = Play(case)
    play.shares = [play.batches[:4]]
    play.refresh()
    play.epoch((1, 2))
    message = r"(?s)compute the same each .*draw the mini-batch.*augment data.*outside MXNet"
    with noticed(), play.refuses(RuntimeError, message):
        play.refresh_alone(bad(play), play.batches)
    play.refresh()
    play.follow(0, 3)


@pytest.mark.parametrize("bad, devices", [(draws_a_minibatch, TWO), (uses_random_numbers, None)])
@pytest.mark.parametrize("half", [True, False])
@comparing
def test_the_first_step_after_a_refresh_finds_it(case, bad, half, devices):
    """The weights are those of the snapshot, or of the row: so the losses must be the same."""
    play = Play(case, devices=devices, refreshed=True)
    closure = bad(play)
    with noticed(), play.refuses(RuntimeError, "mini-batch"):
        if half:
            play.trainer.correct_grads(closure, **play.row(0))
        else:
            play.step_alone(0, closure=closure)
    play.follow(0, 3, 1)


def test_the_mean_of_many_losses():
    """In float64: of all dtypes, shapes and devices; of more minibatches than are queued."""
    where, numbers, sizes = contexts(2), np.arange(150), (100, 10_000)
    weight = gluon.Parameter("weight", shape=(1,), init=mx.init.One())
    weight.initialize(ctx=where)
    trainer = SVRGTrainer([weight], "sgd")

    def loss_of(number):
        zeros = [0 * weight.data(context) for context in where]
        halves = array(np.full(sizes[number % 2], 4.5), "float16") + zeros[0].astype("float16")
        others = [array(np.full((2, number % 3 + 1), number), "float32", c) for c in where]
        return [halves, *(other + zero for other, zero in zip(others, zeros)), zeros[0].sum()]

    counts = 2 * 2 * (numbers % 3 + 1)
    total = 75 * 10_100 * 4.5 + (counts * numbers).sum()
    mean = trainer.update_full_grads(loss_of, numbers.tolist())
    assert mean == total / (75 * 10_102 + counts.sum())


# --- random numbers ------------------------------------------------------------------------------
FORTY = Dense("classification", hidden=(5,), seed=11, samples=40)
EIGHTS = FORTY.batches(8)
make = partial(kit.make, FORTY, "float32")  # by itself, a network that draws none


def is_full_gradient(trainer):
    """Whether v is mu on each of two devices, to 1e-6."""
    mx.nd.waitall()
    rows = [(p.list_grad(), means) for p, means in trainer.full_grads.items()]
    pairs = [(v.asnumpy() / 4, mean.asnumpy()) for row in rows for v, mean in zip(*row)]
    return distance(*zip(*pairs)) < 1e-6


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("lock_random", [True, "auto"])
def test_under_the_lock_the_first_estimates_are_the_full_gradient(lock_random, hybridize):
    """With dropout; ``'auto'`` finds it at the first refresh, and says so once."""
    devices = contexts(2)
    net = kit.with_dropout(devices, hybridize)
    _, loss_of, trainer = make(devices, net=net, lock_random=lock_random)
    for refresh in range(2):
        with noticed() as texts:
            trainer.update_full_grads(loss_of, EIGHTS)
        expected = lock_random == "auto" and refresh == 0
        assert ["lock_random=True" in text for text in texts] == [True] * expected
        for index in EIGHTS[:2]:
            trainer.correct_grads(lambda: loss_of(index))
            assert is_full_gradient(trainer)
        trainer.step(8)
    for value in (False, True):  # it can be set
        trainer.lock_random = value
        trainer.update_full_grads(loss_of, EIGHTS)
        trainer.correct_grads(lambda: loss_of(EIGHTS[0]))
        assert is_full_gradient(trainer) == value == trainer.lock_random


def test_setting_the_lock_compares_once_more():
    _, loss_of, trainer = make(rate=0.0, data=EIGHTS)
    for calls in (4, 2, 4):
        counted = kit.counted(loss_of)
        trainer.step(8, closure=lambda: counted(EIGHTS[0]))
        assert len(counted.calls) == calls
        if calls == 2:
            trainer.lock_random = "auto"


def masks(seed, fails=False):
    """What dropout keeps in both passes of some steps, perhaps after a refresh that fails."""
    _, loss_of, trainer = make(net=kit.with_dropout(), lock_random=True)
    drop, found = gluon.nn.Dropout(0.5), []
    mx.random.seed(seed)
    if fails:
        with pytest.raises(KeyError):
            trainer.update_full_grads(kit.failing(loss_of, 3), EIGHTS)
    trainer.update_full_grads(loss_of, EIGHTS)
    weight = next(iter(trainer.full_grads))

    def closure():
        mask = drop(array(np.ones(64), "float32"))
        found.append(mask.asnumpy())
        return weight.data().sum() + 0 * mask.sum()

    for _ in range(3):
        trainer.step(1, ignore_stale_grad=True, closure=closure)
    return found


def test_both_passes_draw_the_same_and_every_step_another():
    first, again, other = map(masks, (1, 1, 2))
    assert_unchanged(first, again)  # mx.random.seed makes it repeatable
    assert_unchanged(first, masks(1, fails=True))
    assert_unchanged(first[::2], first[1::2])
    different = [*first[::2], *other[::2]]
    assert not any(itertools.starmap(np.array_equal, itertools.combinations(different, 2)))


def test_where_nothing_is_random_the_random_stream_is_not_touched():
    (_, loss_of, trainer), found = make(), []
    for epochs in (0, 1):
        mx.random.seed(5)
        kit.train(trainer, loss_of, EIGHTS, epochs)
        found.append(mx.nd.random.uniform(shape=(3,)).asnumpy())
    assert_unchanged(*found)


@pytest.mark.parametrize("change", ["weights", "statistics"])
def test_what_has_changed_since_the_refresh_is_no_difference(change):
    net = kit.sequence(nn.BatchNorm(in_channels=4, use_global_stats=True), nn.Dense(3, in_units=4))
    _, loss_of, trainer = make(net=net)

    def noise():
        return loss_of(EIGHTS[0]) * array(np.random.rand(8), "float32")

    trainer.update_full_grads(loss_of, EIGHTS)
    parameter = net[1].bias if change == "weights" else net[0].running_mean
    parameter.set_data(parameter.data() + 1)
    trainer.step(8, closure=noise)  # nothing to compare
    trainer.update_full_grads(loss_of, EIGHTS)
    with noticed(), pytest.raises(RuntimeError, match="numbers from outside MXNet"):
        trainer.step(8, closure=noise)


@pytest.mark.parametrize("cls", [SVRGTrainer, STORMTrainer, SAGATrainer])
@pytest.mark.parametrize("carried", [True, False])
def test_a_state_that_a_recurrent_network_carries(cls, carried):
    """It comes to rest when the closure is called again and again; dropout needs only the lock."""
    cell, head = rnn.LSTM(8, input_size=3), nn.Dense(2, flatten=False, in_units=8)
    drop = nn.Dropout(0.0 if carried else 0.5)
    for block in (cell, head):
        block.initialize(mx.init.Normal(1.0))
    params = [*cell.collect_params().values(), *head.collect_params().values()]
    trainer, state = cls(params, "sgd", {"learning_rate": 0.01}), [cell.begin_state(batch_size=4)]

    def loss_of(X, y):
        out, new = cell(X, state[0])
        if carried:
            state[0] = [each.detach() for each in new]
        return gluon.loss.L2Loss()(head(drop(out)), y)

    rng = np.random.RandomState(0)
    batches = [[array(rng.randn(5, 4, k), "float32") for k in (3, 2)] for _ in range(3)]
    refused = pytest.raises(RuntimeError, match="although") if carried else nullcontext()
    with noticed() as texts, refused:
        if cls is STORMTrainer:
            for X, y in batches:
                trainer.step(4, closure=lambda: loss_of(X, y))
        else:
            trainer.update_full_grads(loss_of, batches)
    assert carried or len(texts) == 1
