"""Runs store trials as they finish, reuse stored trials, survive failing trials, and write reports."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lazyscope.errors import ExperimentError
from lazyscope.lab import Claim, Experiment, Params, Result
from lazyscope.lab.outcome import Outcome, View
from lazyscope.lab.report import refresh, write_report
from lazyscope.lab.run import evaluate, run, run_all
from lazyscope.lab.store import DamagedFile, Store

CPU = torch.device("cpu")
POINTS = 12


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the toy logs every computed point."""
    path = tmp_path / "log.txt"
    path.touch()
    monkeypatch.setenv("TOY_LOG", str(path))
    return path


def computed(log: Path) -> list[int]:
    return sorted(int(line.split()[0]) for line in log.read_text().splitlines())


def test_run_stores_draws_and_judges(tmp_path: Path, toy: Experiment, log: Path) -> None:
    heard: list[tuple[int, int]] = []
    store = Store(tmp_path / "results")
    outcome = run(toy, "quick", store, device=CPU, progress=lambda *now: heard.append(now))
    assert outcome.holds
    assert computed(log) == list(range(POINTS))
    assert heard == [(done, POINTS) for done in range(0, POINTS + 1, toy.chunk)]
    assert outcome.png.startswith(b"\x89PNG")
    assert b"<svg" in outcome.svg
    assert outcome.provenance.keys() >= {"command", "commit", "lazyscope", "torch", "device", "date"}
    assert Outcome.load(store.root / "toy" / "quick.json") == outcome


def test_stored_trials_are_not_computed_again(tmp_path: Path, toy: Experiment, log: Path) -> None:
    store = Store(tmp_path / "results")
    first = run(toy, "quick", store, device=CPU)
    assert run(toy, "quick", store, device=CPU) == first
    assert computed(log) == list(range(POINTS))
    run(toy, "paper", store, device=CPU)  # the paper grid contains the quick grid
    assert computed(log) == list(range(2 * POINTS))


def test_only_a_damaged_trial_is_computed_again(tmp_path: Path, toy: Experiment, log: Path) -> None:
    store = Store(tmp_path / "results")
    run(toy, "quick", store, device=CPU)
    log.write_text("")
    victim = sorted(store.root.rglob("*.npz"))[5]
    victim.write_bytes(victim.read_bytes()[:100])
    with pytest.warns(DamagedFile, match=victim.name):
        outcome = run(toy, "quick", store, device=CPU)
    assert outcome.holds
    assert len(computed(log)) == 1


