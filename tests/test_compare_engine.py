"""`gluon_svrg.compare`: equal starts, mini-batches and gradients, the search, and what is said."""

import functools
import itertools
import random
import re
import sys
from functools import partial
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from jobs import run
from kit import backward, noticed, sequence
from mxnet import autograd, gluon
from problems import array, contexts
from scipy.sparse import csr_matrix

from gluon_svrg import SVRGTrainer
from gluon_svrg.compare import compare, data, search, task, training
from gluon_svrg.compare.comparison import OF_FLOAT32
from gluon_svrg.prox import L1, Box
from gluon_svrg.schedule import Linear
from gluon_svrg.trainer import VarianceReducedTrainer

RNG = np.random.RandomState(0)
X = RNG.normal(size=(100, 5))
Y = X @ RNG.normal(size=5) + 0.3 * RNG.normal(size=100)
MINIMUM = np.linalg.lstsq(np.c_[X, np.ones(100)], Y, rcond=None)[1].item() / 200
CLASSES = (Y > 0).astype("int64")
SQUARE, SOFTMAX = gluon.loss.L2Loss(), gluon.loss.SoftmaxCrossEntropyLoss()
BINARY = gluon.loss.SigmoidBinaryCrossEntropyLoss()
dense, DROP = partial(gluon.nn.Dense, 1), gluon.nn.Dropout(0.5)
QUICK = {"batch_size": 16, "seeds": 2, "passes": 6, "progress": False}
ONE_RATE = {**QUICK, "learning_rates": [0.03], "seeds": 1}


def squares(net, X, y):
    return SQUARE(net(X), y)


def regression(methods, arrays=(X, Y), loss_of=squares, new_net=dense, **kwargs):
    return compare(new_net, loss_of, arrays, methods=methods, **{**QUICK, **kwargs})


def requiring(grad_req):
    net = dense()
    for p in net.collect_params().values():
        p.grad_req = grad_req
    return net


def batches(seed, epoch):
    order = np.random.RandomState([seed, epoch, 7]).permutation(100)
    for start in range(0, 100, 16):
        index = order[start : start + 16]
        yield X[index], Y[index]


def cnn():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(4, 3), gluon.nn.BatchNorm(), gluon.nn.Dropout(0.5), gluon.nn.Dense(2))
    net.hybridize()
    return net


def test_a_network():
    """The same again, as random numbers and deferred shapes depend on the seed alone."""
    inputs = np.random.RandomState(1).normal(size=(100, 1, 6, 6))
    inputs[CLASSES == 1] += 0.5

    def accuracy(net):
        return (net(array(inputs, "float32")).asnumpy().argmax(1) == CLASSES).mean()

    settings = {"learning_rates": [0.01, 0.03], "measure": {"accuracy": accuracy}, **QUICK}
    settings["methods"] = ["adam", "svrg+nag", "mars"]
    call = cnn, lambda net, X, y: SOFTMAX(net(X), y), (inputs, CLASSES)
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
    return runs[runs["data_passes"] < 6].drop(columns="seconds").to_csv()


def test_the_same_numbers_in_another_process():
    program = "import test_compare_engine as tests; print(tests.numbers())"
    _, output = run([sys.executable, "-c", program])
    assert output.endswith(numbers() + "\n")


ALL = "sgd nag-decay svrg alpha-svrg svrg-stored saga sag sarah storm mars mars+sgd adam lbfgs own"


@pytest.mark.parametrize("name", ALL.split())
@pytest.mark.parametrize("passes", [4, 6.5])
def test_equal_gradients(name, passes):
    seen = [0]

    def loss_of(net, X, y):
        seen[0] += len(X) if autograd.is_recording() else 0
        return squares(net, X, y)

    methods = {name: Twice if name == "own" else name}
    settings = {**ONE_RATE, "passes": passes, "loss_of": loss_of}
    (run,) = regression(methods, **settings).trainings
    recorded = round(100 * run.curve[-1]["data_passes"])
    checks = 2 * 16 + 100  # of one mini-batch, whether its loss is random; and the time of a pass
    assert seen[0] - checks == recorded
    assert abs(recorded - 100 * passes) <= (100 if name == "lbfgs" else 16)
    assert run.end["data_passes"] > passes - 1  # what is compared has all of them


def test_checks_for_random_numbers_are_no_gradients():
    methods = {"svrg": "svrg"}
    methods["own"] = lambda params, rate: SVRGTrainer(params, "sgd", {"learning_rate": rate})
    named, mine = regression(methods, **ONE_RATE).trainings
    assert named.curve[-1]["loss"] == mine.curve[-1]["loss"]


