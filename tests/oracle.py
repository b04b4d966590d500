"""The methods in NumPy and float64, straight from the formulas: slow and obvious.

A gradient function takes the weights (a list of arrays) and a minibatch, and returns the *sum* of
the gradients over the loss entries, with their number. Every method estimates on that scale,

    v = a g + b r + k c m

with g at the current weights, r at the reference, both sums over the c entries of the minibatch,
and m a mean per entry. There is only one device and worker: sums of several are added before
anything moves. Factors that MXNet's users set are rounded to float32; all else is float64.
"""

import numpy as np


def rounded(factor):
    return np.float64(np.float32(factor))


def copied(arrays):
    return [np.array(array, dtype=np.float64) for array in arrays]


class Method:
    """The base of all methods; by itself, the plain optimizer."""

    def __init__(self, gradient, weights):
        self.gradient = gradient
        self.weights = copied(weights)  # the optimizer changes them in place
        self.reference = None  # the weights where r is computed
        self.mean = None  # m

    def refresh(self, batches):
        """Start over: the current weights are the reference, m the mean gradient over `batches`."""
        results = [self.gradient(self.weights, batch) for batch in batches]
        entries = sum(count for _, count in results)
        self.mean = [sum(parts) / entries for parts in zip(*(grad for grad, _ in results))]
        self.reference = copied(self.weights)

    def estimate(self, batch, row=None):
        """Return v of one minibatch; nothing changes."""
        return self.gradient(self.weights, batch)[0]

    def compared(self, batch, share=1.0):
        """Return ``g - share (r - c m)``, with r at the reference; without one, g."""
        grad, count = self.gradient(self.weights, batch)
        if self.mean is None:
            return grad
        before, _ = self.gradient(self.reference, batch)
        return [g - share * (r - count * m) for g, r, m in zip(grad, before, self.mean)]

    def advance(self, total, batches, rows):
        """Update the method's state; return the gradient for the optimizer.

        `total` is the sum of the estimates of `batches`. The weights have not moved yet.
        """
        return total

    def step(self, optimizer, *batches, rows=None, batch_size=None):
        """One update, from one minibatch or from several (micro-batches, or one per worker)."""
        rows = [None] * len(batches) if rows is None else rows
        estimates = [self.estimate(batch, row) for batch, row in zip(batches, rows)]
        total = [sum(parts) for parts in zip(*estimates)]
        grads = self.advance(total, batches, rows)
        optimizer.step(self.weights, grads, batch_size or self.entries(batches))

    def entries(self, batches):
        return sum(self.gradient(self.weights, batch)[1] for batch in batches)


class SVRG(Method):
    """Johnson and Zhang 2013; with a coefficient below 1, Yin et al. 2025."""

    def __init__(self, gradient, weights, coefficient=1.0):
        super().__init__(gradient, weights)
        self.coefficient = rounded(coefficient)

    def estimate(self, batch, row=None):
        return self.compared(batch, self.coefficient)


class SARAH(Method):
    """Nguyen et al. 2017. With a refresh every few steps it is SPIDER, by a coin it is PAGE."""

    def estimate(self, batch, row=None):
        return self.compared(batch)

    def advance(self, total, batches, rows):
        if self.mean is not None:
            self.mean = [v / self.entries(batches) for v in total]
            self.reference = copied(self.weights)
        return total


class STORM(Method):
    """Cutkosky and Orabona 2019; `mixing` is the share of the fresh gradient."""

    def __init__(self, gradient, weights, mixing=0.1):
        super().__init__(gradient, weights)
        self.mixing = rounded(mixing)

    def estimate(self, batch, row=None):
        return self.compared(batch, 1 - self.mixing)

    def advance(self, total, batches, rows):
        self.mean = [v / self.entries(batches) for v in total]
        self.reference = copied(self.weights)
        return total


