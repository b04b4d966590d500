"""Sparse gradients and weights, on MXNet 1.9.1: as the dense network.

MXNet 2.0 refuses them itself when the layer is made.
"""

import kit
import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged, plain_step, svrg_step
from mxnet import gluon
from plays import TWO
from problems import IS_NUMPY_LIKE, Words, flat, values_of_any

from gluon_svrg import MARSTrainer, SAGATrainer, SVRGTrainer
from gluon_svrg.prox import L1

BATCHES = np.array_split(np.arange(30), 4)
kinds = pytest.mark.parametrize("kind", ["sparse gradient", "sparse weight"])


def make(kind, devices=None, **kwargs):
    if IS_NUMPY_LIKE:
        pytest.skip("MXNet 2.0 has no sparse arrays in Gluon")
    return kit.make(Words(kind, 30), "float32", devices, **{"rate": 0.2, **kwargs})


def values(net):
    mx.nd.waitall()
    return [*values_of_any([net[0].weight, net[1].weight, net[1].bias])]


def train(net, loss_of, trainer, epochs=4):
    kit.train(trainer, loss_of, BATCHES, epochs)
    return values(net)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("kvstore", ["local", "device"])
@kinds
def test_as_the_dense_network(kind, devices, kvstore, optimizer):
    settings = {"devices": devices, "kvstore": kvstore, "optimizer": optimizer}
    dense, sparse = (train(*make(each, **settings)) for each in ("dense", kind))
    np.testing.assert_allclose(flat(sparse), flat(dense), atol=1e-6)


def test_a_prox_is_refused():
    with pytest.raises(ValueError, match=r"A prox needs .* is a row_sparse weight"):
        make("sparse weight", prox=L1(0.1))


@kinds
def test_without_a_snapshot_it_is_gluon_trainer(kind):
    found = []
    for cls in (gluon.Trainer, SVRGTrainer):
        net, loss_of, trainer = make(kind, cls=cls)
        step = svrg_step if cls is SVRGTrainer else plain_step
        for index in BATCHES:
            step(trainer, lambda: loss_of(index), len(index))
        found.append(values(net))
    assert_unchanged(*found)


def test_rows_that_the_last_two_minibatches_do_not_reach():
    """Lazy updates of approximate MARS leave them: its mean is that of the last one alone."""
    net, loss_of, trainer = make("sparse gradient", cls=MARSTrainer, optimizer="adam", exact=False)
    largest = Words("sparse gradient", 30).X.max(axis=1)
    minibatches = [np.flatnonzero((largest < 8) == is_low) for is_low in (True, False)]
    for number, index in enumerate([minibatches[1], *[minibatches[0]] * 4]):
        before = values(net)[0]
        trainer.step(len(index), closure=lambda: loss_of(index))
        stays = np.all(values(net)[0] == before, axis=1)
        assert number < 2 or np.all(stays[8:])
    assert not np.any(stays[:8])


def test_states_of_sparse_networks_resume(tmp_path):
    first, second = (make("sparse gradient") for _ in range(2))
    train(*first, epochs=1)
    first[2].save_states(tmp_path / "states")
    first[0].save_parameters(str(tmp_path / "weights"))
    second[0].load_parameters(str(tmp_path / "weights"))
    second[2].load_states(tmp_path / "states")
    for _, loss_of, trainer in (first, second):
        kit.one_epoch(trainer, loss_of, BATCHES)
    assert_unchanged(values(first[0]), values(second[0]))


def test_one_gradient_that_accumulates():
    """MXNet's embedding can only write sparse gradients, not add them."""
    found = []
    for kind in ("dense", "sparse gradient"):
        net, loss_of, trainer = make(kind, cls=SAGATrainer)
        net.collect_params().setattr("grad_req", "add")
        trainer.update_full_grads(loss_of, BATCHES)
        for number in (2, 0, 1, 3):
            net.collect_params().zero_grad()
            index = BATCHES[number]
            trainer.step(len(index), closure=lambda: loss_of(index), batch_index=number)
        found.append(values(net))
    np.testing.assert_allclose(*map(flat, found), atol=1e-6)


@pytest.mark.parametrize("kvstore", ["local", "device"])
def test_a_sparse_parameter_of_the_users_own(kvstore):
    """On MXNet 2.0 a parameter can be sparse where NumPy's interface is turned off."""
    with mx.util.np_array(False):
        weight = gluon.Parameter("w", shape=(6, 2), stype="row_sparse", grad_stype="row_sparse")
        weight.initialize(mx.init.One(), ctx=TWO)
        trainer = SVRGTrainer([weight], "sgd", {"learning_rate": 0.1}, kvstore=kvstore)
        every = [mx.nd.arange(6, ctx=device, dtype="int64") for device in TWO]

        def loss_of(target):
            rows = [weight.row_sparse_data(numbers) for numbers in every]
            return [((row - target.as_in_context(row.ctx)) ** 2).sum(axis=1) for row in rows]

        targets = [mx.nd.array(np.random.randn(6, 2)) for _ in range(3)]
        trainer.update_full_grads(loss_of, targets)
        mean = 2 * (1 - np.mean([target.asnumpy() for target in targets], axis=0)) / 6
        trainer.step(12, closure=lambda: loss_of(targets[0]))
        found = weight.row_sparse_data(every[0]).asnumpy()
        np.testing.assert_allclose(found, 1 - 0.1 * mean, rtol=1e-5)
