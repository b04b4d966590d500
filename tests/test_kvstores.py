"""The kvstores of one process, against the oracle, and what is refused before anything happens."""

import sys
from importlib.util import find_spec

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from jobs import run
from loops import split_at
from plays import CASES, PARTS, Play
from problems import Dense, Words, contexts, distance, parameters, values

from gluon_svrg import SARAHTrainer, SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=4)
SETTINGS = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01}
TWO_BITS = {"type": "2bit", "threshold": 0.5}


def make(devices=1, cls=SVRGTrainer, **kwargs):
    where = contexts(devices) if devices > 1 else None
    return kit.make(PROBLEM, devices=where, cls=cls, settings=SETTINGS, **kwargs)


def check(name, devices, kvstore, update_on_kvstore=None, split=None):
    """A method stays with its twin, also if a refresh comes first."""
    kwargs = {"settings": SETTINGS, "split": split, "update_on_kvstore": update_on_kvstore}
    for parts in (PARTS, ((), *PARTS)):
        kwargs["kvstore"] = mx.kv.create("device") if kvstore == "instance" else kvstore
        play = Play(CASES[name], PROBLEM, devices=devices, **kwargs)
        play.run(parts=parts)
    return play


@pytest.mark.parametrize("update_on_kvstore", [None, True, False])
@pytest.mark.parametrize("kvstore", ["local", "Device", "instance"])
def test_two_devices(kvstore, update_on_kvstore):
    """However a minibatch is split; a device may have no part of it."""
    for cuts in ([0.5], [0.8], [0.0], [1.0]):
        check("SVRG", contexts(2), kvstore, update_on_kvstore, split_at(cuts))


@pytest.mark.parametrize(
    "kvstore, update_on_kvstore",
    [
        (None, None),
        ("device", False),
        ("instance", None),  # one that is given as it is updates, even with one device
        ("instance", True),
        ("instance", False),
    ],
)
def test_one_device(kvstore, update_on_kvstore):
    check("SVRG", None, kvstore, update_on_kvstore)


def test_a_kvstore_in_python_with_one_worker():
    """MXNet's own, for tests. With one device, `gluon.Trainer` would drop the name."""
    check("SVRG", contexts(2), "teststore")
    check("SVRG", contexts(2), mx.kv.create("teststore"))


def test_the_first_device_leads_when_devices_start_apart():
    """As `gluon.Trainer` does at its first step, but before the snapshot is taken."""
    net, loss_of, trainer = make(2)
    for p in parameters(net):
        p.list_data()[1][:] += 1
    trainer.update_full_grads(loss_of, PROBLEM.batches(7))
    for p, initial in zip(parameters(net), PROBLEM.initial):
        for copy in trainer.snapshot[p] + p.list_data():
            np.testing.assert_array_equal(copy.asnumpy(), initial)


@pytest.mark.parametrize("kvstore", ["local", "device", "instance"])
def test_who_needs_the_reduced_gradient_updates_itself(kvstore):
    assert check("SARAH", contexts(2), kvstore).trainer._updates_on_kvstore is False


KNOWN = r"MXNet has no kvstore '.*Known are .*'dist_async'.*'dist_sync'.*'horovod'.*'local'"
NAMES = [(name, devices) for name in ("devise", "dist-sync", "horovood", "") for devices in (1, 2)]
HAS_NCCL = mx.runtime.Features().is_enabled("NCCL")
SARAH, UPDATE = {"cls": SARAHTrainer}, {"update_on_kvstore": True}


@pytest.mark.parametrize(
    "kvstore, devices, settings, message",
    [
        *((name, devices, {}, KNOWN) for name, devices in NAMES),  # MXNet takes another or none
        *([] if HAS_NCCL else [("nccl", 1, {}, "built with NCCL")]),
        (None, 2, {}, r"kvstore=None with 2 devices.*drift apart"),
        ("device", 1, UPDATE, "update_on_kvstore=True with one device"),
        ("dist_async", 1, {"update_on_kvstore": False}, "=False with kvstore='dist_async'"),
        ("horovod", 1, UPDATE, "update_on_kvstore=True with kvstore='horovod'"),
        ("dist_async", 2, SARAH, "SARAHTrainer needs .* never reduces gradients"),
        ("dist_async", 2, {**SARAH, **UPDATE}, "SARAHTrainer needs .* never reduces gradients"),
        ("device", 2, {**SARAH, **UPDATE}, "SARAHTrainer needs .* the kvstore keeps it"),
        ("dist_sync", 2, {**SARAH, **UPDATE}, "SARAHTrainer needs .* the kvstore keeps it"),
        ("local", 2, {"compression_params": TWO_BITS}, "compress gradients in a kvstore 'local'"),
        ("dist_sync", 2, {"compression_params": TWO_BITS}, "compress .* a kvstore 'dist_sync'"),
    ],
)
def test_what_is_refused(kvstore, devices, settings, message, monkeypatch):
    monkeypatch.delenv("DMLC_NUM_WORKER", raising=False)
    with pytest.raises(ValueError, match=message):
        make(devices, kvstore=kvstore, **settings)


