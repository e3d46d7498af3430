"""The command line: finds experiments, hands them to the lab, prints what came out. No mathematics here."""

from __future__ import annotations

import os
import warnings
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from lazyscope.data.cifar10 import VARIABLE
from lazyscope.errors import ExperimentError, LazyscopeError
from lazyscope.experiments import experiments, find
from lazyscope.lab import Experiment
from lazyscope.lab.executor import Executor, Processes, here
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.provenance import choose_device
from lazyscope.lab.report import refresh, write_report
from lazyscope.lab.run import run
from lazyscope.lab.store import Store

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console()
errors = Console(stderr=True)


class Scale(StrEnum):
    """The source's own size, or the same experiment in seconds."""

    quick = "quick"
    paper = "paper"


class Device(StrEnum):
    """Where trials run; `auto` takes the GPU where there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


Out = Annotated[Path, typer.Option(help="The folder of results.")]


@app.callback()
def lazyscope() -> None:
    """Does this model learn, or does it only move along its tangent?"""


@app.command("list")
def list_experiments() -> None:
    """Every figure: its source, what it shows, and its cost at both scales."""
    table = _table("name", "source", "shows", "quick", "paper")
    for experiment in experiments().values():
        cost = experiment.cost
        table.add_row(Text(experiment.name, "bold"), experiment.source, experiment.title, cost["quick"], cost["paper"])
    console.print(table)


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Figures (all, if none is named); your own: package.module:NAME."),
    ] = None,
    scale: Annotated[Scale, typer.Option(help="The source's size (paper), or seconds (quick).")] = Scale.quick,
    device: Annotated[Device, typer.Option(help="auto takes the GPU where there is one.")] = Device.auto,
    workers: Annotated[int, typer.Option(min=1, help="Processes to share the trials; 1: this one.")] = 1,
    data_dir: Annotated[Path | None, typer.Option(help=f"The folder with cifar10 in it (or set {VARIABLE}).")] = None,
    out: Out = Path("results"),
) -> None:
    """Measure figures, draw them and judge their claims. What is stored is not measured again."""
    chosen = [find(name) for name in names] if names else list(experiments().values())
    if data_dir is not None:
        os.environ[VARIABLE] = str(data_dir.expanduser().absolute())  # worker processes inherit it
    target = choose_device(device)
    store = Store(out)
    executor: Executor = here if workers == 1 else Processes(workers)
    try:
        outcomes, failures = _run_all(chosen, scale, store, target, executor)
    except KeyboardInterrupt:
        errors.print("stopped: every finished trial is stored; run the same command again to go on.")
        raise typer.Exit(130) from None
    _print_claims(outcomes)
    path = write_report(out)
    console.print(f"report: {path}", soft_wrap=True)
    for failure in failures:
        _print_error(failure)
    if failures:
        raise typer.Exit(2)
    if not all(outcome.holds for outcome in outcomes):
        raise typer.Exit(1)


@app.command()
def report(out: Out = Path("results")) -> None:
    """Rebuild index.html from what is stored, figures and claims included."""
    if not out.is_dir():
        raise LazyscopeError(f"There are no results in {out}; run `lazyscope reproduce --out {out}` first.")
    refresh(experiments().values(), Store(out))
    console.print(f"report: {write_report(out)}", soft_wrap=True)


def _run_all(
    chosen: list[Experiment], scale: str, store: Store, device: torch.device, executor: Executor
) -> tuple[list[Outcome], list[ExperimentError]]:
    """Run the experiments one after another behind their bars; a failing one does not stop the next."""
    outcomes: list[Outcome] = []
    failures: list[ExperimentError] = []
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("trials"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        for experiment in chosen:
            advance = partial(_advance, bars, bars.add_task(experiment.name, total=None))
            try:
                outcome = run(experiment, scale, store, device=device, executor=executor, progress=advance)
            except ExperimentError as error:  # of this figure alone: the others are still worth having
                failures.append(error)
            else:
                outcomes.append(outcome)
    return outcomes, failures


def _advance(bars: Progress, bar: TaskID, done: int, total: int) -> None:
    bars.update(bar, completed=done, total=total)


def _table(first: str, *others: str) -> Table:
    """Names are never broken over lines, so that they can be copied; everything else folds."""
    return Table(Column(first, no_wrap=True), *(Column(other, overflow="fold") for other in others))


def _print_claims(outcomes: list[Outcome]) -> None:
    table = _table("figure", "claim", "source says", "measured", "verdict")
    for outcome in outcomes:
        for i, claim in enumerate(outcome.claims):
            verdict = Text("holds", "green") if claim.holds else Text("fails", "bold red")
            name = Text(outcome.name if i == 0 else "", "bold")
            table.add_row(name, Text(claim.text), Text(claim.source), Text(claim.measured), verdict)
        table.add_section()
    console.print(table)


def _print_error(error: BaseException) -> None:
    errors.print(Text("error: ", "bold red") + Text(str(error), "default"), soft_wrap=True)


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    errors.print(Text("note: ", "bold yellow") + Text(str(message), "default"), soft_wrap=True)


def main() -> None:
    """The `lazyscope` command: 0 when all claims hold, 1 when one fails, 2 when something was refused."""
    warnings.showwarning = _print_warning
    try:
        app()
    except LazyscopeError as error:
        _print_error(error)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
