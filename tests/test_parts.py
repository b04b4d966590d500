"""The trainer is one object with parts: few levels, one owner for each state, no hooks in sight."""

import ast
import inspect
import pydoc
import re
import sys
import weakref
from pathlib import Path

import kit
import pytest
from gluon_svrg.methods import live_gradients
from gluon_svrg.methods.storm import STORM
from mxnet import gluon

import gluon_svrg
from gluon_svrg import STORMTrainer, SVRGTrainer
from gluon_svrg.passes.estimate import Terms
from gluon_svrg.trainer import VarianceReducedTrainer

PACKAGE = Path(gluon_svrg.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / ".github" / "CONTRIBUTING.md"
TRAINERS = [getattr(gluon_svrg, name) for name in gluon_svrg.__all__ if name.endswith("Trainer")]


def levels(cls):
    """The classes of this package and `gluon.Trainer`, the lowest first."""
    return [each for each in reversed(cls.__mro__) if each is not object]


# --- levels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", TRAINERS)
def test_there_are_few_levels(cls):
    assert len(levels(cls)) - 1 <= 5  # above itself


def class_definitions():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield path.relative_to(PACKAGE).parts, node


def test_no_class_of_a_trainer_exists_only_to_be_inherited_once():
    bases = [
        getattr(base, "attr", getattr(base, "id", ""))
        for _, n in class_definitions()
        for base in n.bases
    ]
    trainers = {cls.__name__ for trainer in TRAINERS for cls in levels(trainer)}
    once = {
        node.name
        for parts, node in class_definitions()
        if node.name in trainers and parts[0] not in ("_mxnet", "kvstore")
        if bases.count(node.name) == 1
    }
    assert once == set()


def attributes(cls):
    """The attributes of `self` that the source of a class writes, and those that it uses."""
    tree = ast.parse(inspect.getsource(cls))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"
    ]
    return {n.attr for n in found if isinstance(n.ctx, ast.Store)}, {n.attr for n in found}


def test_a_state_belongs_to_one_level():
    ours = levels(SVRGTrainer)[1:]
    written = set().union(*(attributes(cls)[0] for cls in ours)) - set(vars(gluon.Trainer))
    theirs = attributes(gluon.Trainer)[0] | {"_param2idx", "_amp_loss_scaler"}
    properties = {name for cls in ours for name in vars(cls)}
    shared = {
        name
        for name in written - theirs - properties
        if sum(name in attributes(cls)[1] for cls in ours) > 1
    }
    assert shared == {"_work", "_workers"}


def moves(trainer, call):
    """How often a call moves between the levels of a trainer, and comes back."""
    level_of = {}
    for level, cls in enumerate(levels(type(trainer))):
        for value in vars(cls).values():
            for function in (value, getattr(value, "fget", None), getattr(value, "fset", None)):
                function = getattr(function, "__wrapped__", function)
                level_of[getattr(function, "__code__", None)] = level
    stack, count = [], 0

    def look(frame, event, _):
        nonlocal count
        code = frame.f_code
        if event not in ("call", "return") or code not in level_of or not code.co_argcount:
            return
        if frame.f_locals.get(code.co_varnames[0]) is trainer:
            before = stack[-1:]
            if event == "call":
                stack.append(level_of[code])
            elif stack:
                stack.pop()
            count += bool(before and stack and before != stack[-1:])

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def small(cls=SVRGTrainer):
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize()
    X, y = kit.array([[1, 2, 3], [4, 5, 6]], "float32"), kit.array([[1], [2]], "float32")
    trainer = cls(net.collect_params(), "sgd", {"learning_rate": 0.01})
    return net, trainer, lambda: gluon.loss.L2Loss()(net(X), y)


def test_a_step_moves_little_between_levels():
    _, trainer, loss_of = small()
    trainer.update_full_grads(loss_of, [()])
    for _ in range(2):
        trainer.step(2, closure=loss_of)
    assert 0 < moves(trainer, lambda: trainer.step(2, closure=loss_of)) <= 26  # it was 50
    refresh = moves(trainer, lambda: trainer.update_full_grads(loss_of, [()]))
    assert 0 < refresh <= 10  # it was 36


def test_no_part_keeps_the_trainer():
    """A cycle would hold all arrays until garbage is collected."""
    _, trainer, loss_of = small()
    trainer.update_full_grads(loss_of, [()])
    trainer.step(2, closure=loss_of)
    gone = weakref.ref(trainer)
    for parameter in trainer._params:
        parameter._trainer = None  # 1.9.1 keeps it there
    del trainer
    assert gone() is None


# --- what the live gradients hold ----------------------------------------------------------------

FIELDS = set(live_gradients._empty())


