"""Stored gradients: one gradient a step, and the same numbers as with two."""

import warnings
from functools import partial

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import assert_unchanged, everything
from mxnet import gluon
from problems import IS_NUMPY_LIKE, Dense, contexts, distance, parameters, values

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=21)
BATCHES = PROBLEM.batches(5)  # the last is shorter
TWO = contexts(2)
make = partial(kit.make, PROBLEM, settings={"learning_rate": 0.1, "momentum": 0.9})


def train(trainer, loss_of, batches, store, epochs=4, seed=0):
    """The order of the minibatches may change, they themselves do not."""
    rng = np.random.RandomState(seed)
    for epoch in range(epochs):
        if epoch % 2 == 0:
            trainer.update_full_grads(loss_of, batches, store_grads=store)
        for i in rng.permutation(len(batches)):
            index = batches[i]
            trainer.step(
                len(index), closure=lambda: loss_of(index), batch_index=i if store else None
            )
    mx.nd.waitall()


ROUNDING = {"float64": 1e-12, "float32": 1e-4, "float16": 1e-2}


def assert_equal_to_rounding(first, second, dtype="float64"):
    """A stored gradient is added in another order than one that is taken anew."""
    assert distance(first, second) < ROUNDING[dtype]


@given(
    dtype=st.sampled_from(["float64", "float32"]),
    size=st.integers(1, 23),
    count=st.integers(1, 3),
    hybridize=st.sampled_from([None, {}, {"static_alloc": True, "static_shape": True}]),
    coefficient=st.sampled_from([1.0, 0.3]),
)
def test_equal_to_recomputing(dtype, size, count, hybridize, coefficient):
    devices = contexts(count) if count > 1 else None
    batches, found = PROBLEM.batches(size), []
    for store in (False, True):
        net, loss_of, trainer = make(dtype, devices, hybridize=hybridize, coefficient=coefficient)
        train(trainer, loss_of, batches, store, epochs=3)
        found.append(values(net))
    assert_equal_to_rounding(*found, dtype=dtype)


def test_the_oracle():
    net, loss_of, trainer = make()
    reference, optimizer = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial), oracle.SGD(0.1, 0.9)
    train(trainer, loss_of, BATCHES, store=True)
    rng = np.random.RandomState(0)
    for epoch in range(4):
        if epoch % 2 == 0:
            reference.refresh(BATCHES)
        for i in rng.permutation(len(BATCHES)):
            optimizer.step(reference.weights, reference.estimate(BATCHES[i]), len(BATCHES[i]))
    assert distance(values(net), reference.weights) < 1e-10


def test_one_gradient_a_step():
    _, loss_of, trainer = make(lock_random=True)
    calls = []

    def counted(index):
        calls.append(len(index))
        return loss_of(index)

    trainer.update_full_grads(counted, BATCHES, store_grads=True)
    trainer.step(5, closure=lambda: counted(BATCHES[1]), batch_index=1)
    before, evaluated = len(calls), trainer.grad_evaluations
    assert evaluated == sum([5, 5, 5, 5, 3]) + 5  # the losses of the first were computed again
    trainer.step(5, closure=lambda: counted(BATCHES[0]), batch_index=0)
    trainer.step(3, closure=lambda: counted(BATCHES[-1]), batch_index=np.int64(4))
    assert calls[before:] == [5, 3]
    assert trainer.grad_evaluations == evaluated + 5 + 3


def test_with_and_without_index_in_turn():
    found = []
    for store in (False, True):
        net, loss_of, trainer = make()
        trainer.update_full_grads(loss_of, BATCHES, store_grads=store)
        for i in (2, 2, 0, 4, 1):
            use = store and i != 0
            batch = BATCHES[i]
            trainer.step(len(batch), closure=lambda: loss_of(batch), batch_index=i if use else None)
        found.append(values(net))
    assert_equal_to_rounding(*found)


def test_without_a_snapshot_the_index_has_no_effect():
    """Warm-up needs no loop of its own."""
    found = []
    for index in (None, 7):
        net, loss_of, trainer = make()
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=index)
        found.append(values(net))
    assert_unchanged(*found)


