"""The public surface: what can be seen, what counts, and what is refused without a trace."""

from functools import partial

import kit
import mxnet as mx
import numpy as np
import oracle
import pytest
from kit import assert_unchanged, everything
from mxnet import gluon
from problems import Dense, array, distance, parameters, values

from gluon_svrg import SVRGTrainer

PROBLEM = Dense("classification", hidden=(5,), seed=7)
ALL = np.arange(len(PROBLEM.X))
make = partial(kit.make, PROBLEM)


# --- what can be seen --------------------------------------------------------------------------


def test_it_is_a_gluon_trainer_and_truthy():
    trainer = make()[2]
    assert isinstance(trainer, gluon.Trainer)
    assert trainer


def test_before_the_first_snapshot():
    trainer = make()[2]
    assert trainer.snapshot is None
    assert trainer.full_grads is None
    assert (trainer.num_snapshots, trainer.inner_steps, trainer.grad_evaluations) == (0, 0, 0)


def test_counters():
    _, loss_of, trainer = make()
    n = sum([len(batch) for batch in PROBLEM.batches(4)])
    trainer.step(5, closure=lambda: loss_of(ALL[:5]))
    assert (trainer.num_snapshots, trainer.inner_steps, trainer.grad_evaluations) == (0, 0, 5)
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    assert (trainer.num_snapshots, trainer.inner_steps, trainer.grad_evaluations) == (1, 0, 5 + n)
    for _ in range(2):
        trainer.step(3, closure=lambda: loss_of(ALL[:3]))
    assert (trainer.num_snapshots, trainer.inner_steps, trainer.grad_evaluations) == (1, 2, 17 + n)
    trainer.coefficient = 0  # one gradient a step
    trainer.step(3, closure=lambda: loss_of(ALL[:3]))
    assert (trainer.inner_steps, trainer.grad_evaluations) == (3, 20 + n)
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    assert (trainer.num_snapshots, trainer.inner_steps) == (2, 0)
    trainer.discard_snapshot()
    assert (trainer.num_snapshots, trainer.inner_steps, trainer.snapshot) == (2, 0, None)


@pytest.mark.parametrize("name", ["num_snapshots", "inner_steps", "grad_evaluations", "snapshot"])
def test_what_is_only_to_be_read(name):
    with pytest.raises(AttributeError):
        setattr(make()[2], name, 3)


def test_what_is_read_is_a_copy():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    before = everything(trainer, net)
    for held in (trainer.snapshot, trainer.full_grads):
        assert list(held) == trainer._params
        for row in held.values():
            for copy in row:
                copy[:] = 7
    assert_unchanged(before, everything(trainer, net))
    weight = parameters(net)[0]
    assert type(trainer.full_grads[weight][0]) is type(weight.grad())
    assert type(trainer.snapshot[weight][0]) is type(weight.data())


def test_step_returns_the_loss_at_the_current_weights():
    _net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    for _ in range(3):
        expected = loss_of(ALL[:6]).asnumpy()
        loss = trainer.step(6, closure=lambda: loss_of(ALL[:6]))
        np.testing.assert_array_equal(loss.asnumpy(), expected)


@pytest.mark.parametrize("kind", [list, tuple])
def test_step_returns_what_the_closure_returned(kind):
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    loss = trainer.step(6, closure=lambda: kind([loss_of(ALL[:2]), loss_of(ALL[2:6])]))
    assert type(loss) is kind
    assert [part.shape for part in loss] == [(2,), (4,)]


def test_at_snapshot():
    net, loss_of, trainer = make()
    X = array(PROBLEM.X)
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    then = net(X).asnumpy()
    trainer.step(6, closure=lambda: loss_of(ALL[:6]))
    now = net(X).asnumpy()
    assert not np.array_equal(then, now)
    with trainer.at_snapshot():
        np.testing.assert_array_equal(net(X).asnumpy(), then)
    np.testing.assert_array_equal(net(X).asnumpy(), now)
    with pytest.raises(KeyError), trainer.at_snapshot():
        raise KeyError
    np.testing.assert_array_equal(net(X).asnumpy(), now)


def test_the_gradients_and_their_marks_survive_a_refresh():
    net, loss_of, trainer = make()
    with mx.autograd.record():
        loss = loss_of(ALL[:5])
    loss.backward()
    before = [p.grad().asnumpy() for p in parameters(net)]
    for _ in range(2):
        trainer.update_full_grads(loss_of, PROBLEM.batches(4))
        for grad, p in zip(before, parameters(net)):
            np.testing.assert_array_equal(p.grad().asnumpy(), grad)
    trainer.discard_snapshot()
    trainer.step(5)  # they are fresh
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    trainer.discard_snapshot()
    with pytest.raises(UserWarning, match="has not been updated"):
        trainer.step(5)  # and now they are not