def writes_to_live_gradients(tree):
    """Lines that assign a field of what is called `live`, `_live` or `live_gradients`."""
    for node in ast.walk(tree):
        owner = getattr(node, "value", None)
        name = getattr(owner, "attr", getattr(owner, "id", ""))
        is_live = name.lstrip("_") in ("live", "live_gradients")
        if isinstance(node, ast.Attribute) and is_live:
            if isinstance(node.ctx, ast.Store) or node.attr == "__dict__":
                yield node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("vars", "setattr"):
            first = node.args[0] if node.args else None
            if getattr(first, "attr", getattr(first, "id", "")).lstrip("_") == "live":
                yield node.lineno


def test_one_file_writes_what_the_live_gradients_hold():
    found = [
        f"{path.name}, line {line}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "live_gradients.py" and path.parent.name != "saving"  # its own `live`
        for line in writes_to_live_gradients(ast.parse(path.read_text()))
    ]
    assert found == []
    assert {"stage", "entries", "reached", "rows", "following"} <= FIELDS


def test_the_walk_finds_writes():
    source = "self._live.stage = 1\nlive.rows = {}\nvars(live).update(a=1)\nx = live.entries\n"
    assert list(writes_to_live_gradients(ast.parse(source))) == [1, 2, 3]


# --- what users see ------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", TRAINERS)
def test_help_and_completion_show_what_users_call(cls):
    theirs = set(dir(gluon.Trainer))
    shown = {name for name in dir(cls) if not name.startswith("_")} - theirs
    assert shown - {"coefficient"} == {
        "at_current_weights",
        "at_snapshot",
        "correct_grads",
        "discard_snapshot",
        "epoch_count",
        "export_optimizer_states",
        "full_grads",
        "grad_evaluations",
        "has_snapshot",
        "inner_steps",
        "lock_random",
        "num_snapshots",
        "register",
        "snapshot",
        "update_full_grads",
        "wants_snapshot",
    }
    assert "_on_reduced" not in pydoc.plaintext.document(cls)


# --- a new method --------------------------------------------------------------------------------


class Toy(STORM):
    """A method in one class: `v = g - (r - c m) / 2`."""

    def __init__(self):
        super().__init__(0.0)

    def terms(self, batch_index=None, live=None):
        if self.now is None:
            return Terms()
        return Terms(b=-0.5, k=0.5, reference=self.now.reference, mean=self.now.mean)


class ToyTrainer(VarianceReducedTrainer):
    """Its trainer: nothing but the method and the arguments."""

    def __init__(self, params, optimizer, settings=None, **options):
        super().__init__(
            Toy(), "auto", params, optimizer, settings, "device", None, None, **options
        )


def test_a_method_is_one_class_and_one_trainer(tmp_path):
    """Steps, files and messages of a method that no other file names; its twin is STORM."""
    found = []
    for cls in (ToyTrainer, lambda *args: STORMTrainer(*args, mixing=0.5)):
        net, trainer, loss_of = small(cls)
        for parameter in net.collect_params().values():
            parameter.set_data(0 * parameter.data() + 0.25)
        for number in range(4):
            trainer.step(2, closure=loss_of)
            if number == 1:
                trainer.save_states(tmp_path / "states")
                trainer.discard_snapshot()
                trainer.load_states(tmp_path / "states")
        found.append([p.data().asnumpy().tolist() for p in net.collect_params().values()])
        with pytest.raises(RuntimeError, match=r"step\(\) needs"):
            trainer.step(2)
        with pytest.raises(TypeError, match="batch_index names a stored gradient"):
            trainer.step(2, closure=loss_of, batch_index=0)
        with pytest.raises(ValueError, match="store_grads=True"):
            trainer.update_full_grads(loss_of, [()], store_grads=True)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["storm", "sarah", "mars"])
def test_few_files_name_a_method(name):
    """Its own, its trainer's, the package's, and that of a trainer with the same parameters."""
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "commands"
        if any(re.search(rf"(?i)\b{name}(trainer)?\b", word) for word in words_of(path))
    }
    assert named >= {"__init__.py", f"{name}.py", f"methods/{name}.py"} and len(named) <= 4


def words_of(path):
    """The names and texts in a file, without docstrings and comments."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # a docstring: it is walked later
        for field in ("id", "attr", "name", "module", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                yield word


# --- the page ------------------------------------------------------------------------------------


def test_the_page_on_a_step_names_what_exists():
    page = CONTRIBUTING.read_text().partition("## How a step runs")[2].partition("\n## ")[0]
    lines = [line for line in page.splitlines() if line.strip()]
    assert 15 <= len(lines) <= 30
    places = re.findall(r"`([\w/]+\.py)`: `(\w+)(?:\(\))?`", page)
    assert len(places) >= 10
    for path, name in places:
        tree = ast.parse((PACKAGE / path).read_text())
        defined = {getattr(node, "name", "") for node in ast.walk(tree)}
        assert name in defined, f"{path} defines no {name}"
