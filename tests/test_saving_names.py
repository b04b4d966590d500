"""Parameters of a file among those of a trainer: by name, in any order; and what does not fit."""

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxnet import gluon
from saving_kit import GENERATION, Training, assert_same, both_go_on, crowded

from gluon_svrg import saving
from gluon_svrg.saving.parameters import Description, match, misfits


def later_network(**kwargs):
    """A training whose layers have other numbers: dense97 to dense107 sort otherwise."""
    with mx.name.NameManager():
        for _ in range(97):
            gluon.nn.Dense(1)
        return Training(**kwargs)


def test_the_order_of_names_does_not_matter(tmp_path):
    """With 11 layers, 1.9.1 sorts dense10 before dense2."""
    kwargs = {"optimizer": "adam", "sizes": [3] * 12}
    first, second = Training(**kwargs), later_network(**kwargs)
    first.step(2)
    first.toy.values["numbers"] = saving.ByParameter(
        {n: [first.in_order().index(p)] for n, p in enumerate(first.trainer._params)}
    )
    first.save(tmp_path / "states")
    second.take_weights(first)
    second.load(tmp_path / "states")
    both_go_on(first, second)
    for position, (place,) in second.toy.values["numbers"].items():
        assert second.trainer._params[position] is second.in_order()[place]


def test_a_dict_in_another_order(tmp_path):
    """The states of a key go to that key, whatever the layers are called."""

    def named(labels):
        def choose(net):
            found = {f"{label}.w": layer.weight for label, layer in zip(labels, net)}
            if GENERATION == "2":
                return found
            params = gluon.ParameterDict()  # 1.9.1 takes no plain dict
            params._params.update(found)
            return params

        return choose

    sizes, settings = (3, 3, 3), {"momentum": 0.9}
    first = Training("sgd", settings, sizes, choose=named("ab"))
    first.step(2)
    first.save(tmp_path / "states")
    second = Training("sgd", settings, sizes, choose=named("ba"))
    second.load(tmp_path / "states")

    def momentum(run, layer):
        position = [p is run.net[layer].weight for p in run.trainer._params].index(True)
        return run.updaters[0].states[position].asnumpy()

    for layer in (0, 1):
        assert_same([momentum(first, layer)], [momentum(second, 1 - layer)])
    assert np.abs(momentum(first, 0) - momentum(first, 1)).max() > 0


def described(*labels, shape=(3, 3), keys=None, dtype="float32"):
    keys = keys or [None] * len(labels)
    return [Description(name, key, shape, dtype, True) for name, key in zip(labels, keys)]


@pytest.mark.parametrize(
    "then, now, positions",
    [
        (["dense9_weight", "dense10_weight"], ["dense3_weight", "dense2_weight"], [1, 0]),
        (["a3_dense12_w", "a3_dense9_w", "b_w"], ["b_w", "a7_dense0_w", "a7_dense1_w"], [2, 1, 0]),
        (["conv2d5_weight", "lstm4_l0_i2h"], ["lstm0_l0_i2h", "conv2d1_weight"], [1, 0]),
        (["w", "w1"], ["w9", "w"], [1, 0]),
        (["weight"], ["bias"], None),
        (["dense0_weight", "dense1_weight"], ["dense0_weight", "dense0_bias"], None),
        (["weight", "bias", "weight"], ["weight", "bias", "weight"], [0, 1, 2]),  # a list of 2.0
        (["weight", "bias", "weight"], ["weight", "weight", "bias"], None),
        (["w0"], ["w0", "w1"], None),
    ],
)
def test_names(then, now, positions):
    if positions is None:
        with pytest.raises(ValueError, match=r"other parameters: .* as a dict|parameters, and th"):
            match(described(*then), described(*now))
    else:
        assert match(described(*then), described(*now)) == positions


def test_keys():
    names = ["weight"] * 11
    keys = [f"{n}.weight" for n in range(11)]
    then, now = described(*names, keys=keys), described(*names, keys=keys[::-1])
    assert match(then, now) == list(range(10, -1, -1))
    other = described(*names, keys=[f"x.{key}" for key in keys])
    with pytest.raises(ValueError, match="it has other parameters: key 0.weight, .* key x.0"):
        match(then, other)
    assert match(then, described(*names)) == list(range(11))  # a list, in the same order
    named = described("a", "b", keys=["0", "1"])
    assert match(named, described("b", "a")) == [1, 0]


@given(st.permutations(range(12)), st.integers(0, 300))
def test_any_permutation_is_found(order, start):
    then = described(*(f"net0_dense{n}_weight" for n in range(12)))
    now = described(*(f"net7_dense{start + n}_weight" for n in order))
    assert [order[position] for position in match(then, now)] == list(range(12))


