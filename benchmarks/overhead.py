"""The cost of a step and of a full pass, against what they cannot do without.

The floor of a step is two gradients and the optimizer's update: ``2 t_grad + t_update``. It is
measured twice: each part and each step alone, with a wait for the device after it, and many in a
row, as in a training loop, where Python prepares the next one meanwhile. The floor of a full pass
is a loop of forward and backward; a loop that also adds the gradients up, and does nothing else, is
measured too. With a baseline, another version of the package is measured in the same rounds.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
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

#: Minibatches of a pass. MNIST has 469 for the MLP, YearPredictionMSD 4,638 for the regression.
BATCHES = {
    "MLP 784-512-512-10": (100, 469),
    "ResNet-18": (20,),
    "80 narrow layers": (100,),
    "linear regression": (100, 1000),
}
#: Steps in a row; 20 where nothing is said.
IN_A_ROW = {"ResNet-18": 4}
#: Rounds of steps and of passes; 15 and 9 where nothing is said.
ROUNDS = {"MLP 784-512-512-10": (15, 5), "ResNet-18": (9, 5)}


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
    names = ["80 narrow layers", "linear regression"] if quick else list(BATCHES)
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
    plain = models.workload(name, static_alloc=static_alloc)
    plain_trainer = gluon.Trainer(plain.net.collect_params(), "sgd", SETTINGS)
    counts = (2,) if quick else BATCHES[name]
    steps = {"grad": plain.differentiate, "update": lambda: plain_trainer.step(plain.batch_size)}
    steps.update(_predecessor(plain))
    passes = {}
    rows = {"grads": plain.differentiate, "plain steps": _plain_step(plain_trainer, plain)}
    for key, cls in {"own": SVRGTrainer, **others}.items():
        workload = models.workload(name, static_alloc=static_alloc)
        trainer = cls(workload.net.collect_params(), "sgd", SETTINGS)
        steps[f"{key} step"] = rows[f"{key} steps"] = _step(trainer, workload)
        for count in counts:
            passes[f"{key} pass {count}"] = _refresh(trainer, workload, count)
    for count in counts:
        bare = models.workload(name, static_alloc=static_alloc)
        passes[f"pass {count}"] = _plain_pass(plain, count)
        passes[f"bare pass {count}"] = _bare_sum(bare, count)
    # What was measured before leaves other arrays in the caches: each gets one call for itself. The
    # first step after a refresh also compares both gradients (lock_random='auto').
    before = {**steps, "update": plain.differentiate}
    description = f"{name}{', static_alloc' if static_alloc else ''}"
    rounds = (5, 5) if quick else ROUNDS.get(name, (15, 9))
    seconds = timing.rounds(steps, rounds[0], before=before, description=description)
    seconds_of_passes = timing.rounds(passes, rounds[1], description=description)
    seconds["floor"] = 2 * seconds["grad"] + seconds["update"]
    in_rows = {
        key: partial(_repeated, function, IN_A_ROW.get(name, 20)) for key, function in rows.items()
    }
    seconds.update(timing.rounds(in_rows, rounds[0], description=description))
    seconds["floor in a row"] = seconds["grads"] + seconds["plain steps"]

    def ratio(key: str, base: str) -> dict[str, float] | None:
        found = seconds_of_passes if "pass" in key else seconds
        return timing.summary(found[key] / found[base]) if key in found and base in found else None

    return {
        "model": name,
        "static_alloc": static_alloc,
        "tensors": sum(p.grad_req != "null" for p in plain.net.collect_params().values()),
        "seconds": {
            key: float(np.median(values))
            for key, values in {**seconds, **seconds_of_passes}.items()
        },
        "step_to_floor": ratio("own step", "floor"),
        "predecessor_to_floor": ratio("predecessor", "floor"),
        "baseline_to_floor": ratio("baseline step", "floor"),
        "step_to_baseline": ratio("own step", "baseline step"),
        "steps_to_floor": ratio("own steps", "floor in a row"),
        "baseline_steps_to_floor": ratio("baseline steps", "floor in a row"),
        "steps_to_baseline": ratio("own steps", "baseline steps"),
        "passes": [
            {
                "batches": count,
                "full_pass": ratio(f"own pass {count}", f"pass {count}"),
                "bare_sum": ratio(f"bare pass {count}", f"pass {count}"),
                "baseline": ratio(f"baseline pass {count}", f"pass {count}"),
                "to_baseline": ratio(f"own pass {count}", f"baseline pass {count}"),
            }
            for count in counts
        ],
    }


def _step(trainer: Any, workload: models.Workload) -> Callable[[], None]:
    """A step of a trainer that has a snapshot."""
    trainer.update_full_grads(workload.closure, [()])
    return lambda: trainer.step(workload.batch_size, closure=workload.closure)


def _plain_step(trainer: gluon.Trainer, workload: models.Workload) -> Callable[[], None]:
    """A step of `gluon.Trainer`."""

    def step() -> None:
        workload.differentiate()
        trainer.step(workload.batch_size)

    return step


def _repeated(function: Callable[[], None], times: int) -> None:
    for _ in range(times):
        function()


def _refresh(trainer: Any, workload: models.Workload, count: int) -> Callable[[], None]:
    """A full pass over so many minibatches."""
    return lambda: trainer.update_full_grads(workload.closure, [()] * count)


def _plain_pass(workload: models.Workload, count: int) -> Callable[[], None]:
    """A loop of forward and backward."""

    def loop() -> None:
        for _ in range(count):
            workload.differentiate()

    return loop


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
    """The table for the README: medians."""
    rows = []
    for entry in records:
        for each in entry["passes"]:
            ratios = {
                "step / floor": entry["step_to_floor"],
                "SVRGModule's": entry["predecessor_to_floor"],
                "baseline's": entry["baseline_to_floor"],
                "step / baseline's": entry["step_to_baseline"],
                "steps in a row / floor": entry["steps_to_floor"],
                "baseline's in a row": entry["baseline_steps_to_floor"],
                "in a row / baseline's": entry["steps_to_baseline"],
                "full pass / plain pass": each["full_pass"],
                "bare sum / plain pass": each["bare_sum"],
                "baseline's full pass": each["baseline"],
                "full pass / baseline's": each["to_baseline"],
            }
            known = {title: ratio["median"] for title, ratio in ratios.items() if ratio}
            rows.append(
                {
                    "model": entry["model"],
                    "hybridized with": "static_alloc" if entry["static_alloc"] else "-",
                    "minibatches": str(each["batches"]),
                    **known,
                }
            )
    return rows


def plot(records: list[dict[str, Any]]) -> Any:
    """Draw the ratios, with quartiles."""
    figure, axes = plt.subplots(figsize=(8, 1 + 0.5 * len(records)), layout="constrained")
    names = [e["model"] + (", static_alloc" if e["static_alloc"] else "") for e in records]
    for shift, label, ratios in (
        (-0.2, "step / floor", [e["step_to_floor"] for e in records]),
        (
            0.0,
            "full pass / plain pass, many minibatches",
            [e["passes"][-1]["full_pass"] for e in records],
        ),
        (0.2, "SVRGModule step / floor", [e["predecessor_to_floor"] for e in records]),
    ):
        shown = [(i + shift, ratio) for i, ratio in enumerate(ratios) if ratio is not None]
        if shown:
            positions, found = zip(*shown)
            medians = [ratio["median"] for ratio in found]
            low = [ratio["median"] - ratio["quartile_1"] for ratio in found]
            high = [ratio["quartile_3"] - ratio["median"] for ratio in found]
            axes.errorbar(medians, positions, xerr=[low, high], fmt="o", capsize=3, label=label)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ratio of seconds (median and quartiles)")
    figure.legend(loc="outside upper center", ncols=3)
    return figure
