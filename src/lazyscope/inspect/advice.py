"""What a verdict means, for whom it is good or bad, and the lines of code that change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from lazyscope.diagnose.verdict import FITTED, LAZY_GAP, Word
from lazyscope.inspect.course import Course
from lazyscope.inspect.prediction import Limits
from lazyscope.inspect.reading import short
from lazyscope.inspect.scale import Scale
from lazyscope.inspect.verdict import word_of

LARGE = 1.5
"""The starting outputs are large if the loss at the start is this many times that of outputs which are zero."""

POOR, RICH = 0.01, 0.3
"""The smallest and the largest α that are recommended for learning more features. A smaller α needs many more steps."""

WIDER = 20
"""The largest factor for the width that is worth recommending."""


@final
@dataclass(frozen=True)
class Meaning:
    """What a verdict means.

    Args:
        headline: The verdict as a plain sentence.
        what: What it says about the training.
        good: For whom it is good.
        bad: For whom it is bad.
    """

    headline: str
    what: str
    good: str
    bad: str


MEANINGS = {
    Word.LAZY: Meaning(
        "This model trains lazily: it barely changes what its hidden layers compute.",
        "Its training follows that of the linearised model, which is kernel regression with a fixed kernel.",
        "Good if you want training to be predictable: convergence, predictions and uncertainty then follow from linear"
        " algebra.",
        "Bad if the model should learn a representation, for transfer or for better test error: lazy networks often"
        " generalise worse than the same networks when they learn features.",
    ),
    Word.BETWEEN: Meaning(
        "This model learns some features, and otherwise follows its linearisation.",
        "The linearised model describes the training roughly, but not in detail.",
        "Good if you want a model that learns features and still trains smoothly.",
        "Bad if you rely on formulas for the linearised model (kernel regression, infinite width, influence functions):"
        " they are inaccurate here.",
    ),
    Word.FEATURES: Meaning(
        "This model learns features, as most networks do.",
        "This is normal, and nothing needs to be fixed. Its hidden layers adapt to the data, and the linearised model"
        " does not describe the training.",
        "Good for most purposes: learned features are why networks can do better than kernel methods, and why they"
        " transfer.",
        "Bad only if you rely on theory for lazy training or infinite width, such as kernel regression, influence"
        " functions or a linearised Laplace approximation: it does not describe this training.",
    ),
    Word.UNSTABLE: Meaning(
        "The training diverged, so there is no verdict.",
        "The loss grew without limit. The numbers below describe the start of the training only.",
        "Nothing can be said about features from a training that diverges.",
        "Use a smaller learning rate, and inspect the model again.",
    ),
}


@final
@dataclass(frozen=True)
class Recipe:
    """Lines of code that make training lazier or richer.

    Args:
        title: The direction.
        code: The lines, for a program in which `net` is the model, with `torch` and `lazyscope as ls` imported.
        why: What they do.
    """

    title: str
    code: str
    why: str


def recipes(word: Word, scale: Scale, courses: Sequence[Course], optimiser: str) -> tuple[Recipe, ...]:
    """Write the code for both directions.

    Args:
        word: The verdict.
        scale: κ and the criterion.
        courses: The training runs at each α, of equal length.
        optimiser: The code that creates the optimiser from `net`.

    Returns:
        The code that makes training lazier, and the code that makes it richer unless the model is linear. There is none
        if the loss is not finite at the outputs 0, where the models of both would start.
    """
    if not math.isfinite(scale.relative.at_zero.excess):
        return ()
    number = "κ" if scale.symbol == "κ" else "the criterion"
    low, high = scale.lazy_widths
    alpha, measured = _lazier(scale, courses)
    evidence = (
        f"At α = {short(measured)} training was lazy here."
        if measured is not None
        else f"This α is predicted by {number} and was not tried."
    )
    wider = (
        f" A network that is {short(low)} to {short(high)} times as wide has a similar effect." if low <= WIDER else ""
    )
    lazier = Recipe(
        "Lazier still" if word is Word.LAZY else "To make it lazy",
        f"net = ls.Scaled(net, alpha={alpha})\n{optimiser}",
        "The outputs become α(h(w) - h(w₀)), which start at 0, and the learning rate stays the same."
        f" {evidence}{wider}",
    )
    value = scale.relative.centred().value
    if not value > 0:
        return (lazier,)
    small = _digits(min(RICH, max(POOR, value)), 1)
    richer = Recipe(
        "To learn more features",
        f"net = ls.Scaled(net, alpha={small})\n{optimiser}",
        f"With α below 1 the weights must move {short(1 / small)} times as far for the same outputs. Smaller initial"
        " weights of the last layer, or a narrower network, have a similar effect.",
    )
    return (lazier, richer)


def _lazier(scale: Scale, courses: Sequence[Course]) -> tuple[float, float | None]:
    """Choose α: at least as predicted, and at least as large as one at which training was lazy."""
    value = scale.relative.lazy_scale(LAZY_GAP)  # the deviation is of the order of κ
    predicted = max(value if math.isfinite(value) else 0.0, 2.0)
    others = [course for course in courses if course.alpha > 1 and course.fell_to < FITTED]
    seen = next((c.alpha for c in sorted(others, key=lambda c: c.alpha) if word_of(c) is Word.LAZY), None)
    if seen is None and others:
        predicted = max(predicted, 10 * max(course.alpha for course in others))
    return _digits(max(predicted, seen or 0.0), 2, up=True), seen


def _digits(value: float, count: int, *, up: bool = False) -> float:
    """Round to a number of significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - count + 1)
    rounded = math.ceil(value / unit - 1e-9) if up else round(value / unit)
    return float(f"{rounded * unit:.{count}g}")


def sgd(limits: Limits) -> str:
    """Write the code of SGD with a safe learning rate.

    Args:
        limits: The limits of the learning rate.

    Returns:
        The code, for the normalisation of PyTorch's loss.
    """
    rate = _digits(limits.suggested, 2)
    return f"optimiser = torch.optim.SGD(net.parameters(), lr={rate:g})"


def warning_of(scale: Scale) -> Recipe | None:
    """Warn if the outputs at the start are large.

    Args:
        scale: κ and the criterion, with the loss at the start.

    Returns:
        The warning with its remedy, or None.
    """
    r = scale.relative
    if r.at_start is None or not r.at_start.excess >= LARGE * r.at_zero.excess:
        return None
    number = "κ" if scale.symbol == "κ" else "The criterion"
    return Recipe(
        "The starting outputs are large",
        "net = ls.Scaled(net, alpha=1.0, centred=True)  # subtracts the outputs at the start",
        f"‖h(w₀)‖ = {short(r.initial)}, and the loss starts at {short(r.at_start.excess)}, while outputs of zero would"
        f" have {short(r.at_zero.excess)}. Training first has to undo these outputs. {number} is {short(scale.value)},"
        f" and {short(r.centred().value)} if the outputs start at zero. Initialise the last layer with smaller weights,"
        " or subtract the outputs at the start:",
    )
