"""Which records of the gallery are made again, and on which machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from docs import gallery
from tests.command import command_in
from tests.lab.toy import EXPERIMENT as TOY

from lazyscope import cli
from lazyscope.experiments import experiments
from lazyscope.lab import Experiment, Params, Result
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.record import is_current, needs_gpu, plan
from lazyscope.lab.run import run
from lazyscope.lab.store import Store

TOY_GPU = replace(TOY, name="toy-gpu", cost={"quick": "1 s", "paper": "1 min on one GPU"})
CPU = torch.device("cpu")


def other_trial(points: list[Params], device: torch.device) -> list[Result]:
    return [{"square": int(point["x"]) ** 2, "curve": np.zeros(5), "label": "other"} for point in points]


def test_a_record_is_current_until_its_code_changes(tmp_path: Path) -> None:
    assert not is_current(TOY, tmp_path)
    run(TOY, "paper", Store(tmp_path), device=CPU)
    assert is_current(TOY, tmp_path)
    assert not is_current(replace(TOY, trial=other_trial), tmp_path)
    (tmp_path / TOY.name / "paper.svg").write_bytes(b"damaged")
    assert not is_current(TOY, tmp_path)


def test_the_plan_leaves_out_what_is_current_and_what_needs_a_gpu(tmp_path: Path) -> None:
    assert plan([TOY, TOY_GPU], tmp_path, gpu=True).wanted == (TOY, TOY_GPU)
    run(TOY, "paper", Store(tmp_path), device=CPU)
    todo = plan([TOY, TOY_GPU], tmp_path, gpu=False)
    assert (todo.wanted, todo.current, todo.skipped) == ((), (TOY,), (TOY_GPU,))


def test_figures_of_convolutional_nets_need_a_gpu() -> None:
    needy = {name for name, experiment in experiments().items() if needs_gpu(experiment)}
    assert {"cnn-scale", "cnn-wide", "cnn-spectrum"} <= needy
    assert not {"rates", "convex", "cover", "adaptivity"} & needy


def test_record_makes_each_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = command_in(tmp_path, monkeypatch, capsys)
    monkeypatch.setattr(cli, "experiments", lambda: {TOY.name: TOY, TOY_GPU.name: TOY_GPU})
    monkeypatch.setattr(cli, "find", lambda name: {TOY.name: TOY, TOY_GPU.name: TOY_GPU}[name])
    first = command("record", "--device", "cpu", "--out", str(tmp_path))
    assert first.code == 0
    assert "skipped: toy-gpu needs a GPU (1 min on one GPU)" in first.out
    assert "0 records are current, 1 will be made, 1 are skipped." in first.out
    assert Outcome.load(tmp_path / TOY.name / "paper.json").holds
    again = command("record", "--device", "cpu", "--out", str(tmp_path))
    assert "1 records are current, 0 will be made, 1 are skipped." in again.out


@pytest.mark.parametrize("experiment", [TOY, replace(TOY, trial=other_trial)], ids=["current", "changed"])
def test_the_gallery_marks_stale_records(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(TOY, "paper", Store(tmp_path), device=CPU)
    monkeypatch.setattr(gallery, "OUTCOMES", tmp_path)
    assert (gallery.STALE in gallery.entry(experiment)) == (experiment is not TOY)
