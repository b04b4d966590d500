"""Networks of every kind: deferred, convolutional, recurrent, tied, frozen, sparse, and parts."""

from functools import partial

import kit
import mxnet as mx
import numpy as np
import problems
import pytest
from kit import HYBRIDIZE, assert_unchanged, backward, plain_step, svrg_step
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn
from plays import BATCHES, PROBLEM, TWO, WITH_STORED, Play, each_method
from problems import IS_NUMPY_LIKE, Dense, Tied, Words, array, contexts, distance, parameters

from gluon_svrg import MARSTrainer, SAGATrainer, SVRGTrainer
from gluon_svrg.prox import L1


def assert_unbiased(trainer, loss_of, data, count, tolerance=2e-5):
    """At other weights than the snapshot's, the mean of v is the gradient."""
    closures = [partial(loss_of, each) for each in data]
    params = [p for p in trainer.full_grads if p.grad_req != "null"]

    def live():
        mx.nd.waitall()
        return np.concatenate([p.grad().asnumpy().ravel() for p in params])

    trainer.step(count, closure=closures[0])
    expected = found = 0.0
    for closure in closures:
        backward(closure)
        expected = expected + live()
    for closure in closures:
        trainer.correct_grads(closure)
        found = found + live()
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("devices", [1, 2])
def test_deferred_initialization(hybridize, devices):
    """The first thing that a user calls may be `update_full_grads`, of other minibatches."""
    problem = Dense("classification", hidden=(5,), seed=40)
    problem.network = partial(problem.network, deferred=True)
    play = Play(WITH_STORED["SVRG"], problem, "step", contexts(devices), hybridize)
    play.refresh_alone(play.loss_of, PROBLEM.batches(7))
    play.twin.weights = problems.values(play.net)
    play.twin.refresh(PROBLEM.batches(7))
    assert distance(kit.full_gradients(play.trainer, play.net), play.twin.mean) < 1e-12
    play.run()


@each_method
def test_a_layer_that_no_minibatch_initializes(case):
    """Messages have its name in the network; MXNet 2.0 itself calls each weight a weight."""
    net = nn.HybridSequential()
    net.add(PROBLEM.network(deferred=True), nn.Dense(3, dtype="float64"))
    net[1].initialize()
    params, loss_of = net.collect_params(), PROBLEM.closure(net[0])
    name = next(key for key, p in params.items() if p is net[1].weight)
    trainer = case.make_trainer(params)

    def step():
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), **case.row(0))

    for call in (step, lambda: trainer.update_full_grads(loss_of, BATCHES)):
        with pytest.raises(RuntimeError, match=rf"No mini-batch initializes {name}.*in_units"):
            call()
    assert trainer.snapshot is None


def test_a_layer_that_only_training_uses():
    """A prediction does not initialize it."""
    net, auxiliary = PROBLEM.network(deferred=True), nn.Dense(3, dtype="float64")
    auxiliary.initialize()
    loss_of, other = PROBLEM.closure(net), PROBLEM.closure(auxiliary)
    params = [*net.collect_params().values(), *auxiliary.collect_params().values()]
    trainer = SVRGTrainer(params, "sgd", {"learning_rate": 0.1})

    def both(index):
        return loss_of(index) + other(index) if autograd.is_training() else loss_of(index)

    trainer.update_full_grads(both, BATCHES)
    assert auxiliary.weight in trainer.full_grads


class One(mx.init.Initializer):
    """MXNet's own cannot initialize what has no dimensions."""

    def _init_weight(self, name, array):
        array[() if array.shape == () else slice(None)] = 1


