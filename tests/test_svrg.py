"""SVRG: what holds whatever the data, the splits and the devices are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import HYBRIDIZE, assert_unchanged, full_gradients, gradients, make
from loops import backward
from problems import Dense, distance, parameters

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
