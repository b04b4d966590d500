"""A minibatch's gradient at weights beside the current ones, as one vector."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from .. import _mxnet
from .closure import Loss
from .columns import vector
from .estimate import differentiate
from .network import Network
from .points import Point


class Beside:
    """The gradient of one minibatch at any weights: a vector, the same on all workers.

    This overwrites the live gradients: use it inside `Network.grads_kept`.
    """

    def __init__(
        self, network: Network, closure: Callable[[], Loss], seed: int, workers: Any
    ) -> None:
        self._network, self._closure, self._seed, self._workers = network, closure, seed, workers
        self._point = Point.copied(network, frozen=False)
        self.differentiated = 0  # loss entries of this worker, over all gradients
        self.entries = 0.0  # of the minibatch, on all workers

    def gradient(self, weights: np.ndarray) -> np.ndarray:
        """The *mean* gradient over all loss entries of the minibatch, in float64."""
        network = self._network
        ends = np.cumsum([row[0].size for row in self._point.weights])[:-1]
        for row, piece in zip(self._point.weights, np.split(weights, ends)):
            for array in map(_mxnet.classic, row):
                array[:] = piece.reshape(array.shape)
        recorded, _ = differentiate(self._point, self._closure, (), self._seed, 1.0)
        self.differentiated += recorded.entries
        (self.entries,) = self._workers.sum_numbers([recorded.entries])
        network.sum_everywhere(network.live, self._workers.sum_arrays)
        return vector(network.live[0]) / max(self.entries, 1.0)
