"""Real failures of `lazyscope reproduce`: kill -9, Ctrl-C, a full disk, a read-only folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.lab.farm import wait_for

from lazyscope.lab import Experiment
from lazyscope.lab.code import fingerprint
from lazyscope.lab.store import Key, Store

Command = Callable[..., "subprocess.Popen[str]"]
TOY = "toy:EXPERIMENT"
POINTS = 12


def alive(session: int) -> list[str]:
    """Return the processes of a session that still run, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, _, leader = rest.split()[:4]
            if int(leader) == session and state != "Z":
                found.append(name)
    return found


def logged(tmp_path: Path) -> list[tuple[int, int]]:
    """Return (point, process) of every computed trial, in order."""
    log = tmp_path / "log.txt"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(x), int(pid)) for x, pid in (line.split() for line in lines)]


def stored(out: Path, toy: Experiment) -> list[int]:
    """Return the points with stored files, all of which must be complete."""
    store, code = Store(out), fingerprint(toy)
    with warnings.catch_warnings(action="error"):
        points = [int(p["x"]) for p in toy.grid("quick") if store.read(Key("toy", p, code)) is not None]
    assert len(points) == len(list(out.rglob("*.npz")))
    return points


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds remaining processes in /proc")
@pytest.mark.parametrize(
    ("how", "workers"),
    [
        pytest.param(signal.SIGKILL, 1, id="kill -9, 1 worker"),
        pytest.param(signal.SIGKILL, 2, id="kill -9, 2 workers", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 1, id="Ctrl-C, 1 worker", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, id="Ctrl-C, 2 workers"),
    ],
)
def test_kill_in_the_middle(
    tmp_path: Path, toy: Experiment, command: Command, workers: int, how: signal.Signals
) -> None:
    out = tmp_path / "results"
    arguments = ("reproduce", TOY, "--out", str(out), "--workers", str(workers), "--device", "cpu")
    first = command(*arguments, TOY_SECONDS="0.25")  # a new session, as a terminal creates it
    wait_for(lambda: len(list(out.rglob("*.npz"))) >= 4)
    assert len(alive(first.pid)) >= (1 if workers == 1 else 1 + workers)
    if how == signal.SIGINT:
        os.killpg(first.pid, how)  # a terminal sends Ctrl-C to all processes
    else:
        first.send_signal(how)
    _, complaints = first.communicate(timeout=240)
    assert first.returncode == (130 if how == signal.SIGINT else -how)
    assert "Traceback" not in complaints
    wait_for(lambda: not alive(first.pid), 30)

    before = stored(out, toy)
    assert 4 <= len(before) < POINTS, "the run was not interrupted in the middle"
    (tmp_path / "log.txt").unlink()
    second = command("reproduce", TOY, "--out", str(out), "--device", "cpu")
    text, complaints = second.communicate(timeout=240)
    assert second.returncode == 0, complaints
    assert sorted(x for x, _ in logged(tmp_path)) == sorted(set(range(POINTS)) - set(before))
    assert stored(out, toy) == list(range(POINTS))
    assert "damaged" not in text + complaints
    assert " claims hold" in text


def namespace(mount: str) -> tuple[str, ...]:
    """Return a prefix that runs a command with a private mount; skip the test if that is not allowed."""
    if shutil.which("unshare") is None:
        pytest.skip("no `unshare` here, so no file system of the test's own")
    prefix = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    probe = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"mounts in a namespace are not allowed here: {probe.stderr.strip()}")
    return prefix


def assert_one_sentence(process: subprocess.Popen[str], *words: str) -> None:
    text, complaints = process.communicate(timeout=240)
    assert process.returncode == 2, text + complaints
    assert "Traceback" not in text + complaints
    (line,) = complaints.strip().splitlines()
    for word in words:
        assert word in line


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_full_disk(tmp_path: Path, command: Command, workers: int) -> None:
    out = tmp_path / "results"
    out.mkdir()
    # 48 kB have room for some trials of one or two pages each, but not for all of them or for the figure.
    prefix = namespace(f"mount -t tmpfs -o size=48k none {out}")
    process = command("reproduce", TOY, "--out", str(out), "--workers", str(workers), prefix=prefix)
    assert_one_sentence(process, str(out), "disk is full", "--out")
    assert len(logged(tmp_path)) >= 2, "it failed before the first trial"


def test_read_only_folder(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "results"
    out.mkdir()
    prefix = namespace(f"mount -t tmpfs -o ro none {out}")
    process = command("reproduce", TOY, "--out", str(out), prefix=prefix)
    assert_one_sentence(process, str(out), "read-only", "--out")
    assert logged(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_folder_without_permission(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "results"
    out.mkdir(mode=0o500)
    assert_one_sentence(command("reproduce", TOY, "--out", str(out)), str(out), "permission", "--out")
    assert logged(tmp_path) == []
