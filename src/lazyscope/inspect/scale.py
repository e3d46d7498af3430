"""κ = ‖h(w₀) - y*‖ ‖D²h‖/‖Dh‖² of the subject, and the α and the widths at which it would be small."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from lazyscope.errors import LazyscopeError
from lazyscope.inspect.budget import Clock
from lazyscope.inspect.curvature import Differences
from lazyscope.inspect.reading import Reading, percent, short
from lazyscope.inspect.subject import Subject
from lazyscope.inspect.tangent import Tangent
from lazyscope.linalg.bilinear import Bilinear, bilinear_norm
from lazyscope.linalg.eigen import operator_norm
from lazyscope.linalg.mask import KeptRows, KeptValues
from lazyscope.loss import Square
from lazyscope.model.jacobian import JacobianOperator, SecondDerivative
from lazyscope.theory.relative_scale import RelativeScale

LAZY = 0.1
"""κ up to which theory promises laziness: κ ≪ 1 (section 1.2), read as a tenth, as `RelativeScale.lazy_scale` does."""

STARTS, FEW = 8, 2
"""Of the search for ‖D²h‖, and where a product is dear."""

ITERATIONS = 12
"""After which the search has come near the maximum, seen on image nets; it goes on where there is time."""

TOLERANCE = 1e-2
"""Of that search: the value is off by about its square."""


@final
@dataclass(frozen=True)
class Scale:
    """κ with its factors; `points` of the points were used in the search for ‖D²h‖."""

    relative: RelativeScale
    points: int
    n: int
    squared: bool
    """Whether κ's own loss, the square one, is the subject's."""

    @property
    def kappa(self) -> float:
        """κ at α = 1."""
        return self.relative.kappa

    @property
    def lazy_alpha(self) -> float:
        """The α from which h(w₀) + α(h - h(w₀)) has κ ≤ 0.1: its κ is exactly κ/α."""
        return self.kappa / LAZY

    @property
    def lazy_widths(self) -> tuple[float, float]:
        """How many times wider: if κ falls like 1/m, and if like 1/√m.

        Measured for two-layer nets in the figure `relative-scale`: 1/m where weights have variance 1/fan-in, as PyTorch
        draws them up to a factor, and 1/√m in the scaling of tangent kernels.
        """
        target, grown = LAZY, self.relative.widened(1, -0.5)  # a wider start is another draw, without overlap with y*
        factor = max(grown.kappa / target, 1.0)
        return factor, factor**2

    @property
    def promises(self) -> str:
        """What κ alone says."""
        if self.kappa <= LAZY:
            return "lazy"
        return "undecided" if self.kappa < 1 else "not lazy"

    def readings(self) -> list[Reading]:
        """What the report says of it."""
        r, search = self.relative, self.relative.search
        found = "" if search.status == "converged" else " The search stopped early: a lower bound."
        some = "" if self.points == self.n else f" Searched on {self.points} of the {self.n} points."
        proxy = "" if self.squared else " For this loss y* stands for its encoded targets (one-hot for classes)."
        return [
            Reading(
                "relative scale κ",
                self.kappa,
                "‖h(w₀) - y*‖ ‖D²h‖/‖Dh‖²: how much the tangent turns on the way to the targets. Far below 1: lazy;"
                f" around 1 and above: theory promises nothing.{proxy}",
            ),
            Reading("‖h(w₀) - y*‖", r.residual, "What is to be learned: root mean square over the points."),
            Reading("‖Dh(w₀)‖", r.jacobian_norm, "How fast the outputs move with the weights."),
            Reading("‖D²h(w₀)‖", r.hessian_norm, f"How fast that changes.{found}{some}"),
            Reading(
                "‖h(w₀)‖", r.initial, "The outputs at the start; a part of the residual that symmetrising removes."
            ),
            Reading(
                "κ if h(w₀) were 0",
                r.centred().kappa,
                "That of the centred model, Scaled(net, alpha=1): what starting at zero would change.",
            ),
        ]

    def remedies(self) -> list[Reading]:
        """What would make it lazy."""
        low, high = self.lazy_widths
        return [
            Reading(
                "lazy from α =",
                self.lazy_alpha,
                f"h(w₀) + α(h(w) - h(w₀)) has κ/α, which is {LAZY} here; larger α is lazier.",
            ),
            Reading(
                "lazy from α =, centred",
                r if (r := self.relative.lazy_scale(LAZY)) > 0 else 0.0,
                "The same for Scaled(net, alpha=α), which starts at 0.",
            ),
            Reading(
                "lazy at width ×",
                low,
                "Where κ falls like 1/width, as two-layer nets with PyTorch's initialisation do.",
            ),
            Reading(
                "lazy at width ×, slowest", high, "Where κ falls like 1/√width, as in the scaling of tangent kernels."
            ),
        ]

    def sentence(self) -> str:
        """What κ predicts, in words."""
        if self.kappa <= LAZY:
            return (
                f"κ = {short(self.kappa)}: on the way to the targets the tangent turns by about {percent(self.kappa)},"
                " so theory promises training along it."
            )
        if self.kappa < 1:
            return f"κ = {short(self.kappa)} is below 1 but not far below: theory promises little, training decides."
        return (
            f"κ = {short(self.kappa)} is not small: the tangent may turn before the targets are reached, and theory"
            " promises no laziness."
        )


def scale_of(subject: Subject, tangent: Tangent, clock: Clock, seed: int, notes: list[str]) -> Scale:
    """κ: ‖Dh‖ from the spectrum, ‖D²h‖ by ascent on the sphere, on as many points as a quarter of the time bears."""
    make = _second_derivative(subject, notes)
    points, share = subject.n, 0.25 * clock.left
    form = make(points)
    once = _cost(form, clock)
    while points > 8 and once * FEW * ITERATIONS > share:
        points = max(8, points // 2)
        form = make(points)
        once = _cost(form, clock)
    starts = FEW if once * STARTS * ITERATIONS > share else STARTS
    iterations = max(6, min(300, int(share / (once * starts))))
    compact = form.compact() if isinstance(form, SecondDerivative) else form
    kept, top = subject.kept, tangent.top
    if not bool(kept.all()):
        compact = KeptValues(compact, kept[:points].flatten())
        rows = KeptRows(JacobianOperator(subject.model, subject.x, batch=512), kept.flatten())
        top = operator_norm(rows, seed=seed) ** 2 / subject.counted(subject.n)
    search = bilinear_norm(compact, starts=starts, tolerance=TOLERANCE, iterations=iterations, seed=seed)
    outputs, target = (subject.start * kept).double(), subject.target.double()
    root = math.sqrt(subject.counted(subject.n))
    relative = RelativeScale(
        initial=float(outputs.norm()) / root,
        target=float(target.norm()) / root,
        overlap=float((outputs * target).sum()) / root**2,
        jacobian_norm=math.sqrt(top),
        hessian_norm=search.value / math.sqrt(subject.counted(points)),
        search=search,
    )
    return Scale(relative, points, subject.n, isinstance(subject.loss, Square))


def _second_derivative(subject: Subject, notes: list[str]) -> Callable[[int], Bilinear]:
    """Points ↦ D²h on them: by nested derivatives where torch has them, else by differences."""

    def nested(points: int) -> Bilinear:
        return SecondDerivative(subject.model, subject.fewer(points)[0], batch=512)

    few = nested(min(2, subject.n))
    u = torch.ones(1, few.shape[1], dtype=few.dtype, device=few.device)
    try:
        few.contract(few.pair(u, u), u)
    except (
        LazyscopeError,
        RuntimeError,
    ) as error:  # the forward itself was evaluated before: this is about derivatives
        reason = str(error).splitlines()[0]
        notes.append(f"‖D²h‖ is from central differences in float64, as torch has no second derivative here: {reason}")
        return lambda points: Differences(subject.model, subject.fewer(points)[0])
    return nested


def _cost(form: Bilinear, clock: Clock) -> float:
    """Seconds of one iteration from one start: two products and a contraction; twice, as the first one warms up."""
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
