"""Parameters of a file among those of a trainer: by name, in any order, of any version."""

import re
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxnet import gluon
from saving_kit import HERE, Toy, Training, assert_same, scheduled

from gluon_svrg import saving
from gluon_svrg.saving import matching
from gluon_svrg.saving.matching import Description

DATA = Path(__file__).parent / "data"


# --- names -------------------------------------------------------------------------------------


def test_the_order_of_names_does_not_matter(tmp_path):
    """With 11 layers, 1.9.1 sorts dense10 before dense2; a network made later has other numbers."""
    sizes = [3] * 12
    first = Training("adam", {"learning_rate": 0.01}, sizes)
    first.step(2)
    first.save(tmp_path / "states")
    with mx.name.NameManager():
        for _ in range(97):  # as after other networks: dense97 to dense107 sort otherwise
            gluon.nn.Dense(1)
        second = Training("adam", {"learning_rate": 0.01}, sizes)
    second.take_weights(first)
    second.load(tmp_path / "states")
    both_go_on_in_layers(first, second)


def both_go_on_in_layers(first, second):
    """The gradient depends on the layer, not on the position in a trainer."""
    for run in (first, second):
        for number, parameter in enumerate(run.in_order()):
            value = run.gradient(parameter, number)
            parameter.grad()[:] = value.as_np_ndarray() if HERE == "2" else value
            parameter.data()._fresh_grad = True
        run.trainer.step(1)
    mx.nd.waitall()
    assert_same(*[[p.data().asnumpy() for p in run.in_order()] for run in (first, second)])


@pytest.mark.parametrize("turned", [False, True])
def test_a_dict_in_another_order(turned, tmp_path):
    def named(net):
        labels = "ab" if not turned or made else "ba"
        made.append(1)
        found = {}
        for label, layer in zip(labels, net):
            found.update({f"{label}.w": layer.weight, f"{label}.b": layer.bias})
        return found if HERE == "2" else [found[key] for key in sorted(found)]

    made = []
    first = Training("sgd", {"learning_rate": 0.1, "momentum": 0.9}, (3, 3, 3), parameters=named)
    first.step(2)
    first.save(tmp_path / "states")
    with mx.name.NameManager():
        second = Training(
            "sgd", {"learning_rate": 0.1, "momentum": 0.9}, (3, 3, 3), parameters=named
        )
    second.take_weights(first)
    if HERE == "1":  # a list has names, and these say which is which
        second.load(tmp_path / "states")
        both_go_on_in_layers(first, second)
        return
    second.load(tmp_path / "states")  # a's states go to a
    states = [run.updaters[0].states for run in (first, second)]
    for position in states[0]:
        assert_same([states[0][position].asnumpy()], [states[1][position].asnumpy()])


def description(name, shape, key=None, dtype="float32", trainable=True):
    return Description(name, key, shape, dtype, trainable)


OLD = [  # of MXNet 1.9.1: sorted by name
    description("dense0_bias", (4,)),
    description("dense0_weight", (4, 3)),
    description("dense10_bias", (4,)),
    description("dense10_weight", (4, 2)),
    description("dense9_bias", (2,)),
    description("dense9_weight", (2, 4)),
]
NEW = [  # of MXNet 2.0
    description("bias", (4,), "0.bias"),
    description("weight", (4, 3), "0.weight"),
    description("bias", (2,), "1.bias"),
    description("weight", (2, 4), "1.weight"),
    description("bias", (4,), "2.bias"),
    description("weight", (4, 2), "2.weight"),
]


@pytest.mark.parametrize(
    "then, now, expected",
    [
        (OLD, NEW, [0, 1, 4, 5, 2, 3]),
        (NEW, OLD, [0, 1, 4, 5, 2, 3]),
        ([p._replace(key=None) for p in NEW[:4]], OLD[:2] + OLD[4:], None),
        (OLD[:2], [p._replace(key=None) for p in NEW[:2]], [0, 1]),
        ([p._replace(key=p.name) for p in OLD], NEW, [0, 1, 4, 5, 2, 3]),
    ],
)
def test_between_both_versions(then, now, expected):
    found = matching.match(then, now, same_generation=False)
    if expected is None:  # both biases, of 4 and of 2, are told apart by their shapes
        assert found.positions == [0, 1, 2, 3]
    else:
        assert found.positions == expected
    assert not found.problems


