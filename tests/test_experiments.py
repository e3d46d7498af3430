"""Every experiment is declared in full; at quick scale it runs, its claims hold and can fail, and it has a figure."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import lazyscope.experiments
from lazyscope.experiments import experiments
from lazyscope.lab import Experiment, Result, Trial, Trials
from lazyscope.lab.experiment import SCALES
from lazyscope.lab.run import records, run
from lazyscope.lab.store import Store

FILES = sorted(path.stem for path in Path(lazyscope.experiments.__file__).parent.glob("[!_]*.py"))
each_experiment = pytest.mark.parametrize("experiment", experiments().values(), ids=lambda e: e.name)


def test_every_file_is_an_experiment() -> None:
    assert sorted(name.replace("-", "_") for name in experiments()) == FILES


@each_experiment
def test_declaration(experiment: Experiment) -> None:
    assert experiment.source
    assert experiment.title
    assert set(experiment.cost) == set(SCALES)
    assert len(experiment.grid("paper")) >= 1


@each_experiment
def test_caption_is_two_sentences_and_names_bands_and_bars(experiment: Experiment) -> None:
    assert len(re.findall(r"[.?!](?=\s|$)", experiment.caption)) == 2
    assert experiment.caption.endswith(".")
    code = _code(experiment)
    for call, word in (("fill_between(", "band"), ("errorbar(", "error bars"), ("dots(", "error bars")):
        assert call not in code or word in experiment.caption


@each_experiment
def test_title_does_not_state_the_size_of_the_source(experiment: Experiment) -> None:
    assert not re.search(r"VGG-11|[Tt]wo hundred", experiment.title + experiment.caption)


@each_experiment
def test_a_claim_with_a_number_of_the_source_prints_the_difference(experiment: Experiment) -> None:
    texts = [ast.unparse(node) for node in ast.walk(ast.parse(_code(experiment))) if _is_claim(node)]
    assert texts or "from lazyscope.experiments.convex import" in _code(experiment), "they share the claims of convex"
    for text in texts:
        assert "±" not in text.partition(",")[0] or "against(" in text or " from " in text or "shown" in text, text


def _code(experiment: Experiment) -> str:
    return Path(inspect.getfile(inspect.unwrap(experiment.claims))).read_text(encoding="utf-8")


def _is_claim(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Claim"


# Here the quickest one; all of them in `make slow`, and in `make demo`, where a claim that fails is an error too. Their
# parts have tests of their own in `tests/experiments`.
@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.name != "kernel-limit" else [])
        for each in experiments().values()
    ],
)
def test_quick_run(experiment: Experiment, tmp_path: Path) -> None:
    store = Store(tmp_path)
    outcome = run(experiment, "quick", store, device=torch.device("cpu"))
    assert outcome.claims
    assert [claim for claim in outcome.claims if not claim.holds] == []
    assert [c.text for c in outcome.claims if "±" in c.text and not re.search(r"[+-][\d.e-]+%? from", c.measured)] == []
    assert outcome.png.startswith(b"\x89PNG")
    assert b"<svg" in outcome.svg
    trials = Trials(record.trial for record in records(experiment, "quick", store) if record is not None)
    assert not _holding_on_nan(experiment, trials), "a claim that holds on NaN cannot fail"


def _holding_on_nan(experiment: Experiment, trials: Trials) -> list[str]:
    """Return the claims that still hold if every measured float is NaN. None of them may raise an error instead."""
    spoilt = Trials(Trial(trial.params, _spoil(trial.result)) for trial in trials)
    with np.errstate(all="ignore"):
        return [claim.text for claim in experiment.claims(spoilt) if claim.holds]


def _spoil(result: Result) -> Result:
    return {
        name: np.full_like(value, np.nan) if np.asarray(value).dtype.kind == "f" else value
        for name, value in result.items()
    }