@kit.table("shape", () if IS_NUMPY_LIKE else (1,), (2, 1, 3, 1, 2, 1), (1, 2, 1, 3, 1, 1, 1))
def test_parameters_of_several_dtypes_and_of_any_shape(shape):
    """Without dimensions on 2.0; oneDNN has at most six."""
    weight = gluon.Parameter("weight", shape=shape, dtype="float32", init=One())
    scale = gluon.Parameter("scale", shape=(4,), dtype="float64", init=mx.init.One())
    for p in (weight, scale):
        p.initialize()
    X = np.random.RandomState(3).randn(12, *shape)

    def loss_of(index):
        x, w = array(X[index], "float32").reshape((4, -1)), weight.data().reshape((1, -1))
        return ((x * w).sum(axis=1).astype("float64") * scale.data() - 1) ** 2

    trainer = SVRGTrainer([weight, scale], "sgd", {"learning_rate": 0.01})
    batches = np.split(np.arange(12), 3)
    trainer.update_full_grads(loss_of, batches)
    assert_unbiased(trainer, loss_of, batches, 4)


@pytest.mark.filterwarnings("ignore:Cannot decide type")  # MXNet, of the input of the block
@pytest.mark.parametrize("kind", ["new", "hybridized", "frozen layers", "a symbol block"])
def test_convolutions(kind, tmp_path):
    """A frozen body among the trainer's parameters; an exported network with statistics."""
    images = array(np.random.RandomState(0).randn(60, 1, 8, 8), "float32")
    layers = nn.Conv2D(8, 3, padding=1), nn.BatchNorm(), nn.GlobalAvgPool2D(), nn.Flatten()
    net = kit.sequence(*layers, nn.Dense(10))
    if kind != "new":
        net.hybridize(static_alloc=kind == "hybridized")
        net(images)
    if kind == "frozen layers":
        for p in (p for layer in list(net)[:2] for p in layer.collect_params().values()):
            p.grad_req = "null"
    elif kind == "a symbol block":
        net.export(str(tmp_path / "net"))
        files = str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
        net = gluon.SymbolBlock.imports(*files)
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.5})

    def loss_of(start):
        return (net(images[start : start + 20]) ** 2).sum(axis=1)

    def statistics():
        mx.nd.waitall()
        return [p.data().asnumpy() for name, p in net.collect_params().items() if "running" in name]

    net(images)
    before = statistics()
    assert len(before) == 2
    trainer.update_full_grads(loss_of, (0, 20, 40))
    assert_unchanged(before, statistics())
    assert_unbiased(trainer, loss_of, (0, 20, 40), 20)
    assert any(map(np.array_equal, before, statistics())) == (kind == "frozen layers")


def test_statistics_at_the_snapshot_are_of_that_moment():
    """A pass at the snapshot starts from the states then, whatever passes were before it."""
    net, loss_of, trainer = kit.make(PROBLEM, "float32", net=kit.with_norm(hybridize={}))
    X, norm = array(PROBLEM.X, "float32"), net[1]
    for _ in range(2):
        mx.nd.waitall()
        then = [norm.running_mean.data().asnumpy(), norm.running_var.data().asnumpy()]
        at_refresh = net(X).asnumpy()
        trainer.update_full_grads(loss_of, BATCHES)
        kit.one_epoch(trainer, loss_of, BATCHES)
    now = net(X).asnumpy()
    assert not np.array_equal(at_refresh, now)
    for _ in range(2):
        with pytest.raises(KeyError), trainer.at_snapshot():
            np.testing.assert_array_equal(net(X).asnumpy(), at_refresh)
            backward(lambda: loss_of(BATCHES[0]))  # moves the statistics that it sees, a copy
            raise KeyError
        np.testing.assert_array_equal(net(X).asnumpy(), now)
    kept = [trainer.snapshot[p][0].asnumpy() for p in (norm.running_mean, norm.running_var)]
    assert_unchanged(kept, then)


@pytest.mark.parametrize("hybridize", HYBRIDIZE[:3])
def test_minibatches_of_other_shapes(hybridize):
    """Bucketing: sentences of several lengths."""
    net, rng = rnn.GRU(5, input_size=3), np.random.RandomState(0)
    net.initialize()
    if hybridize is not None:
        net.hybridize(**hybridize)
    sentences = [array(rng.randn(length, 2, 3), "float32") for length in (3, 5, 3, 7, 5)]

    def loss_of(x):
        return ((net(x) - 0.3) ** 2).sum(axis=2)

    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    trainer.update_full_grads(loss_of, sentences)
    assert_unbiased(trainer, loss_of, sentences, 6, 1e-4)


