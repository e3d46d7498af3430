"""The HTML page of a report: one self-contained file."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Any, final

from jinja2 import Environment, PackageLoader, StrictUndefined

from lazyscope.diagnose.verdict import FEATURE_GAP, LAZY_GAP
from lazyscope.inspect.pictures import Picture, alignment, curves, distances, drifts, ladder, spectrum
from lazyscope.inspect.reading import Reading, percent, short

LEAST, MOST = 1e-3, 1.0
"""The ends of the gauge, on a logarithmic scale."""


@final
@dataclass(frozen=True)
class Section:
    """A section of the page.

    Args:
        title: The heading.
        lead: The introductory sentences.
        pictures: The figures.
        readings: The rows of the table, which is folded.
    """

    title: str
    lead: str
    pictures: tuple[Picture, ...]
    readings: tuple[Reading, ...]


@final
@dataclass(frozen=True)
class Gauge:
    """Where a model is between lazy training and feature learning, in per cent of the width of the gauge.

    Args:
        at: The place of the model.
        text: The share of the change of the outputs that the tangent model does not explain.
        lazy: The end of the lazy part.
        features: The start of feature learning.
        scales: The places of the scaled models, with α.
    """

    at: float
    text: str
    lazy: float
    features: float
    scales: tuple[tuple[float, str], ...]


def render(report: Any) -> str:
    """Render the page.

    Args:
        report: The `Report`.

    Returns:
        The page as HTML.
    """
    environment = Environment(
        loader=PackageLoader("lazyscope", "inspect"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["address"] = _address
    environment.filters["word"] = lambda word: str(word).replace(" ", "-")
    environment.filters["percent"] = percent
    return environment.get_template("page.html.jinja").render(
        report=report, gauge=gauge(report), cards=cards(report), sections=sections(report), gaps=(LAZY_GAP, FEATURE_GAP)
    )


def gauge(report: Any) -> Gauge | None:
    """Place a model on the gauge.

    Args:
        report: The `Report`.

    Returns:
        The gauge, or None if the training diverged.
    """
    own = report.courses[0]
    if own.status == "diverged":
        return None
    scales = tuple((_place(c.unexplained), short(c.alpha)) for c in report.compared[1:] if c.status != "diverged")
    value = own.unexplained
    return Gauge(_place(value), percent(value), _place(LAZY_GAP), _place(FEATURE_GAP), scales)


def _place(value: float) -> float:
    share = math.log(min(max(value, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return round(100 * share, 1)


def cards(report: Any) -> list[Reading]:
    """Choose the main numbers, with plain explanations.

    Args:
        report: The `Report`.

    Returns:
        The numbers.
    """
    own, scale = report.courses[0], report.scale
    return [
        Reading(
            "not explained by the linearised model",
            own.unexplained,
            f"The share of the change of the outputs; lazy up to {percent(LAZY_GAP)}, feature learning from"
            f" {percent(FEATURE_GAP)}.",
            "%",
        ),
        Reading(
            "change of the tangent kernel",
            own.drifts[-1].kernel,
            "How much the similarity of samples, as the model sees it, changed during training.",
            "%",
        ),
        Reading(
            "κ" if scale.symbol == "κ" else "criterion",
            scale.value,
            "The prediction from the start alone: far below 1 means lazy training.",
        ),
        Reading(
            "safe learning rate",
            None if own.status == "diverged" or math.isnan(report.limits.lr) else report.limits.suggested,
            f"For plain SGD on all samples with {report.limits.torch_loss}: a quarter of the largest stable one, or"
            " less.",
        ),
    ]


def sections(report: Any) -> list[Section]:
    """Compose the sections of the page below the verdict.

    Args:
        report: The `Report`.

    Returns:
        The sections.
    """
    own, others = report.courses[0], report.compared[1:]
    # A gradient flow is comparable with gradient descent, but not with the optimiser of the user.
    predicted = report.prediction if report.tangents.lr is not None else None
    lr, common = report.tangents.lr, report.compared[0].steps[-1]
    scales = [
        Reading(
            f"not explained at α = {short(c.alpha)}",
            c.unexplained,
            f"The same share for h(w₀) + α(h(w) - h(w₀)), over the first {common} steps. Here"
            f" {report.scale.symbol}/α = {short(report.scale.value / c.alpha)}.",
            "%",
        )
        for c in report.compared
    ]
    cut = (
        f" Different α are compared over the first {common} steps, for which all of them were trained."
        if others and common < own.steps[-1]
        else ""
    )
    return [
        Section(
            "Training of the model and of the linearised model",
            f"Both start from the same weights and are trained alike, by {report.about.training}. They are compared at"
            " equal steps."
            + ("" if predicted is None else f" The dotted curve was computed without training, {predicted.how}.")
            + cut,
            (curves(report.courses, report.tangents, predicted), distances(report.compared)),
            (*own.readings(), *([] if predicted is None or lr is None else predicted.readings(lr))),
        ),
        Section(
            "The prediction, and what would change it",
            report.scale.sentence(),
            (ladder(report.scale, report.compared),),
            (*report.scale.readings(), *report.scale.remedies(), *scales),
        ),
        Section(
            "The tangent kernel",
            "The linearised model learns the component of the targets along each eigenvector of K/n at a rate equal to"
            " the eigenvalue.",
            (spectrum(report.tangent), alignment(report.tangent)),
            tuple(report.tangent.readings()),
        ),
        Section(
            "Changes during training",
            "The relative change of the weights, the tangent kernel, the features and the activations since the"
            " start of training.",
            (drifts(report.courses[0], report.compared),),
            (),
        ),
        Section(
            "Learning rates",
            f"A safe learning rate for plain SGD on all samples with {report.limits.torch_loss} is"
            f" {report.limits.shown}. It is well below the largest stable one, at which gradient descent on"
            " the linearised model starts to oscillate.",
            (),
            tuple(report.limits.readings()),
        ),
    ]


def _address(picture: Picture) -> str:
    """Return the picture as a data URL."""
    return "data:image/svg+xml;base64," + base64.b64encode(picture.svg).decode()
