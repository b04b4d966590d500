"""The cost of a step and of a full pass, against what they cannot do without.

The floor of a step is two gradients, the optimizer's update, and the movement of three arrays of
parameters into one: ``2 t_grad + t_update + 2 t_axpy``, where ``t_axpy`` is one in-place ``a += b``
over as many bytes as the parameters. The floor of a full pass is a loop of forward and backward.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon

from gluon_svrg import SVRGTrainer

from . import models, timing

SETTINGS = {"learning_rate": 1e-6, "momentum": 0.9}
BATCHES_OF_A_PASS = 20


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every model, hybridized with and without static_alloc."""
    names = ["80 narrow layers", "linear regression"] if quick else list(models.MODELS)
    records = []
    for name in names:
        for static_alloc in (False, True):
            records.append(measure(name, static_alloc, rounds=5 if quick else 30, quick=quick))
    return records


def measure(name: str, static_alloc: bool, rounds: int, quick: bool = False) -> dict[str, Any]:
    """Measure one model."""
    plain = models.workload(name, static_alloc=static_alloc)
    svrg = models.workload(name, static_alloc=static_alloc)
    plain_trainer = gluon.Trainer(plain.net.collect_params(), "sgd", SETTINGS)
    trainer = SVRGTrainer(svrg.net.collect_params(), "sgd", SETTINGS)
    batches = [()] * (2 if quick else BATCHES_OF_A_PASS)
    trainer.update_full_grads(svrg.closure, batches)
    flat = mx.nd.zeros(models.parameter_bytes(plain.net) // 4)
    other = mx.nd.zeros_like(flat)

    def axpy() -> None:
        mx.nd.elemwise_add(flat, other, out=flat)

    def plain_pass() -> None:
        for _ in batches:
            plain.differentiate()

    functions = {
        "grad": plain.differentiate,
        "update": lambda: plain_trainer.step(plain.batch_size),
        "axpy": axpy,
        "step": lambda: trainer.step(svrg.batch_size, closure=svrg.closure),
        "pass": plain_pass,
        "full_pass": lambda: trainer.update_full_grads(svrg.closure, batches),
    }
    functions.update(_predecessor(name, plain))
    before = {"update": plain.differentiate}
    description = f"{name}{', static_alloc' if static_alloc else ''}"
    seconds = timing.rounds(functions, rounds, before=before, description=description)
    floor = 2 * seconds["grad"] + seconds["update"] + 2 * seconds["axpy"]
    record = {
        "model": name,
        "static_alloc": static_alloc,
        "tensors": sum(p.grad_req != "null" for p in plain.net.collect_params().values()),
        "seconds": {key: float(np.median(values)) for key, values in seconds.items()},
        "step_to_floor": timing.summary(seconds["step"] / floor),
        "full_pass_to_pass": timing.summary(seconds["full_pass"] / seconds["pass"]),
        "full_pass_to_pass_and_axpy": timing.summary(
            seconds["full_pass"] / (seconds["pass"] + len(batches) * seconds["axpy"])
        ),
    }
    if "predecessor" in seconds:
        record["predecessor_to_floor"] = timing.summary(seconds["predecessor"] / floor)
    return record


def _predecessor(name: str, workload: models.Workload) -> dict[str, Any]:
    return {}