class MARS(Method):
    """Yuan et al. 2024, exact (two gradients per step) or approximate (one)."""

    def __init__(
        self, gradient, weights, gamma=0.025, beta=0.95, clip=1.0, exact=True, include_vectors=False
    ):
        super().__init__(gradient, weights)
        gamma, beta = rounded(gamma), rounded(beta)
        self.scale = gamma * beta / (1 - beta)
        self.clip, self.exact = clip, exact
        self.treated = [include_vectors or np.ndim(w) > 1 for w in weights]

    def estimate(self, batch, row=None):
        grad, _ = self.gradient(self.weights, batch)
        if self.reference is None or not self.exact:  # the first step, or m is subtracted later
            return grad
        return self.leapt(grad, self.gradient(self.reference, batch)[0])

    def leapt(self, grad, before):
        return [
            (1 + self.scale) * g - self.scale * r if treated else g
            for g, r, treated in zip(grad, before, self.treated)
        ]

    def advance(self, total, batches, rows):
        count = self.entries(batches)
        grads, before = total, self.mean
        if not self.exact:  # m is the mean gradient of the previous step
            self.mean = [g / count for g in grads]
            if before is not None:
                total = self.leapt(grads, [count * m for m in before])
        self.reference = copied(self.weights)
        return [self.clipped(v, count) if treated else v for v, treated in zip(total, self.treated)]

    def clipped(self, total, count):
        """The mean estimate of a tensor has at most the norm `clip`."""
        norm = np.linalg.norm(total / count)
        return total if self.clip is None or norm <= self.clip else total * (self.clip / norm)


class SAGA(Method):
    """Defazio et al. 2014, with a table of the gradients of minibatches, one row for each.

    Any key can name a row, such as ``(worker, index)``. An unvisited row is zero, and the mean of
    the table is over the entries of visited rows.
    """

    def __init__(self, gradient, weights):
        super().__init__(gradient, weights)
        self.table = {}  # the gradients, each a sum over the entries of its row
        self.seen = 0  # N, the number of entries of all rows
        self.mean = [np.zeros_like(w) for w in self.weights]

    def refresh(self, batches, rows=None):
        super().refresh(batches)
        rows = range(len(batches)) if rows is None else rows
        self.table = {row: self.gradient(self.weights, b)[0] for row, b in zip(rows, batches)}
        self.seen = self.entries(batches)

    def estimate(self, batch, row=None):
        grad, count = self.gradient(self.weights, batch)
        before = self.table.get(row, [0.0] * len(grad))
        return [g - r + count * m for g, r, m in zip(grad, before, self.mean)]

    def advance(self, total, batches, rows):
        assert len(set(rows)) == len(rows), "a row moves once an update"
        count, seen = self.entries(batches), self.seen
        for row, batch in zip(rows, batches):
            if row not in self.table:
                self.seen += self.entries([batch])
            self.table[row] = self.gradient(self.weights, batch)[0]
        self.mean = [(seen * m + v - count * m) / self.seen for v, m in zip(total, self.mean)]
        return total


class SAG(SAGA):
    """Le Roux et al. 2012: the optimizer gets the mean of the table."""

    def advance(self, total, batches, rows):
        super().advance(total, batches, rows)
        return [self.entries(batches) * m for m in self.mean]


# --- proximal operators: the minimum over x of |x - w|^2 / 2 + rate * penalty(x) -----------------


def l1(w, rate, strength):
    """The penalty is strength * sum |x|."""
    return np.sign(w) * np.maximum(np.abs(w) - rate * strength, 0)


def elastic_net(w, rate, strength, ridge):
    """The penalty is strength * sum |x| + ridge / 2 * sum x^2."""
    return l1(w, rate, strength) / (1 + rate * ridge)


def group_lasso(w, rate, strength, axis=None):
    """The penalty is strength * the sum of the norms over `axis` (None: of the whole array)."""
    norm = np.sqrt(np.sum(w * w, axis=axis, keepdims=True))
    return w * np.maximum(1 - rate * strength / np.where(norm > 0, norm, 1), 0)


def box(w, rate, low, high):
    """The penalty is infinite outside of low <= x <= high."""
    return np.minimum(np.maximum(w, low), high)


class SGD:
    """MXNet's SGD with momentum and weight decay: it takes its hyperparameters in float32."""

    def __init__(self, learning_rate, momentum=0.0, wd=0.0):
        self.learning_rate, self.momentum, self.wd = learning_rate, momentum, wd
        self.velocity = None

    def step(self, weights, grads, batch_size):
        rescale = rounded(1.0 / batch_size)
        rate, momentum, wd = map(rounded, (self.learning_rate, self.momentum, self.wd))
        if self.velocity is None:
            self.velocity = [np.zeros_like(w) for w in weights]
        for w, g, v in zip(weights, grads, self.velocity):
            v *= momentum
            v -= rate * (rescale * g + wd * w)
            w += v


class ServerSGD(SGD):
    """The same on servers. Workers divide by the batch size before, in float64."""

    def step(self, weights, grads, batch_size):
        super().step(weights, [grad / batch_size for grad in grads], 1)
