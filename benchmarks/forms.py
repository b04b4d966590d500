"""Forms of the sums of a step with one gradient, in MXNet's operators alone.

They are those of a stored row, ``v = g - d``, and of SAGA, ``v = (g - r) + k S``, ``S += g - r``
and ``r = g``, on arrays like the gradients of each model, without a network and without a trainer.
One form of a stored row takes no sum, because backward adds g to ``-d``: for it, a backward that
adds is timed against one that writes.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import matplotlib.pyplot as plt
import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.ndarray import NDArray

from gluon_svrg.passes.arrays import Column
from gluon_svrg.passes.multiples import assign_in_turn

from . import models, record, timing

MODELS = ("MLP 784-512-512-10", "MLP 784-512-10", "linear regression")
TIMES = 20  # in a row, for one wait
K = 0.01  # entries of a minibatch over those of the table; any number that is not 1
V, NEW, SUM, ROW, NEXT = range(5)

#: Steps of `assign_in_turn`: what goes where, each a sum of a factor times arrays.
STORED = {
    "g - d": ((V, ((1.0, V), (-1.0, ROW))),),
    "g - 0.5 d": ((V, ((1.0, V), (-0.5, ROW))),),
}
SAGA = {
    "copy g, v = g - r, S, v + k S (1.9.1)": (
        (NEW, ((1.0, V),)),
        (V, ((1.0, V), (-1.0, ROW))),
        (NEXT, ((1.0, V), (1.0, SUM))),
        (V, ((1.0, V), (K, SUM))),
    ),
    "copy g, g - r, k S, v, S (2.0)": (
        (NEW, ((1.0, V),)),
        (NEXT, ((1.0, NEW), (-1.0, ROW))),
        (V, ((K, SUM),)),
        (V, ((1.0, V), (1.0, NEXT))),
        (NEXT, ((1.0, NEXT), (1.0, SUM))),
    ),
    "backward writes the row: no copy": (
        (NEXT, ((1.0, NEW), (-1.0, ROW))),
        (V, ((K, SUM),)),
        (V, ((1.0, V), (1.0, NEXT))),
        (NEXT, ((1.0, NEXT), (1.0, SUM))),
    ),
}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure all forms on arrays of all models.

    Returns
    -------
    list of dict
        A record per model and form.
    """
    records = []
    for name in MODELS[-1:] if quick else MODELS:
        functions = _forms(name)
        seconds = timing.rounds(functions, 5 if quick else 30, least=0.03, description=name)
        added, written = seconds.pop("backward adds"), seconds.pop("backward writes")
        seconds["stored: copy -d, and backward adds g"] = seconds.pop("copy") + added - written
        records += [
            {"model": name, "form": form, "microseconds": 1e6 * float(np.median(times)) / TIMES}
            for form, times in seconds.items()
        ]
    return records


def _forms(name: str) -> dict[str, Callable[[], None]]:
    """What is timed: each form `TIMES` times in a row."""
    workload = models.workload(name, static_alloc=True)
    grads = [p.list_grad()[0] for p in workload.net.collect_params().values()]
    rng = np.random.RandomState(record.SEED)
    columns = [
        Column(mx.nd.array(rng.uniform(size=grad.shape), dtype=grad.dtype) for grad in grads)
        for _ in range(5)
    ]
    named = {
        **{f"stored: {form}": steps for form, steps in STORED.items()},
        **{f"SAGA: {form}": steps for form, steps in SAGA.items()},
        "copy": ((V, ((1.0, ROW),)),),
    }
    functions = {form: _repeated(assign_in_turn, columns, steps) for form, steps in named.items()}
    functions["SAGA: copy g, g - r and S in sgd_mom_update, k S, v"] = _repeated(_fused, columns)
    for operators in ("elemwise", "broadcast"):
        function = _repeated(_by_operators, columns, operators)
        functions[f"SAGA: as on 2.0, by {operators}_add and {operators}_sub"] = function
        subtract = _repeated(_subtract, columns, operators)
        functions[f"stored: g - d, by {operators}_sub"] = subtract
    for what, grad_req in (("adds", "add"), ("writes", "write")):
        functions[f"backward {what}"] = _repeated(_backward(name, grad_req))
    return functions


def _repeated(function: Callable[..., None], *args: Any) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(TIMES):
            function(*args)

    return repeated


def _fused(columns: Sequence[list[NDArray]]) -> None:
    """``r = g - r`` and ``next = S + r`` in one operator for each array; then the rest."""
    assign_in_turn(columns, ((NEW, ((1.0, V),)),))
    for total, new, row, following in zip(*(columns[n] for n in (SUM, NEW, ROW, NEXT))):
        mx.nd.sgd_mom_update(total, new, row, out=following, lr=-1.0, momentum=-1.0)
    assign_in_turn(columns, ((V, ((K, SUM),)), (V, ((1.0, V), (1.0, ROW)))))


def _by_operators(columns: Sequence[list[NDArray]], name: str) -> None:
    """SAGA's sums, one array after the other, by some operators of MXNet."""
    add, subtract = getattr(mx.nd, f"{name}_add"), getattr(mx.nd, f"{name}_sub")
    for v, new, total, row, following in zip(*columns):
        v.copyto(new)
        subtract(new, row, out=following)
        add(following, total * K, out=v)
        add(following, total, out=following)


def _subtract(columns: Sequence[list[NDArray]], name: str) -> None:
    """``g - d``, one array after the other, by an operator of MXNet."""
    for v, row in zip(columns[V], columns[ROW]):
        getattr(mx.nd, f"{name}_sub")(v, row, out=v)


def _backward(name: str, grad_req: str) -> Callable[[], None]:
    """A forward and backward that writes or adds gradients."""
    workload = models.workload(name, static_alloc=True)
    for parameter in workload.net.collect_params().values():
        parameter.grad_req = grad_req

    def differentiate() -> None:
        with autograd.record():
            loss = workload.closure()
        autograd.backward(loss)

    return differentiate


def table(records: list[dict[str, Any]]) -> list[record.Row]:
    """Microseconds of each form, on arrays of each model."""
    return [
        {"model": entry["model"], "form": entry["form"], "microseconds": entry["microseconds"]}
        for entry in sorted(records, key=lambda entry: entry["form"].startswith("SAGA"))
    ]


def plot(records: list[dict[str, Any]]) -> Any:
    """Microseconds as bars, a panel for each model."""
    names = list(dict.fromkeys(entry["model"] for entry in records))
    figure, panels = plt.subplots(
        1, len(names), figsize=(4 + 3 * len(names), 4), squeeze=False, sharey=True
    )
    for panel, name in zip(panels[0], names):
        shown = [entry for entry in records if entry["model"] == name]
        panel.barh([e["form"] for e in shown], [e["microseconds"] for e in shown])
        panel.set(title=name, xlabel="microseconds")
    panels[0, 0].invert_yaxis()
    figure.tight_layout()
    return figure
