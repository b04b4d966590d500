"""What the state of training is: collected from a trainer, checked against one, given to one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _mxnet
from .._version import __version__
from ..buffer import GradientBuffer
from ..control_variate import ControlVariate
from ..snapshot import Snapshot, per_device
from ..stored import StoredGradients
from . import files as checkpoint
from . import gluon_pickles as unpickling
from . import plain_data

if TYPE_CHECKING:
    from ..trainer import SVRGTrainer


class Saved(NamedTuple):
    """The content of a file."""

    manifest: dict[str, Any]
    arrays: list[np.ndarray]


#: Attributes of the trainer that are plain numbers.
_COUNTERS = ("_num_snapshots", "_inner_steps", "_grad_evaluations", "_compared", "_coefficient")
_LOCK = ("mode", "locked", "_base", "_count")


# --- from a trainer ----------------------------------------------------------------------------


def collect(trainer: SVRGTrainer) -> Saved:
    """Take the whole state of a trainer."""
    arrays: list[np.ndarray] = []
    updaters = _updaters(trainer)
    manifest = {
        "gluon_svrg": __version__,
        "mxnet": mx.__version__,
        "parameters": [_description(p) for p in trainer._params],
        "optimizer": plain_data.encode_object(trainer._optimizer, arrays),
        "states": plain_data.encode(updaters[0].states if updaters else {}, arrays, "its states"),
        "counters": {name: getattr(trainer, name) for name in _COUNTERS},
        "lock": {name: getattr(trainer._lock, name) for name in _LOCK},
        "schedule": _encode_schedule(trainer._coefficient_schedule, arrays),
        "refreshes": [plain_data.encode_object(s, arrays) for s in trainer._schedules],
        "amp": _encode_amp(trainer, arrays),
        "snapshot": _encode_snapshot(trainer._control_variate, arrays),
    }
    return Saved(manifest, arrays)


def pickled(trainer: SVRGTrainer) -> bytes:
    """What `gluon.Trainer` would save."""
    return _updaters(trainer)[0].get_states(dump_optimizer=True)


def _updaters(trainer: SVRGTrainer) -> list[Any]:
    """All hold the same: those of the devices, or that of the store."""
    if trainer._kv_initialized and trainer._update_on_kvstore:
        return [trainer._kvstore._updater]
    return list(trainer._updaters)


def _description(parameter: Any) -> list[Any]:
    shape = None if parameter.shape is None else list(parameter.shape)
    return [parameter.name, shape, str(np.dtype(parameter.dtype)), _mxnet.is_trainable(parameter)]


def _encode_schedule(schedule: Any, arrays: list[np.ndarray]) -> Any:
    if plain_data.is_stateful(schedule):
        return plain_data.encode_object(schedule, arrays)
    return {"class": "function"} if callable(schedule) else float(schedule)


def _encode_amp(trainer: SVRGTrainer, arrays: list[np.ndarray]) -> Any:
    scaler = getattr(trainer, "_amp_loss_scaler", None)
    if scaler is None:
        return None
    return {
        "scaler": plain_data.encode_object(scaler, arrays),
        "scale": trainer._scale,
        "original_scale": trainer._amp_original_scale,
    }


def _encode_snapshot(held: ControlVariate | None, arrays: list[np.ndarray]) -> Any:
    if held is None:
        return None
    first = [row[0] for row in held.snapshot.weights]  # the same on all devices
    return {
        "weights": plain_data.encode(first, arrays),
        "full_grads": plain_data.encode([row[0] for row in held.full_grads], arrays),
        "states": plain_data.encode(held.snapshot.states, arrays),
        "in_objective": [bool(flag) for flag in held.in_objective],
        "stored": _encode_stored(held.stored, arrays),
    }


def _encode_stored(stored: StoredGradients | None, arrays: list[np.ndarray]) -> Any:
    if stored is None:
        return None
    together = [
        [np.stack([grad.asnumpy() for grad in over]) for over in zip(*rows)]
        for rows in zip(*stored.grads)
    ]  # per device and parameter, over all minibatches
    return {
        "grads": plain_data.encode(together, arrays),
        "counts": [list(counts) for counts in stored.counts],
        "seeds": stored.seeds,
        "scale": stored.scale,
        "prepared": stored.prepared,
    }


# --- from a file -------------------------------------------------------------------------------


def read(path: str | os.PathLike[str], trainer: SVRGTrainer) -> Saved:
    """Read a file completely and check it against a trainer.

    Raises
    ------
    ValueError
        If it is damaged, of another kind, or does not fit.
    """
    content = Path(path).read_bytes()
    try:
        saved = _parse(content)
        problems = list(_problems(saved, trainer))
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}. Nothing was changed.") from error
    if problems:
        raise ValueError(
            f"{path} does not fit this trainer: {'; '.join(problems)}. Nothing was changed."
        )
    return saved


def _parse(content: bytes) -> Saved:
    if checkpoint.is_own(content):
        return Saved(*checkpoint.parse(content))
    if not content.startswith(b"\x80"):
        what = "it is empty" if not content else "it is no file of states"
        raise ValueError(f"{what}, neither of SVRGTrainer nor of gluon.Trainer")
    return _of_gluon(unpickling.loads(content))


def _of_gluon(unpickled: Any) -> Saved:
    """The same form for what `gluon.Trainer` saves: the states and the optimizer."""
    if not (
        isinstance(unpickled, tuple)
        and len(unpickled) == 2
        and isinstance(unpickled[0], dict)
        and isinstance(unpickled[1], mx.optimizer.Optimizer)
    ):
        raise ValueError("it is a pickle, but not of the states of a gluon.Trainer")
    arrays: list[np.ndarray] = []
    states, optimizer = unpickled
    try:
        manifest = {
            "optimizer": plain_data.encode_object(optimizer, arrays),
            "states": plain_data.encode(states, arrays, "its states"),
            "snapshot": None,
        }
    except TypeError as error:
        raise ValueError(str(error)) from error
    return Saved(manifest, arrays)


def _problems(saved: Saved, trainer: SVRGTrainer) -> Iterator[str]:
    """Tell, in words, what does not fit."""
    manifest = saved.manifest
    if "parameters" in manifest:
        then, now = manifest["parameters"], [_description(p) for p in trainer._params]
        if len(then) != len(now):
            yield f"it is of {len(then)} parameters, and there are {len(now)}"
            return
        for number, (was, is_now) in enumerate(zip(then, now)):
            if not _fits(was[1], is_now[1]) or was[2] != is_now[2]:
                yield (
                    f"parameter {number} ({is_now[0]}) was {was[2]} {_shown(was[1])} and is "
                    f"{is_now[2]} {_shown(is_now[1])} here"
                )
            if manifest["snapshot"] is not None and was[3] != is_now[3]:
                words = ["without gradients", "with gradients"]
                yield f"parameter {number} ({is_now[0]}) was {words[was[3]]}, here it is not"
        yield from _stored_problems(manifest["snapshot"], trainer)
    yield from plain_data.differences(manifest["optimizer"], trainer._optimizer, "the optimizer")
    yield from _schedule_problems(manifest.get("schedule"), trainer)
    if manifest.get("amp") is not None and not hasattr(trainer, "_amp_loss_scaler"):
        yield "it has the state of a loss scaler: call amp.init_trainer(trainer) first"
    yield from _state_problems(saved, trainer)


def _stored_problems(snapshot: Any, trainer: SVRGTrainer) -> Iterator[str]:
    stored = (snapshot or {}).get("stored")
    devices = _mxnet.devices(trainer._params[0])
    if stored is not None and len(stored["counts"][0]) != len(devices):
        yield (
            f"its stored gradients are of {len(stored['counts'][0])} devices, and there are "
            f"{len(devices)} here (save after update_full_grads() without store=True)"
        )


def _schedule_problems(saved: Any, trainer: SVRGTrainer) -> Iterator[str]:
    if saved is None:
        return
    live = _encode_schedule(trainer._coefficient_schedule, [])
    was, is_now = (s["class"] if isinstance(s, dict) else "a number" for s in (saved, live))
    if was != is_now:
        yield f"the coefficient was {was} and is {is_now} here"


def _state_problems(saved: Saved, trainer: SVRGTrainer) -> Iterator[str]:
    """Compare the optimizer's states with those that it would make now."""
    states = plain_data.decode(saved.manifest["states"], saved.arrays)
    for index, state in states.items():
        if not (isinstance(index, int) and 0 <= index < len(trainer._params)):
            yield f"it has a state of parameter {index!r}, and there are {len(trainer._params)}"
            continue
        parameter = trainer._params[index]
        if _mxnet.has_data(parameter):
            weight = _mxnet.classic(_mxnet.data(parameter)[0])
            expected = _shapes(trainer._optimizer.create_state_multi_precision(index, weight))
            if _shapes(state) != expected:
                yield (
                    f"the optimizer's state of parameter {index} ({parameter.name}) is "
                    f"{_shapes(state)} and must be {expected}"
                )


