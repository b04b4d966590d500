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
        """Update the state by the sum of the estimates, before weights move; return a gradient."""
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


def multiplied(P, v):
    """P v, for a `NystromApproximation`."""
    return P.rho * v + (P.S * (P.U @ v)) @ P.U


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


class Nystrom:
    """SVRG whose preconditioner sets the rate and the momentum; P is a whole matrix.

    ``mean(w, batches)`` returns the mean loss over minibatches, its gradient, and their entries.
    Vectors have all weights, `decays` the weight decay of each. With the optimizer 'sgd' there is
    no NAG. `penalty` has a value, and `soft` in the metric of a matrix, see `L1InMetric`.
    """

    def __init__(self, mean, weights, decays, rank, eps, optimizer, settings, penalty=None):
        self.mean, self.w, self.decays, self.rank = mean, np.array(weights), decays, rank
        self.eps, self.optimizer, self.k, size = eps, optimizer, settings, len(weights)
        self.penalty = penalty or L1InMetric(np.zeros(size))
        self.P, self.m, self.rows = np.eye(size), np.zeros(size), []
        self.L, self.N, self.T, self.first_rate = 0.0, 0.0, settings.first_budget, 0.0
        self.momentum = 1 - settings.least_damping
        self.s, self.start = None, self.w.copy()  # where to go back to: the snapshot, or the start
        self.refreshes = self.again = self.measurements = self.backs = 0
        self.made = self.planned = 0  # steps since the last refresh, and before it
        self.longest = self.most = 0.0  # of the measured gradients; entries of a minibatch
        self.loss = self.first_loss = np.inf
        self.steps, self.secants, self.rises, self.along = [], [], [], 0.0
        self.last, self.before, self.noise, self.z = None, 0.0, 0.0, None
        self.refused = self.changed = self.has_P = False
        self.all = self.known = 0
        self.begin()

    def objective(self, w, batches):
        """The mean loss with the weight decay and the penalty, and its gradient without that."""
        loss, gradient, _ = self.mean(w, batches)
        value = loss + self.decays @ w**2 / 2 + self.penalty.value(w)
        return value, gradient + self.decays * w

    @property
    def rate(self):
        """It falls from refresh to refresh, and rises again if there is none."""
        if not self.planned:
            return self.first_rate
        place = self.made / self.planned % 2
        return self.first_rate * max(min(abs(1 - place), 1), self.k.least_rate)

    def set_pace(self):
        """Set the rate and the momentum, and forget what the last steps have told."""
        at_most = self.T / self.N if self.N else np.inf
        self.first_rate = min(self.k.stable / self.L, at_most) if self.L else 0.0
        damping = self.first_rate * self.N / self.T
        self.momentum = 1 - np.clip(damping, self.k.least_damping, self.k.most_damping)
        self.before, self.rises, self.secants = self.L, [], []
        self.noise = self.along = 0.0

    def begin(self, entries=0):
        """Begin to measure L and N; and P before that, if all data have so many entries."""
        self.measurements += 1
        random, size = np.random.RandomState(self.measurements), len(self.w)
        z = random.randn(size)
        rank = min(self.rank, size, max(1, int(np.sqrt(entries / 16)))) if entries else 0
        self.beside, self.Q = z / np.linalg.norm(z), None
        if rank:
            self.Q, self.Y, self.sampled = np.linalg.qr(random.randn(size, rank))[0], 0.0, 0
            self.wanted = entries / 4 / (rank + 1)
        self.products, self.highest, self.is_measuring = [], 0.0, True

    def measure(self, batch):
        origin = self.start if self.s is None else self.s
        step = self.eps ** (1 / 3) * max(1, np.linalg.norm(origin))
        at, count = origin + step * self.beside, self.mean(origin, [batch])[2]
        self.longest = max(self.longest, np.linalg.norm(self.objective(at, [batch])[1]))

        def product(u):
            """H u, from a difference of gradients."""
            h = step / np.linalg.norm(u)
            return (self.mean(at + h * u, [batch])[1] - self.mean(at, [batch])[1]) / h

        if self.Q is not None:
            self.Y = self.Y + count * np.stack([product(q) for q in self.Q.T], axis=1)
            self.sampled += count
            if self.sampled >= self.wanted:
                self.find_metric(self.Y / self.sampled)
            return
        values, V = np.linalg.eigh(self.P)
        root, v = V @ np.diag(values**-0.5) @ V.T, self.beside
        for number in range(3):
            found = root @ (product(root @ v) + self.decays * (root @ v))
            if number == 0:
                self.products.append(found)
            self.highest, v = max(self.highest, v @ found), found / np.linalg.norm(found)
        if len(self.products) == 2:
            a, c = self.products
            noise, along = (a - c) @ (a - c), self.beside @ (a + c)
            self.N = min(noise / along if along > 0 else np.inf, 2 * self.highest)
            self.L, self.is_measuring = max(self.L, self.highest), False
            self.set_pace()

    def find_metric(self, Y):
        """Nystrom's approximation, of a Hessian to which nu was added, so that none is below 0."""
        core, rank = (self.Q.T @ Y + Y.T @ self.Q) / 2, self.Q.shape[1]
        nu = max(10 * self.eps * np.linalg.norm(Y, 2), -1.1 * np.linalg.eigvalsh(core)[0])
        B = Y + nu * self.Q
        S, U = np.linalg.eigh(B @ np.linalg.inv(core + nu * np.eye(rank)) @ B.T)
        S, U = np.maximum(S[-rank:] - nu, 0), U[:, -rank:]
        rest = max(S.min(), S.sum() / self.sampled)
        if rank == len(self.w):  # as many effective directions as the entries can tell
            rest = 0.0
            if (S > 0).sum() > self.sampled / 10:
                many = np.geomspace(S.max() * 1e-16, S.sum(), 10**6)
                effective = (S / (S + many[:, None])).sum(axis=1)
                rest = np.interp(-self.sampled / 10, -effective, many)
        rho = max(self.decays.max() + rest, nu, 1e-14 * S.max())
        if rank == len(self.w):
            usual = U.T**2 @ np.where(Y.any(axis=1), np.diag(U * S @ U.T), S.sum() / self.sampled)
            unseen = (1e-9 * S.max() > nu) & (1e-9 * usual > S)
            S = np.where(unseen, usual, S)
        self.P = U @ np.diag(S) @ U.T + rho * np.eye(len(self.w))
        self.P = self.P + sum(np.outer(row, row) for row in self.rows)
        self.known = min(rank + len(self.rows), len(self.w))
        self.has_P, self.Q, self.L, self.m, self.steps = True, None, 0.0, 0 * self.m, []
        self.last = None
        self.set_pace()

    def step(self, *batches, size=None):
        self.learn(0 if 0 < self.planned < 16 else 4)
        if self.has_diverged:
            self.go_back()
        for batch in batches:
            if self.is_measuring:
                self.measure(batch)
        count = self.mean(self.w, batches)[2]
        self.most = max(self.most, count)
        share = count / self.most
        v = share * self.mean(self.w, batches)[1] + self.decays * self.w
        if self.s is None:
            factor = min(1, self.longest / np.linalg.norm(v))
        else:
            v = v - share * self.mean(self.s, batches)[1] + self.full - self.decays * self.s
            d, move = v - self.full, self.w - self.s
            secant = d @ np.linalg.solve(self.P, d) / (d @ move) if d @ move > 0 else 0.0
            factor = min(1, self.L / secant) if self.L and secant else 1.0
            increase = self.penalty.value(self.w) - self.penalty.value(self.s)
            self.steps.append((d, move, self.full @ move + increase))
        u, rate = factor * np.linalg.solve(self.P, v), rounded(self.rate)
        momentum, before = rounded(self.momentum), self.z
        if rate:
            x, strength = self.w - rate * u, rounded(self.rate) * factor
            self.z = self.penalty.soft(x, strength, self.P, self.w)
            u = (self.w - self.z) / rate
        self.m = momentum * self.m - rate * u
        self.w = self.w + (self.m if self.optimizer == "sgd" else momentum * self.m - rate * u)
        if before is not None and rate:
            settled = (self.penalty.strengths > 0) & (self.z == 0) & (before == 0)
            self.w = np.where(settled, 0.0, self.w)
        self.made += 1
        if self.is_measuring and size and self.made + self.refreshes == 1 and count != size:
            self.decays, self.penalty = self.decays * size / count, self.penalty.times(size / count)
            self.begin(self.all)
            if self.s is not None:
                self.loss = self.first_loss = self.objective(self.s, self.data)[0]

    def learn(self, lag):
        """Learn from all steps but the last ones."""
        while len(self.steps) > lag:
            (d, move, slope), *self.steps = self.steps
            secant = d @ np.linalg.solve(self.P, d) / (d @ move) if d @ move > 0 else 0.0
            has_room = self.known == len(self.w) or self.known < 2 * self.rank
            if self.has_P and has_room and secant > self.k.outlier * self.L > 0:
                self.known = min(self.known + 1, len(self.w))
                row = d * np.sqrt(min(1 / self.L, self.k.change / secant) / (d @ move))
                self.P, self.rows = self.P + np.outer(row, row), [*self.rows, row][-self.rank :]
                self.last, self.steps = None, []
                return
            self.rises = [*self.rises, slope + d @ move / 2][-self.k.window :]
            last, self.last = self.last, d
            rounding = self.k.rounding * self.eps * np.linalg.norm(self.s)
            if d @ move <= 0 or np.linalg.norm(move) <= rounding:
                continue
            self.secants.append(secant)
            if secant > self.k.change * self.L > 0:
                self.last = None
            elif last is not None:
                self.noise += (d - last) @ np.linalg.solve(self.P, d - last) / 2
                self.along += d @ move
            if secant > self.L > 0:
                self.L = min(secant, self.k.change * self.L)
                self.first_rate = min(self.first_rate, self.k.stable / self.L)

    @property
    def has_diverged(self):
        return self.s is not None and sum(self.rises) / self.k.window > self.first_loss - self.loss

    def go_back(self):
        self.w, self.m, self.steps = self.start if self.s is None else self.s, 0 * self.m, []
        self.T = max(self.T / self.k.change, self.k.least_budget)
        self.L = max(self.L, self.k.change * self.before)
        self.backs, self.z = self.backs + 1, None
        if self.along:
            self.N = min(max(self.N, self.noise / self.along), 2 * self.L)
        self.set_pace()

    def refresh(self, batches):
        self.learn(0)
        loss, slope = self.objective(self.w, batches)
        there = self.objective(self.start if self.s is None else self.s, batches)[0]
        if self.s is None:
            self.first_loss = known = there
        else:
            known, changed = self.loss, self.all != self.mean(self.w, batches)[2]
            if self.refused or self.changed:
                changed = changed or abs(there - known) > self.k.same_data * abs(known)
                known = there
            self.changed = changed
        has_risen, ratio = loss > known + self.k.rounding * self.eps * abs(known), 0.0
        if self.has_diverged or (has_risen and not self.changed):
            self.go_back()
            self.refused, self.made, self.planned, self.most = True, 0, self.made, 0.0
            return
        if self.s is None:
            self.again = self.k.resketch_at * (self.w == self.start).all()
        elif self.changed:
            self.first_loss, self.loss = np.inf, loss
        else:
            if self.first_loss == np.inf:
                self.first_loss = self.loss
            way = self.w - self.s
            if np.linalg.norm(way) > self.k.rounding * self.eps * np.linalg.norm(self.s):
                now, then = self.penalty.least(self.w, slope), self.penalty.least(self.s, self.full)
                ratio = now @ way / (then @ way)
                up = min(self.k.rise * self.T, self.k.most_budget)
                down = max(self.T / self.k.fall, self.k.least_budget)
                self.T = up if ratio > self.k.slope_remains else down
        if self.secants:
            self.L = max(np.quantile(self.secants, self.k.quantile), self.L / self.k.change)
            self.N = min(self.noise / self.along, 2 * self.L) if self.along else self.N
        self.s, self.full, self.loss, self.refused = self.w, slope, min(loss, self.loss), False
        self.data, self.all = batches, self.mean(self.w, batches)[2]
        now = self.refreshes
        if now == 0 or now == self.again == 2 or (ratio > self.k.slow and now >= self.again):
            self.begin(self.all * max(now, 1))
            self.again = 2 * now + 1 if now else self.again
        self.refreshes, self.made, self.planned = self.refreshes + 1, 0, self.made
        self.most, self.last = 0.0, None
        self.set_pace()


class L1InMetric:
    """sum of strength |w|, by coordinate descent in the metric of a matrix."""

    def __init__(self, strengths):
        self.strengths = strengths

    def times(self, factor):
        return L1InMetric(self.strengths * factor)

    def value(self, w):
        return self.strengths @ np.abs(w)

    def least(self, w, g):
        """The shortest subgradient of the objective."""
        soft = np.sign(g) * np.maximum(np.abs(g) - self.strengths, 0)
        return np.where(w != 0, g + self.strengths * np.sign(w), soft)

    def soft(self, x, step, P, guess):
        """The z with the least (z - x)'P(z - x) / 2 + step * value(z)."""
        if not self.strengths.any():
            return x
        z = guess.copy()
        for _ in range(10_000):
            before = z.copy()
            for i in range(len(z)):
                left = z[i] - P[i] @ (z - x) / P[i, i]
                z[i] = np.sign(left) * max(abs(left) - step * self.strengths[i] / P[i, i], 0)
            if np.abs(z - before).max() <= 1e-15 * np.abs(z).max():
                break
        return z