class Twice:
    """Anybody's trainer, which takes a closure and counts nothing."""

    def __init__(self, params, rate):
        self.trainer = plain(params, rate)

    def step(self, batch_size, closure):
        for _ in range(2):
            backward(closure)
        self.trainer.step(batch_size)


def test_pieces_of_large_data(monkeypatch):
    """Mini-batches are the same whether arrays are shuffled at once or in pieces."""
    whole = [*data.Data((X, Y), 16, 0).batches(0, 1)]
    monkeypatch.setattr(data, "CHUNK_SIZE", 40 * 5)
    pieces = [*data.Data((X, Y), 16, 0).batches(0, 1)]
    assert len(whole) == len(pieces) == 7
    for one, other in zip(sum(whole, ()), sum(pieces, ())):
        assert np.array_equal(one.asnumpy(), other.asnumpy())


def lucky(params, rate):
    """A trainer that learns at high rates with the first seed alone."""
    is_first = random.random() > 0.8  # the engine has seeded it
    return plain(params, rate if is_first or rate < 0.1 else 1e-6)


def test_the_best_rate_is_no_edge_and_chosen_by_all_seeds():
    methods = {"sgd": "sgd", "own": Twice, "lucky": lucky}
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


def test_a_known_minimum_and_a_callable():
    settings = {"passes": 60, "minimum": MINIMUM, "learning_rates": [0.03, 0.1, 0.3]}
    found = regression(["sgd", "svrg", "lbfgs"], batches, gaps=(1e-2, 1e-5), **settings)
    table = found.table()
    assert np.isnan(table.loc["sgd", "passes to 1e-05"])
    assert table.loc["lbfgs", "passes to 1e-05"] < table.loc["svrg", "passes to 1e-05"] < 60
    assert np.allclose(table["gap"], table["loss"] - MINIMUM, atol=1e-6)
    assert "to 0.01: until the gap is that part of the first one" in str(found)
    assert "First in passes: lbfgs 5; svrg " in found.verdict
    found = regression(["sgd"], gaps=[0.5, 1e-9], **settings)  # the smallest that one reaches
    assert found.verdict.startswith("First in seconds to a gap of 0.5 of the first one: sgd ")
    found = regression(["sgd"], minimum=MINIMUM + 0.01)
    assert "The minimum of 0.0559547 is none, and left out: loss is 0.04" in found.verdict
    assert "gap" not in found.table() and "passes to loss 0.04" in str(found)
    settings = {"measure": {"score": lambda net: -net.weight.data().asnumpy().std()}}
    settings["measure"]["of passes"] = lambda net: 0.25
    found = regression(["sgd"], objective="score", maximize=True, minimum=5.0, **settings)
    assert "gap" in found.table() and "left out" not in found.verdict
    assert re.search(r"^of passes +0\.25$", str(found), re.M)
    fixed = regression(["saga"], lambda seed, epoch: batches(seed, 0), batch_size=50)
    assert fixed.table().loc["saga", "minibatch"] == 16  # the function's
    assert fixed.table().loss.max() < 1


def plain(params, rate, wd=0.0):
    return gluon.Trainer(params, "sgd", {"learning_rate": rate, "wd": wd}, kvstore=None)


def test_the_verdict():
    """Who is first, of those that get there, and the code of the first one; nothing else."""
    found = regression({"sgd": "sgd", "decayed": partial(plain, wd=1.0)}, seeds=3)
    assert re.fullmatch(
        r"First in seconds to loss 0\.0\d+: sgd \S+ s\.\nFirst in passes: sgd \S+\.\n"
        r"In your own program, sgd:\ntrainer = gluon\.Trainer\(.*\)  # mini-batches of 16",
        found.verdict,
    )
    assert str(found).endswith(found.verdict) and "gap" not in str(found)
    verdict = regression({"mine": plain}, **ONE_RATE).verdict
    assert "own program" not in verdict and "First in passes: mine" in verdict
    # One of two seeds gets to the gap: the median is no number, and none is said.
    verdict = regression({"lucky": lucky, "sgd": "sgd"}, learning_rates=0.1, seeds=[0, 1]).verdict
    assert "nan" not in verdict and "inf" not in verdict


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
    options = {"nag": {"momentum": 0.5}, "svrg+nag": {"momentum": 0.8}}  # its own come first
    found = regression(["nag", "svrg+nag"], optimizer_params=options, **ONE_RATE)
    assert [training.options["momentum"] for training in found.trainings] == [0.5, 0.8]
    options = {"lbfgs": [{"memory": 1}, {"memory": 9}]}
    found = regression(["lbfgs"], optimizer_params=options, passes=9, seeds=1)
    short, long = found.trainings
    assert [short.options, long.options] == options["lbfgs"]
    assert long.end["loss"] < short.end["loss"] and found.chosen["lbfgs"] == [long]
    assert "'maxcor': 9" in found.verdict and found.table()["search trainings"].item() == 1


