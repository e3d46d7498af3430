"""A failure in one experiment does not affect the others: they run, and the report is written."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from lazyscope.errors import DataError, ExperimentError, StoreError
from lazyscope.lab import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.failure import CrashedExperiment
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.report import refresh, write_report
from lazyscope.lab.run import run, run_all
from lazyscope.lab.store import Key, Record, Store

CPU = torch.device("cpu")


def no_grid(scale: str) -> list[Params]:
    raise ZeroDivisionError("no grid")


def no_trial(points: list[Params], device: torch.device) -> list[Result]:
    raise ZeroDivisionError("no trial")


def no_data(points: list[Params], device: torch.device) -> list[Result]:
    raise DataError("There are no data; fetch some.")


def no_room(points: list[Params], device: torch.device) -> list[Result]:
    raise StoreError("A kernel of the trial's own cannot be written.")


def leaves(points: list[Params], device: torch.device) -> list[Result]:
    sys.exit(0)


def no_figure(trials: Trials) -> Figure:
    raise ZeroDivisionError("no figure")


def leaving(trials: Trials) -> Figure:
    sys.exit("done")


def no_claims(trials: Trials) -> list[Claim]:
    raise ZeroDivisionError("no claims")


def no_such_column(trials: Trials) -> list[Claim]:
    return [Claim("", "", str(trials.column("nothing")), True)]


@pytest.mark.parametrize(
    ("changes", "sentence", "crash"),
    [
        ({"grid": no_grid}, "The grid of 'bad' raised ZeroDivisionError: no grid", True),
        ({"trial": no_trial}, "The trial of 'bad' at x=0; x=1, and 5 more, raised ZeroDivisionError: no trial", True),
        ({"trial": no_data}, "raised DataError: There are no data; fetch some.", False),
        ({"trial": no_room}, "raised ExperimentError: A kernel of the trial's own cannot be written", False),
        ({"trial": leaves}, r"raised RuntimeError: it called sys\.exit\(0\)", True),
        ({"figure": no_figure}, "The figure of 'bad' raised ZeroDivisionError: no figure", True),
        ({"figure": leaving}, r"The figure of 'bad' raised RuntimeError: it called sys\.exit\('done'\)", True),
        ({"claims": no_claims}, "The claims of 'bad' raised ZeroDivisionError: no claims", True),
        ({"claims": no_such_column}, "The claims of 'bad' raised ExperimentError: Not every trial has", True),
    ],
)
def test_the_others_go_on(
    tmp_path: Path, toy: Experiment, changes: dict[str, object], sentence: str, crash: bool
) -> None:
    bad = dataclasses.replace(toy, name="bad", **changes)  # type: ignore[arg-type]
    last = dataclasses.replace(toy, name="last")
    failed, held = run_all([bad, last], "quick", Store(tmp_path), device=CPU)
    assert isinstance(failed, CrashedExperiment) == crash
    with pytest.raises(ExperimentError, match=rf"{sentence}.* \(see .*failure\.txt\); .*fix it and run the same"):
        raise failed  # type: ignore[misc]
    assert "Traceback" in (tmp_path / "bad" / "failure.txt").read_text()
    assert isinstance(held, Outcome)
    assert held.holds
    assert "1 of 1 claims hold" in write_report(tmp_path).read_text()


def test_a_report_drawn_anew_does_not_stop_either(tmp_path: Path, toy: Experiment) -> None:
    others = [dataclasses.replace(toy, name=name) for name in ("a", "b", "c")]
    run_all(others, "quick", Store(tmp_path), device=CPU)
    spoilt = [dataclasses.replace(others[0], figure=no_figure), dataclasses.replace(others[1], grid=no_grid), others[2]]
    (tmp_path / "c" / "quick.json").unlink()
    failures = refresh(spoilt, Store(tmp_path))
    assert [str(failure).partition(" raised")[0] for failure in failures] == ["The figure of 'a'", "The grid of 'b'"]
    assert (tmp_path / "c" / "quick.json").exists()


def test_a_store_that_cannot_be_written_ends_the_sweep(
    tmp_path: Path, toy: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a trial cannot be stored, the sweep stops, as later trials could not be stored either."""
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log.txt"))
    write = Store.write

    def full(self: Store, key: Key, record: Record) -> None:
        if key.params["x"] == 4:
            raise StoreError("The disk is full.")
        write(self, key, record)

    monkeypatch.setattr(Store, "write", full)
    with pytest.raises(StoreError, match="The disk is full"):
        run_all([toy, dataclasses.replace(toy, name="last")], "quick", Store(tmp_path), device=CPU)
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 6, "three chunks of two"


@pytest.mark.parametrize("name", ["../../escaped", "a/b", "..", ".hidden", "", " ", "C:\\x", "new\nline"])
def test_names_that_leave_the_folder_of_results_are_refused(toy: Experiment, name: str) -> None:
    with pytest.raises(ExperimentError, match=r"cannot be named .*; use a name without slashes"):
        dataclasses.replace(toy, name=name)
    with pytest.raises(ExperimentError, match="The chunk of 'toy' is 0; it must be at least 1"):
        dataclasses.replace(toy, chunk=0)


def test_the_report_shows_markup_as_text(tmp_path: Path, toy: Experiment) -> None:
    evil = "<script>alert('α & ω')</script>"
    claimed = dataclasses.replace(
        toy, source=evil, title=evil, claims=lambda trials: [Claim(evil, evil, evil, bool(np.True_))]
    )
    run(claimed, "quick", Store(tmp_path), device=CPU)
    page = write_report(tmp_path).read_text()
    assert "<script>alert" not in page
    assert page.count("<script") <= 1, "only that of the filter"
    assert page.count("&lt;script&gt;alert(&#39;α &amp; ω&#39;)&lt;/script&gt;") >= 6


def test_a_judgement_of_numpy_is_kept(tmp_path: Path, toy: Experiment) -> None:
    claims = [Claim("a", "b", "c", True)]
    object.__setattr__(claims[0], "holds", np.True_)
    outcome = run(dataclasses.replace(toy, claims=lambda trials: claims), "quick", Store(tmp_path), device=CPU)
    assert outcome.claims[0].holds is True
    assert Outcome.load(tmp_path / "toy" / "quick.json") == outcome
