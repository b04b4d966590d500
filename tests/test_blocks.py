"""Blocks of every kind: hybridized or not, initialized late, with states of their own."""

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from kit import HYBRIDIZE
from loops import plain_step
from mxnet import gluon
from problems import Dense, array, contexts, distance, parameters, values

from gluon_svrg import SAGATrainer, SVRGTrainer, _mxnet
from gluon_svrg.passes.network import Network

PROBLEM = Dense("classification", hidden=(5,), seed=6)


def train(trainer, loss_of, problem=PROBLEM):
    kit.train(trainer, loss_of, problem.batches(5), data=problem.batches(7))


def oracle_weights(initial, problem=PROBLEM):
    twin = oracle.SVRG(problem.gradient, initial)
    kit.train_twin(twin, oracle.SGD(0.1, 0.9), problem.batches(5), data=problem.batches(7))
    return twin.weights


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("devices", [1, 2])
def test_deferred_initialization_by_the_full_pass(hybridize, devices):
    """The first thing that a user calls may be `update_full_grads`."""
    where = contexts(devices)
    net = PROBLEM.network("float64", where, deferred=True, hybridize=hybridize)
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    loss_of = PROBLEM.closure(net, "float64", where)
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    initial = values(net, where[0])
    assert (
        distance(
            [trainer.full_grads[p][0].asnumpy() * len(PROBLEM.X) for p in parameters(net)],
            PROBLEM.gradient(initial, np.arange(len(PROBLEM.X)))[0],
        )
        < 1e-12
    )
    train(trainer, loss_of)
    for device in where:
        assert distance(values(net, device), oracle_weights(initial)) < 1e-10


def test_deferred_initialization_by_a_step():
    net = PROBLEM.network(deferred=True)
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    loss_of = PROBLEM.closure(net)
    loss = trainer.step(5, closure=lambda: loss_of(np.arange(5)))
    assert loss.shape == (5,)
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    assert trainer.inner_steps == 0


def test_a_parameter_that_no_minibatch_initializes():
    net = PROBLEM.network(deferred=True)
    unused = gluon.nn.Dense(3)
    unused.initialize()
    params = [*net.collect_params().values(), *unused.collect_params().values()]
    trainer = SVRGTrainer(params, "sgd")
    with pytest.raises(RuntimeError, match=r"No minibatch initializes .*weight.*in_units"):
        trainer.update_full_grads(PROBLEM.closure(net), PROBLEM.batches(7))
    assert trainer.snapshot is None


def test_a_layer_that_only_training_uses():
    """A prediction does not initialize it."""
    net = PROBLEM.network(deferred=True)
    auxiliary = gluon.nn.Dense(3, dtype="float64")
    auxiliary.initialize()
    loss_function = PROBLEM.loss_function()

    def loss_of(index):
        X, y = array(PROBLEM.X[index]), array(PROBLEM.y[index])
        loss = loss_function(net(X), y)
        return loss + loss_function(auxiliary(X), y) if mx.autograd.is_training() else loss

    params = [*net.collect_params().values(), *auxiliary.collect_params().values()]
    trainer = SVRGTrainer(params, "sgd", {"learning_rate": 0.1})
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    assert auxiliary.weight in trainer.full_grads


def test_a_closure_that_calls_backward_on_a_network_without_weights_yet():
    net = PROBLEM.network(deferred=True)
    loss_of = PROBLEM.closure(net)

    def with_backward(index):
        loss = loss_of(index)
        loss.backward()
        return loss

    trainer = SVRGTrainer(net.collect_params(), "sgd")
    with pytest.raises(RuntimeError, match=r"called backward\(\) itself"):
        trainer.update_full_grads(with_backward, PROBLEM.batches(7))


class One(mx.init.Initializer):
    """MXNet's own cannot initialize what has no dimensions."""

    def _init_weight(self, name, array):
        array[() if array.shape == () else slice(None)] = 1


