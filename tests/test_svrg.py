"""SVRG: what holds whatever the data, the splits and the devices are; its own learning rate."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import HYBRIDIZE, assert_unchanged, failing, full_gradients, gradients, make, train
from loops import backward
from mxnet.lr_scheduler import FactorScheduler
from problems import Dense, contexts, distance, parameters, values

problems = st.builds(
    Dense,
    st.sampled_from(["regression", "classification"]),
    hidden=st.lists(st.integers(1, 5), max_size=2),
    samples=st.integers(2, 17),
    features=st.integers(1, 4),
    seed=st.integers(0, 99),
)


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@given(
    problem=problems,
    size=st.integers(1, 6),
    coefficient=st.sampled_from([0.25, 1.0]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_at_the_snapshot_the_estimate_is_the_full_gradient(
    hybridize, problem, size, coefficient, dtype
):
    net, loss_of, trainer = make(problem, dtype, hybridize=hybridize)
    trainer.update_full_grads(loss_of, problem.batches(size))
    trainer.coefficient = coefficient
    mean = full_gradients(trainer, net)
    for index in problem.batches(size):
        backward(lambda: loss_of(index))
        plain = gradients(net)
        trainer.correct_grads(lambda: loss_of(index))
        expected = [
            (1 - coefficient) * g + coefficient * len(index) * mu for g, mu in zip(plain, mean)
        ]
        scale = max(np.abs(g).max() for g in plain + expected)
        for estimate, value in zip(gradients(net), expected):
            assert np.abs(estimate - value).max() <= 4 * np.finfo(dtype).eps * scale


@given(problem=problems, size=st.integers(1, 6), other=st.integers(1, 9))
def test_a_refresh_is_the_mean_of_all_data_each_time(problem, size, other):
    """Samples weigh alike, not minibatches; again at the same weights it changes nothing."""
    net, loss_of, trainer = make(problem)
    first = trainer.update_full_grads(loss_of, problem.batches(size))
    grads, count = problem.gradient(problem.initial, np.arange(len(problem.X)))
    losses = loss_of(np.arange(len(problem.X))).asnumpy().astype("float64")
    assert first == pytest.approx(losses.mean(), rel=1e-12)
    assert trainer.grad_evaluations == count

    def seen():
        there = [trainer.snapshot[p][0].asnumpy() for p in parameters(net)]
        return full_gradients(trainer, net) + there

    before = seen()
    assert distance(before[: len(grads)], [g / count for g in grads]) < 1e-12
    assert trainer.update_full_grads(loss_of, problem.batches(size)) == first
    assert_unchanged(before, seen())
    # nor does it matter how the data is cut
    again = trainer.update_full_grads(loss_of, problem.batches(other))
    assert again == pytest.approx(first, rel=1e-12)
    assert distance(full_gradients(trainer, net), before[: len(grads)]) < 1e-12


# --- the learning rate from the last two snapshots -----------------------------------------------


@pytest.mark.parametrize("wd, devices", [(0.0, 2), (0.02, 1)])
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_rate_of_barzilai_and_borwein(kind, wd, devices):
    problem, rate, sizes = Dense(kind, seed=5), 0.02, []
    # Without momentum, MXNet 2.0 rounds 1 - learning_rate * wd to float32.
    settings = {"learning_rate": rate, "wd": wd, "momentum": 0.2}
    kwargs = {"settings": settings, "barzilai_borwein": True}
    net, loss_of, trainer = make(problem, devices=contexts(devices), **kwargs)
    twin = oracle.SVRG(problem.gradient, problem.initial)
    optimizer, rates = oracle.SGD(**settings), oracle.BarzilaiBorwein(rate, wd)
    for epoch in range(4):  # later, little moves: the rate is a quotient of rounding errors
        whole = problem.batches(7 + epoch % 2)
        trainer.update_full_grads(loss_of, whole)
        twin.refresh(whole)
        rates.refresh(twin.reference, twin.mean, len(sizes) and sizes[-1])
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


def test_the_last_rate_is_kept_where_there_is_no_new_one():
    """Where nothing moved, after a discard, with a concave loss, and by a refresh that fails."""
    problem = Dense("regression", seed=5)
    batches = problem.batches(5)
    _, loss_of, trainer = make(problem, rate=0.02, barzilai_borwein=True)
    for _ in range(2):
        trainer.update_full_grads(loss_of, batches)
        assert trainer.learning_rate == 0.02
    train(trainer, lambda index: -loss_of(index), batches)
    assert trainer.learning_rate == 0.02
    trainer.discard_snapshot()
    trainer.update_full_grads(loss_of, batches)
    assert trainer.learning_rate == 0.02
    trainer.step(5, closure=lambda: loss_of(batches[0]))
    with pytest.raises(KeyError, match="mine"):
        trainer.update_full_grads(failing(loss_of, 7), batches)
    assert trainer.learning_rate == 0.02
    trainer.update_full_grads(loss_of, batches)
    assert trainer.learning_rate != 0.02


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"optimizer": "adam"}, ValueError, "'sgd' or 'nag', got Adam"),
        ({"optimizer": mx.optimizer.AdaGrad(), "settings": {}}, ValueError, "got AdaGrad"),
        ({"settings": {"lr_scheduler": FactorScheduler(10)}}, ValueError, "overwrite it"),
        ({"kvstore": "dist_async"}, ValueError, "no worker knows with kvstore='dist_async'"),
        ({"barzilai_borwein": 1}, TypeError, "True or False"),
    ],
)
def test_arguments_that_barzilai_and_borwein_refuse(own, error, message):
    with pytest.raises(error, match=message):
        make(Dense("regression"), **{"barzilai_borwein": True, **own})
