"""What an inspection found: numbers and curves for programs, a page for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from lazyscope.inspect.page import Section, render
from lazyscope.inspect.pictures import alignment, curves, distances, drifts, ladder, spectrum
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
    """What was inspected: `n` of the `given` points, each with so many `outputs`."""

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
    """Everything that was measured; `courses[0]` is the model's own training, α = 1.

    `save` writes one HTML file that needs nothing else, or JSON where the name ends so; `to_dict` is the same for
    programs, with None for what has no finite value.
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
        """The points on which all was measured."""
        return self.about.n

    @property
    def kappa(self) -> float:
        """The relative scale κ."""
        return self.scale.kappa

    def to_dict(self) -> dict[str, Any]:
        """All numbers and curves, in what JSON has."""
        r, search = self.scale.relative, self.scale.relative.search
        beside = self.tangents
        found = {
            "about": asdict(self.about),
            "verdict": asdict(self.verdict),
            "scale": {
                "kappa": r.kappa,
                "residual": r.residual,
                "jacobian_norm": r.jacobian_norm,
                "hessian_norm": r.hessian_norm,
                "initial": r.initial,
                "target": r.target,
                "centred_kappa": r.centred().kappa,
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
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)

    def to_html(self) -> str:
        """The page."""
        return render(self.verdict, vars(self.about), self.cards(), self.sections(), self.notes, self.provenance)

    def save(self, path: str | Path) -> Path:
        """Write the page, or JSON for a name in .json; the file is whole or not there."""
        path = Path(path)
        disk.write(path, (self.to_json() if path.suffix == ".json" else self.to_html()).encode())
        return path

    def cards(self) -> list[Reading]:
        """The numbers that stand at the top."""
        own = self.courses[0]
        return [
            self.scale.readings()[0],
            own.readings()[0],
            own.readings()[4],
            Reading(
                "largest step",
                self.limits.start,
                "The step size 2/λ_max, beyond which full-batch gradient descent grows.",
            ),
        ]

    def sections(self) -> list[Section]:
        """The parts of the page below the verdict."""
        own, others = self.courses[0], self.courses[1:]
        scales = [
            Reading(
                f"unexplained at α = {short(c.alpha)}",
                c.unexplained,
                f"The same for h(w₀) + α(h(w) - h(w₀)), over {c.steps[-1]} steps; κ/α = {short(self.kappa / c.alpha)}.",
                "%",
            )
            for c in others
        ]
        predicted = self.prediction
        return [
            Section(
                "Training beside the tangent",
                "The model and its linearisation from the same weights, by the same full-batch gradient descent."
                + ("" if predicted is None else f" The dotted curve was computed without training, {predicted.how}."),
                (curves(self.courses, self.tangents, predicted), distances(self.courses)),
                (*own.readings(), *([] if predicted is None else predicted.readings(self.limits.lr))),
            ),
            Section(
                "The relative scale, and what would change it",
                self.scale.sentence(),
                (ladder(self.scale, self.courses),),
                (*self.scale.readings(), *self.scale.remedies(), *scales),
            ),
            Section(
                "The tangent kernel",
                "Training along the tangent learns the part of the targets along each eigenvector of K/n at the rate of"
                " its eigenvalue.",
                (spectrum(self.tangent), alignment(self.tangent)),
                tuple(self.tangent.readings()),
            ),
            Section(
                "What moved",
                "How far weights, kernel, features and activations are from the start, along the training.",
                (drifts(self.courses),),
                (),
            ),
            Section(
                "Step sizes",
                "Full-batch gradient descent along the tangent is stable up to 2/λ_max.",
                (),
                tuple(self.limits.readings()),
            ),
        ]

    def __repr__(self) -> str:
        return f"Report({self.verdict.word}, {self.about.name}, κ = {short(self.kappa)}, {self.n} points)"

    def __str__(self) -> str:
        own = self.courses[0]
        lines = [
            f"{self.verdict.word}: {self.about.name}, {self.about.parameters:,} parameters, {self.n} points,"
            f" {self.about.loss}",
            f"  κ = {short(self.kappa)}; the tangent misses {percent(own.unexplained)} of how the outputs moved"
            f" ({own.steps[-1]} steps, loss to {percent(own.fell_to)})",
            f"  kernel {percent(own.drifts[-1].kernel)}, weights {percent(own.drifts[-1].weights)} from the start;"
            f" largest step {short(self.limits.start)}",
            f"  {self.verdict.change}",
        ]
        return "\n".join(lines)