@pytest.mark.parametrize("hybridize", [None, {}])
@each_method
def test_layers_that_share_parameters(case, hybridize):
    """MXNet 2.0 lists those several times."""
    Play(case, Tied("classification", hidden=(4, 4)), hybridize=hybridize).run()


class Parts:
    """A network, of whose layers a trainer has the last one."""

    def __init__(self, hybridize, grad_req):
        mx.random.seed(1)
        with mx.name.NameManager():
            self.net = kit.with_norm(hybridize=hybridize)
        dense, self.norm, self.head = self.net
        self.of_body = [dense.weight, dense.bias, self.norm.gamma, self.norm.beta]
        for p in self.of_body:
            p.grad_req = grad_req
        self.loss_of = PROBLEM.closure(self.net, "float32")

    def trainer(self, cls=SVRGTrainer):
        return cls(self.head.collect_params(), "sgd", {"learning_rate": 0.1})

    def rest(self):
        mx.nd.waitall()
        statistics = self.norm.running_mean.data(), self.norm.running_var.data()
        return [a.asnumpy() for a in (*(p.grad() for p in self.of_body), *statistics)]


@pytest.mark.parametrize("hybridize", HYBRIDIZE)
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_the_rest_is_as_after_one_backward(hybridize, grad_req, tmp_path):
    """A refresh leaves gradients, marks and statistics alone; a step moves them once."""
    parts, plain = Parts(hybridize, grad_req), Parts(hybridize, grad_req)
    trainer, plain_trainer = parts.trainer(), plain.trainer(cls=gluon.Trainer)
    parts.of_body[0].data()._fresh_grad = True  # as before a step of its trainer
    for resumes in (False, False, True):
        before = parts.rest(), [p.data()._fresh_grad for p in parts.of_body]
        if resumes:
            trainer.save_states(tmp_path / "states")
            trainer = parts.trainer()
            trainer.load_states(tmp_path / "states")
        else:
            trainer.update_full_grads(parts.loss_of, BATCHES)
        assert_unchanged(before[0], parts.rest())
        assert before[1] == [p.data()._fresh_grad for p in parts.of_body]
        for index in BATCHES:
            for name in ("weight", "bias"):  # the same head, so that both bodies see the same
                getattr(plain.head, name).set_data(getattr(parts.head, name).data())
            trainer.step(len(index), closure=lambda: parts.loss_of(index))
            plain_step(plain_trainer, lambda: plain.loss_of(index), len(index))
            assert_unchanged(parts.rest(), plain.rest())


@pytest.mark.parametrize("hybridize", [None, {}])
def test_a_frozen_teacher_that_follows(hybridize, tmp_path):
    """Estimates have today's teacher, `at_snapshot` that of the snapshot, and files both."""
    nets, both = [PROBLEM.network(hybridize=hybridize) for _ in range(2)], nn.HybridSequential()
    both.add(*nets)
    for parameter in parameters(nets[1]):
        parameter.grad_req = "null"
    loss_function, params = gluon.loss.L2Loss(), both.collect_params()
    trainer, resumed = (SVRGTrainer(params, "sgd", {"learning_rate": 0}) for _ in range(2))

    def loss_of(index):
        X = array(PROBLEM.X[index])
        return loss_function(nets[0](X), nets[1](X) + 1)

    def outputs():
        return [net(array(PROBLEM.X)).asnumpy() for net in nets]

    then = outputs()
    trainer.update_full_grads(loss_of, BATCHES)
    for seed, net in enumerate(nets):
        kit.move(net, 0.3, seed)
    now = outputs()
    assert_unbiased(trainer, loss_of, BATCHES, 5, 1e-6)
    trainer.save_states(tmp_path / "states")
    resumed.load_states(tmp_path / "states")
    for each in (trainer, resumed):
        with each.at_snapshot():
            assert_unchanged(then, outputs())
        assert_unchanged(now, outputs())