def test_accumulation_and_correct_grads():
    found = []
    for store in (False, True):
        net, loss_of, trainer = make()
        for parameter in net.collect_params().values():
            parameter.grad_req = "add"
        trainer.update_full_grads(loss_of, BATCHES, store_grads=store)
        for _ in range(2):
            for parameter in parameters(net):
                for grad in parameter.list_grad():
                    grad[:] = 0
            for i in (1, 3):
                trainer.correct_grads(lambda: loss_of(BATCHES[i]), batch_index=i if store else None)
            trainer.allreduce_grads()
            trainer.update(10)
        found.append(values(net))
    assert_equal_to_rounding(*found)


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index, error, message",
    [
        (5, IndexError, r"batch_index is 5, and the gradients of 5 minibatches are stored: 0 to 4"),
        (-1, IndexError, "batch_index is -1"),
        (1.0, TypeError, "batch_index must be .* an integer, got float"),
        (True, TypeError, "got bool"),
        ("0", TypeError, "got str"),
        (
            4,
            ValueError,
            "Minibatch 4 had 3 loss entries when its gradient was stored, .* returned 5",
        ),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_wrong_index(index, error, message, first):
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    if not first:
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=0)
    before = everything(trainer, net)
    with pytest.raises(error, match=message):
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=index)
    assert_unchanged(before, everything(trainer, net))
    trainer.step(5, closure=lambda: loss_of(BATCHES[1]), batch_index=1)


def test_entries_per_device_are_counted():
    cuts = [3]
    net = PROBLEM.network("float64", TWO)
    trainer = SVRGTrainer(net.collect_params(), "sgd")
    loss_of = PROBLEM.closure(net, "float64", TWO, lambda index: np.split(index, cuts))
    trainer.update_full_grads(loss_of, BATCHES[:3], store_grads=True)
    cuts[0] = 4
    with pytest.raises(ValueError, match=r"had 5 loss entries \(3, 2 per device\) .* 5 .*\(4, 1"):
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=0)


def test_reshuffled_data():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    before = everything(trainer, net)
    with pytest.raises(RuntimeError, match=r"minibatch 0 differs .* was the data reshuffled"):
        trainer.step(5, closure=lambda: loss_of(BATCHES[1]), batch_index=0)
    assert_unchanged(before, everything(trainer, net))
    trainer.step(5, closure=lambda: loss_of(BATCHES[1]), batch_index=1)
    trainer.update_full_grads(loss_of, BATCHES[::-1], store_grads=True)
    with pytest.raises(RuntimeError, match="reshuffled"):  # looked at after each refresh
        trainer.step(5, closure=lambda: loss_of(BATCHES[1]), batch_index=1)


def test_weights_that_changed_after_the_refresh_are_no_reshuffled_data():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    net[0].weight.set_data(net[0].weight.data() * 2)
    trainer.step(5, closure=lambda: loss_of(BATCHES[1]), batch_index=1)


@pytest.mark.parametrize("again", [False, True])
def test_an_index_without_stored_gradients(again):
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES, store_grads=again)
    if again:
        trainer.update_full_grads(loss_of, BATCHES)  # this one stores nothing
    before = everything(trainer, net)
    with pytest.raises(RuntimeError, match=r"update_full_grads\(closure, data, store_grads=True\)"):
        trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=0)
    assert_unchanged(before, everything(trainer, net))


def test_an_index_without_closure():
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    with pytest.raises(TypeError, match="needs the closure"):
        trainer.step(5, batch_index=0)


def test_an_error_in_the_next_full_pass_keeps_them():
    found = []
    for fails in (False, True):
        net, loss_of, trainer = make()
        trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
        trainer.step(5, closure=lambda: loss_of(BATCHES[3]), batch_index=3)
        if fails:
            with pytest.raises(IndexError, match="out of bounds"):
                trainer.update_full_grads(loss_of, [*BATCHES[:2], np.array([99])], store_grads=True)
        trainer.step(5, closure=lambda: loss_of(BATCHES[1]), batch_index=1)
        found.append(values(net))
    assert_unchanged(*found)


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_progress_shows_the_bytes(known, capfd):
    _, loss_of, trainer = make("float32")
    size = 4 * sum(value.size for value in PROBLEM.initial) / 1e6
    data = BATCHES if known else iter(BATCHES)
    trainer.update_full_grads(loss_of, data, store_grads=True, progress=True)
    words = f"{5 * size:.3g} MB" if known else f"{size:.3g} MB each"
    said = f"storing {words}"
    assert said in capfd.readouterr().err


