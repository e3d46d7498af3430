"""The verdict of an inspection, with its evidence. The thresholds are those of `Monitor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from lazyscope.diagnose.verdict import FEATURE_GAP as FEATURE_GAP
from lazyscope.diagnose.verdict import FITTED, side
from lazyscope.diagnose.verdict import LAZY_GAP as LAZY_GAP
from lazyscope.diagnose.verdict import Word as Word
from lazyscope.inspect.course import FIT, Course, Tangents
from lazyscope.inspect.reading import percent, short
from lazyscope.inspect.scale import Scale
from lazyscope.theory.criterion import LAZY


@final
@dataclass(frozen=True)
class Evidence:
    """One observation, and the verdict that it supports.

    Args:
        text: The observation, as a sentence.
        speaks_for: The verdict that it supports.
    """

    text: str
    speaks_for: str


@final
@dataclass(frozen=True)
class Verdict:
    """The verdict of an inspection.

    Args:
        word: The verdict.
        sentence: An explanation in one or more sentences.
        evidence: The observations.
        change: What would change the verdict, as a sentence.
    """

    word: Word
    sentence: str
    evidence: tuple[Evidence, ...]
    change: str

    @property
    def lazy(self) -> bool:
        """Whether the verdict is that training is lazy."""
        return self.word is Word.LAZY


def word_of(course: Course) -> Word:
    """Choose the verdict on a training run.

    Args:
        course: The training run.

    Returns:
        The verdict.
    """
    if course.status == "diverged":
        return Word.UNSTABLE
    if max(course.unexplained, course.apart) <= LAZY_GAP:
        return Word.LAZY
    return Word.FEATURES if course.unexplained >= FEATURE_GAP else Word.BETWEEN


def judge(
    scale: Scale, courses: Sequence[Course], beside: Tangents, way: str = "gradient descent on all points"
) -> Verdict:
    """Judge the model.

    Args:
        scale: κ and the criterion.
        courses: The training runs. The first is the model itself, α = 1.
        beside: The training of the tangent model.
        way: How the models were trained, as part of a sentence.

    Returns:
        The verdict on the model at α = 1.
    """
    own = courses[0]
    word = word_of(own)
    sentence, change = _sentence(word, own, beside, way), _change(word, scale, courses)
    return Verdict(word, sentence, tuple(_evidence(scale, own, beside)), change)


def _sentence(word: Word, own: Course, beside: Tangents, way: str) -> str:
    went = "fell" if own.fell_to <= 1 else "rose"
    fitted = f"Over {own.steps[-1]} steps of {way}, the loss {went} to {percent(own.fell_to)} of its initial value, and"
    gap = percent(own.unexplained)
    words = {
        Word.LAZY: f"{fitted} the tangent model explains all but {gap} of the change of the outputs: the training of"
        " this model is lazy.",
        Word.BETWEEN: f"{fitted} the tangent model does not explain {gap} of the change of the outputs: this model is"
        " between lazy training and feature learning.",
        Word.FEATURES: f"{fitted} the tangent model does not explain {gap} of the change of the outputs: this model"
        " learns features.",
        Word.UNSTABLE: "Training diverged with a learning rate at which the tangent model is stable, because the"
        " curvature grew during training. The tangent model does not describe this model, so its training is not lazy."
        if beside.status != "diverged"
        else "Training diverged, and so did that of the tangent model: the learning rate is too large for both.",
    }
    if beside.status == "diverged" and word is not Word.UNSTABLE:
        return words[word] + (
            " However, the tangent model diverged in the same training, since the learning rate is above its limit: the"
            " two are compared only up to there."
        )
    if own.fell_to < FITTED or word is Word.UNSTABLE:
        return words[word]
    if own.fell_to > 1:
        return words[word] + (
            " However, the loss ended above its start: the curvature grew during training until the learning rate was"
            " too large. The loss curve shows when this happened."
        )
    return words[word] + (
        " However, the loss has barely decreased: allow more time (seconds=…, steps=…) for a reliable verdict."
    )


def _evidence(scale: Scale, own: Course, beside: Tangents) -> list[Evidence]:
    last = own.drifts[-1]
    found = [
        Evidence(scale.sentence(), scale.promises),
        Evidence(
            f"Outputs: the tangent model does not explain {percent(own.unexplained)} of their change (lazy up to"
            f" {percent(LAZY_GAP)}, feature learning from {percent(FEATURE_GAP)}).",
            side(own.unexplained, LAZY_GAP, FEATURE_GAP),
        ),
        Evidence(
            f"Loss: until the loss of the tangent model is {percent(FIT)} of its start, the two losses differ by at"
            f" most {percent(own.apart)} at the same step. Over all steps they differ by at most"
            f" {percent(own.loss_gap(beside))} of the initial loss.",
            side(own.apart, LAZY_GAP, FEATURE_GAP),
        ),
        *_at_equal_loss(own),
        Evidence(
            f"Kernel: it changed by {percent(last.kernel)}; the kernel of a tangent model does not change.",
            side(last.kernel, 0.1, 0.5),
        ),
        Evidence(f"Weights: they changed by {percent(last.weights)} of their norm.", side(last.weights, 0.05, 0.25)),
    ]
    if last.features is not None:
        text = f"Features: the inputs of the last layer changed by {percent(last.features)}."
        found.append(Evidence(text, side(last.features, 0.1, 0.5)))
    if last.activations is not None:
        text = f"Activations: {percent(last.activations)} of the ReLUs have the same state, on or off, as at the start."
        found.append(Evidence(text, side(1 - last.activations, 0.05, 0.25)))
    return found


def _at_equal_loss(own: Course) -> list[Evidence]:
    level = own.level
    if level is None:
        return []
    text = (
        f"Equal loss: when both have {percent(level.share)} of the initial loss (the model at step {level.step}, the"
        f" tangent model at step {level.tangent_step}), the tangent model does not explain"
        f" {percent(level.unexplained)} of the change of the outputs."
    )
    return [Evidence(text, side(level.unexplained, LAZY_GAP, FEATURE_GAP))]


def _change(word: Word, scale: Scale, courses: Sequence[Course]) -> str:
    if word is Word.LAZY:
        return (
            "To learn features: initialise with smaller weights, or train ls.Scaled(net, alpha) with α below 1. A"
            " narrower network or harder targets have the same effect."
        )
    fitted = sorted((c for c in courses if c.fell_to < FITTED), key=lambda c: c.alpha)
    seen = next((c for c in fitted if word_of(c) is Word.LAZY), None)
    low, high = scale.lazy_widths
    number = "κ" if scale.symbol == "κ" else "the criterion"
    measured = f"; at α = {short(seen.alpha)} its training was lazy here" if seen is not None else ""
    return (
        f"To make it lazy: train h(w₀) + α(h(w) - h(w₀)) with α of about {short(scale.lazy_alpha)}, where"
        f" {number} = {LAZY}{measured}; or multiply the hidden widths by {short(low)} to {short(high)}."
    )
