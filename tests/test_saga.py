"""SAGA and SAG: what is their own, beside the suite of all methods."""

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from kit import assert_unchanged, everything
from loops import split_at
from mxnet import gluon
from problems import Dense, array, contexts, distance, parameters, values

from gluon_svrg import SAGATrainer, SAGTrainer, variance

PROBLEM = Dense("classification", hidden=(5,), seed=41)
BATCHES = PROBLEM.batches(5)  # 23 = 4 * 5 + 3
SETTINGS = {"learning_rate": 0.05, "momentum": 0.5}
TRAINERS = {SAGATrainer: oracle.SAGA, SAGTrainer: oracle.SAG}

both = pytest.mark.parametrize("cls", TRAINERS)


def make(cls=SAGATrainer, dtype="float64", devices=None, split=None, **settings):
    net = PROBLEM.network(dtype, devices)
    trainer = cls(net.collect_params(), "sgd", {**SETTINGS, **settings})
    return net, PROBLEM.closure(net, dtype, devices, split), trainer


def step(trainer, loss_of, number):
    index = BATCHES[number]
    return trainer.step(len(index), closure=lambda: loss_of(index), batch_index=number)


# --- identities ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("refresh", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_mean_is_that_of_the_rows_after_any_order_of_visits(cls, count, refresh):
    """Each row is the gradient at the weights of its last visit."""
    devices = contexts(count)
    net, loss_of, trainer = make(cls, devices=devices, split=split_at([0.1, 0.5][3 - count :]))
    rows = {}
    if refresh:
        trainer.update_full_grads(loss_of, BATCHES)
        rows = {n: PROBLEM.gradient(values(net), index)[0] for n, index in enumerate(BATCHES)}
    for number in (3, 3, 0, 4, 0, 0, 1, 4, 3):
        rows[number] = PROBLEM.gradient(values(net), BATCHES[number])[0]
        step(trainer, loss_of, number)
        entries = sum(len(BATCHES[visited]) for visited in rows)
        expected = [sum(parts) / entries for parts in zip(*rows.values())]
        assert distance(kit.full_gradients(trainer, net), expected) < 1e-12


def test_the_mean_of_the_table_does_not_drift():
    """Where nothing moves, steps leave it: ``(g - r) + S`` is exact, ``(S + g) - r`` is not."""
    net, loss_of, trainer = make(dtype="float32", learning_rate=0.0)
    trainer.update_full_grads(loss_of, BATCHES)
    before = kit.full_gradients(trainer, net)
    for _ in range(1000):
        step(trainer, loss_of, 4)  # 3 of 23 loss entries
    assert distance(kit.full_gradients(trainer, net), before) == 0


@both
def test_variance_where_the_number_of_entries_is_on_the_device(cls):
    """As on several workers, where rows are added in the first epoch."""
    _, loss_of, trainer = make(cls)
    for number in (0, 1):
        step(trainer, loss_of, number)
    expected = variance.variance(trainer, loss_of, BATCHES[:2])
    method = trainer._method
    method._entries = mx.nd.array([method._entries], dtype="float64")
    found = variance.variance(trainer, loss_of, BATCHES[:2])
    expected = pytest.approx((expected.estimate, expected.bias), rel=1e-12)
    assert (found.estimate, found.bias) == expected


@both
def test_one_minibatch_is_gradient_descent(cls):
    """With the only row always replaced, the estimate is the full gradient."""
    net, loss_of, trainer = make(cls)
    everyone = np.arange(len(PROBLEM.X))
    twin, optimizer = oracle.Method(PROBLEM.gradient, PROBLEM.initial), oracle.SGD(**SETTINGS)
    for _ in range(5):
        trainer.step(23, closure=lambda: loss_of(everyone), batch_index=0)
        twin.step(optimizer, everyone)
    assert distance(values(net), twin.weights) < 1e-12


