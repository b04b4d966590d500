"""SVRG: what holds whatever the data, the splits and the devices are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import HYBRIDIZE, backward, full_gradients, gradients, make
from problems import Dense, distance

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
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=2),
    coefficient=st.sampled_from([0.25, 1.0]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_at_the_snapshot(hybridize, problem, sizes, coefficient, dtype):
    """The estimate is the full gradient, in which samples weigh alike, however they are cut."""
    (net, loss_of, trainer), eps = make(problem, dtype, hybridize=hybridize), np.finfo(dtype).eps
    total, count = problem.gradient(problem.initial, np.arange(len(problem.X)))
    losses = loss_of(np.arange(count)).asnumpy().astype("float64")
    for size in sizes:
        mean_loss = trainer.update_full_grads(loss_of, problem.batches(size))
        assert mean_loss == pytest.approx(losses.mean(), rel=100 * eps)
        mean = full_gradients(trainer, net)
        assert distance(mean, [grad / count for grad in total]) < 1000 * eps
    trainer.coefficient = coefficient
    for index in problem.batches(sizes[0]):
        backward(lambda: loss_of(index))
        plain = gradients(net)
        trainer.correct_grads(lambda: loss_of(index))
        expected = [
            (1 - coefficient) * g + coefficient * len(index) * mu for g, mu in zip(plain, mean)
        ]
        scale = max(np.abs(g).max() for g in plain + expected)
        for estimate, value in zip(gradients(net), expected):
            assert np.abs(estimate - value).max() <= 4 * eps * scale
