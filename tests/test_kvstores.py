"""The kvstores of one process, against the oracle, and what is refused before anything happens."""

import sys
from functools import partial
from importlib.util import find_spec

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from jobs import run
from kit import split_at
from plays import BATCHES, CASES, PARTS, PROBLEM, SETTINGS, TWO, Play
from problems import Words, distance, parameters, values

from gluon_svrg import SARAHTrainer, SVRGTrainer

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
SARAH, UPDATE = {"cls": SARAHTrainer}, {"update_on_kvstore": True}


@kit.table(
    "kvstore, devices, settings, message",
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


@pytest.mark.skipif(find_spec("horovod") is not None, reason="Horovod is installed")
def test_without_horovod():
    with pytest.raises(ImportError, match=r"needs Horovod.*pip install.*\.\[horovod\]"):
        make(kvstore="horovod")


@kit.table("variables", {"HOROVOD_SIZE": "2"}, {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"})
def test_the_warning_of_a_worker_alone_points_to_the_users_line(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    params = PROBLEM.network().collect_params()
    with pytest.warns(UserWarning, match="is one of 2 workers.*exchanges nothing") as warned:
        SVRGTrainer(params, "sgd")
    assert [one.filename for one in warned] == [__file__]


@pytest.mark.skipif(mx.util.is_np_array(), reason="MXNet 2.0 has no sparse arrays in Gluon")
@pytest.mark.parametrize(
    "kvstore, kind", [("horovod", "gradient"), ("horovod", "weight"), ("dist_sync", "gradient")]
)
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


@pytest.mark.slow
@pytest.mark.skipif(find_spec("horovod") is None, reason="needs Horovod: .ci/horovod builds it")
def test_processes_that_horovod_does_not_see():
    for name, size in [("OMPI_COMM_WORLD_SIZE", 3), ("PMI_SIZE", 3), ("SLURM_NTASKS", 1)]:
        status, output = run([sys.executable, "-c", ALONE], **{name: str(size)})
        assert status == (size > 1)
        assert (f"Horovod sees one process, but {name} is 3" in output) == (size > 1)
