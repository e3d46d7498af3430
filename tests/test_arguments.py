"""The checks of arguments, in a process without run-time type checks, which would refuse wrong types first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_wrong_arguments_are_refused_with_the_remedy() -> None:
    cases = Path(__file__).with_name("untyped.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(cases),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=cases.parents[1])
    assert ended.returncode == 0, ended.stdout
    assert " passed" in ended.stdout