@both
def test_micro_batches_that_only_some_parameters_accumulate(cls):
    """The others' gradients would be those of the last minibatch, and their rows those of all."""
    net, loss_of, trainer = make(cls)
    parameters(net)[0].grad_req = "add"
    trainer.update_full_grads(loss_of, BATCHES)
    step(trainer, loss_of, 0)
    kit.clear(net)
    trainer.correct_grads(lambda: loss_of(BATCHES[1]), batch_index=1)
    before = everything(trainer, net)
    with pytest.raises(RuntimeError, match="grad_req='add' and others 'write'"):
        trainer.correct_grads(lambda: loss_of(BATCHES[2]), batch_index=2)
    assert_unchanged(before, everything(trainer, net))
    trainer.step(len(BATCHES[1]))
    kit.clear(net)
    step(trainer, loss_of, 2)


@both
@pytest.mark.parametrize("devices", [None, contexts(2)])
def test_a_first_pass_that_trains(cls, devices):
    """Indices need not be those of positions: here they have gaps, and come in any order."""
    net, loss_of, trainer = make(cls, devices=devices)
    twin, optimizer = TRAINERS[cls](PROBLEM.gradient, PROBLEM.initial), oracle.SGD(**SETTINGS)
    assert trainer.full_grads is None
    for number in (4, 1, 4, 0, 1, 3, 2, 0, 4):
        index = BATCHES[number]
        row = np.int64(10 * number)
        trainer.step(len(index), closure=lambda: loss_of(index), batch_index=row)
        twin.step(optimizer, index, rows=[number])
    assert distance(values(net), twin.weights) < 1e-12
    assert distance(kit.full_gradients(trainer, net), twin.mean) < 1e-12
    assert trainer.grad_evaluations == sum(len(BATCHES[n]) for n in (4, 1, 4, 0, 1, 3, 2, 0, 4))


def test_parameters_whose_initialization_is_deferred():
    net = gluon.nn.Dense(3)
    net.initialize()
    trainer = SAGATrainer(net.collect_params(), "sgd", SETTINGS)
    trainer.step(2, closure=lambda: net(array(np.ones((2, 4)), "float32")), batch_index=0)
    shapes = {grads[0].shape for grads in trainer.full_grads.values()}
    assert shapes == {(3, 4), (3,)}


# --- rows move when the update has run -----------------------------------------------------------


@both
def test_a_step_that_fails_allows_the_index_again(cls):
    net, loss_of, trainer = make(cls)
    for fails in (False, True):
        if fails:
            before = everything(trainer, net)
            before.pop("grad_evaluations")
            size = kit.Indivisible(5)
            with pytest.raises(ZeroDivisionError):
                trainer.step(size, closure=lambda: loss_of(BATCHES[2]), batch_index=2)
            after = everything(trainer, net)
            after.pop("grad_evaluations")
            assert_unchanged(before, after)
            with pytest.raises(RuntimeError, match=r"step.. needs SAGA? gradients"):
                trainer.step(5)
        step(trainer, loss_of, 2)


def test_a_stale_gradient_moves_nothing():
    """`gluon.Trainer` raises after the reduction."""
    found = []
    for fails in (False, True):
        net, loss_of, trainer = make()
        extra = gluon.nn.Dense(2, in_units=2)
        extra.initialize()
        listed = [*net.collect_params().values(), *extra.collect_params().values()]
        trainer = SAGATrainer(listed, "sgd", SETTINGS)
        index = BATCHES[0]
        for number in (0, 1, 0):
            arguments = {"closure": lambda: loss_of(index), "batch_index": number}
            if fails:
                with pytest.raises(UserWarning, match=r"stale"):
                    trainer.step(5, **arguments)
            trainer.step(5, ignore_stale_grad=True, **arguments)
        found.append(values(net) + kit.full_gradients(trainer, net))
    assert_unchanged(*found)


def test_an_estimate_that_is_overwritten_moves_nothing():
    found = []
    for again in (False, True):
        net, loss_of, trainer = make()
        for number in (0, 1, 0):
            if again:
                for other in (2, number):
                    index = BATCHES[other]
                    trainer.correct_grads(lambda: loss_of(index), batch_index=other)
            step(trainer, loss_of, number)
        found.append(values(net) + kit.full_gradients(trainer, net))
    assert_unchanged(*found)