def test_coefficient_in_the_middle():
    net, loss_of, trainer = make(coefficient=0.5)
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    parameters(net)[0].data()[:] += 0.1
    estimates = []
    for coefficient in (0.5, 1, 0):
        trainer.coefficient = coefficient
        assert trainer.coefficient == coefficient
        trainer.correct_grads(lambda: loss_of(ALL[:6]))
        estimates.append([p.grad().asnumpy() for p in parameters(net)])
    half = [(a + b) / 2 for a, b in zip(estimates[1], estimates[2])]
    assert distance(estimates[0], half) < 1e-12


def test_a_coefficient_for_each_snapshot():
    asked = []

    def schedule(index):
        asked.append(index)
        return 1 / (index + 1)

    _, loss_of, trainer = make(coefficient=schedule)
    seen = []
    for _ in range(3):
        trainer.update_full_grads(loss_of, PROBLEM.batches(4))
        seen.append(trainer.coefficient)
    assert seen == [1, 1 / 2, 1 / 3]
    assert max(asked) == 2


def test_coefficient_zero_leaves_the_pass_at_the_snapshot_out():
    calls = []
    _, loss_of, trainer = make(coefficient=0)
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    trainer.step(5, closure=lambda: calls.append(1) or loss_of(ALL[:5]))
    assert len(calls) == 1


def test_the_snapshot_comes_first():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    weight = parameters(net)[0]
    weight.data()[:] += 1
    seen = []
    trainer.step(5, closure=lambda: seen.append(weight.data().asnumpy()) or loss_of(ALL[:5]))
    np.testing.assert_allclose(seen[0] + 1, seen[1])


def test_correct_grads_then_the_rest_by_hand():
    results = []
    for by_hand in (False, True):
        net, loss_of, trainer = make()
        trainer.update_full_grads(loss_of, PROBLEM.batches(4))
        for index in PROBLEM.batches(5):
            if by_hand:
                trainer.correct_grads(lambda: loss_of(index))
                trainer.allreduce_grads()
                trainer.update(len(index))
            else:
                trainer.step(len(index), closure=lambda: loss_of(index))
        assert trainer.inner_steps == 5
        results.append(values(net))
    assert distance(*results) == 0


def test_batches_of_every_kind():
    """Tuples and lists are unpacked, anything else is passed as it is."""
    net = PROBLEM.network()
    loss_function = PROBLEM.loss_function()
    X, y = array(PROBLEM.X), array(PROBLEM.y)
    trainer = SVRGTrainer(net.collect_params(), "sgd")

    def of_pair(X, y):
        return loss_function(net(X), y)

    expected = trainer.update_full_grads(of_pair, [(X, y)])
    assert trainer.update_full_grads(of_pair, ([X, y] for _ in range(1))) == expected
    assert (
        trainer.update_full_grads(lambda batch: of_pair(*batch["Xy"]), [{"Xy": (X, y)}]) == expected
    )


def test_data_that_can_be_reset_is_reset_before_and_after():
    net = PROBLEM.network("float32")
    loss_function = PROBLEM.loss_function()
    data = mx.io.NDArrayIter(
        PROBLEM.X[:20].astype("float32"), PROBLEM.y[:20].astype("float32"), batch_size=5
    )
    trainer = SVRGTrainer(net.collect_params(), "sgd")
    next(data)

    def loss_of(batch):
        X, y = (array(part[0].asnumpy(), "float32") for part in (batch.data, batch.label))
        return loss_function(net(X), y)

    trainer.update_full_grads(loss_of, data)
    assert trainer.grad_evaluations == sum([5, 5, 5, 5])
    assert len(list(data)) == 4


def test_progress(capfd):
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    assert capfd.readouterr().err == ""
    trainer.update_full_grads(loss_of, PROBLEM.batches(4), progress=True)
    assert "full gradient" in capfd.readouterr().err


