"""The `lazyscope` command, run in the process of the test."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lazyscope import cli


class Done(NamedTuple):
    code: object
    out: str
    err: str


Command = Callable[..., Done]


def command_in(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `lazyscope …` in this folder, from which it can import modules."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command replaces it

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["lazyscope", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Done(ended.value.code, *capsys.readouterr())

    return run
