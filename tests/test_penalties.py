"""A trainer with a preconditioner, nothing set: penalties, data that change, any mini-batches."""

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from mxnet import gluon
from plays import TWO
from problems import IS_NUMPY_LIKE, array

from gluon_svrg import Nystrom, SVRGTrainer
from gluon_svrg.prox import L1, Box, ElasticNet, GroupLasso


class Failing(L1):
    fails = False

    def __call__(self, weight, step):
        if Failing.fails:
            raise KeyError("as a test wants it")
        return super().__call__(weight, step)


def standardized(X):
    return (X - X.mean(axis=0)) / X.std(axis=0)


def regression(samples=600, features=8, outputs=1):
    """Correlated inputs; every second one matters."""
    rng = np.random.RandomState(0)
    X = standardized(np.cumsum(rng.randn(samples, features), axis=1))
    y = X[:, ::2].sum(axis=1)[:, None] * np.arange(1, outputs + 1) + rng.randn(samples, outputs)
    return X, y if outputs > 1 else y[:, 0]


def of_scikit_learn(name):
    X, y = getattr(pytest.importorskip("sklearn.datasets"), f"load_{name}")(return_X_y=True)
    return standardized(X), y - y.mean() if name == "diabetes" else y


class Training:
    """Of a linear model from zero, with a new order in each epoch; the last mini-batch is short."""

    def __init__(self, X, y, prox=None, size=16, loss="L2Loss", dtype="float64", devices=None,
                 wd=0.0, dropout=0.0):  # fmt: skip
        self.X, self.y, self.size, self.dtype, self.devices = X, y, size, dtype, devices
        self.loss, self.rng = getattr(gluon.loss, loss)(), np.random.RandomState(0)
        self.rows, self.weights, self.weighted = len(X), np.ones(len(X)), False
        units, inputs = y[:1].size, X.shape[1]
        self.layer = layer = gluon.nn.Dense(units, in_units=inputs, use_bias=False, dtype=dtype)
        self.net = gluon.nn.HybridSequential()
        self.net.add(*[gluon.nn.Dropout(dropout)] * bool(dropout), layer)
        self.net.initialize(mx.init.Zero(), ctx=devices)
        self.net.hybridize()
        self.parameters = [*self.net.collect_params().values()]
        kwargs = {"prox": prox, "preconditioner": Nystrom()}
        self.trainer = SVRGTrainer(self.net.collect_params(), "nag", {"wd": wd}, **kwargs)

    @property
    def w(self):
        return self.layer.weight.list_data()[0].asnumpy().astype("float64").ravel()

    def loss_of(self, index):
        parts = np.array_split(index, len(self.devices)) if self.devices else [index]
        losses = []
        for part, device in zip(parts, self.devices or [None]):
            X, y, weights = (
                array(x[part].reshape(len(part), -1), self.dtype, device)
                for x in (self.X, self.y, self.weights)
            )
            loss = self.loss(self.net(X), y)
            losses.append(loss * weights[:, 0] if self.weighted else loss)
        return losses if self.devices else losses[0]

    def batches(self):
        order = self.rng.permutation(self.rows)
        return [order[start : start + self.size] for start in range(0, len(order), self.size)]

    def refresh(self, batches=None, **kwargs):
        return self.trainer.update_full_grads(self.loss_of, batches or self.batches(), **kwargs)

    def steps(self, batches, after=lambda: None, stored=False):
        for number, index in enumerate(batches):
            row = {"batch_index": number} if stored else {}
            self.trainer.step(len(index), closure=lambda: self.loss_of(index), **row)
            after()

    def epoch(self, steps=None, **kwargs):
        loss, batches = self.refresh(), self.batches()
        self.steps(batches[:steps], **kwargs)
        return loss

    def train(self, epochs=10, **kwargs):
        for _ in range(epochs):
            self.epoch(**kwargs)
        return self


def by_gradients(operator):
    """The minimum of a least squares loss with a penalty, by accelerated proximal gradients."""

    def minimum(X, y):
        Y = y.reshape(len(X), -1)
        H, B = X.T @ X / Y.size, Y.T @ X / Y.size
        w, last, L = 0 * B, 0 * B, np.linalg.eigvalsh(H)[-1]
        for number in range(20_000):
            ahead = w + number / (number + 3) * (w - last)
            w, last = operator(ahead - (ahead @ H - B) / L, 1 / L), w
        return w

    return minimum