def test_a_backward_at_the_snapshot_leaves_no_mark_behind():
    """With two heads in turn, the pass for one must not take the other's for touched."""
    weights = [gluon.Parameter(name, shape=(3,), dtype="float64") for name in "ab"]
    for weight in weights:
        weight.initialize(mx.init.One())
    X = array(np.arange(12.0).reshape(4, 3))

    def loss_of(head, row):
        return (weights[head].data() * X[row] + weights[head].data() ** 3).sum()

    trainer = SVRGTrainer(weights, "sgd", {"learning_rate": 0.01})
    trainer.update_full_grads(loss_of, [(0, 0), (1, 1), (0, 2), (1, 3)])
    with trainer.at_snapshot():
        with mx.autograd.record():
            loss = loss_of(1, 1)
        loss.backward()
    trainer.correct_grads(lambda: loss_of(0, 2))
    mean = trainer.full_grads[weights[1]][
        0
    ].asnumpy()  # one loss entry: v is mu for what is untouched
    np.testing.assert_allclose(weights[1].grad().asnumpy(), mean)


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("held", [False, True])
def test_weights_that_were_taken_before(held):
    """They are not those of the snapshot, so both passes would write one buffer."""
    net, loss_of, trainer = make()
    if held:
        trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    before = everything(trainer, net)
    weight = parameters(net)[0].data()

    def with_penalty(index=ALL[:5]):
        return loss_of(index) + (weight**2).sum()

    with pytest.raises(RuntimeError, match=r"Call Parameter\.data\(\) inside the closure"):
        if held:
            trainer.step(5, closure=with_penalty)
        else:
            trainer.update_full_grads(with_penalty, PROBLEM.batches(4))
    assert_unchanged(before, everything(trainer, net))


def test_a_closure_as_the_second_argument():
    _, loss_of, trainer = make()
    with pytest.raises(TypeError, match=r"second argument of step\(\) is ignore_stale_grad"):
        trainer.step(5, lambda: loss_of(ALL[:5]))


@pytest.mark.parametrize("method", ["step", "correct_grads", "update_full_grads", "at_snapshot"])
def test_inside_a_record_block(method):
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    calls = {
        "step": lambda: trainer.step(5, closure=lambda: loss_of(ALL[:5])),
        "correct_grads": lambda: trainer.correct_grads(lambda: loss_of(ALL[:5])),
        "update_full_grads": lambda: trainer.update_full_grads(loss_of, PROBLEM.batches(4)),
        "at_snapshot": lambda: trainer.at_snapshot().__enter__(),
    }
    with mx.autograd.record(), pytest.raises(RuntimeError, match="Take it out of the block"):
        calls[method]()


def test_an_estimate_is_not_used_after_an_error():
    _, loss_of, trainer = make(coefficient=0)
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    trainer.correct_grads(lambda: loss_of(ALL[:5]))
    with pytest.raises(ZeroDivisionError):
        trainer.correct_grads(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="needs SVRG gradients"):
        trainer.step(5)


@pytest.mark.parametrize("params", [[1, 2], "abc", None, 3])
def test_what_are_no_parameters(params):
    for cls in (gluon.Trainer, SVRGTrainer):
        with pytest.raises(ValueError, match="First argument must be a list or dict of Parameters"):
            cls(params, "sgd")


def mean_of(loss):
    return float(loss.mean().asnumpy())


BAD_CLOSURES = {
    "None": (lambda net, loss: None, TypeError, "returned None.*return loss"),
    "a number": (lambda net, loss: mean_of(loss), TypeError, "returned float.*NDArray"),
    "more than losses": (lambda net, loss: [loss, 3], TypeError, "list with int in it"),
    "nothing": (lambda net, loss: (), ValueError, "empty tuple"),
    "detached": (lambda net, loss: loss.detach(), RuntimeError, "depends on no parameter"),
    "unrelated": (
        lambda net, loss: unrelated(loss),
        ValueError,
        "none of the trainer's parameters",
    ),
    "used up": (
        lambda net, loss: loss.backward() or loss,
        RuntimeError,
        r"called backward\(\) itself",
    ),
    "not computed": (
        lambda net, loss: array(np.ones(loss.shape)),
        RuntimeError,
        "cannot be differentiated",
    ),
    "elsewhere": (
        lambda net, loss: loss.copyto(mx.cpu(3)),
        ValueError,
        r"loss on cpu\(3\).*parameters are on cpu\(0\)",
    ),
    "failing": (lambda net, loss: 1 / 0, ZeroDivisionError, "division"),
}


