"""The commands: what they print, and what they exit with."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from tests.command import Command, command_in

from lazyscope.errors import ExperimentError
from lazyscope.experiments import experiments, find

BESIDE_TOY = Path(__file__).parent / "lab"


@pytest.fixture
def lazyscope(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """In toy.py's folder."""
    return command_in(BESIDE_TOY, monkeypatch, capsys)


def test_list_names_every_experiment(lazyscope: Command) -> None:
    done = lazyscope("list")
    assert done.code == 0
    for name in experiments():
        assert name in done.out


def test_reproduce_and_report(lazyscope: Command, tmp_path: Path) -> None:
    done = lazyscope("reproduce", "toy:EXPERIMENT", "--out", str(tmp_path), "--device", "cpu")
    assert done.code == 0, done.err
    for heading in ("figure", "claim", "source says", "measured", "verdict", "holds"):
        assert heading in done.out
    (tmp_path / "index.html").unlink()
    assert lazyscope("report", "--out", str(tmp_path)).code == 0
    assert "1 of 1 claims hold" in (tmp_path / "index.html").read_text()


def test_a_damaged_trial_gets_a_word(lazyscope: Command, tmp_path: Path) -> None:
    arguments = ("reproduce", "toy:EXPERIMENT", "--out", str(tmp_path), "--device", "cpu")
    lazyscope(*arguments)
    victim = next(tmp_path.rglob("*.npz"))
    victim.write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        done = lazyscope(*arguments)
    assert done.code == 0
    assert f"{victim} is damaged" in done.err


def test_a_failed_claim_exits_with_1(lazyscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doubtful.py").write_text(
        "import dataclasses, toy\nfrom lazyscope.lab import Claim\n"
        "EXPERIMENT = dataclasses.replace(toy.EXPERIMENT, name='doubtful',"
        " claims=lambda trials: [Claim('one is two', '2', '1', False)])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = lazyscope("reproduce", "doubtful:EXPERIMENT", "--out", str(tmp_path), "--device", "cpu")
    assert done.code == 1, done.err
    assert "fails" in done.out


def test_a_failing_trial_exits_with_2(lazyscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAIL", "0")
    done = lazyscope("reproduce", "toy:EXPERIMENT", "--out", str(tmp_path), "--device", "cpu")
    assert done.code == 2
    assert "x=0" in done.err
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("reproduce", "nonsense"), "There is no experiment 'nonsense'"),
        (("reproduce", "toy:NOTHING"), "write package.module:NAME"),
        (("reproduce", "toy:POINTS"), "is no Experiment"),
        (("report", "--out", "nowhere"), "There are no results"),
        (("reproduce", "toy:EXPERIMENT", "--dask", "tcp://a:1", "--workers", "2"), "--dask or --workers, not both"),
        (("reproduce", "toy:EXPERIMENT", "--dask", "nonsense"), "No Dask scheduler answers at nonsense; start one"),
    ],
)
def test_refusals_are_one_sentence_and_exit_with_2(
    lazyscope: Command, arguments: tuple[str, ...], sentence: str
) -> None:
    done = lazyscope(*arguments)
    assert done.code == 2
    (line,) = done.err.strip().splitlines()
    assert sentence in line


@pytest.mark.parametrize("name", list(experiments()))
def test_a_slip_in_the_name_finds_the_closest(name: str) -> None:
    with pytest.raises(ExperimentError, match=f"did you mean '{name}'"):
        find(f"{name[:-1]}x{name[-1]}")


def test_the_command_starts_without_the_compiler() -> None:
    """Importing it takes longer than everything else together, and only traced and compiled models need it."""
    script = "import sys, lazyscope.cli; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