def _shapes(state: Any) -> Any:
    if isinstance(state, (list, tuple)):
        return [_shapes(item) for item in state]
    if isinstance(state, mx.nd.NDArray):
        return f"{_mxnet.dtype_name(state)} {_shown(state.shape)}"
    return None if state is None else "a value"


def _fits(then: Any, now: Any) -> bool:
    """Whether a shape can be another, where parts of it are not known yet."""
    if then is None or now is None:
        return True
    return len(then) == len(now) and all(
        a == b or a in (0, -1, None) or b in (0, -1, None) for a, b in zip(then, now)
    )


def _shown(shape: Any) -> str:
    return "of unknown shape" if shape is None else str(tuple(shape))


# --- to a trainer ------------------------------------------------------------------------------


def assign_numbers(trainer: SVRGTrainer, saved: Saved) -> None:
    """Give a trainer what does not depend on the parameters."""
    manifest, arrays = saved
    plain_data.assign(manifest["optimizer"], arrays, trainer._optimizer)
    for name, value in manifest.get("counters", {"_inner_steps": 0}).items():
        setattr(trainer, name, value)
    for name, value in manifest.get("lock", {}).items():
        setattr(trainer._lock, name, value)
    schedule = manifest.get("schedule")
    if isinstance(schedule, dict):
        plain_data.assign({"attributes": {}, **schedule}, arrays, trainer._coefficient_schedule)
    elif schedule is not None:
        trainer._coefficient_schedule = schedule
    trainer._saved_schedules = list(manifest.get("refreshes", ()))
    for refresh in trainer._schedules:
        assign_schedule(trainer, refresh)
    amp = manifest.get("amp")
    if amp is not None:
        plain_data.assign(amp["scaler"], arrays, trainer._amp_loss_scaler)
        trainer._scale, trainer._amp_original_scale = amp["scale"], amp["original_scale"]