@pytest.mark.parametrize("shape", [None, (0, 3), (-1, 3), (3, 3)])
def test_shapes_that_may_become_the_same(shape):
    there = described("w")
    assert not [*misfits(there, described("w", shape=shape), False)]
    assert not [*misfits(described("w", shape=shape), there, False)]
    for other in ((3,), (3, 3, 1), (3, 4)):
        assert "was float32 (3, 3) and is float32" in next(
            misfits(there, described("w", shape=other), False)
        )
    assert "is float16" in next(misfits(there, described("w", shape=shape, dtype="float16"), False))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Training(sizes=(3, 4)), "it has 4 parameters, and there are 2"),
        (lambda: Training(sizes=(3, 4, 5)), r"was float32 \(2.*and is float32 \(5.*here"),
        (lambda: Training("adam"), "the optimizer was SGD and is Adam here"),
        (lambda: Training(settings=crowded("adam")), "its lr_scheduler was none and is Chain here"),
        (
            lambda: Training(settings={"momentum": 0.9}),
            r"state of parameter 0 \(.*\) is None and must be float32 .*: was it saved with",
        ),
    ],
)
def test_what_does_not_fit_is_said(make, message, tmp_path):
    check_refused(Training(), make, message, tmp_path)


def test_a_momentum_for_an_optimizer_without_one(tmp_path):
    message = r"state of parameter 0 \(.*\) is float32 .* and must be None: was it saved with"
    check_refused(Training(settings={"momentum": 0.9}), Training, message, tmp_path)


def check_refused(first, make, message, tmp_path):
    first.step(2)
    first.save(tmp_path / "states")
    with mx.name.NameManager():
        second = make()
    second.step(1)
    before = second.everything()
    with pytest.raises(ValueError, match=f"{message}.* Nothing was changed"):
        second.load(tmp_path / "states")
    assert second.everything() == before


def test_another_method_and_other_parts(tmp_path):
    run = Training()
    run.files = saving.StateFiles("SAGA", run.trainer._params, run.net.collect_params())
    run.save(tmp_path / "saga")
    again = Training()
    with pytest.raises(ValueError, match="it was saved with SAGA, and this trainer uses SVRG"):
        again.load(tmp_path / "saga")
    again.save(tmp_path / "states")
    fewer = {name: part for name, part in again.parts().items() if name != "toy"}
    with pytest.raises(ValueError, match="it has a state of 'toy', and this trainer has none"):
        again.files.load(tmp_path / "states", fewer)
    more = {**again.parts(), "history": run.toy}
    assert "history" not in again.files.load(tmp_path / "states", more) and not run.toy.assigned
    again.toy.values = {}
    with pytest.raises(ValueError, match="does not fit this trainer: the toy is another. Nothing"):
        again.load(tmp_path / "states")


# --- the arrays of a method --------------------------------------------------------------------


def test_arrays_by_parameter():
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize()
    parameters = {1: net.weight, 4: net.bias}
    right = {1: np.zeros((2, 3), "float32"), 4: np.zeros(2, "float32")}

    def problems(arrays, **kwargs):
        return [*saving.array_problems(arrays, "mean gradient", parameters, **kwargs)]

    assert problems(right) == problems(right, summed=True) == []
    assert problems({n: np.stack([a, a]) for n, a in right.items()}, rows=2) == []
    assert problems({n: [a, a] for n, a in right.items()}, devices=2) == []
    for wrong, kwargs, message in [
        (None, {}, "its mean gradient belongs to other parameters"),
        ({1: right[1]}, {}, "belongs to other parameters"),
        ({**right, 4: np.zeros(3, "float32")}, {}, r"of parameter 4 \(.*bias\) is float32 \(3,\),"),
        ({**right, 1: right[1].astype("float64")}, {}, r"and must be float32 \(2, 3\)"),
        ({**right, 1: right[1] + np.nan}, {}, "is not finite"),
        (right, {"rows": 2}, r"must be float32 \(2, 2\)"),
        ({n: [a] for n, a in right.items()}, {"devices": 2}, "is for 1 devices, and there are 2"),
    ]:
        with pytest.raises(AssertionError, match=message):
            assert not problems(wrong, **kwargs), "; ".join(problems(wrong, **kwargs))
    deferred = gluon.nn.Dense(2, dtype="float16")
    deferred.initialize()
    half = {0: np.zeros((5, 5), "float16")}
    assert not [*saving.array_problems(half, "snapshot", {0: deferred.weight})]
    (found,) = saving.array_problems(half, "mean gradient", {0: deferred.weight}, summed=True)
    assert "is float16 (5, 5), and must be float32" in found