def test_a_rate_above_one_that_diverges_is_not_chosen():
    """As where a network is dead after a few steps, whose loss is finite."""

    def trainer(params, rate):
        return plain(params, rate if rate < 0.03 else 1e4 if rate < 0.3 else 1e-9)

    found = regression({"own": trainer}, seeds=1)
    assert found.chosen["own"][0].learning_rate < 0.03
    assert {each.learning_rate for each in found.trainings if each.diverged} == {0.03, 0.1}


def test_divergence_and_figure():
    found = regression(["sgd", "svrg"], learning_rates=[0.1, 1e4])
    for each in found.trainings:
        assert each.diverged == (each.learning_rate == 1e4)
        assert not each.diverged or each.curve[-1]["data_passes"] <= 2
    assert "svrg, rate 0.1" in found.plot().legends[0].texts[1].get_text()
    alone = regression(["sgd"], learning_rates=[1e4])
    assert alone.verdict.startswith("All methods diverged at all rates") and alone.plot()
    assert alone.table().isna().all()[["loss", "lowest"]].all() and len(alone._levels) == 0
    assert [axes.get_xlabel()[:7] for axes in found.plot().axes] == ["data pa", "seconds"]


def test_one_seed_that_diverges_is_not_what_the_best_method_reaches():
    calls = itertools.count()

    def trainer(params, rate):  # called once before the trainings of three seeds
        return plain(params, 1e4 if next(calls) == 3 else rate)

    found = regression({"own": trainer}, seeds=3, learning_rates=0.1)
    ends = [each.end["loss"] for each in found.chosen["own"][:2]]
    assert found.trainings[2].diverged and f"to loss {max(ends):.6g}: own" in found.verdict


def test_an_interrupt_returns_what_is_complete(monkeypatch):
    calls = itertools.count()

    def interrupted(*args):
        if next(calls) >= 6:
            raise KeyboardInterrupt
        return training.train(*args)

    monkeypatch.setattr(search, "train", interrupted)
    found = regression(["svrg", "sgd"], learning_rates=[0.1, 0.3, 1])
    assert found.interrupted and len(found.trainings) == 6 and [*found.chosen] == ["svrg", "sgd"]
    assert found.verdict.startswith("It ended early, and not all was tried.")
    with pytest.raises(KeyboardInterrupt):
        regression(["sgd"])


@pytest.fixture
def steps(monkeypatch):
    """What each trainer has in each of its steps, in a list for each name of a method."""
    found, step, train = {}, gluon.Trainer.step, training.train
    current = []

    def recording(self, batch_size, ignore_stale_grad=False):
        row = {"size": batch_size, "rate": self.learning_rate}
        if isinstance(self, VarianceReducedTrainer):
            row.update(snapshots=self.num_snapshots, lock=self.lock_random)
            row["passes"] = self.grad_evaluations / 100  # with this step
            row["cost"] = batch_size / 100 * (2 if self.has_snapshot else 1)
            row["coefficient"] = getattr(self, "coefficient", None)
        found.setdefault(current[-1], []).append(row)
        step(self, batch_size, ignore_stale_grad)

    def named(problem, method, *args):
        current.append(method.name)
        train(problem, method, *args)

    monkeypatch.setattr(gluon.Trainer, "step", recording)
    monkeypatch.setattr(search, "train", named)
    return found


@pytest.fixture
def clock(monkeypatch):
    """Seconds as samples of a loss take them, so that verdicts are the same each time."""
    clock = SimpleNamespace(now=0.0)

    def loss_of(net, X, y):
        clock.now += 0.0007 * len(X) if autograd.is_recording() else 0
        return squares(net, X, y)

    clock.loss_of = loss_of
    for module in (task, search, training):
        monkeypatch.setattr(module, "perf_counter", lambda: clock.now)
    return clock


