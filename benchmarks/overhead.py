"""The cost of a step and of a full pass, against what they cannot do without.

The floor of a step is two gradients, the optimizer's update, and the movement of three arrays of
parameters into one: ``2 t_grad + t_update + 2 t_axpy``, where ``t_axpy`` is one in-place ``a += b``
over as many bytes as the parameters. The floor of a full pass is a loop of forward and backward.
"""

from __future__ import annotations

from typing import Any, Callable

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import gluon

from gluon_svrg import SVRGTrainer

from . import models, record, timing

SETTINGS = {"learning_rate": 1e-6, "momentum": 0.9}
BATCHES_OF_A_PASS = 100  # ResNet-18: 20


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
    batches = [()] * (2 if quick else 20 if name == "ResNet-18" else BATCHES_OF_A_PASS)
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
    functions.update(_predecessor(plain))
    # The first step after a refresh compares both gradients (lock_random='auto'); not the others.
    before = {"update": plain.differentiate, "step": functions["step"]}
    description = f"{name}{', static_alloc' if static_alloc else ''}"
    seconds = timing.rounds(functions, rounds, before=before, description=description)
    floor = 2 * seconds["grad"] + seconds["update"] + 2 * seconds["axpy"]
    entry = {
        "model": name,
        "static_alloc": static_alloc,
        "tensors": sum(p.grad_req != "null" for p in plain.net.collect_params().values()),
        "seconds": {key: float(np.median(values)) for key, values in seconds.items()},
        "step_to_floor": timing.summary(seconds["step"] / floor),
        "full_pass_to_pass": timing.summary(seconds["full_pass"] / seconds["pass"]),
        "full_pass_to_pass_and_axpy": timing.summary(
            seconds["full_pass"] / (seconds["pass"] + len(batches) * seconds["axpy"])
        ),  # summing gradients cannot be done with less than one a += b for each
    }
    if "predecessor" in seconds:
        entry["predecessor_to_floor"] = timing.summary(seconds["predecessor"] / floor)
    return entry


def _predecessor(workload: models.Workload) -> dict[str, Callable[[], None]]:
    """A step of `SVRGModule`, which was MXNet's own until 1.9, on the same network and data."""
    try:
        from mxnet.contrib.svrg_optimization.svrg_module import SVRGModule
    except ImportError:
        return {}
    inputs, labels = (values.astype("float32") for values in workload.batch)
    output = workload.net(mx.sym.var("data"))
    head = mx.sym.LinearRegressionOutput if labels.ndim > 1 else mx.sym.SoftmaxOutput
    network = head(output, mx.sym.var("label"))
    data = mx.io.NDArrayIter(inputs, labels, len(inputs), data_name="data", label_name="label")
    module = SVRGModule(network, ["data"], ["label"], update_freq=1)
    module.bind(data.provide_data, data.provide_label)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore=None, optimizer="sgd", optimizer_params=SETTINGS.items())
    module.update_full_grads(data)
    data.reset()
    batch = next(data)

    def step() -> None:
        module.forward_backward(batch)
        module.update()

    return {"predecessor": step}


def table(records: list[dict[str, Any]]) -> list[record.Row]:
    """What is in the README."""
    return [
        {
            "model": entry["model"],
            "hybridized with": "static_alloc" if entry["static_alloc"] else "-",
            "step / floor": entry["step_to_floor"]["median"],
            "quartiles": _quartiles(entry["step_to_floor"]),
            "full pass / plain pass": entry["full_pass_to_pass"]["median"],
            "quartiles of it": _quartiles(entry["full_pass_to_pass"]),
            **(
                {"SVRGModule step / floor": entry["predecessor_to_floor"]["median"]}
                if "predecessor_to_floor" in entry
                else {}
            ),
        }
        for entry in records
    ]


def plot(records: list[dict[str, Any]]) -> Any:
    """Draw the ratios, with quartiles."""
    figure, axes = plt.subplots(figsize=(8, 1 + 0.5 * len(records)), layout="constrained")
    names = [e["model"] + (", static_alloc" if e["static_alloc"] else "") for e in records]
    for shift, key, label in (
        (-0.2, "step_to_floor", "step / floor"),
        (0.0, "full_pass_to_pass", "full pass / plain pass"),
        (0.2, "predecessor_to_floor", "SVRGModule step / floor"),
    ):
        shown = [(i + shift, e[key]) for i, e in enumerate(records) if key in e]
        if shown:
            positions, ratios = zip(*shown)
            medians = [ratio["median"] for ratio in ratios]
            low = [ratio["median"] - ratio["quartile_1"] for ratio in ratios]
            high = [ratio["quartile_3"] - ratio["median"] for ratio in ratios]
            axes.errorbar(medians, positions, xerr=[low, high], fmt="o", capsize=3, label=label)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ratio of seconds (median and quartiles)")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def _quartiles(ratio: dict[str, float]) -> str:
    return f"{ratio['quartile_1']:.3g}-{ratio['quartile_3']:.3g}"
