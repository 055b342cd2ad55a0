"""The rooms of the package: imports between them point one way."""

import ast
import pathlib
import re

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "mogrifier_jax"
# What a room may import from, beside itself and the modules that all may use.
ALLOWED = {
    "nn": set(),
    "data": set(),
    "training": {"nn", "data"},
    "evaluation": {"nn", "data", "training"},
    "tuning": {"nn", "data", "training", "evaluation"},
    "preflight": {"nn", "data", "training", "evaluation"},
    "analysis": {"nn", "data", "training", "evaluation"},
}
# The modules beside the rooms that they may import.
COMMON = {
    room: {
        *("errors", "options", "files", "configs", "config_keys"),
        *("hardware", "partitioning", "distributed", "buckets"),
    }
    for room in ALLOWED
}
COMMON |= {"nn": {"errors", "options"}, "data": {"errors", "files", "buckets"}}


# Both are imported when they are called: a method of the public model opens the page, and what
# converts a cell of NNX returns ours.
EXCEPTIONS = {("trained_model.py", "analysis.explore"), ("from_flax.py", "nnx")}


def imported(source):
    """(room or None, module) for each name of the package that a source imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            for alias in node.names:
                yield from places([*node.module.split(".")[1:], alias.name])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == PACKAGE.name and len(parts) > 1:
                    yield from places(parts[1:])


def places(parts):
    yield (parts[0], parts[1]) if parts[0] in ALLOWED and len(parts) > 1 else (None, parts[0])


def wrong(room, source):
    """The imports of a module that its room must not have."""
    for other, module in imported(source):
        if other is None and module not in COMMON[room] | {"__version__"}:
            yield module
        elif other not in {None, room, *ALLOWED[room]}:
            yield f"{other}.{module}"


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_between_rooms_point_one_way(room):
    modules = list((PACKAGE / room).rglob("*.py"))
    assert modules
    found = {(path.name, name) for path in modules for name in wrong(room, path.read_text())}
    assert not found - EXCEPTIONS


def test_every_folder_is_a_room():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(ALLOWED)


@pytest.mark.parametrize(
    "room, source",
    [
        ("nn", "from mogrifier_jax.training import run"),
        ("nn", "from mogrifier_jax import configs"),
        ("training", "import mogrifier_jax.evaluation.methods"),
        ("analysis", "def f():\n    from mogrifier_jax.tuning import studies"),
        ("evaluation", "from mogrifier_jax import main"),
    ],
)
def test_an_import_against_the_direction_is_found(room, source):
    assert list(wrong(room, source))


def named_files(title, text=None):
    """The files that a section of CONTRIBUTING.md names, in order."""
    text = text or (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"`((?:\w+/)*\w+\.py)`", section)


def test_the_walk_from_a_command_to_a_metric_names_each_file_once():
    names = named_files("From a command to a line of metrics.jsonl")
    assert names[0] == "main.py" and names[-1] == "training/metrics.py"
    assert sorted(set(names)) == sorted(names)
    twice = named_files("A", "## A\n`nn/cells.py`, and back to\n`nn/cells.py`\n## B\n`files.py`")
    assert twice == ["nn/cells.py", "nn/cells.py"]  # Control.


def test_every_file_outside_the_rooms_is_described():
    described = set(named_files("Where things are")) - {"tests/test_rooms.py"}
    files = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert files <= described
