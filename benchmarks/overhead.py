"""The cost of a step and of a full pass, against what they cannot do without.

The floor of a step is two gradients and the optimizer's update: ``2 t_grad + t_update``. The floor
of a full pass is a loop of forward and backward; a loop that also adds the gradients up, and does
nothing else, is measured too. With a baseline, another version of the package is measured in the
same rounds.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Callable

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import gluon

from gluon_svrg import SVRGTrainer
from gluon_svrg._mxnet import is_for_onednn

from . import models, record, timing

SETTINGS = {"learning_rate": 1e-6, "momentum": 0.9}
BATCHES_OF_A_PASS = 100  # ResNet-18: 20


def run(quick: bool = False, baseline: Path | None = None) -> list[dict[str, Any]]:
    """Measure every model, hybridized with and without static_alloc.

    Parameters
    ----------
    quick : bool
        Whether it is only to see that it works.
    baseline : Path, optional
        A folder with the package `gluon_svrg` of another version.
    """
    others = {} if baseline is None else {"baseline": _trainer_of(baseline)}
    names = ["80 narrow layers", "linear regression"] if quick else list(models.MODELS)
    records = []
    for name in names:
        for static_alloc in (False, True):
            records.append(measure(name, static_alloc, others, quick=quick))
    return records


def _trainer_of(folder: Path) -> Any:
    """The `SVRGTrainer` of another version, imported beside the installed one."""

    def take() -> dict[str, Any]:
        names = [n for n in sys.modules if n.split(".")[0] == "gluon_svrg"]
        return {name: sys.modules.pop(name) for name in names}

    own = take()
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        module = importlib.import_module("gluon_svrg")
        if folder.absolute() not in Path(str(module.__file__)).absolute().parents:
            raise ValueError(f"{folder} has no package gluon_svrg")
        return module.SVRGTrainer
    finally:
        sys.path.remove(str(folder))
        take()
        sys.modules.update(own)


def measure(
    name: str, static_alloc: bool, others: dict[str, Any], quick: bool = False
) -> dict[str, Any]:
    """Measure one model, by the trainers of this and of other versions."""
    rounds = 5 if quick else 30
    plain = models.workload(name, static_alloc=static_alloc)
    svrg = models.workload(name, static_alloc=static_alloc)
    plain_trainer = gluon.Trainer(plain.net.collect_params(), "sgd", SETTINGS)
    trainer = SVRGTrainer(svrg.net.collect_params(), "sgd", SETTINGS)
    batches = [()] * (2 if quick else 20 if name == "ResNet-18" else BATCHES_OF_A_PASS)
    trainer.update_full_grads(svrg.closure, batches)

    def plain_pass() -> None:
        for _ in batches:
            plain.differentiate()

    functions = {
        "grad": plain.differentiate,
        "update": lambda: plain_trainer.step(plain.batch_size),
        "pass": plain_pass,
        "bare_sum": _bare_sum(models.workload(name, static_alloc=static_alloc), len(batches)),
    }
    functions["step"], functions["full_pass"] = _steps_of(trainer, svrg, batches)
    functions.update(_predecessor(plain))
    # The first step after a refresh compares both gradients (lock_random='auto'); not the others.
    before = {"update": plain.differentiate, "step": functions["step"]}
    for key, cls in others.items():
        theirs = models.workload(name, static_alloc=static_alloc)
        steps = _steps_of(cls(theirs.net.collect_params(), "sgd", SETTINGS), theirs, batches)
        functions[f"{key} step"], functions[f"{key} full_pass"] = steps
        before[f"{key} step"] = steps[0]
    description = f"{name}{', static_alloc' if static_alloc else ''}"
    seconds = timing.rounds(functions, rounds, before=before, description=description)
    floor = 2 * seconds["grad"] + seconds["update"]
    entry = {
        "model": name,
        "static_alloc": static_alloc,
        "tensors": sum(p.grad_req != "null" for p in plain.net.collect_params().values()),
        "seconds": {key: float(np.median(values)) for key, values in seconds.items()},
        "step_to_floor": timing.summary(seconds["step"] / floor),
        "full_pass_to_pass": timing.summary(seconds["full_pass"] / seconds["pass"]),
        "bare_sum_to_pass": timing.summary(seconds["bare_sum"] / seconds["pass"]),
    }
    for key in others:
        step, full_pass = seconds[f"{key} step"], seconds[f"{key} full_pass"]
        entry[f"{key}_to_floor"] = timing.summary(step / floor)
        entry[f"{key}_full_pass_to_pass"] = timing.summary(full_pass / seconds["pass"])
        entry[f"step_to_{key}"] = timing.summary(seconds["step"] / step)
        entry[f"full_pass_to_{key}"] = timing.summary(seconds["full_pass"] / full_pass)
    if "predecessor" in seconds:
        entry["predecessor_to_floor"] = timing.summary(seconds["predecessor"] / floor)
    return entry


def _steps_of(
    trainer: Any, workload: models.Workload, batches: list[Any]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step, and a full pass, of a trainer that has a snapshot."""

    def refresh() -> None:
        trainer.update_full_grads(workload.closure, batches)

    refresh()
    return lambda: trainer.step(workload.batch_size, closure=workload.closure), refresh


def _bare_sum(workload: models.Workload, count: int) -> Callable[[], None]:
    """A loop that sums gradients, in the way of `SVRGTrainer` for parameters of these sizes."""
    parameters = [p for p in workload.net.collect_params().values() if p.grad_req != "null"]
    is_apart = any(is_for_onednn(p.data()) for p in parameters)
    if not is_apart:
        for parameter in parameters:
            parameter.grad_req = "add"
        workload.differentiate()
    grads = [parameter.grad().as_nd_ndarray() for parameter in parameters]
    sums = [mx.nd.zeros_like(grad) for grad in grads] if is_apart else []

    def loop() -> None:
        mx.nd.reset_arrays(*(sums or grads), num_arrays=len(grads))
        for _ in range(count):
            workload.differentiate()
            for total, grad in zip(sums, grads):
                mx.nd.broadcast_add(total, grad, out=total)

    return loop


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
    """The table for the README."""
    return [
        {
            "model": entry["model"],
            "hybridized with": "static_alloc" if entry["static_alloc"] else "-",
            "step / floor": entry["step_to_floor"]["median"],
            "quartiles": _quartiles(entry["step_to_floor"]),
            "full pass / plain pass": entry["full_pass_to_pass"]["median"],
            "quartiles of it": _quartiles(entry["full_pass_to_pass"]),
            "bare sum / plain pass": entry["bare_sum_to_pass"]["median"],
            **{
                title: entry[key]["median"]
                for key, title in (
                    ("predecessor_to_floor", "SVRGModule step / floor"),
                    ("baseline_to_floor", "baseline's step / floor"),
                    ("step_to_baseline", "step / baseline's"),
                    ("full_pass_to_baseline", "full pass / baseline's"),
                )
                if key in entry
            },
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
