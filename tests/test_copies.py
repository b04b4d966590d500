"""Copies of networks and trainers: "keep a copy of the best network" must work, and train on."""

import copy
import pickle
from fractions import Fraction

import numpy as np
import pytest
from mxnet import gluon
from problems import array

import gluon_svrg
from gluon_svrg import SAGATrainer, SAGTrainer, SVRGTrainer

IS_2 = hasattr(gluon.Parameter, "list_device")
TRAINERS = [getattr(gluon_svrg, name) for name in gluon_svrg.__all__ if name.endswith("Trainer")]


def network():
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize()
    for number, parameter in enumerate(net.collect_params().values()):
        values = np.random.RandomState(number).randn(*parameter.shape)
        parameter.set_data(array(values, "float32"))
    return net


DATA = [np.random.RandomState(number).randn(4, 3) for number in range(3)]


def train(net, trainer, steps, start=0):
    indexed = isinstance(trainer, (SAGATrainer, SAGTrainer))
    for number in range(start, start + steps):
        index = number % len(DATA)
        X = array(DATA[index], "float32")
        options = {"batch_index": index} if indexed else {}
        trainer.step(4, closure=lambda: (net(X) ** 2).sum(axis=1), **options)


def weights(net):
    return [p.data().asnumpy() for p in net.collect_params().values()]


@pytest.mark.parametrize("when", ["at first", "after a refresh", "in the middle"])
@pytest.mark.parametrize("cls", TRAINERS)
def test_a_deep_copy_of_network_and_trainer_trains_on(cls, when):
    net = network()
    settings = {"learning_rate": 0.01, "momentum": 0.5}
    trainer = cls(net.collect_params(), "sgd", settings)
    if when != "at first":
        trainer.update_full_grads(
            lambda X: (net(X) ** 2).sum(axis=1), [[array(X, "float32")] for X in DATA]
        )
    if when == "in the middle":
        train(net, trainer, 2)
    other_net, other = copy.deepcopy((net, trainer))
    assert repr(other) == repr(trainer)
    before = weights(net)
    train(other_net, other, 5, start=2)
    for one, two in zip(before, weights(net)):
        np.testing.assert_array_equal(one, two)  # nothing is shared
    train(net, trainer, 5, start=2)
    for one, two in zip(weights(net), weights(other_net)):
        np.testing.assert_array_equal(one, two)
    assert other.grad_evaluations == trainer.grad_evaluations
    for one, two in zip((trainer.full_grads or {}).values(), (other.full_grads or {}).values()):
        np.testing.assert_array_equal(one[0].asnumpy(), two[0].asnumpy())


@pytest.mark.parametrize("cls", TRAINERS)
def test_a_copy_of_the_best_network(cls):
    net = network()
    trainer = cls(net.collect_params(), "sgd", {"learning_rate": 0.01})
    train(net, trainer, 3)
    best, expected = copy.deepcopy(net), weights(net)
    train(net, trainer, 3)
    for one, two in zip(expected, weights(best)):
        np.testing.assert_array_equal(one, two)


@pytest.mark.skipif(IS_2, reason="MXNet 2.0 pickles no parameter of a trainer: a weak reference")
@pytest.mark.parametrize("cls", TRAINERS)
def test_pickles(cls):
    net = network()
    trainer = cls(net.collect_params(), "sgd", {"learning_rate": 0.01})
    pickle.dumps(net), pickle.dumps(trainer)
    trainer.update_full_grads(
        lambda X: (net(X) ** 2).sum(axis=1), [[array(X, "float32")] for X in DATA]
    )
    train(net, trainer, 2)
    other_net, other = pickle.loads(pickle.dumps((net, trainer)))
    train(net, trainer, 4)
    train(other_net, other, 4)
    for one, two in zip(weights(net), weights(other_net)):
        np.testing.assert_array_equal(one, two)


def test_what_a_copy_shows():
    net = network()
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    trainer.update_full_grads(
        lambda X: (net(X) ** 2).sum(axis=1), [[array(X, "float32")] for X in DATA]
    )
    other = copy.deepcopy(trainer)
    for mine, theirs in (
        (trainer.snapshot, other.snapshot),
        (trainer.full_grads, other.full_grads),
    ):
        assert len(mine) == len(theirs) == 2
        for one, two in zip(mine.values(), theirs.values()):
            np.testing.assert_array_equal(one[0].asnumpy(), two[0].asnumpy())
    assert not set(other.snapshot) & set(trainer.snapshot)  # the copy's own parameters


@pytest.mark.parametrize("cls", [SAGATrainer, SAGTrainer])
def test_a_copy_between_the_halves_of_the_first_step(cls):
    """The sum of the table has no row yet, and the copy must go on with its own."""
    found = []
    for is_copied in (False, True):
        net = network()
        trainer = cls(net.collect_params(), "sgd", {"learning_rate": 0.01})
        X = array(DATA[0], "float32")
        trainer.correct_grads(lambda: (net(X) ** 2).sum(axis=1), batch_index=0)
        if is_copied:
            net, trainer = copy.deepcopy((net, trainer))
        trainer.step(4)
        train(net, trainer, 6, start=1)
        means = [grad[0].asnumpy() for grad in trainer.full_grads.values()]
        found.append(weights(net) + means)
    for one, two in zip(*found):
        np.testing.assert_array_equal(one, two)


SHOWN = {
    "SVRGTrainer": ("no snapshot, coefficient 1", "snapshot 1, 2 steps since, coefficient 1"),
    "SAGATrainer": ("0 gradients stored", "3 gradients stored"),
    "SAGTrainer": ("0 gradients stored", "3 gradients stored"),
    "SARAHTrainer": ("no snapshot", "snapshot 1, 2 steps since"),
    "STORMTrainer": ("mixing 0.1", "mixing 0.1"),
    "MARSTrainer": ("gamma 0.025, beta 0.95, clip 1, exact",) * 2,
}


@pytest.mark.parametrize("cls", TRAINERS)
def test_a_trainer_is_shown_with_where_it_stands(cls):
    net = network()
    trainer = cls(net.collect_params(), "sgd", {"learning_rate": 0.01})
    before, after = SHOWN[cls.__name__]
    assert repr(trainer) == f"{cls.__name__}(sgd, {before})"
    trainer.update_full_grads(
        lambda X: (net(X) ** 2).sum(axis=1), [[array(X, "float32")] for X in DATA]
    )
    train(net, trainer, 2)
    assert repr(trainer) == f"{cls.__name__}(sgd, {after})"


def test_hyperparameters_of_any_kind_of_number_are_shown():
    parameters = network().collect_params()
    trainer = gluon_svrg.MARSTrainer(
        parameters, "adam", exact=False, clip=None, include_vectors=True, gamma=Fraction(1, 8)
    )
    shown = "gamma 0.125, beta 0.95, no clip, approximate, vectors included"
    assert repr(trainer) == f"MARSTrainer(adam, {shown})"
    trainer = gluon_svrg.STORMTrainer(network().collect_params(), "sgd", mixing=Fraction(1, 4))
    assert repr(trainer) == "STORMTrainer(sgd, mixing 0.25)"
