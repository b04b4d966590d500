"""What is loaded goes on to the last bit: optimizers, schedulers, devices, objects of one's own."""

import mxnet as mx
import numpy as np
import pytest
from kit import assert_unchanged
from saving_kit import Chain, Training, both_go_on, flat

from gluon_svrg import saving
from gluon_svrg.saving import values

OPTIMIZERS = sorted(
    {cls.__name__.lower() for cls in mx.optimizer.Optimizer.opt_registry.values()
     if cls.__module__.startswith("mxnet.")}
)  # fmt: skip
of_both_kinds = pytest.mark.parametrize("save", ["save", "save_as_gluon"])


@of_both_kinds
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes(name, save, tmp_path):
    def make():
        scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.02)
        run = Training(name, {"lr_scheduler": scheduler})
        if name == "groupadagrad":  # it takes matrices only
            run.use([layer.weight for layer in run.net], name, {"lr_scheduler": scheduler})
        return run

    first, second = make(), make()
    first.step(3)
    second.step(1)  # it has states already, and loses them
    second.resume(first, tmp_path / "states", save)
    both_go_on(first, second)


@mx.optimizer.register
class OwnOptimizer(mx.optimizer.Optimizer):
    """An optimizer of one's own, with plain data of every kind, also in its states."""

    ran = 0  # the method that a pickle calls

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0
        self.own = {"seen": [1, 2.5, None, "x", (True,)], (1, "y"): {4: []}, 3: np.int64(6)}
        self.array, self.columns = mx.nd.array([1.0, 2.0]), np.arange(6.0).reshape(2, 3).T

    def __setstate__(self, state):
        type(self).ran += 1

    def create_state(self, index, weight):
        return mx.nd.zeros(weight.shape, dtype=weight.dtype), (None, [0])

    def update_multi_precision(self, index, weight, grad, state):
        is_many = isinstance(index, (list, tuple))
        rows = zip(index, weight, grad, state) if is_many else [(index, weight, grad, state)]
        for number, w, g, (momentum, (_, counts)) in rows:
            self._update_count(number)
            self.calls += 1
            counts[0] += 1
            momentum[:] = 0.5 * momentum + g * self.rescale_grad
            w[:] = w - self._get_lr(number) / (1 + 0.01 * self.calls + counts[0]) * momentum


@of_both_kinds
def test_an_optimizer_of_ones_own(save, tmp_path):
    first, second = (Training("ownoptimizer", {"lr_scheduler": Chain(1, 2)}) for _ in range(2))
    first.step(3)
    first.optimizer.lr_scheduler.second.factor = 0.75
    first.optimizer.own["more"] = [1, {"x": 2}]
    for run in (first, second):
        run.optimizer.set_lr_mult({"mine": 0.5})  # Gluon has those of its parameters elsewhere
    first.states[0][1] = first.states[0][1][0], ("filled", [3])  # what was None at the start
    second.resume(first, tmp_path / "states", save)
    assert (second.states[0][0][1], second.states[0][1][1]) == ((None, [3]), ("filled", [3]))
    one, other = first.optimizer, second.optimizer
    assert other.lr_mult == {"mine": 0.5}
    assert one.own == other.own and other.own["seen"][4] == (True,)
    assert type(other.own[3]) is np.int64
    assert flat(one.lr_scheduler) == flat(other.lr_scheduler)
    assert type(other.array) is mx.nd.NDArray
    assert_unchanged([one.array.asnumpy(), one.columns], [other.array.asnumpy(), other.columns])
    assert one.columns.flags.fnc and other.columns.flags.fnc  # products may differ in the last bit
    both_go_on(first, second)
    assert not OwnOptimizer.ran
    first.states[0][1][1][1].append(1)
    first.save(tmp_path / "states")
    with pytest.raises(ValueError, match=r"state of parameter 1 \(.*\) is .* and must be"):
        second.load(tmp_path / "states")


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("then, now", [(1, 2), (2, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("update_on_kvstore", [False, True])
def test_from_some_devices_to_others(then, now, name, update_on_kvstore, tmp_path):
    """All devices get states and counts: Adam corrects by counts, so devices would drift apart."""

    def make(count, on_kvstore):
        return Training(name, devices=count, update_on_kvstore=on_kvstore if count > 1 else None)

    first, second = make(then, update_on_kvstore), make(now, False)
    first.step(3)
    second.resume(first, tmp_path / "states")
    second.step(4, seed=2)
    for parameter in second.in_order():
        one, *others = (data.asnumpy() for data in parameter.list_data())
        assert_unchanged([one] * len(others), others)
    counts = second.optimizer._all_index_update_counts
    assert {n for device in range(now) for n in counts[device].values()} == {7}
    if then == now and not update_on_kvstore:
        first.step(4, seed=2)
        assert_unchanged(first.weights(), second.weights())


def test_what_cannot_be_loaded_is_not_saved(tmp_path):
    run = Training()
    for value, message in [
        (object(), "SGD.own is a object, which cannot be saved"),
        ({4, 5}, "SGD.own is a set, which cannot be saved"),
        ([mx.lr_scheduler.PolyScheduler(5)], r"SGD.own\[...\] is a PolyScheduler, which cannot be"),
        (mx.optimizer.Adam(), "SGD.own is a Adam, which cannot be saved"),
        ({(1, (2,)): 3}, "SGD.own is a dict, .* numbers and strings as keys"),
        ([len], r"SGD.own\[...\] is a builtin_function_or_method"),
        (np.array([object()]), "is a ndarray, which cannot be saved"),
    ]:
        run.optimizer.own = value
        with pytest.raises(TypeError, match=message):
            run.save(tmp_path / "states")
    assert list(tmp_path.iterdir()) == []


def test_an_object_is_its_attributes():
    class Coin:
        def __init__(self):
            self.asked, self.function, self.more = 0, len, lambda: 1

    old, new, arrays = Coin(), Coin(), []
    assert list(saving.by_attributes(old).attributes) == ["asked"]
    old.asked, old.later = 3, np.arange(4)[::2]
    found = values.decode(values.encode(saving.by_attributes(old), arrays, "it"), arrays, [])
    assert list(saving.object_problems(found, new, "the coin")) == []
    saving.assign_object(found, new)
    assert (new.asked, new.function, new.later.tolist()) == (3, len, [0, 2])
    bad = saving.SavedObject("Other", {})
    assert "the coin was Other and is Coin" in next(saving.object_problems(bad, new, "the coin"))