def test_two_layers_of_one_shape_are_not_guessed():
    then = [description(f"dense{n}_weight", (3, 3)) for n in (0, 1)]
    now = [description("weight", (3, 3), f"{n}.weight") for n in (0, 1)]
    found = matching.match(then, now, same_generation=False)
    assert "of its kind and shape there are 2. Give the trainer its parameters" in found.problems[0]
    keyed = [p._replace(key=f"dense{1 - n}_weight") for n, p in enumerate(now)]
    assert matching.match(then, keyed, same_generation=False).positions == [1, 0]
    other = [p._replace(name=f"x{n}") for n, p in enumerate(then)]
    assert matching.match(then, other, same_generation=True).problems
    unknown = [p._replace(shape=None) for p in now]
    assert matching.match(then, unknown, same_generation=False).problems


def test_names_that_repeat_keep_their_order_on_one_version():
    both = [description(name, (3, 3)) for name in ("weight", "bias", "weight", "bias")]
    assert matching.match(both, both, same_generation=True).positions == [0, 1, 2, 3]
    assert matching.match(both, both, same_generation=False).problems
    keyed = [p._replace(key=f"{n}.{p.name}") for n, p in enumerate(both)]
    assert matching.match(both, keyed, same_generation=True).positions == [0, 1, 2, 3]
    other = [p._replace(key=f"x{p.key}") for p in keyed]
    assert matching.match(keyed, other, same_generation=True).problems


@pytest.mark.parametrize(
    "labels, expected",
    [
        (["dense9_weight", "dense10_weight"], ["dense0_weight", "dense1_weight"]),
        (["a3_dense9_w", "a3_dense12_w", "b7_dense9_w"],
         ["a0_dense0_w", "a0_dense1_w", "b0_dense0_w"]),
        (["0.weight", "10.weight", "2.weight"], ["0.weight", "2.weight", "1.weight"]),
        (["conv2d5_weight", "lstm4_l0_i2h_weight"], ["conv2d0_weight", "lstm0_l0_i2h_weight"]),
        (["w", "w1"], ["w", "w0"]),
    ],
)  # fmt: skip
def test_canonical_names(labels, expected):
    assert matching.canonical(labels) == expected


@given(st.permutations(range(12)), st.integers(0, 300))
def test_any_permutation_is_found(order, start):
    then = [description(f"net0_dense{n}_weight", (3, 3)) for n in range(12)]
    now = [description(f"net7_dense{start + n}_weight", (3, 3)) for n in order]
    found = matching.match(then, now, same_generation=True)
    assert [order[position] for position in found.positions] == list(range(12))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Training(sizes=(3, 4)), "it has 4 parameters, and there are 2"),
        (lambda: Training(sizes=(3, 4, 5)), r"was float32 \(2.*and is float32 \(5.*here"),
        (lambda: Training("adam"), "the optimizer was SGD and is Adam here"),
        (lambda: Training(settings=scheduled()), "its lr_scheduler was none and is Factor"),
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
    with pytest.raises(ValueError, match=f"does not fit this trainer: .*{message}"):
        second.load(tmp_path / "states")
    assert second.everything() == before


def test_another_method_and_other_parts(tmp_path):
    run = Training()
    run.save(tmp_path / "states")
    saved = saving.read(tmp_path / "states", run.header())
    assert (
        "it was saved with SVRG, and this trainer uses SAGA"
        in saved.problems(run.parts(), run.header("SAGA"))[0]
    )
    fewer = {name: part for name, part in run.parts().items() if name != "toy"}
    assert "'toy', and this trainer has no such part" in saved.problems(fewer, run.header())[0]
    more = {**run.parts(), "table": Toy()}
    assert saved.problems(more, run.header()) == ["it lacks the state of 'table'"]
    with pytest.raises(RuntimeError, match=r"Saved\.problems before"):
        saving.read(tmp_path / "states", run.header()).assign(run.parts())


# --- between MXNet 1.9.1 and 2.0, and from 0.1.0 -----------------------------------------------


def reader(dtype="float32", **settings):
    def one(net):
        return [net[0].weight]

    return Training("sgd", settings, sizes=(5, 3), dtype=dtype, parameters=one)