def test_parameters_of_several_dtypes_and_shapes():
    """float32 beside float64, and on 2.0 a parameter without dimensions."""
    shape = () if mx.util.is_np_array() else (1,)
    weight = gluon.Parameter("weight", shape=(4,), dtype="float64", init=mx.init.One())
    scale = gluon.Parameter("scale", shape=shape, dtype="float32", init=One())
    for p in (weight, scale):
        p.initialize()
    X, y = PROBLEM.X, PROBLEM.X.sum(axis=1) ** 2

    def loss_of(index):
        product = (array(X[index]) * weight.data()).sum(axis=1)
        return (product * scale.data().astype("float64") - array(y[index])) ** 2

    def gradient(weights, index):
        (w, s), residual = weights, (X[index] @ weights[0]) * weights[1] - y[index]
        return [2 * residual @ X[index] * s, np.sum(2 * residual * (X[index] @ w))], len(index)

    trainer = SVRGTrainer([weight, scale], "sgd", {"learning_rate": 1e-3})
    reference, optimizer = oracle.SVRG(gradient, [np.ones(4), np.ones(())]), oracle.SGD(1e-3)
    for epoch in range(4):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, PROBLEM.batches(7))
            reference.refresh(PROBLEM.batches(7))
        for index in PROBLEM.batches(5):
            trainer.step(len(index), closure=lambda: loss_of(index))
            optimizer.step(reference.weights, reference.estimate(index), len(index))
    found = [weight.data().asnumpy(), scale.data().asnumpy().reshape(())]
    assert distance(found, reference.weights) < 1e-5


def test_a_block_that_is_not_hybrid():
    class Net(gluon.Block):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, X):
            for layer in self.layers:
                X = layer(X)
            return X

    inner = PROBLEM.network()
    net = Net(list(inner))
    trainer = SVRGTrainer(inner.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    loss_function = PROBLEM.loss_function()
    train(
        trainer, lambda index: loss_function(net(array(PROBLEM.X[index])), array(PROBLEM.y[index]))
    )
    assert distance(values(inner), oracle_weights(PROBLEM.initial)) < 1e-10


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
def test_hybridizing_in_the_middle(hybridize):
    net = PROBLEM.network()
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    loss_of = PROBLEM.closure(net)

    def loss_of_and_hybridize(index):
        if trainer.inner_steps == 3 and hybridize is not None:
            net.hybridize(**hybridize)
        return loss_of(index)

    train(trainer, loss_of_and_hybridize)
    assert distance(values(net), oracle_weights(PROBLEM.initial)) < 1e-10


# --- BatchNorm ---------------------------------------------------------------------------------


def batch_norm_network(hybridize, where=None):
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Dense(6, in_units=4),
        gluon.nn.BatchNorm(in_channels=6),
        gluon.nn.Dense(3, in_units=6),
    )
    net.initialize(mx.init.Xavier(), ctx=where)
    if hybridize is not None:
        net.hybridize(**hybridize)
    return net


def statistics(net):
    mx.nd.waitall()  # with static_shape MXNet forgets that BatchNorm writes them
    norm = net[1]
    return [norm.running_mean.data().asnumpy(), norm.running_var.data().asnumpy()]


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_running_statistics_move_as_under_gluon_trainer(hybridize, coefficient):
    """The passes at the snapshot leave them alone. With rate 0 both see the same activations."""
    found = []
    for cls in (gluon.Trainer, SVRGTrainer):
        net = batch_norm_network(hybridize)
        loss_of = PROBLEM.closure(net, "float32")
        kwargs = {} if cls is gluon.Trainer else {"coefficient": coefficient}
        trainer = cls(net.collect_params(), "sgd", {"learning_rate": 0.0}, **kwargs)
        history = []
        for epoch in range(3):
            if cls is SVRGTrainer and epoch > 0:
                trainer.update_full_grads(loss_of, PROBLEM.batches(7))
                np.testing.assert_array_equal(statistics(net), history[-1])
            for index in PROBLEM.batches(5):
                if cls is SVRGTrainer:
                    trainer.step(len(index), closure=lambda: loss_of(index))
                else:
                    plain_step(trainer, lambda: loss_of(index), len(index))
                history.append(statistics(net))
        found.append(history)
    np.testing.assert_array_equal(*found)
    assert not np.array_equal(found[0][0], found[0][-1])


def test_statistics_at_the_snapshot_are_of_that_moment():
    """A pass at the snapshot starts from the states then, whatever passes were before it."""
    net = batch_norm_network({})
    loss_of = PROBLEM.closure(net, "float32")
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    for index in PROBLEM.batches(5):
        trainer.step(len(index), closure=lambda: loss_of(index))
    X = array(PROBLEM.X, "float32")
    then, at_refresh = statistics(net), net(X).asnumpy()
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    for index in PROBLEM.batches(5):
        trainer.step(len(index), closure=lambda: loss_of(index))
    now = net(X).asnumpy()
    for _ in range(2):
        with trainer.at_snapshot():
            np.testing.assert_array_equal(net(X).asnumpy(), at_refresh)
            with mx.autograd.record():  # moves the copy of the statistics that it sees
                loss = loss_of(np.arange(9))
            loss.backward()
    np.testing.assert_array_equal(net(X).asnumpy(), now)
    norm = net[1]
    kept = [trainer.snapshot[p][0].asnumpy() for p in (norm.running_mean, norm.running_var)]
    np.testing.assert_array_equal(kept, then)


