"""Format 1, of gluon_svrg 0.1.0: an ``.npz`` behind a checksum, converted to current parts."""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
from typing import Any, Callable, Sequence

import numpy as np

from .container import DAMAGED, LONGEST_MANIFEST, TOO_LARGE, check, parse_json
from .optimizer import settings
from .raw_arrays import from_npy
from .values import ByParameter, SavedArray, SavedObject, decode, malformed, saved_array

_MANIFEST = "manifest.npy"


def read(
    file: Any, checksum: bytes, allow: Callable[[np.dtype, tuple[int, ...]], bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what follows the first two lines.

    Returns
    -------
    header : dict
    parts : dict
        The states, by part.

    Raises
    ------
    ValueError
        If it is damaged or malformed.
    """
    body = file.read()
    digest = hashlib.sha256(body)
    check(digest, checksum)
    members = _members(body)
    if _MANIFEST not in members or len(members[_MANIFEST]) > LONGEST_MANIFEST:
        raise malformed("there is none, or it is too long")
    manifest = parse_json(from_npy(members.pop(_MANIFEST)).tobytes())
    try:
        arrays = [from_npy(members[f"{number}.npy"]) for number in range(len(members))]
    except KeyError as error:
        raise malformed(f"array {error} is missing") from error
    if not all(allow(array.dtype, array.shape) for array in arrays):
        raise ValueError(TOO_LARGE)
    try:
        return converted(manifest, arrays)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise malformed(f"{type(error).__name__}: {error}") from error


def _members(body: bytes) -> dict[str, memoryview]:
    """The members of an uncompressed zip file, as views of its bytes."""
    found: dict[str, memoryview] = {}
    try:
        directory = zipfile.ZipFile(io.BytesIO(body)).infolist()
        for info in directory:
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise ValueError("it is compressed, which no version of gluon_svrg does")
            lengths = struct.unpack("<HH", body[info.header_offset + 26 : info.header_offset + 30])
            start = info.header_offset + 30 + sum(lengths)
            if start + info.file_size > len(body) or info.filename in found:
                raise malformed("a member lies outside of it, or twice in it")
            found[info.filename] = memoryview(body)[start : start + info.file_size]
    except (zipfile.BadZipFile, struct.error, NotImplementedError, OverflowError) as error:
        raise ValueError(DAMAGED) from error
    if sum(map(len, found.values())) > len(body):
        raise malformed("its members overlap")
    return found


# --- the manifest ------------------------------------------------------------------------------


def converted(manifest: Any, found: Sequence[np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert the manifest of format 1 to a header and the states of parts."""
    arrays = _Arrays(found)
    parameters = manifest["parameters"]
    optimizer = _object(manifest["optimizer"], arrays)
    states = arrays.decode(manifest["states"])
    if not isinstance(states, dict):
        raise malformed("its states")
    version = manifest["mxnet"]
    known = all(type(key) is int and 0 <= key < len(parameters) for key in states)

    def positions(by_index: dict[Any, Any]) -> dict[Any, Any]:  # keys of a kvstore may have gaps
        return ByParameter(by_index) if known else dict(by_index)

    header = {
        "gluon_svrg": manifest["gluon_svrg"],
        "mxnet": version,
        "method": "SVRG",
        "parameters": [
            None if type(row) is not list or len(row) != 4 else [row[0], None, *row[1:]]
            for row in parameters
        ],
        "devices": None,
    }
    counters = {name.lstrip("_"): value for name, value in manifest["counters"].items()}
    coefficient = counters.pop("coefficient")
    parts = {
        "optimizer": settings(optimizer, version, positions),
        "optimizer_states": {
            "mxnet": version,
            "optimizer": optimizer.class_name,
            "states": positions(states),
        },
        "method": _method(manifest["snapshot"], parameters, arrays),
        "counters": counters,
        "lock": {name.lstrip("_"): value for name, value in manifest["lock"].items()},
        "coefficient_schedule": {
            "schedule": _schedule(manifest["schedule"], arrays),
            "coefficient": coefficient,
        },
        "schedules": [_object(item, arrays) for item in manifest["refreshes"]],
        "scaler": _scaler(manifest["amp"], arrays),
    }
    if arrays.unused:
        raise malformed(f"{len(arrays.unused)} arrays are not used")
    return header, parts


class _Arrays:
    """The arrays of a file, and which of them are unused."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays, self.unused = arrays, {*range(len(arrays))}

    def decode(self, encoded: Any) -> Any:
        return decode(_modern(encoded), self.arrays, self.unused)


def _schedule(encoded: Any, arrays: _Arrays) -> Any:
    """A number, an object, or the name of a function."""
    if not isinstance(encoded, dict):
        return encoded
    return encoded["class"] if "attributes" not in encoded else _object(encoded, arrays)


def _scaler(encoded: Any, arrays: _Arrays) -> Any:
    if encoded is None:
        return None
    return {**encoded, "scaler": _object(encoded["scaler"], arrays).attributes}


def _object(encoded: Any, arrays: _Arrays) -> SavedObject:
    if not isinstance(encoded["class"], str):
        raise malformed("a class")
    items = encoded["attributes"].items()
    return SavedObject(encoded["class"], {name: arrays.decode(item) for name, item in items})


def _modern(encoded: Any) -> Any:
    """Convert plain data of format 1 to the current format, which writes attributes as pairs."""
    if not isinstance(encoded, dict):
        return encoded
    if encoded.get("kind") == "parameters":
        raise malformed("a value that format 1 does not have")
    if encoded.get("kind") == "object":
        attributes = [[name, _modern(item)] for name, item in encoded["attributes"].items()]
        return {"kind": "object", "class": encoded["class"], "attributes": attributes}
    if encoded.get("kind") == "dict":
        return {**encoded, "items": [[_modern(k), _modern(v)] for k, v in encoded["items"]]}
    if "items" in encoded:
        return {**encoded, "items": [_modern(item) for item in encoded["items"]]}
    return encoded


# --- the snapshot ------------------------------------------------------------------------------


def _method(encoded: Any, parameters: Sequence[Any], arrays: _Arrays) -> Any:
    """Convert the snapshot to the state of SVRG."""
    if encoded is None:
        return None
    weights, means, auxiliaries = (
        arrays.decode(encoded[name]) for name in ("weights", "full_grads", "states")
    )
    trainable = [position for position, row in enumerate(parameters) if row[3]]
    in_objective, stored = encoded["in_objective"], encoded["stored"]
    if not len(weights) == len(means) == len(in_objective) == len(trainable):
        raise malformed("its snapshot has another number of parameters")
    return {
        "weights": ByParameter(zip(trainable, weights)),
        "full_grads": ByParameter(zip(trainable, means)),
        "frozen": ByParameter(zip(_auxiliary(parameters, auxiliaries), auxiliaries)),
        "in_objective": ByParameter(zip(trainable, in_objective)),
        "table": None if stored is None else _table(stored, trainable, means, arrays),
    }


def _auxiliary(parameters: Sequence[Any], saved: list[Any]) -> list[int]:
    """The parameters whose values were saved: all frozen ones except constant matrices."""
    shapes = [list(values[0].shape) for values in saved]
    frozen = [position for position, row in enumerate(parameters) if not row[3]]
    vectors = [position for position in frozen if len(parameters[position][1]) <= 1]
    for chosen in (frozen, vectors):
        if [parameters[position][1] for position in chosen] == shapes:
            return chosen
    raise malformed("it does not say which parameters its auxiliary states belong to")


def _table(stored: Any, trainable: list[int], means: list[Any], arrays: _Arrays) -> dict[str, Any]:
    """Convert stored gradients to sums over each minibatch, of unscaled losses.

    Format 1 stores them negated and for scaled losses. On MXNet 2.0 it also adds the mean gradient
    once for each loss entry.
    """
    counts, scale = np.array(stored["counts"], dtype="int64"), stored["scale"]
    grads = arrays.decode(stored["grads"])
    if not (type(scale) in (int, float) and 0 < scale < 2.0**100 and counts.ndim == 2):
        raise malformed("its stored gradients")
    if not all(len(column) == len(trainable) for column in grads) or len(grads) != counts.shape[1]:
        raise malformed("its stored gradients belong to other parameters or devices")
    rows: dict[int, list[SavedArray]] = {position: [] for position in trainable}
    for device, column in enumerate(grads):
        for position, values, mean in zip(trainable, column, means):
            sums = -np.asarray(values).reshape(len(counts), *mean.shape) / scale
            if stored["prepared"]:
                entries = counts[:, device].reshape(-1, *[1] * mean.ndim)
                sums += (entries * np.asarray(mean, "float64")).astype(sums.dtype)
            rows[position].append(saved_array(sums.astype(values.dtype), "nd"))
    return {"rows": ByParameter(rows), "counts": stored["counts"], "seeds": stored["seeds"]}
