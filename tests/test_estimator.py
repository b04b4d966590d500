"""Gluon's Estimator with SVRG: as a hand-written loop, with all that it offers."""

import logging
import re
from contextlib import nullcontext

import kit
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon.contrib.estimator import BatchProcessor, Estimator, event_handler
from mxnet.gluon.contrib.estimator.event_handler import CheckpointHandler
from problems import Dense, array, contexts, distance, flat, values

from gluon_svrg import Nystrom, SAGATrainer, STORMTrainer, SVRGTrainer, schedule
from gluon_svrg.estimator import FullGradHandler, SVRGBatchProcessor

# MXNet's handlers are not all written for warnings as errors.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:mxnet.*")
metric = gluon.metric if hasattr(gluon, "metric") else mx.metric
PROBLEM = Dense("classification", hidden=(5,), seed=23, samples=46)
SETTINGS = {"learning_rate": 0.1, "momentum": 0.9}
TWO = contexts(2)
SAMPLES = gluon.data.ArrayDataset(PROBLEM.X.astype("float32"), PROBLEM.y.astype("float32"))
DATA = gluon.data.DataLoader(SAMPLES, batch_size=10)


def make(devices=None, cls=SVRGTrainer, processor=SVRGBatchProcessor, net=None, log=None, **kwargs):
    """An estimator; with `log`, caplog, its messages can be read."""
    net = net or PROBLEM.network("float32", devices)
    kwargs = {"loss": PROBLEM.loss_function(), "train_metrics": metric.Loss(), **kwargs}
    if devices:
        kwargs["device" if mx.util.is_np_array() else "context"] = devices
    trainer = cls(net.collect_params(), "sgd", SETTINGS)
    estimator = Estimator(net, trainer=trainer, batch_processor=processor(), **kwargs)
    estimator.logger.setLevel(logging.INFO if log else logging.ERROR)
    if log:
        estimator.logger.addHandler(log.handler)  # it does not propagate
    return estimator


def fitted(estimator, epochs, update_freq, *handlers):
    """An estimator after some epochs with a handler of full gradients."""
    handlers = [FullGradHandler(DATA, update_freq), *handlers]
    estimator.fit(DATA, epochs=epochs, event_handlers=handlers)
    return estimator


def by_hand(epochs, update_freq, devices=None, **kwargs):
    kwargs = {"settings": SETTINGS, **kwargs}
    net, loss_of, trainer = kit.make(PROBLEM, "float32", devices, **kwargs)
    kit.train(trainer, loss_of, PROBLEM.batches(10), epochs, update_freq)
    return values(net)


