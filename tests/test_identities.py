"""What must hold whatever the data, the splits and the devices are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import HYBRIDIZE, full_gradients, gradients, make, move
from loops import plain_step, split_at, svrg_step
from mxnet import autograd, gluon
from problems import Dense, contexts, distance, parameters, values

from gluon_svrg import SVRGTrainer

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
    live_first=st.booleans(),
    coefficient=st.sampled_from([0.25, 1.0]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_at_the_snapshot_the_estimate_is_the_full_gradient(
    hybridize, problem, size, live_first, coefficient, dtype
):
    net = problem.network(dtype, hybridize=hybridize)
    loss_of = problem.closure(net, dtype)
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, coefficient=1)
    if live_first:  # the network's first pass, before there is a snapshot, is at the live weights
        svrg_step(trainer, lambda: loss_of(np.arange(2)), 2)
    trainer.update_full_grads(loss_of, problem.batches(size))
    trainer.coefficient = coefficient
    for index in problem.batches(size):
        with autograd.record():
            loss = loss_of(index)
        loss.backward()
        plain = gradients(net)
        trainer.correct_grads(lambda: loss_of(index))
        mean = full_gradients(trainer, net)
        expected = [
            (1 - coefficient) * g + coefficient * len(index) * mu for g, mu in zip(plain, mean)
        ]
        scale = max(np.abs(g).max() for g in plain + expected)
        for estimate, value in zip(gradients(net), expected):
            assert np.abs(estimate - value).max() <= 4 * np.finfo(dtype).eps * scale


@given(problem=problems, size=st.integers(1, 6), seed=st.integers(0, 9), refresh=st.integers(1, 9))
def test_the_mean_estimate_over_all_minibatches_is_the_gradient(problem, size, seed, refresh):
    net = problem.network()
    loss_of = problem.closure(net)
    trainer = SVRGTrainer(net.collect_params(), "sgd")
    trainer.update_full_grads(loss_of, problem.batches(refresh))
    move(net, 0.3, seed)
    total = [0.0] * len(problem.initial)
    for index in problem.batches(size, np.random.RandomState(seed).permutation(len(problem.X))):
        trainer.correct_grads(lambda: loss_of(index))
        total = [t + g for t, g in zip(total, gradients(net))]
    everything = np.arange(len(problem.X))
    assert distance(total, problem.gradient(values(net), everything)[0]) < 1e-11


@given(problem=problems, size=st.integers(1, 6), other=st.integers(1, 9))
def test_refreshing_again_at_the_same_weights_changes_nothing(problem, size, other):
    net = problem.network()
    loss_of = problem.closure(net)
    trainer = SVRGTrainer(net.collect_params(), "sgd")
    first = trainer.update_full_grads(loss_of, problem.batches(size))
    before = full_gradients(trainer, net) + [
        trainer.snapshot[p][0].asnumpy() for p in parameters(net)
    ]
    assert trainer.update_full_grads(loss_of, problem.batches(size)) == first
    after = full_gradients(trainer, net) + [
        trainer.snapshot[p][0].asnumpy() for p in parameters(net)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(before, after))
    # nor does it matter how the data is cut
    assert trainer.update_full_grads(loss_of, problem.batches(other)) == pytest.approx(
        first, rel=1e-12
    )
    assert distance(full_gradients(trainer, net), before[: len(problem.initial)]) < 1e-12


@given(problem=problems, size=st.integers(1, 6))
def test_full_gradient_and_mean_loss(problem, size):
    net = problem.network()
    loss_of = problem.closure(net)
    trainer = SVRGTrainer(net.collect_params(), "sgd")
    mean_loss = trainer.update_full_grads(loss_of, problem.batches(size))
    grads, count = problem.gradient(problem.initial, np.arange(len(problem.X)))
    assert distance(full_gradients(trainer, net), [g / count for g in grads]) < 1e-12
    losses = loss_of(np.arange(len(problem.X))).asnumpy().astype("float64")
    assert mean_loss == pytest.approx(losses.mean(), rel=1e-12)
    assert trainer.grad_evaluations == sum([len(b) for b in problem.batches(size)])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("update_on_kvstore", [None, False])
@given(
    problem=problems,
    size=st.integers(2, 6),
    dtype=st.sampled_from(["float32", "float64"]),
    refreshes=st.one_of(st.none(), st.lists(st.booleans(), min_size=3, max_size=3)),
)
def test_without_snapshot_or_coefficient_it_is_gluon_trainer_bit_for_bit(
    optimizer, devices, update_on_kvstore, problem, size, dtype, refreshes
):
    """`refreshes` is None: no snapshot; otherwise coefficient 0, and when to take snapshots."""
    where = contexts(devices)
    settings = {"learning_rate": 0.05, "wd": 0.01}
    results = []
    for cls, step in [(gluon.Trainer, plain_step), (SVRGTrainer, svrg_step)]:
        net = problem.network(dtype, where)
        loss_of = problem.closure(net, dtype, where)
        arguments = {} if cls is gluon.Trainer else {"coefficient": 0 if refreshes else 0.5}
        trainer = cls(
            net.collect_params(),
            optimizer,
            settings,
            update_on_kvstore=update_on_kvstore,
            **arguments,
        )
        for epoch in range(3):
            if cls is SVRGTrainer and refreshes and refreshes[epoch]:
                trainer.update_full_grads(loss_of, problem.batches(3))
            for index in problem.batches(size):
                if len(index) >= devices:  # on an idle device gluon.Trainer has a stale gradient
                    step(trainer, lambda: loss_of(index), len(index))
        results.append([values(net, device) for device in where])
    for expected, result in zip(*results):
        assert all(np.array_equal(a, b) for a, b in zip(expected, result))


@given(
    problem=problems,
    size=st.integers(1, 8),
    cuts=st.lists(st.floats(0, 1), min_size=2, max_size=2),
    full_cuts=st.lists(st.floats(0, 1), min_size=2, max_size=2),
    coefficient=st.sampled_from([0.0, 0.6, 1.0]),
    update_on_kvstore=st.sampled_from([None, True, False]),
)
def test_one_two_and_three_devices_agree(
    problem, size, cuts, full_cuts, coefficient, update_on_kvstore
):
    """However a minibatch is split, even when devices stay idle."""
    results = []
    for count in (1, 2, 3):
        where = contexts(count)
        net = problem.network("float64", where)
        loss_of = problem.closure(net, "float64", where, split_at(cuts[: count - 1]))
        full_loss_of = problem.closure(net, "float64", where, split_at(full_cuts[: count - 1]))
        trainer = SVRGTrainer(
            net.collect_params(),
            "sgd",
            {"learning_rate": 0.05, "momentum": 0.9},
            kvstore="device",
            update_on_kvstore=update_on_kvstore if count > 1 else None,
            coefficient=coefficient,
        )
        for _ in range(2):
            trainer.update_full_grads(full_loss_of, problem.batches(4))
            for index in problem.batches(size):
                trainer.step(len(index), closure=lambda: loss_of(index))
        for device in where:
            results.append(values(net, device))
    for result in results[1:]:
        assert distance(result, results[0]) < 1e-11


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("size", [4, 6])
def test_a_loaded_full_gradient_is_the_same_to_the_last_bit(size, devices, tmp_path):
    where, problem = contexts(devices), Dense("classification", hidden=(5,), seed=11)
    runs = [make(problem, "float32", where, lock_random=False) for _ in range(2)]
    (net, loss_of, trainer), (other_net, other_loss_of, other) = runs
    trainer.update_full_grads(loss_of, problem.batches(size))
    trainer.save_states(tmp_path / "states")
    other.update_full_grads(other_loss_of, problem.batches(8))
    other.load_states(tmp_path / "states")
    for found, loaded in zip(full_gradients(trainer, net), full_gradients(other, other_net)):
        np.testing.assert_array_equal(found, loaded)
    for index in [*problem.batches(size), *problem.batches(3), *problem.batches(8)]:
        trainer.correct_grads(lambda: loss_of(index))
        other.correct_grads(lambda: other_loss_of(index))
        for device in where:
            for found, expected in zip(gradients(net, device), gradients(other_net, device)):
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_mean_loss_of_many_minibatches(devices):
    """Losses are joined 64 minibatches at a time, and on each device."""
    where, problem = contexts(devices), Dense("regression", samples=300, seed=4)
    _, loss_of, trainer = make(problem, "float64", where)
    losses = [each.asnumpy().astype("float64") for each in _listed(loss_of(np.arange(300)))]
    found = trainer.update_full_grads(loss_of, problem.batches(2))
    assert found == pytest.approx(np.concatenate(losses).mean(), rel=1e-6)  # 2.0: float32


def _listed(losses):
    return losses if isinstance(losses, list) else [losses]
