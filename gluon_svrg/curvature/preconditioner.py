"""A preconditioner of a trainer: the controller, with the arrays of the parameters on the device.

The trainer asks it four things: is there something to measure in this step; what becomes of the
reduced gradient; may a refresh take this snapshot; and what follows from one.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from math import inf, prod
from typing import Any, Callable, Iterator, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .. import _arguments, _mxnet, saving
from ..passes import states
from ..passes.closure import Loss
from ..passes.columns import split, vector
from ..passes.estimate import gradient_at
from ..passes.full_pass import NOT_FINITE, FullGradient
from ..passes.method import Method
from ..passes.network import ParameterBuffers
from ..passes.points import ParameterValues
from ..passes.watch import WarnOnce
from ..prox import Prox
from .direction import LAG, SLOTS, Direction, HostDirection
from .nystrom import TINY, NystromApproximation, inverse_of
from .probe import Probe
from .proximal import Penalty, ProximalPoint
from .step_size import DEFAULT, StepSizeController
from .threads import one_thread

LEAST_STEPS, BEST_STEPS = 16, 32  # of an epoch
VECTORS = ("U", "z", "Q", "Y", "first", "rows", "ring", "last_proximal")  # of all weights, in rows
#: What a controller has of these kinds.
TUPLES: dict[str, Any] = {"P": NystromApproximation, "probe": Probe}
#: The controller's attributes that had other names in files of version 0.6.
NAMES_IN_0_6 = {
    "probe": "job",
    "probes": "measurements",
    "noise_budget": "trust",
    "rollbacks": "backs",
    "L_at_reset": "before",
    "secant_sum": "along",
    "loss_increases": "rises",
    "epoch_length": "planned",
    "resketch_at": "again",
}

LEFT_OUT = (
    "The gradient of a mini-batch is not finite (NaN or infinity) or too large, and was left out. "
    "Are the data finite? Further ones are left out without a warning; soon after four in a row "
    "the weights go back to the snapshot or the start."
)
FEW_STEPS = (
    "An epoch has {steps:.3g} steps, and a preconditioner needs {least} or more to learn the "
    "curvature. Use about {best} loss entries per step, a 32nd of the data."
)
NEEDS_COEFFICIENT = (
    "A preconditioner needs coefficient=1: it learns from whole corrections. Leave one of them out."
)
UNITS = (
    "The curvature along some weights is below the rounding of {dtype}, so they move slowly. Are "
    "there inputs in units of very different sizes? Standardize them: subtract the mean of each, "
    "and divide by its standard deviation. Or cast the network and the data to float64."
)


@dataclass(frozen=True)
class Nystrom:
    """A preconditioner that learns the curvature of the loss from gradients [1]_.

    An `SVRGTrainer` with one sets its learning rate and momentum itself. It measures products with
    the Hessian, as differences of gradients of the closure. In the first steps it takes eight
    gradients of two mini-batches. After the first refresh it takes ``rank + 1`` gradients of each
    of as many mini-batches as make a quarter of a data pass or more, and then eight of two again.
    It measures again after slow epochs, the more seldom the later, and after the third refresh if
    the first one came before any step.

    Parameters
    ----------
    rank : int, default 50
        How many directions it measures, at most: fewer where there are few weights or loss entries.
        It keeps up to four times as many vectors of all weights on the device, in their dtype, and
        three times as many on the host, in float64; five times while it measures. With penalties
        all are on the host. With 0 it sets the rate and the momentum alone.

    Raises
    ------
    TypeError, ValueError
        If ``rank`` is no whole number, or is negative.

    References
    ----------
    .. [1] Z. Frangella, P. Rathore, S. Zhao and M. Udell, "PROMISE: Preconditioned Stochastic
       Optimization Methods by Incorporating Scalable Curvature Estimates", JMLR 25(346), 2024.

    Examples
    --------
    >>> from gluon_svrg import Nystrom
    >>> Nystrom(rank=20)
    Nystrom(rank=20)
    """

    rank: int = 50

    def __post_init__(self) -> None:
        _arguments.whole(self.rank, "rank", 0)


class Step(NamedTuple):
    """A step whose direction is known."""

    rise_of_penalty: float  # above that of the snapshot
    entries: Any  # the loss entries of its mini-batch: a number, or an array with one first
    most: Any  # the most of any since the refresh
    proximal: Any  # z and (x - z) / t; None without penalties, a direction or a rate


class Preconditioner:
    """The controller of a `Nystrom`, and what it needs to know of a trainer's parameters."""

    def __init__(self, method: Any, rank: int, operators: Any) -> None:
        self.controller, self._method, self._operators = StepSizeController(rank), method, operators
        self._direction: Any = None  # known when it is bound
        # The weights before the first step, until a refresh
        self.start: ParameterValues | None = None
        self.per_sample: float | None = None  # loss entries of a sample; known at the first update
        self._pending: list[Step] = []  # the last steps, not read yet
        self._most: Any = 0.0  # the most loss entries of a mini-batch since the refresh
        self._last_proximal: Any = None  # that of the last step with one
        self._kept: dict[Any, Any] = {}  # by parameter: what is 0, and 1 for all else on a device
        self._snapshot: Any = None  # its weights, the slope there with the decay, and its penalty
        self._proximal_point: Any = None  # in the metric of P, with penalties
        self._inverse: Any = None  # a function: P^-1 times a vector
        self._uploaded: Any = None  # the P that the direction has
        self._rounding = 0.0  # of squared moves
        self._wd: float | None = None  # the optimizer's, during an update
        self._warn_once = WarnOnce()  # shared by all copies

    _network = property(lambda self: self._method.network)
    _optimizer = property(lambda self: self._method.optimizer)

    @property
    def _sizes(self) -> list[int]:
        """Of the trainable parameters."""
        return [prod(p.shape) for p in states.parameters(self._network).values()]

    def bind(self, method: Any) -> None:
        """Bind to new arrays of the parameters; raise if they cannot be one vector."""
        network, self._method = method.network, method
        if method.point is None:  # all that was learned belongs to other arrays
            fresh = Preconditioner(method, self.controller.rank, self._operators)
            vars(self).update(vars(fresh), _warn_once=self._warn_once)
        self._eps = float(np.finfo(_mxnet.dtype_of(network.trainable[0])).eps)
        self.penalty = Penalty(self._operators, network.trainable)
        self._set_scale(self.per_sample)
        if method.point is None:
            self.controller.begin(len(self.decays))

    def _set_scale(self, per_sample: float | None) -> None:
        """Divide decays and penalties, which belong to a sample, by the loss entries of one."""
        self.decays = self._checked_decays(per_sample)
        self.penalty.factor = 1 / (per_sample or 1.0)
        kind = HostDirection if self.penalty else Direction
        self._direction = kind(self._network, self.decays)
        self._forget_steps()

    def _checked_decays(self, per_sample: float | None) -> np.ndarray:
        """The weight decay of each weight; raise if the parameters cannot be one vector."""
        _check_parameters(self._network)
        decays = [self._optimizer.wd * p.wd_mult for p in self._network.trainable]
        wide = np.asarray(decays, "float32").astype("float64") / (per_sample or 1.0)
        return np.repeat(wide, self._sizes)

    def prepare_refresh(self, draws: bool) -> tuple[ParameterValues | None, bool]:
        """As `Method.prepare_refresh`: begin inside the bounds, and check the weight decay."""
        if self.origin is None:
            self._settle(None)
        if (self._checked_decays(self.per_sample) != self.decays).any():
            raise ValueError(
                "The weight decay has changed, and with it the loss whose curvature the "
                "preconditioner knows. Call discard_snapshot() after such a change."
            )
        if self._snapshot is None:
            return self.start, self.start is not None
        # Closures that draw random numbers, under the lock, have other losses at each refresh.
        return self.origin, draws or self.controller.is_refused or self.controller.data_changed

    def _upload(self) -> None:
        """Give the direction what was learned, and the snapshot."""
        rows: dict[str, Any] = {}
        P = self.controller.P
        root = P.root() if P is not None and self.penalty else None
        self._proximal_point = ProximalPoint(root, self.penalty)
        self._inverse = inverse_of(P)
        if P is not None and not self.penalty:
            sign, T = P.inverse_root()
            rows = {"beta": 1 / P.rest, "T": T, "back": sign * T.T}
        self._snapshot, self.controller.squared = None, None
        if self._method.point is not None:
            s, mu = self._weights(self._method.point), self._method.mean.vector()
            slope = mu + self.decays * s
            solved_slope = self._inverse(slope)
            rows.update(s=s, mu=mu, slope=slope, solved_slope=solved_slope)
            self._snapshot = s, slope, self.penalty.value(s)
            self._rounding = (DEFAULT.rounding * self._eps) ** 2 * float(s @ s)
        self._direction.upload(**rows)
        self._uploaded = P  # last: after an interrupt it is uploaded again

    def _weights(self, there: Any) -> np.ndarray:
        """The weights of a network or of a point. Waits for them."""
        return vector(row[0] for row in there.weights)

    def _objective(self, mean_loss: float, there: Any) -> float:
        """The mean loss with the weight decay and the penalties."""
        with np.errstate(over="ignore", invalid="ignore"):  # of weights far away
            w = self._weights(there)
            return mean_loss + float(self.decays @ w**2) / 2 + self.penalty.value(w)

    # --- is there something to measure in this step? ---------------------------------------------

    def measure(self, closure: Callable[[], Loss], seed: int, workers: Any) -> int:
        """Measure with a mini-batch at the origin's weights, inside `ParameterBuffers.grads_kept`.

        It returns the number of loss entries that were differentiated.
        """
        network, controller = self._network, self.controller
        if self.start is None and not controller.refreshes:
            self._settle(None)
            self.start = ParameterValues.copied(network, frozen=True)
        point = ParameterValues.copied(network, frozen=False)
        differentiated = 0

        def mean_gradient(weights: np.ndarray) -> tuple[np.ndarray, float]:
            nonlocal differentiated
            for row, piece in zip(point.weights, split(weights, self._sizes)):
                for array in map(_mxnet.classic, row):
                    array[:] = piece.reshape(array.shape)
            recorded, _ = gradient_at(point, closure, (), seed, 1.0)
            differentiated += recorded.entries
            (entries,) = workers.sum_numbers([recorded.entries])
            network.sum_everywhere(network.grads, workers.sum_arrays)
            return vector(network.grads[0]) / max(entries, 1.0), entries

        weights = self._weights(self.origin)  # not where steps may have led away
        if controller.measure(mean_gradient, weights, self.decays, self._eps):
            self._warn_once(UNITS, dtype=_mxnet.dtype_of(network.trainable[0]))
        if controller.P is not self._uploaded:
            self._forget_steps()
        return differentiated

    def _forget_steps(self) -> None:
        """P or the objective has changed, and with it the products of the last steps."""
        self._pending = []
        self._upload()

    def read(self, *, is_refresh: bool = False) -> None:
        """Learn from all steps but the last `LAG`; from all at a refresh, or in short epochs."""
        if self.controller.P is not self._uploaded:  # after an interrupt
            self._forget_steps()
        lag = 0 if is_refresh or 0 < self.controller.epoch_length < LEAST_STEPS else LAG
        while len(self._pending) > lag:
            step, *self._pending = self._pending
            steps_before = len(self._pending) + 1
            sums = self._direction.sums(steps_before)
            if step.rise_of_penalty:
                sums = sums._replace(slope=sums.slope + step.rise_of_penalty)
            if self.controller.is_outlier(sums):
                d = _numbers(self._direction.d(steps_before))
                self.controller.learn(d.astype("float64"), sums, self._eps)
                self._forget_steps()
            else:
                self.controller.read(sums, self._rounding)
                if self.controller.failures:
                    self._warn_once(LEFT_OUT)

    def roll_back(self) -> None:
        """Slow down; the weights are those of the snapshot again, or of the start."""
        self._pending, self._last_proximal = [], None
        self.controller.roll_back()

    # --- what becomes of the reduced gradient? ---------------------------------------------------

    def apply(self, entries: float | NDArray, scale: float, is_skipped: bool) -> Step:
        """Overwrite V by the direction, in the reduced gradients of so many loss entries.

        Both are scaled. AMP may skip a step without a direction.
        """
        bound = self.controller.step_bound
        if self.penalty:
            first = float(_numbers(entries)[0]) if isinstance(entries, NDArray) else entries
            with one_thread():
                return self._proximal_step(first, scale, bound, is_skipped)
        if isinstance(entries, NDArray):
            most = mx.nd.maximum(entries[:1], self._most)
        else:
            most = max(entries, self._most)
        self._direction.apply(entries, most, scale, bound, is_skipped)
        return Step(0.0, entries, most, None)

    def _proximal_step(self, entries: float, scale: float, bound: float, is_skipped: bool) -> Step:
        """As `apply`, with penalties: the direction is that of the proximal gradient."""
        controller, last, most = self.controller, self._last_proximal, max(entries, self._most)
        w, proximal = self._direction.weights(), None
        # Before the gradient is waited for
        rise = self.penalty.value(w) - (self._snapshot[2] if self._snapshot else 0.0)
        about = w, self._inverse, entries, most, scale, bound, is_skipped
        direction, factor = self._direction.compute(*about)
        if factor and controller.rate:
            rate = float(np.float32(controller.rate))  # as the optimizer has it
            x, step = w - rate * direction, rate * factor
            guess = w if last is None else x - step * last[1]
            in_P = step / controller.P.least if controller.P is not None else step
            z = self._proximal_point(x, in_P, guess)
            direction, proximal = (w - z) / rate, (z, (x - z) / step)
        self._direction.replace(direction * scale)
        return Step(rise, entries, most, proximal)

    def before_update(self, step: Step | None, scale: float) -> None:
        """Set the optimizer's rate and momentum: what it gets is the whole direction of a mean."""
        optimizer = self._optimizer
        if self.per_sample is None and step is not None:
            self._learn_scale(step, scale)
        self._wd = optimizer.wd if self._wd is None else self._wd  # after an interrupt
        self.set_rate_and_momentum()
        optimizer.rescale_grad, optimizer.wd = 1 / scale, 0.0

    def after_update(self) -> None:
        """Give the optimizer its weight decay back, also where the update has failed."""
        if self._wd is not None:
            self._optimizer.wd, self._wd = self._wd, None

    def set_rate_and_momentum(self) -> None:
        """Those of the next step."""
        self._optimizer.lr, self._optimizer.clip_gradient = self.controller.rate, None
        self._optimizer.momentum = self.controller.momentum

    def _learn_scale(self, step: Step, scale: float) -> None:
        """From the first update, before a weight moves: the batch size says what a sample is."""
        entries = float(_numbers(step.entries)[0])
        per_sample = entries * self._optimizer.rescale_grad * scale
        if not per_sample:
            return
        if abs(per_sample - 1) < 1e-6:
            self.per_sample = 1.0
            return
        controller, point = self.controller, self._method.point
        controller.start_over(len(self.decays))
        self._set_scale(per_sample)
        if point is not None:
            controller.loss = controller.first_loss = self._objective(controller.mean_loss, point)
        self.per_sample = per_sample  # last: after an interrupt the next update tells it again

    def commit(self, step: Step) -> None:
        """A step was made: keep what it tells, once; an interrupt can repeat this."""
        if any(step is each for each in self._pending):
            return
        direction, controller = self._direction, self.controller
        proximal = self._last_proximal if step.proximal is None else step.proximal
        self._settle(step.proximal)
        slot = (direction.slot + 1) % SLOTS  # the next step compares with this one
        new = [*self._pending, step], controller.steps + 1, step.most, proximal, slot
        # In one line, as an interrupt comes between lines.
        self._pending, controller.steps, self._most, self._last_proximal, direction.slot = new

    def _settle(self, proximal: Any) -> None:
        """Put weights inside bounds; penalized ones become 0 where this z and the last one are.

        With momentum, the weights are beside z.
        """
        last, zeros = self._last_proximal, None
        if proximal is not None and last is not None:
            zeros = (proximal[0] == 0) & (last[0] == 0)
        for part in self.penalty.parts:
            weights = list(map(_mxnet.classic, _mxnet.data(part.parameter)))
            if part.operator.is_projection:
                for weight in weights:
                    part.operator(weight, 0.0).copyto(weight)
            elif zeros is not None and zeros[part.place].any():
                mask = zeros[part.place]
                was, kept = self._kept.get(part.parameter, (None, []))
                if not np.array_equal(mask, was):
                    rest = (~mask).reshape(part.shape).astype(part.dtype)
                    kept = [_mxnet.to_ndarray(rest, _mxnet.device_of(w)) for w in weights]
                    self._kept[part.parameter] = mask, kept
                for weight, rest in zip(weights, kept):
                    weight *= rest

    # --- may a refresh take this snapshot? -------------------------------------------------------

    @property
    def origin(self) -> ParameterValues | None:
        """Where a rollback goes: the snapshot, or the start; None if there is neither."""
        return self._method.point or self.start

    def copied(self) -> Preconditioner:
        """A copy for a refresh, which changes nothing until all of it is known."""
        new = copy(self)
        new.controller, new._direction = copy(self.controller), copy(self._direction)
        new.controller.secants = [*self.controller.secants]  # the only list that grows in place
        return new

    def accepts(self, full: FullGradient) -> bool:
        """Whether a refresh may take a snapshot; False if the weights must go back.

        A rise of the loss is one on the same data, with the same random numbers::

            before the first snapshot      above the loss at the start
            the data are known to be new   never: the weights as they are become the snapshot
            closures draw, was refused     never
            closures draw                  above that at the snapshot now, by a part of its fall
            else                           above that at the snapshot
        """
        controller, point, is_finite = self.controller, self.origin, np.isfinite(full.norm)
        if not is_finite:
            has_moved = point and (self._weights(self._network) != self._weights(point)).any()
            if not (has_moved and full.is_data_finite):
                raise FloatingPointError(NOT_FINITE)
        if point is None:
            return True  # there is no way back
        self.read(is_refresh=True)
        if self._snapshot is None and full.compared_loss is not None:
            controller.first_loss = self._objective(full.compared_loss, point)
            controller.mean_loss = full.compared_loss
        if controller.has_diverged or not is_finite:
            return False
        loss, known, most = self._objective(full.mean_loss, self._network), controller.loss, 0.0
        controller.data_changed = False
        if self._snapshot is None:
            known = controller.first_loss
        else:
            changed = full.all_entries != (controller.entries or full.all_entries)
            if full.compared_loss is not None:
                now = self._objective(full.compared_loss, point)
                changed |= not full.draws and abs(now - known) > DEFAULT.same_data * abs(known)
                known = now
            if changed or (full.draws and controller.is_refused):
                controller.data_changed = changed
                return True
            if full.draws:
                fall = controller.first_loss - controller.loss  # infinite on new data
                most = DEFAULT.drawn_rise * fall if fall < inf else 0.0
        rounding = DEFAULT.rounding * max(self._eps, full.eps) * abs(known)
        return loss <= known + max(rounding, most)

    # --- what follows from a refresh? ------------------------------------------------------------

    def refreshed(self, method: Any, full: FullGradient) -> Preconditioner:
        """What follows from a new snapshot of a method; this object stays as it is."""
        new = self.copied()
        new.start, new._pending, controller, new._method = None, [], new.controller, method
        new._upload()
        loss, (s, slope, _) = self._objective(full.mean_loss, method.point), new._snapshot
        ratio = None
        if self._snapshot is None:
            if self.start is None:
                controller.first_loss = loss
            if self.start is None or (self._weights(self.start) == s).all():
                controller.resketch_at = DEFAULT.resketch_at
        elif controller.data_changed:
            controller.first_loss, controller.loss = inf, loss
        else:
            if controller.first_loss == inf:
                controller.first_loss = controller.loss
            last, last_slope, _ = self._snapshot
            if (s - last) @ (s - last) > self._rounding:  # otherwise nothing has been learned
                slopes = (
                    float(self.penalty.least_subgradient(w, g) @ (s - last))
                    for w, g in ((s, slope), (last, last_slope))
                )
                ratio = next(slopes) / min(next(slopes), -TINY)
        controller.loss = min(loss, controller.loss, controller.first_loss)
        controller.mean_loss = full.mean_loss
        controller.entries, controller.is_refused = full.all_entries, False
        controller.refresh(len(s), ratio)
        return new

    def end_epoch(self) -> dict[str, float]:
        """Count steps anew, after a refresh; a part of a line of `history`."""
        controller = self.controller
        rollbacks, controller.rollbacks = controller.rollbacks, 0
        controller.epoch_length, controller.steps = controller.steps, 0
        most, self._most = self._most, 0.0
        most = float(most.asscalar() if isinstance(most, NDArray) else most)
        if most and controller.entries and controller.entries < LEAST_STEPS * most:
            steps, best = controller.entries / most, max(controller.entries // BEST_STEPS, 1)
            self._warn_once(FEW_STEPS, steps=steps, least=LEAST_STEPS, best=best)
        self.set_rate_and_momentum()
        return {
            "learning_rate": controller.rate,
            "momentum": controller.momentum,
            "mean_loss": controller.mean_loss,
            "objective": min(controller.loss, controller.first_loss),
            "curvature": controller.L,
            "noise": controller.N,
            "went_back": rollbacks,
        }

    # --- a part of a file ------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """All that was learned, with vectors by parameter; None before the first pass."""
        if self._direction is None:
            return None
        start, most = self.start, self._most
        pending = [
            {"products": _numbers(self._direction.products(n)), "rise": step.rise_of_penalty}
            for n, step in zip(range(len(self._pending), 0, -1), self._pending)
        ]
        ring = np.stack([_numbers(self._direction.d(n + 1)) for n in range(SLOTS - 1)])
        return {
            **{name: self._saved(name, value) for name, value in vars(self.controller).items()},
            "pending": pending,
            "ring": self._saved("ring", ring if self._snapshot else None),
            "start": start and states.point_state(self._network, start),
            "per_sample": self.per_sample,
            "most": most.asnumpy() if isinstance(most, NDArray) else most,
            "last_proximal": self._saved("last_proximal", self._last_proximal),
        }

    def _saved(self, name: str, value: Any) -> Any:
        """A value as plain data, with vectors in pieces by parameter."""
        if isinstance(value, (NystromApproximation, Probe)):
            return {key: self._saved(key, each) for key, each in value._asdict().items()}
        if name not in VECTORS or value is None:
            return value
        return states.by_number(self._network, split(np.asarray(value), self._sizes))

    def _restored(self, name: str, value: Any) -> Any:
        """The inverse of `_saved`; an exception where that cannot be."""
        if isinstance(value, saving.ByParameter):
            return np.concatenate(states.in_order(self._network, value), axis=-1)
        if isinstance(value, dict):
            return TUPLES[name](**{key: self._restored(key, each) for key, each in value.items()})
        if isinstance(value, np.ndarray):
            return np.array(value) if value.ndim else value.item()
        return value

    def _learned(self, state: dict[str, Any]) -> StepSizeController:
        """The controller of a state; an exception where that cannot be."""
        controller = StepSizeController(self.controller.rank)
        for name in vars(controller):
            setattr(controller, name, self._restored(name, state[name]))
        return controller

    def problems(self, state: dict[str, Any]) -> Iterator[str]:
        """Tell why a state cannot be assigned; so does an exception, as where a part is missing."""
        if not all(map(_mxnet.has_data, self._network.parameters)):
            return  # it is asked again when they are initialized
        state = _of_this_version(state)
        self._learned(state)
        for each in state["pending"]:
            _products(each)
        for name in ("ring", "per_sample", "most", "last_proximal"):
            self._restored(name, state[name])
        if state["start"] is not None:
            parameters = states.parameters(self._network)
            yield from saving.array_problems(state["start"]["weights"], "start", parameters)

    def assign(self, state: dict[str, Any]) -> None:
        """Take over a state, after that of the method."""
        state = _of_this_version(state)
        self.controller, start = self._learned(state), state["start"]
        self.start = start and states.to_point(self._network, **start)
        self.per_sample = state["per_sample"]
        self._set_scale(self.per_sample)
        self.controller.squared = state["squared"]
        if state["ring"] is not None:
            for n, d in enumerate(self._restored("ring", state["ring"])):
                self._direction.d(n + 1)[:] = d
        most = state["most"]
        self._most = mx.nd.array(most, dtype=most.dtype) if isinstance(most, np.ndarray) else most
        self._last_proximal = self._restored("last_proximal", state["last_proximal"])
        self._pending = [Step(each["rise"], None, None, None) for each in state["pending"]]
        for n, each in enumerate(reversed(state["pending"])):
            products = _products(each)
            self._direction.products(n + 1)[: len(products)] = products
        self.set_rate_and_momentum()


def _numbers(value: Any) -> np.ndarray:
    """The numbers of an array of MXNet or NumPy, or a number, as a vector. Waits for them."""
    return np.ravel(value.asnumpy() if isinstance(value, NDArray) else value)


def _products(step: dict[str, Any]) -> np.ndarray:
    """The products of a saved step as `Sums` has them; version 0.6 had one or eight."""
    flat = np.ravel(step["products"])
    order = {1: [0], 5: [0, 1, 2, 3, 4], 8: [0, 4, 5, 6, 3]}[flat.size]
    return flat[order]


def _of_this_version(state: dict[str, Any]) -> dict[str, Any]:
    """A state with the names of this version, and what version 0.6 had not."""
    if "job" not in state:
        return state
    new = {
        "ring": state["last_d"],
        "pending": [{"products": products, "rise": 0.0} for products in state["pending"]],
        "per_sample": 1.0,
        "most": 0.0,
        "last_proximal": None,
    }
    new.update({name: state[was] for name, was in NAMES_IN_0_6.items()})
    return {**vars(StepSizeController(0)), **state, **new}


class Preconditioned(Method):
    """What a preconditioner changes of SVRG: a base before that class."""

    updates_every_step = replaces_grads = needs_closure = sets_rate = True

    def __init__(self, coefficient: Any, preconditioner: Nystrom) -> None:
        super().__init__(coefficient)  # type: ignore[call-arg]
        if not isinstance(preconditioner, Nystrom):
            kind = type(preconditioner).__name__
            raise TypeError(f"preconditioner must be a Nystrom, as in Nystrom(), got {kind}.")
        self.preconditioner = Preconditioner(self, preconditioner.rank, {})
        self.settings = self.file_signature = (repr(preconditioner),)

    def check_arguments(self, trainer: str, optimizer: Any, settings: Any, compressed: Any) -> None:
        """Raise unless the preconditioner can set rate and momentum of the optimizer."""
        cls, given = _mxnet.class_of(optimizer), dict(settings or {}, compression_params=compressed)
        if cls not in _mxnet.PLAIN_OPTIMIZERS:
            raise ValueError(
                f"A preconditioner needs the optimizer 'nag' or 'sgd', got {cls.__name__}: others "
                "may scale the direction once more."
            )
        default = cls()
        for name, attribute in (("learning_rate", "lr"), ("momentum", "momentum")):
            own = getattr(optimizer, attribute, None)
            if name in given or own not in (None, getattr(default, attribute)):
                raise ValueError(f"A preconditioner sets the {name} itself. Leave {name} out.")
        for name in ("lr_scheduler", "clip_gradient", "compression_params"):
            if given.get(name) or getattr(optimizer, name, None):
                raise ValueError(
                    f"A preconditioner does not work with {name}. Leave one of them out."
                )
        self.check_coefficient(self.coefficient.state()["schedule"])

    def take_operators(self, operators: Any) -> Any:
        """Let penalties and bounds be a part of the direction."""
        for operator in operators.values():
            if type(operator).value is Prox.value:
                operator.value(None)  # raises, unless it is a projection
        self.preconditioner = Preconditioner(self, self.preconditioner.controller.rank, operators)
        self.preconditioner.set_rate_and_momentum()  # without a momentum, its states do not fit
        return {}

    def check_coefficient(self, value: Any) -> None:
        """Raise a ValueError for another coefficient than 1."""
        if value != 1:
            raise ValueError(NEEDS_COEFFICIENT)

    def check_rate_is_free(self) -> None:
        """Raise a RuntimeError: the learning rate is not the user's."""
        raise RuntimeError(
            "The preconditioner sets the learning rate, anew at each step. Leave "
            "set_learning_rate() out, or the preconditioner."
        )

    def terms(self, batch_index: int | None, rows: dict[int, Any]) -> Any:
        """As for SVRG; while a refused refresh has left no table, from two gradients."""
        if self.table is None and self.preconditioner.controller.is_refused:
            batch_index = None
        return super().terms(batch_index, rows)

    def prepare_refresh(self, draws: bool) -> tuple[ParameterValues | None, bool]:
        return self.preconditioner.prepare_refresh(draws)

    def accepts(self, full: FullGradient) -> bool:
        self.preconditioner = self.preconditioner.copied()
        return self.preconditioner.accepts(full)

    def refuse(self) -> None:
        """Forget the table, which may be of other mini-batches."""
        self.table, self.taken_at = None, None
        self.preconditioner._method, self.preconditioner.controller.is_refused = self, True

    def bind(self) -> None:
        super().bind()
        self.preconditioner.bind(self)

    def discard(self) -> None:
        """Forget the snapshot, and what the preconditioner has learned."""
        super().discard()
        self.take_operators(self.preconditioner._operators)

    def refresh(self, full: FullGradient) -> None:
        super().refresh(full)
        self.preconditioner = self.preconditioner.refreshed(self, full)

    def end_epoch(self) -> dict[str, float]:
        return self.preconditioner.end_epoch()

    def next_state(self, pending: Any, scale: float, entries: float | NDArray) -> Any:
        """Replace the reduced gradients by the direction; what was learned from them."""
        return self.preconditioner.apply(entries, scale, pending.is_scaled)

    def before_update(self, step: Step | None, scale: float) -> None:
        self.preconditioner.before_update(step, scale)

    def after_update(self) -> None:
        self.preconditioner.after_update()

    def moved(self, pending: Any) -> None:
        """Keep what was learned; an interrupt can repeat this."""
        self.preconditioner.commit(pending.next_state)


def _check_parameters(network: ParameterBuffers) -> None:
    """Raise if the gradients of all parameters cannot be one vector with one rate."""
    dtypes = sorted({_mxnet.dtype_of(p) for p in network.trainable})
    if dtypes not in (["float32"], ["float64"]):
        raise TypeError(
            "A preconditioner needs parameters of one dtype, float32 or float64, got "
            f"{' and '.join(dtypes)}. Cast the network, or leave the preconditioner out."
        )
    for parameter in network.trainable:
        if parameter.lr_mult != 1 or _mxnet.is_sparse(parameter):
            raise ValueError(
                f"{_mxnet.name_of(parameter)} is sparse or has an lr_mult, and a preconditioner "
                "moves all parameters together. Change that, or leave the preconditioner out."
            )
