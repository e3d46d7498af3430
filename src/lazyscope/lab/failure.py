"""What an experiment's own code raised: the error of that experiment, and of no other."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lazyscope.errors import ExperimentError, LazyscopeError, StoreError
from lazyscope.lab import disk


class CrashedExperiment(ExperimentError):
    """The code of an experiment raised something that is not one of lazyscope's own refusals."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Code that calls `sys.exit` has failed; it does not end the run."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


@contextmanager
def part(name: str) -> Iterator[None]:
    """Note in what the block raises which part of the experiment it is.

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
    """What an error says, as a part of a sentence.

    Args:
        error: Any.

    Returns:
        Its text in one line, cut off where it is long.
    """
    text = " ".join(str(error).split())
    return text if len(text) <= _LONG else f"{text[:_LONG]} …"


def failed(experiment: str, what: str, errors: Sequence[Exception], root: Path, where: str = "") -> ExperimentError:
    """The error of an experiment whose code raised; the tracebacks go to `<experiment>/failure.txt`.

    Args:
        experiment: Its name.
        what: The part that raised, such as "trial" or "figure"; a note that `part` left takes its place.
        errors: What was raised, at least one.
        root: The folder of results.
        where: At which points it was raised, as part of a sentence.

    Returns:
        One sentence that names the first error, as a `CrashedExperiment` unless a trial raised one of lazyscope's.
    """
    first = errors[0]
    notes = [note for note in getattr(first, "__notes__", []) if note.startswith(_NOTE)]
    what = notes[0].removeprefix(_NOTE) if notes else what
    path = root / experiment / "failure.txt"
    text = "\n".join("".join(traceback.format_exception(error)) for error in errors)
    seen = f" (see {path})"
    try:
        disk.write(path, text.encode("utf-8", "backslashreplace"))
    except StoreError:  # the error itself matters more
        seen = ""
    refused = what == "trial" and isinstance(first, LazyscopeError)  # data that are missing, say
    kind = ExperimentError if refused else CrashedExperiment
    error = kind(
        f"The {what} of '{experiment}'{where} raised {type(first).__name__}: {one_line(first)}{seen}; all other trials"
        " are stored: fix it and run the same command again."
    )
    error.__cause__ = first
    return error
