"""A stored trial is not reused if any code that it depends on has changed, for every kind of dependence."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from lazyscope.errors import ExperimentError
from lazyscope.lab import Experiment, Params, Result
from lazyscope.lab.code import code_behind, fingerprint
from lazyscope.lab.experiment import setting
from lazyscope.lab.run import run
from lazyscope.lab.store import Store

CPU = torch.device("cpu")
EXPERIMENT = """
from lazyscope.lab import Claim, Experiment
from lazyscope.lab.style import panels
{imports}

def grid(scale):
    return [{{"x": 1}}]

def trial(points, device):
    {inside}
    return [{{"y": {value}}} for point in points]

def figure(trials):
    return panels()[0]

def claims(trials):
    return [Claim("y", "", str(trials[0].result["y"]), True)]

EXPERIMENT = Experiment("grown", "s", "t", {{}}, grid, {trial}, figure, claims)
"""
NET = "W = 1\n\ndef w():\n    return W\n"
NAMES = ("grown", "alone", "beside", "namespaced")

Grow = Callable[..., Experiment]


@pytest.fixture
def grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Grow]:
    """Write modules, import the experiment of one of them, and return it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    # Python recognises outdated bytecode by the second of a change and the size of the file.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def grown(module: str = "grown.one", files: dict[str, str] | None = None, **blanks: str) -> Experiment:
        text = EXPERIMENT.format(**{"imports": "", "inside": "pass", "value": "w()", "trial": "trial", **blanks})
        own = module.replace(".", "/") + ".py"
        for name, content in {"grown/__init__.py": "", own: text, **(files or {})}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
        forget()
        experiment = importlib.import_module(module).EXPERIMENT
        assert isinstance(experiment, Experiment)
        return experiment

    yield grown
    forget()


LOADER = "importlib import import_module"
CHANGED = NET.replace("W = 1", "W = 2")


@pytest.mark.parametrize(
    ("module", "file", "blanks"),
    [
        ("grown.one", "grown/net.py", {"imports": "from .net import w"}),
        ("grown.one", "grown/net.py", {"imports": "from . import net", "value": "net.w()"}),
        ("grown.one", "grown/net.py", {"inside": "from .net import w"}),
        ("grown.one", "grown/net.py", {"imports": "from grown.middle import w"}),  # middle.py imports .net
        ("grown.one", "grown/net.py", {"imports": "from grown.net import *"}),
        ("grown.one", "grown/net.py", {"imports": "from .net import *"}),
        ("alone", "beside.py", {"imports": "from beside import w"}),
        ("alone", "beside.py", {"imports": "import beside as other", "value": "other.w()"}),
        ("alone", "beside.py", {"inside": "import beside", "value": "beside.w()"}),
        ("alone", "namespaced/net.py", {"imports": "from namespaced.net import w"}),  # a folder without __init__.py
        ("alone", "beside.py", {"imports": "import importlib\nw = importlib.import_module('beside').w"}),
        ("grown.one", "grown/net.py", {"imports": f"from {LOADER} as load\nw = load('grown.net').w"}),
        ("grown.one", "grown/net.py", {"inside": f"from {LOADER}; w = import_module('.net', __package__).w"}),
        ("alone", "beside.py", {"imports": "w = __import__('beside').w"}),
        ("alone", "beside.py", {"imports": "try:\n    from beside import w\nexcept ImportError:\n    w = None"}),
        ("alone", "beside.py", {"imports": "import beside\nALL = [1]\nALL.append(beside.w())", "value": "ALL[-1]"}),
        ("grown.one", "grown/__init__.py", {"value": "1"}),  # it runs before the experiment
    ],
)  # fmt: skip
def test_imports_of_every_kind_count(grow: Grow, module: str, file: str, blanks: dict[str, str]) -> None:
    middle = {"grown/middle.py": "from .net import w\n", "grown/net.py": NET}
    before = fingerprint(grow(module, {**middle, file: NET}, **blanks))
    assert fingerprint(grow(module, {**middle, file: NET + "# a comment\n"}, **blanks)) == before
    assert fingerprint(grow(module, {**middle, file: CHANGED}, **blanks)) != before


