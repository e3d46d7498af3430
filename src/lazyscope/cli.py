"""The command line interface.

Longer than 350 lines because every option of every command has its help text here.
"""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from importlib import import_module
from importlib.metadata import version as installed
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from lazyscope.data.cifar10 import VARIABLE
from lazyscope.errors import ExperimentError, InputError, LazyscopeError
from lazyscope.experiments import experiments, find
from lazyscope.inspect import inspect
from lazyscope.inspect.door import LOSSES, bring
from lazyscope.lab import Experiment, disk
from lazyscope.lab.board import Board
from lazyscope.lab.cluster import cluster_at, local_cluster
from lazyscope.lab.ending import CRASHED, INTERRUPTED, end_quietly, interruptible
from lazyscope.lab.executor import Executor, here
from lazyscope.lab.failure import CrashedExperiment
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.provenance import choose_device
from lazyscope.lab.record import plan
from lazyscope.lab.report import refresh, write_report
from lazyscope.lab.run import run_all
from lazyscope.lab.store import Store
from lazyscope.lab.story import by_publication, story
from lazyscope.memory import parse_memory
from lazyscope.progress import quiet


class _PlainFlags:
    """Commands whose help shows no type beside options without a value, such as --help."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]  # that of the command
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Group(_PlainFlags, TyperGroup):
    """The group of all commands."""


class _Command(_PlainFlags, TyperCommand):
    """One command."""


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, cls=_Group)
console = Console()
errors = Console(stderr=True)


class Scale(StrEnum):
    """The scale of an experiment: the size in the source, or a reduced size that takes seconds."""

    quick = "quick"
    paper = "paper"


class Device(StrEnum):
    """The device on which trials run. `auto` selects the GPU if there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Look(StrEnum):
    """The style of the figures: the column of a paper, a slide, or the size that each figure asks for."""

    print = "print"
    slide = "slide"
    screen = "screen"


class Losses(StrEnum):
    """The loss on which the inspected model is trained."""

    auto = "auto"
    square = "square"
    cross_entropy = "cross-entropy"


EXIT_CODES = (
    "Exit codes: 0, all claims hold; 1, a claim fails; 2, an error in the request: a wrong option, missing data, a"
    " folder that cannot be written; 70, a crash of lazyscope or of the code of an experiment; 130, interrupted by"
    " Ctrl-C; 141, the output pipe was closed."
)

LARGEST_ALPHA = 1e15
"""The largest α. The square of a larger one is close to the limits of float32; α = ∞ is always measured."""

LARGEST_TIME, LARGEST_MEMORY = 1e9, 1 << 60
"""The largest number of seconds and of bytes. Larger values are assumed to be typing errors."""

STOPPED = "stopped: every finished trial is stored; run the same command again to continue."


def _path(text: str | Path) -> Path:
    if text == "":
        raise typer.BadParameter("it is empty")
    return Path(text).expanduser()


Styled = Annotated[
    Look,
    typer.Option(
        "--style", help="Style of the figures: columns of a paper with 8 pt type (print), or 16:9 with 18 pt (slide)."
    ),
]
Out = Annotated[Path, typer.Option(parser=_path, metavar="FOLDER", help="Folder of the results.")]


def _version(wanted: bool) -> bool:
    if wanted:
        console.print(f"lazyscope {installed('lazyscope')}", highlight=False)
        raise typer.Exit
    return wanted


