"""Documents and docstrings: that they are complete, and that what they show runs."""

import ast
import ctypes
import doctest
import importlib
import inspect
import json
import logging
import pkgutil
import re
import struct
import sys
from pathlib import Path
from statistics import median

import mxnet as mx
import numpy as np
import pytest
from cluster import launch
from mxnet import gluon
from mxnet.base import _LIB, check_call
from numpydoc.validate import validate
from problems import array

import gluon_svrg
import gluon_svrg.estimator
import gluon_svrg.prox
import gluon_svrg.schedule
import gluon_svrg.variance
from gluon_svrg._docstrings import parameters_as, parameters_in

ROOT = Path(__file__).parent.parent
README, INDEX = ROOT / "README.md", ROOT / "notebooks" / "README.md"
GUIDE = ROOT / "notebooks" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))
CHANGELOG = ROOT / ".github" / "CHANGELOG.md"
GUIDES = "".join(path.read_text() for path in (README, INDEX, *PAGES))
DOCUMENTS = [
    README,
    INDEX,
    *PAGES,
    ROOT / "benchmarks" / "README.md",
    ROOT / ".github" / "CONTRIBUTING.md",
    CHANGELOG,
    ROOT / "notebooks" / "README.several_machines.md",
]
#: Trainers whose code is run, and whose messages are looked for, as soon as all of them are here.
FAMILY = ("SAGATrainer", "SAGTrainer", "SARAHTrainer", "STORMTrainer", "MARSTrainer")
HAS_FAMILY = all(name in gluon_svrg.__all__ for name in FAMILY)
TREES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "gluon_svrg").rglob("*.py"))}
#: Errors that no user can cause.
OUR_OWN_MISTAKES = [
    "There is no ServerOptimizer in this process.",
    "module {} has no attribute {}",  # Python's own words
]
MODULES = [
    module.name
    for module in pkgutil.walk_packages(gluon_svrg.__path__, "gluon_svrg.")
    if module.name != "gluon_svrg.__main__"
]
PUBLIC = [
    *(f"gluon_svrg.{name}" for name in gluon_svrg.__all__ if name != "__version__"),
    *(f"gluon_svrg.schedule.{name}" for name in gluon_svrg.schedule.__all__),
    *(f"gluon_svrg.variance.{name}" for name in gluon_svrg.variance.__all__),
    *(f"gluon_svrg.estimator.{name}" for name in gluon_svrg.estimator.__all__),
    *(f"gluon_svrg.prox.{name}" for name in gluon_svrg.prox.__all__),
]
ACCEPTED = {
    "ES01": "a summary can be enough",
    "EX01": "one example per class",
    "SA01": "see also where there is something to see",
    "GL01": "numpydoc 1.7, the last for Python 3.8, wants the summary on a line of its own",
    "GL08": "raised for __init__, which its class documents",
    "YD01": "at_snapshot is a context manager and yields nothing",
}


def name_of(path):
    return str(path.relative_to(ROOT))


def public_objects():
    for name in PUBLIC:
        yield name
        module, _, attribute = name.rpartition(".")
        owner = getattr(importlib.import_module(module), attribute)
        if inspect.isclass(owner):
            for member, value in vars(owner).items():
                if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                    yield f"{name}.{member}"


@pytest.mark.parametrize("name", list(public_objects()))
def test_docstrings_are_complete(name):
    errors = [error for error in validate(name)["errors"] if error[0] not in ACCEPTED]
    assert errors == []


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_an_example(name):
    """A `Variance` is made by `variance`, whose example shows it."""
    module, _, attribute = name.rpartition(".")
    text = inspect.getdoc(getattr(importlib.import_module(module), attribute))
    assert ">>> " in text or name == "gluon_svrg.variance.Variance"