def test_objects_and_names_that_are_no_kvstores_here(monkeypatch, tmp_path):
    monkeypatch.delenv("DMLC_NUM_WORKER", raising=False)
    with pytest.raises(ValueError, match="MXNet has no kvstore 'devise'"):
        make(kvstore=mx.kv.create("devise"))
    with pytest.raises(TypeError, match="must be a kvstore, the name of one, or None, got int"):
        make(kvstore=2)
    for name in ("dist_sync", "dist_async"):
        with pytest.raises(RuntimeError, match=f"='{name}' needs a job.*gluon-svrg launch"):
            make(kvstore=name)
    for name, value in [("TOY_FOLDER", str(tmp_path)), ("TOY_RANK", "0"), ("TOY_SIZE", "2")]:
        monkeypatch.setenv(name, value)
    from worker import SharedFolder

    with pytest.raises(ValueError, match="update_on_kvstore=True with kvstore='sharedfolder'"):
        make(kvstore=SharedFolder(), update_on_kvstore=True)


def test_refused_arguments_leave_the_parameters_alone():
    """A parameter knows its trainer: a refused one must not have taken it over."""
    net, loss_of, trainer = make(2, update_on_kvstore=True)
    kit.train(trainer, loss_of, PROBLEM.batches(5), 1)
    for settings, message in (({"coefficient": -1}, "coefficient"), ({"kvstore": None}, "=None")):
        with pytest.raises(ValueError, match=message):
            SVRGTrainer(net.collect_params(), "sgd", SETTINGS, **settings)
    # set_data resets the kvstore of the trainer that the parameter knows
    parameters(net)[0].set_data(parameters(net)[0].list_data()[0] * 2)
    kit.train(trainer, loss_of, PROBLEM.batches(5), 1)
    np.testing.assert_array_equal(*(values(net, device)[0] for device in contexts(2)))


# --- compression: of the step's gradient, not of the full gradient -------------------------------


def test_the_gradient_of_the_step_is_compressed():
    """Against NumPy: each device's estimate is quantized, the rest is left over, then summed."""
    two, rest, weights = contexts(2), {}, oracle.copied(PROBLEM.initial)
    settings = {"compression_params": TWO_BITS, "rate": 0.1}
    net, loss_of, trainer = kit.make(PROBLEM, "float32", two, **settings)
    twin = oracle.SVRG(PROBLEM.gradient, weights)
    twin.refresh(PROBLEM.batches(5))
    trainer.update_full_grads(loss_of, PROBLEM.batches(5))
    assert distance(kit.full_gradients(trainer, net), twin.mean) < 1e-5
    for index in PROBLEM.batches(6):
        trainer.step(len(index), closure=lambda: loss_of(index))
        total = [np.zeros_like(w) for w in weights]
        for device, part in enumerate(np.array_split(index, 2)):
            for k, v in enumerate(twin.estimate(part)):
                v = v + rest.get((device, k), 0)
                sent = 0.5 * ((v >= 0.5) * 1.0 - (v <= -0.5))
                rest[device, k] = v - sent
                total[k] += sent
        oracle.SGD(0.1).step(twin.weights, total, len(index))
    assert distance(values(net, two[0]), twin.weights) < 1e-5
    assert distance(twin.weights, PROBLEM.initial) > 1e-3


# --- Horovod, without a job ----------------------------------------------------------------------


@pytest.mark.skipif(find_spec("horovod") is not None, reason="Horovod is installed")
def test_without_horovod():
    with pytest.raises(ImportError, match=r"needs Horovod.*pip install.*\.\[horovod\]"):
        make(kvstore="horovod")


@pytest.mark.parametrize(
    "variables", [{"HOROVOD_SIZE": "2"}, {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"}]
)
def test_the_warning_of_a_worker_alone_points_to_the_users_line(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    net = PROBLEM.network()
    with pytest.warns(UserWarning, match="is one of 2 workers.*exchanges nothing") as warned:
        SVRGTrainer(net.collect_params(), "sgd")
    assert [one.filename for one in warned] == [__file__]


@pytest.mark.skipif(mx.util.is_np_array(), reason="MXNet 2.0 has no sparse arrays in Gluon")
@pytest.mark.parametrize(
    "kvstore, kind",
    [
        ("horovod", "sparse gradient"),
        ("horovod", "sparse weight"),
        ("dist_sync", "sparse gradient"),  # it crashes
    ],
)
def test_sparse_parameters_that_are_refused(kvstore, kind):
    with pytest.raises(ValueError, match=f"is sparse, and kvstore='{kvstore}' cannot exchange"):
        kit.make(Words(kind, 5), "float32", kvstore=kvstore)


ALONE = """
from mxnet import gluon
from gluon_svrg import SVRGTrainer
net = gluon.nn.Dense(1, in_units=2)
net.initialize()
SVRGTrainer(net.collect_params(), "sgd", kvstore="horovod")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("horovod") is None, reason="needs Horovod: .ci/horovod builds it")
def test_processes_that_horovod_does_not_see():
    for name, size in [("OMPI_COMM_WORLD_SIZE", 3), ("PMI_SIZE", 3), ("SLURM_NTASKS", 1)]:
        status, output = run([sys.executable, "-c", ALONE], **{name: str(size)})
        assert status == (size > 1)
        assert (f"Horovod sees one process, but {name} is 3" in output) == (size > 1)
