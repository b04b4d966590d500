"""Many workers, by every kvstore: real processes find what one finds over the union of their data.

Workers without servers run all tasks in one job; those with parameter servers have a job for each,
because MXNet has one such kvstore in a process.
"""

import sys
from functools import partial
from importlib.util import find_spec

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
import worker
from jobs import assert_close, assert_identical, run, run_cluster, run_tasks
from kit import split_at, table
from plays import BATCHES, CASES, HOWS, PARTS, PROBLEM, SETTINGS, TWO, WITH_STORED, Play
from problems import Words, distance, parameters, values

from gluon_svrg import SARAHTrainer, SVRGTrainer

HAS_HOROVOD = find_spec("horovod") is not None
needs_horovod = pytest.mark.skipif(not HAS_HOROVOD, reason="needs Horovod: .ci/horovod builds it")
slow = pytest.mark.slow
needs_sparse = pytest.mark.skipif(mx.util.is_np_array(), reason="MXNet 2.0 has no sparse arrays")

TRAININGS = {
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
TIED, UPDATE = {"problem": "tied layers", "servers": 2}, {"update_on_kvstore": True}
DEFERRED = {"network": {"deferred": True}}
SPARSE = {"problem": "sparse words", "params": {"lazy_update": False}, "dtype": "float32"}
FAILURES = [(where, first) for where in ("closure", "data") for first in (False, True)]
METHODS = [(name, how) for name in WITH_STORED for how in HOWS]
TASKS = {
    **{f"{name}, {how}": ("method", {"name": name, "how": how}) for name, how in METHODS},
    "two devices": ("method", {"devices": 2}),
    "stale, MARS": ("method", {"name": "MARS", "how": "halves", "ignores_stale": True}),
    **{name: ("training", settings) for name, settings in TRAININGS.items()},
    **{f"{w} fails, {first}": ("failing", {"where": w, "first": first}) for w, first in FAILURES},
    "preconditioned": ("preconditioned", {}),
    "preconditioned, two devices": ("preconditioned", {"devices": 2}),
    "two trainers": ("two_trainers", {}),
    "many parameters": ("many_parameters", {}),
    "without losses": ("without_losses", {}),
    "random on one": ("random_on_one", {}),
}
#: Settings of the trainings that change nothing in one process.
OF_MANY = {"workers", "servers", "kvstore", "devices", "update_on_kvstore", "predict"}


def alone(task, **settings):
    return getattr(worker, task)(**settings, kvstore=None)[1]


def check_method(found, name="", **_):
    """The trainer stays with its twin in NumPy; all ranks have the same weights."""
    assert_identical(found)
    assert found[0]["distances"].max() < (1e-10 if "MARS" in name else 1e-12)


def check_as_alone(found, task, tolerance, **_):
    assert_identical(found)
    assert_close(found[0], alone(task), tolerance)


def check_random_on_one(found, **_):
    assert_identical(found)
    assert found[0]["snapshots"] == 5


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
    "preconditioned": partial(check_as_alone, task="preconditioned", tolerance=1e-9),
    "failing": check_failure,
    "many_parameters": check_many_parameters,
    "without_losses": partial(check_as_alone, task="without_losses", tolerance=1e-12),
    "random_on_one": check_random_on_one,
}


