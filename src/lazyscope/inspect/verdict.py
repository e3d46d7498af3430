"""The verdict, in plain words and with its evidence. Its thresholds are conventions, stated with what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from lazyscope.inspect.reading import percent, short
from lazyscope.inspect.scale import LAZY, Scale
from lazyscope.inspect.training import FIT, Course, Tangents

LAZY_GAP, FEATURE_GAP = 0.05, 0.25
"""The part of the outputs' movement that the tangent does not explain. Up to 5 %, with losses that are within 5 % of
each other too, the curves cannot be told apart on a page; from a quarter on the tangent model is a bad account of the
training. There is no sharp border."""

FITTED = 0.8
"""Where the loss has not fallen below this part of its start, the training was too short to say much."""


class Word(StrEnum):
    """The verdict in a word."""

    LAZY = "lazy"
    BETWEEN = "in between"
    FEATURES = "feature learning"
    UNSTABLE = "unstable"


@final
@dataclass(frozen=True)
class Evidence:
    """One observation and what it speaks for."""

    text: str
    speaks_for: str


@final
@dataclass(frozen=True)
class Verdict:
    """A word, a sentence, the evidence, and what would change it."""

    word: Word
    sentence: str
    evidence: tuple[Evidence, ...]
    change: str

    @property
    def lazy(self) -> bool:
        """Whether the model trains along its tangent."""
        return self.word is Word.LAZY


def word_of(course: Course) -> Word:
    """By what was measured at α = 1."""
    if course.status == "diverged":
        return Word.UNSTABLE
    if max(course.unexplained, course.apart) <= LAZY_GAP:
        return Word.LAZY
    return Word.FEATURES if course.unexplained >= FEATURE_GAP else Word.BETWEEN


def judge(scale: Scale, courses: Sequence[Course], beside: Tangents) -> Verdict:
    """The verdict on the model itself, α = 1; the first course."""
    own = courses[0]
    word = word_of(own)
    return Verdict(word, _sentence(word, own), tuple(_evidence(scale, own, beside)), _change(word, scale, courses))


def _sentence(word: Word, own: Course) -> str:
    went = "fell" if own.fell_to <= 1 else "rose"
    fitted = (
        f"Over {own.steps[-1]} steps of gradient descent, with a loss that {went} to {percent(own.fell_to)} of its"
        " start,"
    )
    gap = percent(own.unexplained)
    words = {
        Word.LAZY: f"This model trains along its tangent. {fitted} all but {gap} of how its outputs moved is explained"
        " by its linearisation at the start.",
        Word.BETWEEN: f"This model leaves its tangent, but not far. {fitted} its linearisation at the start misses"
        f" {gap} of how the outputs moved.",
        Word.FEATURES: f"This model learns features. {fitted} its linearisation at the start misses {gap} of how the"
        " outputs moved.",
        Word.UNSTABLE: "Training diverged with a step that the tangent model bears: the curvature grew on the way. The"
        " tangent says nothing about this model; that is not lazy.",
    }
    if own.fell_to < FITTED or word is Word.UNSTABLE:
        return words[word]
    if own.fell_to > 1:
        return words[word] + (
            " But the loss ended above its start: training sharpened the model until the step was too long for it; its"
            " curve shows from where on."
        )
    return words[word] + (
        " But the loss has hardly fallen: give it more time (seconds=…, steps=…) before you rely on this."
    )


def _evidence(scale: Scale, own: Course, beside: Tangents) -> list[Evidence]:
    last = own.drifts[-1]
    promise = {"lazy": "lazy", "undecided": "undecided", "not lazy": "not lazy"}[scale.promises]
    found = [
        Evidence(scale.sentence(), promise),
        Evidence(
            f"Outputs: {percent(own.unexplained)} of their movement is not the tangent's (lazy up to"
            f" {percent(LAZY_GAP)}, feature learning from {percent(FEATURE_GAP)}).",
            _side(own.unexplained, LAZY_GAP, FEATURE_GAP),
        ),
        Evidence(
            f"Loss: the two curves differ by at most {percent(own.apart)} at a step until the tangent's has fallen to"
            f" {percent(FIT)}, and by {percent(own.loss_gap(beside))} of the first loss at all.",
            _side(own.apart, LAZY_GAP, FEATURE_GAP),
        ),
        Evidence(
            f"Kernel: it changed by {percent(last.kernel)}; a tangent model's does not.",
            _side(last.kernel, 0.1, 0.5),
        ),
        Evidence(f"Weights: they moved by {percent(last.weights)} of their norm.", _side(last.weights, 0.05, 0.25)),
    ]
    if last.features is not None:
        text = f"Features: what enters the last layer changed by {percent(last.features)}."
        found.append(Evidence(text, _side(last.features, 0.1, 0.5)))
    if last.activations is not None:
        text = f"Activations: {percent(last.activations)} of the ReLUs are on or off as at the start."
        found.append(Evidence(text, _side(1 - last.activations, 0.05, 0.25)))
    return found


def _side(value: float, low: float, high: float) -> str:
    """On which side of two marks, chosen as those of the outputs are, a quantity is that is 0 for a tangent model."""
    return str(Word.LAZY if value <= low else Word.FEATURES if value >= high else Word.BETWEEN)


def _change(word: Word, scale: Scale, courses: Sequence[Course]) -> str:
    if word is Word.LAZY:
        return (
            "To learn features: start from smaller weights, or train ls.Scaled(net, alpha) with α below 1; a narrower"
            " net or harder targets do it too."
        )
    fitted = sorted((c for c in courses if c.fell_to < FITTED), key=lambda c: c.alpha)
    seen = next((c for c in fitted if word_of(c) is Word.LAZY), None)
    low, high = scale.lazy_widths
    measured = f"; trained here at α = {short(seen.alpha)} it was lazy" if seen is not None else ""
    return (
        f"To make it lazy: scale it, h(w₀) + α(h(w) - h(w₀)), with α of about {short(scale.lazy_alpha)} (where κ ="
        f" {LAZY}){measured}; or widen every hidden layer by {short(low)} to {short(high)} times."
    )