def by_scikit_learn(name, **settings):
    def minimum(X, y):
        model = getattr(pytest.importorskip("sklearn.linear_model"), name)(**settings)
        return model.set_params(fit_intercept=False, tol=1e-14, max_iter=10**6).fit(X, y).coef_

    return minimum


def nnls(X, y):
    return pytest.importorskip("scipy.optimize").nnls(X, y)


LOGISTIC = {"penalty": "l1", "C": 1 / 0.05 / 569, "solver": "liblinear"}
#: Data, operator, the minimum, and the penalty.
PROBLEMS = {
    "lasso": ("diabetes", L1(5.0), by_scikit_learn("Lasso", alpha=5.0), lambda w: 5 * abs(w).sum()),
    "elastic net": (
        "diabetes", ElasticNet(3.0, 1.0), by_scikit_learn("ElasticNet", alpha=4.0, l1_ratio=0.75),
        lambda w: 3 * abs(w).sum() + (w**2).sum() / 2),
    "logistic": (
        "breast_cancer", L1(0.05), by_scikit_learn("LogisticRegression", **LOGISTIC),
        lambda w: 0.05 * abs(w).sum()),
    "bounds": ("diabetes", Box(0, np.inf), lambda X, y: nnls(X, y)[0], lambda w: 0.0),
    "inputs in groups": (
        "made", GroupLasso(0.1, axis=1),
        by_gradients(lambda w, step: oracle.group_lasso(w, step, 0.1, 0)),
        lambda w: 0.1 * np.linalg.norm(w, axis=0).sum()),
    "a user's": (
        "diabetes", kit.Asymmetric(5.0), by_gradients(lambda w, step: w - np.clip(w, 0, 5 * step)),
        lambda w: 5 * np.maximum(w, 0).sum()),
}  # fmt: skip


@pytest.mark.parametrize("name, dtype", [*((n, "float32") for n in PROBLEMS), ("lasso", "float64")])
def test_minimum(name, dtype):
    """In a few dozen passes; what is 0 there is exactly 0 here, and weights stay in bounds."""
    data, operator, minimum, penalty = PROBLEMS[name]
    X, y = regression(outputs=3) if data == "made" else of_scikit_learn(data)
    best, is_class = minimum(X, y), data == "breast_cancer"
    loss = "SigmoidBinaryCrossEntropyLoss" if is_class else "L2Loss"

    def objective(w):
        w = w.reshape(-1, X.shape[1])
        z, labels = X @ w.T, y.reshape(len(X), -1)
        each = np.logaddexp(0, z) - labels * z if is_class else (z - labels) ** 2 / 2
        return each.mean() + penalty(w)

    training, each = Training(X, y, operator, loss=loss, dtype=dtype), []
    training.train(11 if is_class else 10, after=lambda: each.append(training.w))
    training.refresh()
    line, found = training.trainer.history[-1], objective(training.w)
    assert line["data_passes"] < (39 if is_class else 33) and found < objective(best) * (1 + 1e-6)
    for w in each[-20:]:
        np.testing.assert_array_equal(w == 0, best.ravel() == 0)
    # A weight that z has as 0 would else shrink for many steps, to numbers as 1e-40.
    assert min(np.abs(w[w != 0]).min(initial=1) for w in each) > 1e-20
    assert name != "bounds" or np.min(each) >= 0
    np.testing.assert_allclose(line["objective"], found, rtol=1e-5)


def test_a_rare_category():
    """No entry of the sketch has it, and no decay bounds its curvature."""
    X, y = regression(samples=4000)
    kinds = np.arange(len(X)) % 2
    kinds[::200] = 2
    X = np.column_stack([X, np.eye(3)[kinds], np.ones(len(X))])
    y = y + 2 * (kinds == 2)
    best = by_scikit_learn("Lasso", alpha=0.01)(X, y)
    for seed in range(3):
        training = Training(X, y, L1(0.01), size=125)
        training.rng = np.random.RandomState(seed)
        np.testing.assert_allclose(X @ training.train(14).w, X @ best, atol=0.01)


@kit.table(
    "dtype, unit, warns",
    ("float32", 1e2, 0),
    ("float32", 1e3, 1),  # its square is what float32 can tell
    ("float64", 1e5, 0),
)
def test_units(dtype, unit, warns):
    """Columns in very different ones: the minimum, and a warning where float32 ends."""
    X, y = regression(samples=1600)
    X = X * np.where(np.arange(8) % 3, 1, 1 / unit)
    best, training = np.linalg.lstsq(X, y, rcond=None)[0], Training(X, y, size=32, dtype=dtype)
    with kit.noticed() as texts:
        training.steps(training.batches())
        training.train(12)
    assert len([text for text in texts if "units of very different sizes" in text]) == warns
    np.testing.assert_allclose(X @ training.w, X @ best, atol=1e-3)


