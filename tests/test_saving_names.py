"""Parameters of a file among those of a trainer: by name, in any order; and what does not fit."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from saving_kit import GENERATION, Training, assert_same, both_go_on

from gluon_svrg import saving
from gluon_svrg.saving.parameters import Description, match, misfits


def test_the_order_of_names_does_not_matter(tmp_path):
    """With 11 layers, 1.9.1 sorts dense10 before dense2, and dense107 before dense97."""
    first = Training("adam", sizes=[3] * 12)
    first.step(2)
    first.save(tmp_path / "states")
    with mx.name.NameManager():
        for _ in range(97):
            gluon.nn.Dense(1)
        second = Training("adam", sizes=[3] * 12)
    second.take_weights(first)
    second.load(tmp_path / "states")
    both_go_on(first, second)


def test_a_dict_in_another_order(tmp_path):
    """The states of a key go to that key, whatever the layers are called."""

    def make(labels):
        run = Training(sizes=(3, 3, 3))
        given = {f"{label}.w": layer.weight for label, layer in zip(labels, run.net)}
        if GENERATION == "1":  # it takes no plain dict
            given, found = gluon.ParameterDict(), given
            given._params.update(found)
        run.use(given, "sgd", {"momentum": 0.9})
        return run

    first, second = make("ab"), make("ba")
    first.step(2)
    first.save(tmp_path / "states")
    second.load(tmp_path / "states")

    def momenta(run, *layers):
        places = {id(p): place for place, p in enumerate(run.trainer._params)}
        return [run.states[0][places[id(run.net[n].weight)]].asnumpy() for n in layers]

    assert_same(momenta(first, 0, 1), momenta(second, 1, 0))
    assert np.abs(np.subtract(*momenta(first, 0, 1))).max() > 0


def described(*labels, shape=(3, 3), keys=None, dtype="float32"):
    keys = keys or [None] * len(labels)
    return [Description(name, key, shape, dtype, True) for name, key in zip(labels, keys)]


@pytest.mark.parametrize(
    "then, now, positions",
    [
        ("dense9_weight dense10_weight", "dense3_weight dense2_weight", [1, 0]),
        ("a3_dense12_w a3_dense9_w b_w", "b_w a7_dense0_w a7_dense1_w", [2, 1, 0]),
        ("conv2d5_weight lstm4_l0_i2h", "lstm0_l0_i2h conv2d1_weight", [1, 0]),
        ("w w1", "w9 w", [1, 0]),
        ("weight", "bias", None),
        ("dense0_weight dense1_weight", "dense0_weight dense0_bias", None),
        ("weight bias weight", "weight bias weight", [0, 1, 2]),  # a list of 2.0
        ("weight bias weight", "weight weight bias", None),
        ("w0", "w0 w1", None),
    ],
)
def test_names(then, now, positions):
    if positions is None:
        with pytest.raises(ValueError, match=r"other parameters: .* as a dict|parameters, and th"):
            match(described(*then.split()), described(*now.split()))
    else:
        assert match(described(*then.split()), described(*now.split())) == positions


def test_keys():
    names, keys = ["weight"] * 11, [f"{n}.weight" for n in range(11)]
    then = described(*names, keys=keys)
    assert match(then, described(*names, keys=keys[::-1])) == list(range(10, -1, -1))
    assert match(then, described(*names)) == list(range(11))  # a list, in the same order
    assert match(described("a", "b", keys=["0", "1"]), described("b", "a")) == [1, 0]
    with pytest.raises(ValueError, match=r"it has other parameters: key 0.weight, .* key x\.0"):
        match(then, described(*names, keys=[f"x.{key}" for key in keys]))


def test_shapes_that_may_become_the_same():
    there = described("w")
    for shape in (None, (0, 3), (-1, 3), (3, 3)):
        other = described("w", shape=shape)
        assert not [*misfits(there, other, False), *misfits(other, there, False)]
    for shape in ((3,), (3, 3, 1), (3, 4)):
        assert "(3, 3) and is" in next(misfits(there, described("w", shape=shape), False))
    assert "is float16" in next(misfits(there, described("w", dtype="float16"), False))


def test_another_momentum_is_said(tmp_path):
    one, other = (Training(settings={"momentum": momentum}) for momentum in (0.0, 0.9))
    for first, second in ((one, other), (other, one)):
        first.step(2)
        first.save(tmp_path / "states")
        before = second.everything()
        message = r"state of parameter 0 \(.*\) is .* and must be .*: was it saved with another mom"
        with pytest.raises(ValueError, match=f"{message}.* Nothing was changed"):
            second.load(tmp_path / "states")
        assert second.everything() == before


def test_what_is_known_only_after_the_initialization_is_checked_then(tmp_path):
    Training("adam", sizes=(3, 4)).save(tmp_path / "states")
    run = Training("adam", sizes=(0, 4))
    run.load(tmp_path / "states")
    run.net((mx.np if GENERATION == "2" else mx.nd).ones((1, 5)))
    with pytest.raises(ValueError, match=r"was float32 \(4, 3\) and is float32 \(4, 5\) here"):
        run.step()
    assert not run.trainer._all_updaters[0].states


def test_arrays_by_parameter():
    """What a method says of its arrays in a file."""
    net = gluon.nn.Dense(2, in_units=3, dtype="float16")
    net.initialize()
    parameters = {1: net.weight, 4: net.bias}
    half = {1: np.zeros((2, 3), "float16"), 4: np.zeros(2, "float16")}
    right = {n: array.astype("float32") for n, array in half.items()}

    def problems(arrays, **kwargs):
        return "; ".join(saving.array_problems(arrays, "mean gradient", parameters, **kwargs))

    assert problems(half) == problems(right, summed=True) == ""
    assert problems({n: np.stack([a, a]) for n, a in half.items()}, rows=2) == ""
    assert problems({n: [a, a] for n, a in half.items()}, devices=2) == ""
    for wrong, kwargs, message in [
        (None, {}, "its mean gradient belongs to other parameters"),
        ({1: half[1]}, {}, "its mean gradient belongs to other parameters"),
        ({**half, 4: half[4][:1]}, {}, "bias) is float16 (1,), and must be float16 (2,)"),
        (half, {"summed": True}, "weight) is float16 (2, 3), and must be float32 (2, 3)"),
        ({**half, 1: half[1] + np.float16(np.nan)}, {}, "is not finite"),
        (half, {"rows": 2}, "must be float16 (2, 2, 3)"),
        ({n: [a] for n, a in half.items()}, {"devices": 2}, "is for 1 devices, and there are 2"),
    ]:
        assert message in problems(wrong, **kwargs)
    parameters = {0: gluon.nn.Dense(2).weight}  # of no known shape
    assert problems({0: np.zeros((5, 5), "float32")}) == ""
