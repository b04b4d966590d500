"""The only module that knows that there are two MXNets.

Everything that differs between MXNet 1.9.1 and 2.0, and every private name of MXNet, stands here.
Features are tested for, not versions.
"""

from __future__ import annotations

import ctypes
import json
import operator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Callable, Iterable, Iterator, List, Sequence

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, MXNetError
from mxnet.gluon import Parameter
from mxnet.ndarray import CachedOp, NDArray

from .kvstores import OpenTrainer as OpenTrainer
from .kvstores import barrier as barrier
from .kvstores import is_native as is_native
from .kvstores import registered_kvstores as registered_kvstores
from .kvstores import send_to_servers as send_to_servers

_HAS_DEVICES = hasattr(Parameter, "list_device")  # 2.0 says device where 1.9.1 says context

#: Per parameter, one array per device.
Arrays = List[List[NDArray]]
#: Per parameter, one mark per device.
Flags = List[List[bool]]


# --- parameters --------------------------------------------------------------------------------


def devices(parameter: Parameter) -> list[Any]:
    """The devices on which a parameter is (or, when deferred, will be) initialized."""
    return list(parameter.list_device() if _HAS_DEVICES else parameter.list_ctx())


def devices_of_estimator(estimator: Any) -> Any:
    """The devices that an `Estimator` trains on."""
    return estimator.device if hasattr(estimator, "device") else estimator.context


def device_of(array: NDArray) -> Any:
    """The device that holds an array."""
    return array.device if _HAS_DEVICES else array.ctx


