"""Trials on worker processes of this machine: as on one, whatever becomes of a worker."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import site
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyscope.errors import ExperimentError, LazyscopeError
from lazyscope.lab import Experiment, Params
from lazyscope.lab.cluster import Cluster, _environment, fitted, local_cluster
from lazyscope.lab.crew import ClusterNote
from lazyscope.lab.executor import Task
from lazyscope.lab.run import records, run
from lazyscope.lab.store import Store

CPU = torch.device("cpu")
POINTS = 12
pytestmark = pytest.mark.xdist_group("cluster")  # its workers start once


@pytest.fixture(scope="module")
def machine() -> Iterator[Cluster]:
    with local_cluster(2) as cluster:
        yield cluster


@pytest.fixture
def cluster(machine: Cluster) -> Cluster:
    """The same workers, none of which is refused so far."""
    return Cluster(machine.client)


def tell(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, **toy: str) -> None:
    """Settings of the toy for the workers that there are, and for those that will replace them."""
    told = {"TOY_FAIL": "", "TOY_DIE": "", "TOY_LOG": "", **toy}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    cluster.client.run(importlib.import_module("toy").tell, told)


def test_it_is_as_on_one_machine(
    tmp_path: Path, toy: Experiment, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(cluster, monkeypatch, TOY_LOG=str(tmp_path / "log.txt"))
    heard: list[tuple[int, int]] = []
    stores = [Store(tmp_path / name) for name in ("cluster", "here")]
    first = run(toy, "quick", stores[0], device=CPU, executor=cluster, progress=lambda *now: heard.append(now))
    assert heard == [(done, POINTS) for done in range(0, POINTS + 1, toy.chunk)]
    workers = {int(line.split()[1]) for line in (tmp_path / "log.txt").read_text().splitlines()}
    assert os.getpid() not in workers
    assert workers <= set(cluster.client.run(os.getpid).values())
    second = run(toy, "quick", stores[1], device=CPU)
    assert dataclasses.replace(first, seconds=0.0, provenance={}) == dataclasses.replace(
        second, seconds=0.0, provenance={}
    )
    assert first.provenance.keys() == second.provenance.keys()
    pairs = zip(*(records(toy, "quick", store) for store in stores), strict=True)
    for one, two in pairs:
        assert one is not None
        assert two is not None
        assert str(one.trial) == str(two.trial)
    assert not list(tmp_path.rglob("*.scratch"))


def test_a_failing_trial_stops_no_other(
    tmp_path: Path, toy: Experiment, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(cluster, monkeypatch, TOY_FAIL="3")
    store = Store(tmp_path)
    with pytest.raises(ExperimentError, match=r"'toy' at x=2; x=3 raised ZeroDivisionError: as asked"):
        run(toy, "quick", store, device=CPU, executor=cluster)
    assert "in _square" in (tmp_path / "toy" / "failure.txt").read_text()
    assert len(list(tmp_path.rglob("*.npz"))) == POINTS - toy.chunk


def test_a_trial_that_kills_its_workers_is_given_up(
    tmp_path: Path, toy: Experiment, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(cluster, monkeypatch, TOY_DIE="5")
    store = Store(tmp_path)
    with (
        pytest.warns(ClusterNote, match="A worker of 'toy' died; what it had begun is tried again"),
        pytest.raises(ExperimentError, match=r"'toy' at x=4; x=5 raised LazyscopeError: 3 workers died over it"),
    ):
        run(toy, "quick", store, device=CPU, executor=cluster)
    assert len(list(tmp_path.rglob("*.npz"))) == POINTS - toy.chunk, "all others are stored"
    cluster.client.wait_for_workers(2, timeout=60)  # the last dead one is replaced, too
    tell(cluster, monkeypatch)
    assert run(toy, "quick", store, device=CPU, executor=cluster).holds


def test_a_worker_that_holds_old_code_gets_no_work(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(cluster, monkeypatch)
    text = (Path(__file__).parent / "toy.py").read_text()
    (tmp_path / "edited.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    past = 1e9
    os.utime(tmp_path / "edited.py", (past, past))
    experiment = importlib.import_module("edited").EXPERIMENT
    cluster.client.run(site.addsitedir, str(tmp_path))
    assert run(experiment, "quick", Store(tmp_path), device=CPU, executor=cluster).holds
    (tmp_path / "edited.py").write_text(text.replace("x**2", "x**3"))
    with (
        pytest.warns(ClusterNote, match="go on without it"),
        pytest.raises(LazyscopeError, match=r"edited\.py has changed since worker tcp://.* was started.*; restart it"),
    ):
        run(experiment, "quick", Store(tmp_path), device=CPU, executor=cluster)


def test_figures_are_drawn_on_workers_and_here_where_theirs_may_differ(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(cluster, monkeypatch)
    tell_who = f"import pathlib\n    pathlib.Path({str(tmp_path / 'who.txt')!r}).write_text(str(os.getpid()))\n    "
    text = (Path(__file__).parent / "toy.py").read_text().replace("drawing, axes = ", f"{tell_who}drawing, axes = ")
    file = tmp_path / "traced.py"
    file.write_text(text)
    os.utime(file, (1e9, 1e9))
    monkeypatch.syspath_prepend(str(tmp_path))
    cluster.client.run(site.addsitedir, str(tmp_path))
    experiment = importlib.import_module("traced").EXPERIMENT
    first = run(experiment, "quick", Store(tmp_path), device=CPU, executor=cluster)
    assert int((tmp_path / "who.txt").read_text()) in cluster.client.run(os.getpid).values()
    file.write_text(text.replace("exponent 2", "exponent two"))  # the trial is the same: nothing is measured again
    second = run(experiment, "quick", Store(tmp_path), device=CPU, executor=cluster)
    assert int((tmp_path / "who.txt").read_text()) == os.getpid(), "workers cannot tell what they have loaded"
    assert second == first, "by the code that this process has loaded"


def test_the_dashboard_answers(cluster: Cluster) -> None:
    assert cluster.link.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(cluster.link) as page:
        assert page.status == 200


def test_devices(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.device("cpu") == CPU
    if not torch.cuda.is_available():
        assert cluster.device("auto") == CPU
        with pytest.raises(LazyscopeError, match=r"Worker tcp://.* sees no CUDA device; .* --device cpu"):
            cluster.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [_environment(i)["CUDA_VISIBLE_DEVICES"] for i in range(3)] == ["3", "5", "3"]


def test_without_dask_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(LazyscopeError, match=r"pip install .lazyscope\[cluster\]"), local_cluster(2):
        pass


@settings(deadline=None)
@given(points=st.integers(1, 300), chunk=st.integers(1, 50), workers=st.integers(1, 70))
def test_chunks_fit_the_workers(points: int, chunk: int, workers: int) -> None:
    grid: list[Params] = [{"x": x} for x in range(points)]
    trial = importlib.import_module("toy").trial
    tasks = [
        Task(name, trial, grid[i : i + chunk], CPU, "code", Store(Path("nowhere")), {})
        for name in ("toy", "other")
        for i in range(0, points, chunk)
    ]
    both = fitted(tasks, workers)
    if len(tasks) >= 4 * workers:
        assert both == tasks, "enough for everybody"
        return
    cut = [task for task in both if task.experiment == "toy"]
    assert [task.points for task in both] == 2 * [task.points for task in cut], "each experiment by itself"
    assert [point for task in cut for point in task.points] == grid
    sizes = [len(task.points) for task in cut]
    assert max(sizes) <= chunk
    assert max(sizes) - min(sizes) <= 1
    assert len(cut) == points or len(cut) % workers == 0, "nobody waits in the last round"
    assert math.ceil(len(cut) / workers) == math.ceil(points / (chunk * workers)), "no more rounds than must be"
