"""The scratch folder of a trial is kept if the trial is interrupted, and removed when its results are stored."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from lazyscope.errors import ExperimentError
from lazyscope.lab import Experiment, Params, Result
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.report import write_report
from lazyscope.lab.run import run
from lazyscope.lab.scratch import scratch
from lazyscope.lab.store import Store

CPU = torch.device("cpu")


def resumable(points: list[Params], device: torch.device) -> list[Result]:
    """Fail half-way the first time, and continue from the written state the second time."""
    folder = scratch()
    assert folder is not None
    half = folder / "half.txt"
    if not half.exists():
        folder.mkdir()
        half.write_text(str(points[0]["x"]))
        raise ZeroDivisionError("cut short")
    assert half.read_text() == str(points[0]["x"]), "the folder of another trial"
    return [{"square": int(point["x"]) ** 2} for point in points]


def test_a_trial_finds_its_folder_again(tmp_path: Path, toy: Experiment) -> None:
    experiment = dataclasses.replace(toy, trial=resumable)
    store = Store(tmp_path)
    with pytest.raises(ExperimentError, match="cut short"):
        run(experiment, "quick", store, device=CPU)
    assert len(list(tmp_path.rglob("half.txt"))) == 6, "one per chunk"
    assert run(experiment, "quick", store, device=CPU).holds
    assert not list(tmp_path.rglob("*.scratch"))
    assert scratch() is None


def costly(points: list[Params], device: torch.device) -> list[Result]:
    """A stand-in for a training run in the report."""
    costs: Result = {"device_seconds": 90.0, "images_per_second": 12345.6, "peak_memory": 3 * 2**30}
    return [{"square": int(point["x"]) ** 2, **costs} for point in points]


def test_the_report_shows_what_trainings_cost(tmp_path: Path, toy: Experiment) -> None:
    outcome = run(dataclasses.replace(toy, trial=costly), "quick", Store(tmp_path), device=CPU)
    assert [cost.point for cost in outcome.runs][:2] == ["x = 0", "x = 1"]
    assert Outcome.load(tmp_path / "toy" / "quick.json") == outcome
    page = write_report(tmp_path).read_text()
    for expected in ("cost of each of 12 training runs", "12,346", "3.00 GiB", "1.5 min", "18.0 min of training steps"):
        assert expected in page


def test_outcomes_written_before_there_were_costs_are_read(tmp_path: Path, toy: Experiment) -> None:
    outcome = run(toy, "quick", Store(tmp_path), device=CPU)
    path = tmp_path / "toy" / "quick.json"
    table = json.loads(path.read_text())
    for name in ("runs", "basis", "code", "checksum"):
        del table[name]
    path.write_text(json.dumps(table))
    assert Outcome.load(path) == outcome
    assert "training runs" not in write_report(tmp_path).read_text()
