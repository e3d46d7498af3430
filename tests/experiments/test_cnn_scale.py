"""Figure 3(a): the claims depend on the trials, a small trial is correct, and bad data give a one-line error."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lazyscope import cli
from lazyscope.data.one_hot import square
from lazyscope.errors import DataError
from lazyscope.experiments.cnn_scale import (
    PATH,
    SETTINGS,
    SOLVE,
    TRAIN,
    claims,
    figure,
    grid,
    sgd_times,
    trial,
)
from lazyscope.lab.experiment import Params, Result, Trial, Trials
from lazyscope.lab.scratch import lent
from lazyscope.lab.style import style

CPU = torch.device("cpu")
LAZY = {1.0: (0.86, 0.9), 10.0: (0.71, 0.95), 100.0: (0.58, 0.98)}


def planted(**changes: tuple[float, float]) -> Trials:
    """Recorded (test accuracy, stability) for each α of the paper, with changes at "1", "1e5", "inf", …."""
    points = grid("paper")
    table = {float(point["alpha"]): LAZY.get(float(point["alpha"]), (0.567, 1.0)) for point in points}
    table |= {float(alpha.replace("at_", "")): pair for alpha, pair in changes.items()}
    trials = []
    for point in points:
        test, stability = table[float(point["alpha"])]
        worse = float(point["alpha"]) < 1 or point.get("lr") == 10.0
        result: Result = {
            "test_accuracy": math.nan if worse else test - 0.1 * (point.get("lr") == 0.1),
            "train_accuracy": test + 0.01, "stability": stability, "status": "diverged" if worse else "horizon",
            "test_loss": 0.06, "train_loss": math.nan if worse else 0.05,
            "images": 50_000, "curve_loss": np.geomspace(0.09, 0.05, 70),
        }  # fmt: skip
        if point["kind"] == SOLVE:
            times = np.geomspace(0.5, 5e6, 15)
            flow = {"flow_time": times, "flow_train_accuracy": path_accuracy(times), "flow_test_accuracy": times * 0}
            result |= {**flow, "train_accuracy": 0.995, "test_accuracy": 0.58, "iterations": 180}
        if point["kind"] == PATH:
            curve = path_accuracy(sgd_times(point, 50_000))
            curve[::2] = math.nan
            result |= {"curve_train_accuracy": curve, "curve_test_accuracy": 0 * curve}
        trials.append(Trial(point, result))
    return Trials(trials)


def path_accuracy(times: np.ndarray) -> np.ndarray:
    return np.asarray(0.1 + 0.05 * np.log(1 + times))


def held(trials: Trials) -> list[bool]:
    return [claim.holds for claim in claims(trials)]


def changed(kind: str, **results: float | str | np.ndarray) -> Trials:
    return Trials(Trial(t.params, {**t.result, **results} if t.params["kind"] == kind else t.result) for t in planted())


def test_claims_can_fail() -> None:
    assert held(planted()) == [True] * 10
    assert held(planted(at_1=(0.83, 0.9)))[0] is False
    assert held(planted(at_1e4=(0.63, 1.0)))[2:4] == [False, False]
    assert held(planted(at_1e3=(0.58, 0.999)))[2:4] == [True, False], "1.3 points off the limit"
    assert held(planted(at_1e5=(0.567, 0.985)))[6] is False
    assert held(planted(at_10=(0.71, 0.85)))[6] is False, "the accuracy must increase"
    assert held(changed(TRAIN, status="diverged"))[1] is False
    assert held(changed(TRAIN, train_loss=0.05))[1] is False, "α < 1 learns"
    assert held(changed(TRAIN, train_loss=0.0901))[1] is True, "a constant"
    assert held(changed(TRAIN, train_accuracy=0.99))[4] is False
    assert held(changed(TRAIN, train_loss=0.01))[5] is False
    assert held(changed(SOLVE, train_accuracy=0.98))[7] is False
    assert held(changed(SOLVE, test_accuracy=0.7))[8] is False
    assert held(changed(SOLVE, flow_train_accuracy=np.zeros(15)))[9] is False


def test_the_figure_shows_every_scale() -> None:
    with style():
        page = figure(planted())
    labels = [text.get_text() for text in page.axes[0].get_xticklabels()]
    assert labels == [f"$10^{{{k}}}$" for k in range(8)] + [r"$\infty$", "solved"]
    assert len(page.axes) == 4


def test_the_paper_setting() -> None:
    points = [point for point in grid("paper") if point["kind"] == TRAIN and point["seed"] == 1]
    assert [float(point["alpha"]) for point in points] == [0.1, 0.3, *(10.0**k for k in range(8)), math.inf]
    assert {(point["epochs"], point["batch"], point["lr"]) for point in points} == {(70, 128, 1.0)}
    setting = SETTINGS["VGG-11 on CIFAR-10"]
    assert (setting.padding, setting.flips) == (4, True)


def test_the_loss_is_averaged_over_outputs_and_samples() -> None:
    outputs, labels = torch.randn(6, 10), torch.arange(6)
    target = torch.nn.functional.one_hot(labels, 10)
    torch.testing.assert_close(square(outputs, labels), (outputs - target).square().mean())
    assert float(square(torch.zeros(3, 10), torch.zeros(3, dtype=torch.long))) == pytest.approx(0.1)


def test_a_trial_is_the_same_with_and_without_a_checkpoint(tmp_path: Path) -> None:
    point: Params = {**next(p for p in grid("quick") if p["alpha"] == 1e3), "epochs": 1}
    (first,) = trial([point], CPU)
    with lent(tmp_path / "scratch", {}):
        (second,) = trial([point], CPU)
    assert (tmp_path / "scratch").exists(), "the code that stores the result removes the folder"
    costs = {"device_seconds", "setup_seconds", "images_per_second", "peak_memory"}
    for name, value in first.items():
        if name not in costs:
            np.testing.assert_array_equal(value, second[name], err_msg=name)
    assert first.keys() >= costs
    assert 0.1 < float(first["test_accuracy"]) < 1
    assert np.asarray(first["stability_relu"]).shape == (4,)
    assert np.asarray(first["stability_pool"]).shape == (3,)
    assert float(first["stability"]) == pytest.approx(np.asarray(first["stability_relu"]).mean())
    assert 0 < float(first["displacement"]) < 1
    with lent(tmp_path / "scratch", {}), pytest.raises(KeyError):
        trial([{**point, "setting": "none"}], CPU)


def test_the_solved_model_is_at_the_end_of_its_flow() -> None:
    (found,) = trial([{**grid("quick")[0], "iterations": 12}], CPU)
    assert found["iterations"] == 12
    assert float(found["train_loss"]) == pytest.approx(np.asarray(found["flow_train_loss"])[-1], rel=1e-3)
    # at the end the loss is constant up to the rounding of outputs in float32
    assert (np.diff(np.asarray(found["flow_train_loss"])) <= 1e-9).all()
    assert 0.5 < float(found["test_accuracy"]) < 1


def test_a_training_that_diverges_is_a_status() -> None:
    (found,) = trial([{**next(p for p in grid("quick") if p["alpha"] == 0.1), "epochs": 2}], CPU)
    assert found["status"] == "diverged"
    assert math.isnan(float(found["test_accuracy"]))


def test_without_cifar10_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAZYSCOPE_DATA", raising=False)
    with pytest.raises(DataError, match="download"):
        trial(grid("paper")[:1], CPU)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x01" * 3073])
def test_bad_data_are_one_sentence_on_the_command_line(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAZYSCOPE_DATA", "")  # the command sets it, and the test restores it
    data = tmp_path / "data"
    data.mkdir()
    for i in range(1, 6):
        (data / f"data_batch_{i}.bin").write_bytes(content)
    arguments = ("reproduce", "cnn-scale", "--scale", "paper", "--device", "cpu", "--data-dir", str(data))
    monkeypatch.setattr(sys, "argv", ["lazyscope", *arguments, "--out", str(tmp_path / "out")])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert "Traceback" not in out + err
    (line,) = err.strip().splitlines()
    assert "DataError" in line
    assert str(data) in line
    assert "download it again" in line
