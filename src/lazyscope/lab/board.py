"""What `lazyscope reproduce` shows: the running figures, a bar for all of them, and a line for each that has ended."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lazyscope._typing import Number
from lazyscope.errors import ExperimentError
from lazyscope.lab.experiment import Claim, Experiment
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.story import story
from lazyscope.progress import clock

MOST = 8
"""The largest number of running figures that are shown at once."""

NAME, CLAIMS, TIME = 16, 12, 9
"""The widths of the columns. The rest of a line is left to the title."""

_COST = re.compile(r"(\d+(?:\.\d+)?) (s|min|h)\b")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def weight(experiment: Experiment, scale: str) -> float:
    """Estimate the running time of a figure from its declared cost, for the share of the overall bar that it takes.

    Args:
        experiment: The experiment.
        scale: One of `SCALES`.

    Returns:
        The first duration in the cost, in seconds and at least 1, or 10 if it contains none.
    """
    found = _COST.search(experiment.cost.get(scale, ""))
    return max(1.0, float(found[1]) * _SECONDS[found[2]]) if found else 10.0


@final
class Board:
    """A context manager that shows the progress of figures, and prints a permanent line when one of them ends.

    Running figures and the overall bar are only shown on a terminal. The other lines are printed everywhere.

    Args:
        console: The console to print to.
        experiments: The figures that will run.
        scale: One of `SCALES`.
        verbose: Whether to print all claims of a figure, instead of those that fail only.
    """

    def __init__(self, console: Console, experiments: Sequence[Experiment], scale: str, *, verbose: bool) -> None:
        self.console, self._verbose = console, verbose
        self._titles = {experiment.name: experiment.title for experiment in story(experiments)}
        self._weights = {experiment.name: weight(experiment, scale) for experiment in experiments}
        self._trials: dict[str, tuple[int, int]] = {}
        self._stored: dict[str, int] = {}
        self._ended: set[str] = set()
        self._began = time.monotonic()
        self._live = Live(console=console, get_renderable=self._lines, refresh_per_second=4, transient=True)

    def __enter__(self) -> Board:
        self._began = time.monotonic()
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    @property
    def seconds(self) -> float:
        """The number of seconds since the start."""
        return time.monotonic() - self._began

    def advance(self, experiment: Experiment, done: int, total: int) -> None:
        """Note the progress of a figure.

        Args:
            experiment: The experiment.
            done: The number of its stored trials. The first call tells how many were stored before the start.
            total: The number of its trials.
        """
        self._stored.setdefault(experiment.name, done)
        self._trials[experiment.name] = (done, total)

    def end(self, experiment: Experiment, ended: Outcome | ExperimentError) -> None:
        """Print the line of a figure that has ended, and its claims: all of them if verbose, else those that fail.

        Args:
            experiment: The experiment.
            ended: Its outcome or its error.
        """
        self._ended.add(experiment.name)
        if isinstance(ended, ExperimentError):
            self._print(False, experiment.name, "error", "", "the message is below")
            return
        held = sum(claim.holds for claim in ended.claims)
        self._print(ended.holds, ended.name, f"{held}/{len(ended.claims)} claims", duration(ended.seconds), ended.title)
        for claim in ended.claims:
            if self._verbose or not claim.holds:
                self._print_claim(claim)

    def conclude(self, outcomes: Sequence[Outcome], report: Path) -> None:
        """Print the closing sentence: how many claims hold, how long it took, and the link to the report.

        Args:
            outcomes: The outcomes of the figures that did not raise an error.
            report: The report.
        """
        claims = [claim for outcome in outcomes for claim in outcome.claims]
        held, failed = sum(claim.holds for claim in claims), len(self._titles) - len(outcomes)
        colour = "bold green" if held == len(claims) and not failed else "bold red"
        words = Text.assemble((f"{held} of {len(claims)} claims hold", colour), f" in {_figures(len(outcomes))}")
        if failed:
            words.append(f", {_figures(failed)} failed", "bold red")
        words.append(f", after {duration(self.seconds)}. Open {report.absolute().as_uri()}")
        self.console.print()
        self.console.print(words, soft_wrap=True)

    def _print(self, good: bool, name: str, claims: str, seconds: str, title: str) -> None:
        line = Text.assemble(("✓ ", "green") if good else ("✗ ", "bold red"), (f"{name:{NAME}}", "bold"), " ")
        line.append(f"{claims:>{CLAIMS}} {seconds:>{TIME}}  ", "default" if good else "red")
        room = self.console.width - line.cell_len
        line.append(textwrap.shorten(title, max(room, 1), placeholder=" …") if room > 12 else "", "dim")
        line.rstrip()
        self.console.print(line, soft_wrap=True)

    def _print_claim(self, claim: Claim) -> None:
        """Print a claim with hanging lines, so that words are not broken."""
        mark = Text("✓", "green") if claim.holds else Text("✗ fails:", "bold red")
        rows = Table.grid(padding=(0, 1))
        rows.add_column(no_wrap=True)
        rows.add_column(overflow="fold")
        rows.add_row(mark, Text(claim.text))
        rows.add_row("", Text.assemble(("source: ", "dim"), claim.source))
        rows.add_row("", Text.assemble(("measured: ", "dim"), claim.measured))
        if claim.reason and not claim.holds:
            rows.add_row("", Text.assemble(("reason: ", "dim"), claim.reason))
        indented = Table.grid()
        indented.add_row("    ", rows)
        self.console.print(indented)

    def _lines(self) -> Group:
        table = Table.grid(padding=(0, 1))
        share, left = self.share()
        if len(self._ended) < len(self._titles) and share >= 1:  # every trial is stored, and some figures are not drawn
            share, left = 0.99, "drawing"
        count = f"{len(self._ended)}/{len(self._titles)} figures"
        table.add_row("", Text(f"{'all':{NAME}}", "bold"), _bar(share, 1.0), f"{count}, {left}")
        for name in self._running()[:MOST]:
            done, total = self._trials[name]
            words = "drawing" if done == total else f"{done}/{total} trials"
            table.add_row("·", f"{name:{NAME}}", _bar(done, total), words)
        return Group(table)

    def _running(self) -> list[str]:
        """The figures that have started, and the one that is next, in the order of the story."""
        open_ones = [name for name in self._titles if name in self._trials and name not in self._ended]
        started = [name for name in open_ones if self._trials[name][0] > self._stored[name]]
        return started or open_ones[:1]

    def share(self) -> tuple[float, str]:
        """Estimate the progress of all figures together.

        Returns:
            The share of the work that is done, from 0 to 1, with figures weighted by their declared costs, and the time
            left as text, from the speed since the start without the trials that were stored before.
        """
        total = sum(self._weights.values())
        done = sum(
            self._weights[name] * (1.0 if name in self._ended else now / of)  # no more comes of a figure that failed
            for name, (now, of) in self._trials.items()
            if of
        )
        before = sum(self._weights[name] * self._stored[name] / of for name, (_, of) in self._trials.items() if of)
        if done <= before:
            return done / total, f"{clock(self.seconds)} so far"
        return done / total, f"{clock(self.seconds * (total - done) / (done - before))} left"


def _figures(count: int) -> str:
    return f"{count} figure{'' if count == 1 else 's'}"


def _bar(done: Number, total: Number) -> ProgressBar:
    """A bar that is green when it is full. Bars that run would be red in Rich's own colours, as if they had failed."""
    return ProgressBar(total=max(total, 1e-9), completed=done, width=24, complete_style="cyan", finished_style="green")


def duration(seconds: float) -> str:
    """Format a duration for a table.

    Args:
        seconds: The duration, in seconds.

    Returns:
        The duration in seconds, minutes or hours, with one decimal.

    Example:
        >>> duration(4.41), duration(90.0)
        ('4.4 s', '1.5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
