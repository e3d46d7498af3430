"""The report of an inspection, as numbers and curves, as JSON, and as an HTML page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from lazyscope.extras import required
from lazyscope.inspect.prediction import Limits, Prediction
from lazyscope.inspect.reading import Reading, percent, plain, short
from lazyscope.inspect.scale import Scale
from lazyscope.inspect.tangent import Tangent
from lazyscope.inspect.training import Course, Tangents
from lazyscope.inspect.verdict import Verdict
from lazyscope.lab import disk


@final
@dataclass(frozen=True)
class About:
    """A description of the subject of an inspection.

    Args:
        name: The name of the class of the module.
        parameters: The number of parameters.
        n: The number of points that were used.
        given: The number of points that were passed.
        outputs: The number of outputs per point.
        loss: The name of the loss.
        dtype: The dtype of the parameters.
        seconds: The duration of the inspection, in seconds.
    """

    name: str
    parameters: int
    n: int
    given: int
    outputs: int
    loss: str
    dtype: str
    seconds: float


@final
@dataclass(frozen=True, repr=False)
class Report:
    """The report of an inspection.

    `save` writes it as a self-contained HTML file or as JSON; `to_dict` returns all numbers and curves.

    Args:
        about: A description of the model and its data.
        scale: The inverse relative scale κ and the criterion.
        tangent: The spectrum of the tangent kernel.
        prediction: The training curve that the tangent model predicts, or None if it was not computed.
        limits: The largest stable learning rates.
        tangents: The training of the tangent model.
        courses: The training runs at each scale α. The first is the model itself, α = 1.
        verdict: The verdict with its evidence.
        notes: Notes on how to read the numbers.
        provenance: The command, commit, versions, device and date.
    """

    about: About
    scale: Scale
    tangent: Tangent
    prediction: Prediction | None
    limits: Limits
    tangents: Tangents
    courses: tuple[Course, ...]
    verdict: Verdict
    notes: tuple[str, ...]
    provenance: dict[str, str]

    @property
    def n(self) -> int:
        """The number of points that were used."""
        return self.about.n

    @property
    def kappa(self) -> float:
        """The inverse relative scale κ."""
        return self.scale.kappa

    @property
    def criterion(self) -> float:
        """The first criterion of section 1.2 for the loss."""
        return self.scale.relative.criterion

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to a dictionary.

        Returns:
            All numbers and curves, as JSON-serialisable objects. NaN and infinity are replaced by None.
        """
        r, search = self.scale.relative, self.scale.relative.search
        beside = self.tangents
        found = {
            "about": asdict(self.about),
            "verdict": asdict(self.verdict),
            "scale": {
                "belongs_to_loss": r.symbol,
                "value": r.value,
                "kappa": r.kappa,
                "criterion": r.criterion,
                "alignment": r.alignment,
                "residual": r.residual,
                "jacobian_norm": r.jacobian_norm,
                "hessian_norm": r.hessian_norm,
                "initial": r.initial,
                "target": r.target,
                "centred_value": r.centred().value,
                "promises": self.scale.promises,
                "lazy_alpha": self.scale.lazy_alpha,
                "lazy_alpha_centred": r.lazy_scale(),
                "lazy_widths": self.scale.lazy_widths,
                "points": self.scale.points,
                "search": {"status": search.status, "residual": search.residual, "iterations": search.iterations},
            },
            "tangent": asdict(self.tangent),
            "prediction": None if self.prediction is None else asdict(self.prediction),
            "limits": asdict(self.limits),
            "tangent_training": {"lr": beside.lr, "steps": beside.steps, "loss": beside.loss},
            "training": [{**asdict(c), "loss_gap": c.loss_gap(beside), "fell_to": c.fell_to} for c in self.courses],
            "notes": self.notes,
            "provenance": self.provenance,
        }
        result = plain(found)
        assert isinstance(result, dict)
        return result

    def to_json(self) -> str:
        """Convert the report to JSON.

        Returns:
            The dictionary of `to_dict` as text.
        """
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)

    def to_html(self) -> str:
        """Convert the report to an HTML page.

        Returns:
            The page as text.
        """
        required("matplotlib", "inspect", "Reports as web pages")
        required("jinja2", "inspect", "Reports as web pages")
        from lazyscope.inspect.page import render

        return render(self.verdict, vars(self.about), self.cards(), self.sections(), self.notes, self.provenance)

    def save(self, path: str | Path) -> Path:
        """Write the report to a file, atomically.

        Args:
            path: The path of the file. If it ends in `.json`, the report is written as JSON, otherwise as HTML.

        Returns:
            The path.
        """
        path = Path(path)
        disk.write(path, (self.to_json() if path.suffix == ".json" else self.to_html()).encode())
        return path

    def cards(self) -> list[Reading]:
        """The main numbers, shown at the top of the page."""
        own = self.courses[0]
        return [
            self.scale.readings()[0],
            own.readings()[0],
            own.readings()[4],
            Reading(
                "largest learning rate",
                self.limits.start,
                "2/λ_max: with a larger learning rate, full-batch gradient descent is unstable.",
            ),
        ]

    def sections(self) -> list[Any]:
        """The sections of the page below the verdict."""
        from lazyscope.inspect.page import Section
        from lazyscope.inspect.pictures import alignment, curves, distances, drifts, ladder, spectrum

        own, others = self.courses[0], self.courses[1:]
        scales = [
            Reading(
                f"not explained at α = {short(c.alpha)}",
                c.unexplained,
                f"The same share for h(w₀) + α(h(w) - h(w₀)), over {c.steps[-1]} steps. Here"
                f" {self.scale.symbol}/α = {short(self.scale.value / c.alpha)}.",
                "%",
            )
            for c in others
        ]
        predicted = self.prediction
        return [
            Section(
                "Training of the model and of the tangent model",
                "The model and its linearisation start from the same weights and are trained by the same full-batch"
                " gradient descent."
                + ("" if predicted is None else f" The dotted curve was computed without training, {predicted.how}."),
                (curves(self.courses, self.tangents, predicted), distances(self.courses)),
                (*own.readings(), *([] if predicted is None else predicted.readings(self.limits.lr))),
            ),
            Section(
                "The prediction, and what would change it",
                self.scale.sentence(),
                (ladder(self.scale, self.courses),),
                (*self.scale.readings(), *self.scale.remedies(), *scales),
            ),
            Section(
                "The tangent kernel",
                "The tangent model learns the component of the targets along each eigenvector of K/n at a rate equal to"
                " the eigenvalue.",
                (spectrum(self.tangent), alignment(self.tangent)),
                tuple(self.tangent.readings()),
            ),
            Section(
                "Changes during training",
                "The relative change of the weights, the tangent kernel, the features and the activations since the"
                " start of training.",
                (drifts(self.courses),),
                (),
            ),
            Section(
                "Learning rates",
                "Full-batch gradient descent on the tangent model is stable up to the learning rate 2/λ_max.",
                (),
                tuple(self.limits.readings()),
            ),
        ]

    def __repr__(self) -> str:
        number = f"{self.scale.symbol} = {short(self.scale.value)}"
        return f"Report({self.verdict.word}, {self.about.name}, {number}, {self.n} points)"

    def __str__(self) -> str:
        own = self.courses[0]
        lines = [
            f"{self.verdict.word}: {self.about.name}, {self.about.parameters:,} parameters, {self.n} points,"
            f" {self.about.loss}",
            f"  {self.scale.symbol} = {short(self.scale.value)}; the tangent model does not explain"
            f" {percent(own.unexplained)} of the change of the outputs"
            f" ({own.steps[-1]} steps, loss at {percent(own.fell_to)} of its initial value)",
            f"  the kernel changed by {percent(own.drifts[-1].kernel)}, the weights by"
            f" {percent(own.drifts[-1].weights)}; largest learning rate {short(self.limits.start)}",
            f"  {self.verdict.change}",
        ]
        return "\n".join(lines)
