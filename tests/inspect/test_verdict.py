"""The verdict agrees with the measurements and the theory; budgets and numbers are correct."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import nn

from lazyscope.inspect import Budget, Report, Verdict, Word, inspect
from lazyscope.inspect.budget import FEWEST, draw
from lazyscope.inspect.course import Course
from lazyscope.inspect.probe import Drift
from lazyscope.inspect.reading import Reading, percent, plain, short
from lazyscope.inspect.verdict import FEATURE_GAP, LAZY_GAP, judge, word_of
from lazyscope.loss import Square
from lazyscope.model.transform import Symmetrised

CPU = torch.device("cpu")


def course(unexplained: float, status: str = "horizon", apart: float = 0.0) -> Course:
    drift = Drift(5, 0.1, 0.1, None, None)
    return Course(1.0, (0, 5), (1.0, 0.5), (0.0, 0.1), unexplained, apart, (0.0, 0.1), status, (drift,))


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 2))
def test_the_word_follows_the_part_that_the_tangent_misses(gap: float) -> None:
    word = word_of(course(gap))
    assert (word is Word.LAZY) == (gap <= LAZY_GAP)
    assert (word is Word.FEATURES) == (gap >= FEATURE_GAP)
    assert word_of(course(gap, "diverged")) is Word.UNSTABLE
    assert word_of(course(gap, apart=0.06)) is not Word.LAZY


def judged(scale: float, width: int) -> Report:
    """A symmetrised ReLU network with weights scaled by τ, on the data of a teacher."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 2)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.relu(x[:, :2]) - torch.relu(x[:, 2:4])
    return inspect(Symmetrised(net), x, y, Square(), alphas=(1.0,), steps=60, seconds=1)


judges = pytest.mark.xdist_group("judges")
"""The tests of one grid of reports, which is computed once."""


@pytest.fixture(scope="module")
def grid() -> dict[tuple[float, int], Report]:
    return {(scale, width): judged(scale, width) for scale in (0.2, 1.0, 5.0) for width in (16, 256)}


@judges
def test_kappa_orders_the_deviations(grid: dict[tuple[float, int], Report]) -> None:
    kappas = [report.kappa for report in grid.values()]
    assert spearmanr(kappas, [max(r.courses[0].distance) for r in grid.values()]).statistic >= 0.9


@judges
def test_both_ends_are_judged_as_theory_says_and_the_curves_agree_where_lazy(
    grid: dict[tuple[float, int], Report],
) -> None:
    assert grid[0.2, 16].verdict.word is Word.FEATURES
    assert grid[5.0, 256].verdict.word is Word.LAZY
    assert grid[5.0, 256].scale.promises == "lazy"
    for report in grid.values():
        if report.scale.promises == "lazy":
            assert report.verdict.word is not Word.FEATURES
        if report.verdict.lazy:
            own = report.courses[0]
            shown = [(a, b) for a, b in zip(own.loss, report.tangents.loss, strict=True) if b > 0.05 * own.loss[0]]
            assert [a for a, _ in shown] == pytest.approx([b for _, b in shown], rel=0.05)
    for (scale, width), report in grid.items():
        for (more, wider), other in grid.items():
            if more >= scale and wider >= width and report.verdict.lazy:
                assert other.verdict.lazy


@judges
def test_the_verdict_has_words_evidence_and_a_remedy(grid: dict[tuple[float, int], Report]) -> None:
    report = grid[0.2, 16]
    verdict = report.verdict
    assert isinstance(verdict, Verdict)
    assert "learns features" in verdict.sentence
    assert percent(report.courses[0].unexplained) in verdict.sentence
    assert short(report.scale.lazy_alpha) in verdict.change
    assert {evidence.text.split(":")[0].split(" ")[0] for evidence in verdict.evidence} >= {
        "κ", "Outputs", "Loss", "Kernel", "Weights", "Features", "Activations",
    }  # fmt: skip
    assert "learn features" in grid[5.0, 256].verdict.change
    diverged = judge(report.scale, [replace(report.courses[0], status="diverged")], report.tangents)
    assert diverged.word is Word.UNSTABLE
    hardly = replace(report.courses[0], loss=tuple(1.0 for _ in report.courses[0].loss))
    assert "barely decreased" in judge(report.scale, [hardly], report.tangents).sentence
    risen = replace(hardly, loss=(*hardly.loss[:-1], 1.5))
    sentence = judge(report.scale, [risen], report.tangents).sentence
    assert all(words in sentence for words in ("rose to 150", "above its start"))
    assert "hardly" not in sentence


@settings(deadline=None, max_examples=100)
@given(n=st.integers(1, 10**6), k=st.integers(1, 10**5), points=st.none() | st.integers(2, 10**6))
def test_budgets_draw_what_fits(n: int, k: int, points: int | None) -> None:
    budget = Budget(points=points)
    size = budget.size(n, k, CPU)
    assert 1 <= size <= n
    if points is not None:
        assert size == min(n, points)
    else:
        assert size <= FEWEST or size * k <= 2000
    assert 24 * budget.held(CPU) ** 2 <= budget.memory


def test_draws_are_without_repetition_and_pairs_stay_together() -> None:
    x, y = torch.arange(50), torch.arange(50) * 10
    some, values = draw(x, y, 20, seed=3)
    assert len(some.unique()) == 20
    assert torch.equal(values, some * 10)
    assert torch.equal(some, draw(x, y, 20, seed=3)[0])
    assert not torch.equal(some, draw(x, y, 20, seed=4)[0])
    assert draw(x, y, 60, seed=0)[0] is x


def test_subsampling_is_stated() -> None:
    torch.manual_seed(0)
    report = inspect(nn.Linear(3, 2), torch.randn(40, 3), torch.randn(40, 2), alphas=(1,), points=8, steps=2, seconds=3)
    assert (report.about.n, report.about.given) == (8, 40)
    assert any("8 of the 40 points were drawn (seed 0)" in note for note in report.notes)


@settings(deadline=None)
@given(st.floats(-1e300, 1e300) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
def test_short_numbers_keep_three_digits(value: float) -> None:
    text = short(value)
    if not math.isfinite(value):
        assert plain(value) is None
        return
    back = text.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")).replace("·10", "e")
    assert float(back) == pytest.approx(value, rel=6e-3)
    assert len(re.sub(r"\D", "", text)) <= 9
    assert Reading("a", value, "b").text == text
