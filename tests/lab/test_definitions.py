"""The hash of a trial covers every definition of lazyscope that the trial executes, and not all others."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lazyscope
from lazyscope.experiments import experiments
from lazyscope.lab.code import code_behind
from lazyscope.lab.definitions import ALL, EFFECTS, read

MODULE = """
import math
from lazyscope.loss import Square, Welsch
from lazyscope import stream
from dataclasses import dataclass
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from lazyscope.loss import Huber

TABLE = {}
SIZE = 3
OTHER = 4

def used(x):
    return inner(x) + Square()(x, x)

def inner(x):
    from lazyscope.labels import as_target
    return as_target(SIZE * x)

def unused(x):
    return Welsch()(OTHER, x)

@dataclass
class Unused:
    loss: Huber

@rule("a")
def ruled(x):
    return chosen(x)

def rule(name):
    return lambda f: TABLE.setdefault(name, f)

def chosen(x):
    return x

for name in "bc":
    TABLE[name] = looped

def looped(x):
    return x
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "planted.py"
    path.write_text(MODULE)
    return path


def test_what_a_definition_uses_is_read_and_what_runs_for_its_effect(module: Path) -> None:
    text = read(module, "lazyscope.planted", ["used"])
    ruled = {"ruled", "rule", "chosen", "TABLE"}
    assert text.names == {"used", "inner", "Square", "SIZE", "name", "looped"} | ruled
    assert {("lazyscope.loss", "Square"), ("lazyscope.labels", "as_target")} <= text.uses
    assert not {("lazyscope.loss", "Welsch"), ("lazyscope.loss", "Huber")} & text.uses
    assert ("lazyscope.loss", EFFECTS) in text.uses, "the import is executed, whatever uses it"
    assert ("lazyscope.labels", EFFECTS) not in text.uses, "it is not, until the function is called"
    nothing = read(module, "lazyscope.planted", [EFFECTS])
    assert nothing.names == {"name", "looped"} | ruled
    assert read(module, "lazyscope.planted", ["unused"]).code != text.code


@pytest.mark.parametrize("names", [[ALL], ["used", "made_at_run_time"]])
def test_a_name_that_is_unknown_may_be_anything(module: Path, names: list[str]) -> None:
    assert read(module, "lazyscope.planted", names).names >= {"used", "unused", "Unused", "OTHER"}


def test_modules_of_users_are_read_whole(module: Path) -> None:
    text = read(module, "planted", ["used"])
    assert text.code == read(module, "planted").code
    assert ("lazyscope.loss", "Welsch") in text.uses
    assert ("dataclasses", ALL) in text.uses


CHECKED = """
def used(x):
    check_size(x)
    if x.any():
        _check_sign(x)
    y = check_kind(x)
    return y

def check_size(x):
    raise ValueError(x)

def _check_sign(x):
    check_size(x)

def check_kind(x):
    return x
"""


def test_checks_of_arguments_are_not_part_of_the_code_of_lazyscope(tmp_path: Path) -> None:
    """They raise an error or do nothing, so that a new one does not change the results of a trial that ends."""
    checked, plain = tmp_path / "checked.py", tmp_path / "plain.py"
    checked.write_text(CHECKED)
    plain.write_text(
        CHECKED.replace("    check_size(x)\n    if", "    if").replace("        _check_sign(x)", "        pass")
    )
    text = read(checked, "lazyscope.planted", ["used"])
    assert text.code == read(plain, "lazyscope.planted", ["used"]).code
    assert text.names == {"used", "check_kind"}, "what check_kind returns is used"
    caught = CHECKED.replace(
        "    check_size(x)\n    if", "    try:\n        check_size(x)\n    except E:\n        pass\n    if"
    )
    checked.write_text(caught)
    assert "check_size" in read(checked, "lazyscope.planted", ["used"]).names, "an error that is caught has an effect"
    checked.write_text(CHECKED)
    assert read(checked, "planted", ["used"]).code != read(plain, "planted", ["used"]).code, "those of users are"


def test_packages_only_export_names() -> None:
    path = Path(lazyscope.__file__)
    text = read(path, "lazyscope", ["Model", "stream"])
    assert text.names == {"Model"}
    assert text.uses == {("lazyscope.model.base", "Model"), ("lazyscope.model.base.Model", ALL)}


def test_a_loss_that_a_figure_does_not_use_is_not_part_of_its_hash() -> None:
    names = {name: code_behind(experiments()[name].trial, name).definitions for name in ("margin", "fine-tuning")}
    assert "Logistic" in names["margin"]["lazyscope.loss"]
    assert "CrossEntropy" not in names["margin"]["lazyscope.loss"]
    assert "CrossEntropy" in names["fine-tuning"]["lazyscope.loss"]


QUICKEST = ("dense-limit", "kernel-limit", "wide-limit")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICKEST else pytest.mark.hours) for name in experiments()],
)
def test_every_function_that_a_trial_executes_is_part_of_its_hash(name: str) -> None:
    experiment = experiments()[name]
    code = code_behind(experiment.trial, name)
    modules = {str(path): module for module, path in code.files.items()}
    ran: set[tuple[str, str]] = set()
    inside = threading.local()  # a check of arguments that is not part of the hash

    def note(frame: FrameType, event: str, _: Any) -> None:
        file, function = frame.f_code.co_filename, frame.f_code.co_qualname.partition(".")[0]
        check = getattr(inside, "check", None)
        if event == "return" and check is frame:
            inside.check = None
        elif event == "call" and check is None:
            if function.lstrip("_").startswith("check_") and function not in known(file):
                inside.check = frame
            else:
                ran.add((file, function))

    def known(file: str) -> frozenset[str]:
        return code.definitions.get(modules.get(file, ""), frozenset())

    first = {tuple(value for value in point.values() if isinstance(value, str)): point for point in grid_of(name)}
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        for point in first.values():  # one of each kind
            experiment.trial([point], torch.device("cpu"))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    package = Path(lazyscope.__file__).parent
    own = [
        (modules.get(file, file), function)
        for file, function in ran
        if Path(file).is_relative_to(package) and "<" not in function
        if package / "lab" not in Path(file).parents and Path(file) != package / "flow" / "checkpoint.py"
    ]
    assert len(own) > 3
    others = [(module, function) for module, function in own if module not in (experiment.trial.__module__,)]
    assert [each for each in others if each[1] not in code.definitions.get(each[0], ())] == []


def grid_of(name: str) -> list[Any]:
    return list(experiments()[name].grid("quick"))