@table("kvstore", "sharedfolder", pytest.param("horovod", marks=[slow, needs_horovod]))
def test_two_workers(kvstore, tmp_path):
    """Each method by `step`, in halves, and with micro-batches; every setting; what fails."""
    found = run_tasks(tmp_path, kvstore, TASKS)
    for name, (task, settings) in TASKS.items():
        print(name)  # the last one is the task that has failed
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
    ("training", {**TRAININGS["scheduler"], **UPDATE, "servers": 2}),  # the optimizer gets all
    *(
        pytest.param(task, settings, marks=slow)
        for task, settings in [
            ("method", {"workers": 3, "servers": 2}),
            *(("method", {"name": name, "how": how, "late": True})  # its state moves
              for name in ("SAG", "SAGA", "SARAH", "STORM", "approximate MARS")
              for how in ("halves", "add")),
            ("method", {"name": "stored", "servers": 2}),
            ("method", {"devices": 2, "kvstore": "dist_device_sync"}),
            ("method", {**UPDATE, "devices": 2, "servers": 2}),
            ("failing", {"where": "closure", "first": False, "kvstore": "dist_sync"}),
            ("failing", {"where": "data", "first": True, "kvstore": "dist_sync"}),
            ("failing", {"where": "closure", "first": True, "kvstore": "dist_async"}),
            ("failing", {"where": "data", "first": False, "kvstore": "dist_async"}),
            ("training", {**TRAININGS["scheduler"], "kvstore": "dist_sync"}),
            # Its servers take the steps of one process.
            ("training", {**TRAININGS["scheduler"], "kvstore": "dist_async", "workers": 1}),
            # MXNet 2.0 leaves gaps in their keys: others of ours must not fall into them.
            ("training", {**TIED, **UPDATE}),
            ("training", {**TIED, "devices": 2}),
            ("training", {**TIED, **UPDATE, "devices": 2, "kvstore": "dist_device_sync"}),
            # Predictions reorder weights, and kvstores cannot send that layout.
            ("training", {**IMAGES, **DEFERRED}),
            ("training", {**IMAGES, "predict": True}),
            ("training", {**IMAGES, **DEFERRED, **UPDATE, "predict": True}),
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
        for found_mean, total in zip(mean, worker.PROBLEM.gradient(snapshot, np.arange(46))[0]):
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
        for n, initial in enumerate(worker.PROBLEM.initial):
            np.testing.assert_array_equal(found[f"w{n}"], initial)


# --- the kvstores of one process, and what is refused before anything happens --------------------
TWO_BITS = {"type": "2bit", "threshold": 0.5}


def make(devices=1, **kwargs):
    return kit.make(PROBLEM, devices=TWO if devices > 1 else None, settings=SETTINGS, **kwargs)


def check(name, devices, kvstore, **kwargs):
    """A method stays with its twin, also if a refresh comes first."""
    for parts in (PARTS, ((), *PARTS)):
        given = kvstore() if callable(kvstore) else kvstore
        play = Play(CASES[name], devices=devices, kvstore=given, **kwargs)
        play.run(parts=parts)
    return play


#: Instances, and MXNet's kvstore in Python, for tests.
INSTANCE, IN_PYTHON = (partial(mx.kv.create, name) for name in ("device", "teststore"))


@kit.table(
    "devices, kvstore, updates",
    *((TWO, kvstore, [None, True, False]) for kvstore in ("local", "Device", INSTANCE)),
    (TWO, "teststore", [None]),  # with one device, `gluon.Trainer` would drop the name
    (TWO, IN_PYTHON, [None]),
    (None, None, [None]),
    (None, "device", [False]),
    (None, INSTANCE, [None, True, False]),  # one that is given as it is updates, even there
)
def test_each_kvstore(devices, kvstore, updates):
    """However a minibatch is split; a device may have no part of it."""
    for update in updates:
        for cut in (0.5, 0.8, 0.0, 1.0) if devices else [1.0]:
            check("SVRG", devices, kvstore, update_on_kvstore=update, split=split_at([cut]))


def test_the_first_device_leads_when_devices_start_apart():
    """As `gluon.Trainer` does at its first step, but before the snapshot is taken."""
    net, loss_of, trainer = make(2)
    for p in parameters(net):
        p.list_data()[1][:] += 1
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    for p, initial in zip(parameters(net), PROBLEM.initial):
        for copy in trainer.snapshot[p] + p.list_data():
            np.testing.assert_array_equal(copy.asnumpy(), initial)


@pytest.mark.parametrize("kvstore", ["local", "device", INSTANCE])
def test_who_needs_the_reduced_gradient_updates_itself(kvstore):
    assert check("SARAH", TWO, kvstore, update_on_kvstore=None).trainer._updates_on_kvstore is False


KNOWN = r"MXNet has no kvstore '.*Known are .*'dist_async'.*'dist_sync'.*'horovod'.*'local'"
NAMES = [(name, devices) for name in ("devise", "dist-sync", "horovood", "") for devices in (1, 2)]
HAS_NCCL = mx.runtime.Features().is_enabled("NCCL")
SARAH = {"cls": SARAHTrainer}


@kit.table(
    "kvstore, devices, settings, message",
    *((name, devices, {}, KNOWN) for name, devices in NAMES),  # MXNet takes another or none
    *([] if HAS_NCCL else [("nccl", 1, {}, "built with NCCL")]),
    (None, 2, {}, r"kvstore=None, 2 devices drift apart"),
    ("device", 1, UPDATE, "update_on_kvstore=True with one device"),
    ("dist_async", 1, {"update_on_kvstore": False}, "=False, but kvstore='dist_async'"),
    ("horovod", 1, UPDATE, "update_on_kvstore=True with kvstore='horovod'"),
    ("dist_async", 2, SARAH, "SARAHTrainer needs .* never reduces gradients"),
    ("dist_async", 2, {**SARAH, **UPDATE}, "SARAHTrainer needs .* never reduces gradients"),
    ("device", 2, {**SARAH, **UPDATE}, "SARAHTrainer needs .* the kvstore keeps it"),
    ("dist_sync", 2, {**SARAH, **UPDATE}, "SARAHTrainer needs .* the kvstore keeps it"),
    ("local", 2, {"compression_params": TWO_BITS}, "kvstore 'local' cannot compress gradients"),
    ("dist_sync", 2, {"compression_params": TWO_BITS}, "kvstore 'dist_sync' cannot compress"),
)
def test_what_is_refused(kvstore, devices, settings, message, monkeypatch):
    monkeypatch.delenv("DMLC_NUM_WORKER", raising=False)
    with pytest.raises(ValueError, match=message):
        make(devices, kvstore=kvstore, **settings)


def test_objects_and_names_that_are_no_kvstores_here(monkeypatch, tmp_path):
    monkeypatch.delenv("DMLC_NUM_WORKER", raising=False)
    with pytest.raises(ValueError, match="MXNet has no kvstore 'devise'"):
        make(kvstore=mx.kv.create("devise"))
    with pytest.raises(TypeError, match="must be a kvstore, name or None, got int"):
        make(kvstore=2)
    for name in ("dist_sync", "dist_async"):
        with pytest.raises(RuntimeError, match=f"='{name}' needs a job.*gluon-svrg launch"):
            make(kvstore=name)
    for name, value in [("TOY_FOLDER", str(tmp_path)), ("TOY_RANK", "0"), ("TOY_SIZE", "2")]:
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="update_on_kvstore=True with kvstore='sharedfolder'"):
        make(kvstore=worker.SharedFolder(), update_on_kvstore=True)


def test_refused_arguments_leave_the_parameters_alone():
    """A parameter knows its trainer: a refused one must not have taken it over."""
    net, loss_of, trainer = make(2, update_on_kvstore=True)
    kit.train(trainer, loss_of, BATCHES, 1)
    for settings, message in (({"coefficient": -1}, "coefficient"), ({"kvstore": None}, "=None")):
        with pytest.raises(ValueError, match=message):
            SVRGTrainer(net.collect_params(), "sgd", SETTINGS, **settings)
    # set_data resets the kvstore of the trainer that the parameter knows
    parameters(net)[0].set_data(parameters(net)[0].list_data()[0] * 2)
    kit.train(trainer, loss_of, BATCHES, 1)
    np.testing.assert_array_equal(*(values(net, device)[0] for device in TWO))


def test_the_gradient_of_the_step_is_compressed():
    """Not the full one. Each device's is quantized, the rest is left over, then summed."""
    rest, twin = {}, oracle.SVRG(PROBLEM.gradient, PROBLEM.initial)
    net, loss_of, trainer = kit.make(PROBLEM, "float32", TWO, compression_params=TWO_BITS)
    twin.refresh(BATCHES)
    trainer.update_full_grads(loss_of, BATCHES)
    assert distance(kit.full_gradients(trainer, net), twin.mean) < 1e-5
    for index in PROBLEM.batches(6):
        trainer.step(len(index), closure=lambda: loss_of(index))
        total = [np.zeros_like(w) for w in twin.weights]
        for device, part in enumerate(np.array_split(index, 2)):
            for k, v in enumerate(twin.estimate(part)):
                v = v + rest.get((device, k), 0)
                sent = 0.5 * ((v >= 0.5) * 1.0 - (v <= -0.5))
                rest[device, k] = v - sent
                total[k] += sent
        oracle.SGD(0.1).step(twin.weights, total, len(index))
    assert distance(values(net, TWO[0]), twin.weights) < 1e-5
    assert distance(twin.weights, PROBLEM.initial) > 1e-3


@pytest.mark.skipif(HAS_HOROVOD, reason="Horovod is installed")
def test_without_horovod():
    with pytest.raises(ImportError, match=r"needs Horovod.*pip install.*\.\[horovod\]"):
        make(kvstore="horovod")


@kit.table("variables", {"HOROVOD_SIZE": "2"}, {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"})
def test_the_warning_of_a_worker_alone_points_to_the_users_line(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    params = PROBLEM.network().collect_params()
    with pytest.warns(UserWarning, match="connects none of 2 workers") as warned:
        SVRGTrainer(params, "sgd")
    assert [one.filename for one in warned] == [__file__]


@needs_sparse
@table("kvstore, kind", ("horovod", "gradient"), ("horovod", "weight"), ("dist_sync", "gradient"))
def test_sparse_parameters_that_are_refused(kvstore, kind):
    with pytest.raises(ValueError, match=f"is sparse, and kvstore='{kvstore}' cannot exchange"):
        kit.make(Words(f"sparse {kind}", 5), "float32", kvstore=kvstore)


ALONE = """
from mxnet import gluon
from gluon_svrg import SVRGTrainer
net = gluon.nn.Dense(1, in_units=2)
net.initialize()
SVRGTrainer(net.collect_params(), "sgd", kvstore="horovod")
"""


@slow
@needs_horovod
def test_processes_that_horovod_does_not_see():
    for name, size in [("OMPI_COMM_WORLD_SIZE", 3), ("PMI_SIZE", 3), ("SLURM_NTASKS", 1)]:
        status, output = run([sys.executable, "-c", ALONE], **{name: str(size)})
        assert status == (size > 1)
        assert (f"Horovod sees one process, but {name} is 3" in output) == (size > 1)
