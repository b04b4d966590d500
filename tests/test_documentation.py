"""Documents and docstrings: that they are complete, and that what they show runs."""

import ast
import doctest
import importlib
import inspect
import json
import pkgutil
import re
import sys
from pathlib import Path

import pytest
from cluster import launch
from numpydoc.validate import validate

import gluon_svrg
import gluon_svrg.estimator
import gluon_svrg.prox
import gluon_svrg.schedule
import gluon_svrg.variance

ROOT = Path(__file__).parent.parent
README, INDEX = ROOT / "README.md", ROOT / "notebooks" / "README.md"
PAGES = sorted((ROOT / "notebooks" / "guide").glob("*.md"))
TROUBLESHOOTING = ROOT / "notebooks" / "guide" / "troubleshooting.md"
GUIDES = "".join(path.read_text() for path in (README, INDEX, *PAGES))
DOCUMENTS = [
    README,
    INDEX,
    *PAGES,
    ROOT / "benchmarks" / "README.md",
    ROOT / ".github" / "CONTRIBUTING.md",
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


@pytest.mark.parametrize("document", [README, *filter(has_code, PAGES)], ids=name_of)
def test_code_runs_word_for_word(document, capsys, tmp_path, monkeypatch):
    """Each page of the guide continues from the program of the index, and from no other page."""
    monkeypatch.chdir(tmp_path)
    namespace = {}
    if document != README:
        run_blocks(INDEX, namespace)
    run_blocks(document, namespace)
    printed = capsys.readouterr().out
    if document == README:
        losses = [float(x) for x in re.findall(r"^epoch \d: mean loss ([\d.]+)$", printed, re.M)]
        assert len(losses) == 3
        assert losses[-1] < losses[0]


def test_code_is_found():
    assert len(blocks(README, "python")) == 1
    assert len(blocks(INDEX, "python")) == 1
    assert sum(len(blocks(page, "python")) for page in PAGES) > 15


@pytest.mark.xdist_group("clusters")
def test_two_workers_train_what_the_guide_says(tmp_path):
    (script,) = blocks(INDEX.parent / "guide" / "workers.md", "python train.py")
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, str(tmp_path / "train.py")]
    status, output = launch(["-n", 2, "-s", 1, "--", *command])
    assert status == 0, output
    for worker in range(2):
        line = rf"^\[worker {worker}[^]]*\] epoch \d: mean loss ([\d.]+)$"
        losses = [float(loss) for loss in re.findall(line, output, re.M)]
        assert len(losses) == 3, output
        assert losses[-1] < losses[0] / 2


def test_the_diff_is_a_program_on_both_sides():
    (block,) = blocks(README, "diff")
    for sign, other in ("+-", "-+"):
        lines = [line[1:] for line in block.splitlines() if not line.startswith(other)]
        compile("\n".join(lines), f"{sign} side", "exec")


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 280


def test_commands_are_one_line():
    first, *_ = blocks(README, "sh")
    assert first.count("\n") == 1
    assert first.startswith("python3 -m venv")
    _, _, development = README.read_text().partition("\n## Development\n")
    assert re.search(r"^python3 -m venv .*pytest$", development.partition("\n## ")[0], re.M)


def test_release_notes_begin_with_this_version():
    _, _, notes = README.read_text().partition("\n## Release notes\n")
    assert notes.strip().startswith(f"**{gluon_svrg.__version__}**")


def test_all_notebooks_are_in_the_index():
    for notebook in INDEX.parent.glob("*.ipynb"):
        assert f"[{notebook.stem}]({notebook.name})" in INDEX.read_text()


def test_all_pages_are_in_the_index():
    for page in PAGES:
        assert f"](guide/{page.name})" in INDEX.read_text()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_in_the_guides(name):
    assert re.search(rf"\b{name.rpartition('.')[2]}\b", GUIDES)


def test_all_of_the_trainer_is_in_the_guides():
    members = [name for cls in gluon_svrg.SVRGTrainer.__mro__[:6] for name in vars(cls)]
    internal = ("on_", "all_", "holds_", "needs_", "ready_")  # between the rooms
    for name in members:
        if not name.startswith(("_", *internal)) and name not in ("epoch_count", "loss_scale"):
            assert re.search(rf"\b{name}\b", GUIDES), name


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
    for section in TROUBLESHOOTING.read_text().split("\n## ")[1:]:
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
