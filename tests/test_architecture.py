"""The rooms of the package: imports go down only, and one room alone knows MXNet's private names.

Read from the syntax trees, so that imports inside functions and for annotations count as well.
"""

import ast
from pathlib import Path

import gluon_svrg

PACKAGE = Path(gluon_svrg.__file__).parent
TOP = "top"  # the modules that users import, beside the rooms

#: Each room, and the rooms that it may import; itself besides.
ROOMS = {
    "_mxnet": set(),
    "passes": {"_mxnet"},
    "kvstore": {"_mxnet"},
    "saving": {"_mxnet"},
    "methods": {"_mxnet", "passes", "saving"},
    TOP: {"_mxnet", "passes", "methods", "kvstore", "saving"},
    "commands": {"_mxnet", "passes", "methods", "kvstore", "saving", TOP},
}
FOR_ALL = {"gluon_svrg._version", "gluon_svrg._arguments"}  # they import nothing
#: Names with an underscore that are public: of named tuples, and a module of Python's own.
PUBLIC = {"_asdict", "_fields", "_replace", "_thread"}


def modules():
    """The tree of each module, by its full name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("gluon_svrg", *path.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


def is_package(name):
    return (PACKAGE.parent / name.replace(".", "/")).is_dir()


def imported(name, tree, names):
    """The modules of this package that a module imports, with the lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in names:
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                above = parts[: len(parts) - node.level + is_package(name)]
                base = ".".join([*above, *filter(None, [node.module])])
            if base in names:
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    yield (inner if inner in names else base), node.lineno


def imports():
    found = modules()
    return {name: dict(imported(name, tree, found)) for name, tree in found.items()}


def room_of(name):
    if name == "gluon_svrg.__main__":  # `python -m gluon_svrg` is the command
        return "commands"
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and is_package(".".join(parts[:2])) else TOP


def cycles(graph):
    """Each cycle that a walk in depth meets, as a list of names."""
    done, path, found = set(), [], []

    def visit(name):
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            path.append(name)
            for other in graph[name]:
                visit(other)
            done.add(path.pop())

    for name in graph:
        visit(name)
    return found


def test_every_folder_is_a_room():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= set(ROOMS)


def test_no_import_cycle():
    assert [" -> ".join(cycle) for cycle in cycles(imports())] == []


def test_imports_go_down_only():
    upward = [
        f"{name}, line {line}, imports {other}"
        for name, others in imports().items()
        for other, line in others.items()
        if other not in FOR_ALL and room_of(other) not in ROOMS[room_of(name)] | {room_of(name)}
    ]
    assert upward == []


def test_only_one_module_knows_the_kinds_of_workers():
    """All others ask workers what they can do."""
    kinds = {"gluon_svrg.kvstore.collective", "gluon_svrg.kvstore.servers"}
    found = {name for name, others in imports().items() if kinds & set(others)}
    assert found - kinds == {"gluon_svrg.kvstore.kinds"}
    for name, tree in modules().items():
        asked = [node for node in ast.walk(tree) if is_asked_for_its_kind(node)]
        assert not asked, f"{name}, line {asked[0].lineno}"


def is_asked_for_its_kind(node):
    """Whether a node is ``isinstance(workers, ...)``."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return is_call and node.func.id == "isinstance" and "workers" in ast.dump(node.args[0])


# --- private names -------------------------------------------------------------------------------


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name != "_"


def own_names(trees):
    """What this package defines: functions, classes, variables, and attributes of `self`."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.alias):
                yield node.asname or ""
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            ):
                yield node.attr


def used_names(tree):
    """Attributes that are read or written, also by name, and what is imported; with the lines.

    Not those of other libraries' modules, as `os._exit`.
    """
    others = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] not in ("mxnet", "gluon_svrg")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in others):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call):
            by_name = isinstance(node.func, ast.Name) and node.func.id.endswith("attr")
            if by_name and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                yield str(node.args[1].value), node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((part, node.lineno) for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for name in [*node.module.split("."), *(alias.name for alias in node.names)]:
                yield name, node.lineno


def private_names(trees):
    """Where each module uses private names that are not the package's own."""
    own = {*own_names(trees.values()), *(part for name in trees for part in name.split("."))}
    for module, tree in trees.items():
        for name, line in used_names(tree):
            if is_private(name) and name not in own | PUBLIC:
                yield module, line, name


def test_private_names_of_mxnet_are_in_one_room():
    found = [
        f"{module}, line {line}: {name}"
        for module, line, name in private_names(modules())
        if room_of(module) != "_mxnet"
    ]
    assert found == []


# --- the walk itself -----------------------------------------------------------------------------


def test_the_walk_finds_imports():
    source = """
from __future__ import annotations
import os, gluon_svrg.schedule
from .. import _mxnet, __version__
from ..trainer import SVRGTrainer
def inside():
    from . import files
"""
    names = {
        "gluon_svrg",
        "gluon_svrg._mxnet",
        "gluon_svrg.saving",
        "gluon_svrg.saving.files",
        "gluon_svrg.schedule",
        "gluon_svrg.trainer",
    }
    found = dict(imported("gluon_svrg.saving.states", ast.parse(source), names))
    assert set(found) == names - {"gluon_svrg.saving"}
    assert found["gluon_svrg.trainer"] == 5
    inner = dict(imported("gluon_svrg.saving", ast.parse("from .files import x"), names))
    assert set(inner) == {"gluon_svrg.saving.files"}


def test_the_walk_finds_cycles():
    assert cycles({"a": ["b"], "b": ["c"], "c": []}) == []
    assert cycles({"a": ["b"], "b": ["c"], "c": ["b"]}) == [["b", "c", "b"]]


def test_the_walk_finds_private_names():
    source = """
from mxnet.gluon import _secret
import mxnet._ctypes, os
os._exit
class Own:
    def __init__(self, trainer):
        self._mine = trainer._theirs
        trainer._set = getattr(trainer, "_named")
    def _method(self):
        self._method(), self.__class__, self._inherited, self._mine
"""
    found = {name for _, _, name in private_names({"module": ast.parse(source)})}
    assert found == {"_secret", "_ctypes", "_theirs", "_set", "_named", "_inherited"}
