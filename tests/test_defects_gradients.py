"""Estimates overwritten by a backward, losses gathered on one device, forwards that assign."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from mxnet import autograd, gluon
from problems import Dense, array, contexts, distance, parameters, values

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=31)
BATCHES = PROBLEM.batches(5)
TWO = contexts(2)
NO_ERROR = pytest.fail.Exception  # of pytest.raises


def make(layers=None, rate=0.1, grad_req="write", devices=None, net=None):
    """A trainer of a network, or of some of its layers."""
    net = net or PROBLEM.network(devices=devices)
    chosen = net if layers is None else net[layers]
    params = list(chosen.collect_params().values())
    for parameter in params:
        parameter.grad_req = grad_req
    trainer = SVRGTrainer(params, "sgd", {"learning_rate": rate}, update_on_kvstore=False)
    return net, PROBLEM.closure(net, devices=devices), trainer


def moved(net, seed=3):
    """Move the weights away from the snapshot, without the trainer."""
    random = np.random.RandomState(seed)
    for parameter in parameters(net):
        for weight in parameter.list_data():
            weight[:] = weight + array(0.3 * random.randn(*weight.shape), device=weight.context)


def backward(loss_of, index):
    with autograd.record():
        loss = loss_of(index)
    autograd.backward(loss)


# --- a backward between the estimate and the step -------------------------------------------------


def test_two_trainers_that_correct_one_loss_and_step_later():
    net = PROBLEM.network()
    _, loss_of, encoder = make(0, net=net)
    _, _, decoder = make(1, net=net)
    for trainer in (encoder, decoder):
        trainer.update_full_grads(loss_of, BATCHES)
    moved(net)
    before = values(net)
    with pytest.raises(RuntimeError, match="lr_mult"):
        for trainer in (encoder, decoder):
            trainer.correct_grads(lambda: loss_of(BATCHES[0]))
        for trainer in (encoder, decoder):
            trainer.step(5)
    # The encoder, whose estimate is gone, has not moved.
    assert distance(values(net)[:2], before[:2]) == 0


def test_two_trainers_that_step_one_after_the_other():
    """Each finds its estimate where it left it."""
    net = PROBLEM.network()
    _, loss_of, encoder = make(0, net=net)
    _, _, decoder = make(1, net=net)
    for trainer in (encoder, decoder):
        trainer.update_full_grads(loss_of, BATCHES)
    moved(net)
    reference = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial)
    reference.refresh(BATCHES)
    for number, trainer in enumerate((encoder, decoder)):
        # A trainer's reference has its own weights of the snapshot, and the live ones of the rest.
        part, live = slice(2 * number, 2 * number + 2), values(net)
        there = list(live)
        there[part] = PROBLEM.initial[part]
        grad, count = PROBLEM.gradient(live, BATCHES[0])
        then, _ = PROBLEM.gradient(there, BATCHES[0])
        expected = [
            w - 0.1 / 5 * (g - (g_then - count * mean))
            for w, g, g_then, mean in zip(live, grad, then, reference.full_grad)
        ]
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]))
        assert distance(values(net)[part], expected[part]) < 1e-6


FINISH = {
    "step": lambda trainer: trainer.step(5),
    "allreduce_grads": lambda trainer: trainer.allreduce_grads(),
    "update": lambda trainer: trainer.update(5),
}


@pytest.mark.parametrize("devices", [None, TWO], ids=["one", "two"])
@pytest.mark.parametrize("finish", FINISH)
def test_a_backward_between_the_estimate_and_the_step(finish, devices):
    net, loss_of, trainer = make(devices=devices)
    trainer.update_full_grads(loss_of, BATCHES)
    moved(net)
    trainer.correct_grads(lambda: loss_of(BATCHES[0]))
    before = values(net)
    backward(loss_of, BATCHES[1])
    with pytest.raises(RuntimeError, match="backward"):
        FINISH[finish](trainer)
    assert distance(values(net), before) == 0
    trainer.step(5, closure=lambda: loss_of(BATCHES[0]))  # goes on


def test_a_backward_between_the_reduction_and_the_update():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    moved(net)
    trainer.correct_grads(lambda: loss_of(BATCHES[0]))
    trainer.allreduce_grads()
    backward(loss_of, BATCHES[1])
    with pytest.raises(RuntimeError, match="backward"):
        trainer.update(5)


def test_a_backward_at_the_snapshot_between_the_estimate_and_the_step():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    moved(net)
    trainer.correct_grads(lambda: loss_of(BATCHES[0]))
    with trainer.at_snapshot():
        backward(loss_of, BATCHES[1])
    with pytest.raises(RuntimeError, match="backward"):
        trainer.step(5)


def test_a_backward_elsewhere_changes_nothing():
    """Through another network, or for the gradient of an input alone."""
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    moved(net)
    reference = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial)
    reference.refresh(BATCHES)
    reference.weights = values(net)
    expected = [w - 0.1 / 5 * g for w, g in zip(values(net), reference.estimate(BATCHES[0]))]
    trainer.correct_grads(lambda: loss_of(BATCHES[0]))
    other = PROBLEM.network()
    backward(PROBLEM.closure(other), BATCHES[1])
    x = array(PROBLEM.X)
    x.attach_grad()
    with autograd.record():
        y = net(x)
    autograd.grad(y, [x])
    trainer.step(5)
    assert distance(values(net), expected) < 1e-6


def test_a_backward_that_adds_is_allowed():
    net, loss_of, trainer = make(grad_req="add")
    trainer.update_full_grads(loss_of, BATCHES)
    moved(net)
    reference = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial)
    reference.refresh(BATCHES)
    reference.weights = values(net)
    added = PROBLEM.gradient(values(net), BATCHES[1])[0]
    expected = [
        w - 0.1 / 5 * (v + g) for w, v, g in zip(values(net), reference.estimate(BATCHES[0]), added)
    ]
    trainer.correct_grads(lambda: loss_of(BATCHES[0]))
    backward(loss_of, BATCHES[1])
    trainer.step(5)
    assert distance(values(net), expected) < 1e-6


# --- a loss that is gathered on one device -----------------------------------------------------


def gathered(net):
    """Predictions of two devices, and one loss on the first."""
    loss_function = PROBLEM.loss_function()

    def loss_of(index):
        parts = [part for part in np.array_split(index, 2) if len(part)]
        outputs = [
            net(array(PROBLEM.X[part], device=device)).as_in_context(TWO[0])
            for part, device in zip(parts, TWO)
        ]
        joined = mx.nd.concat(*(out.as_nd_ndarray() for out in outputs), dim=0)
        if mx.util.is_np_array():
            joined = joined.as_np_ndarray()
        return loss_function(joined, array(PROBLEM.y[index], device=TWO[0]))

    return loss_of


def test_the_full_gradient_of_a_loss_gathered_on_one_device():
    net, _, trainer = make(devices=TWO)
    trainer.update_full_grads(gathered(net), BATCHES)
    reference = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial)
    reference.refresh(BATCHES)
    for device in range(2):
        found = [trainer.full_grads[p][device].asnumpy() for p in parameters(net)]
        assert distance(found, reference.full_grad) < 1e-12


def test_steps_with_a_loss_gathered_on_one_device():
    net, _, trainer = make(devices=TWO)
    loss_of = gathered(net)
    reference, optimizer = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial), oracle.SGD(0.1)
    for _ in range(2):
        trainer.update_full_grads(loss_of, BATCHES)
        reference.refresh(BATCHES)
        for index in BATCHES:
            trainer.step(len(index), closure=lambda: loss_of(index))
            optimizer.step(reference.weights, reference.estimate(index), len(index))
    for device in TWO:
        assert distance(values(net, device), reference.weights) < 1e-10


# --- a forward that assigns a parameter --------------------------------------------------------


def set_data(parameter):
    value = parameter.list_data()[0]
    parameter.set_data(value / (value**2).sum() ** 0.5)


def in_place(parameter):
    for value in parameter.list_data():
        value[:] = value / (value**2).sum() ** 0.5


def normalizing(net, loss_of, assign):
    """A loss that first scales a weight to norm 1, as spectral normalization does."""

    def closure(index):
        with autograd.pause():
            assign(net[0].weight)
        return loss_of(index)

    return closure


@pytest.mark.parametrize("assign", [set_data, in_place])
def test_a_forward_that_assigns_a_parameter_in_a_step(assign):
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    moved(net)
    before, snapshot = values(net), trainer.snapshot
    closure = normalizing(net, loss_of, assign)
    for call in (
        lambda: trainer.step(5, closure=lambda: closure(BATCHES[0])),
        lambda: trainer.correct_grads(lambda: closure(BATCHES[0])),
    ):
        with pytest.raises(RuntimeError, match="assign"):
            call()
        assert distance(values(net), before) == 0
        for parameter, (weight,) in snapshot.items():
            np.testing.assert_array_equal(
                trainer.snapshot[parameter][0].asnumpy(), weight.asnumpy()
            )


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("assign", [set_data, in_place])
def test_a_forward_that_assigns_a_parameter_in_a_refresh(assign, first):
    net, loss_of, trainer = make()
    if not first:
        trainer.update_full_grads(loss_of, BATCHES)
        moved(net)
    before, snapshot = values(net), trainer.snapshot
    with pytest.raises(RuntimeError, match="assign"):
        trainer.update_full_grads(normalizing(net, loss_of, assign), BATCHES)
    assert distance(values(net), before) == 0
    assert (trainer.snapshot is None) == first
    for parameter, (weight,) in (snapshot or {}).items():
        np.testing.assert_array_equal(trainer.snapshot[parameter][0].asnumpy(), weight.asnumpy())


def test_a_forward_that_assigns_a_parameter_without_a_snapshot():
    """Nothing is evaluated elsewhere: as with `gluon.Trainer`."""
    net, loss_of, trainer = make(rate=0.0)
    trainer.step(5, closure=lambda: normalizing(net, loss_of, set_data)(BATCHES[0]))
    assert abs((values(net)[0] ** 2).sum() - 1) < 1e-12
    assert isinstance(trainer, gluon.Trainer)
