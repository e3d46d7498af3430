"""The verdict on a run: lazy, in between or feature learning, and the thresholds behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from lazyscope.diagnose.record import Record

LAZY_GAP, FEATURE_GAP = 0.05, 0.25
"""Thresholds for the share of the change of the outputs that the tangent model does not explain. Up to 5 %, the curves
of the two trainings look the same in a figure. From 25 % on, the tangent model is a poor description of the training.
There is no sharp boundary. `benchmarks/verdicts.py` compares the verdicts with trainings of the tangent model: they
agree in 93 % of 144 runs that were made when nothing was changed any more, and otherwise are one class off."""

FITTED = 0.8
"""If the loss is still above this fraction of its initial value, the training was too short for a reliable verdict."""


class Word(StrEnum):
    """The possible verdicts."""

    LAZY = "lazy"
    BETWEEN = "in between"
    FEATURES = "feature learning"
    UNSTABLE = "unstable"


def side(value: float, low: float, high: float) -> Word:
    """Compare a quantity, which is zero for a tangent model, with two thresholds.

    Args:
        value: The quantity.
        low: The largest value of lazy training.
        high: The smallest value of feature learning.

    Returns:
        The verdict that the quantity supports.
    """
    return Word.LAZY if value <= low else Word.FEATURES if value >= high else Word.BETWEEN


@final
@dataclass(frozen=True)
class RunVerdict:
    """The verdict on a run that a monitor has watched."""

    word: Word
    """The verdict on the whole network: `tangent_distance` against `LAZY_GAP` and `FEATURE_GAP`, or "unstable" if the
    weights or the loss are no longer finite."""
    layers: Mapping[str, Word]
    """The verdict on each layer: its own `tangent_distance`, if only this layer moves, against the same thresholds. A
    layer in whose weights the network is linear, such as a last linear layer, is always lazy in this sense."""
    step: int
    """The step of the record that was judged, the last one."""
    sentence: str
    """An explanation in one or more sentences."""

    @property
    def lazy(self) -> bool:
        """Whether the verdict is that training was lazy."""
        return self.word is Word.LAZY

    def __str__(self) -> str:
        return f"{self.word}: {self.sentence}"


def judge(first: Record, last: Record) -> RunVerdict:
    """Judge a run.

    Args:
        first: The record at the start.
        last: The last record.

    Returns:
        The verdict.
    """
    stable = math.isfinite(last.tangent_distance) and math.isfinite(last.displacement)
    stable = stable and (math.isnan(first.loss) or math.isfinite(last.loss))
    word = side(last.tangent_distance, LAZY_GAP, FEATURE_GAP) if stable else Word.UNSTABLE
    layers = {
        name: side(layer.tangent_distance, LAZY_GAP, FEATURE_GAP)
        for name, layer in last.layers.items()
        if math.isfinite(layer.tangent_distance)
    }
    return RunVerdict(word, layers, last.step, _sentence(word, first, last))


def _sentence(word: Word, first: Record, last: Record) -> str:
    if word is Word.UNSTABLE:
        return f"At step {last.step}, the weights or the loss are no longer finite: the training diverged."
    gap = f"{last.tangent_distance:.2g}" if last.tangent_distance < 0.01 else f"{last.tangent_distance:.0%}"
    words = {
        Word.LAZY: f"Up to step {last.step}, the network moved along its tangent: the linearisation around its start"
        f" explains the change of its outputs up to a share of {gap}.",
        Word.BETWEEN: f"Up to step {last.step}, the network left its tangent in part: the linearisation around its"
        f" start does not explain a share of {gap} of the change of its outputs.",
        Word.FEATURES: f"Up to step {last.step}, the network learned features: the linearisation around its start does"
        f" not explain a share of {gap} of the change of its outputs.",
    }
    text = words[word]
    if last.displacement == 0:
        return text + " However, the weights have not moved yet."
    if last.loss > FITTED * first.loss:
        text += (
            f" However, the loss on the probe is still {last.loss / first.loss:.0%} of its initial value, so the"
            " verdict may change: judge again after more steps."
        )
    return text