@pytest.mark.parametrize("devices, update_freq", [(None, 1), (None, 2), (TWO, 2), (TWO, 3)])
def test_as_a_loop_by_hand(devices, update_freq):
    estimator = fitted(make(devices), 5, update_freq)
    expected = flat(by_hand(5, update_freq, devices))
    for device in devices or [None]:
        np.testing.assert_allclose(flat(values(estimator.net, device)), expected, atol=1e-6)
    assert estimator.trainer.num_snapshots == -(-5 // update_freq)


@pytest.mark.filterwarnings("ignore:An epoch has")  # of a few mini-batches
def test_a_preconditioner():
    def preconditioned(params, *_):
        return SVRGTrainer(params, "nag", {}, preconditioner=Nystrom())

    estimator = fitted(make(cls=preconditioned), 5, 1)
    expected = by_hand(5, 1, optimizer="nag", settings={}, preconditioner=Nystrom())
    assert distance(values(estimator.net), expected) < 1e-4
    assert {"momentum", "curvature", "went_back"} < estimator.trainer.history[-1].keys()


def test_metrics_validation_logging_and_progress(caplog, capfd):
    """Metrics, those of the last epoch, count each sample once."""
    pytest.importorskip("tqdm", reason="the progress bar needs tqdm")
    estimator = make(train_metrics=metric.Accuracy(), log=caplog)
    estimator.fit(DATA, DATA, epochs=3, event_handlers=[FullGradHandler(DATA, 2, progress=True)])
    (trained,) = (m for m in estimator.train_metrics if isinstance(m, metric.Accuracy))
    assert trained.num_inst == len(PROBLEM.X)
    first, second = (message for message in caplog.messages if "full gradient" in message)
    assert first.startswith("[Epoch 0] full gradient: mean loss ")
    assert "gradient norm" in second
    assert any("validation" in message for message in caplog.messages)
    assert "full gradient" in capfd.readouterr().err


class Columns(gluon.nn.HybridSequential):
    """A network whose samples are the columns of its input."""

    def __call__(self, X):
        return super().__call__(X.T)


@pytest.mark.parametrize("devices", [None, TWO])
def test_samples_along_another_axis(devices):
    """A refresh splits minibatches along it, as `fit` does."""
    problem = Dense("regression", seed=24)
    net = Columns()
    net.add(problem.network("float32", devices)[0])
    data = gluon.data.ArrayDataset(problem.X.astype("float32"), problem.y.astype("float32"))

    def columns(samples):
        X, y = (np.stack(part) for part in zip(*samples))
        return array(X.T, "float32"), array(y.T, "float32")

    data = gluon.data.DataLoader(data, batch_size=10, batchify_fn=columns)
    estimator = make(devices, net=net, loss=gluon.loss.L2Loss())
    estimator.fit(data, epochs=1, event_handlers=[FullGradHandler(data, 1)], batch_axis=1)
    expected, count = problem.gradient(problem.initial, np.arange(23))
    found = kit.full_gradients(estimator.trainer, net)
    assert distance(found, [total / count for total in expected]) < 1e-5


@pytest.mark.parametrize("stop_at", [2, 3])
def test_checkpoints_and_resume(stop_at, tmp_path, caplog):
    """The whole state goes on; epochs are counted from the very first one, but not in the log."""

    def run(epochs, resume):
        settings = {"model_prefix": "net", "resume_from_checkpoint": resume}
        checkpoint = CheckpointHandler(str(tmp_path), **settings)
        return fitted(make(log=caplog), epochs, 2, checkpoint)

    run(stop_at, False)
    caplog.clear()
    resumed = run(6, True)
    logged = re.findall(r"Epoch (\d)\] full", "\n".join(caplog.messages))
    assert [*map(int, logged)] == [*range(stop_at % 2, 6 - stop_at, 2)]
    np.testing.assert_allclose(flat(values(resumed.net)), flat(by_hand(6, 2)), atol=1e-6)
    assert resumed.trainer.num_snapshots == 3


@pytest.mark.parametrize("is_new", [True, False])
def test_epochs_are_counted_over_several_fits(is_new, caplog):
    """But the log counts those of each fit."""
    estimator, handler, taken = make(log=caplog), FullGradHandler(DATA, 3), []
    for epochs in (1, 1, 1, 1, 2, 1):
        before = estimator.trainer.num_snapshots
        handler = FullGradHandler(DATA, 3) if is_new else handler
        estimator.fit(DATA, epochs=epochs, event_handlers=[handler])
        taken.append(estimator.trainer.num_snapshots - before)
    assert taken == [1, 0, 0, 1, 0, 1]
    logged = [message for message in caplog.messages if "full gradient" in message]
    assert [message[:9] for message in logged] == ["[Epoch 0]"] * 3


def test_resuming_without_a_snapshot_refreshes_at_once(tmp_path):
    first, second = fitted(make(), 1, 2), make()
    first.trainer.discard_snapshot()
    first.trainer.save_states(tmp_path / "states")
    second.trainer.load_states(tmp_path / "states")
    fitted(second, 1, 2)  # epoch 1 is not due
    assert second.trainer.num_snapshots == 2


def test_refresh_schedules():
    for refresh, snapshots in [
        (schedule.EveryEpochs(2), 2),
        (schedule.EverySteps(2, factor=2), 4),
    ]:
        assert fitted(make(), 3, refresh).trainer.num_snapshots == snapshots


def test_storm_needs_no_handler():
    estimator = make(cls=STORMTrainer)
    estimator.fit(DATA, epochs=2)
    assert estimator.trainer.inner_steps == 2 * 5


test_bad_arguments = kit.refusals(
    (lambda: FullGradHandler(DATA, None), TypeError, "must be a whole number, got NoneType"),
    (lambda: FullGradHandler(DATA, "2"), TypeError, "update_freq .* schedule.*, got str"),
    (lambda: FullGradHandler(DATA, 0), ValueError, "update_freq .* must be 1 or more, got 0"),
    (lambda: FullGradHandler(None, 2), TypeError, "data must be a DataLoader, .*, got NoneType"),
)


def test_parts_that_are_missing():
    """It is said before a pass."""
    for estimator, has_handler, error, message in [
        (make(cls=gluon.Trainer), True, TypeError, "needs an SVRGTrainer, got Trainer"),
        (make(processor=BatchProcessor), True, RuntimeError, r"SVRGBatchProcessor\(\)"),
        (make(), False, RuntimeError, r"needs fit\(.*FullGradHandler"),
        (make(cls=SAGATrainer), True, TypeError, "which an Estimator lacks"),
        (make(cls=SAGATrainer), False, TypeError, "which an Estimator lacks"),
    ]:
        with pytest.raises(error, match=message):
            estimator.fit(DATA, epochs=1, event_handlers=[FullGradHandler(DATA, 2)] * has_handler)
        assert getattr(estimator.trainer, "grad_evaluations", 0) == 0


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_second_training_without_a_handler(is_interrupted):
    """The handler of the first one takes no more full gradients."""

    class Interrupt(event_handler.BatchEnd):
        def batch_end(self, *args, **kwargs):
            if is_interrupted:
                raise KeyboardInterrupt

    estimator = make()
    with pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext():
        fitted(estimator, 1, 2, Interrupt())
    with pytest.raises(RuntimeError, match=r"SVRGBatchProcessor needs .*FullGradHandler"):
        estimator.fit(DATA, epochs=1)
    fitted(estimator, 1, 2)
