"""κ for the square loss, the criterion for other losses, and the scales α and widths at which they are small."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch

from lazyscope.diagnose.prediction import descending
from lazyscope.inspect.budget import Clock
from lazyscope.inspect.reading import Reading, percent, short
from lazyscope.inspect.subject import Subject
from lazyscope.inspect.tangent import Tangent
from lazyscope.linalg.bilinear import Bilinear, bilinear_norm
from lazyscope.linalg.compose import Diagonal, Product, Transformed
from lazyscope.linalg.eigen import operator_norm
from lazyscope.loss import Square
from lazyscope.model.differences import second_derivative
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.theory.criterion import LAZY, RelativeScale
from lazyscope.theory.relative_scale import encoded, pulled
from lazyscope.torch_loss import Given, name_of

STARTS, FEW = 8, 2
"""The number of random starts of the search for ‖D²h‖, and the number if a product is expensive."""

ITERATIONS = 12
"""The number of iterations after which the search is usually close to the maximum. It continues if there is time."""

TOLERANCE = 1e-2
"""The tolerance of the search. The relative error of the value is about its square."""

_MEANING = "If it is far below 1, training is lazy; if it is about 1 or larger, theory makes no prediction."


@final
@dataclass(frozen=True)
class Scale:
    """κ and the criterion of a model, and what follows from the one that belongs to its loss."""

    relative: RelativeScale
    """κ, the criterion and their factors."""
    points: int
    """The number of points that were used in the search for ‖D²h‖."""
    n: int
    """The number of points of the inspection."""

    @property
    def kappa(self) -> float:
        """κ at α = 1."""
        return self.relative.kappa

    @property
    def symbol(self) -> str:
        """The number that belongs to the loss, "κ" or "criterion"."""
        return self.relative.symbol

    @property
    def value(self) -> float:
        """The value at α = 1 of the number that belongs to the loss."""
        return self.relative.value

    @property
    def lazy_alpha(self) -> float:
        """The smallest α at which h(w₀) + α(h - h(w₀)) has a value of at most 0.1. Its value is value/α."""
        return self.value / LAZY

    @property
    def lazy_widths(self) -> tuple[float, float]:
        """The factors by which the width m must grow until the value is 0.1: if it is ∝ 1/m, and if it is ∝ 1/√m.

        The experiment `relative-scale` measures these laws for κ of two-layer networks: 1/m if the weights have
        variance 1/fan-in, as in PyTorch's initialisation up to a factor, and 1/√m in the tangent kernel scaling. The
        criterion is assumed to follow them, too.
        """
        # A wider network has an independent initialisation, without overlap with y*.
        factor = max((self.relative.widened(1, -0.5).kappa if self.symbol == "κ" else self.value) / LAZY, 1.0)
        return factor, factor**2

    @property
    def promises(self) -> str:
        """The prediction of the value: "lazy", "undecided" or "not lazy"."""
        return self.relative.promises

    def readings(self) -> list[Reading]:
        """The rows of the report."""
        r, search = self.relative, self.relative.search
        found = "" if search.status == "converged" else " This is a lower bound, because the search stopped early."
        some = "" if self.points == self.n else f" The search used {self.points} of the {self.n} points."
        kappa = Reading(
            "inverse relative scale κ",
            self.kappa,
            "‖h(w₀) - y*‖ ‖D²h‖/‖Dh‖²: the relative change of Dh on the way to the targets. "
            + (_MEANING if self.symbol == "κ" else "It is for the square loss, with y* the encoded targets."),
        )
        criterion = Reading(
            "criterion",
            r.criterion,
            f"F ‖D²h‖/(‖∇F‖ ‖Dh‖) for the loss F, {r.loss}: the relative change of Dh over that of F in a small step. "
            + (_MEANING if self.symbol == "criterion" else "For the square loss, it is κ over twice the alignment."),
        )
        return [
            *((kappa, criterion) if self.symbol == "κ" else (criterion, kappa)),
            Reading(
                "alignment",
                r.alignment,
                "‖Dhᵀr‖/(‖Dh‖ ‖r‖) for the gradient r of the loss with respect to the outputs: 1 if r is along the"
                " direction that is learned fastest.",
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
                f"{self.symbol} if h(w₀) were 0",
                r.centred().value,
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
                f"For h(w₀) + α(h(w) - h(w₀)) the value {self.symbol}/α is {LAZY} at this α, and smaller at larger α.",
            ),
            Reading(
                "lazy from α = (centred)",
                r if (r := self.relative.lazy_scale(LAZY)) > 0 else 0.0,
                "The same for Scaled(net, alpha=α), whose outputs start at zero.",
            ),
            Reading(
                "lazy at width × (fast law)",
                low,
                f"The factor for the width if {self.symbol} ∝ 1/width, as for κ of two-layer networks with PyTorch's"
                " initialisation.",
            ),
            Reading(
                "lazy at width × (slow law)",
                high,
                f"The factor for the width if {self.symbol} ∝ 1/√width, as for κ in the tangent kernel scaling.",
            ),
        ]

    def sentence(self) -> str:
        """Return the prediction as a sentence, which names the number that belongs to the loss."""
        number = "κ" if self.symbol == "κ" else f"The criterion for {self.relative.loss}"
        if self.promises == "lazy":
            return (
                f"{number} = {short(self.value)}: on the way to the targets, Dh changes by about {percent(self.value)},"
                " so theory predicts lazy training."
            )
        if self.promises == "undecided":
            return f"{number} = {short(self.value)} is below 1, but not far below, so theory makes no clear prediction."
        return (
            f"{number} = {short(self.value)} is not small: Dh may change considerably before the targets are reached,"
            " and theory does not predict lazy training."
        )


def scale_of(subject: Subject, tangent: Tangent, clock: Clock, seed: int, notes: list[str]) -> Scale:
    """Compute κ and the criterion.

    ‖Dh‖ is known from the spectrum. ‖D²h‖ is computed by ascent on the sphere, on as many points as fit into a quarter
    of the remaining time.

    Args:
        subject: The model with its data and loss.
        tangent: The spectrum of the tangent kernel.
        clock: The clock of the inspection.
        seed: The seed of the random starts.
        notes: A list to which notes for the report are added.

    Returns:
        κ and the criterion.
    """
    second, notice = second_derivative(subject.model, subject.fewer(min(2, subject.n))[0])
    notes += [notice] if notice else []

    def make(points: int) -> Bilinear:
        return second(subject.fewer(points)[0])

    first = int(subject.kept.flatten(1).any(1).nonzero()[0]) if subject.start.ndim > 1 else 0  # that counts
    points, share = min(max(8, first + 1), subject.n), 0.25 * clock.left
    form = make(points)
    once = _cost(form, clock)
    while points < subject.n and once * FEW * ITERATIONS * min(2.0, subject.n / points) <= share:
        points = min(2 * points, subject.n)
        form = make(points)
        once = _cost(form, clock)
    starts = FEW if once * STARTS * ITERATIONS > share else STARTS
    iterations = max(6, min(300, int(share / (once * starts))))
    outputs = subject.start.double()
    target, risk = encoded(subject.loss, subject.y, outputs)
    rows = JacobianOperator(subject.model, subject.x, batch=subject.n if subject.whole else 512)
    norm = math.sqrt(tangent.top * subject.n)
    if risk.counted is not None:
        mask = risk.counted.to(rows.device, rows.dtype)
        form = Transformed(form, Diagonal(mask[:points].flatten()))
        norm = operator_norm(Product(Diagonal(mask.flatten()), rows), seed=seed)
    search = bilinear_norm(form, starts=starts, tolerance=TOLERANCE, iterations=iterations, seed=seed)
    # a loss of the user need not be defined at the outputs 0, so it is evaluated separately
    given = isinstance(subject.loss, Given)
    regular = Square().risk(outputs, target, 0) if given else risk
    relative = RelativeScale.assembled(outputs, target, regular, norm, pulled(rows), search, searched=points)
    relative = descending(relative, risk, outputs, pulled(rows)) if given else relative
    return Scale(replace(relative, loss=name_of(subject.loss)), points, subject.n)


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
