"""The structure of the package: imports point to lower layers, files are short, public names have docstrings."""

from __future__ import annotations

import ast
import graphlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lazyscope

SOURCE = Path(lazyscope.__file__).parent
LONGEST = 350

FLOORS = (
    {"_typing", "errors"},  # below linalg, as every layer raises errors
    {"ambient", "arguments", "extras", "memory", "notices", "progress"},
    {"linalg", "stream", "labels"},
    {"model", "loss", "data"},
    {"flow", "tangent", "theory", "torch_loss"},
    {"diagnose", "solve"},
    {"lab", "problem", "certify"},
    {"phase"},  # diagrams of any model, which figures draw too
    {"experiments", "inspect"},
    {"cli", "app", "integrations"},
    {"__main__"},
)
"""The layers from the lowest to the highest. A new package must be added to one of them."""

REFUSED = {"utils", "util", "helpers", "helper", "common", "misc"}


def modules(package: Path) -> dict[str, Path]:
    """Return every module of the package by its full name."""
    files = {path.relative_to(package.parent).with_suffix(""): path for path in package.rglob("*.py")}
    return {".".join(p for p in name.parts if p != "__init__"): path for name, path in files.items()}


def imports(path: Path, known: set[str]) -> Iterator[str]:
    """Yield the known modules that a file imports anywhere. `from m import n` imports m.n if that is a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield from [name for name in (f"{node.module}.{alias.name}", node.module) if name in known][:1]


def floor(module: str) -> int:
    """Return the layer of a module, or -1 if it has none. The top-level `__init__` is above all layers."""
    room = module.split(".")[1] if "." in module else None
    if room is None:
        return len(FLOORS)
    return next((level for level, rooms in enumerate(FLOORS) if room in rooms), -1)


def violations(package: Path) -> list[str]:
    """Return a description of every violation."""
    files = modules(package)
    graph = {name: sorted(set(imports(path, set(files)))) for name, path in files.items()}
    return [*_floors(graph), *_cycles(graph), *_names(files), *_lengths(files)]


def _floors(graph: dict[str, list[str]]) -> Iterator[str]:
    for name, targets in graph.items():
        if floor(name) < 0:
            yield f"{name} is in a room that stands on no floor: add it to FLOORS"
        for target in targets:
            same_room = name.split(".")[:2] == target.split(".")[:2]
            if not same_room and floor(target) >= floor(name):
                yield f"{name} imports {target}, which is not below it"


def _cycles(graph: dict[str, list[str]]) -> Iterator[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield "import cycle: " + " -> ".join(error.args[1])


def _names(files: dict[str, Path]) -> Iterator[str]:
    for name in files:
        if bad := REFUSED & {part.strip("_") for part in name.split(".")}:
            yield f"{name}: '{bad.pop()}' says nothing; name it after what it is"


def _lengths(files: dict[str, Path]) -> Iterator[str]:
    for name, path in files.items():
        text = path.read_text(encoding="utf-8")
        head = text.partition("import ")[0]
        reason = re.search(r"^(# )?Longer than \d+ lines because", head, re.M)
        if len(text.splitlines()) > LONGEST and not reason:
            yield f"{name} has more than {LONGEST} lines; split it, or say 'Longer than {LONGEST} lines because'"


def test_floors_hold() -> None:
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("planted", "complaint"),
    [
        (
            {"loss.py": "from lazyscope.flow.trajectory import x", "flow/trajectory.py": ""},
            "loss imports lazyscope.flow.trajectory",
        ),
        ({"lab/run.py": "import lazyscope.experiments", "experiments/__init__.py": ""}, "not below it"),
        ({"flow/a.py": "from lazyscope.theory import x", "theory/__init__.py": ""}, "not below it"),
        ({"model/a.py": "def f():\n    from lazyscope import Model"}, "model.a imports lazyscope,"),
        ({"lab/a.py": "from lazyscope.lab import b", "lab/b.py": "import lazyscope.lab.a"}, "import cycle"),
        ({"attic/a.py": ""}, "stands on no floor"),
        ({"model/utils.py": ""}, "'utils' says nothing"),
        ({"loss.py": "x = 1\n" * 351}, "more than 350 lines"),
    ],
)
def test_planted_violations_are_found(tmp_path: Path, planted: dict[str, str], complaint: str) -> None:
    package = tmp_path / "lazyscope"
    for name, text in {"__init__.py": "", **planted}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert any(complaint in violation for violation in violations(package)), violations(package)


def test_what_is_allowed_passes(tmp_path: Path) -> None:
    package = tmp_path / "lazyscope"
    allowed = {
        "__init__.py": "from lazyscope.loss import Square",
        "errors.py": "# Longer than 350 lines because every error is here.\n" + "x = 1\n" * 400,
        "loss.py": '"""A loss.\n\nLonger than 350 lines because of its tables.\n"""\n' + "x = 1\n" * 400,
        "lab/a.py": "from lazyscope.lab.b import x\nfrom lazyscope import errors\nimport torch",
        "lab/b.py": "from lazyscope.loss import Square",
    }
    for name, text in allowed.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert violations(package) == []


def test_the_layers_in_the_documentation_are_these() -> None:
    """CONTRIBUTING.md lists every layer below the programs, from the highest to the lowest."""
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Layers")[1].split("## ")[0]
    rows = re.findall(r"^ +(\d*)  +([a-z_]+(?: [a-z_]+)*)  ", text, re.M)
    written: list[set[str]] = []
    for number, names in rows:
        if number:
            assert int(number) == len(FLOORS) - 1 - len(written)
            written.append(set())
        written[-1] |= set(names.split())
    assert tuple(reversed(written)) == FLOORS[:-1]


def test_every_public_name_has_a_docstring() -> None:
    bare = [
        name for name in lazyscope.__all__ if not name.startswith("__") and not inspect.getdoc(getattr(lazyscope, name))
    ]
    assert bare == []