def test_first_in_seconds_and_in_passes(clock):
    """L-BFGS goes on for as long as the slowest of the others."""

    class Slow(gluon.Trainer):
        def step(self, batch_size):
            clock.now += 0.02
            super().step(batch_size)

    def slow_measure(net):  # which takes no time of the training
        clock.now += 100
        return 0.0

    methods = {"ours": "svrg-stored+nag", "lbfgs": "lbfgs"}
    methods["slow"] = lambda params, rate: Slow(params, "sgd", {"learning_rate": rate})
    settings = {"gaps": [1e-2, 1e-3, 1e-9], "minimum": MINIMUM, "passes": 12}
    settings.update(measure={"slow": slow_measure}, learning_rates=[0.03, 0.1])
    found = regression(methods, loss_of=clock.loss_of, **settings)
    ours, rival = found.table().loc["ours"], found.table().loc["lbfgs"]
    assert ours["passes to 0.001"] > rival["passes to 0.001"] > 0
    ends = {name: some[0].curve[-1] for name, some in found.chosen.items()}
    assert ends["ours"]["seconds"] == pytest.approx(0.07 * 12, abs=0.1)
    assert ends["slow"]["seconds"] == pytest.approx(0.21 * 12, abs=0.1)
    assert ends["lbfgs"]["seconds"] == pytest.approx(ends["slow"]["seconds"], abs=0.1)
    assert ends["lbfgs"]["data_passes"] > 12
    a, b = rival["seconds to 0.001"], ours["seconds to 0.001"]
    text = f"a gap of 0.001 of the first one: lbfgs {a:.3g} s; ours {b:.3g} s"
    assert found.verdict.startswith(f"First in seconds to {text}")
    code = "scipy.optimize.minimize with {'maxcor': 30}: see methods.md#l-bfgs"
    assert found.verdict.splitlines()[-1].startswith(code)


def test_the_search_is_counted():
    options = [{}, {"momentum": 0.5}]
    found = regression(["sgd", "lbfgs"], optimizer_params={"sgd": options})
    table, runs = found.table(), found.runs
    others = [each for each in found.trainings if each not in found.chosen["sgd"]]
    others = [each.curve[-1] for each in others if each.method == "sgd"]
    assert table.loc["sgd", "search trainings"] == len(others) > 6
    assert table.loc["sgd", "search passes"] == sum(end["data_passes"] for end in others)
    seconds = sum(end["seconds"] for end in others)
    assert table.loc["sgd", "search seconds"] == seconds
    assert table.loc["lbfgs", "search trainings"] == 0
    apart = runs[~runs.chosen].groupby(["learning_rate", "options", "seed"]).ngroups
    assert apart == len(others) and runs[runs.chosen].seed.nunique() == 2
    # The next options begin a rate lower than the best of those before, before all seeds train.
    first, second = ([t for t in found.trainings if t.options == each] for each in options)
    best = min(first, key=lambda t: (t.seed, t.curve[-1]["loss"])).learning_rate
    assert second[0].learning_rate == pytest.approx(best / 3, rel=0.2)


@pytest.mark.parametrize("seconds", [1e-4, 1e4])
def test_rivals(seconds):
    rivals = {"newton": {"loss": MINIMUM, "seconds": seconds}}
    rivals["far"] = {"loss": 1.0, "seconds": 0.0}
    found = regression(["svrg+nag"], rivals=rivals, minimum=MINIMUM, gaps=1e-2)
    assert found.table().loc["newton", "seconds to 0.01"] == seconds
    best = {"best": {"loss": MINIMUM, "seconds": 1, "data_passes": 3}}  # the only one so far
    settings = {"minimum": MINIMUM, "gaps": (0.5, 1e-12)}
    assert "to a gap of 0.5" in regression(["sgd"], rivals=best, **settings).verdict
    assert np.isnan(found.table().loc["far", "seconds to 0.01"]) and found.plot()
    is_first = "to a gap of 0.01 of the first one: newton 0.0001 s; svrg+nag" in found.verdict
    assert is_first == (seconds < 1)
    assert "In your own program, svrg+nag:\ntrainer = SVRGTrainer(" in found.verdict


def test_a_budget_in_seconds(clock, capsys):
    """Each method has its share, and a training that is not complete does not count."""
    budget = {"seconds": 5, "seeds": 3, "progress": True}
    found = regression(["sgd", "nag", "adam"], loss_of=clock.loss_of, **budget)
    assert "21 trainings of 6 passes, about 0.22 minutes" in capsys.readouterr().err
    assert found.interrupted and [*found.chosen] == ["sgd", "nag", "adam"]
    assert found.trainings[0].learning_rate == 0.1  # the middle one of the first three
    assert clock.now < 6
    found = regression(["sgd", "lbfgs"], loss_of=clock.loss_of, seconds=5, seeds=1)
    assert [*found.chosen] == ["sgd", "lbfgs"] and clock.now < 11  # it keeps what it has
    found = regression(["sgd", "nag"], loss_of=clock.loss_of, seconds=0.5, seeds=3)
    assert "Not trained: nag." in found.verdict and len(found.trainings) == 1
    assert re.search(r"learning rate +0.1\*", str(found))  # it is alone, so at an end


