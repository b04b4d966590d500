"""The learning rate that SVRG takes from its last two snapshots."""

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from problems import Dense, contexts, distance, values

from gluon_svrg import SVRGTrainer


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("wd", [0.0, 0.02])
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_trajectory(kind, wd, devices):
    problem, rate, sizes = Dense(kind, seed=5), 0.02, []
    # Without momentum, MXNet 2.0 rounds 1 - learning_rate * wd to float32.
    settings = {"learning_rate": rate, "wd": wd, "momentum": 0.2}
    net, loss_of, trainer = kit.make(
        problem, devices=contexts(devices), settings=settings, barzilai_borwein=True
    )
    twin = oracle.SVRG(problem.gradient, problem.initial)
    optimizer, rates = oracle.SGD(**settings), oracle.BarzilaiBorwein(rate, wd)
    for epoch in range(4):  # later, little moves: the rate is a quotient of rounding errors
        whole = problem.batches(7 + epoch % 2)  # of 8, the trainer keeps a multiple
        trainer.update_full_grads(loss_of, whole)
        twin.refresh(whole)
        inner = len(sizes) and sizes[-1]
        rates.refresh(twin.snapshot, twin.full_grad, inner)
        optimizer.learning_rate = rates.learning_rate * (0.8 if epoch else 1)
        expected = optimizer.learning_rate  # rounded to float32 where it is the user's own
        assert trainer.learning_rate == pytest.approx(expected, rel=1e-7 if epoch == 0 else 1e-9)
        optimizer.learning_rate = trainer.learning_rate  # float32 must not round both apart
        order = np.random.RandomState(epoch).permutation(23)
        batches = problem.batches(5, order)[: 3 + epoch % 3]  # another M each time
        for index in batches:
            trainer.step(len(index), closure=lambda: loss_of(index))
            twin.step(optimizer, index)
        sizes.append(len(batches))
    assert distance(values(net), twin.weights) < 1e-10
    assert trainer.learning_rate != rate


def test_the_last_rate_is_kept_where_nothing_moved():
    problem = Dense("regression", seed=5)
    _, loss_of, trainer = kit.make(problem, rate=0.02, barzilai_borwein=True)
    for _ in range(2):
        trainer.update_full_grads(loss_of, problem.batches(5))
        assert trainer.learning_rate == 0.02
    trainer.set_learning_rate(0.03)
    trainer.discard_snapshot()
    trainer.update_full_grads(loss_of, problem.batches(5))
    assert trainer.learning_rate == 0.03


def test_a_concave_loss_keeps_the_rate():
    problem = Dense("regression", seed=5)
    _, loss_of, trainer = kit.make(problem, rate=0.01, barzilai_borwein=True)

    def concave(index):
        return -loss_of(index)

    kit.train(trainer, concave, problem.batches(5))
    assert trainer.num_snapshots == 2
    assert trainer.learning_rate == 0.01


def test_resumes_with_its_rate(tmp_path):
    problem = Dense("classification", seed=6)
    made = [kit.make(problem, rate=0.02, barzilai_borwein=True) for _ in range(2)]
    (net, loss_of, trainer), (other_net, other_loss_of, other) = made
    kit.train(trainer, loss_of, problem.batches(5))
    trainer.save_states(tmp_path / "states")
    net.save_parameters(str(tmp_path / "weights"))
    other_net.load_parameters(str(tmp_path / "weights"))
    other.load_states(tmp_path / "states")
    assert other.learning_rate == trainer.learning_rate != 0.02
    for a_trainer, a_loss_of in ((trainer, loss_of), (other, other_loss_of)):
        kit.train(a_trainer, a_loss_of, problem.batches(5))
    assert other.learning_rate == trainer.learning_rate
    for a, b in zip(values(net), values(other_net)):
        np.testing.assert_array_equal(a, b)


def test_a_refresh_that_fails_keeps_the_rate():
    problem = Dense("regression", seed=5)
    _, loss_of, trainer = kit.make(problem, rate=0.02, barzilai_borwein=True)
    kit.train(trainer, loss_of, problem.batches(5), epochs=2)
    with pytest.raises(KeyError, match="mine"):
        trainer.update_full_grads(kit.failing(loss_of, 7), problem.batches(5))
    assert trainer.learning_rate == 0.02


@pytest.mark.parametrize(
    ("optimizer", "settings", "error", "message"),
    [
        ("adam", {}, ValueError, "'sgd' or 'nag', got Adam"),
        ("sgd", {"lr_scheduler": mx.lr_scheduler.FactorScheduler(10)}, ValueError, "overwrite it"),
        (mx.optimizer.AdaGrad(), None, ValueError, "'sgd' or 'nag', got AdaGrad"),
    ],
)
def test_optimizers_without_a_rate_of_their_own(optimizer, settings, error, message):
    net = kit.with_norm()
    with pytest.raises(error, match=message):
        SVRGTrainer(net.collect_params(), optimizer, settings, barzilai_borwein=True)
    with pytest.raises(TypeError, match="True or False"):
        SVRGTrainer(net.collect_params(), "sgd", barzilai_borwein=1)
    with pytest.raises(ValueError, match="no worker knows with kvstore='dist_async'"):
        SVRGTrainer(net.collect_params(), "sgd", kvstore="dist_async", barzilai_borwein=True)
