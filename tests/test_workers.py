"""Many workers, by every kvstore: real processes find what one finds over the union of their data.

Workers without servers run all tasks in one job; those with parameter servers have a job for each,
because MXNet has one such kvstore in a process.
"""

import importlib.util

import mxnet as mx
import numpy as np
import pytest
import worker
from jobs import assert_close, assert_identical, run_cluster, run_tasks
from kit import table
from plays import HOWS, WITH_STORED
from worker import PROBLEM

HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
needs_horovod = pytest.mark.skipif(not HAS_HOROVOD, reason="needs Horovod: .ci/horovod builds it")
slow = pytest.mark.slow
needs_sparse = pytest.mark.skipif(mx.util.is_np_array(), reason="MXNet 2.0 has no sparse arrays")

SETTINGS = {
    "scheduler": {"params": {"momentum": 0.9, "clip_gradient": 0.05}},
    "adam": {"optimizer": "adam", "devices": 2},
    "lars": {"optimizer": "lars"},
    "proximal": {"l1": 0.3},
    "scaled": {"dtype": "float32", "overflow": [9, 9]},
    "overflow": {"dtype": "float32", "overflow": [1, 2]},
    "tied": {"problem": "tied layers"},
    "tied, two devices": {"problem": "tied layers", "devices": 2},
}
IMAGES = {"problem": "images", "dtype": "float32"}
TIED, THERE = {"problem": "tied layers", "servers": 2}, {"update_on_kvstore": True}
DEFERRED = {"network": {"deferred": True}}
SPARSE = {"problem": "sparse words", "params": {"lazy_update": False}, "dtype": "float32"}
FAILURES = [(where, first) for where in ("closure", "data") for first in (False, True)]
METHODS = [(name, how) for name in WITH_STORED for how in HOWS]
TASKS = {
    **{f"{name}, {how}": ("method", {"name": name, "how": how}) for name, how in METHODS},
    "two devices": ("method", {"devices": 2}),
    "stale, MARS": ("method", {"name": "MARS", "how": "halves", "ignores_stale": True}),
    **{name: ("training", settings) for name, settings in SETTINGS.items()},
    **{f"{w} fails, {first}": ("failing", {"where": w, "first": first}) for w, first in FAILURES},
    "preconditioned": ("preconditioned", {}),
    "preconditioned, two devices": ("preconditioned", {"devices": 2}),
    "two trainers": ("two_trainers", {}),
    "many parameters": ("many_parameters", {}),
}
#: Settings of the trainings that change nothing in one process.
OF_MANY = {"workers", "servers", "kvstore", "devices", "update_on_kvstore", "predict"}


def alone(task, **settings):
    return getattr(worker, task)(**settings, kvstore=None)[1]


def check_method(found, name="", **_):
    """The trainer stays with its twin in NumPy; all ranks have the same weights."""
    assert_identical(found)
    assert found[0]["distances"].max() < (1e-10 if "MARS" in name else 1e-12)


def check_preconditioned(found, **_):
    """As one process that has the same minibatches."""
    assert_identical(found)
    assert_close(found[0], alone("preconditioned"), 1e-9)


def check_failure(found, **_):
    assert [str(each["message"])[:15] for each in found] == ["RuntimeError: A", "KeyError: 'mine"]
    assert "Another worker has failed" in str(found[0]["message"])


def check_many_parameters(found, **_):
    """No number is left out of the sums, which are those of float64, to the last bit."""
    sums = found[0]["given"] + found[1]["given"]
    for each in found:
        np.testing.assert_array_equal(each.pop("sums"), sums)
        each.pop("given")
    assert_identical(found)
    expected = alone("many_parameters")
    assert_close(found[0], {name: expected[name] for name in found[0]}, 1e-12)


def check_training(found, **settings):
    """Workers start apart. An overflow on one worker skips the step on all of them."""
    assert_identical(found)
    own = {name: settings[name] for name in settings.keys() - OF_MANY}
    if "problem" in own:  # which has a dense network as well
        own["problem"] = own["problem"].replace("sparse ", "")
    on_servers = "update_on_kvstore" in settings or "dist_async" in settings.values()
    is_rounded = on_servers or "dtype" in settings  # to float32
    assert_close(found[0], alone("training", **own), 1e-6 if is_rounded else 1e-12)


CHECKS = {
    "method": check_method,
    "two_trainers": check_method,
    "training": check_training,
    "preconditioned": check_preconditioned,
    "failing": check_failure,
    "many_parameters": check_many_parameters,
}


@table("kvstore", "sharedfolder", pytest.param("horovod", marks=[slow, needs_horovod]))
def test_two_workers(kvstore, tmp_path):
    """Each method by `step`, in halves, and with micro-batches; every setting; what fails.

    All in one job. What is printed last is the task that has failed.
    """
    found = run_tasks(tmp_path, kvstore, TASKS)
    for name, (task, settings) in TASKS.items():
        print(name)
        CHECKS[task](found[name], **settings)
    # a step before the first refresh takes one gradient
    steps = [len(np.array_split(np.arange(46), 4)[n]) for n in (1, 3, 1, 0, 2, 3, 0, 2, 1)]
    evaluations = 2 * 46 + 2 * sum(steps) - sum(steps[:3])
    assert sum(int(each["evaluations"]) for each in found["SVRG, step"]) == evaluations
    assert found["overflow"][0]["scale"] == found["scaled"][0]["scale"] / 2


