"""Many workers: real clusters, against one process over the union of the data."""

import mxnet as mx
import numpy as np
import oracle
import pytest
from cluster import run_cluster
from problems import Dense, distance, values
from union import (
    COUNT,
    EVALUATIONS,
    assert_close,
    assert_identical,
    reference,
    run_alone,
    tied_alone,
    weights,
)
from worker import PROBLEM, Tied, minibatches

from gluon_svrg import SVRGTrainer

needs_sparse = pytest.mark.skipif(
    mx.util.is_np_array(), reason="MXNet 2.0 has no sparse arrays in Gluon"
)


@pytest.mark.parametrize(
    "workers, devices, store, update_on_kvstore",
    [
        (3, 2, "exchange", None),
        (2, 1, "dist_sync", None),
        (3, 1, "dist_sync", None),
        (2, 2, "dist_device_sync", None),
        (2, 1, "dist_sync", True),
        (2, 2, "dist_sync", True),
    ],
)
def test_workers_are_one_process_over_the_union_of_the_data(
    workers, devices, store, update_on_kvstore, tmp_path
):
    rates = (0.1, 0.05, 0.2)  # set_learning_rate takes effect
    found = run_cluster(
        tmp_path,
        "trajectory",
        workers,
        servers=2,
        devices=devices,
        kvstore=store,
        rates=rates,
        update_on_kvstore=update_on_kvstore,
    )
    assert_identical(found)
    expected = reference(rates=rates)
    assert distance(weights(found[0]), expected.weights) < 1e-6
    assert distance(weights(found[0], "mu"), expected.full_grad) < 1e-6
    evaluations = sum(int(f["evaluations"]) for f in found)
    assert evaluations == EVALUATIONS
    shares = [sum(map(len, minibatches(r, workers, True)[0])) for r in range(workers)]
    assert len(set(shares)) > 1


def test_stored_gradients_of_each_worker_s_own_minibatches(tmp_path):
    found = run_cluster(tmp_path, "trajectory", 2, servers=2, stored=True, rates=[0.1, 0.05])
    assert_identical(found)
    expected = reference(rates=[0.1, 0.05])
    assert distance(weights(found[0]), expected.weights) < 1e-6
    for f, rank in zip(found, range(2)):
        own = sum(map(len, minibatches(rank, 2, True)[0]))
        assert int(f["evaluations"]) == 6 * own  # two passes and four epochs


@pytest.mark.parametrize("kvstore", ["dist_sync", "exchange"])
def test_workers_that_start_apart_share_one_snapshot(kvstore, tmp_path):
    found = run_cluster(tmp_path, "trajectory", 2, seed=5, epochs=1, kvstore=kvstore)
    assert_identical(found)
    batches = np.array_split(np.arange(len(PROBLEM.X)), 4)
    there = weights(found[0], "there")
    svrg = oracle.SVRG(PROBLEM.gradient, there)
    svrg.refresh(batches)
    assert distance(weights(found[0], "mu"), svrg.full_grad) < 1e-6


@pytest.mark.slow
def test_adam(tmp_path):
    found = run_cluster(tmp_path, "trajectory", 2, optimizer="adam")
    assert_identical(found)
    alone = run_alone("adam")
    assert distance(weights(found[0]), alone) < 1e-4


@pytest.mark.parametrize("by", ["name", "instance"])
def test_settings_reach_the_optimizer_on_the_servers(by, tmp_path):
    """Momentum, weight decay, clipping, scheduler, multipliers, batch sizes that change."""
    found = run_cluster(tmp_path, "by_servers", 2, servers=2, by=by)
    for message in found[0].pop("messages"):
        assert "not possible where the servers update" in message
    found[1].pop("messages")
    assert_identical(found)
    assert distance(weights(found[0]), settings_alone()) < 1e-4


def settings_alone():
    """The same in one process, clipped as on the servers: after the sum."""
    net = PROBLEM.network("float32")
    scheduler = mx.lr_scheduler.FactorScheduler(3, 0.8, base_lr=0.1)
    params = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, "clip_gradient": 0.05}
    params["lr_scheduler"] = scheduler
    trainer = SVRGTrainer(net.collect_params(), "sgd", params)
    loss_of = PROBLEM.closure(net, "float32")
    batches = np.array_split(np.arange(len(PROBLEM.X)), 4)
    for epoch in range(4):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, batches)
        if epoch == 2:
            net[0].weight.lr_mult = 0.5
            net[1].bias.wd_mult = 3.0
        for batch in batches:
            trainer.step(len(batch), closure=lambda: loss_of(batch))
    return values(net)


@pytest.mark.slow
def test_servers_that_could_not_load_the_optimizer_are_found_out(tmp_path):
    found = run_cluster(tmp_path, "not_loaded", 2, servers=2)
    for f in found:
        assert "could not load the optimizer" in str(f["message"])
        assert f["unchanged"]


@pytest.mark.slow
def test_dist_async(tmp_path):
    """mu and the snapshot are the same on all ranks, and the gap is far below that of plain SGD."""
    problem = Dense("classification", seed=18, samples=60)
    best = minimum(problem)
    gaps = []
    for svrg in (True, False):
        found = run_cluster(tmp_path, "asynchronous", 2, servers=2, svrg=svrg, epochs=60)
        if svrg:
            assert_identical(found)
            assert sum(name.startswith("mu") for name in found[0]) == 30 * 4
        w = [found[0]["w0"], found[0]["w1"]]
        gaps.append(loss(problem, w) - best)
    assert gaps[0] < gaps[1] / 10