@pytest.mark.parametrize("name", ["SVRG", "stored", "SAGA", "approximate MARS"])
def test_weights_that_were_taken_before_the_call(name):
    """They are not those of the pass, so that both would write one buffer."""
    play = Play(WITH_STORED[name])
    parameter, outside = parameters(play.net)[0], parameters(play.net)[0].data()

    def loss_with(weight=None):
        weight = parameter.data() if weight is None else weight
        return play.loss_of(play.batches[0]) + (weight * weight).sum()

    refresh, step = partial(play.refresh_alone, data=[()]), partial(play.step_alone, 0)
    for call in (refresh, step):
        with play.refuses(RuntimeError, r"Call Parameter\.data\(\) inside the closure"):
            call(closure=lambda: loss_with(outside))
        call(closure=loss_with)
        step(closure=loss_with)


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_frozen_values_of_any_dtype(dtype):
    """Index tables and masks: each snapshot has a copy."""
    net, loss_of, _ = kit.make(PROBLEM)
    table = gluon.Parameter("table", grad_req="null", shape=(3,), dtype=dtype, init="zeros")
    table.initialize()
    trainer = SVRGTrainer({"table": table, **dict(net.collect_params().items())}, "sgd")
    for values_now in ([0, 1, 1], [1, 0, 1]):
        table.set_data(array(values_now, dtype))
        trainer.update_full_grads(loss_of, BATCHES)
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]))
        kept = trainer.snapshot[table][0]
        assert kept.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(kept.asnumpy(), np.array(values_now, dtype))


def test_weights_copied_inside_a_pass():
    """For a teacher that follows, or a metric: they are arrays like any other."""
    net, loss_of, trainer = kit.make(PROBLEM)
    weight, other = parameters(net)[0], parameters(PROBLEM.network())[0]
    buffer = weight.data() * 0

    def copied(index=BATCHES[0]):
        with autograd.pause():
            buffer[:] = weight.data()
            other.set_data(weight.data())
            (mx.np if IS_NUMPY_LIKE else mx.nd).array(weight.data())
        return loss_of(index)

    trainer.update_full_grads(copied, BATCHES)
    then = weight.data().asnumpy()
    kit.one_epoch(trainer, copied, BATCHES)
    with trainer.at_snapshot():
        copied()
    for found in (buffer, other.data()):
        np.testing.assert_array_equal(found.asnumpy(), then)


@pytest.mark.parametrize("devices", [2, 3])
def test_statistics_on_devices_that_were_set_anew(devices):
    """MXNet averages the copies, which differ; the snapshot holds."""
    where = contexts(devices)
    net, loss_of, trainer = kit.make(PROBLEM, "float32", where, net=kit.with_norm(where))
    trainer.update_full_grads(loss_of, BATCHES)
    for renewed in (False, True):
        if renewed:
            for p in net.collect_params().values():
                getattr(p, "reset_device", p.reset_ctx)(where)
        kit.one_epoch(trainer, loss_of, BATCHES)
    assert trainer.inner_steps == 2 * len(BATCHES)


# --- sparse gradients and weights, as the dense network: on MXNet 1.9.1 --------------------------
SENTENCES = np.array_split(np.arange(30), 4)
each_kind = pytest.mark.parametrize("kind", ["sparse gradient", "sparse weight"])


def words(kind, devices=None, **kwargs):
    if IS_NUMPY_LIKE:
        pytest.skip("MXNet 2.0 has no sparse arrays in Gluon")
    return kit.make(Words(kind, 30), "float32", devices, **{"rate": 0.2, **kwargs})


def all_values(net):
    mx.nd.waitall()
    return [*problems.values_of_any([net[0].weight, net[1].weight, net[1].bias])]


def trained(net, loss_of, trainer, epochs=4):
    kit.train(trainer, loss_of, SENTENCES, epochs)
    return all_values(net)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("kvstore", ["local", "device"])
@each_kind
def test_as_the_dense_network(kind, devices, kvstore, optimizer):
    settings = {"devices": devices, "kvstore": kvstore, "optimizer": optimizer}
    dense, sparse = (trained(*words(each, **settings)) for each in ("dense", kind))
    np.testing.assert_allclose(problems.flat(sparse), problems.flat(dense), atol=1e-6)