@both
def test_a_cast_between_the_halves_of_the_first_step(cls):
    """The new row was for arrays of another dtype, and is not used again."""
    found = []
    for is_held in (False, True):
        net, loss_of, trainer = make(cls, dtype="float32")
        if is_held:
            trainer.correct_grads(lambda: loss_of(BATCHES[0]), batch_index=0)
        net.cast("float64")
        for number in (0, 1, 0, 1):
            closure = PROBLEM.closure(net)
            step(trainer, closure, number)
        rows = trainer._method.table.values()
        assert {str(np.dtype(a.dtype)) for row in rows for g in row.grads for a in g} == {"float64"}
        found.append(values(net) + kit.full_gradients(trainer, net))
    assert_unchanged(*found)


@both
def test_a_cast_between_micro_batches(cls):
    """What the first one has added to the sum is in another dtype."""
    net, loss_of, trainer = make(cls, dtype="float32")
    for p in parameters(net):
        p.grad_req = "add"
    trainer.correct_grads(lambda: loss_of(BATCHES[0]), batch_index=0)
    net.cast("float64")
    loss_of = PROBLEM.closure(net)
    with pytest.raises(RuntimeError, match=r"new gradients since.* Set them to zero, and call"):
        trainer.correct_grads(lambda: loss_of(BATCHES[1]), batch_index=1)
    for p in parameters(net):
        p.grad()[:] = 0
    trainer.correct_grads(lambda: loss_of(BATCHES[1]), batch_index=1)
    trainer.step(5)
    assert set(trainer._method.table) == {1}


def test_an_index_twice_before_one_update_is_refused():
    net, loss_of, trainer = make()
    for p in parameters(net):
        p.grad_req = "add"
    first, second = BATCHES[:2]
    trainer.correct_grads(lambda: loss_of(first), batch_index=0)
    with pytest.raises(ValueError, match=r"batch_index=0 was used since the last update already"):
        trainer.correct_grads(lambda: loss_of(first), batch_index=0)
    trainer.correct_grads(lambda: loss_of(second), batch_index=1)
    trainer.step(10)
    twin, optimizer = oracle.SAGA(PROBLEM.gradient, PROBLEM.initial), oracle.SGD(**SETTINGS)
    twin.step(optimizer, first, second, rows=[0, 1])
    assert distance(values(net), twin.weights) < 1e-12
    kit.clear(net)
    step(trainer, loss_of, 0)


def test_update_needs_the_reduced_gradient():
    net, loss_of, trainer = make()
    step(trainer, loss_of, 1)
    before = values(net) + kit.full_gradients(trainer, net)
    trainer.correct_grads(lambda: loss_of(BATCHES[0]), batch_index=0)
    with pytest.raises(RuntimeError, match=r"update\(\) needs allreduce_grads\(\) before"):
        trainer.update(5)
    assert_unchanged(before, values(net) + kit.full_gradients(trainer, net))


# --- what is refused -----------------------------------------------------------------------------


@both
def test_a_step_is_never_silently_plain(cls):
    net, loss_of, trainer = make(cls)
    index = BATCHES[0]
    for refreshed in (False, True):
        with pytest.raises(TypeError, match=r"step.. needs batch_index"):
            trainer.step(5, closure=lambda: loss_of(index))
        with pytest.raises(TypeError, match=r"correct_grads.. needs batch_index"):
            trainer.correct_grads(lambda: loss_of(index))
        with pytest.raises(TypeError, match=r"must be the position of a minibatch"):
            trainer.step(5, closure=lambda: loss_of(index), batch_index=0.0)
        with mx.autograd.record():
            loss = loss_of(index)
        loss.backward()
        with pytest.raises(RuntimeError, match=r"batch_index=...\), or call correct_grads"):
            trainer.step(5)
        if not refreshed:
            trainer.update_full_grads(loss_of, BATCHES)
    assert_unchanged(values(net), PROBLEM.initial)


def test_there_is_no_snapshot():
    _, loss_of, trainer = make()
    for _ in range(2):
        assert (trainer.has_snapshot, trainer.wants_snapshot) == (False, False)
        assert trainer.snapshot is None
        message = r"at_snapshot\(\) needs a snapshot, and SAGATrainer"
        with pytest.raises(RuntimeError, match=message), trainer.at_snapshot():
            pass
        if trainer.full_grads is None:
            message = r"variance\(\) has nothing to compare gradients with: the table is empty"
            with pytest.raises(RuntimeError, match=message):
                variance.variance(trainer, loss_of, BATCHES)
        trainer.update_full_grads(loss_of, BATCHES)


