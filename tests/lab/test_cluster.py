"""Trials on worker processes of this machine give the results of one process, also if workers die.

Longer than 350 lines because all of these tests share the same workers.
"""

from __future__ import annotations

import dataclasses
import http.client
import importlib
import json
import math
import os
import re
import signal
import site
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from distributed import LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyscope.errors import ExperimentError, LazyscopeError
from lazyscope.lab import Experiment, Params
from lazyscope.lab import cluster as lab
from lazyscope.lab.cluster import Cluster, _environment, cluster_at, fitted, local_cluster
from lazyscope.lab.executor import Task
from lazyscope.lab.pool import ClusterNote
from lazyscope.lab.run import records, run
from lazyscope.lab.store import Store

CPU = torch.device("cpu")
POINTS = 12
pytestmark = pytest.mark.xdist_group("cluster")  # the workers are started once


@pytest.fixture(scope="module")
def others() -> set[int]:
    """The ports on which this process listened before, such as that of an explorer of other tests."""
    return set(ports())


@pytest.fixture(scope="module")
def machine(others: set[int]) -> Iterator[Cluster]:
    with local_cluster(2) as cluster:
        yield cluster


@pytest.fixture
def cluster(machine: Cluster) -> Cluster:
    """A new cluster object with the same workers, none of which is excluded."""
    return Cluster(machine.client)


def tell(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, **toy: str) -> None:
    """Set the environment of the toy for the current workers, and for those that replace them."""
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