@pytest.mark.parametrize("steps", [0, 20])
def test_a_start_outside_of_bounds(steps):
    """Where the loss is lower than anywhere inside."""
    X, y = regression()
    training = Training(X, -y, Box(0, np.inf))
    start = np.linalg.lstsq(X, -y, rcond=None)[0][None]
    training.layer.weight.set_data(array(start, training.dtype))
    training.steps(training.batches()[:steps])
    training.train(8)
    training.refresh()
    best = nnls(X, -y)[1] ** 2 / len(X) / 2
    np.testing.assert_allclose(training.trainer.history[-1]["objective"], best, rtol=1e-6)


@pytest.mark.parametrize("operator", [L1(0.2), ElasticNet(0.1, 0.2), GroupLasso(0.3), Box(0, 0.5)])
def test_objective_in_history(operator):
    """The mean loss with the weight decay and the penalty, at each snapshot."""
    X, y = regression()
    training, penalty = Training(X, y, operator, wd=0.3), operator.value
    for _ in range(4):
        w = training.w
        loss = training.epoch()
        line, mean_loss = training.trainer.history[-1], ((X @ w - y) ** 2).mean() / 2
        np.testing.assert_allclose([loss, line["mean_loss"]], mean_loss)
        expected = mean_loss + 0.3 * w @ w / 2 + penalty(w[None])
        np.testing.assert_allclose(line["objective"], expected, rtol=1e-6)


@pytest.mark.parametrize("operator", [L1(0.2), kit.Asymmetric(5.0)])
def test_devices_and_files(operator, tmp_path):
    """Devices have the same bits at all times, and a new trainer goes on from a file with them."""
    first, second = (Training(*regression(), operator, devices=TWO, dtype="float32") for _ in "12")

    def compare():
        kit.assert_unchanged(*([p.data(d).asnumpy() for p in first.parameters] for d in TWO))

    first.train(3, after=compare)
    first.epoch(steps=21)
    first.trainer.save_states(tmp_path / "states")
    first.net.save_parameters(str(tmp_path / "weights"))
    second.net.load_parameters(str(tmp_path / "weights"), ctx=TWO)
    second.trainer.load_states(tmp_path / "states")
    second.rng.set_state(first.rng.get_state())
    for each in (first, second):
        each.steps(each.batches()[:9])
    last = [each.trainer._method.preconditioner.controller for each in (first, second)]
    assert last[0].loss_increases == last[1].loss_increases
    for each in (first, second):
        each.epoch(steps=9)
    kit.assert_unchanged(*(kit.everything(each.trainer, each.net) for each in (first, second)))
    assert first.trainer.history == second.trainer.history


# --- data that change ----------------------------------------------------------------------------
@pytest.mark.parametrize("change", ["labels", "weights", "subset"])
def test_data_that_change(change):
    """Harder labels, sample weights, more samples from epoch 5 on: eleven epochs reach 1e-5."""
    X, y = regression(900)
    training, rng = Training(X, y, dtype="float32"), np.random.RandomState(1)
    training.rows = 450 if change == "subset" else 900
    training.train(5)
    if change == "labels":
        training.y = y + 3 * rng.randn(900)
    elif change == "weights":
        training.weights, training.weighted = np.where(X[:, 1] > 0, 4.0, 1.0), True
    training.rows = 900
    root = np.sqrt(training.weights)
    X, y = X * root[:, None], training.y * root
    best = np.linalg.lstsq(X, y, rcond=None)[0]
    training.train(11)
    losses = [((X @ w - y) ** 2).mean() / 2 for w in (training.w, best)]
    assert losses[0] < losses[1] * (1 + 1e-5)
    np.testing.assert_allclose(training.refresh(), losses[0], rtol=1e-4)


