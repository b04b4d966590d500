"""Where `gluon.Trainer` goes on: casts there and back, few samples for many devices, silence."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon.contrib.estimator import Estimator
from problems import Dense, array, contexts, distance, values

from gluon_svrg import SVRGTrainer
from gluon_svrg.estimator import FullGradHandler, SVRGBatchProcessor

PROBLEM = Dense("regression", hidden=(3,), samples=11, seed=37)
BATCHES = PROBLEM.batches(5)  # of 5, 5 and 1
TWO, THREE = contexts(2), contexts(3)
IS_2 = hasattr(gluon.Parameter, "list_device")
metric = gluon.metric if hasattr(gluon, "metric") else mx.metric


def make(devices=None, hybridize=None):
    with mx.name.NameManager():
        net = PROBLEM.network("float32", devices, hybridize=hybridize)
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = SVRGTrainer(net.collect_params(), "sgd", settings)
    return net, PROBLEM.closure(net, "float32", devices), trainer


# --- a cast there and back ---------------------------------------------------------------------


BEFORE, BETWEEN = "before the first step", "between steps"


@pytest.mark.parametrize("hybridize", [None, {}], ids=["imperative", "hybridized"])
@pytest.mark.parametrize("when", [BEFORE, pytest.param(BETWEEN)])
@pytest.mark.filterwarnings("ignore:Currently the model has been hybridized:UserWarning")
def test_a_cast_there_and_back(when, hybridize):
    """float32 to float64 and back loses nothing: training goes on to the last bit."""
    found = []
    for casts in (False, True):
        net, loss_of, trainer = make(hybridize=hybridize)
        trainer.update_full_grads(loss_of, BATCHES)
        for number, index in enumerate(BATCHES):
            if casts and number == (when == BETWEEN):
                net.cast("float64")
                net.cast("float32")
            trainer.step(len(index), closure=lambda: loss_of(index))
        trainer.update_full_grads(loss_of, BATCHES)
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]))
        found.append(values(net))
    for these, those in zip(*found):
        np.testing.assert_array_equal(these, those)


# --- fewer samples than devices ----------------------------------------------------------------


def loader():
    dataset = gluon.data.ArrayDataset(array(PROBLEM.X, "float32"), array(PROBLEM.y, "float32"))
    return gluon.data.DataLoader(dataset, batch_size=5)


@pytest.mark.parametrize("devices", [TWO, THREE], ids=["two", "three"])
def test_a_last_minibatch_with_fewer_samples_than_devices(devices):
    """Some devices have none, as in a loop by hand."""
    net, _, trainer = make(devices)
    estimator = Estimator(
        net,
        gluon.loss.L2Loss(),
        train_metrics=metric.Loss(),
        trainer=trainer,
        batch_processor=SVRGBatchProcessor(),
        **{"device" if IS_2 else "context": devices},
    )
    estimator.logger.setLevel(logging.ERROR)
    data = loader()
    estimator.fit(data, epochs=2, event_handlers=[FullGradHandler(data, 1)])

    expected, loss_of, trainer = make()
    for _ in range(2):
        trainer.update_full_grads(loss_of, BATCHES)
        for index in BATCHES:
            trainer.step(len(index), closure=lambda: loss_of(index))
    for device in devices:
        assert distance(values(net, device), values(expected)) < 1e-5


# --- silence -----------------------------------------------------------------------------------

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, format="LOG %(name)s: %(message)s")
import mxnet as mx
from mxnet import autograd, gluon

net = gluon.nn.Dense(1)
net.initialize()
loss_function = gluon.loss.L2Loss()
numpy = mx.np if hasattr(gluon.Parameter, "list_device") else mx.nd
X, y = numpy.ones((3, 2)), numpy.ones((3, 1))


def loss_of(X, y):
    return loss_function(net(X), y)


if sys.argv[1] == "plain":
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with autograd.record():
        loss = loss_of(X, y)
    loss.backward()
else:
    from gluon_svrg import SVRGTrainer

    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    trainer.update_full_grads(loss_of, [(X, y)] * 2)
    for _ in range(2):
        trainer.step(3, closure=lambda: loss_of(X, y))
    trainer.discard_snapshot()
    trainer.correct_grads(lambda: loss_of(X, y))
trainer.step(3)
mx.nd.waitall()
"""


def logged(which):
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, which],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stderr.splitlines() if line.startswith("LOG ")]


def test_nothing_is_logged_that_gluon_does_not_log():
    assert logged("svrg") == logged("plain")