# --- random numbers ----------------------------------------------------------------------------


def random_network():
    mx.random.seed(5)
    return kit.with_dropout(units=8)


@pytest.mark.parametrize("mode", [True, "auto"])
def test_each_position_draws_its_own_random_numbers_again(mode):
    """At the snapshot, the estimate from each stored gradient is the full gradient."""
    net = random_network()
    trainer = SVRGTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.0}, lock_random=mode, coefficient=1.0
    )
    loss_of = PROBLEM.closure(net, "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    said = [str(w.message) for w in caught if "draws random numbers" in str(w.message)]
    assert len(said) == (1 if mode == "auto" else 0)
    # Where random numbers are found, the first minibatch is taken once more, under the lock.
    cost = sum([5, 5, 5, 5, 3])
    assert trainer.grad_evaluations == cost
    mean = trainer.full_grads
    after = []
    for i in (3, 1, 4, 1, 3):
        index = BATCHES[i]
        trainer.correct_grads(lambda: loss_of(index), batch_index=i)
        for parameter, (mu,) in mean.items():
            expected = len(index) * mu.asnumpy()
            np.testing.assert_allclose(parameter.grad().asnumpy(), expected, rtol=0, atol=1e-5)
        trainer.update(len(index))
        after.append(mx.nd.random.uniform(shape=(1,)).asscalar())
    assert len(set(after)) == len(after)  # the generator does not start again at each position


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pytest.warns passes MXNet's own on
def test_the_lock_is_as_before_if_the_pass_fails():
    net = random_network()
    trainer = SVRGTrainer(net.collect_params(), "sgd")
    loss_of = PROBLEM.closure(net, "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(IndexError, match="out of bounds"):
            trainer.update_full_grads(loss_of, [BATCHES[0], np.array([99])], store_grads=True)
    with pytest.warns(UserWarning, match="random"):
        trainer.update_full_grads(loss_of, BATCHES, store_grads=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pytest.warns passes MXNet's own on
def test_a_closure_that_is_not_repeatable():
    _, loss_of, trainer = make()
    rng = np.random.RandomState(0)

    def own_random(index):
        return loss_of(index) * float(rng.rand())

    for _ in range(2):  # the lock is as before, and no warning takes it for dropout
        with pytest.raises(RuntimeError, match="must compute the same each time"):
            trainer.update_full_grads(own_random, BATCHES, store_grads=True)
        assert trainer.num_snapshots == 0


def test_an_overflow_confirms_nothing():
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    trainer.correct_grads(lambda: loss_of(BATCHES[0]) * np.nan, batch_index=0)
    with pytest.raises(RuntimeError, match="reshuffled"):
        trainer.correct_grads(lambda: loss_of(BATCHES[1]), batch_index=0)


def test_random_numbers_go_on_after_an_error():
    _, loss_of, trainer = make(lock_random=True)
    trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    drawn = set()
    for _ in range(3):
        with pytest.raises(ValueError, match="had 3 loss entries"):
            trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=4)
        drawn.add(mx.nd.random.uniform(shape=(1,)).asscalar())
    assert len(drawn) == 3


def test_without_lock_nothing_is_compared():
    net = random_network()
    trainer = SVRGTrainer(net.collect_params(), "sgd", lock_random=False)
    loss_of = PROBLEM.closure(net, "float32")
    trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=0)
    assert trainer.grad_evaluations == sum([5, 5, 5, 5, 3]) + 5


# --- together with what else there is ----------------------------------------------------------


@pytest.mark.parametrize("devices", [None, TWO])
@pytest.mark.parametrize("mode", [True, "auto"])
def test_resume_from_states(devices, mode, tmp_path):
    def after_load():
        net, loss_of, trainer = make("float32", devices, lock_random=mode)
        net.load_parameters(str(tmp_path / "weights"), ctx=devices)
        trainer.load_states(tmp_path / "states")
        return net, loss_of, trainer

    def go_on(net, loss_of, trainer):
        for i in (4, 1, 2):
            index = BATCHES[i]
            trainer.step(len(index), closure=lambda: loss_of(index), batch_index=i)
        return values(net)

    net, loss_of, trainer = make("float32", devices, lock_random=mode)
    trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    trainer.step(5, closure=lambda: loss_of(BATCHES[2]), batch_index=2)
    trainer.save_states(tmp_path / "states")
    net.save_parameters(str(tmp_path / "weights"))
    straight = go_on(net, loss_of, trainer)
    assert_unchanged(straight, go_on(*after_load()))


def test_data_that_is_reshuffled_before_it_goes_on(tmp_path):
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    trainer.step(5, closure=lambda: loss_of(BATCHES[0]), batch_index=0)
    trainer.save_states(tmp_path / "states")
    net.save_parameters(str(tmp_path / "weights"))
    net, loss_of, trainer = make()
    net.load_parameters(str(tmp_path / "weights"))
    trainer.load_states(tmp_path / "states")
    with pytest.raises(RuntimeError, match="reshuffled"):
        trainer.step(5, closure=lambda: loss_of(BATCHES[1]), batch_index=0)


def test_stored_gradients_of_other_devices(tmp_path):
    _, loss_of, trainer = make("float32", TWO)
    trainer.update_full_grads(loss_of, BATCHES, store_grads=True)
    trainer.save_states(tmp_path / "states")
    _, _, other = make("float32")
    with pytest.raises(ValueError, match="stored gradients are for 2 devices, and there are 1"):
        other.load_states(tmp_path / "states")


def test_batch_normalization_and_a_float16_layer():
    """Running statistics move as with two passes; float16 gradients are stored as they are."""
    make_array = mx.np.array if IS_NUMPY_LIKE else mx.nd.array
    x = make_array(np.random.RandomState(0).randn(6, 3, 2, 2).astype("float16"), dtype="float16")
    found = []
    for store in (False, True):
        net = gluon.nn.BatchNorm(in_channels=3)
        net.initialize()
        net.cast("float16")
        trainer = SVRGTrainer(
            net.collect_params(), "sgd", {"learning_rate": 0.1, "multi_precision": True}
        )

        def loss_of(part):
            return (net(part) ** 3).reshape((len(part), -1)).sum(axis=1)

        batches = [x[:4], x[4:]]
        trainer.update_full_grads(loss_of, batches, store_grads=store)
        for i in (1, 0, 1):
            trainer.step(
                len(batches[i]),
                closure=lambda: loss_of(batches[i]),
                batch_index=i if store else None,
            )
        mx.nd.waitall()
        found.append([p.data().asnumpy() for p in net.collect_params().values()])
    assert_equal_to_rounding(*found, dtype="float16")


@pytest.mark.skipif(IS_NUMPY_LIKE, reason="MXNet 2.0 has no sparse arrays in Gluon")
@pytest.mark.parametrize("kind", ["sparse gradient", "sparse weight"])
def test_sparse(kind):
    from test_sparse import make as make_sparse
    from test_sparse import values as sparse_values

    found, batches = [], np.array_split(np.arange(30), 4)
    for store in (False, True):
        net, loss_of, trainer = make_sparse(kind, TWO)
        train(trainer, loss_of, batches, store)
        found.append(sparse_values(net))
    assert_equal_to_rounding(*found, dtype="float32")


def test_a_scale_of_losses_that_changes():
    """AMP may change it between the full pass and a step; powers of two cost no bit."""
    found = []
    for store in (False, True):
        net, loss_of, trainer = make("float32")
        scaler = kit.scale_losses(trainer)
        trainer.update_full_grads(loss_of, BATCHES, store_grads=store)
        for i in (0, 3, 4):
            scaler._loss_scale = scaler._next_loss_scale = 2.0 ** (8 + i)
            index = BATCHES[i]
            trainer.step(
                len(index), closure=lambda: loss_of(index), batch_index=i if store else None
            )
        found.append(values(net))
    assert_equal_to_rounding(*found, dtype="float32")


def test_deferred_parameters_and_an_iterator_without_length():
    net = PROBLEM.network("float32", deferred=True)
    trainer = SVRGTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    loss_of = PROBLEM.closure(net, "float32")
    trainer.update_full_grads(loss_of, iter(BATCHES), store_grads=True)
    trainer.step(5, closure=lambda: loss_of(BATCHES[4 - 1]), batch_index=3)
    assert trainer.inner_steps == 1