def assign_schedule(trainer: SVRGTrainer, refresh: Any) -> None:
    """Give a refresh schedule the attributes that were saved of one of its class."""
    for saved in trainer._saved_schedules:
        if saved["class"] == type(refresh).__name__:
            plain_data.assign(saved, [], refresh)
            trainer._saved_schedules.remove(saved)
            return


def assign_arrays(trainer: SVRGTrainer, saved: Saved) -> None:
    """Give a trainer, whose parameters and store are initialized, the rest.

    Raises
    ------
    ValueError
        If it does not fit, which could not be known before the parameters were initialized.
    """
    problems = list(_problems(saved, trainer))
    if problems:
        raise ValueError(f"The states that were loaded do not fit: {'; '.join(problems)}.")
    manifest, arrays = saved
    held = _decode_snapshot(trainer, manifest["snapshot"], arrays)
    for updater in _updaters(trainer):
        updater.states = plain_data.decode(manifest["states"], arrays)
        updater.states_synced = dict.fromkeys(updater.states, False)
    trainer._control_variate = held


def _decode_snapshot(
    trainer: SVRGTrainer, encoded: Any, arrays: list[np.ndarray]
) -> ControlVariate | None:
    if encoded is None:
        return None
    weights, full_grads, states = (
        plain_data.decode(encoded[name], arrays) for name in ("weights", "full_grads", "states")
    )
    snapshot = Snapshot(trainer._params, own=True)
    buffer = GradientBuffer(snapshot.buffers)
    means = [[grad.copy() for grad in row] for row in buffer.arrays]
    for value, targets in [*zip(weights, snapshot.weights), *zip(full_grads, means)]:
        for target in targets:
            _mxnet.classic(value).copyto(_mxnet.classic(target))
    for values, targets in zip(states, snapshot.states):
        for number, target in enumerate(targets):  # on more devices than before: the first
            value = values[number] if number < len(values) else values[0]
            _mxnet.classic(value).copyto(_mxnet.classic(target))
    stored = _decode_stored(snapshot, encoded.get("stored"), arrays)
    return ControlVariate(snapshot, means, buffer, encoded["in_objective"], stored)


def _decode_stored(
    snapshot: Snapshot, encoded: Any, arrays: list[np.ndarray]
) -> StoredGradients | None:
    if encoded is None:
        return None
    stored = StoredGradients(encoded["scale"])
    stored.counts = [tuple(counts) for counts in encoded["counts"]]
    # Not whether one was computed again and was the same: the data may have been shuffled anew.
    stored.seeds, stored.prepared = encoded["seeds"], encoded["prepared"]
    together = plain_data.decode(encoded["grads"], arrays)
    stored.grads = [
        [
            [_on_device_of(grad, values[number]) for values, grad in zip(rows, grads)]
            for rows, grads in zip(together, per_device(snapshot.buffers))
        ]
        for number in range(len(stored.counts))
    ]
    return stored


def _on_device_of(array: NDArray, value: np.ndarray) -> NDArray:
    return mx.nd.array(value, ctx=_mxnet.device_of(array), dtype=value.dtype)
