"""The public surface: what can be seen, what counts, what is passed, and what is shown."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, backward, everything
from mxnet import gluon
from plays import Play, each_method
from problems import Dense, array, distance, parameters

import gluon_svrg
from gluon_svrg import SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=7)
ALL, BATCHES = np.arange(len(PROBLEM.X)), PROBLEM.batches(4)
TRAINERS = [getattr(gluon_svrg, name) for name in gluon_svrg.__all__ if name.endswith("Trainer")]
make = partial(kit.make, PROBLEM)


def test_counters():
    """Before the first snapshot; those of each method are in `test_methods`."""
    _, loss_of, trainer = make()
    assert isinstance(trainer, gluon.Trainer) and trainer
    for count in (0, 5, 10):
        counters = trainer.num_snapshots, trainer.inner_steps, trainer.grad_evaluations
        assert counters == (0, 0, count)
        assert trainer.snapshot is None and trainer.full_grads is None
        with pytest.raises(RuntimeError, match="There is no snapshot"), trainer.at_snapshot():
            pass
        trainer.step(5, closure=lambda: loss_of(ALL[:5]))
    for name in ("num_snapshots", "inner_steps", "grad_evaluations", "snapshot", "full_grads"):
        with pytest.raises(AttributeError):
            setattr(trainer, name, 3)


def test_what_is_read_is_a_copy():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    before = everything(trainer, net)
    for held in (trainer.snapshot, trainer.full_grads):
        assert list(held) == trainer._params
        for row in held.values():
            for each in row:
                each[:] = 7
    trainer.history[0]["steps"] = 7
    assert_unchanged(before, everything(trainer, net))
    assert trainer.history[0]["steps"] == 0
    weight = parameters(net)[0]
    assert type(trainer.full_grads[weight][0]) is type(weight.grad())
    assert type(trainer.snapshot[weight][0]) is type(weight.data())


@pytest.mark.parametrize("kind", [list, tuple])
def test_step_returns_what_the_closure_returned(kind):
    """That of its last call, at the current weights: the snapshot comes first."""
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    weight, seen = parameters(net)[0], []
    weight.data()[:] += 1
    expected = loss_of(ALL[:6]).asnumpy()

    def closure():
        seen.append(weight.data().asnumpy())
        return kind([loss_of(ALL[:2]), loss_of(ALL[2:6])])

    losses = trainer.step(6, closure=closure)
    assert type(losses) is kind
    found = np.concatenate([loss.asnumpy() for loss in losses])
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose(seen[0] + 1, seen[1])


def test_gradients_and_their_marks_survive_a_refresh_and_an_error():
    net, loss_of, trainer = make()
    backward(lambda: loss_of(ALL[:5]))
    before = kit.gradients(net)
    for is_fresh in (True, False):
        for _ in range(2):
            trainer.update_full_grads(loss_of, BATCHES)
            assert_unchanged(before, kit.gradients(net))
        trainer.discard_snapshot()
        with pytest.raises(ZeroDivisionError):
            trainer.correct_grads(lambda: 1 / 0)
        stale = pytest.raises(UserWarning, match="has not been updated")
        with nullcontext() if is_fresh else stale:
            trainer.step(5)


def test_a_data_iter_is_reset_before_and_after():
    """The closure gets its batches as they are, and can cut their padding off."""
    net = PROBLEM.network("float32")
    loss_function, trainer = PROBLEM.loss_function(), SVRGTrainer(net.collect_params(), "sgd")
    X, y = (part.astype("float32") for part in (PROBLEM.X, PROBLEM.y))
    data = mx.io.NDArrayIter(X, y, batch_size=5)  # 23 = 4 * 5 + 3
    next(data)

    def loss_of(batch):
        used = 5 - batch.pad
        X, y = (array(part[0].asnumpy()[:used], "float32") for part in (batch.data, batch.label))
        return loss_function(net(X), y)

    trainer.update_full_grads(loss_of, data)
    assert trainer.grad_evaluations == 23
    expected, _ = PROBLEM.gradient(PROBLEM.initial, ALL)
    assert distance(kit.full_gradients(trainer, net), [grad / 23 for grad in expected]) < 1e-5
    for batch in data:
        trainer.step(5 - batch.pad, closure=lambda: loss_of(batch))
    assert trainer.inner_steps == 5


SHOWN = {
    "SVRGTrainer": ("no snapshot, coefficient 1", "snapshot 1, 2 steps since, coefficient 1"),
    "SAGATrainer": ("0 gradients stored", "6 gradients stored"),
    "SAGTrainer": ("0 gradients stored", "6 gradients stored"),
    "SARAHTrainer": ("no snapshot", "snapshot 1, 2 steps since"),
    "STORMTrainer": ("mixing 0.1", "mixing 0.1"),
    "MARSTrainer": ("gamma 0.025, beta 0.95, clip 1, exact",) * 2,
}


@pytest.mark.parametrize("cls", TRAINERS)
def test_a_trainer_is_shown_with_where_it_stands(cls):
    (_, loss_of, trainer), (before, after) = make(cls=cls), SHOWN[cls.__name__]
    assert repr(trainer) == f"{cls.__name__}(sgd, {before})"
    trainer.update_full_grads(loss_of, BATCHES)
    for number in range(2):
        row = {"batch_index": number} if "stored" in before else {}
        trainer.step(4, closure=lambda: loss_of(BATCHES[number]), **row)
    assert repr(trainer) == f"{cls.__name__}(sgd, {after})"


@each_method
def test_a_copy_of_the_best_network(case):
    """On 1.9.1 its parameters know their trainer. 2.0 itself copies layers, and not sequences."""
    play = trained(case)
    best, expected = copy.deepcopy(play.net[0]), play.net[0].weight.data().asnumpy()
    play.refresh()
    play.update(1)
    assert distance([play.net[0].weight.data().asnumpy()], [expected]) > 0
    assert_unchanged([expected], [best.weight.data().asnumpy()])


def trained(case):
    play = Play(case)
    play.refresh()
    play.epoch((0, 1))
    return play


def pickled(found):
    return pickle.loads(pickle.dumps(found))


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickled])
@each_method
def test_a_copy_of_a_trainer_cannot_train(case, call):
    """MXNet's copies of arrays have no gradients; the trainer itself goes on."""
    play = trained(case)
    with pytest.raises(RuntimeError, match=rf"(?s)A copy of {case.trainer}.*save_states"):
        call(play.trainer).step(5, closure=lambda: play.loss_of(play.batches[1]))
    play.update(1)