def test_the_defaults():
    """L-BFGS is one of them, but where losses are random."""
    for loss_of, last in ((squares, "lbfgs"), (lambda net, X, y: squares(net, DROP(X), y), "mars")):
        settings = {"seeds": 1, "passes": 3, "learning_rates": 0.01, "progress": False}
        found = compare(dense, loss_of, (X, Y), **settings)
        assert [*found.chosen][-1] == last and len(found.chosen) > 5


def test_labels_from_one_and_gradients_that_add():
    settings, adding = {"methods": ["sgd", "lbfgs"], **ONE_RATE}, partial(requiring, "add")
    with noticed() as texts:
        found = regression(arrays=(X, CLASSES + 1), new_net=adding, **settings)
    assert texts == ["The labels are 1 to 2. If they are classes, number them from 0: pass y - 1."]
    right = regression(arrays=(X, CLASSES + 1.0 + 1e-9), **settings)
    for name in found.chosen:
        ends = [each.chosen[name][0].end["loss"] for each in (found, right)]
        assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_a_start_beside_zero():
    """There MXNet's sigmoid cross entropy has another gradient, and L-BFGS stays for long."""
    settings = {"new_net": partial(dense, weight_initializer="zeros"), **ONE_RATE}
    call = ["sgd", "lbfgs"], (X, CLASSES), lambda net, X, y: BINARY(net(X), y)
    found = regression(*call, **settings)
    (one,), (other,) = found.chosen.values()
    assert one.curve[0]["loss"] == other.curve[0]["loss"] == pytest.approx(np.log(2), rel=1e-2)
    assert abs(one.curve[0]["loss"] - np.log(2)) > 1e-6 and other.end["loss"] < 0.3


def test_the_smallest_gap():
    """Rounding errors of float32 are no distances; those of float64 are."""
    for dtype, least, tolerance in (("float32", OF_FLOAT32, 0.1), ("float64", 1e-14, 9)):
        settings = {"new_net": partial(dense, dtype=dtype), "seeds": 1, "passes": 60}
        found = regression(["lbfgs"], minimum=MINIMUM, **settings)
        assert found.table()["gap"].item() == pytest.approx(least, rel=tolerance)


def test_kinds_of_data():
    """Loaders and lists are read once, and have mini-batches of their size."""
    dataset = gluon.data.ArrayDataset(X.astype("float32"), Y.astype("float32"))
    loader = gluon.data.DataLoader(dataset, batch_size=16)
    kinds = [((X, Y), 16), ((csr_matrix(X), Y), 16)]
    kinds += [(given, None) for given in (loader, [*loader], iter(loader))]
    settings = [(given, {**ONE_RATE, "batch_size": size}) for given, size in kinds]
    found = [regression(["svrg"], given, **some) for given, some in settings]
    assert len({each.trainings[0].end["loss"] for each in found}) == 1


def test_the_default_minibatch(steps):
    """A preconditioner has about 32 steps in an epoch, unless the user has said a size."""
    sizes = [(1, 32, 1), (100, 32, 4), (300, 32, 16), (10**3, 32, 32), (9000, 64, 256)]
    sizes += [(20000, 128, 512), (10**5, 512, 4096), (10**6, 1024, 8192)]
    for n, size, own in sizes:
        found = data.Data((np.zeros((n, 1)),), None, 0)
        assert (found.size, found.preconditioned_size) == (size, own)
    for given, sizes in ((None, (32, 4)), (6, (6, 6))):
        found = regression(["svrg", "svrg-nystrom", "lbfgs"], **{**ONE_RATE, "batch_size": given})
        assert found.table()["minibatch"].tolist()[:2] == [*sizes]
        assert np.isnan(found.table()["minibatch"]["lbfgs"])
        lines = re.search(r"^minibatch +(\d+) +(\d+) +-$", str(found), re.M)
        assert tuple(map(int, lines.groups())) == sizes
        for name, size in zip(("svrg", "svrg-nystrom"), sizes):
            assert {each["size"] for each in steps[name]} == {size, 100 % size} - {0}
        steps.clear()


@pytest.mark.parametrize("name", ["sgd", "svrg", "adam", "rmsprop", "own", "lbfgs"])
def test_the_penalty_is_in_the_loss_of_all(name):
    """As if it stood in the loss, whether an optimizer decays weights or the engine adds it."""

    def penalized(net, X, y):
        squared = sum((p.data() ** 2).sum() for p in net.collect_params().values())
        return squares(net, X, y) + 0.15 * squared

    settings = {"new_net": partial(dense, in_units=5), **ONE_RATE}
    settings["methods"] = {name: plain if name == "own" else name}
    one = regression(l2=0.3, **settings).trainings[0]
    two = regression(loss_of=penalized, **settings).trainings[0]
    np.testing.assert_allclose(one.of("loss"), two.of("loss")[: len(one.curve)], rtol=1e-4)
    assert one.options == two.options