def test_stored_trials_of_changed_code_are_measured_again(grow: Grow, tmp_path: Path) -> None:
    for content, measured in ((NET, "1"), (NET, "1"), (CHANGED, "2")):
        experiment = grow(files={"grown/net.py": content}, imports="from .net import w")
        outcome = run(experiment, "quick", Store(tmp_path / "results"), device=CPU)
        assert [claim.measured for claim in outcome.claims] == [measured]
    assert len(list(tmp_path.rglob("*.npz"))) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lambda points, device: [{'y': 1}]", "lambda points, device: [{'y': 2}]"),
        ("lambda points, device: [{'y': w()}]", "lambda points, device: [{'y': w() + 1}]"),
        ("partial(trial, 1)", "partial(trial, 2)"),
        ("partial(trial, k=[1, {'a': 2.0}])", "partial(trial, k=[1, {'a': 3.0}])"),
        ("partial(trial, k=np.arange(3))", "partial(trial, k=np.arange(4))"),
        ("partial(trial, k=torch.zeros(3))", "partial(trial, k=torch.ones(3))"),
        ("partial(trial, k=lambda x: x)", "partial(trial, k=lambda x: -x)"),
        ("partial(trial, k=math.sin)", "partial(trial, k=math.cos)"),
        ("partial(trial, k=functools.cache(w))", "partial(trial, k=functools.cache(lambda: 3))"),
        ("closed(1)", "closed(2)"),
        ("closed({1, 2})", "closed({1, 3})"),
        ("defaulted(1)", "defaulted(2)"),
        ("Measures(1)", "Measures(2)"),
        ("Measures(1).run", "Measures(2).run"),
        ("torch.no_grad()(closed(1))", "torch.no_grad()(closed(2))"),
    ],
)
def test_what_a_callable_holds_counts(grow: Grow, old: str, new: str) -> None:
    imports = """
import functools, math, numpy as np, torch
from functools import partial
from .net import w

def closed(k):
    def inner(points, device):
        return k
    return inner

def defaulted(k):
    return lambda points, device, k=k: k

class Measures:
    def __init__(self, k):
        self.k = k
    def __call__(self, points, device):
        return self.k
    def run(self, points, device):
        return self.k
"""
    files = {"grown/net.py": NET}
    before, again, after = (fingerprint(grow(files=files, imports=imports, trial=t)) for t in (old, old, new))
    assert before == again
    assert before != after


def test_a_decorated_trial_is_its_own_code(grow: Grow) -> None:
    """The decorator is in a file of torch, which does not change."""
    decorated = "import torch\n\n@torch.no_grad()\ndef decorated(points, device):\n    return {value}\n"
    one, two = (
        fingerprint(grow(imports=decorated.format(value=value), value="0", trial="decorated")) for value in (1, 2)
    )
    assert one != two


def holding(
    trial: Callable[[list[Params], torch.device], list[Result]],
    held: object,
    points: list[Params],
    device: torch.device,
) -> list[Result]:
    return trial(points, device)


def test_code_that_cannot_be_hashed_is_refused(toy: Experiment, tmp_path: Path) -> None:
    space: dict[str, Callable[[list[Params], torch.device], list[Result]]] = {}
    exec("def typed(points, device):\n    return [{} for _ in points]", space)
    with (tmp_path / "open.txt").open("w") as file:
        held: object = file
        for trial, reason in (
            (space["typed"], r"a function without a source file; define it in a module\."),
            (
                partial(holding, toy.trial, held),
                r"depends on a TextIOWrapper, which cannot be hashed .*; its functions may contain",
            ),
        ):
            with pytest.raises(ExperimentError, match=reason):
                run(dataclasses.replace(toy, trial=trial), "quick", Store(tmp_path), device=CPU)


def test_objects_may_refer_to_each_other(toy: Experiment) -> None:
    ring: list[object] = [np.float32(1), Path("a"), functools.cache(len), range(3)]
    ring.append(ring)
    first = code_behind(partial(holding, toy.trial, ring), "toy").fingerprint
    ring[0] = np.float32(2)
    assert code_behind(partial(holding, toy.trial, ring), "toy").fingerprint != first


def test_torch_and_its_default_dtype_count(toy: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log.txt"))

    def measured() -> int:
        run(toy, "quick", Store(tmp_path), device=CPU)
        return len((tmp_path / "log.txt").read_text().splitlines())

    count = measured()
    assert measured() == count
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__.partition('+')[0]}+other.build")
    assert measured() == count, "builds for different devices are the same release"
    monkeypatch.setattr(torch, "__version__", "1.0.0")
    assert measured() == 2 * count
    torch.set_default_dtype(torch.float64)
    try:
        assert measured() == 3 * count
    finally:
        torch.set_default_dtype(torch.float32)
    assert measured() == 3 * count


def test_declared_files_and_variables_count(toy: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = tmp_path / "data", tmp_path / "table.csv"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.bin").write_bytes(b"1")
    file.write_text("1")
    reading = dataclasses.replace(toy, files=(folder, str(file)), variables=("TOY_READS",))
    seen = [setting(reading), setting(reading)]
    (folder / "deep" / "a.bin").write_bytes(b"2")
    seen.append(setting(reading))
    (folder / "b.bin").touch()
    seen.append(setting(reading))
    file.write_text("2")
    seen.append(setting(reading))
    for value in ("", "x"):
        monkeypatch.setenv("TOY_READS", value)
        seen.append(setting(reading))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 6
    described = [setting(dataclasses.replace(reading, data=text)) for text in (str, str, lambda: "with losses")]
    assert described[0] == described[1]
    assert len({*seen, *described}) == 8
    assert run(reading, "quick", Store(tmp_path), device=CPU).holds
    file.unlink()
    with pytest.raises(
        ExperimentError, match=r"'toy' declares the file .*table\.csv, which cannot be read .*; create it"
    ):
        run(reading, "quick", Store(tmp_path), device=CPU)