def test_a_failing_trial_stops_no_other(
    tmp_path: Path, toy: Experiment, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_FAIL", "3")
    store = Store(tmp_path / "results")
    with pytest.raises(ExperimentError, match=r"'toy' at x=2; x=3 raised ZeroDivisionError: as asked"):
        run(toy, "quick", store, device=CPU)
    assert "in _square" in (store.root / "toy" / "failure.txt").read_text()
    assert len(list(store.root.rglob("*.npz"))) == POINTS - toy.chunk
    monkeypatch.delenv("TOY_FAIL")
    log.write_text("")
    assert run(toy, "quick", store, device=CPU).holds
    assert computed(log) == [2, 3]


def test_several_experiments_are_one_sweep(tmp_path: Path, toy: Experiment, log: Path) -> None:
    other = dataclasses.replace(toy, name="other")
    wrong = dataclasses.replace(toy, name="wrong", grid=lambda scale: [])
    failing = dataclasses.replace(toy, name="failing", trial=bad_count)
    heard: list[tuple[str, int, int]] = []
    ended = run_all(
        [toy, wrong, failing, other, toy],
        "quick",
        Store(tmp_path),
        device=CPU,
        progress=lambda experiment, *now: heard.append((experiment.name, *now)),
    )
    assert [type(one) for one in ended] == [Outcome, ExperimentError, ExperimentError, Outcome, Outcome]
    assert ended[0] == ended[4]
    assert "empty" in str(ended[1])
    assert "1 results for 2 points" in str(ended[2])
    assert computed(log) == sorted(2 * list(range(POINTS))), "once per name"
    assert [name for name, *now in heard if now == [POINTS, POINTS]] == ["toy", "other", "toy"], "sequentially"


def bad_count(points: list[Params], device: torch.device) -> list[Result]:
    return [{}]


def test_wrong_declarations_are_told(tmp_path: Path, toy: Experiment) -> None:
    def attempt(scale: str = "quick", **changes: object) -> None:
        run(dataclasses.replace(toy, **changes), scale, Store(tmp_path), device=CPU)  # type: ignore[arg-type]

    with pytest.raises(ExperimentError, match="no scale 'huge'"):
        attempt("huge")
    with pytest.raises(ExperimentError, match="empty"):
        attempt(grid=lambda scale: [])
    with pytest.raises(ExperimentError, match="twice"):
        attempt(grid=lambda scale: [{"x": 1}, {"x": 1}])
    with pytest.raises(ExperimentError, match="1 results for 2 points"):
        attempt(trial=bad_count)


def test_a_file_edited_during_the_run_does_not_lose_it(
    tmp_path: Path, toy: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter(["before", "after"])
    monkeypatch.setattr("lazyscope.lab.run.fingerprint", lambda experiment: next(codes))
    assert run(toy, "quick", Store(tmp_path), device=CPU).holds


def test_evaluate_needs_all_trials(tmp_path: Path, toy: Experiment) -> None:
    store = Store(tmp_path)
    with pytest.raises(ExperimentError, match="12 of 12 trials"):
        evaluate(toy, "quick", store)


def test_report_is_one_file_with_everything(tmp_path: Path, toy: Experiment) -> None:
    store = Store(tmp_path)
    assert "There are no results yet" in write_report(store.root).read_text()
    for scale in ("quick", "paper"):
        run(toy, scale, store, device=CPU)
    page = write_report(store.root).read_text()
    assert "2 of 2 claims hold" in page
    assert page.count("data:image/svg+xml;base64,") == 2
    for expected in ("Euclid", "squares grow with exponent 2", torch.__version__, "24 trials"):
        assert expected in page
    for outside in ("<script src", 'src="http', 'href="http', "url("):
        assert outside not in page


def test_the_report_marks_differences_from_the_source_and_says_when_it_states_nothing(
    tmp_path: Path, toy: Experiment
) -> None:
    made = [
        Claim("slope", "1/α < 1", "s = -0.928 … -0.9, +0.0721 … +0.0996 from -1 (R² ≥ 0.986)", True),
        Claim("converged", "", "residuals ≤ 4e-05", True),
        Claim("accuracy", "82.3 %", "80.3 %, -2.0 points", True),
    ]
    store = Store(tmp_path)
    run(dataclasses.replace(toy, claims=lambda trials: made), "quick", store, device=CPU)
    page = write_report(store.root).read_text()
    assert re.findall(r'<b class="difference">(.*?)</b>', page) == ["+0.0721 … +0.0996 from -1", "-2.0 points"]
    assert "1/α &lt; 1" in page
    assert "not in the source: a check of the computation" in page


def test_refresh_redraws_from_stored_trials(tmp_path: Path, toy: Experiment, log: Path) -> None:
    store = Store(tmp_path / "results")
    run(toy, "quick", store, device=CPU)
    log.write_text("")
    refresh([dataclasses.replace(toy, title="Squares, again", claims=lambda trials: [])], store)
    table = json.loads((store.root / "toy" / "quick.json").read_text())
    assert (table["title"], table["claims"]) == ("Squares, again", [])
    assert not (store.root / "toy" / "paper.json").exists()
    assert computed(log) == []


def test_damaged_outcome_is_told(tmp_path: Path, toy: Experiment, log: Path) -> None:
    run(toy, "quick", Store(tmp_path), device=CPU)
    log.write_text("")
    (tmp_path / "toy" / "quick.json").write_text("{")
    with pytest.warns(DamagedFile, match="lazyscope reproduce toy --scale quick"):
        assert "There are no results yet" in write_report(tmp_path).read_text()
    assert run(toy, "quick", Store(tmp_path), device=CPU).holds
    assert computed(log) == []


def test_a_figure_is_drawn_again_only_when_something_has_changed(
    tmp_path: Path, toy: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    outcome = View.outcome

    def counted(view: View) -> Outcome:
        drawn.append(view.experiment.title)
        return outcome(view)

    monkeypatch.setattr(View, "outcome", counted)
    store = Store(tmp_path)
    first = run(toy, "quick", store, device=CPU)
    assert run(toy, "quick", store, device=CPU) == first
    assert drawn == ["Squares"]
    run(dataclasses.replace(toy, title="Anew"), "quick", store, device=CPU)
    run(dataclasses.replace(toy, title="Anew", claims=lambda trials: []), "quick", store, device=CPU)
    victim = next(tmp_path.rglob("*.npz"))
    victim.unlink()
    run(toy, "quick", store, device=CPU)
    (tmp_path / "toy" / "quick.png").write_bytes(b"another")
    assert run(toy, "quick", store, device=CPU).png == first.png
    assert drawn == ["Squares", "Anew", "Anew", "Squares", "Squares"]


def test_figures_are_the_same_file_each_time(tmp_path: Path, toy: Experiment) -> None:
    first = run(toy, "quick", Store(tmp_path / "a"), device=CPU)
    second = run(toy, "quick", Store(tmp_path / "b"), device=CPU)
    assert (first.png, first.svg) == (second.png, second.svg)
    assert np.isfinite(first.seconds)