def unrelated(loss):
    x = array(np.ones(loss.shape))
    x.attach_grad()
    return x * 2


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("name", BAD_CLOSURES)
@pytest.mark.parametrize("method", ["step", "correct_grads", "update_full_grads"])
def test_bad_closures(method, name, held):
    bad, error, message = BAD_CLOSURES[name]
    net, loss_of, trainer = make()
    if held:
        trainer.update_full_grads(loss_of, PROBLEM.batches(4))
        trainer.step(5, closure=lambda: loss_of(ALL[:5]))
    before = everything(trainer, net)
    for good_calls in (0, 1, 6):  # in either pass, at any minibatch
        calls = []

        def closure(index=ALL[:5]):
            calls.append(index)
            loss = loss_of(index)
            return loss if len(calls) <= good_calls else bad(net, loss)

        if method != "update_full_grads" and good_calls > (1 if held else 0):
            continue
        with pytest.raises(error, match=message):
            if method == "update_full_grads":
                trainer.update_full_grads(closure, PROBLEM.batches(4))
            elif method == "step":
                trainer.step(5, closure=closure)
            else:
                trainer.correct_grads(closure)
        assert_unchanged(before, everything(trainer, net))
    if held:
        with pytest.raises(RuntimeError, match=r"needs SVRG gradients"):
            trainer.step(5)  # what the failed call left behind is not taken for an estimate


def test_the_network_works_on_after_an_error():
    net, loss_of, trainer = make()
    twin, twin_loss_of, twin_trainer = make()
    for t, f in ((trainer, loss_of), (twin_trainer, twin_loss_of)):
        t.update_full_grads(f, PROBLEM.batches(4))
    with pytest.raises(ZeroDivisionError):
        trainer.update_full_grads(lambda index: 1 / 0, PROBLEM.batches(4))
    with pytest.raises(ZeroDivisionError):
        trainer.step(5, closure=lambda: 1 / 0)
    for t, f in ((trainer, loss_of), (twin_trainer, twin_loss_of)):
        for index in PROBLEM.batches(5):
            t.step(len(index), closure=lambda: f(index))
    assert distance(values(net), values(twin)) == 0


def test_fresh_gradients_are_so_after_an_error_too():
    net, loss_of, trainer = make()
    with mx.autograd.record():
        loss = loss_of(ALL[:5])
    loss.backward()
    with pytest.raises(ZeroDivisionError):
        trainer.correct_grads(lambda: 1 / 0)
    trainer.step(5)  # gluon.Trainer raises if they are stale
    with pytest.raises(ZeroDivisionError):
        trainer.correct_grads(lambda: 1 / 0)
    with pytest.raises(UserWarning, match="has not been updated"):
        trainer.step(5)
    assert distance(values(net), PROBLEM.initial) > 0


def test_data_that_raises():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    before = everything(trainer, net)

    def broken():
        yield PROBLEM.batches(4)[0]
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        trainer.update_full_grads(loss_of, broken())
    assert_unchanged(before, everything(trainer, net))


@pytest.mark.parametrize("data", [[], iter([])])
def test_no_data(data):
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    before = everything(trainer, net)
    with pytest.raises(ValueError, match="no data"):
        trainer.update_full_grads(loss_of, data)
    assert_unchanged(before, everything(trainer, net))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_full_gradient_that_is_not_finite(value):
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    before = everything(trainer, net)
    bad = Dense("classification", hidden=(5,), seed=7)
    bad.X[13, 2] = value
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.update_full_grads(bad.closure(net), PROBLEM.batches(4))
    assert_unchanged(before, everything(trainer, net))


def test_a_closure_that_returns_another_number_of_losses():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    batches = iter(PROBLEM.batches(22))
    before = everything(trainer, net)
    with pytest.raises(RuntimeError, match=r"22 loss entries.* and 1 when it was called again"):
        trainer.step(5, closure=lambda: loss_of(next(batches)))
    assert_unchanged(before, everything(trainer, net))


@pytest.mark.parametrize("name", ["step", "update", "allreduce_grads"])
def test_never_silently_plain(name):
    _, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    arguments = () if name == "allreduce_grads" else (5,)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"{name}\(\) needs SVRG.*correct_grads"):
            getattr(trainer, name)(*arguments)
        trainer.correct_grads(lambda: loss_of(ALL[:5]))
        trainer.step(5)
    trainer.discard_snapshot()
    with mx.autograd.record():
        loss = loss_of(ALL[:5])
    loss.backward()
    getattr(trainer, name)(*arguments)


