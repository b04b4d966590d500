"""What the live gradients hold where it is hard to tell."""

import numpy as np
import pytest
from mxnet import gluon
from problems import array

import gluon_svrg
from gluon_svrg import MARSTrainer, SAGATrainer, STORMTrainer, SVRGTrainer

INPUTS = [np.random.RandomState(number).randn(4, 3) for number in range(4)]
TARGETS = [np.random.RandomState(10 + number).randn(4, 1) for number in range(4)]
TRAINERS = [getattr(gluon_svrg, name) for name in gluon_svrg.__all__ if name.endswith("Trainer")]


def make(cls, rate=0.0, grad_req="add", dtype="float64", **options):
    net = gluon.nn.Dense(1, in_units=3, dtype=dtype)
    net.initialize()
    net.collect_params().setattr("grad_req", grad_req) if hasattr(
        net.collect_params(), "setattr"
    ) else net.setattr("grad_req", grad_req)
    trainer = cls(net.collect_params(), "sgd", {"learning_rate": rate}, **options)

    def loss_of(number, factor=1.0):
        X, y = array(INPUTS[number], dtype), array(TARGETS[number], dtype)
        return gluon.loss.L2Loss()(net(X), y) * factor

    return net, trainer, loss_of


def zero(net):
    for parameter in net.collect_params().values():
        for grad in parameter.list_grad():
            grad[:] = 0


def row(trainer, number):
    return {"batch_index": number} if isinstance(trainer, SAGATrainer) else {}


@pytest.mark.parametrize("cls", [STORMTrainer, SAGATrainer])
def test_an_estimate_that_is_zero_is_not_one_that_was_dropped(cls):
    """As of a minibatch whose loss is masked: it counts, with its four entries."""
    net, trainer, loss_of = make(cls)
    trainer.correct_grads(lambda: loss_of(0, factor=0.0), **row(trainer, 0))
    trainer.correct_grads(lambda: loss_of(1), **row(trainer, 1))
    grads = [p.grad().asnumpy() for p in net.collect_params().values()]
    trainer.step(8)
    for parameter, grad in zip(net.collect_params().values(), grads):
        mean = trainer.full_grads[parameter][0].asnumpy()
        np.testing.assert_allclose(8 * mean, grad, rtol=1e-12)


@pytest.mark.parametrize("change", ["grad_req", "dtype"])
@pytest.mark.parametrize("cls", TRAINERS)
def test_new_arrays_between_the_halves_of_a_step(cls, change):
    net, trainer, loss_of = make(cls, grad_req="write")
    indexed = {"batch_index": 0} if cls.__name__ in ("SAGATrainer", "SAGTrainer") else {}
    trainer.correct_grads(lambda: loss_of(0), **indexed)
    if change == "dtype":
        net.cast("float32")
    else:
        for parameter in net.collect_params().values():
            parameter.grad_req = "add"
    with pytest.raises(RuntimeError, match="the parameters have new gradients since"):
        trainer.step(4)


def test_many_micro_batches_are_no_change_of_gradients():
    """V is a difference of large sums, and close to zero at a minimum."""
    net, trainer, loss_of = make(MARSTrainer, rate=0.2, dtype="float32", clip=None)
    for _ in range(80):
        for number in range(4):
            trainer.correct_grads(lambda: loss_of(number))
        trainer.step(16)
        zero(net)


def test_a_first_row_much_smaller_than_the_mean():
    """What is kept of a row is r - c mu, and r is a small part of it."""
    net, trainer, _ = make(SVRGTrainer, rate=0.01, grad_req="write", dtype="float32")
    output = net(array(INPUTS[0], "float32")).asnumpy()

    def loss(X, y):
        return gluon.loss.L2Loss()(net(X), y)

    near = [output + 1e-4, *(100 * y for y in TARGETS[1:])]
    data = [(array(X, "float32"), array(y, "float32")) for X, y in zip(INPUTS, near)]
    trainer.update_full_grads(loss, data, store_grads=True)
    for number, (X, y) in enumerate(data):
        trainer.step(4, closure=lambda: loss(X, y), batch_index=number)
    data = data[::-1]
    trainer.update_full_grads(loss, data, store_grads=True)
    with pytest.raises(RuntimeError, match="reshuffled"):
        trainer.step(4, closure=lambda: loss(*data[1]), batch_index=0)