def allocated_bytes(size: int) -> int:
    """What an array of so many bytes takes, as it was measured: 2.0 allocates in pages."""
    return -(-size // 4096) * 4096 + 3000 if _HAS_DEVICES else size + 1100


def keeps_freed_memory(device: Any) -> bool:
    """Whether MXNet keeps the memory of arrays that are gone, to give it out again."""
    return _HAS_DEVICES or device.device_type == "gpu"


def gpu_free_bytes(device: Any) -> int:
    """The memory of a GPU that nobody has taken."""
    free, _ = mx.context.gpu_memory_info(device.device_id)
    return int(free)


def is_deferred(parameter: Parameter) -> bool:
    """Whether a parameter waits for the first forward pass to learn its shape."""
    return bool(parameter._deferred_init)


def has_data(parameter: Parameter) -> bool:
    """Whether a parameter is initialized, deferred initialization included."""
    return parameter._data is not None


def is_trainable(parameter: Parameter) -> bool:
    """Whether a parameter has gradients."""
    return parameter.grad_req != "null"


def is_auxiliary(parameter: Parameter) -> bool:
    """Whether operators may write to a parameter by themselves, as BatchNorm does.

    Gluon declares such states not differentiable. A SymbolBlock does not, but its states are
    vectors; a frozen weight with more dimensions is a constant and not worth a copy.
    """
    return not is_trainable(parameter) and (
        not parameter._differentiable or len(parameter.shape or ()) <= 1
    )


def data(parameter: Parameter) -> list[NDArray]:
    """The values of an initialized parameter, one array per device."""
    return parameter._data


def all_rows(parameter: Parameter) -> list[NDArray]:
    """Copies of the values of a parameter; of a row_sparse one, which has some rows, with all.

    Those are in the store.
    """
    weights = parameter._data
    if has_sparse_values(parameter):
        for weight in weights:
            rows = mx.nd.arange(parameter.shape[0], ctx=device_of(weight), dtype="int64")
            parameter._trainer._row_sparse_pull(parameter, weight, rows, full_idx=True)
    return [weight.copy() for weight in weights]


def has_sparse_values(parameter: Parameter) -> bool:
    """Whether the values of a parameter are sparse."""
    return parameter._stype != "default"


def is_sparse(parameter: Parameter) -> bool:
    """Whether a parameter or its gradient is sparse."""
    return has_sparse_values(parameter) or parameter._grad_stype != "default"


def gradients(parameter: Parameter) -> list[NDArray]:
    """The gradient buffers of a parameter, one array per device."""
    return parameter._grad


def set_arrays(parameter: Parameter, arrays: list[NDArray]) -> None:
    """Let the network compute with other arrays, by reference, for a while.

    Blocks, hybridized or not, read `Parameter.data` at every call. `Parameter.set_data` would copy
    and would reset the store, and with it the optimizer's momentum.
    """
    parameter._data = arrays


@contextmanager
def data_replaced(parameters: Sequence[Parameter], arrays: Arrays) -> Iterator[None]:
    """Let the network compute with other arrays, by reference, inside a block."""
    live = [parameter._data for parameter in parameters]
    for parameter, replacement in zip(parameters, arrays):
        set_arrays(parameter, replacement)
    try:
        yield
    finally:
        for parameter, original in zip(parameters, live):
            set_arrays(parameter, original)


def _not_traced() -> Any:
    """A block whose operations do not become part of a network that MXNet 2.0 traces."""
    deferred = getattr(mx, "_deferred_compute", None)
    return nullcontext() if deferred is None else deferred.context(False)


@contextmanager
def reads_noted(note: Callable[[Parameter], None]) -> Iterator[None]:
    """Call a function with each initialized parameter just before its values are read.

    The values that are read are those that the parameter has after the call.
    """
    original = Parameter._check_and_get

    def check_and_get(parameter: Parameter, arrays: Any, device: Any) -> Any:
        if arrays is not None and arrays is parameter._data:
            with _not_traced(), mx.autograd.pause():
                note(parameter)
            arrays = parameter._data
        return original(parameter, arrays, device)

    Parameter._check_and_get = check_and_get
    try:
        yield
    finally:
        Parameter._check_and_get = original


# --- gradients ---------------------------------------------------------------------------------


def with_gradients(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Those parameters that have gradient buffers: they are neither frozen nor deferred."""
    return [parameter for parameter in parameters if parameter._grad is not None]


def weights(parameters: Iterable[Parameter]) -> Arrays:
    """The values of `with_gradients`."""
    return [parameter._data for parameter in parameters if parameter._grad is not None]


def have_buffers(parameters: Iterable[Parameter], buffers: Iterable[Any]) -> bool:
    """Whether the gradient buffers (None where there are none) are these very lists."""
    return all(map(operator.is_, [parameter._grad for parameter in parameters], buffers))


def put_gradients_into(arrays: Arrays, buffers: Arrays, parameters: Sequence[Parameter]) -> None:
    """Let `backward` put the gradients of `arrays` into `buffers`.

    It writes there, or adds, as it does for the parameters: a change from one to the other makes
    hybridized networks plan their backward anew.
    """
    flat = [array for per_device in arrays for array in per_device]
    if flat:
        flat_buffers = [buffer for per_device in buffers for buffer in per_device]
        reqs = [p.grad_req for p, per_device in zip(parameters, arrays) for _ in per_device]
        mx.autograd.mark_variables(flat, flat_buffers, reqs)


def fresh(arrays: Arrays) -> Flags:
    """Tell which gradients `backward` has written since their marks were cleared.

    The same marks that `gluon.Trainer` reads, through `NDArray._fresh_grad`; this is what that
    property calls, without its overhead, which would be felt with hundreds of parameters.
    """
    read, state = _LIB.MXNDArrayGetGradState, ctypes.c_int()
    reference = ctypes.byref(state)
    flags = []
    for per_device in arrays:
        row = []
        for array in per_device:
            read(array.handle, reference)
            row.append(state.value != 0)
        flags.append(row)
    return flags


def mark(arrays: Arrays, flags: Flags, fresh: bool) -> None:
    """Mark those gradients for which the flag is set as fresh, or as stale."""
    for per_device, row in zip(arrays, flags):
        for array, flag in zip(per_device, row):
            if flag:
                array._fresh_grad = fresh


def take_fresh(arrays: Arrays) -> Flags:
    """Tell which gradients are marked as fresh, and mark all as stale."""
    flags = fresh(arrays)
    write, stale = _LIB.MXNDArraySetGradState, ctypes.c_int(0)
    for per_device, row in zip(arrays, flags):
        for array, flag in zip(per_device, row):
            if flag:
                write(array.handle, stale)
    return flags


def is_refused_backward(error: MXNetError) -> bool:
    """Whether `backward` failed because its head was not recorded or was used up before."""
    message = str(error)
    return (
        "not in a computational graph" in message
        or "no inputs in computation graph that require gradients" in message
    )


# --- arrays and operators ----------------------------------------------------------------------


def classic(array: NDArray) -> NDArray:
    """The same memory as an array of the classic (not NumPy-like) interface."""
    return array.as_nd_ndarray()


def is_numpy_like(array: NDArray) -> bool:
    """Whether an array is of the NumPy-like interface."""
    return type(array) is not type(classic(array)) and array.stype == "default"


def like(array: NDArray, other: NDArray) -> NDArray:
    """The same memory as an array of the interface of another."""
    return array.as_np_ndarray() if is_numpy_like(other) else classic(array)


def dtype_name(array: NDArray) -> str:
    """The name of an array's dtype, such as ``float32``."""
    return str(np.dtype(array.dtype))


class Graph:
    """A graph of operators under construction.

    In the form in which MXNet saves symbols: from Python, not every operator can be composed.
    """

    def __init__(self) -> None:
        self._nodes: list[dict[str, Any]] = []

    def argument(self) -> int:
        """Add an argument and return its number."""
        return self.add("null")

    def add(self, op: str, inputs: Sequence[int] = (), **fields: Any) -> int:
        """Add the application of an operator and return its number."""
        entries = [[node, 0, 0] for node in inputs]
        name = f"node{len(self._nodes)}"
        self._nodes.append({"op": op, "name": name, "inputs": entries, **fields})
        return len(self._nodes) - 1

    def compile(self, heads: Sequence[int], *, static: bool = False) -> CachedOp:
        """Compile the graph that computes some nodes from the arguments, in their order.

        Parameters
        ----------
        heads : sequence of int
            The nodes that are returned.
        static : bool
            Whether to compile it, at the first call and for the arrays of that call, into a single
            engine operation.
        """
        arguments = [number for number, node in enumerate(self._nodes) if node["op"] == "null"]
        graph = {
            "nodes": self._nodes,
            "arg_nodes": arguments,
            "heads": [[head, 0, 0] for head in heads],
            "attrs": json.loads(mx.sym.Variable("x").tojson())["attrs"],  # the stamp of this MXNet
        }
        flags: list[tuple[str, Any]] = [
            ("static_alloc", True),
            ("forward_bulk_size", len(self._nodes)),
        ]
        if static:
            flags += [("static_shape", True), ("param_indices", list(range(len(arguments))))]
        return CachedOp(_load_graph(json.dumps(graph)), flags)

    def compile_for_effect(
        self, updates: Sequence[int], *, discard: bool | None = None
    ) -> CachedOp:
        """Compile a static graph that is run for what its nodes update in place.

        Parameters
        ----------
        updates : sequence of int
            The nodes. What they return is not wanted.
        discard : bool, optional
            Whether to leave it out; by default, where MXNet can.
        """
        if can_discard_outputs() if discard is None else discard:
            attrs = {"shape": "(1,)", "dtype": "float32"}
            head = self.add("_zeros", attrs=attrs, control_deps=list(updates))
        else:  # consume each output by something small that has a gradient, namely zero
            small = [self.add("shape_array", [node]) for node in updates]
            head = self.add("add_n", small, attrs={"num_args": str(len(small))})
        return self.compile([head], static=True)


@lru_cache(maxsize=None)
def can_discard_outputs() -> bool:
    """Whether a graph may run an operator for its side effect alone (2.0: yes, 1.9.1: no)."""
    graph = Graph()
    update = graph.add("sgd_mom_update", [graph.argument() for _ in range(3)], attrs={"lr": "1"})
    try:
        graph.compile_for_effect([update], discard=True)
    except MXNetError:
        return False
    return True


_load_graph: Callable[[str], Any] = getattr(mx.sym, "load_json", None) or mx.sym.fromjson
