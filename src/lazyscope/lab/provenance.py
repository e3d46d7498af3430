"""The provenance of results: command, commit, versions, device and date."""

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
    """Choose a device by name.

    Args:
        name: "cpu", "cuda", or "auto", which selects CUDA if it is available and the CPU otherwise.

    Returns:
        The device.

    Raises:
        LazyscopeError: If "cuda" is requested but not available.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise LazyscopeError("torch finds no CUDA device; use --device cpu, or install a CUDA build of torch.")
    return torch.device(name)


def provenance() -> dict[str, str]:
    """Describe the current run. Together with `place`, this is what is needed to repeat it.

    Returns:
        The command, the commit, the version of lazyscope and the date, as text.
    """
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "lazyscope": _version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def place(device: torch.device) -> dict[str, str]:
    """Describe where a trial is computed, which may be another process or machine than the one that requested it.

    Args:
        device: The device on which the trial runs.

    Returns:
        The versions of PyTorch and Python and the name of the device, as text.
    """
    return {"torch": torch.__version__, "python": platform.python_version(), "device": _device_name(device)}


def _version() -> str:
    try:
        return version("lazyscope")
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the commit of this code, with `+` if there are uncommitted changes, or "" for an installed package.

    For a copy without its repository, such as on a cluster, set the environment variable LAZYSCOPE_COMMIT.
    """
    if given := os.environ.get("LAZYSCOPE_COMMIT"):
        return given
    here = Path(__file__)
    try:
        # Without this check, a package in a virtual environment would report the commit of the surrounding repository.
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
    except OSError:  # not Linux
        model = None
    return f"{model[1] if model else platform.machine()}, {cores}"