@pytest.mark.slow
def test_a_trial_that_kills_its_workers_is_given_up(
    tmp_path: Path, toy: Experiment, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(cluster, monkeypatch, TOY_DIE="5")
    store = Store(tmp_path)
    with (
        pytest.warns(ClusterNote, match="A worker that ran 'toy' died; its tasks are tried again"),
        pytest.raises(ExperimentError, match=r"'toy' at x=4; x=5 raised LazyscopeError: 3 workers died"),
    ):
        run(toy, "quick", store, device=CPU, executor=cluster)
    assert len(list(tmp_path.rglob("*.npz"))) == POINTS - toy.chunk, "all other trials are stored"
    cluster.client.wait_for_workers(2, timeout=60)  # the last dead worker is replaced as well
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
        pytest.warns(ClusterNote, match="continue without it"),
        pytest.raises(LazyscopeError, match=r"edited\.py has changed since worker tls://.* was started.*; restart it"),
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
    file.write_text(text.replace("exponent 2", "exponent two"))  # the trial is unchanged, so nothing is measured again
    second = run(experiment, "quick", Store(tmp_path), device=CPU, executor=cluster)
    assert int((tmp_path / "who.txt").read_text()) == os.getpid(), "not by workers, whose code is unknown"
    assert second == first, "drawn by the code that this process has loaded"


# ── access is restricted ───────────────────────────────────────────────────────────────────────────────────────────
def ports() -> list[int]:
    """Return the ports on which this process and its workers listen."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return [end.laddr.port for one in family for end in one.net_connections() if end.status == "LISTEN"]


def test_nothing_listens_beyond_loopback_and_nothing_is_shown(cluster: Cluster, others: set[int]) -> None:
    assert cluster.link is None
    assert cluster.client.scheduler_info()["address"].startswith("tls://127.0.0.1:")
    for one in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        assert {end.laddr.ip for end in one.net_connections() if end.status == "LISTEN"} <= {"127.0.0.1"}
    shown: list[int] = []
    for port in set(ports()) - others:
        for path in ("", "status", "health", "info/main/workers.html", "metrics", "json/counts.json"):
            line = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            with suppress(OSError, http.client.HTTPException):  # a TLS port, which does not answer HTTP
                line.request("GET", f"/{path}")
                shown.append(line.getresponse().status)
            line.close()
    assert set(shown) == {404}
    folders = cluster.client.run(lambda dask_worker: dask_worker.local_directory)
    for folder in folders.values():
        assert stat.S_IMODE(os.stat(Path(folder).parents[1]).st_mode) == 0o700, "readable by this user only"


def test_one_process_opens_no_port(tmp_path: Path, toy: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    def listen(*_: object) -> None:
        raise AssertionError("a port is opened")

    monkeypatch.setattr(socket.socket, "listen", listen)
    assert run(toy, "quick", Store(tmp_path), device=CPU).holds
    sources = Path(lab.__file__).parents[1].rglob("*.py")
    words = re.compile(r"create_server|start_server|\.listen\(|\.bind\(|http\.server|socketserver")
    assert [path.name for path in sources if words.search(path.read_text(encoding="utf-8"))] == ["serve.py"]


INTRUDER = """
import asyncio, encodings.idna, json, os, sys, time
import distributed, distributed.comm.tcp  # what others may not be able to read is loaded before
from distributed.core import rpc
keys = distributed.Security.temporary()
os.setgroups([]); os.setgid(65534); os.setuid(65534)

async def attack(address, security, seconds):
    arguments = security.get_connection_args("client")
    try:
        async with asyncio.timeout(seconds), rpc(address, connection_args=arguments) as remote:
            return str(await remote.identity())
    except Exception as error:
        return "refused: " + repr(error)

async def main():
    start, plain = time.monotonic(), distributed.Security()
    control = await attack("tcp://127.0.0.1:" + sys.argv[1], plain, 30)
    patience = max(1, 3 * (time.monotonic() - start))
    attacks = [(kind + "://127.0.0.1:" + port, keys if kind == "tls" else plain, patience)
               for port in sys.argv[2:] for kind in ("tcp", "tls")]
    print(json.dumps([control, *await asyncio.gather(*(attack(*one) for one in attacks))]))

asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_another_user_cannot_use_the_workers(cluster: Cluster, others: set[int]) -> None:
    """Without keys, any user of the machine could run code in the scheduler and the workers."""
    addresses = [cluster.client.scheduler_info()["address"], *cluster.client.nthreads()]
    own = sorted(set(ports()) - others)
    assert {int(address.rpartition(":")[2]) for address in addresses} <= set(own)
    with LocalCluster(n_workers=0, processes=False, protocol="tcp://", dashboard_address="127.0.0.1:0") as open_to_all:
        port = open_to_all.scheduler_address.rpartition(":")[2]
        command = [sys.executable, "-c", INTRUDER, port, *map(str, own)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    control, *answers = json.loads(done.stdout)
    assert "'type': 'Scheduler'" in control, "the attack works without keys"
    assert len(answers) == 2 * len(own)
    assert all(answer.startswith("refused: ") for answer in answers), answers


# ── addresses, and interrupts ─────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "address", ["garbage", "tcp://garbage", "tcp://nowhere.invalid:8786", "tcp://127.0.0.1:0", "http://127.0.0.1:8786"]
)
def test_an_address_without_a_scheduler_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lab._KNOCK <= 5
    monkeypatch.setattr(lab, "_KNOCK", 1.0)
    start = time.monotonic()
    with (
        pytest.raises(LazyscopeError, match=r"No Dask scheduler answers at .* start one with `dask scheduler`") as told,
        cluster_at(address),
    ):
        pass
    assert "\n" not in str(told.value)
    assert time.monotonic() - start < 3


def test_a_port_that_is_not_a_schedulers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "_KNOCK", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(LazyscopeError, match="No Dask scheduler answers at"), cluster_at(address):
            pass
    with pytest.raises(LazyscopeError, match="Timed out trying to connect"), cluster_at(address):
        pass


START = """
import sys, time
from lazyscope.lab.cluster import local_cluster

if __name__ == "__main__":
    try:
        with local_cluster(2):
            print("up", flush=True)
            time.sleep(60)
    except KeyboardInterrupt:
        print("stopped", flush=True)
"""


def test_an_interrupt_while_workers_start_is_honoured(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(START)
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    with subprocess.Popen(
        [sys.executable, tmp_path / "start.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen,
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        workers = wait_for_workers(psutil.Process(run.pid))
        os.killpg(run.pid, signal.SIGINT)  # a terminal signals all of them
        start = time.monotonic()
        assert run.stdout.readline() == "stopped\n"
        assert time.monotonic() - start < 2
        assert psutil.wait_procs(workers, timeout=2)[1] == []
        assert run.wait(20) == 0
        assert run.stderr.read() == ""


def wait_for_workers(process: psutil.Process) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [one for one in process.children(recursive=True) if "spawn_main" in " ".join(one.cmdline())]
        if len(found) == 2:
            return found
        time.sleep(0.02)
    raise AssertionError("no worker was started")


def test_devices(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.device("cpu") == CPU
    if not torch.cuda.is_available():
        assert cluster.device("auto") == CPU
        with pytest.raises(LazyscopeError, match=r"Worker tls://.* has no CUDA device; .* --device cpu"):
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
        assert both == tasks, "there are enough tasks for all workers"
        return
    cut = [task for task in both if task.experiment == "toy"]
    assert [task.points for task in both] == 2 * [task.points for task in cut], "each experiment is cut separately"
    assert [point for task in cut for point in task.points] == grid
    sizes = [len(task.points) for task in cut]
    assert max(sizes) <= chunk
    assert max(sizes) - min(sizes) <= 1
    assert len(cut) == points or len(cut) % workers == 0, "no worker is idle in the last round"
    assert math.ceil(len(cut) / workers) == math.ceil(points / (chunk * workers)), "no more rounds than necessary"
