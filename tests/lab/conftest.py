"""The toy experiment, importable by its name, and the `lazyscope` command in a separate process."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lazyscope.lab import Experiment

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

Command = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def toy() -> Experiment:
    experiment = importlib.import_module("toy").EXPERIMENT
    assert isinstance(experiment, Experiment)
    return experiment


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Start `lazyscope …` in the folder of toy.py with `TOY_…` settings. Computed points are appended to log.txt."""

    def start(*arguments: str, prefix: tuple[str, ...] = (), **settings: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TOY_LOG": str(tmp_path / "log.txt"), "COLUMNS": "200", **settings}
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "lazyscope.cli", *arguments],
            cwd=HERE,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # background jobs ignore SIGINT
        )

    return start
