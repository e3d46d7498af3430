"""Trials are accessed by name, and errors list the available names."""

from __future__ import annotations

import numpy as np
import pytest

from lazyscope.errors import ExperimentError
from lazyscope.lab import Trial, Trials

TRIALS = Trials(
    Trial({"tau": tau, "seed": seed}, {"loss": tau * seed, "path": np.full(3, seed)})
    for tau in (0.1, 2.0)
    for seed in range(4)
)


def test_columns_are_stacked() -> None:
    assert TRIALS.column("path").shape == (8, 3)
    np.testing.assert_allclose(TRIALS.column("loss"), TRIALS.column("tau") * TRIALS.column("seed"))


def test_where_selects() -> None:
    assert len(TRIALS.where(tau=2.0)) == 4
    (only,) = TRIALS.where(tau=2.0, seed=3)
    assert only.result["loss"] == 6.0
    assert TRIALS[1:3].column("seed").tolist() == [1, 2]
    assert TRIALS[0].params == {"tau": 0.1, "seed": 0}


def test_unknown_names_are_told() -> None:
    with pytest.raises(ExperimentError, match=r"'los'.*loss, path, seed, tau"):
        TRIALS.column("los")
    with pytest.raises(ExperimentError, match=r"'taus'.*seed, tau"):
        TRIALS.where(taus=1.0)
    with pytest.raises(ExperimentError, match="no trial"):
        TRIALS.where(tau=3.0).column("loss")
