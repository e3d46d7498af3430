"""The report of an inspection, as numbers and curves, as JSON, and as an HTML page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from lazyscope.extras import required
from lazyscope.inspect.advice import MEANINGS, Meaning, Recipe, recipes, sgd, warning_of
from lazyscope.inspect.course import Course, Tangents
from lazyscope.inspect.prediction import Limits, Prediction
from lazyscope.inspect.reading import percent, plain, short
from lazyscope.inspect.scale import Scale
from lazyscope.inspect.tangent import Tangent
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
        training: How the models were trained, as part of a sentence.
        optimiser: The code that creates the optimiser of the user for a module `net`, or None for gradient descent.
    """

    name: str
    parameters: int
    n: int
    given: int
    outputs: int
    loss: str
    dtype: str
    seconds: float
    training: str
    optimiser: str | None


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

    @property
    def compared(self) -> tuple[Course, ...]:
        """The training runs up to the last step of the shortest one: different α are compared at equal steps."""
        common = min(course.steps[-1] for course in self.courses)
        return tuple(course.until(common, self.tangents) for course in self.courses)

    @property
    def meaning(self) -> Meaning:
        """What the verdict means, and for whom it is good or bad."""
        return MEANINGS[self.verdict.word]

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """Lines of code that make the training lazier, and richer."""
        optimiser = sgd(self.limits) if self.about.optimiser is None else self.about.optimiser
        return recipes(self.verdict.word, self.scale, self.compared, optimiser)

    @property
    def warning(self) -> Recipe | None:
        """A warning with a remedy if the outputs at the start are large, or None."""
        return warning_of(self.scale)

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
            "meaning": asdict(self.meaning),
            "recipes": [asdict(recipe) for recipe in self.recipes],
            "warning": None if self.warning is None else asdict(self.warning),
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
            "compared": [{"alpha": c.alpha, "steps": c.steps[-1], "unexplained": c.unexplained} for c in self.compared],
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

        return render(self)

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

    def cards(self) -> list[Any]:
        """The main numbers, shown at the top of the page, each with a plain explanation."""
        from lazyscope.inspect.page import cards

        return list(cards(self))

    def sections(self) -> list[Any]:
        """The sections of the page below the verdict."""
        from lazyscope.inspect.page import sections

        return list(sections(self))

    def __repr__(self) -> str:
        number = f"{self.scale.symbol} = {short(self.scale.value)}"
        return f"Report({self.verdict.word}, {self.about.name}, {number}, {self.n} points)"

    def __str__(self) -> str:
        own = self.courses[0]
        lines = [
            f"{self.verdict.word}: {self.about.name}, {self.about.parameters:,} parameters, {self.n} points,"
            f" {self.about.loss}, {self.about.training}",
            f"  {self.meaning.headline} {self.meaning.what}",
            f"  {self.scale.symbol} = {short(self.scale.value)}; the tangent model does not explain"
            f" {percent(own.unexplained)} of the change of the outputs"
            f" ({own.steps[-1]} steps, loss at {percent(own.fell_to)} of its initial value)",
            f"  the kernel changed by {percent(own.drifts[-1].kernel)}, the weights by"
            f" {percent(own.drifts[-1].weights)}; a safe learning rate for plain SGD with {self.limits.torch_loss} is"
            f" {self.limits.shown}",
            *(f"  {recipe.title}: {recipe.code.splitlines()[0]}" for recipe in self.recipes),
        ]
        if self.warning is not None:
            lines.append(f"  {self.warning.title}: {self.warning.why} {self.warning.code.partition('  #')[0]}")
        return "\n".join(lines)