@pytest.mark.parametrize("generation", "12")
@pytest.mark.parametrize("dtype, name", [("float32", "gluon"), ("float16", "gluon-float16")])
def test_momentum_and_master_copy_of_either_version(generation, dtype, name):
    """The momentum is -1, the master copy 0, in either order: the next step shows which it is."""
    run = reader(dtype, learning_rate=0.1, momentum=0.9, multi_precision=dtype == "float16")
    run.load(DATA / f"{name}-mxnet{generation}.states")
    assert (run.optimizer.momentum, run.optimizer.lr) == (0.5, 0.5)
    weight = run.trainer._params[0]
    weight.set_data((mx.np if HERE == "2" else mx.nd).zeros((3, 5), dtype=dtype))
    run.trainer._params[0].grad()[:] = 2
    weight.data()._fresh_grad = True
    run.trainer.step(1)
    np.testing.assert_array_equal(weight.data().asnumpy(), np.full((3, 5), -1.5))


@mx.optimizer.register
class MySGD(mx.optimizer.SGD):
    """Nothing tells in which order it keeps momentum and master copy."""


def test_an_unknown_order_of_momentum_and_master_copy_is_refused(tmp_path):
    other = "1" if HERE == "2" else "2"
    runs = [reader("float16", momentum=0.9, multi_precision=True) for _ in range(2)]
    mine = MySGD(momentum=0.9, multi_precision=True)
    own = [saving.OptimizerStates(mine, run.updaters, run.trainer._params) for run in runs]
    runs[0].step(1)
    state = own[0].state()
    assert list(own[1].problems(state)) == []
    assert "load it with that one" in next(own[1].problems({**state, "mxnet": other}))


@pytest.mark.parametrize("generation", "12")
def test_files_of_0_1_0(generation):
    with np.load(DATA / f"0.1.0-mxnet{generation}.npz") as file:
        expected = dict(file)
    scheduler = mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.2)
    settings = {"learning_rate": 0.2, "momentum": 0.9, "lr_scheduler": scheduler}
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, in_units=3), gluon.nn.BatchNorm(in_channels=4))
    net.add(gluon.nn.Dense(2, in_units=4))
    net.initialize()
    collected = net.collect_params()
    trainer = gluon.Trainer(collected, "sgd", settings)
    header = saving.header("SVRG", trainer._params, collected, 1)
    states = saving.OptimizerStates(trainer.optimizer, trainer._updaters, trainer._params)
    parts = {
        "optimizer": saving.OptimizerSettings(trainer.optimizer, trainer._params),
        "optimizer_states": states,
        **{name: Anything() for name in ("method", "counters", "lock", "coefficient_schedule",
                                         "schedules", "scaler")},
    }  # fmt: skip
    most = saving.most_bytes(states.expected_bytes(), trainer._params)
    saved = saving.read(DATA / f"0.1.0-mxnet{generation}.states", header, most)
    saved.check(parts, header)
    saved.assign(parts)
    assert parts["counters"].value == {
        "num_snapshots": 1, "inner_steps": 4, "grad_evaluations": 34, "compared": False,
    }  # fmt: skip
    assert parts["coefficient_schedule"].value == {"schedule": 0.75, "coefficient": 0.75}
    assert parts["lock"].value.keys() == {"mode", "locked", "base", "count"}
    assert (trainer.optimizer.num_update, trainer.optimizer.lr_scheduler.count) == (4, 3)
    roles = [re.sub(r"^[a-z]+\d+_", "", p.name) for p in trainer._params]
    labels = [re.sub(r"^[a-z]+\d+_", "", name) for name in expected["names"]]
    method = parts["method"].value
    matched = {}  # position in the file to position here
    for position in range(8):
        alike = [
            n for n, p in enumerate(trainer._params)
            if labels[position] == roles[n]
            and p.shape == expected.get(f"state {position}", np.zeros(p.shape)).shape
        ]  # fmt: skip
        (matched[position],) = alike
    for old, new in matched.items():
        if f"state {old}" not in expected:
            assert method["frozen"][new][0].shape == (4,)
            continue
        state = trainer._updaters[0].states[new].asnumpy()
        np.testing.assert_array_equal(state, expected[f"state {old}"])
        np.testing.assert_array_equal(method["weights"][new], expected[f"snapshot {old}"])
        np.testing.assert_array_equal(method["full_grads"][new], expected[f"mean {old}"])
        assert method["in_objective"][new] is True
        rows = np.stack([expected[f"row {number} {old}"] for number in range(3)])
        np.testing.assert_allclose(method["table"]["rows"][new][0], rows, rtol=1e-5, atol=1e-6)
    assert method["table"]["counts"] == [[4], [4], [2]]


class Anything(Toy):
    def state(self):
        return self.value

    def problems(self, state):
        yield from ()

    def assign(self, state):
        self.value = state