def test_a_table_that_is_discarded_begins_anew():
    net, loss_of, trainer = make(momentum=0.0)
    trainer.update_full_grads(loss_of, BATCHES)
    step(trainer, loss_of, 3)
    trainer.discard_snapshot()
    assert trainer.full_grads is None
    for p, value in zip(parameters(net), PROBLEM.initial):
        p.set_data(array(value))
    assert_unchanged(values(net), PROBLEM.initial)
    fresh, fresh_loss_of, other = make(momentum=0.0)
    for number in (2, 0, 2):
        step(trainer, loss_of, number)
        step(other, fresh_loss_of, number)
    means = [kit.full_gradients(trainer, net), kit.full_gradients(other, fresh)]
    assert_unchanged(*means)


@both
def test_arguments_that_cannot_work(cls):
    params = PROBLEM.network(devices=contexts(2)).collect_params()
    compression = {"type": "2bit", "threshold": 0.5}
    with pytest.raises(ValueError, match=f"{cls.__name__} cannot compress gradients"):
        cls(params, "sgd", SETTINGS, compression_params=compression)
    with pytest.raises(ValueError, match=f"{cls.__name__} needs the reduced gradient back"):
        cls(params, "sgd", SETTINGS, update_on_kvstore=True)


@pytest.mark.parametrize(
    ("index", "rows", "error", "message"),
    [
        (-1, 5, IndexError, "batch_index is -1"),
        (5, 5, IndexError, r"batch_index is 5, and the gradients of 5 minibatches are stored: 0 t"),
        (4, 0, ValueError, "Minibatch 4 had 3 loss entries when .* and the closure returned 5"),
    ],
)
def test_wrong_minibatches(index, rows, error, message):
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    step(trainer, loss_of, 0)
    before = values(net) + kit.full_gradients(trainer, net)
    with pytest.raises(error, match=message):
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=index)
    assert_unchanged(before, values(net) + kit.full_gradients(trainer, net))


def test_an_index_below_zero():
    _, loss_of, trainer = make()
    with pytest.raises(IndexError, match=r"batch_index is -1\. It must be the position of the min"):
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=-1)


def test_a_variance_at_other_weights_leaves_the_check_to_the_first_step():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    before = values(net)
    kit.move(net, 0.01)
    variance.variance(trainer, loss_of, BATCHES)
    for p, value in zip(parameters(net), before):
        p.set_data(array(value))
    with pytest.raises(RuntimeError, match=r"stored gradient of minibatch 1 differs"):
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=1)


def test_data_that_was_reshuffled_are_found():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    with pytest.raises(RuntimeError, match=r"stored gradient of minibatch 1 differs"):
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=1)
    calls = kit.counted(loss_of)
    for expected in (2, 1):
        calls.calls.clear()
        step(trainer, calls, 0)
        assert len(calls.calls) == expected
    trainer.update_full_grads(loss_of, BATCHES)
    kit.move(net, 0.01)  # by the user: the rows are none of these weights
    calls.calls.clear()
    step(trainer, calls, 0)
    assert len(calls.calls) == 1


def test_parameters_that_have_changed():
    net, loss_of, trainer = make(dtype="float32")
    step(trainer, loss_of, 0)
    parameters(net)[0].grad_req = "null"
    with pytest.raises(RuntimeError, match=r"parameters have changed .*grad_req='null' now"):
        step(trainer, loss_of, 0)
    trainer.discard_snapshot()
    step(trainer, loss_of, 0)


# --- random numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh", [False, True])
def test_a_minibatch_keeps_its_random_numbers(refresh):
    """With the same masks each time and weights that stay, g is the row and v the mean."""
    net = kit.with_dropout()
    loss_of = PROBLEM.closure(net, "float32")
    still = {"learning_rate": 0.0}
    trainer = SAGATrainer(net.collect_params(), "sgd", still, lock_random=True)
    if refresh:
        trainer.update_full_grads(loss_of, BATCHES)
    else:
        for number in range(5):
            step(trainer, loss_of, number)
    mean = {p: row[0].asnumpy() for p, row in trainer.full_grads.items()}
    for number in (3, 0, 3, 4):
        index = BATCHES[number]
        step(trainer, loss_of, number)
        for p, expected in mean.items():
            grad = p.grad().asnumpy() / len(index)
            np.testing.assert_allclose(grad, expected, rtol=0, atol=1e-6)


