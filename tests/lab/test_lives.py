"""Runs that are killed early make progress, concurrent runs are independent, and Ctrl-C always works."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lazyscope.flow.checkpoint import Checkpoint
from lazyscope.lab import Experiment, Params, Result, executor
from lazyscope.lab.executor import Task
from lazyscope.lab.run import run
from lazyscope.lab.scratch import lent, lost, scratch
from lazyscope.lab.store import Store

CPU = torch.device("cpu")
Trial = Callable[[list[Params], torch.device], list[Result]]


@pytest.fixture
def lives(toy: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Trial, int], int]:
    """Count the processes needed for a run if each is killed when the trial raises KeyboardInterrupt."""

    def needed(trial: Trial, chunk: int) -> int:
        experiment = dataclasses.replace(toy, trial=trial, chunk=chunk)
        for life in range(1, 30):
            monkeypatch.setitem(executor._progress, "chunks", 0)
            try:
                assert run(experiment, "quick", Store(tmp_path), device=CPU).holds
            except KeyboardInterrupt:  # equivalent to a kill for the store: the lock is released
                continue
            return life
        raise AssertionError("no progress")

    return needed


sizes: list[int] = []


def too_much_at_once(points: list[Params], device: torch.device) -> list[Result]:
    """Fail for chunks of more than three points, as if the process were killed."""
    sizes.append(len(points))
    if len(points) > 3:
        raise KeyboardInterrupt
    return [{"square": int(point["x"]) ** 2} for point in points]


def test_chunks_shrink_until_a_life_is_long_enough(lives: Callable[[Trial, int], int], tmp_path: Path) -> None:
    sizes.clear()
    assert lives(too_much_at_once, 12) == 3
    assert sizes == [12, 6, 3, 3, 3, 3]
    assert not list(tmp_path.rglob("*.begun"))


def one_chunk_a_life(points: list[Params], device: torch.device) -> list[Result]:
    """Fail in the second chunk of every process."""
    sizes.append(len(points))
    if executor._progress["chunks"] == 1:
        raise KeyboardInterrupt
    return [{"square": int(point["x"]) ** 2} for point in points]


def test_chunks_stay_as_large_as_a_life_allows(lives: Callable[[Trial, int], int]) -> None:
    sizes.clear()
    assert lives(one_chunk_a_life, 4) == 3
    assert sizes == [4, 4, 4, 4, 4], "chunks keep their size if a process finished one"


def resumed(points: list[Params], device: torch.device) -> list[Result]:
    """Fail after one of three steps in every process."""
    folder = scratch()
    assert folder is not None
    with Checkpoint(folder / "steps.pt") as steps:
        state = steps.load() or {"done": 0, "points": len(points)}
        assert state["points"] == len(points), "the folder of another chunk"
        if state["done"] < 3:
            steps.save({**state, "done": state["done"] + 1})
            raise KeyboardInterrupt
    return [{"square": int(point["x"]) ** 2} for point in points]


def test_chunks_with_checkpoints_are_begun_again_as_they_were(
    lives: Callable[[Trial, int], int], tmp_path: Path
) -> None:
    assert lives(resumed, 6) == 7, "three steps per chunk, less the processes that also began the next chunk"
    assert not list(tmp_path.rglob("*.scratch"))


def test_a_killed_process_leaves_word_and_a_live_one_keeps_its_folder(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from lazyscope.lab.scratch import lent\n"
        "with lent(Path(sys.argv[1]) / 'a.scratch', {'points': [1]}) as folder:\n"
        "    folder.mkdir(); print(folder.name, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "a.scratch\n"
        assert list(lost(tmp_path)) == []
        with lent(tmp_path / "a.scratch", {}) as own:
            assert own.name == "a-2.scratch"
        process.send_signal(signal.SIGKILL)
    assert list(lost(tmp_path)) == [(tmp_path / "a.scratch", {"points": [1]})]
    with lent(tmp_path / "a.scratch", {}) as own:
        assert own.name == "a.scratch"
    assert list(lost(tmp_path)) == []
    (tmp_path / "b.begun").write_bytes(b"\xff{")
    assert list(lost(tmp_path)) == []


both = threading.Barrier(2)


def trains(points: list[Params], device: torch.device) -> list[Result]:
    """Run twice at once, with checkpoints of 32 MB; the second run ends after the first has stored its results."""
    folder = scratch()
    assert folder is not None
    second = folder.name.endswith("-2.scratch")
    with Checkpoint(folder / "training.pt") as file:
        file.save({"weights": torch.full((8_000_000,), float(second)), "second": second})
        both.wait(30)
        if second:
            time.sleep(0.3)
        file.save({"weights": torch.full((8_000_000,), float(second)), "second": second})
    state = Checkpoint(folder / "training.pt").load()
    assert state is not None
    assert state["second"] == second
    return [{"y": 1} for _ in points]


def test_two_runs_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    task = Task("toy", trains, [{"x": 1}], CPU, "code", Store(tmp_path), {})
    errors: list[BaseException] = []

    def measure() -> None:
        try:
            task.run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=measure) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [path.suffix for path in (tmp_path / "toy" / "trials").iterdir()] == [".npz"]


STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started with SIGINT ignored
from lazyscope.lab.ending import interruptible
with interruptible("stopped, at last"):
    words = ["started"]
    while True:
        try:
            while words:
                print(words.pop(), flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            pass  # as a library may, or compiled code that does not look
"""


def test_an_interrupt_ends_even_a_stubborn_process() -> None:
    command = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=30)
        assert time.monotonic() - start < 4, "two seconds, with a margin for a busy machine"
    assert process.returncode == 130
    assert complaints == "stopped, at last\n"
