"""`gluon_svrg.compare`: equal starts, minibatches and gradients, the search, and what is said."""

import itertools
import random
import sys
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from jobs import run
from loops import backward
from mxnet import autograd, gluon
from problems import array

import gluon_svrg
from gluon_svrg import SVRGTrainer
from gluon_svrg.compare import compare, data, training
from gluon_svrg.schedule import Linear

for package in ("pandas", "matplotlib", "tqdm", "scipy"):
    pytest.importorskip(package, reason=f"gluon_svrg.compare needs {package}")

RNG = np.random.RandomState(0)
X = RNG.normal(size=(100, 5))
Y = X @ RNG.normal(size=5) + 0.3 * RNG.normal(size=100)
CLASSES = (Y > 0).astype("int64")
SQUARE, SOFTMAX = gluon.loss.L2Loss(), gluon.loss.SoftmaxCrossEntropyLoss()
dense = partial(gluon.nn.Dense, 1)
QUICK = {"batch_size": 16, "seeds": 2, "passes": 6, "progress": False}
ONE_RATE = {**QUICK, "learning_rates": [0.03], "seeds": 1}


def squares(net, X, y):
    return SQUARE(net(X), y)


def regression(methods, arrays=(X, Y), loss_of=squares, **kwargs):
    return compare(dense, loss_of, arrays, methods=methods, **{**QUICK, **kwargs})


def batches(seed, epoch):
    order = np.random.RandomState([seed, epoch, 7]).permutation(100)
    for start in range(0, 100, 16):
        index = order[start : start + 16]
        yield X[index], Y[index]


# --- networks ------------------------------------------------------------------------------------


def cnn():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(4, 3), gluon.nn.BatchNorm(), gluon.nn.Dropout(0.5), gluon.nn.Dense(2))
    net.hybridize()
    return net


class Last(gluon.nn.HybridSequential):
    """An LSTM, and a layer on its last output."""

    def __init__(self):
        super().__init__()
        self.add(gluon.rnn.LSTM(6, layout="NTC"), gluon.nn.Dense(2))

    def forward(self, X):
        return self[1](self[0](X)[:, -1])


@pytest.mark.parametrize(("new_net", "shape"), [(cnn, (100, 1, 6, 6)), (Last, (100, 4, 3))])
def test_networks(new_net, shape):
    """The same again, as random numbers and deferred shapes depend on the seed alone."""
    inputs = np.random.RandomState(1).normal(size=shape)
    inputs[CLASSES == 1] += 0.5

    def accuracy(net):
        return (net(array(inputs, "float32")).asnumpy().argmax(1) == CLASSES).mean()

    settings = {"learning_rates": [0.01, 0.03], "measure": {"accuracy": accuracy}, **QUICK}
    settings["methods"] = ["adam", "svrg+nag", "mars"]
    call = new_net, lambda net, X, y: SOFTMAX(net(X), y), (inputs, CLASSES)
    found, again = (compare(*call, **settings) for _ in range(2))
    runs = found.runs.drop(columns="seconds")
    assert runs.equals(again.runs.drop(columns="seconds"))
    assert found.table()["accuracy"].between(0.55, 1).all()
    start = runs[runs.data_passes == 0].groupby("seed").loss
    assert (start.nunique() == 1).all() and start.first().nunique() == len(start.first())
    assert (found.table().loss < start.mean().max()).all()


def numbers():
    """Of equal passes: L-BFGS goes on for as long as the slowest one took."""
    runs = regression(["nag", "svrg", "saga", "lbfgs"]).runs
    return runs[runs["data_passes"] <= 6].drop(columns="seconds").to_csv()


def test_the_same_numbers_in_another_process():
    program = "import test_compare_engine as tests; print(tests.numbers())"
    _, output = run([sys.executable, "-c", program])
    assert output.endswith(numbers() + "\n")


# --- gradients -----------------------------------------------------------------------------------

