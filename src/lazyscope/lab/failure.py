"""Exceptions raised by the code of an experiment. They fail that experiment only."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lazyscope.errors import ExperimentError, LazyscopeError, StoreError
from lazyscope.lab import disk


class CrashedExperiment(ExperimentError):
    """The code of an experiment raised an exception that is not a `LazyscopeError`."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Turn `sys.exit` inside the block into an error, so that it does not end the run."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


@contextmanager
def part(name: str) -> Iterator[None]:
    """Add a note to exceptions raised in the block, which names the part of the experiment that raised them.

    Args:
        name: The part, such as "figure".
    """
    try:
        with no_exit():
            yield
    except Exception as error:
        error.add_note(f"{_NOTE}{name}")
        raise


_LONG = 300
_NOTE = "lazyscope: raised by "


def one_line(error: BaseException) -> str:
    """Format the message of an exception for use inside a sentence.

    Args:
        error: Any exception.

    Returns:
        The message on one line, truncated to 300 characters.
    """
    text = " ".join(str(error).split())
    return text if len(text) <= _LONG else f"{text[:_LONG]} …"


def failed(experiment: str, what: str, errors: Sequence[Exception], root: Path, where: str = "") -> ExperimentError:
    """Create the error of an experiment whose code raised, and write the tracebacks to `<experiment>/failure.txt`.

    Args:
        experiment: The name of the experiment.
        what: The part that raised, such as "trial" or "figure". A note added by `part` takes precedence.
        errors: The exceptions, at least one.
        root: The folder of results.
        where: The grid points at which the exception was raised, as part of a sentence.

    Returns:
        An error whose message is one sentence about the first exception. It is a `CrashedExperiment`, or a plain
        `ExperimentError` if a trial raised a `LazyscopeError`.
    """
    first = errors[0]
    notes = [note for note in getattr(first, "__notes__", []) if note.startswith(_NOTE)]
    what = notes[0].removeprefix(_NOTE) if notes else what
    path = root / experiment / "failure.txt"
    text = "\n".join("".join(traceback.format_exception(error)) for error in errors)
    seen = f" (see {path})"
    try:
        disk.write(path, text.encode("utf-8", "backslashreplace"))
    except StoreError:  # the original error is more important
        seen = ""
    refused = what == "trial" and isinstance(first, LazyscopeError)  # for example, missing data
    kind = ExperimentError if refused else CrashedExperiment
    error = kind(
        f"The {what} of '{experiment}'{where} raised {type(first).__name__}: {one_line(first)}{seen}; all other trials"
        " are stored: fix it and run the same command again."
    )
    error.__cause__ = first
    return error
