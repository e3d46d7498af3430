"""The inverse relative scale κ = ‖h(w₀) - y*‖ ‖D²h‖/‖Dh‖², and the scales α and widths at which it is small."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch

from lazyscope.inspect.budget import Clock
from lazyscope.inspect.reading import Reading, percent, short
from lazyscope.inspect.subject import Subject
from lazyscope.inspect.tangent import Tangent
from lazyscope.linalg.bilinear import Bilinear, bilinear_norm
from lazyscope.linalg.eigen import operator_norm
from lazyscope.linalg.mask import KeptRows, KeptValues
from lazyscope.loss import Square
from lazyscope.model.differences import second_derivative
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.theory.relative_scale import RelativeScale

LAZY = 0.1
"""The value of κ up to which theory predicts lazy training. The condition κ ≪ 1 of section 1.2 is taken as κ ≤ 0.1, as
in `RelativeScale.lazy_scale`."""

STARTS, FEW = 8, 2
"""The number of random starts of the search for ‖D²h‖, and the number if a product is expensive."""

ITERATIONS = 12
"""The number of iterations after which the search is usually close to the maximum. It continues if there is time."""

TOLERANCE = 1e-2
"""The tolerance of the search. The relative error of the value is about its square."""


@final
@dataclass(frozen=True)
class Scale:
    """The inverse relative scale κ of a model, and what follows from it."""

    relative: RelativeScale
    """κ and its factors."""
    points: int
    """The number of points that were used in the search for ‖D²h‖."""
    n: int
    """The number of points of the inspection."""
    squared: bool
    """Whether the loss is the square loss, for which κ is defined."""

    @property
    def kappa(self) -> float:
        """κ at α = 1."""
        return self.relative.kappa

    @property
    def lazy_alpha(self) -> float:
        """The smallest α at which h(w₀) + α(h - h(w₀)) has κ ≤ 0.1. Its κ is κ/α."""
        return self.kappa / LAZY

    @property
    def lazy_widths(self) -> tuple[float, float]:
        """The factors by which the width m must grow until κ ≤ 0.1: if κ ∝ 1/m, and if κ ∝ 1/√m.

        The experiment `relative-scale` measures these laws for two-layer networks: 1/m if the weights have variance
        1/fan-in, as in PyTorch's initialisation up to a factor, and 1/√m in the tangent kernel scaling.
        """
        # A wider network has an independent initialisation, without overlap with y*.
        target, grown = LAZY, self.relative.widened(1, -0.5)
        factor = max(grown.kappa / target, 1.0)
        return factor, factor**2

    @property
    def promises(self) -> str:
        """The prediction of κ: "lazy", "undecided" or "not lazy"."""
        if self.kappa <= LAZY:
            return "lazy"
        return "undecided" if self.kappa < 1 else "not lazy"

    def readings(self) -> list[Reading]:
        """The rows of the report."""
        r, search = self.relative, self.relative.search
        found = "" if search.status == "converged" else " This is a lower bound, because the search stopped early."
        some = "" if self.points == self.n else f" The search used {self.points} of the {self.n} points."
        proxy = "" if self.squared else " For this loss y* are the encoded targets (one-hot for classes)."
        return [
            Reading(
                "inverse relative scale κ",
                self.kappa,
                "‖h(w₀) - y*‖ ‖D²h‖/‖Dh‖²: the relative change of Dh on the way to the targets. If it is far below"
                f" 1, training is lazy; if it is about 1 or larger, theory makes no prediction.{proxy}",
            ),
            Reading(
                "‖h(w₀) - y*‖",
                r.residual,
                "The initial distance to the targets, as a root mean square over the points.",
            ),
            Reading("‖Dh(w₀)‖", r.jacobian_norm, "The first derivative of the outputs with respect to the weights."),
            Reading("‖D²h(w₀)‖", r.hessian_norm, f"The second derivative of the outputs.{found}{some}"),
            Reading("‖h(w₀)‖", r.initial, "The outputs at the start, which a symmetrised initialisation makes zero."),
            Reading(
                "κ if h(w₀) were 0",
                r.centred().kappa,
                "The value for the centred model Scaled(net, alpha=1), whose outputs start at zero.",
            ),
        ]

    def remedies(self) -> list[Reading]:
        """The rows of the report on how to make the model lazy."""
        low, high = self.lazy_widths
        return [
            Reading(
                "lazy from α =",
                self.lazy_alpha,
                f"For h(w₀) + α(h(w) - h(w₀)) the value κ/α is {LAZY} at this α, and smaller at larger α.",
            ),
            Reading(
                "lazy from α = (centred)",
                r if (r := self.relative.lazy_scale(LAZY)) > 0 else 0.0,
                "The same for Scaled(net, alpha=α), whose outputs start at zero.",
            ),
            Reading(
                "lazy at width × (fast law)",
                low,
                "The factor for the width if κ ∝ 1/width, as for two-layer networks with PyTorch's initialisation.",
            ),
            Reading(
                "lazy at width × (slow law)",
                high,
                "The factor for the width if κ ∝ 1/√width, as in the tangent kernel scaling.",
            ),
        ]

    def sentence(self) -> str:
        """Return the prediction of κ as a sentence."""
        if self.kappa <= LAZY:
            return (
                f"κ = {short(self.kappa)}: on the way to the targets, Dh changes by about {percent(self.kappa)}, so"
                " theory predicts lazy training."
            )
        if self.kappa < 1:
            return f"κ = {short(self.kappa)} is below 1, but not far below, so theory makes no clear prediction."
        return (
            f"κ = {short(self.kappa)} is not small: Dh may change considerably before the targets are reached, and"
            " theory does not predict lazy training."
        )


def scale_of(subject: Subject, tangent: Tangent, clock: Clock, seed: int, notes: list[str]) -> Scale:
    """Compute the inverse relative scale κ.

    ‖Dh‖ is known from the spectrum. ‖D²h‖ is computed by ascent on the sphere, on as many points as fit into a quarter
    of the remaining time.

    Args:
        subject: The model with its data and loss.
        tangent: The spectrum of the tangent kernel.
        clock: The clock of the inspection.
        seed: The seed of the random starts.
        notes: A list to which notes for the report are added.

    Returns:
        The inverse relative scale.
    """
    second, notice = second_derivative(subject.model, subject.fewer(min(2, subject.n))[0])
    notes += [notice] if notice else []

    def make(points: int) -> Bilinear:
        return second(subject.fewer(points)[0])

    points, share = subject.n, 0.25 * clock.left
    form = make(points)
    once = _cost(form, clock)
    while points > 8 and once * FEW * ITERATIONS > share:
        points = max(8, points // 2)
        form = make(points)
        once = _cost(form, clock)
    starts = FEW if once * STARTS * ITERATIONS > share else STARTS
    iterations = max(6, min(300, int(share / (once * starts))))
    kept, top = subject.kept, tangent.top
    if not bool(kept.all()):
        form = KeptValues(form, kept[:points].flatten())
        rows = KeptRows(JacobianOperator(subject.model, subject.x, batch=512), kept.flatten())
        top = operator_norm(rows, seed=seed) ** 2 / subject.counted(subject.n)
    search = bilinear_norm(form, starts=starts, tolerance=TOLERANCE, iterations=iterations, seed=seed)
    jacobian = math.sqrt(top * subject.counted(subject.n))
    relative = RelativeScale.assembled(subject.start, subject.target, kept, jacobian, search, searched=points)
    return Scale(relative, points, subject.n, isinstance(subject.loss, Square))


def _cost(form: Bilinear, clock: Clock) -> float:
    """Measure the time of one iteration from one start, in seconds. The faster of two runs counts."""
    u = torch.randn(1, form.shape[1], generator=torch.Generator().manual_seed(0), device="cpu").to(
        form.device, form.dtype
    )
    seconds = math.inf
    for _ in range(2):
        before = clock.elapsed
        pair = form.pair(u, u)
        once = clock.elapsed
        form.contract(pair, u)
        seconds = min(seconds, once - before + clock.elapsed - before)
        if seconds > 1:
            break
    return max(seconds, 1e-6)
