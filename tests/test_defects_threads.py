"""A second thread that predicts, and methods of Gluon that stay as they are."""

import threading

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from problems import Dense, array, parameters

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("regression", hidden=(4,), samples=12, seed=38)
BATCHES = PROBLEM.batches(4)
DEADLINE = 60  # seconds, for what takes one


def run_together(*calls):
    """Run calls in a thread each; raise what one of them raises, or if one does not end."""
    errors = []

    def run(call):
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads), "a thread does not end"
    for error in errors:
        raise error


# --- predictions -------------------------------------------------------------------------------


class Serving:
    """A network far from its snapshot, that steps of learning rate 0 do not move."""

    def __init__(self):
        self.net = PROBLEM.network()
        self.loss_of = PROBLEM.closure(self.net)
        params = self.net.collect_params()
        self.trainer = SVRGTrainer(params, "sgd", {"learning_rate": 0.0}, lock_random=False)
        self.trainer.update_full_grads(self.loss_of, BATCHES)
        for parameter in parameters(self.net):
            parameter.data()[:] = parameter.data() + 1
        self.x = array(PROBLEM.X[:2])
        self.live = self.predict()
        with self.trainer.at_snapshot():
            assert (self.predict() != self.live).all()

    def predict(self):
        return self.net(self.x).asnumpy()

    def wrong(self, predict, count=200):
        """How many predictions are not those of the live weights, while steps run."""
        outputs, stop = [], threading.Event()

        def serve():
            try:
                outputs.extend(predict() for _ in range(count))
            finally:
                stop.set()

        def train():
            while not stop.is_set():
                self.trainer.step(4, closure=lambda: self.loss_of(BATCHES[0]))

        run_together(serve, train)
        assert len(outputs) == count
        return sum(not np.array_equal(output, self.live) for output in outputs)


def test_predictions_of_another_thread_may_see_the_snapshot():
    """This is what the next test has to prevent: it is no promise."""
    serving = Serving()
    assert serving.wrong(serving.predict) > 0


@pytest.mark.filterwarnings("ignore:The snapshot is")  # many steps on little data
def test_predictions_at_current_weights():
    serving = Serving()
    assert serving.trainer.at_current_weights

    def predict():
        with serving.trainer.at_current_weights():
            return serving.predict()

    assert serving.wrong(predict) == 0


def test_predictions_at_current_weights_during_refreshes():
    serving = Serving()
    assert serving.trainer.at_current_weights
    stop, outputs = threading.Event(), []

    def serve():
        try:
            for _ in range(100):
                with serving.trainer.at_current_weights():
                    outputs.append(serving.predict())
        finally:
            stop.set()

    def refresh():
        while not stop.is_set():
            serving.trainer.update_full_grads(serving.loss_of, BATCHES)
            serving.trainer.step(4, closure=lambda: serving.loss_of(BATCHES[0]))

    run_together(serve, refresh)
    for output in outputs:
        np.testing.assert_array_equal(output, serving.live)


def test_at_current_weights_in_the_thread_that_trains():
    """It changes nothing there, with a snapshot or without; and an error leaves it."""
    serving = Serving()
    trainer = serving.trainer
    for _ in range(2):
        with trainer.at_current_weights(), trainer.at_current_weights():
            np.testing.assert_array_equal(serving.predict(), serving.live)
        with pytest.raises(ZeroDivisionError), trainer.at_current_weights():
            raise ZeroDivisionError
        trainer.step(4, closure=lambda: serving.loss_of(BATCHES[0]))
        trainer.discard_snapshot()


# --- methods of Gluon --------------------------------------------------------------------------

OWNERS = [
    gluon.Parameter,
    gluon.Constant,
    gluon.Block,
    gluon.HybridBlock,
    gluon.SymbolBlock,
    gluon.Trainer,
    mx.nd.NDArray,
    autograd,
    *([gluon.ParameterDict] if hasattr(gluon, "ParameterDict") else []),
]


def methods():
    return [dict(vars(owner)) for owner in OWNERS]


def patched(before):
    return [
        f"{owner.__name__}.{name}"
        for owner, was, is_now in zip(OWNERS, before, methods())
        for name in {**was, **is_now}
        if was.get(name) is not is_now.get(name)
    ]


class Part:
    """A trainer over the last layer of a network."""

    def __init__(self, seed):
        mx.random.seed(seed)
        self.net = PROBLEM.network()
        self.loss_of = PROBLEM.closure(self.net)
        params = self.net[1].collect_params()
        self.trainer = SVRGTrainer(params, "sgd", {"learning_rate": 0.1}, lock_random=False)

    def refresh(self, at_first=lambda: None):
        """Take the full gradient; do something when the closure has computed for the first time."""
        calls = []

        def closure(index):
            loss = self.loss_of(index)
            calls.append(0)
            if len(calls) == 1:
                at_first()
            return loss

        self.trainer.update_full_grads(closure, BATCHES)


def test_no_method_stays_patched_after_an_error():
    before = methods()
    part = Part(1)

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        part.refresh(fail)
    part.refresh()
    with pytest.raises(ZeroDivisionError):
        part.trainer.step(4, closure=fail)
    assert patched(before) == []