def lowest(X, y, decay, l1, is_class=False):
    """The minimum: its weights and its loss, by FISTA with restarts."""
    has_penalty = np.r_[np.ones(X.shape[1]), [0] if l1 else []]  # with L1, a bias is the last one
    X = np.c_[X, np.ones(len(X))] if l1 else X
    step = 1 / (np.linalg.eigvalsh(X.T @ X / len(X))[-1] + decay)
    w, z, number = np.zeros(X.shape[1]), np.zeros(X.shape[1]), 1.0
    for _ in range(20000):
        p = 1 / (1 + np.exp(-X @ z)) if is_class else X @ z
        moved = z - step * (X.T @ (p - y) / len(X) + decay * has_penalty * z)
        new = np.sign(moved) * np.maximum(np.abs(moved) - step * l1 * has_penalty, 0)
        number = 1.0 if (z - new) @ (new - w) > 0 else number
        following = (1 + np.sqrt(1 + 4 * number**2)) / 2
        z, w, number = new + (number - 1) / following * (new - w), new, following
    losses = np.logaddexp(0, X @ w) - y * (X @ w) if is_class else (X @ w - y) ** 2 / 2
    penalties = decay / 2 * w**2 + l1 * np.abs(w)
    return w, losses.mean() + has_penalty @ penalties


def test_proximal_operators(steps):
    """Their penalty is in the objective of all; who cannot have them is left out."""
    w, minimum = lowest(X, Y, 0.0, 0.5)
    zeros = {"zeros": lambda net: (net.weight.data().asnumpy() == 0).sum()}
    settings = {"prox": {".*weight": L1(0.5)}, "minimum": minimum, "passes": 40, "measure": zeros}
    settings.update(seeds=1, batch_size=5)
    settings["new_net"] = partial(dense, in_units=5)
    names = ["svrg+nag", "svrg-nystrom", "nag-decay", "sgd", "adam", "lbfgs"]
    found = regression(names, **settings)
    assert [*found.chosen] == names[:4]
    assert not any(each["snapshots"] for each in steps["sgd"]) and steps["svrg+nag"]
    table = found.table()
    assert 0 < (w == 0).sum() == table["zeros"]["svrg+nag"]
    for name in ("svrg+nag", "svrg-nystrom"):
        assert table["gap"][name] == pytest.approx(OF_FLOAT32, rel=2)
    assert table["gap"]["svrg+nag"] < table["gap"]["sgd"] < 0.1
    assert re.match(
        r"Left out: adam. L1\(strength=0.5\) needs an optimizer whose step is .*\n"
        r"Left out: lbfgs. It takes no proximal operators.\n",
        found.verdict,
    )


def test_bounds():
    """All begin inside of them, and stay there."""
    least = {"least": lambda net: net.weight.data().asnumpy().min()}
    found = regression(["svrg", "adam", "sgd"], prox=Box(0.25, 1), measure=least, **ONE_RATE)
    assert [*found.chosen] == ["svrg", "adam", "sgd"] and found.runs["least"].min() == 0.25


EPOCH = 7  # steps of 16 samples


