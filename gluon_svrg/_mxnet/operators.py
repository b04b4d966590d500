"""Operators that make many assignments at once, and calls of them.

A network has hundreds of parameters, most of them small. An operator for each would take longer
than its arithmetic: for 162 arrays of 16 by 16, 3.4 ms against 0.5 ms (2.0).
"""

from __future__ import annotations

import ctypes
import json
import struct
from functools import lru_cache
from typing import Any, Callable, Sequence, Tuple

import mxnet as mx
from mxnet.base import _LIB, check_call
from mxnet.ndarray import CachedOp, NDArray

from .arrays import HAS_DEVICES, device_of, dtype_name

_load_graph: Callable[[str], Any] = getattr(mx.sym, "load_json", None) or mx.sym.fromjson


def assign_multiple(factor: float, array: NDArray, target: NDArray) -> None:
    """Assign a multiple of a classic array to another one of the same dtype."""
    mx.nd._internal._mul_scalar(array, scalar=factor, out=target)


#: A sum of terms, each a factor and the number of an array.
Sum = Tuple[Tuple[float, int], ...]


def are_added_by_products(arrays: Sequence[NDArray]) -> bool:
    """Whether sums of arrays of one dtype are made as products of matrices, see `Sums`.

    They are on a CPU, by MXNet 1.9.1: 400,000 floats take 0.17 ms for ``x + a y`` by BLAS, where
    MXNet's own operators take 0.23 ms for ``a y`` and again for the sum; those of 2.0 take 0.06 ms.
    A product of small matrices takes some microseconds more.
    """
    sizes = [array.size for array in arrays]
    return (
        not HAS_DEVICES
        and all(sizes)
        and sum(sizes) >= len(sizes) << 14
        and max(sizes) < 1 << 31  # BLAS counts in 32 bits
        and dtype_name(arrays[0]) in ("float32", "float64")
        and device_of(arrays[0]).device_type.startswith("cpu")
    )


class Sums:
    """An operator for sums of multiples of arrays, of many rows of arrays at once.

    Parameters
    ----------
    count : int
        The number of rows.
    sums : tuple of tuple of tuple of float and int
        What to compute of each row, in this order: a result may be where the next sums have a
        term, and a term of its own sum, if it is the first. No two sums may be the same. The arrays
        of a row are numbered from 0, as they occur.
    by_products : bool
        Whether each array is a matrix of shape ``(1, n)``, and a multiple is added by a product of
        matrices, ``x + a 1 y``.

    Attributes
    ----------
    operator : CachedOp
        Takes what `inputs` gives; if there are no products, these are the arrays of the first row,
        then of the second, and so on. It gives the results of the first row, then of the second.
    is_direct : bool
        Whether there are no intermediate results.
    """

    def __init__(self, count: int, sums: tuple[Sum, ...], *, by_products: bool) -> None:
        graph = _Graph()
        one = graph.add("null") if by_products else None
        size = 1 + max(number for terms in sums for _, number in terms)
        heads = []
        for _ in range(count):
            arrays = [graph.add("null") for _ in range(size)]
            heads += [_sum(graph, terms, arrays, one) for terms in sums]
        self.is_direct = all(
            len(terms) == 1
            or (len(terms) == 2 and terms[0][0] == 1 and (by_products or abs(terms[1][0]) == 1))
            for terms in sums
        )
        # Between calls, static_alloc keeps as much memory as the intermediate results take.
        self.operator = graph.operator(heads, static_alloc=self.is_direct)
        self._order = graph.order(heads) if by_products else None

    def inputs(self, addresses: Sequence[bytes], like: NDArray) -> bytes:
        """What the operator takes, for `assign_by`.

        Parameters
        ----------
        addresses : sequence of bytes
            The addresses of the arrays of the first row, then of the second, and so on.
        like : NDArray
            An array with their device and dtype.
        """
        if self._order is None:
            return b"".join(addresses)
        known = [_one(device_of(like), like.dtype), *addresses]
        return b"".join([known[number] for number in self._order])


sums_of_multiples = lru_cache(maxsize=32)(Sums)


def _sum(graph: _Graph, terms: Sum, arrays: Sequence[int], one: int | None) -> int:
    """Add a sum of multiples of nodes to a graph; with the number of a matrix 1, by products."""
    add = graph.add

    def multiple(factor: float, array: int) -> int:
        return add("_mul_scalar", [array], attrs={"scalar": repr(factor)})

    (factor, first), *rest = terms
    total = arrays[first] if factor == 1 else multiple(factor, arrays[first])
    for factor, number in rest:
        # Not `elemwise_add` and `elemwise_sub`: 670,000 floats take 0.46 and 0.21 ms on 1.9.1,
        # where these take 0.21 ms, and 0.23 ms on 2.0, where they take 0.10 ms. And oneDNN's
        # addition is wrong where the result goes to another term than the first.
        if one is not None:
            attrs = {"alpha": repr(factor), "beta": "1.0"}
            total = add("_linalg_gemm", [one, arrays[number], total], attrs=attrs)
        elif factor == 1:
            total = add("broadcast_add", [total, arrays[number]])
        else:
            term = arrays[number] if factor == -1 else multiple(-factor, arrays[number])
            total = add("broadcast_sub", [total, term])
    return add("_copy", [total]) if total == arrays[first] else total


@lru_cache(maxsize=None)
def _ones(device: Any, dtype: Any) -> NDArray:
    return mx.nd.ones((1, 1), ctx=device, dtype=dtype)


def _one(device: Any, dtype: Any) -> bytes:
    """The address of a matrix 1."""
    return address(_ones(device, dtype))


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
    return copies_in_many_nodes(len(arrays))


def copies_in_many_nodes(count: int) -> CachedOp:
    """An operator that takes arrays, and gives copies of them."""
    return sums_of_multiples(count, (((1.0, 0),),), by_products=False).operator


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
        """Make the operator that computes some nodes.

        A head is a node, or a node and the number of its output.
        """
        flags = [("static_alloc", static_alloc), ("forward_bulk_size", len(self._nodes))]
        return CachedOp(self._symbol(heads), flags)

    def order(self, heads: Sequence[int | tuple[int, int]]) -> list[int]:
        """Which inputs the operator takes, in its order, by their order here.

        MXNet orders them as it comes to them from the heads.
        """
        inputs = [node["name"] for node in self._nodes if node["op"] == "null"]
        numbers = {name: number for number, name in enumerate(inputs)}
        return [numbers[name] for name in self._symbol(heads).list_inputs()]

    def _symbol(self, heads: Sequence[int | tuple[int, int]]) -> Any:
        outputs = [(head, 0) if isinstance(head, int) else head for head in heads]
        nodes = self._nodes
        graph = {
            "nodes": nodes,
            "arg_nodes": [number for number, node in enumerate(nodes) if node["op"] == "null"],
            "heads": [[node, output, 0] for node, output in outputs],
            "attrs": json.loads(mx.sym.Variable("x").tojson())["attrs"],  # stamp of this MXNet
        }
        return _load_graph(json.dumps(graph))