def test_dropout_on_the_inputs():
    """Other masks in each epoch are other data: that is no reason to go back, or to slow down."""
    training = Training(*regression(900), dropout=0.2, dtype="float32")
    with kit.noticed():  # that the masks are locked
        training.train(12)
    history = training.trainer.history
    assert training.trainer.num_snapshots >= 10
    assert history[-1]["learning_rate"] > history[2]["learning_rate"] / 16
    assert history[-1]["mean_loss"] < history[0]["mean_loss"]
    weight, taken = training.layer.weight, []
    for _ in range(4):
        weight.set_data(weight.data() + 100)
        training.refresh()
        taken.append(training.trainer.num_snapshots - len(history))
    assert taken == [0, 1, 1, 2]  # after a refused refresh the next one is taken
    training.rows = 450
    training.refresh()  # of other data
    count = training.trainer.num_snapshots
    weight.set_data(weight.data() + 100)
    training.refresh()
    assert training.trainer.num_snapshots == count


@pytest.mark.parametrize("jumps", [False, True])
def test_a_generator(jumps):
    """A refresh reads its data once, also where it goes back to the start."""
    training, drawn = Training(*regression()), []
    start = training.w
    training.steps(training.batches()[:9])
    if jumps:
        training.layer.weight.set_data(training.layer.weight.data() + 100)
    batches = training.batches()
    training.trainer.update_full_grads(training.loss_of, (drawn.append(b) or b for b in batches))
    assert len(drawn) == len(batches) and training.trainer.num_snapshots == 1 - jumps
    assert (training.w == start).all() == jumps
    best = np.linalg.lstsq(training.X, training.y, rcond=None)[0]
    np.testing.assert_allclose(training.train(10).w, best, atol=1e-4)


# --- loss entries, weight decay, stored gradients, few steps -------------------------------------
def ridge(X, y, wd):
    """The minimum of the squares / 2 n plus wd / 2 w^2, of each output."""
    return np.linalg.solve(X.T @ X / len(X) + wd * np.eye(X.shape[1]), X.T @ y / len(X)).T


@pytest.mark.parametrize("prox", [None, ElasticNet(0.0, 0.2)])
def test_loss_entries_of_a_sample(prox):
    """The batch size says what a sample is: its entries are summed, as by `gluon.Trainer`."""
    X, y = regression(outputs=3)
    training = Training(X, y, prox, wd=0.1)
    training.loss = lambda z, y: (z - y) ** 2 / 2
    l2 = 0.1 + 0.2 * (prox is not None)
    best, w = ridge(X, y, l2), np.ones((3, 8))
    training.layer.weight.set_data(array(w, "float64"))
    training.epoch(steps=1)  # from which on the objective is known
    objective = ((X @ w.T - y) ** 2).mean() / 2 + l2 * (w**2).sum() / 2 / 3
    controller = training.trainer._method.preconditioner.controller
    np.testing.assert_allclose([controller.loss, controller.first_loss], objective)
    np.testing.assert_allclose(training.train(12).w, best.ravel(), atol=1e-6)


def test_loss_entries_of_the_first_update():
    """It tells what a sample is, after measurements without that: no weight moves yet."""
    training = Training(*regression(outputs=3), wd=0.1)
    training.loss, training.layer.weight.grad_req = lambda z, y: (z - y) ** 2 / 2, "add"
    for batch in training.batches()[:8]:
        training.trainer.correct_grads(lambda batch=batch: training.loss_of(batch))
    assert training.trainer._method.preconditioner.controller.rate > 0
    training.trainer.allreduce_grads()
    training.trainer.update(8 * training.size)
    assert not training.w.any() and not training.trainer.learning_rate