def test_a_prox_is_refused():
    with pytest.raises(ValueError, match=r"A prox needs .* is row_sparse, which only"):
        words("sparse weight", prox=L1(0.1))


@each_kind
def test_without_a_snapshot_it_is_gluon_trainer(kind):
    found = []
    for cls in (gluon.Trainer, SVRGTrainer):
        net, loss_of, trainer = words(kind, cls=cls)
        step = svrg_step if cls is SVRGTrainer else plain_step
        for index in SENTENCES:
            step(trainer, lambda: loss_of(index), len(index))
        found.append(all_values(net))
    assert_unchanged(*found)


def test_rows_that_the_last_two_minibatches_do_not_reach():
    """Lazy updates of approximate MARS leave them: its mean is that of the last one alone."""
    net, loss_of, trainer = words("sparse gradient", cls=MARSTrainer, optimizer="adam", exact=False)
    largest = Words("sparse gradient", 30).X.max(axis=1)
    minibatches = [np.flatnonzero((largest < 8) == is_low) for is_low in (True, False)]
    for number, index in enumerate([minibatches[1], *[minibatches[0]] * 4]):
        before = all_values(net)[0]
        trainer.step(len(index), closure=lambda: loss_of(index))
        stays = np.all(all_values(net)[0] == before, axis=1)
        assert number < 2 or np.all(stays[8:])
    assert not np.any(stays[:8])


def test_states_of_sparse_networks_resume(tmp_path):
    first, second = (words("sparse gradient") for _ in range(2))
    trained(*first, epochs=1)
    first[2].save_states(tmp_path / "states")
    first[0].save_parameters(str(tmp_path / "weights"))
    second[0].load_parameters(str(tmp_path / "weights"))
    second[2].load_states(tmp_path / "states")
    for _, loss_of, trainer in (first, second):
        kit.one_epoch(trainer, loss_of, SENTENCES)
    assert_unchanged(all_values(first[0]), all_values(second[0]))


def test_one_gradient_that_accumulates():
    """MXNet's embedding can only write sparse gradients, not add them."""
    found = []
    for kind in ("dense", "sparse gradient"):
        net, loss_of, trainer = words(kind, cls=SAGATrainer)
        net.collect_params().setattr("grad_req", "add")
        trainer.update_full_grads(loss_of, SENTENCES)
        for number in (2, 0, 1, 3):
            net.collect_params().zero_grad()
            index = SENTENCES[number]
            trainer.step(len(index), closure=lambda: loss_of(index), batch_index=number)
        found.append(all_values(net))
    np.testing.assert_allclose(*map(problems.flat, found), atol=1e-6)


@pytest.mark.parametrize("kvstore", ["local", "device"])
@pytest.mark.parametrize("devices, there", [(TWO, None), (TWO[:1], True)])
def test_a_sparse_parameter_of_the_users_own(kvstore, devices, there):
    """On MXNet 2.0 a parameter can be sparse where NumPy's interface is turned off."""
    where = {"kvstore": kvstore, "update_on_kvstore": there}
    with mx.util.np_array(False):
        weight = gluon.Parameter("w", shape=(6, 2), stype="row_sparse", grad_stype="row_sparse")
        weight.initialize(mx.init.One(), ctx=devices)
        trainer = SVRGTrainer([weight], "sgd", {"learning_rate": 0.1}, **where)
        every = [mx.nd.arange(6, ctx=device, dtype="int64") for device in devices]

        def loss_of(target):
            rows = [weight.row_sparse_data(numbers) for numbers in every]
            return [((row - target.as_in_context(row.ctx)) ** 2).sum(axis=1) for row in rows]

        targets = [mx.nd.array(np.random.randn(6, 2)) for _ in range(3)]
        trainer.update_full_grads(loss_of, targets)
        mean = 2 * (1 - np.mean([target.asnumpy() for target in targets], axis=0)) / 6
        trainer.step(6 * len(devices), closure=lambda: loss_of(targets[0]))
        found = weight.row_sparse_data(every[0]).asnumpy()
        np.testing.assert_allclose(found, 1 - 0.1 * mean, rtol=1e-5)