@app.callback(cls=_Group, epilog=EXIT_CODES)
def lazyscope(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Measure whether a model trains lazily, close to its linearisation, or learns features."""


@app.command("list", cls=_Command)
def list_experiments() -> None:
    """List all figures by publication, with their titles and their running times at both scales."""
    for paper, group in by_publication(experiments().values()).items():
        console.print(Text(paper, "bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, width=18)  # names can be copied
        for width in (38, 4, 11):
            table.add_column(width=width)
        for experiment in group:
            cost = experiment.cost
            table.add_row(f"  {experiment.name}", experiment.title, _cost(cost["quick"]), _cost(cost["paper"]))
        console.print(table)
    console.print(
        "Times: at reduced size and at the size of the source, on two CPU cores or on a GPU where named; * with"
        " CIFAR-10. Run a figure with `lazyscope reproduce NAME`.",
        highlight=False,
    )


def _cost(text: str) -> str:
    """Shorten the running time of a figure for a table, such as "45 min GPU*"."""
    first = re.sub(r" on (a|one) GPU", " GPU", text.partition(",")[0]).removesuffix(" on two cores")
    return first + "*" * ("CIFAR-10" in text)


@app.command(cls=_Command, epilog=EXIT_CODES)
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names of figures (default: all), or package.module:NAME for your own experiments."),
    ] = None,
    scale: Annotated[Scale, typer.Option(help="Size in the source (paper), or reduced size (quick).")] = Scale.quick,
    device: Annotated[Device, typer.Option(help="Device; auto selects the GPU if there is one.")] = Device.auto,
    workers: Annotated[int, typer.Option(min=1, max=4096, help="Number of worker processes.")] = 1,
    dask: Annotated[str | None, typer.Option(help="Address of a Dask scheduler: tcp://host:port.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help=f"Folder that contains cifar10 (or set {VARIABLE}).")] = None,
    style: Styled = Look.print,
    out: Out = Path("results"),
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print all claims, not only those that fail.")
    ] = False,
) -> None:
    """Run the trials of figures, draw them and check their claims. Stored trials are not run again."""
    found = [find(name) for name in dict.fromkeys(names)] if names else list(experiments().values())
    chosen = story(found)
    if data_dir is not None:
        os.environ[VARIABLE] = str(data_dir.expanduser().absolute())  # worker processes inherit it
    disk.check(out)
    board = Board(console, chosen, scale, verbose=verbose)
    try:
        with interruptible(STOPPED), _place(workers, dask, device) as (executor, target):
            outcomes, failures = _run_all(chosen, scale, Store(out), target, executor, board, style)
            path = write_report(out)
    except KeyboardInterrupt:
        errors.print(STOPPED)
        raise typer.Exit(INTERRUPTED) from None
    board.conclude(outcomes, path)
    _end(failures)
    if not all(outcome.holds for outcome in outcomes):
        raise typer.Exit(1)


@app.command(cls=_Command)
def record(
    names: Annotated[list[str] | None, typer.Argument(help="Names of figures (default: all).")] = None,
    device: Annotated[Device, typer.Option(help="Device; auto selects the GPU if there is one.")] = Device.auto,
    workers: Annotated[int, typer.Option(min=1, max=4096, help="Number of worker processes.")] = 1,
    data_dir: Annotated[Path | None, typer.Option(help=f"Folder that contains cifar10 (or set {VARIABLE}).")] = None,
    out: Out = Path("docs/outcomes"),
) -> None:
    """Record the figures of the gallery at the size of the source, except those recorded by the present code."""
    found = [find(name) for name in dict.fromkeys(names)] if names else list(experiments().values())
    todo = plan(found, out, gpu=choose_device(device).type == "cuda")
    for experiment in todo.skipped:
        console.print(f"skipped: {experiment.name} needs a GPU ({experiment.cost['paper']})", soft_wrap=True)
    console.print(
        f"{len(todo.current)} records are current, {len(todo.wanted)} will be made, {len(todo.skipped)} are skipped.",
        highlight=False,
    )
    if todo.wanted:
        chosen = [experiment.name for experiment in todo.wanted]
        reproduce(chosen, Scale.paper, device, workers, None, data_dir, Look.print, out)


@app.command(cls=_Command)
def report(style: Styled = Look.print, out: Out = Path("results")) -> None:
    """Redraw the figures, recheck the claims and rebuild index.html from stored trials."""
    if not out.is_dir():
        raise LazyscopeError(f"There are no results in {out}; run `lazyscope reproduce --out {out}` first.")
    disk.check(out)
    with interruptible("stopped"):
        failures = refresh(experiments().values(), Store(out), style)
        path = write_report(out)
    console.print(f"report: {path}", soft_wrap=True)
    _end(failures)


@app.command("inspect", cls=_Command)
def inspect_model(
    factory: Annotated[
        str,
        typer.Argument(
            help="package.module:factory, which returns a module, (module, x, y) or (module, x, y, loss); or timm:NAME,"
            " torchvision:NAME."
        ),
    ],
    data: Annotated[str | None, typer.Option(help="Data: digits, cifar10, or FILE.npz with arrays x and y.")] = None,
    out: Annotated[
        Path, typer.Option(parser=_path, metavar="FILE", help="File for the report: HTML, or JSON if it ends in .json.")
    ] = Path("report.html"),
    loss: Annotated[Losses, typer.Option(help="Loss. auto: cross-entropy for classes, else square.")] = Losses.auto,
    alpha: Annotated[list[float] | None, typer.Option(help="Scales α, besides 1 (default: 10 and 100).")] = None,
    seconds: Annotated[float, typer.Option(help="Approximate duration, in seconds.")] = 120,
    memory: Annotated[str, typer.Option(help="Approximate memory, such as 2GB (GiB without a unit).")] = "2GiB",
    points: Annotated[int | None, typer.Option(min=1, help="Number of points (default: as many as fit).")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps (default: as many as fit).")] = None,
    evaluation: Annotated[bool, typer.Option("--eval", help="Call net.eval() first (batch-norm, dropout).")] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Random seed for the factory, the points and the searches.")
    ] = 0,
    device: Annotated[Device, typer.Option(help="Device; auto selects the GPU if there is one.")] = Device.auto,
    data_dir: Annotated[Path | None, typer.Option(help=f"Folder that contains cifar10 (or set {VARIABLE}).")] = None,
) -> None:
    """Report whether your model trains lazily on your data, why, and what would change that, as one HTML file."""
    if not 0 < seconds <= LARGEST_TIME:
        raise InputError(f"--seconds is {seconds:g}; pass a number above 0 and up to {LARGEST_TIME:g}.")
    for one in alpha or ():
        if not 0 < one <= LARGEST_ALPHA:
            limit = "α = ∞ is always measured"
            raise InputError(f"--alpha is {one:g}; pass a number above 0 and up to {LARGEST_ALPHA:g} ({limit}).")
    budget = _memory(memory)
    if out.is_dir():
        raise InputError(f"--out is {out}, which is a folder; pass a file, such as {out / 'report.html'}.")
    disk.check(out.parent)
    if data_dir is not None:
        os.environ[VARIABLE] = str(data_dir.expanduser().absolute())
    net, x, y, own, notes = bring(factory, data, choose_device(device), evaluation=evaluation, seed=seed)
    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with interruptible("stopped"), Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=1.0)
        found = inspect(
            net,
            x,
            y,
            LOSSES[loss] or own,
            alphas=(1.0, *(alpha or (10.0, 100.0))),
            seconds=seconds,
            memory=budget,
            points=points,
            steps=steps,
            seed=seed,
            progress=lambda name, done: bars.update(bar, description=name, completed=done),
        )
    found = replace(found, notes=(*notes, *found.notes))
    console.print(Text(str(found)), soft_wrap=True)
    for note in found.notes:
        errors.print(Text("note: ", "bold yellow") + Text(note, "default"), soft_wrap=True)
    console.print(f"report: {found.save(out)}", soft_wrap=True)


@app.command(cls=_Command)
def explore(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the server; 0 selects any free port.")] = 2718,
    host: Annotated[str, typer.Option(help="Address of the server; 127.0.0.1 allows this machine only.")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Open the explorer, a page in the browser on which you make a network lazy interactively."""
    # Imported by its name and only here, because the explorer needs packages that other commands do not need.
    import_module("lazyscope.app.serve").serve(host, port, browser)


def _memory(text: str) -> int:
    """Convert an amount of memory to bytes. Without a unit it is in GiB."""
    try:
        float(text)
    except ValueError:
        found = parse_memory(text)
    else:
        found = parse_memory(f"{text}GiB")
    if found is None or found > LARGEST_MEMORY:
        raise InputError(f"--memory is {text}, which is too large; pass an amount such as 2GB.")
    return found


@contextmanager
def _place(workers: int, dask: str | None, device: Device) -> Iterator[tuple[Executor, torch.device]]:
    """Yield the executor and the device: this process, or workers that end with the block."""
    if dask is not None and workers > 1:
        raise LazyscopeError("A Dask cluster has its own workers; pass --dask or --workers, not both.")
    if dask is None and workers == 1:
        yield here, choose_device(device)
        return
    with local_cluster(workers) if dask is None else cluster_at(dask) as cluster:
        if cluster.link:
            console.print(f"dashboard: {cluster.link}", soft_wrap=True)
        yield cluster, cluster.device(device)


def _run_all(
    chosen: list[Experiment],
    scale: str,
    store: Store,
    device: torch.device,
    executor: Executor,
    board: Board,
    style: str = "print",
) -> tuple[list[Outcome], list[ExperimentError]]:
    """Run the experiments and show their progress. A failing experiment does not stop the others."""
    # Experiments without an outcome come first, so that a run that is killed repeatedly reaches all of them.
    order = sorted(range(len(chosen)), key=lambda i: (store.root / chosen[i].name / f"{scale}.json").exists())
    todo = [chosen[i] for i in order]
    with quiet(), board:
        found = run_all(
            todo,
            scale,
            store,
            device=device,
            executor=executor,
            style=style,
            progress=board.advance,
            ended=board.end,
        )
    ended = [one for _, one in sorted(zip(order, found, strict=True), key=itemgetter(0))]
    outcomes = [one for one in ended if isinstance(one, Outcome)]
    return outcomes, [one for one in ended if isinstance(one, ExperimentError)]


def _end(failures: list[ExperimentError]) -> None:
    """Print the errors and exit with their code. A crash takes precedence over other errors."""
    for failure in failures:
        _print_error(failure)
    if failures:
        raise typer.Exit(CRASHED if any(isinstance(failure, CrashedExperiment) for failure in failures) else 2)


def _print_error(error: BaseException) -> None:
    errors.print(Text("error: ", "bold red") + Text(str(error), "default"), soft_wrap=True)


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    errors.print(Text("note: ", "bold yellow") + Text(str(message), "default"), soft_wrap=True)


def main() -> None:
    """Run the `lazyscope` command. `lazyscope --help` explains the exit codes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for α on an ASCII terminal
    setattr(Console, "on_broken_pipe", end_quietly)  # noqa: B010  # also for Typer's console, which prints the help
    warnings.showwarning = _print_warning
    try:
        app()
    except LazyscopeError as error:
        _print_error(error)
        raise SystemExit(2) from None
    except Exception:
        errors.print(Text(traceback.format_exc(), "default"), soft_wrap=True)
        _print_error(RuntimeError("lazyscope crashed, which is a bug; please report it with the lines above."))
        raise SystemExit(CRASHED) from None


if __name__ == "__main__":
    main()
