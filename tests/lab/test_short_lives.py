"""Experiments of the quick scale finish although their process is killed every ten seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lazyscope import experiments

LIFE = 10.0
"""Seconds of processor time after which a process is killed, on a machine on which starting takes `START` of them."""

START = 3.0

EXPERIMENTS = Path(experiments.__file__).parent

MOST = 40
"""Lives after which an experiment is given up."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def used(process: int) -> float:
    """The seconds of processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def slowness() -> float:
    """How much longer starting takes here: other processes share the caches, and the clock of a busy core."""
    script = "import time, lazyscope.cli; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    return max(1.0, float(done.stdout) / START)


def ends_by_itself(command: list[str]) -> int | None:
    """The exit code of a process, or None if it was killed."""
    life = LIFE * slowness()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT) as process:
        while process.poll() is None:
            if used(process.pid) > life:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return None
            time.sleep(0.05)
        return process.returncode


@pytest.mark.hours
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the processor time of a process is read in /proc")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(path.stem.replace("_", "-") for path in EXPERIMENTS.glob("[!_]*.py")))
def test_an_experiment_finishes_in_short_lives(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lazyscope.cli", "reproduce", name, "--out", str(tmp_path), "--device", "cpu"]
    lives, code = 0, None
    while code is None and lives < MOST:
        code, lives = ends_by_itself(command), lives + 1
    print(f"{name}: {lives} lives, {sum(1 for _ in tmp_path.rglob('*.npz'))} trials")
    assert code == 0, f"{name} ended with {code} after {lives} lives"
