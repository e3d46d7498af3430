"""The settings, other than code, on which a trial depends: the default dtype, and declared files and variables."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from lazyscope.errors import ExperimentError
from lazyscope.lab.experiment import Experiment


def setting(experiment: Experiment) -> str:
    """Describe the settings on which the trials of an experiment depend, besides their code.

    Args:
        experiment: The experiment, whose declared files and environment variables are read.

    Returns:
        PyTorch's default dtype, followed by a hash if files or variables are declared.

    Raises:
        ExperimentError: If a declared file cannot be read.
    """
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    if not experiment.files and not experiment.variables:
        return dtype
    declared = hashlib.sha256()
    for name in experiment.variables:
        declared.update(f"{name}={os.environ.get(name)!r}\n".encode("utf-8", "surrogateescape"))
    for entry in experiment.files:
        for path in _files(Path(entry)):
            declared.update(f"{path.as_posix()} {_digest(path, experiment.name)}\n".encode("utf-8", "surrogateescape"))
    return f"{dtype} {declared.hexdigest()[:16]}"


def _files(path: Path) -> list[Path]:
    """Return the file, or all files in a folder."""
    if path.is_dir():
        return sorted(inner for inner in path.rglob("*") if inner.is_file())
    return [path]


def _digest(path: Path, experiment: str) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ExperimentError(
            f"'{experiment}' declares the file {path}, which cannot be read ({error.strerror}); create it, or declare"
            " another file."
        ) from error
