"""Where a number comes from: command, commit, versions, device, date."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lazyscope.errors import LazyscopeError


def choose_device(name: str) -> torch.device:
    """`auto` takes the GPU where there is one; asking for one that is not there is an error, no fallback.

    Args:
        name: "auto", "cpu" or "cuda".
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise LazyscopeError("torch sees no CUDA device here; use --device cpu, or install a CUDA build of torch.")
    return torch.device(name)


def provenance() -> dict[str, str]:
    """What was asked for, by which code and when, as text; with `place`, everything needed to run it again."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "lazyscope": _version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def place(device: torch.device) -> dict[str, str]:
    """What computes here: a trial may run in another process, or on another machine, than the one that asked.

    Args:
        device: Where tensors go.
    """
    return {"torch": torch.__version__, "python": platform.python_version(), "device": _device_name(device)}


def _version() -> str:
    try:
        return version("lazyscope")
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit this code is from, with `+` where the tree has changes; "" for an installed package.

    A copy without its repository, on a cluster say, is told by LAZYSCOPE_COMMIT.
    """
    if told := os.environ.get("LAZYSCOPE_COMMIT"):
        return told
    here = Path(__file__)
    try:
        # Otherwise a package inside a virtual environment would report the repository around it.
        _git("ls-files", "--error-unmatch", here.name)
        return _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "--porcelain", "--", ":/src") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = f"{os.cpu_count()} cores"
    try:
        model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # no Linux
        model = None
    return f"{model[1] if model else platform.machine()}, {cores}"
