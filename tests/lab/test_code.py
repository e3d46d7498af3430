"""The hash of a trial changes only if its result may have changed; that of a figure changes more often."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lazyscope.lab import Experiment
from lazyscope.lab.code import drawing_code, fingerprint
from lazyscope.lab.sources import tree, written

NET = "def width():\n    return 3\n"
EXPERIMENT = '''
"""A module."""
from planted.net import width
from planted.picture import colour
from lazyscope.lab import Claim, Experiment

FACTOR = 2

def grid(scale):
    return [{"x": 1}]

def trial(points, device):
    """Measure."""
    return [{"y": inner(point["x"])} for point in points]

def inner(x):
    return FACTOR * x + width()

def figure(trials):
    return colour()

def claims(trials):
    return [Claim("a", "b", "c", True)]

EXPERIMENT = Experiment("planted", "s", "t", {}, grid, trial, figure, claims)
'''
SOURCES = {"__init__": "", "net": NET, "picture": "def colour():\n    return 'red'\n", "one": EXPERIMENT}

Plant = Callable[..., Experiment]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """Write a package with one passage replaced, import it, and return its experiment."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def planted(module: str = "one", old: str = "", new: str = "") -> Experiment:
        folder = tmp_path / "planted"
        folder.mkdir(exist_ok=True)
        for name, text in SOURCES.items():
            assert name != module or old in text
            (folder / f"{name}.py").write_text(text.replace(old, new, 1) if name == module else text)
        for name in [name for name in sys.modules if name.partition(".")[0] == "planted"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        experiment = importlib.import_module("planted.one").EXPERIMENT
        assert isinstance(experiment, Experiment)
        return experiment

    yield planted
    for name in [name for name in sys.modules if name.partition(".")[0] == "planted"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("one", "FACTOR = 2", "FACTOR = 3"),
        ("one", "FACTOR * x", "FACTOR + x"),
        ("one", 'point["x"])', 'point["x"] + 1)'),
        ("net", "return 3", "return 4"),
    ],
)
def test_computation_counts(plant: Plant, module: str, old: str, new: str) -> None:
    assert fingerprint(plant(module, old, new)) != fingerprint(plant())


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("one", "return colour()", "return colour() * 2"),
        ("one", 'Claim("a"', 'Claim("b"'),
        ("one", '[{"x": 1}]', '[{"x": 1}, {"x": 2}]'),
        ("one", "import Claim, Experiment", "import Claim, Experiment, Trials"),
        ("one", "Measure.", "Measure well."),
        ("one", "return FACTOR", "# a comment\n    return FACTOR"),
        ("net", "def width():", "def width():\n    'How wide.'"),
        ("picture", "'red'", "'blue'"),
    ],
)
def test_the_rest_does_not(plant: Plant, module: str, old: str, new: str) -> None:
    assert fingerprint(plant(module, old, new)) == fingerprint(plant())


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("one", "return colour()", "return colour() * 2"),
        ("one", 'Claim("a"', 'Claim("b"'),
        ("picture", "'red'", "'blue'"),
    ],
)
def test_for_a_figure_drawn_elsewhere_they_count(plant: Plant, module: str, old: str, new: str) -> None:
    assert drawing_code(plant(module, old, new)).fingerprint != drawing_code(plant()).fingerprint


def test_so_does_the_lab(plant: Plant) -> None:
    files = drawing_code(plant()).files
    assert {"planted.one", "planted.picture", "lazyscope", "lazyscope.lab.fit", "lazyscope.lab.style"} <= files.keys()


def test_code_is_written_alike_by_all_releases_of_python() -> None:
    """`ast.unparse` quotes strings in f-strings in two ways, and Python 3.12 ends some formats with an empty string."""
    (statement,) = tree("f\"{a:{b}}{c['d']}\"").body
    inner = "FormattedValue(value=Name(id='a'), conversion=-1, format_spec=JoinedStr([{0}]))"
    width = "FormattedValue(value=Name(id='b'), conversion=-1)"
    item = "Subscript(value=Name(id='c'), slice=Constant(value='d'))"
    whole = f"JoinedStr([{inner.format(width)}, FormattedValue(value={item}, conversion=-1)])"
    assert written(statement) == f"Expr(value={whole})"