def test_exposures():
    """Poisson regression of rates with weights, as scikit-learn's."""
    X, _ = regression()
    exposures = np.random.RandomState(1).uniform(0.2, 5, len(X))
    rates = np.random.RandomState(2).poisson(exposures * np.exp(X[:, 0] / 2)) / exposures
    Model = pytest.importorskip("sklearn.linear_model").PoissonRegressor
    model = Model(alpha=0.1, fit_intercept=False, tol=1e-9, max_iter=999)
    training = Training(X, rates, wd=0.1 * exposures.mean())
    numbers = mx.np if IS_NUMPY_LIKE else mx.nd
    training.loss = lambda z, y: (numbers.exp(z) - y * z).reshape((-1,))
    training.weights, training.weighted = exposures, True
    best = model.fit(X, rates, sample_weight=exposures).coef_
    np.testing.assert_allclose(training.train(12).w, best, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_weight_decay(dtype):
    """The optimizer has it only during an update, also where that fails."""
    X, y = regression()
    training, found = Training(X, y, wd=40.0, dtype=dtype), []
    optimizer = training.trainer.optimizer
    training.train(8, after=lambda: found.append(optimizer.wd))
    with pytest.raises(ZeroDivisionError):
        training.trainer.step(kit.Indivisible(9), closure=lambda: training.loss_of(np.arange(9)))
    training.trainer.step(9, closure=lambda: training.loss_of(np.arange(9))[:0])  # no losses
    assert {*found, optimizer.wd} == {40.0}
    np.testing.assert_allclose(training.w, ridge(X, y, 40.0), rtol=0, atol=1e-7)


def test_stored_gradients():
    """The same minimum from fewer gradients; without a table after a refused refresh, too."""
    X, y = regression()
    best, evaluations = ridge(X, y, 0.0), []
    for stored in (True, False):
        training = Training(X, y)
        batches = training.batches()
        for _ in range(8):
            training.refresh(batches, store_grads=stored)
            training.steps(batches, stored=stored)
        np.testing.assert_allclose(training.w, best, atol=1e-4)
        evaluations.append(training.trainer.grad_evaluations / len(X))
    assert evaluations[0] < 0.8 * evaluations[1]
    training.refresh(batches, store_grads=True)
    for _ in range(2):  # refused, and the next one is not
        training.layer.weight.set_data(training.layer.weight.data() + 100 * len(evaluations))
        training.refresh(batches, store_grads=True)
        grads = []
        for row in ({"batch_index": 3}, {}):
            training.trainer.correct_grads(lambda: training.loss_of(batches[3]), **row)
            grads.append(training.layer.weight.grad().asnumpy())
        np.testing.assert_allclose(*grads, atol=1e-8)
        evaluations.clear()
    assert [line["went_back"] for line in training.trainer.history[-2:]] == [1, 0]


def test_few_steps():
    """An epoch of fewer than 16 is warned of once, with the size that is better."""
    with kit.noticed() as texts:
        Training(*regression(), size=50).train(4)
        Training(*regression(), size=37).train(3)  # an epoch of 17
    (text,) = texts
    assert text.startswith("An epoch has 12 steps") and "about 18 loss entries" in text


def test_few_weights_of_many_rows():
    """In float64 P is the whole Hessian, and its rho no more than rounding."""
    X, y = regression(3000, 4)
    made = Training(X, y, {".*": L1(0.3)}, size=94).train(14)
    P = made.trainer._method.preconditioner.controller.P
    assert P.rho < 1e-12 * P.least
    np.testing.assert_allclose(made.w, by_scikit_learn("Lasso", alpha=0.3)(X, y), atol=1e-10)


def test_a_reduction_that_fails():
    """No update can follow it, and the training goes on."""
    made = Training(*regression(), {".*": Failing(0.1)}, wd=0.02)
    made.train(2)
    before = made.w
    made.trainer.correct_grads(lambda: made.loss_of(np.arange(16)))
    try:
        Failing.fails = True
        with pytest.raises(KeyError):
            made.trainer.allreduce_grads()
    finally:
        Failing.fails = False
    with pytest.raises(RuntimeError, match=r"update\(\)"):
        made.trainer.update(16)
    kit.assert_unchanged(before, made.w)
    twin = Training(*regression(), {".*": L1(0.1)}, wd=0.02).train(12)
    np.testing.assert_allclose(made.train(10).w, twin.w, rtol=1e-6, atol=1e-9)


def test_a_direction_that_is_left_out_makes_no_zeros():
    """The last z stays, and is no second one that has a weight as 0."""
    made = Training(*regression(), {".*": L1(0.1)}).train(2)
    made.trainer._method.preconditioner._last_proximal[0][:] = 0.0
    made.weights, made.weighted = np.full((len(made.X), 1), np.nan), True
    made.steps([np.arange(16)])
    assert np.isfinite(made.w).all() and made.w.all()


def test_calls_that_an_interrupt_repeats():
    """Before the update, weight decay is kept once; after it, nothing is zero too early."""
    made = Training(*regression(), {".*": L1(0.3)}, wd=0.02)
    part = made.trainer._method.preconditioner
    for _ in range(2):
        part.before_update(None, 1.0)
    part.after_update()
    assert made.trainer.optimizer.wd == 0.02
    zeros = []

    def again():
        part, before = made.trainer._method.preconditioner, made.w
        part.commit(part._pending[-1])
        kit.assert_unchanged(before, made.w)
        zeros.append((made.w == 0).sum())

    made.train(2, after=again)
    assert max(zeros) > 0 and len({*zeros}) > 1