NAMES = ["sgd", "nag-decay", "svrg", "alpha-svrg", "svrg-stored", "saga", "sag", "sarah", "storm"]
NAMES += ["mars", "mars+sgd", "adam", "lbfgs", "own"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("passes", [4, 6.5])
def test_equal_gradients(name, passes):
    seen = [0]

    def loss_of(net, X, y):
        seen[0] += len(X) if autograd.is_recording() else 0
        return squares(net, X, y)

    methods = {name: partial(Twice, []) if name == "own" else name}
    found = regression(methods, loss_of=loss_of, **{**ONE_RATE, "passes": passes})
    (run,) = found.trainings
    recorded = round(100 * run.curve[-1]["data_passes"])
    checks = 2 * 16  # of one minibatch, whether its loss is random
    assert seen[0] - checks == recorded
    assert abs(recorded - 100 * passes) <= (100 if name == "lbfgs" else 16)


def test_checks_for_random_numbers_are_no_gradients():
    own = partial(SVRGTrainer, optimizer="sgd", kvstore=None)
    methods = {
        "svrg": "svrg",
        "own": lambda params, rate: own(params, optimizer_params={"learning_rate": rate}),
    }
    named, mine = regression(methods, **ONE_RATE).trainings
    assert named.curve[-1]["loss"] == mine.curve[-1]["loss"]


class Twice:
    """Anybody's trainer, which takes a closure and counts nothing; it records its rates."""

    def __init__(self, rates, params, rate):
        self.trainer = gluon.Trainer(params, "sgd", {"learning_rate": rate}, kvstore=None)
        rates.append(rate)

    def step(self, batch_size, closure):
        for _ in range(2):
            backward(closure)
        self.trainer.step(batch_size)


def test_pieces_of_large_data(monkeypatch):
    """Minibatches are the same whether arrays are shuffled at once or in pieces."""
    whole = [*data.Data((X, Y), 16, 0).batches(0, 1)]
    monkeypatch.setattr(data, "CHUNK_SIZE", 40 * 5)
    pieces = [*data.Data((X, Y), 16, 0).batches(0, 1)]
    assert len(whole) == len(pieces) == 7
    for one, other in zip(whole, pieces):
        assert all(np.array_equal(a.asnumpy(), b.asnumpy()) for a, b in zip(one, other))


# --- the search and what is said -----------------------------------------------------------------


def lucky(params, rate):
    """A trainer that learns at high rates with the first seed alone."""
    is_first = random.random() > 0.8  # the engine has seeded it
    return plain(params, rate if is_first or rate < 0.1 else 1e-6)


def test_the_best_rate_is_no_edge_and_chosen_by_all_seeds():
    rates = []
    methods = {"sgd": "sgd", "own": partial(Twice, rates), "lucky": lucky}
    found = regression(methods, seeds=[0, 1, 3])
    for name in methods:
        ends = {}
        for each in found.trainings:
            if each.method == name:
                ends.setdefault(each.learning_rate, []).append(each.curve[-1]["loss"])
        best = found.chosen[name][0].learning_rate
        assert min(ends) < best < max(ends)
        medians = {rate: np.median(some) for rate, some in ends.items() if len(some) == 3}
        assert best == min(medians, key=medians.get)
        for some in ends.values():  # all seeds where the first is in the range of the best
            assert len(some) == 3 or some[0] > max(ends[best])
        assert 1 in map(len, ends.values())  # and no others
    assert found.chosen["sgd"][0].learning_rate > 0.1 > found.chosen["lucky"][0].learning_rate
    tried = {t.learning_rate for t in found.trainings if t.method == "own"}
    assert {*rates} == tried | {0.01}  # with 0.01 it is tried out


def test_a_known_minimum_and_a_callable():
    (squares_left,) = np.linalg.lstsq(np.c_[X, np.ones(100)], Y, rcond=None)[1]
    minimum = squares_left / 200
    settings = {"passes": 60, "minimum": minimum, "learning_rates": [0.03, 0.1, 0.3]}
    found = regression(["sgd", "svrg", "lbfgs"], batches, gaps=(1e-2, 1e-5), **settings)
    table = found.table()
    assert np.isnan(table.loc["sgd", "passes to 1e-05"])
    assert table.loc["lbfgs", "passes to 1e-05"] < table.loc["svrg", "passes to 1e-05"] < 60
    assert np.allclose(table["gap"], table["loss"] - minimum, atol=1e-6)
    assert "Worse in each seed: sgd" in found.verdict
    assert "passes to 0.01: gradients / samples until the gap is 0.01 of the first" in str(found)
    assert "lbfgs is as good, without variance reduction: save the trouble." in found.verdict
    with pytest.raises(ValueError, match="'saga' keeps the gradient of each minibatch"):
        regression(["saga"], batches)
    fixed = regression(["saga"], lambda seed, epoch: batches(seed, 0))
    assert fixed.table().loss.max() < 1


def plain(params, rate):
    return gluon.Trainer(params, "sgd", {"learning_rate": rate}, kvstore=None)


def broken(params, rate):
    trainer = plain(params, rate)
    step = trainer.step

    def step_along_absolute_values(batch_size):
        for p in params.values():
            p.grad()[:] = array(abs(p.grad().asnumpy()), "float32")
        step(batch_size)

    trainer.step = step_along_absolute_values
    return trainer


def test_worse_and_equal():
    found = regression({"sgd": "sgd", "broken": broken}, seeds=3)
    assert "Worse in each seed: broken" in found.verdict
    assert "sgd reaches the end of broken (5.96 passes, " in found.verdict
    found = regression({"mine": plain, "sgd": "sgd"})
    assert "Equal to it: sgd, 0.0" in found.verdict
    assert "sgd is as good, without variance reduction: save the trouble." in found.verdict
    assert str(found).endswith(found.verdict) and "gap" not in str(found)
    assert "chance" not in found.verdict
    assert "With one seed all this can be chance." in regression(["sgd", "nag"], **ONE_RATE).verdict


@pytest.mark.parametrize("name", ["svrg+nag", "alpha-svrg", "nag-decay"])
def test_the_code_of_the_best(name):
    found = regression([name], **ONE_RATE)
    net, names = dense(in_units=1), {"gluon": gluon, "SVRGTrainer": SVRGTrainer, "Linear": Linear}
    net.initialize()
    trainer = eval(found.verdict.partition("\ntrainer = ")[2], {**names, "net": net})
    assert trainer.learning_rate == 0.03 and ("svrg" in name) == hasattr(trainer, "snapshot")
    assert ("nag" in name) == isinstance(trainer.optimizer, mx.optimizer.NAG)
    assert trainer.optimizer.momentum == (0.9 if "nag" in name else 0)


def test_a_measure_that_is_maximized():
    measure = {"minus": lambda net: -float(np.abs(net.weight.data().asnumpy()).sum())}
    settings = {"measure": measure, "objective": "minus", "maximize": True, "minimum": 0.0}
    found = regression(["sgd"], **settings)
    ends = found.runs.groupby(["learning_rate", "seed"])["minus"].last()
    rate = found.chosen["sgd"][0].learning_rate
    assert found.table().loc["sgd", "gap"] == pytest.approx(-ends[rate].median())


def test_options_of_optimizers():
    options = {"nag": [{"momentum": 0.5}, {"momentum": 0.999}]}
    found = regression(["nag", "svrg+nag"], optimizer_params=options)
    assert found.table()["options"].tolist() == ["momentum 0.5"] * 2
    assert {t.options["momentum"] for t in found.trainings} == {0.5, 0.999}
    assert regression(["nag"], **ONE_RATE).trainings[0].options == {"momentum": 0.9}
    options = {"SGD": {"momentum": 0.5}}  # of this method, not of all with SGD
    found = regression({"SGD": "svrg", "plain": "sgd"}, optimizer_params=options, **ONE_RATE)
    assert [training.options for training in found.trainings] == [{"momentum": 0.5}, {}]


def test_a_rate_above_one_that_diverges_is_not_chosen():
    """As where a network is dead after a few steps, whose loss is finite."""

    def trainer(params, rate):
        own = rate if rate < 0.03 else 1e4 if rate < 0.3 else 1e-9
        return gluon.Trainer(params, "sgd", {"learning_rate": own}, kvstore=None)

    found = regression({"own": trainer}, seeds=1)
    assert found.chosen["own"][0].learning_rate < 0.03
    assert {each.learning_rate for each in found.trainings if each.diverged} == {0.03, 0.1}


def test_divergence_and_figure():
    found = regression(["sgd", "svrg"], learning_rates=[0.1, 1e4])
    for each in found.trainings:
        assert each.diverged == (each.learning_rate == 1e4)
        assert not each.diverged or each.curve[-1]["data_passes"] <= 2
    left, right = found.plot().axes
    crosses = [line for line in right.lines if line.get_marker() == "x"]
    assert len(crosses) == 2 and all(line.get_xdata()[0] == 1e4 for line in crosses)
    assert "median of 2 seeds" in right.get_xlabel() and left.get_xlabel().startswith("data passes")
    alone = regression(["sgd"], learning_rates=[1e4])
    assert alone.verdict == "All methods diverged at all rates that were tried."
    assert alone.plot()


def test_an_interrupt_returns_what_is_complete(monkeypatch):
    calls = itertools.count()

    def interrupted(*args):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return training.train(*args)

    monkeypatch.setattr(gluon_svrg.compare.search, "train", interrupted)
    found = regression(["svrg", "sgd"], learning_rates=[0.1, 0.3, 1])
    assert found.interrupted and len(found.trainings) == 6 and [*found.chosen] == ["svrg", "sgd"]
    assert found.verdict.startswith("An interrupt ended")
    with pytest.raises(KeyboardInterrupt):
        calls = itertools.count(6)
        regression(["sgd"])


# --- mistakes ------------------------------------------------------------------------------------

NET, COUNT, DROPOUT = gluon.nn.Dense(1), itertools.count(), gluon.nn.Dropout(0.5)
MISTAKES = [
    ({"methods": ["svgr"]}, "no method 'svgr'. Did you mean 'svrg'"),
    ({"methods": ["svrg+adm"]}, "Did you mean 'adam'"),
    ({"methods": ["sgd", "sgd"]}, "each once"),
    ({"methods": {"mine": lambda params, rate: None}}, "returned NoneType, expected a trainer"),
    ({"passes": 0}, "passes must be finite, above 0"),
    ({"seeds": 0}, "seeds must be 1 or more"),
    ({"objective": "accuracy"}, "neither 'loss' nor measured"),
    ({"new_net": lambda: NET}, "must return a new network each time"),
    ({"new_net": lambda: gluon.nn.Dense(1, weight_initializer=mx.init.Constant(next(COUNT)))},
     "must return a new network each time"),
    ({"loss_of": lambda net, X, y: squares(net, X, y).mean()}, "must return the loss of each"),
    ({"loss_of": lambda X, y: SQUARE(X, y)}, "must take the network and a minibatch"),
    ({"data": (X, Y[:50])}, "as long as each other"),
    ({"data": X}, "data must be arrays, as in"),
    ({"data": lambda seed, epoch: iter(())}, "or give minibatches"),
    ({"optimizer_params": {"adam": {}}}, "no method or optimizer of this comparison"),
    ({"optimizer_params": {"sgd": {"momentun": 0}}}, "takes no argument 'momentun'"),
    ({"methods": ["lbfgs"], "loss_of": lambda net, X, y: squares(net, DROPOUT(X), y)},
     "'lbfgs' needs the same loss each time"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "said"), MISTAKES)
def test_mistakes(wrong, said):
    right = {"new_net": dense, "loss_of": squares, "data": (X, Y), "methods": ["sgd"], **ONE_RATE}
    with pytest.raises((TypeError, ValueError), match=said.replace("(", r"\(")):
        compare(**{**right, **wrong})