@pytest.mark.parametrize("method", ["step", "correct_grads", "update_full_grads"])
def test_a_closure_that_is_none(method):
    _net, loss_of, trainer = make()
    arguments = {"step": (5,), "correct_grads": (), "update_full_grads": ()}[method]
    data = (PROBLEM.batches(4),) if method == "update_full_grads" else ()
    loss = loss_of(ALL[:5])
    with pytest.raises(TypeError, match="closure must be a function"):
        if method == "step":
            trainer.step(*arguments, closure=loss)
        else:
            getattr(trainer, method)(loss, *data)


def test_nothing_is_called_inside_at_snapshot():
    _, loss_of, trainer = make()
    with pytest.raises(RuntimeError, match="There is no snapshot"), trainer.at_snapshot():
        pass
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    calls = [
        lambda: trainer.step(5, closure=lambda: loss_of(ALL[:5])),
        lambda: trainer.correct_grads(lambda: loss_of(ALL[:5])),
        lambda: trainer.update_full_grads(loss_of, PROBLEM.batches(4)),
        lambda: trainer.discard_snapshot(),
        lambda: trainer.at_snapshot().__enter__(),
        lambda: trainer.step(5),
        lambda: trainer.update(5),
    ]
    with trainer.at_snapshot():
        for call in calls:
            with pytest.raises(RuntimeError, match=r"inside `with trainer\.at_snapshot"):
                call()
    first, second = trainer.at_snapshot(), trainer.at_snapshot()
    with first, pytest.raises(RuntimeError, match="is in force already"), second:
        pass


@pytest.mark.parametrize(
    ("coefficient", "error", "message"),
    [
        (np.nan, ValueError, "finite, at least 0, got nan"),
        (np.inf, ValueError, "finite"),
        (-0.1, ValueError, "at least 0, got -0.1"),
        ("1", TypeError, "must be a number .*got '1'"),
        (None, TypeError, "got NoneType"),
        (True, TypeError, "got bool"),
    ],
)
def test_bad_coefficients(coefficient, error, message):
    with pytest.raises(error, match=message):
        make(coefficient=coefficient)
    trainer = make()[2]
    for value in (coefficient, lambda index: coefficient):
        with pytest.raises(error, match=message):
            trainer.coefficient = value
    assert trainer.coefficient == 1
    with pytest.raises(error, match=message):
        make(coefficient=lambda index: coefficient)


def reshape(p):
    p._shape = (2, 2)
    p.initialize(force_reinit=True)


def move(p):
    getattr(p, "reset_device", p.reset_ctx)(mx.cpu(1))


CHANGES = {
    "shape": (reshape, r"float64 \(2, 2\) .* now and was float64 \(5, 4\) .* then"),
    "device": (move, r"on cpu\(1\) now and was .* on cpu\(0\) then"),
    "frozen": (lambda p: setattr(p, "grad_req", "null"), "with grad_req='null' now"),
    "dtype": (lambda p: p.cast("float32"), "float32 .* now and was float64 .* then"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_parameters_that_changed_since_the_snapshot(name):
    change, message = CHANGES[name]
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    change(parameters(net)[0])
    with pytest.raises(RuntimeError, match=f"changed since the snapshot: .*{message}.*Take a new"):
        trainer.step(5, closure=lambda: loss_of(ALL[:5]))


def test_a_parameter_that_was_frozen_then():
    net, loss_of, trainer = make()
    weight = parameters(net)[0]
    weight.grad_req = "null"
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    weight.grad_req = "write"
    with pytest.raises(RuntimeError, match="with grad_req='null' then"):
        trainer.step(5, closure=lambda: loss_of(ALL[:5]))
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    trainer.step(5, closure=lambda: loss_of(ALL[:5]))
    assert weight in trainer.full_grads


def test_all_parameters_frozen():
    net, loss_of, trainer = make()
    for p in parameters(net):
        p.grad_req = "null"
    with pytest.raises(ValueError, match="all are frozen"):
        trainer.update_full_grads(loss_of, PROBLEM.batches(4))


def test_new_values_are_legal():
    net, loss_of, trainer = make()
    trainer.update_full_grads(loss_of, PROBLEM.batches(4))
    reference = oracle.SVRG(PROBLEM.gradient, PROBLEM.initial)
    reference.refresh(PROBLEM.batches(4))
    PROBLEM.assign(net, [w + 0.1 for w in values(net)])
    reference.weights = values(net)
    for index in PROBLEM.batches(5):
        trainer.correct_grads(lambda: loss_of(index))
        grads = [p.grad().asnumpy() for p in parameters(net)]
        assert distance(grads, reference.estimate(index)) < 1e-11