def test_the_estimate_with_batch_norm_is_the_full_gradient_at_the_snapshot():
    net = batch_norm_network({})
    loss_of = PROBLEM.closure(net, "float32")
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    for index in PROBLEM.batches(7):
        trainer.correct_grads(lambda: loss_of(index))
        for p, mean in trainer.full_grads.items():
            scale = max(np.abs(m[0].asnumpy()).max() for m in trainer.full_grads.values())
            difference = p.grad().asnumpy() - len(index) * mean[0].asnumpy()
            assert np.abs(difference).max() < 1e-5 * len(index) * scale


@pytest.mark.parametrize(
    "dtype, onednn, adds",
    [("float32", "1", False), ("float32", "0", True), ("float64", "1", True)],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_backward_adds_unless_the_operators_are_those_of_onednn(
    dtype, onednn, adds, devices, monkeypatch
):
    """With oneDNN, large gradients are added in separate arrays; the results are the same."""
    monkeypatch.setattr(_mxnet.arrays, "_LARGE", 1)
    for name in ("MXNET_MKLDNN_ENABLED", "MXNET_ONEDNN_ENABLED"):  # of 1.9.1, of 2.0
        monkeypatch.setenv(name, onednn)
    where = contexts(devices)
    net = PROBLEM.network(dtype, where)
    network = Network(parameters(net))
    network.bind(True, is_known=True)
    assert network.adds == adds
    initial = [value.astype("float64") for value in values(net, where[0])]
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    train(trainer, PROBLEM.closure(net, dtype, where))
    allowed = 1e-5 if dtype == "float32" else 1e-10
    for device in where:
        assert distance(values(net, device), oracle_weights(initial)) < allowed


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(3,), (2, 1, 3, 1, 2, 1), (1, 2, 1, 3, 1, 1, 1)])
def test_parameters_of_many_dimensions(shape, dtype):
    """oneDNN has six; minibatches of a power of two begin with a copy of the full gradient."""
    rng = np.random.RandomState(3)
    initial, X = rng.randn(*shape), rng.randn(12, *shape)
    parameter = gluon.Parameter("weight", shape=shape, dtype=dtype, init=mx.init.Zero())
    parameter.initialize()
    parameter.set_data(array(initial, dtype))
    trainer = SVRGTrainer([parameter], "sgd", {"learning_rate": 0.05})

    def loss_of(index):
        products = parameter.data() * array(X[index], dtype)
        return ((products.reshape((len(index), -1)).sum(axis=1) - 1) ** 2) / 2

    def gradient(weights, index):
        errors = np.tensordot(X[index], weights[0], weights[0].ndim) - 1
        return [np.tensordot(errors, X[index], 1)], len(index)

    batches = np.split(np.arange(12), 3)
    kit.train(trainer, loss_of, batches)
    twin = oracle.SVRG(gradient, [initial])
    kit.train_twin(twin, oracle.SGD(0.05), batches)
    assert distance([parameter.data().asnumpy()], twin.weights) < 1e-5


@pytest.mark.parametrize("kind", ["two gradients", "stored", "SAGA"])
def test_what_is_refused_moves_no_running_statistics(kind):
    """A minibatch that is none of the index, or has other entries in the second call."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, in_units=3), gluon.nn.BatchNorm(in_channels=4))
    net.add(gluon.nn.Dense(1, in_units=4))
    net.initialize()
    cls = SAGATrainer if kind == "SAGA" else SVRGTrainer
    trainer = cls(net.collect_params(), "sgd", {"learning_rate": 0.01}, lock_random=False)
    X = np.random.RandomState(0).randn(12, 3)

    def loss_of(start, stop):
        return (net(array(X[start:stop], "float32")) - 1) ** 2

    pieces = [(0, 5), (5, 10), (10, 12)]
    trainer.update_full_grads(loss_of, pieces, store_grads=kind == "stored")
    before = net[1].running_mean.data().asnumpy()
    if kind == "two gradients":
        rows = iter([pieces[0], pieces[2]])
        with pytest.raises(RuntimeError, match="when it was called again"):
            trainer.step(5, closure=lambda: loss_of(*next(rows)))
    else:
        with pytest.raises(ValueError, match="Minibatch 0 had 5 loss entries"):
            trainer.step(5, closure=lambda: loss_of(*pieces[2]), batch_index=0)
    np.testing.assert_array_equal(net[1].running_mean.data().asnumpy(), before)
