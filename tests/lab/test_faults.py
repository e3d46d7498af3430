"""Faults of a real cluster: dead workers, a restarted scheduler, a killed client, workers with other code or none."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.lab.farm import Farm, kill, wait_for

import lazyscope
from lazyscope.errors import LazyscopeError
from lazyscope.lab import Experiment
from lazyscope.lab.cluster import cluster_at
from lazyscope.lab.pool import ClusterNote
from lazyscope.lab.run import records, run
from lazyscope.lab.store import Store

Command = Callable[..., "subprocess.Popen[str]"]
CPU = torch.device("cpu")
TOY = "toy:EXPERIMENT"
POINTS = 12


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[Farm]:
    folder = tmp_path / "farm"
    folder.mkdir()
    with Farm(folder) as farm:
        yield farm


def computed(tmp_path: Path) -> list[int]:
    log = tmp_path / "log.txt"
    return sorted(int(line.split()[0]) for line in log.read_text().splitlines()) if log.exists() else []


def assert_as_serial(toy: Experiment, out: Path, tmp_path: Path) -> None:
    """Every trial is stored exactly once, and equals that of a serial run."""
    run(toy, "quick", Store(tmp_path / "serial"), device=CPU)
    assert len(list(out.rglob("*.npz"))) == POINTS
    pairs = zip(records(toy, "quick", Store(out)), records(toy, "quick", Store(tmp_path / "serial")), strict=True)
    for found, serial in pairs:
        assert found is not None
        assert serial is not None
        assert found.trial.params == serial.trial.params
        assert found.trial.result.keys() == serial.trial.result.keys()
        for name, value in serial.trial.result.items():
            assert np.array_equal(found.trial.result[name], value)


@pytest.mark.slow
def test_a_worker_and_then_the_client_are_killed(tmp_path: Path, toy: Experiment, farm: Farm, command: Command) -> None:
    log = {"TOY_LOG": str(tmp_path / "log.txt"), "TOY_SECONDS": "0.4"}
    victim, _ = farm.start_worker(**log), farm.start_worker(**log)
    farm.wait(2)
    out = tmp_path / "results"
    arguments = ("reproduce", TOY, "--out", str(out), "--dask", farm.address, "--device", "cpu")
    first = command(*arguments)
    wait_for(lambda: len(list(out.rglob("*.npz"))) >= 2)
    kill(victim)
    wait_for(lambda: len(list(out.rglob("*.npz"))) >= 5)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=30)
    assert first.returncode == -signal.SIGKILL
    before = len(list(out.rglob("*.npz")))
    assert before < POINTS, "the run was not interrupted in the middle"
    second = command(*arguments)
    text, complaints = second.communicate(timeout=120)
    assert second.returncode == 0, complaints + farm.say()
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/status", text)
    assert " claims hold" in text
    assert_as_serial(toy, out, tmp_path)
    # Only trials in progress at either death are computed again.
    assert len(computed(tmp_path)) <= POINTS + 2 * 2 * toy.chunk


@pytest.mark.slow
def test_the_scheduler_is_restarted(tmp_path: Path, toy: Experiment, farm: Farm) -> None:
    settings = {"TOY_SECONDS": "0.4"}
    farm.start_worker(**settings)
    farm.wait(1)
    store = Store(tmp_path / "results")
    restarted: list[int] = []

    def restart(done: int, total: int) -> None:
        if done >= 4 and not restarted:
            restarted.append(done)
            kill(farm.scheduler)
            farm.start_scheduler()
            farm.start_worker(**settings)

    with cluster_at(farm.address) as cluster, pytest.warns(ClusterNote, match="is lost; waiting for it"):
        assert run(toy, "quick", store, device=CPU, executor=cluster, progress=restart).holds
    assert restarted
    assert_as_serial(toy, store.root, tmp_path)


@pytest.fixture
def another_version(tmp_path: Path) -> Path:
    """A copy of the package with the version 0.0.9."""
    folder = tmp_path / "other"
    shutil.copytree(Path(lazyscope.__file__).parent, folder / "lazyscope")
    front = folder / "lazyscope" / "__init__.py"
    front.write_text(re.sub(r'__version__ = ".*"', '__version__ = "0.0.9"', front.read_text()))
    return folder


@pytest.fixture
def no_package(tmp_path: Path) -> Path:
    """A Python without lazyscope."""
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['lazyscope'] = None\n")
    return folder


@pytest.fixture
def other_code(tmp_path: Path) -> Path:
    """A folder with a toy experiment that computes something else."""
    folder = tmp_path / "edited"
    folder.mkdir()
    text = (Path(__file__).parent / "toy.py").read_text()
    assert "x**2" in text
    (folder / "toy.py").write_text(text.replace("x**2", "x**3"))
    return folder


@pytest.mark.slow
def test_workers_with_other_code_get_no_work(
    tmp_path: Path, toy: Experiment, farm: Farm, another_version: Path, no_package: Path, other_code: Path
) -> None:
    for folder in (another_version, no_package):
        farm.start_worker(folder)
    farm.wait(2)
    remedy = r"Worker tcp://127\.0\.0\.1:\d+ .*; install .* and restart it\."
    with (
        cluster_at(farm.address) as cluster,
        pytest.warns(ClusterNote, match="continue without it"),
        pytest.raises(LazyscopeError, match=remedy),
    ):
        run(toy, "quick", Store(tmp_path / "none"), device=CPU, executor=cluster)
    farm.start_worker(other_code)
    farm.start_worker()
    farm.wait(4)
    store = Store(tmp_path / "results")
    with cluster_at(farm.address) as cluster, pytest.warns(ClusterNote) as notes:
        assert run(toy, "quick", store, device=CPU, executor=cluster).holds
    said = [str(note.message) for note in notes]
    assert len(said) == 3
    for reason in ("has lazyscope 0.0.9, but the client", "cannot load lazyscope", "the code of 'toy' or the release"):
        assert sum(reason in text for text in said) == 1
    assert_as_serial(toy, store.root, tmp_path)


def test_without_workers_the_remedy_is_named(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyscope.lab.cluster.PATIENCE", 5.0)
    remedy = f"No worker has joined .*; start some with `dask worker {farm.address} --nthreads 1`"
    with pytest.raises(LazyscopeError, match=remedy), cluster_at(farm.address):
        pass
    kill(farm.scheduler)
    monkeypatch.setattr("lazyscope.lab.cluster.PATIENCE", 0.5)
    with pytest.raises(LazyscopeError, match="start one with `dask scheduler`"), cluster_at(farm.address):
        pass