def loss(problem, w):
    scores = problem.X @ w[0].T + w[1]
    scores -= scores.max(axis=1, keepdims=True)
    chosen = scores[np.arange(len(scores)), problem.y.astype(int)]
    return float(np.mean(np.log(np.exp(scores).sum(axis=1)) - chosen))


def minimum(problem):
    w = [np.array(value) for value in problem.initial]
    everything = np.arange(len(problem.X))
    for _ in range(20_000):
        for value, g in zip(w, problem.gradient(w, everything)[0]):
            value -= 0.5 * g / len(everything)
    return loss(problem, w)


@pytest.mark.parametrize(
    ("where", "first", "kvstore"),
    [
        ("closure", False, "dist_sync"),
        ("closure", True, "dist_sync"),
        ("data", False, "dist_sync"),
        ("data", True, "dist_sync"),
        ("closure", False, "dist_async"),
        ("data", True, "dist_async"),
        ("closure", True, "exchange"),
        ("data", False, "exchange"),
    ],
)
def test_a_worker_that_fails_in_the_full_gradient(where, first, kvstore, tmp_path):
    found = run_cluster(tmp_path, "failing", 2, where=where, first=first, kvstore=kvstore)
    assert [str(f["message"])[:12] for f in found] == ["RuntimeError", "KeyError: 'm"]
    assert "Another worker has failed" in str(found[0]["message"])
    assert all(f["unchanged"] for f in found)
    if kvstore != "dist_async":
        for i in range(COUNT):
            np.testing.assert_array_equal(found[0][f"w{i}"], found[1][f"w{i}"])


@pytest.mark.slow
@needs_sparse
def test_gluon_trainer_itself_fails_with_sparse_gradients(tmp_path):
    with pytest.raises(AssertionError, match=r"gluon-svrg launch: (server|worker) .*all others"):
        run_cluster(tmp_path, "sparse_gradient", 2, servers=1)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(2))
def test_no_gradient_overtakes_the_weights_at_the_start(attempt, tmp_path):
    """`gluon.Trainer` races there: weights become sums of gradients, in up to 6 runs of 10."""
    found = run_cluster(tmp_path, "start_up", 2, servers=2)
    assert_identical(found)
    optimizer = oracle.SGD(0.1, 0.9)
    expected = [w.copy() for w in PROBLEM.initial]
    batch = np.array_split(np.arange(len(PROBLEM.X)), 4)[0]
    optimizer.step(expected, PROBLEM.gradient(expected, batch)[0], len(batch))
    assert distance(weights(found[0]), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"update_on_kvstore": True},
        {"devices": 2},
        {"devices": 2, "update_on_kvstore": True, "kvstore": "dist_device_sync"},
    ],
    ids=str,
)
def test_shared_parameters(settings, tmp_path):
    """MXNet 2.0 leaves gaps in their keys: others of ours must not fall into them."""
    found = run_cluster(tmp_path, "tied", 2, servers=2, **settings)
    assert_identical(found)
    assert_close(found[0], tied_alone(), 1e-6)


def test_shared_parameters_with_dist_async(tmp_path):
    """One worker takes the steps of one process: its servers update in order."""
    found = run_cluster(tmp_path, "tied", 1, servers=2, kvstore="dist_async")
    problem = Tied([mx.cpu()])
    trainer = SVRGTrainer(
        problem.net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}
    )
    problem.parameters[-1].lr_mult = 0.5
    assert_close(found[0], problem.train(trainer, np.arange(24), 8), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"deferred": True},
        {"predict_first": True, "evaluate": True},
        {"deferred": True, "predict_first": True, "update_on_kvstore": True, "evaluate": True},
        {"deferred": True, "kvstore": "dist_async", "evaluate": True},
    ],
    ids=str,
)
def test_convolutions(settings, tmp_path):
    """Predictions reorder weights, and kvstores cannot send that layout."""
    found = run_cluster(tmp_path, "convolutions", 2, **settings)
    assert_identical(found)
    assert all(np.isfinite(value).all() for value in found[0].values())
    if not settings:
        moved = run_cluster(tmp_path, "convolutions", 2, update_on_kvstore=True)
        assert_close(found[0], moved[0], 1e-6)


@pytest.mark.slow
@needs_sparse
def test_a_row_sparse_weight_is_as_a_dense_one(tmp_path):
    """The servers hold it; workers have the rows that they use, and a snapshot has all."""
    found, expected = (
        run_cluster(tmp_path, "sparse_weight", 2, servers=servers, kind=kind)
        for kind, servers in (("sparse", 2), ("dense", 1))
    )
    assert_identical(found)
    assert_close(found[0], expected[0], 1e-6)


@pytest.mark.slow
def test_ranks_that_start_apart_take_one_first_step(tmp_path):
    """Without a snapshot: the plain gradient is taken where rank 0 has started."""
    found = run_cluster(tmp_path, "start_up", 2, seed=5, kvstore="exchange")
    assert_identical(found)
    there = weights(found[0], "there")
    batch = np.array_split(np.arange(len(PROBLEM.X)), 4)[0]
    oracle.SGD(0.1, 0.9).step(there, PROBLEM.gradient(there, batch)[0], len(batch))
    assert distance(weights(found[0]), there) < 1e-5
