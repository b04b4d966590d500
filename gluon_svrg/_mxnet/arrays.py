"""Arrays and operators."""

from __future__ import annotations

import ctypes
import json
import os
import struct
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Callable, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, MXNetError, check_call
from mxnet.gluon import Parameter
from mxnet.ndarray import CachedOp, NDArray

HAS_DEVICES = hasattr(Parameter, "list_device")  # 2.0 says device where 1.9.1 says context


_context_of: Any = ctypes.PyDLL(_LIB._name).MXNDArrayGetContext  # keeps Python's lock: quicker
_devices: dict[tuple[int, int], Any] = {}


def device_of(array: NDArray) -> Any:
    """The device that holds an array; always the same object for the same device.

    Without the overhead of `NDArray.ctx`, which makes another object each time.
    """
    kind, number = ctypes.c_int(), ctypes.c_int()
    status = _context_of(array.handle, ctypes.byref(kind), ctypes.byref(number))
    if status:
        check_call(status)
    known = _devices.get((kind.value, number.value))
    return only(array.device if HAS_DEVICES else array.ctx) if known is None else known


def only(device: Any) -> Any:
    """The one object for a device."""
    return _devices.setdefault((device.device_typeid, device.device_id), device)


def allocated_bytes(size: int) -> int:
    """The measured memory of an array of this many bytes: MXNet 2.0 allocates in pages."""
    return -(-size // 4096) * 4096 + 3000 if HAS_DEVICES else size + 1100


def keeps_freed_memory(device: Any) -> bool:
    """Whether MXNet keeps the memory of freed arrays for reuse."""
    return HAS_DEVICES or device.device_type == "gpu"


def gpu_free_bytes(device: Any) -> int:
    """The free memory of a GPU."""
    free, _ = mx.context.gpu_memory_info(device.device_id)
    return int(free)


_LARGE = 1 << 16  # entries
_ONEDNN = "ONEDNN" if "ONEDNN" in mx.runtime.Features() else "MKLDNN"  # 2.0, 1.9.1


def is_for_onednn(array: NDArray) -> bool:
    """Whether this is a large array, and operators on it are oneDNN's where it has them."""
    return (
        array.size >= _LARGE
        and dtype_name(array) == "float32"
        and device_of(array).device_type.startswith("cpu")
        and mx.runtime.Features().is_enabled(_ONEDNN)
        and os.environ.get(f"MXNET_{_ONEDNN}_ENABLED", "1").lower() not in ("0", "false")
    )


def classic(array: NDArray) -> NDArray:
    """The same memory as an array of the classic (not NumPy-like) interface."""
    return array.as_nd_ndarray()


def is_numpy_like(array: NDArray) -> bool:
    """Whether an array has the NumPy-like interface."""
    return array.stype == "default" and hasattr(mx, "np") and isinstance(array, mx.np.ndarray)


def like(array: NDArray, other: NDArray) -> NDArray:
    """The same memory as an array with the interface of another array."""
    return array.as_np_ndarray() if is_numpy_like(other) else classic(array)


def to_ndarray(value: np.ndarray, device: Any) -> NDArray:
    """A classic array with the values and the dtype of a NumPy array."""
    return mx.nd.array(value, ctx=device, dtype=value.dtype)


def dtype_name(array: NDArray) -> str:
    """The name of an array's dtype, such as ``float32``."""
    return _name_of(array.dtype)


@lru_cache(maxsize=None)
def _name_of(dtype: Any) -> str:
    return str(np.dtype(dtype))


def is_refused_backward(error: MXNetError) -> bool:
    """Whether `backward` failed because its head was not recorded or its graph was freed."""
    message = str(error)
    return (
        "not in a computational graph" in message
        or "no inputs in computation graph that require gradients" in message
    )


def not_traced() -> Any:
    """A block whose operations are not traced as part of a network by MXNet 2.0."""
    deferred = getattr(mx, "_deferred_compute", None)
    return nullcontext() if deferred is None else deferred.context(False)


ASSIGNED = (
    "The closure assigned values to a parameter (Parameter.set_data or param.data()[:] = ...), and "
    "the trainer calls it at other weights too: the assignment would be lost, or would damage the "
    "snapshot. Assign before step(), not in the forward pass, or use grad_req='null' and a "
    "parameter of one dimension for a state that the forward pass changes."
)


@lru_cache(maxsize=None)
def _guarded(cls: Any) -> Any:
    def refuse(array: NDArray, key: Any, value: Any) -> None:
        raise RuntimeError(ASSIGNED)

    return type(cls.__name__, (cls,), {"__setitem__": refuse, "__slots__": (), "is_guarded": True})


def guard(array: NDArray) -> NDArray:
    """Make an array, in place, refuse assignments to its entries."""
    cls: Any = type(array)
    array.__class__ = _guarded(cls)
    return array


def unguarded(array: NDArray) -> NDArray:
    """Make an array, in place, accept assignments again."""
    array.__class__ = next(c for c in type(array).__mro__ if not hasattr(c, "is_guarded"))
    return array


_load_graph: Callable[[str], Any] = getattr(mx.sym, "load_json", None) or mx.sym.fromjson


def assign_multiple(factor: float, array: NDArray, target: NDArray) -> None:
    """Assign a multiple of a classic array to another one of the same dtype."""
    mx.nd._internal._mul_scalar(array, scalar=factor, out=target)


#: A sum of terms, each a factor and the number of an array.
Sum = Tuple[Tuple[float, int], ...]


@lru_cache(maxsize=32)
def sums_of_multiples(count: int, sums: tuple[Sum, ...]) -> CachedOp:
    """An operator for sums of multiples of arrays, of many rows of arrays at once.

    A network has hundreds of parameters, most of them small. An operator for each would cost
    more than its arithmetic: for 162 arrays of 16 by 16, 3.4 ms against 0.5 ms (2.0).

    Parameters
    ----------
    count : int
        The number of rows.
    sums : tuple of tuple of tuple of float and int
        What to compute of each row, in this order: a result may be where the next sums have a
        term, and a term of its own sum, if it is the first. No two sums may be the same. The arrays
        of a row are numbered from 0, as they occur.

    Returns
    -------
    CachedOp
        Takes the arrays of the first row, then of the second, and so on, and gives the results of
        the first row, then of the second, and so on.
    """
    graph = _Graph()
    add = graph.add

    def multiple(factor: float, array: int) -> int:
        return add("_mul_scalar", [array], attrs={"scalar": repr(factor)})

    def compute(terms: Sum, arrays: Sequence[int]) -> int:
        (factor, first), *rest = terms
        total = arrays[first] if factor == 1 else multiple(factor, arrays[first])
        for factor, number in rest:
            # Not `elemwise_add` and `elemwise_sub`: 670,000 floats take 0.46 and 0.21 ms on 1.9.1,
            # where these take 0.21 ms, and 0.23 ms on 2.0, where they take 0.10 ms. And oneDNN's
            # addition is wrong where the result goes to another term than the first.
            if factor == 1:
                total = add("broadcast_add", [total, arrays[number]])
            else:
                term = arrays[number] if factor == -1 else multiple(-factor, arrays[number])
                total = add("broadcast_sub", [total, term])
        return add("_copy", [total]) if total == arrays[first] else total

    size = 1 + max(number for terms in sums for _, number in terms)
    heads = []
    for _ in range(count):
        arrays = [add("null") for _ in range(size)]
        heads += [compute(terms, arrays) for terms in sums]
    # Between calls, static_alloc keeps as much memory as the intermediate results take.
    is_direct = all(
        len(terms) == 1 or (len(terms) == 2 and terms[0][0] == abs(terms[1][0]) == 1)
        for terms in sums
    )
    return graph.operator(heads, static_alloc=is_direct)


_pointer = struct.Struct("P")
_INVOKE_ON_DEVICE = not hasattr(_LIB, "MXInvokeCachedOpEx")  # 2.0
_invoke = _LIB.MXInvokeCachedOp if _INVOKE_ON_DEVICE else _LIB.MXInvokeCachedOpEx


def address(array: NDArray) -> bytes:
    """Where MXNet has an array, as `assign_by` takes it; it is valid as long as the array."""
    return _pointer.pack(array.handle.value)


def assign_by(operator: CachedOp, inputs: bytes, outputs: bytes, device: Any) -> None:
    """Let an operator take arrays and assign to others, all on a device, by their addresses.

    `CachedOp.__call__` asks each array for its handle, which takes half of the time of a small sum.

    Parameters
    ----------
    operator : CachedOp
        The operator.
    inputs, outputs : bytes
        The addresses of the arrays, joined.
    device : device
        Where they are.
    """
    at = (device.device_typeid, device.device_id) if _INVOKE_ON_DEVICE else ()
    status = _invoke(
        operator.handle,
        len(inputs) // _pointer.size,
        inputs,
        *at,
        ctypes.byref(ctypes.c_int(len(outputs) // _pointer.size)),
        ctypes.byref(ctypes.c_char_p(outputs)),
        ctypes.byref(ctypes.c_void_p()),  # the storage types of the outputs, unused
    )
    if status:
        check_call(status)


def copies_of(arrays: Sequence[NDArray]) -> CachedOp:
    """An operator that takes arrays like these, of one dtype, and gives copies of them.

    One node may copy them all: for 162 arrays, its call takes 0.15 ms, where that of 162 nodes
    takes 0.33 ms. But oneDNN raises an error there for some dtypes and shapes.
    """
    if all(dtype_name(a) == "float32" and 1 <= a.ndim <= 6 and a.size for a in arrays):
        return _copies_in_one_node(len(arrays))
    return sums_of_multiples(len(arrays), (((1.0, 0),),))


@lru_cache(maxsize=8)
def _copies_in_one_node(count: int) -> CachedOp:
    graph = _Graph()
    arrays = [graph.add("null") for _ in range(count)]
    node = graph.add("amp_multicast", arrays, attrs={"num_outputs": str(count)})
    return graph.operator([(node, output) for output in range(count)])


@lru_cache(maxsize=8)
def ones_like_each(count: int) -> CachedOp:
    """An operator that takes arrays, and gives arrays of ones like them."""
    graph = _Graph()
    arrays = [graph.add("null") for _ in range(count)]
    return graph.operator([graph.add("ones_like", [array]) for array in arrays])


@lru_cache(maxsize=8)
def scaling_to_norm(count: int, factor: float) -> CachedOp:
    """An operator for many products at once: ``x * min(factor, most / norm(x))`` for each x.

    All of it is products of matrices: for 400,000 floats, such a product takes 0.2 ms, where
    `broadcast_mul` takes 0.5 ms (1.9.1) and 2.8 ms (2.0).

    Parameters
    ----------
    count : int
        The number of products.
    factor : float
        The largest factor.

    Returns
    -------
    CachedOp
        Takes ``most``, of shape (1, 1), then each x, of shape (1, n). Results may replace the x.
    """
    graph = _Graph()
    most = graph.add("null")
    heads = []
    for x in [graph.add("null") for _ in range(count)]:
        norm = graph.add("sqrt", [graph.add("dot", [x, x], attrs={"transpose_b": "True"})])
        share = graph.add("elemwise_div", [most, norm])
        least = graph.add("_minimum_scalar", [share], attrs={"scalar": repr(factor)})
        product = graph.add("dot", [least, x])
        heads.append(graph.add("_copy", [product]))  # `dot` may not write to x
    return graph.operator(heads, static_alloc=False)  # which would keep all products


class _Graph:
    """A graph of operations, in the JSON of MXNet's symbols."""

    def __init__(self) -> None:
        self._nodes: list[dict[str, Any]] = []

    def add(self, op: str, inputs: Sequence[int] = (), **fields: Any) -> int:
        """Add a node, and return its number."""
        entries = [[node, 0, 0] for node in inputs]
        number = len(self._nodes)
        self._nodes.append({"op": op, "name": f"node{number}", "inputs": entries, **fields})
        return number

    def operator(
        self, heads: Sequence[int | tuple[int, int]], *, static_alloc: bool = True
    ) -> CachedOp:
        """Make the operator that computes some nodes; its inputs follow their order.

        A head is a node, or a node and the number of its output.
        """
        outputs = [(head, 0) if isinstance(head, int) else head for head in heads]
        nodes = self._nodes
        graph = {
            "nodes": nodes,
            "arg_nodes": [number for number, node in enumerate(nodes) if node["op"] == "null"],
            "heads": [[node, output, 0] for node, output in outputs],
            "attrs": json.loads(mx.sym.Variable("x").tojson())["attrs"],  # stamp of this MXNet
        }
        flags = [("static_alloc", static_alloc), ("forward_bulk_size", len(nodes))]
        return CachedOp(_load_graph(json.dumps(graph)), flags)