@pytest.mark.parametrize(("plain_epochs", "every"), [(1, 1), (2, 1), (1, 2), (0, 3)])
def test_when_refreshes_come(plain_epochs, every, steps):
    """The coefficient of alpha-SVRG falls from 0.75 at the first one to 0 after the last one."""
    settings = {**ONE_RATE, "passes": 18.5, "plain_epochs": plain_epochs, "refresh_every": every}
    regression(["svrg", "alpha-svrg", "sarah", "storm"], **settings)
    most = steps["svrg"][-1]["snapshots"]
    for name in ("svrg", "alpha-svrg", "sarah"):
        for number, row in enumerate(steps[name]):
            expected = max(0, (number // EPOCH - plain_epochs) // every + 1)
            assert row["snapshots"] == expected
            alpha = 0.75 * (1 - (expected - 1) / most) if name == "alpha-svrg" else 1.0
            assert not expected or name == "sarah" or row["coefficient"] == pytest.approx(alpha)
        assert len(steps[name]) > 5 * EPOCH
    assert not any(row["snapshots"] for row in steps["storm"])


@pytest.mark.parametrize("name", ["nag-decay", "svrg+nag-decay", "nag", "saga"])
def test_the_rates_of_steps(name, steps):
    """A rate that decays is half a cosine of the gradients so far, as a part of all."""
    regression([name], **ONE_RATE)
    before, rates = 0, []
    for row in steps[name]:
        before = row["passes"] - row["cost"] if "svrg" in name else before
        rates.append(0.03 * (0.5 * (1 + np.cos(np.pi * before / 6)) if "decay" in name else 1))
        before += row["size"] / 100
    assert [row["rate"] for row in steps[name]] == pytest.approx(rates, rel=1e-6)
    assert "decay" not in name or rates[-1] < 0.01 * rates[0]


@pytest.mark.parametrize("is_random", [False, True])
def test_the_lock_of_random_numbers(is_random, steps):
    def loss_of(net, X, y):
        return squares(net, DROP(X) if is_random else X, y)

    names = ["svrg", "svrg-stored", "saga", "storm", "mars"]
    regression(names, loss_of=loss_of, **ONE_RATE)
    assert {row["lock"] for name in names for row in steps[name]} == {is_random}


def test_lbfgs_ends_where_it_was_accepted():
    """Its passes may be over within a line search."""
    found = regression(
        ["lbfgs"], (X, CLASSES), lambda net, X, y: BINARY(net(X), y), passes=8, seeds=3
    )
    for each in found.chosen["lbfgs"]:
        assert (np.diff(each.of("loss")) <= 0).all()


def test_stored_gradients_with_a_preconditioner(steps):
    """In its last epoch, a step takes one gradient, of a mini-batch of its own size."""
    regression(["svrg-stored-nystrom"], **{**ONE_RATE, "passes": 20, "batch_size": 4})
    passes = [row["passes"] for row in steps["svrg-stored-nystrom"][-24:]]
    np.testing.assert_allclose(np.diff(passes), 4 / 100)


def test_the_order_of_minibatches(monkeypatch):
    """Each comes once in an epoch; after the first one SAG draws them with replacement."""
    found = {}
    step = VarianceReducedTrainer.step

    @functools.wraps(step)
    def recording(self, *args, batch_index=None, **kwargs):
        found.setdefault(type(self).__name__, []).append(batch_index)
        return step(self, *args, batch_index=batch_index, **kwargs)

    monkeypatch.setattr(VarianceReducedTrainer, "step", recording)
    regression(["saga", "sag"], **{**ONE_RATE, "passes": 8})
    for name, is_sag in (("SAGATrainer", False), ("SAGTrainer", True)):
        epochs = np.reshape(found[name][: 7 * EPOCH], (7, EPOCH))
        whole = [sorted(epoch) == [*range(EPOCH)] for epoch in epochs]
        assert whole[0] and all(whole) != is_sag
        assert len({tuple(epoch) for epoch in epochs}) == 7


def growing(seed, epoch):
    yield from batches(0, 0)
    yield from [(X[:16], Y[:16])] * epoch


NET, COUNT = gluon.nn.Dense(1), itertools.count()
ACCURACY, USED = {"accuracy": lambda net: 0.5}, batches(0, 0)
TAKEN = ("loss", "seconds", "data_passes", "lowest", "options", "method", "search trainings")
TAKEN += ("passes to 0.001",)
MISTAKES = [
    ({"methods": ["svgr"]}, "no method 'svgr'. Did you mean 'svrg'"),
    ({"methods": []}, "No method is left to compare"),
    ({"methods": {"mine": lambda params, rate: None}}, "returned None, expected a trainer"),
    ({"methods": {"mine": lambda *_: SimpleNamespace(step=lambda batch_size, closure: None)}},
     "'mine' computes no gradient in epoch 0"),
    ({"passes": 0}, "passes must be finite, above 0"),
    ({"seeds": 0}, "seeds, learning_rates and gaps must not be empty"),
    ({"objective": "accuracy"}, "neither 'loss' nor measured"),
    ({"new_net": lambda: NET}, "must return new networks, with equal weights"),
    ({"new_net": lambda: gluon.nn.Dense(1, weight_initializer=mx.init.Constant(next(COUNT)))},
     "must return new networks, with equal weights"),
    ({"loss_of": lambda net, X, y: squares(net, X, y).mean()}, r"returned \(1?,?\) for a mini-b"),
    ({"data": (X, Y[:50])}, "must be equally long, not empty"),
    ({"data": X}, r"data must be a tuple of arrays, as in \(X, y\), a DataLoader"),
    ({"data": lambda seed, epoch: USED}, "gave no mini-batch: return a new generator"),
    ({"methods": ["saga"], "data": batches}, "'saga' keeps the gradient of each mini-batch"),
    ({"methods": ["saga"], "data": growing}, "gives other mini-batches in each epoch"),
    ({"methods": "svrg-nystrom", "optimizer_params": {"svrg-nystrom": {}}}, "takes no options"),
    ({"methods": "svrg-nystrom", "optimizer_params": {"nag": {}}}, "'nag', which no method here"),
    ({"optimizer_params": {"adam": {}}}, "has 'adam', which no method here takes"),
    ({"optimizer_params": {"sgd": {"momentun": 0}}}, "takes no argument 'momentun'"),
    ({"methods": ["lbfgs"], "loss_of": lambda net, X, y: squares(net, DROP(X), y)},
     "'lbfgs' needs the same loss each time"),
    ({"methods": ["lbfgs"], "prox": Box(0, 1)}, "left to compare: .*'lbfgs': 'It takes no prox"),
    ({"prox": {"nothing": L1(0.5)}}, "which fits none of the trainer's parameters"),
    ({"methods": ["svrg"], "passes": 2}, "'svrg' would never refresh: .* = 2 passes, not 2"),
    ({"measure": ACCURACY, "objective": "accuracy"}, "Is a larger 'accuracy' better"),
    ({"minimum": "low"}, "minimum must be a number, got str"),
    ({"minimum": 10}, "minimum is 10, and a new network is there already"),
    ({"gaps": ["a"]}, "each of gaps must be a number, got str"),
    *(({"measure": {name: len}}, f"cannot be called {name!r}") for name in TAKEN),
    ({"measure": {"gap": len}, "minimum": 0.0}, "cannot be called 'gap'"),
    ({"seeds": 2.0}, "seeds must be a whole number, got float"),
    ({"data": (np.where(X > 2, np.nan, X), Y)}, "Array 0 of data needs finite numbers"),
    ({"data": (X, np.where(Y > 0, "yes", "no"))}, "Array 1 .* np.unique"),
    ({"loss_of": lambda net, X, y: squares(net, X / 0, y)}, "loss of a new network is nan"),
    ({"loss_of": lambda net, X, y: 0 * squares(net, X, y)}, "loss of a new network is 0"),
    ({"optimizer_params": {"sgd": {"wd": 0.1}}}, "wd is no part of the loss .* Pass l2="),
    ({"new_net": NET}, "new_net must be a function that returns a new network"),
    ({"new_net": partial(requiring, "null")}, "no parameters to train"),
    ({"new_net": lambda: sequence(dense(), devices=contexts(2))}, "trains on one device"),
    ({"loss_of": lambda net, X, y: (squares(net, X, y), net(X))}, "returned tuple for a mini-b"),
    ({"data": iter(())}, "a used generator is empty"),
    ({"data": gluon.data.ArrayDataset(X, Y)}, "a DataLoader, .* got ArrayDataset"),
    ({"methods": [SVRGTrainer]}, "no method. Pass a name, as 'svrg\\+nag', or a dict"),
    ({"optimizer_params": {"momentum": [0.9, 0.99]}}, r'Pass .*\[\{"momentum": 0.9\}'),
    ({"optimizer_params": {"sgd": {"momentum": [0.9, 0.99]}}}, "a list of dicts to try"),
    ({"methods": ["lbfgs"], "optimizer_params": {"lbfgs": {"maxcor": 5}}}, "has a memory alone"),
    ({"rivals": {"newton": {"seconds": 1}}}, "loss of the rival 'newton' must be a number, got No"),
    ({"rivals": {"sgd": {"loss": 1, "seconds": 1}}}, "A rival cannot be called 'sgd'"),
    ({"seconds": 1e-9}, "The seconds were over before any training"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "said"), MISTAKES)
def test_mistakes(wrong, said):
    right = {"new_net": dense, "loss_of": squares, "data": (X, Y), "methods": ["sgd"], **ONE_RATE}
    with pytest.raises((TypeError, ValueError, TimeoutError), match=said):
        compare(**{**right, **wrong})


def test_full_gradients_of_batchnorm_have_the_minibatches():
    """And those of other networks large chunks."""
    for norm, most in ((True, 16), (False, 100)):
        sizes = set()

        def new_net(norm=norm):
            return sequence(*[gluon.nn.BatchNorm()] * norm, gluon.nn.Dense(1))

        def loss_of(net, X, y, sizes=sizes):
            if autograd.is_recording():
                sizes.add(len(X))
            return squares(net, X, y)

        compare(new_net, loss_of, (X, Y), methods=["svrg"], **ONE_RATE)
        assert max(sizes) == most
