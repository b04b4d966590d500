"""A plugin of pytest that runs MXNet's own tests with another trainer, for `test_upstream`.

``UPSTREAM_TRAINER`` says with which, and ``UPSTREAM_REPORT`` where the outcomes are written:

- ``plain``: `gluon.Trainer`, to know which tests pass at all.
- ``svrg``: `SVRGTrainer` with a refresh before each step. MXNet's tests run backward themselves, so
  there is no closure of theirs to call. But there are the gradients that they have left: the loss
  that is linear in the weights, with these as coefficients, has the same gradients wherever it is
  taken. Snapshot, both passes and the combination then give back what was there.
- ``estimator``: `SVRGTrainer`; each `Estimator` that was given no batch processor of its own trains
  with `SVRGBatchProcessor`, and with a `FullGradHandler`.
"""

import json
import os
from pathlib import Path

import mxnet as mx
from mxnet import gluon
from mxnet.gluon.contrib.estimator import Estimator
from mxnet.gluon.contrib.estimator import estimator as estimator_module

from gluon_svrg import SVRGTrainer
from gluon_svrg.estimator import FullGradHandler, SVRGBatchProcessor

WHICH = os.environ["UPSTREAM_TRAINER"]
OUTCOMES, ERRORS, REFRESHES = {}, {}, []


class Counted(SVRGTrainer):
    def update_full_grads(self, *args, **kwargs):
        REFRESHES.append(self.num_snapshots)
        return super().update_full_grads(*args, **kwargs)


class Refreshed(Counted):
    """Takes a snapshot, and corrects the gradients that a backward has left."""

    _is_inside = False  # `step` may call `allreduce_grads` and `update`
    _is_reduced = False

    def step(self, batch_size, ignore_stale_grad=False, **kwargs):
        self._refresh_here(kwargs.get("closure"))
        return self._inside(super().step, batch_size, ignore_stale_grad, **kwargs)

    def allreduce_grads(self):
        self._refresh_here(None)
        self._inside(super().allreduce_grads)
        self._is_reduced = not self._is_inside

    def update(self, batch_size, ignore_stale_grad=False):
        if not self._is_reduced:
            self._refresh_here(None)
        self._is_reduced = False
        self._inside(super().update, batch_size, ignore_stale_grad)

    def _inside(self, call, *args, **kwargs):
        was_inside, self._is_inside = self._is_inside, True
        try:
            return call(*args, **kwargs)
        finally:
            self._is_inside = was_inside

    def _refresh_here(self, closure):
        params = [p for p in self._params if p.grad_req != "null"]
        if closure is not None or self._is_inside or any(p._data is None for p in params):
            return
        grads = [[_dense(grad).copy() for grad in p.list_grad()] for p in params]

        def linear():
            losses = {}
            for parameter, row in zip(params, grads):
                for weight, grad in zip(_weights(parameter), row):
                    product = (_dense(weight) * grad).reshape((-1,))
                    part = product.sum(axis=0, keepdims=True)  # of one dimension: both can
                    device = str(weight.context)
                    losses[device] = losses[device] + part if device in losses else part
            return list(losses.values())

        self._inside(self.update_full_grads, linear, [()])
        self._inside(self.correct_grads, linear)


def _weights(parameter):
    if parameter._stype == "default":
        return parameter.list_data()
    # One device at a time: MXNet cannot pull for several while it records.
    count, devices = parameter.shape[0], parameter.list_ctx()
    every = [mx.nd.arange(0, count, dtype="int64", ctx=device) for device in devices]
    return [parameter.row_sparse_data(rows) for rows in every]


def _dense(array):
    return array if array.stype == "default" else array.tostype("default")


def _estimator_with_svrg():
    init, fit = Estimator.__init__, Estimator.fit

    def new_init(self, *args, **kwargs):
        kwargs.setdefault("batch_processor", SVRGBatchProcessor())
        init(self, *args, **kwargs)

    def new_fit(self, train_data, *args, **kwargs):
        is_loader = isinstance(train_data, gluon.data.DataLoader)  # others are refused
        if is_loader and isinstance(self.batch_processor, SVRGBatchProcessor):
            handlers = kwargs.get("event_handlers") or []
            handlers = handlers if isinstance(handlers, list) else [handlers]
            kwargs["event_handlers"] = [*handlers, FullGradHandler(train_data, 1)]
        return fit(self, train_data, *args, **kwargs)

    Estimator.__init__, Estimator.fit = new_init, new_fit


if WHICH != "plain":
    gluon.Trainer = estimator_module.Trainer = Refreshed if WHICH == "svrg" else Counted
if WHICH == "estimator":
    _estimator_with_svrg()


def pytest_runtest_logreport(report):
    name = report.nodeid.split("/")[-1]
    if report.when == "call" or report.outcome != "passed":
        if OUTCOMES.get(name) != "failed":
            OUTCOMES[name] = report.outcome
        if report.outcome == "failed":
            ERRORS[name] = str(report.longrepr)[-1500:]


def pytest_sessionfinish():
    found = {"outcomes": OUTCOMES, "errors": ERRORS, "refreshes": len(REFRESHES)}
    Path(os.environ["UPSTREAM_REPORT"]).write_text(json.dumps(found))