def test_what_trainers_share_is_written_once():
    """`help` shows every parameter of each, see above; the files describe each in one place."""
    found = {}
    for name in ("SVRGTrainer", *FAMILY):
        tree = TREES[Path(inspect.getfile(getattr(gluon_svrg, name)))]
        (node,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
        for parameter, text in parameters_in(ast.get_docstring(node, clean=False)).items():
            found.setdefault(text, []).append(f"{name}, {parameter}")
    assert len(found) > 15
    assert [places for places in found.values() if len(places) > 1] == []


def test_parameters_of_another_class():
    class First:
        """One.

        Parameters
        ----------
        a : int
            Of the first.
        b : int
            Of the first, too.

        Raises
        ------
        ValueError
            Never.
        """

        def __init__(self, a, b):
            pass

    class Second(First):
        """Two.

        Raises
        ------
        TypeError
            Never.
        """

    class Third(First):
        """Three.

        Parameters
        ----------
        c : str
            Its own,
            on two lines.
        b : str
            Another.

        Returns
        -------
        """

        def __init__(self, b, c, a):
            pass

    for cls in (First, Second, Third):  # as those of a module
        cls.__doc__ = re.sub(r"^    ", "", cls.__doc__, flags=re.M)
    a, b = "a : int\n    Of the first.\n", "b : int\n    Of the first, too.\n"
    head = "Parameters\n----------\n"
    second = inspect.getdoc(parameters_as(First)(Second))
    assert second == f"Two.\n\n{head}{a}{b}\nRaises\n------\nTypeError\n    Never."
    third = inspect.getdoc(parameters_as(Second)(Third))
    own = "b : str\n    Another.\nc : str\n    Its own,\n    on two lines.\n"
    assert third == f"Three.\n\n{head}{own}{a}\nReturns\n-------"


def test_help_is_a_table_of_contents():
    for name in [
        *PUBLIC[: len(gluon_svrg.__all__) - 1],
        "schedule",
        "variance",
        "prox",
        "estimator",
    ]:
        assert name.rpartition(".")[2] in gluon_svrg.__doc__


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_the_doctests_are_found():
    assert doctest.testmod(importlib.import_module("gluon_svrg.svrg")).attempted > 5


# --- the documents ------------------------------------------------------------------------------


def blocks(document, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.M | re.S)


def has_code(document):
    return bool(re.search(r"^```python(?: \w+)?$", document.read_text(), re.M))


def run_blocks(document, namespace):
    text = document.read_text()
    for found in re.finditer(r"^```python(?: (\w+))?\n(.*?)^```$", text, re.M | re.S):
        needed, block = found.groups()
        assert needed is None or needed in FAMILY
        if needed is None or needed in gluon_svrg.__all__:
            lines_before = "\n" * text.count("\n", 0, found.start(2))  # errors name their line
            exec(compile(lines_before + block, str(document), "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page)], ids=name_of)
def test_code_runs_word_for_word(page, tmp_path, monkeypatch, capsys):
    """Each page of the guide continues from the program of the index, and from no other page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers])  # pages add one
    namespace = {}
    run_blocks(INDEX, namespace)
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    run_blocks(page, namespace)
    if page.stem == "logging":
        logged = re.findall(r"^INFO:training:(.*)$", capsys.readouterr().err, re.M)
        assert_logged_as_shown(page, logged)
        assert_in_tensorboard(tmp_path / "runs" / "svrg")


def assert_logged_as_shown(page, messages):
    """Line by line, but for the numbers after a point: the weights at the start are random."""
    shown = re.findall(r"^INFO:training:(.*)$", page.read_text(), re.M)
    shape, logged = (
        [re.sub(r"\d+\.\d+", "#", line) for line in lines] for lines in (shown, messages)
    )
    assert shape == logged


def assert_in_tensorboard(folder):
    """Read the file of events: records of a length, a checksum of it, data and its checksum."""
    from tensorboardX.proto import event_pb2

    (path,) = folder.iterdir()
    left, found = path.read_bytes(), {}
    while left:
        (length,) = struct.unpack("<Q", left[:8])
        event = event_pb2.Event.FromString(left[12 : 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
        left = left[16 + length :]
    assert [step for step, _ in found["variance/ratio"]] == [4, 6, 9]  # data passes
    assert found["snapshot/number"] == [(2, 1), (7, 2)]
    assert found["snapshot/mean_loss"][0][1] > found["snapshot/mean_loss"][1][1] > 0
    assert all(value > 0 for _, value in found["variance/gradient_norm"])


def run_readme(*changes):
    """Run the README's program, with some of its text replaced; returns its names."""
    (program,) = blocks(README, "python")
    for old, new in changes:
        assert old in program
        program = program.replace(old, new)
    namespace = {}
    exec(compile(program, str(README), "exec"), namespace)
    return namespace


def test_the_program_prints_what_the_readme_shows(capsys):
    run_readme()
    line = r"^epoch \d: mean loss ([\d.]+)$"
    printed = [float(x) for x in re.findall(line, capsys.readouterr().out, re.M)]
    shown = re.findall(line, README.read_text(), re.M)
    if not mx.__version__.startswith("1."):
        (line,) = re.findall(r"on 2\.0, with other initial weights, (.*):", README.read_text())
        shown = re.findall(r"[\d.]+", line)
    assert printed == pytest.approx([float(number) for number in shown], abs=0.0015)
    assert len(printed) == 3
    assert printed == sorted(printed, reverse=True)


@pytest.mark.slow
def test_what_the_recipe_can_cost():
    """With momentum, the plain optimizer gets further, per epoch and per gradient."""

    def median_loss(epochs, *changes):
        losses = []
        for seed in range(1, 6):
            names = run_readme(
                ("seed(1)", f"seed({seed})"),
                ('{"learning_rate": 0.1}', '{"learning_rate": 0.1, "momentum": 0.9}'),
                ("range(6)", f"range({epochs})"),
                *changes,
            )
            trainer, samples = names["trainer"], len(names["data"])
            passes = trainer.grad_evaluations / samples
            losses.append(trainer.update_full_grads(names["loss_of"], names["train_data"]))
        return median(losses), passes

    plain = ("epoch % 2 == 1", "False")
    found = [median_loss(10), median_loss(10, plain), median_loss(24, plain)]
    print(found)
    assert [passes for _, passes in found] == [24, 10, 24]
    text = " ".join(README.read_text().split())
    shown = re.search(r"was ([\d.]+) with SVRG and ([\d.]+) without, and ([\d.]+) after", text)
    assert [loss for loss, _ in found] == pytest.approx(list(map(float, shown.groups())), rel=0.5)


@pytest.mark.parametrize("lock, calls", [("auto", 32), (True, 30), (False, 30)])
def test_how_often_a_refresh_calls_the_closure(lock, calls):
    """The numbers of the page on the closure."""
    namespace = {}
    run_blocks(INDEX, namespace)
    loss_of, data = namespace["loss_of"], namespace["train_data"]
    trainer = namespace["new_trainer"](lock_random=lock)
    namespace["net"](next(iter(data))[0])  # otherwise it is called once more, for the shapes
    counted = []

    def closure(X, y):
        counted.append(len(X))
        return loss_of(X, y)

    trainer.update_full_grads(closure, data)
    assert (len(data), len(counted)) == (29, calls)
    assert trainer.grad_evaluations == 1797  # without the checks
    assert f"{calls} times" in (GUIDE / "closure.md").read_text()


def address(array):
    """Where the values of an array are."""
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value


def arrays_in(thing, seen):
    """All arrays that can be reached from the package's own objects, but not through Gluon's."""
    if id(thing) in seen or isinstance(thing, (gluon.Parameter, type)):
        return
    seen[id(thing)] = thing
    if isinstance(thing, mx.nd.NDArray):
        yield thing
    elif isinstance(thing, (dict, list, tuple)):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from arrays_in(part, seen)
    elif type(thing).__module__.startswith("gluon_svrg"):
        yield from arrays_in(vars(thing), seen)


MEMORY = {  # by its name in the table of methods: the class, its options, and what it is used with
    "`SVRGTrainer`": ("SVRGTrainer", {}, "refresh"),
    "`SVRGTrainer(coefficient=Linear(0.75, n))`": (
        "SVRGTrainer",
        {"coefficient": gluon_svrg.schedule.Linear(0.75, 9)},
        "refresh",
    ),
    "`SVRGTrainer`, `store_grads=True`": ("SVRGTrainer", {}, "refresh store index"),
    "`SAGATrainer`": ("SAGATrainer", {}, "index"),
    "`SAGTrainer`": ("SAGTrainer", {}, "refresh index"),
    "`SARAHTrainer`": ("SARAHTrainer", {}, "refresh"),
    "`STORMTrainer`": ("STORMTrainer", {}, ""),
    "`MARSTrainer`": ("MARSTrainer", {}, ""),
    "`MARSTrainer(exact=False)`": ("MARSTrainer", {"exact": False}, ""),
}


@pytest.mark.parametrize("units", [30, 300])  # 90,000 weights take one P more
def test_the_memory_in_the_table_of_methods(units):
    """What each keeps after two epochs, in multiples of the parameters."""
    row = re.compile(r"^\| .* \| (`\w+Trainer.*) \| \d \| .* \| (.*) \|$", flags=re.M)
    shown = dict(row.findall(README.read_text()))
    assert set(shown) == set(MEMORY)
    batches = [array(np.ones((4, units)) + n, "float32") for n in range(5)]
    for name, (cls, options, ways) in MEMORY.items():
        net = gluon.nn.Dense(units, in_units=units)
        net.initialize()
        settings = {"learning_rate": 1e-9}
        trainer = getattr(gluon_svrg, cls)(net.collect_params(), "sgd", settings, **options)

        def loss_of(X, net=net):
            return (net(X) ** 2).sum(axis=1)

        if "refresh" in ways:
            store = {"store_grads": True} if "store" in ways else {}
            trainer.update_full_grads(loss_of, batches, **store)
        for n in [*range(5), *range(5)]:
            index = {"batch_index": n} if "index" in ways else {}
            trainer.step(4, closure=lambda n=n, loss_of=loss_of: loss_of(batches[n]), **index)
        parameters = list(net.collect_params().values())
        own = {address(a) for p in parameters for a in (*p.list_data(), *p.list_grad())}
        found = {address(a): a.size for a in arrays_in([trainer._work, trainer._live], {})}
        kept = sum(size for place, size in found.items() if place not in own)
        wanted = eval(shown[name].split(" P")[0], {"M": len(batches)}) + (units == 300)
        assert kept / sum(p.data().size for p in parameters) == pytest.approx(wanted, rel=0.01)


def test_code_is_found():
    assert len(blocks(README, "python")) == 1
    assert len(blocks(INDEX, "python")) == 1
    assert sum(len(blocks(page, "python")) for page in PAGES) > 15


def test_two_workers_train_what_the_guide_says(tmp_path):
    (script,) = blocks(GUIDE / "workers.md", "python train.py")
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, str(tmp_path / "train.py")]
    status, output = launch(["-n", 2, "-s", 1, "--", *command])
    assert status == 0, output
    for worker in range(2):
        line = rf"^\[worker {worker}[^]]*\] epoch \d: mean loss ([\d.]+)$"
        losses = [float(loss) for loss in re.findall(line, output, re.M)]
        assert len(losses) == 3, output
        assert losses[-1] < losses[0] / 2


def test_the_diff_and_the_program_are_one_recipe():
    """All lines that the diff adds are in the program: rate, refresh rule, start."""
    (block,), (program,) = blocks(README, "diff"), blocks(README, "python")
    added = [line[1:] for line in block.splitlines() if re.match(r"\+ *\S", line)]
    assert len(added) == 6
    for line in added:
        assert line in program.splitlines()


def test_the_diff_is_a_program_on_both_sides():
    (block,) = blocks(README, "diff")
    for sign, other in ("+-", "-+"):
        lines = [line[1:] for line in block.splitlines() if not line.startswith(other)]
        compile("\n".join(lines), f"{sign} side", "exec")


def test_the_readme_is_short():
    assert len(README.read_text().split()) <= 1700


def test_commands_are_one_line():
    first, *_ = blocks(README, "sh")
    assert first.count("\n") == 1
    assert first.startswith("python3 -m venv")
    _, _, development = README.read_text().partition("\n## Development\n")
    assert re.search(r"^python3 -m venv .*pytest$", development.partition("\n## ")[0], re.M)


def test_release_notes_begin_with_this_version():
    first, *_ = re.findall(r"^## (.*)$", CHANGELOG.read_text(), re.M)
    assert first == gluon_svrg.__version__


def test_all_notebooks_are_in_the_index():
    for notebook in INDEX.parent.glob("*.ipynb"):
        assert f"[{notebook.stem}]({notebook.name})" in INDEX.read_text()


def test_pages_with_programs_say_what_these_continue_from():
    for page in filter(has_code, PAGES):
        assert "](../README.md#what-the-examples-share)" in page.read_text(), page


def test_all_pages_are_in_the_index():
    for page in PAGES:
        assert f"](guide/{page.name})" in INDEX.read_text()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_in_the_guides(name):
    assert re.search(rf"\b{name.rpartition('.')[2]}\b", GUIDES)


def test_all_of_the_trainer_is_in_the_guides():
    members = set(dir(gluon_svrg.SVRGTrainer)) - set(dir(gluon.Trainer))
    for name in members:
        if not name.startswith("_") and name != "epoch_count":
            assert re.search(rf"\b{name}\b", GUIDES), name


# --- calls in prose ----------------------------------------------------------------------------


def public_classes():
    for name in PUBLIC:
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        if inspect.isclass(value):
            yield attribute, value


def calls_in(text):
    """The calls of public classes in inline code, each with the class."""
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        try:
            tree = ast.parse(code)
        except SyntaxError:  # no Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in CLASSES:
                yield code, node, CLASSES[node.func.id]


CLASSES = dict(public_classes())


def test_calls_in_prose_have_the_arguments_of_the_code():
    found = 0
    for document in DOCUMENTS:
        for code, node, cls in calls_in(document.read_text()):
            found += 1
            arguments = [
                a for a in node.args if not (isinstance(a, ast.Constant) and a.value is ...)
            ]
            keywords = {keyword.arg: None for keyword in node.keywords}
            signature = inspect.signature(cls)
            try:
                signature.bind_partial(*arguments, **keywords)
            except TypeError as error:
                raise AssertionError(f"{name_of(document)}: {code}: {error}") from None
    assert found > 20


@pytest.mark.parametrize("page", ["refreshes", "penalties"])
def test_tables_of_signatures_name_keywords_and_defaults(page):
    """The first column has signatures: each name is a keyword, each value its default."""
    text = (GUIDE / f"{page}.md").read_text()
    columns = "\n".join(re.findall(r"^\| (`[A-Z].*?`) \|", text, re.M))
    found = list(calls_in(columns))
    assert len(found) >= 4
    for code, node, cls in found:
        parameters = inspect.signature(cls).parameters
        names = [a.id for a in node.args] + [keyword.arg for keyword in node.keywords]
        assert names == list(parameters), code
        for keyword in node.keywords:
            assert ast.literal_eval(keyword.value) == parameters[keyword.arg].default, code


# --- links -------------------------------------------------------------------------------------


def anchors(document):
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def texts():
    """All that can have links: documents, and the text in notebooks."""
    for document in DOCUMENTS:
        yield document, document.read_text()
    for notebook in INDEX.parent.glob("*.ipynb"):
        for cell in json.loads(notebook.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                yield notebook, "".join(cell["source"])


def test_links_lead_somewhere():
    for document, text in texts():
        for link in re.findall(r"\]\(((?!http|attachment)[^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = (document.parent / path).resolve() if path else document
            assert target.exists(), f"{name_of(document)}: {link}"
            if anchor:
                assert anchor in anchors(target), f"{name_of(document)}: {link}"


# --- troubleshooting ---------------------------------------------------------------------------


def constants():
    """The strings that modules of the package keep for messages, by their names."""
    return {
        target.id: node.value
        for path, tree in TREES.items()
        if not {"saving", "commands"} & {*path.parts}
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def text_of(node):
    """A message as it stands in the code, with {} for what differs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "format":
        return text_of(node.func.value)
    name = getattr(node, "id", getattr(node, "attr", None))
    return text_of(CONSTANTS[name]) if name in CONSTANTS else "{}"


CONSTANTS = constants()


def messages():
    """What a user can meet while training: errors and warnings, with their places."""
    for path, tree in TREES.items():
        room = path.parent.name
        if room == "commands":  # they say what to do by themselves
            continue
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            name = getattr(getattr(call, "func", None), "id", "")
            if not isinstance(call, ast.Call) or not call.args:
                continue
            if not (isinstance(node, ast.Raise) or name == "warn"):
                continue
            text = text_of(call.args[0])
            if name == "AttributeError":  # of a name that does not exist
                continue
            wrapped = room == "saving" and name not in ("TypeError", "IsADirectoryError")
            if wrapped and "Nothing was changed" not in text:
                continue
            if text != "{}" and text not in OUR_OWN_MISTAKES:
                yield f"{path.name}:{node.lineno}", text
    for name, node in CONSTANTS.items():  # of messages that several places raise
        if name.isupper() and re.search(r"[a-z]\(?\)? .*\.$", text_of(node)):
            yield name, text_of(node)


def beginnings():
    """The messages of the table, without what differs: each a list of pieces, with its heading."""
    for section in (GUIDE / "troubleshooting.md").read_text().split("\n## ")[1:]:
        for row in re.findall(r"^\| (`.*?) \|", section, re.M):
            for message in re.findall(r"`([^`]+)`", row):
                pieces = [piece.strip() for piece in message.split("\u2026") if piece.strip()]
                yield pieces, section.splitlines()[0]


def is_in(pieces, text):
    return re.search(".*".join(map(re.escape, pieces)), text, re.S) is not None


def test_every_message_has_its_row():
    rows = [pieces for pieces, _ in beginnings()]
    missing = [m for m in messages() if not any(is_in(pieces, m[1]) for pieces in rows)]
    assert not missing, "add these to the tables in notebooks/guide/troubleshooting.md"


def test_every_row_has_its_message():
    texts = [text for _, text in messages()]
    assert len(texts) > 60
    for pieces, heading in beginnings():
        if HAS_FAMILY or not heading.startswith("Other methods"):
            assert any(is_in(pieces, text) for text in texts), pieces
