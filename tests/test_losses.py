"""The losses of a closure: their order, their number, their random numbers, their sum."""

import itertools

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, noticed
from mxnet import gluon
from plays import BATCHES, PROBLEM, TWO, WITH_STORED, Play, each_method, ways
from problems import IS_NUMPY_LIKE, Dense, array, contexts, values

from gluon_svrg import SVRGTrainer

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
    play = Play(case, devices=devices)
    play.refresh()
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