@slow
@needs_horovod
def test_what_horovod_has_beside(tmp_path):
    """A name for which MXNet makes a local kvstore; convolutions; three workers, and one."""
    tasks = {"its own": ("method", {"kvstore": "MXNet's own horovod"})}
    tasks["convolutions"] = ("training", IMAGES)
    found = run_tasks(tmp_path / "two", "horovod", tasks)
    check_method(found["its own"])
    assert_identical(found["convolutions"])
    assert_close(found["convolutions"][0], alone("training", **IMAGES), 1e-5)
    for workers in (1, 3):
        task = {"SVRG": ("method", {"devices": 2})}
        check_method(run_tasks(tmp_path / f"{workers}", "horovod", task, workers)["SVRG"])


@table(
    "task, settings",
    ("method", {"name": "SAG", "how": "halves", "late": True}),
    ("method", {"name": "MARS", "ignores_stale": True}),  # a parameter that one of them reaches
    ("preconditioned", {"servers": 2}),
    ("many_parameters", {}),
    ("training", {**SETTINGS["scheduler"], **THERE, "servers": 2}),  # the optimizer gets all
    *(
        pytest.param(task, settings, marks=slow)
        for task, settings in [
            ("method", {"workers": 3, "servers": 2}),
            *(("method", {"name": name, "how": how, "late": True})  # its state moves
              for name in ("SAG", "SAGA", "SARAH", "STORM", "approximate MARS")
              for how in ("halves", "add")),
            ("method", {"name": "stored", "servers": 2}),
            ("method", {"devices": 2, "kvstore": "dist_device_sync"}),
            ("method", {**THERE, "devices": 2, "servers": 2}),
            ("failing", {"where": "closure", "first": False, "kvstore": "dist_sync"}),
            ("failing", {"where": "data", "first": True, "kvstore": "dist_sync"}),
            ("failing", {"where": "closure", "first": True, "kvstore": "dist_async"}),
            ("failing", {"where": "data", "first": False, "kvstore": "dist_async"}),
            ("training", {**SETTINGS["scheduler"], "kvstore": "dist_sync"}),
            # Its servers take the steps of one process.
            ("training", {**SETTINGS["scheduler"], "kvstore": "dist_async", "workers": 1}),
            # MXNet 2.0 leaves gaps in their keys: others of ours must not fall into them.
            ("training", {**TIED, **THERE}),
            ("training", {**TIED, "devices": 2}),
            ("training", {**TIED, **THERE, "devices": 2, "kvstore": "dist_device_sync"}),
            # Predictions reorder weights, and kvstores cannot send that layout.
            ("training", {**IMAGES, **DEFERRED}),
            ("training", {**IMAGES, "predict": True}),
            ("training", {**IMAGES, **DEFERRED, **THERE, "predict": True}),
        ]
    ),
    pytest.param("training", {**SPARSE, "servers": 2}, marks=[slow, needs_sparse]),
    ids=str,
)  # fmt: skip
def test_each_task_with_servers(task, settings, tmp_path):
    """Also if one worker is late: nobody begins an exchange before the last one has ended."""
    CHECKS[task](run_cluster(tmp_path, task, **settings), **settings)


def test_no_gradient_overtakes_the_weights(tmp_path):
    """Where the first gradient is computed before the weights are shared, as by `gluon.Trainer`."""
    for found in run_cluster(tmp_path, "overtaken", workers=4):
        np.testing.assert_array_equal(found["w0"], np.ones((3, 2)))


def sizes_of_gradients(folder, epochs, **settings):
    """Of `dist_async`, the norm of each full gradient; it is that of the snapshot of all."""
    found = run_cluster(folder, "asynchronous", epochs=epochs, **settings)
    assert_identical(found)
    sizes = []
    for epoch in range(epochs):
        snapshot, mean = ([found[0][f"{x}{epoch}.{n}"] for n in range(4)] for x in "sm")
        for found_mean, total in zip(mean, PROBLEM.gradient(snapshot, np.arange(46))[0]):
            np.testing.assert_allclose(found_mean, total / 46, atol=1e-12)
        sizes.append(np.sqrt(sum(np.sum(m**2) for m in mean)))
    return sizes


def test_dist_async(tmp_path):
    """All take the weights of the servers as the snapshot."""
    sizes = sizes_of_gradients(tmp_path, epochs=3)
    assert sizes[-1] < sizes[0]


@slow
def test_dist_async_converges(tmp_path):
    """The full gradient becomes small, and that of SGD does not."""
    svrg, sgd = (
        np.mean(sizes_of_gradients(tmp_path / name, 60, coefficient=coefficient)[-10:])
        for name, coefficient in (("svrg", 1.0), ("sgd", 0.0))
    )
    print(f"\ndist_async | mean norm of the last ten full gradients | {svrg:.3f}, SGD {sgd:.3f}")
    assert svrg < sgd / 4


@slow
def test_servers_that_could_not_load_the_optimizer_are_found_out(tmp_path):
    for found in run_cluster(tmp_path, "not_loaded", servers=2):
        assert "could not load the optimizer" in str(found["message"])
        for n, initial in enumerate(PROBLEM.initial):
            np.testing.assert_array_equal(found[f"w{n}"], initial)
