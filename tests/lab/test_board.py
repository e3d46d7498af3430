"""The lines that `lazyscope reproduce` shows while figures run, and the order in which figures are told."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lazyscope.errors import ExperimentError
from lazyscope.experiments import experiments
from lazyscope.lab import Claim, Experiment
from lazyscope.lab.board import Board, weight
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.story import by_publication, publication, story


def figure(name: str, cost: str = "10 s on two cores", source: str = "Author 2020, Figure 1") -> Experiment:
    def never(*_: object) -> Any:
        raise AssertionError("not called")

    return Experiment(name, source, f"The title of {name}", {"quick": cost, "paper": cost}, never, never, never, never)


def outcome(name: str, *holds: bool) -> Outcome:
    claims = tuple(Claim(f"claim {i} of {name}", "1", "2", held) for i, held in enumerate(holds))
    return Outcome(name, "Author 2020", f"The title of {name}", "quick", claims, 4, 61.0, {}, b"", b"")


def board(*figures: Experiment, verbose: bool = False, width: int = 80) -> tuple[Board, Console]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    return Board(console, figures, "quick", verbose=verbose), console


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lively(shown: Board) -> str:
    """What a terminal with colours shows while figures run."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="256")
    console.print(shown._lines())
    return printed(console)


def test_running_figures_and_the_bar_of_all() -> None:
    first, second, third = figure("first"), figure("second", "30 s on two cores"), figure("third", "20 s")
    shown, console = board(first, second, third)
    for each in (first, second, third):
        shown.advance(each, 0, 4)
    console.print(shown._lines())
    assert "first" in printed(console)  # the next one, before its first trial has ended
    shown.advance(second, 2, 4)
    shown.advance(first, 4, 4)
    shown.end(first, outcome("first", True))
    console.print(shown._lines())
    rest = printed(console).split("✓", 1)[1]
    assert "second" in rest
    assert "2/4 trials" in rest
    assert "third" not in rest
    assert "1/3 figures" in rest
    assert "left" in rest
    assert shown.share()[0] == pytest.approx((10 + 15) / 60)
    assert rest.index("1/3 figures") < rest.index("2/4 trials")  # the bar of all comes first


def test_the_bar_is_full_and_takes_no_time_if_all_is_stored() -> None:
    only = figure("only")
    shown, _ = board(only)
    shown.advance(only, 4, 4)
    assert shown.share() == (1.0, "0:00 so far")
    assert lively(shown).count("drawing") == 2
    shown.end(only, outcome("only", True))
    assert "1/1 figures, 0:00 so far" in lively(shown)


def test_bars_are_red_neither_while_they_run_nor_at_the_end() -> None:
    only = figure("only")
    shown, _ = board(only)
    shown.advance(only, 0, 4)
    shown.advance(only, 2, 4)
    running = lively(shown)
    assert "36m━" in running  # cyan
    shown.end(only, outcome("only", True))
    assert "32m━━━━━━━━━━━━━━━━━━━━━━━━" in lively(shown)  # green
    assert "38;5;197" not in running + lively(shown)  # the red of Rich


def test_a_figure_that_failed_is_counted_in_the_closing_sentence(tmp_path: Path) -> None:
    good, bad = figure("good"), figure("bad")
    shown, console = board(good, bad)
    for each in (good, bad):
        shown.advance(each, 0, 4)
    shown.end(good, outcome("good", True))
    shown.end(bad, ExperimentError("It failed."))
    assert shown.share()[0] == 1.0
    shown.conclude([outcome("good", True)], tmp_path / "index.html")
    assert "1 of 1 claims hold in 1 figure, 1 figure failed, after 0.0 s. Open file:///" in printed(console)


def test_lines_of_results_fit_the_terminal_and_break_no_word() -> None:
    long = dataclasses.replace(outcome("figure", True, False), title="word " * 40)
    shown, console = board(figure("figure"), figure("other"))
    shown.end(figure("figure"), long)
    shown.end(figure("other"), ExperimentError("It failed."))
    lines = printed(console).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("✗ figure")
    assert "1/2 claims   1.0 min  word word" in lines[0]
    assert lines[0].endswith(" …")
    assert "✗ fails: claim 1 of figure" in lines[1]
    assert "claim 0" not in printed(console)
    assert lines[-1].split() == ["✗", "other", "error", "the", "message", "is", "below"]


@pytest.mark.parametrize(
    ("cost", "seconds"), [("10 s on two cores", 10), ("1.5 min on a GPU, hours on two cores", 90), ("unknown", 10)]
)
def test_weights_come_from_the_declared_cost(cost: str, seconds: float) -> None:
    assert weight(figure("a", cost), "quick") == seconds


def test_the_story_begins_with_the_cover_and_keeps_the_order_of_each_publication() -> None:
    figures = list(experiments().values())
    told = [experiment.name for experiment in story(figures[::-1])]
    assert told[:6] == ["cover", "scale", "width", "population", "cnn-scale", "cnn-wide"]
    assert sorted(told) == sorted(experiments())
    groups = by_publication(figures)
    assert [len(groups[publication(e.source)]) > 0 for e in figures] == [True] * len(figures)
    assert publication("my own data") == "my own data"
    assert np.all([name == name.strip() for name in groups])