# --- files ---------------------------------------------------------------------------------------


def test_a_file_of_a_part_of_the_first_pass(tmp_path):
    """Rows that were not visited are still to come."""
    net, loss_of, trainer = make()
    for number in (3, 1):
        step(trainer, loss_of, number)
    trainer.save_states(tmp_path / "states")
    other, other_loss_of, resumed = make()
    for p, value in zip(parameters(other), values(net)):
        p.set_data(array(value))
    resumed.load_states(tmp_path / "states")
    for number in (3, 0, 2, 1):
        step(trainer, loss_of, number)
        step(resumed, other_loss_of, number)
    assert_unchanged(everything(trainer, net), everything(resumed, other))


def test_files_of_other_methods_are_refused(tmp_path):
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES)
    trainer.save_states(tmp_path / "states")
    _, _, other = make(SAGTrainer)
    with pytest.raises(ValueError, match=r"SAGA"):
        other.load_states(tmp_path / "states")


# --- several workers -----------------------------------------------------------------------------


# --- passes to an accuracy -----------------------------------------------------------------------


@both
def test_passes_of_the_twin_on_breast_cancer(cls):
    """Batch size 1, the same order: as many passes to 1e-3, 1e-6 and 1e-9 as in NumPy."""
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    X, y = ((X - X.mean(axis=0)) / X.std(axis=0))[::6], y[::6].astype("float64")  # 95 of 569
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    n, ridge = len(X), 0.125  # exact in float32, as MXNet takes it

    def gradient(weights, index):
        (weight, bias), part = weights, X[index]
        p = 1 / (1 + np.exp(-(part @ weight[0] + bias)))
        return [((p - y[index])[None] @ part), (p - y[index]).sum(keepdims=True)], len(index)

    def norm(weights):
        """Of the gradient, with ridge on both: zero at the optimum."""
        grads = [g / n + ridge * w for g, w in zip(gradient(weights, np.arange(n))[0], weights)]
        return np.sqrt(sum(np.sum(g * g) for g in grads))

    # Not at zero: there MXNet's loss has a kink, and the gradient of label 0 is 0 instead of 1/2.
    initial = [np.full((1, X.shape[1]), 0.01), np.full(1, 0.01)]
    largest = 0.25 * (1 + 1) + ridge  # with the bias
    rate = 1 / (3 * largest)
    settings = {"learning_rate": rate, "wd": ridge}
    net = gluon.nn.Dense(1, in_units=X.shape[1], dtype="float64")
    net.initialize(mx.init.Constant(0.01))
    net.bias.set_data(array(initial[1]))
    net.hybridize(static_alloc=True, static_shape=True)
    for p in net.collect_params().values():
        p.wd_mult = 1.0
    loss_fn = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    trainer = cls(net.collect_params(), "sgd", settings)
    twin, optimizer = TRAINERS[cls](gradient, initial), oracle.SGD(**settings)
    inputs = [(array(X[i : i + 1]), array(y[i : i + 1, None])) for i in range(n)]
    rng = np.random.RandomState(0)
    targets = [norm(initial) * factor for factor in (1e-3, 1e-6, 1e-9)]
    passes = {"ours": [], "twin": []}
    for epoch in range(1, 41):
        for i in rng.permutation(n):
            data, label = inputs[i]
            trainer.step(1, closure=lambda: loss_fn(net(data), label), batch_index=i)
            twin.step(optimizer, np.array([i]), rows=[i])
        ours = [net.weight.data().asnumpy(), net.bias.data().asnumpy()]
        for name, weights in (("ours", ours), ("twin", twin.weights)):
            reached = sum(norm(weights) <= target for target in targets)
            passes[name] += [epoch] * (reached - len(passes[name]))
        if len(passes["ours"]) == len(passes["twin"]) == 3:
            break
    assert passes["ours"] == passes["twin"]
    assert len(passes["ours"]) == 3, passes
    assert distance(ours, twin.weights) < 1e-9
