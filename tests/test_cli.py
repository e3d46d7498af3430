"""The output and the exit codes of the commands."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.command import Command, command_in

from lazyscope import cli
from lazyscope.errors import ExperimentError
from lazyscope.experiments import experiments, find

BESIDE_TOY = Path(__file__).parent / "lab"


@pytest.fixture
def lazyscope(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in the folder of toy.py."""
    return command_in(BESIDE_TOY, monkeypatch, capsys)


def test_list_names_every_experiment_in_80_columns(lazyscope: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = lazyscope("list")
    assert done.code == 0
    lines = done.out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    named = [line.split()[0] for line in lines if re.match(r"  \S", line)]
    assert sorted(named) == sorted(experiments())
    assert named[0] == "cover"
    assert len(lines) < 3 * len(named) + 12
    words = set(done.out.split())
    assert [e.title for e in experiments().values() if not set(e.title.split()) <= words] == []  # none is broken


def test_the_version(lazyscope: Command) -> None:
    assert lazyscope("--version")[:2] == (0, f"lazyscope {version('lazyscope')}\n")


def test_reproduce_and_report(lazyscope: Command, tmp_path: Path) -> None:
    done = lazyscope("reproduce", "toy:EXPERIMENT", "--out", str(tmp_path), "--device", "cpu")
    assert done.code == 0, done.err
    assert re.match(r"✓ toy +1/1 claims +[\d.]+ s  ", done.out)
    assert "measured" not in done.out
    address = (tmp_path / "index.html").as_uri()
    assert re.search(rf"\n1 of 1 claims hold in 1 figure, after [\d.]+ s\. Open {re.escape(address)}\n$", done.out)
    verbose = lazyscope("reproduce", "toy:EXPERIMENT", "--out", str(tmp_path), "--device", "cpu", "--verbose")
    assert "source: " in verbose.out
    assert "measured: " in verbose.out
    (tmp_path / "index.html").unlink()
    assert lazyscope("report", "--out", str(tmp_path)).code == 0
    assert "1 of 1 claims hold" in (tmp_path / "index.html").read_text()
    before = (tmp_path / "toy" / "quick.png").read_bytes()
    styled = lazyscope("reproduce", "toy:EXPERIMENT", "--out", str(tmp_path), "--device", "cpu", "--style", "slide")
    assert styled.code == 0, styled.err
    assert (tmp_path / "toy" / "quick.png").read_bytes() != before


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
    assert "✗ fails: one is two" in done.out
    assert "source: 2" in done.out
    assert "measured: 1" in done.out
    assert "\n0 of 1 claims hold" in done.out


def test_a_crash_in_a_trial_exits_with_70(lazyscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_FAIL", "0")
    done = lazyscope("reproduce", "toy:EXPERIMENT", "--out", str(tmp_path), "--device", "cpu")
    assert done.code == 70
    assert "x=0" in done.err
    assert len(done.err.strip().splitlines()) == 1


PARTS = """
import dataclasses, toy
from lazyscope.errors import DataError
from lazyscope.lab import Claim
def broken(trials):
    raise ZeroDivisionError("as asked")
def needy(points, device):
    raise DataError("There are no data; fetch some.")
FIGURE = dataclasses.replace(toy.EXPERIMENT, name="figure", figure=broken)
CLAIMS = dataclasses.replace(toy.EXPERIMENT, name="claims", claims=broken)
NEEDY = dataclasses.replace(toy.EXPERIMENT, name="needy", trial=needy)
DOUBTFUL = dataclasses.replace(
    toy.EXPERIMENT, name="doubtful", claims=lambda trials: [Claim("one is two", "2", "1", False)])
"""


@pytest.mark.parametrize(
    ("names", "code", "claims"),
    [
        (("FIGURE",), 70, 1),
        (("CLAIMS", "DOUBTFUL"), 70, 2),
        (("NEEDY",), 2, 1),
        (("NEEDY", "FIGURE"), 70, 1),  # the exit code of a crash takes precedence over that of a refusal
    ],
)
def test_failures_stay_where_they_happen(
    lazyscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], code: int, claims: int
) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "results"
    chosen = (*(f"parts:{name}" for name in names), "toy:EXPERIMENT")
    done = lazyscope("reproduce", *chosen, "--out", str(out), "--device", "cpu")
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == len(names) - ("DOUBTFUL" in names)
    assert (out / "toy" / "quick.json").exists()
    assert f"1 of {claims} claims hold" in (out / "index.html").read_text()
    monkeypatch.delitem(sys.modules, "parts")


def test_a_crash_of_lazyscope_shows_where_and_exits_with_70(
    lazyscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "write_report", lambda root: 1 / 0)
    done = lazyscope("reproduce", "toy:EXPERIMENT", "--out", str(tmp_path), "--device", "cpu")
    assert done.code == 70
    assert "ZeroDivisionError" in done.err
    assert done.err.strip().endswith("please report it with the lines above.")


def test_an_interrupt_exits_with_130(lazyscope: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_all", interrupted)
    done = lazyscope("reproduce", "toy:EXPERIMENT", "--out", str(tmp_path), "--device", "cpu")
    assert (done.code, done.err.strip()) == (130, cli.STOPPED)


@pytest.mark.parametrize("command", ["", "list", "reproduce", "record", "report", "inspect", "explore"])
def test_the_help_fits_80_columns_and_shows_no_type_beside_flags(
    lazyscope: Command, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = lazyscope(*command.split(), "--help")
    assert done.code == 0
    assert re.search(r"--help +Show this message", done.out)
    assert "bool" not in done.out.lower()
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("command", [(), ("reproduce",)])
def test_the_help_says_what_the_exit_codes_mean(lazyscope: Command, command: tuple[str, ...]) -> None:
    done = lazyscope(*command, "--help")
    assert done.code == 0
    said = " ".join(done.out.replace("│", " ").split())
    for words in (
        "0, all claims hold",
        "1, a claim fails",
        "2, an error in the request",
        "70, a crash",
        "130, interrupted",
    ):
        assert words in said


def test_a_closed_pipe_ends_the_command_without_a_word(lazyscope: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(cli.console, "quiet", False)  # the command sets it to True
    with os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        done = lazyscope("list")
    monkeypatch.undo()
    assert (done.code, done.err) == (141, "")


def test_a_terminal_that_knows_ascii_alone(lazyscope: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii", write_through=True))
    assert lazyscope("list").code == 0
    assert rb"\u03" in content.getvalue(), "Greek letters"


INSPECT = ("inspect", "nowhere:never_loaded", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((*INSPECT, "--memory", "nan"), "memory"),
        ((*INSPECT, "--memory", "inf"), "memory"),
        ((*INSPECT, "--memory", "1e300"), "memory"),
        ((*INSPECT, "--memory", "1e30"), "--memory is 1e30, which is too large; pass an amount such as 2GB"),
        ((*INSPECT, "--memory", "nonsense"), "memory"),
        ((*INSPECT, "--seconds", "nan"), "--seconds is nan"),
        ((*INSPECT, "--seconds", "0"), "--seconds is 0; pass a number above 0"),
        ((*INSPECT, "--alpha", "1e300"), "--alpha is 1e+300"),
        ((*INSPECT, "--alpha", "10", "--alpha", "inf"), "(α = ∞ is always measured)"),
        ((*INSPECT, "--alpha=-1"), "--alpha is -1"),
        ((*INSPECT, "--seed", 24 * "9"), "--seed"),
        ((*INSPECT, "--seed=-1"), "--seed"),
        ((*INSPECT, "--points", "0"), "--points"),
        ((*INSPECT, "--steps", "0"), "--steps"),
        ((*INSPECT, "--out", ""), "it is empty"),
        ((*INSPECT, "--out", "."), "which is a folder; pass a file, such as report.html"),
        ((*INSPECT, "--out", "/proc"), "which is a folder; pass a file, such as /proc/report.html"),
        ((*INSPECT, "--out", "/proc/nothing/report.html"), "Results cannot be written to /proc"),
        (("reproduce", "toy:EXPERIMENT", "--out", ""), "it is empty"),
        (("reproduce", "toy:EXPERIMENT", "--out", "/proc/nothing"), "Results cannot be written to /proc"),
        (("reproduce", "toy:EXPERIMENT", "--out", __file__), "a file of that name exists"),
        (("reproduce", "toy:EXPERIMENT", "--workers", "0"), "--workers"),
        (("explore", "--port", "70000"), "--port"),
    ],
)
def test_options_are_checked_before_any_work(
    lazyscope: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    for work in ("bring", "inspect", "run_all", "import_module"):
        monkeypatch.delattr(cli, work)
    done = lazyscope(*arguments)
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    assert sentence in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("reproduce", "nonsense"), "There is no experiment 'nonsense'"),
        (("reproduce", "toy:NOTHING"), "write package.module:NAME"),
        (("reproduce", "toy:POINTS"), "is not an Experiment"),
        (("report", "--out", "nowhere"), "There are no results"),
        (("reproduce", "toy:EXPERIMENT", "--dask", "tcp://a:1", "--workers", "2"), "--dask or --workers, not both"),
        (("reproduce", "toy:EXPERIMENT", "--dask", "nonsense"), "No Dask scheduler answers at nonsense"),
    ],
)
def test_refusals_are_one_sentence_and_exit_with_2(
    lazyscope: Command, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    done = lazyscope(*arguments, *(("--out", str(tmp_path)) if arguments[0] == "reproduce" else ()))
    assert done.code == 2
    (line,) = done.err.strip().splitlines()
    assert sentence in line


@pytest.mark.parametrize("name", list(experiments()))
def test_a_slip_in_the_name_finds_the_closest(name: str) -> None:
    with pytest.raises(ExperimentError, match=f"did you mean '{name}'"):
        find(f"{name[:-1]}x{name[-1]}")


def test_the_command_starts_without_the_compiler() -> None:
    """Its import takes longer than all others together, and only traced and compiled models need it."""
    script = "import sys, lazyscope.cli; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
