"""The training curve that the tangent model predicts, at any time and without training, and the steps it allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from lazyscope.flow import tangent_flow
from lazyscope.inspect.reading import Reading
from lazyscope.inspect.subject import Subject
from lazyscope.inspect.tangent import Kernel, Tangent
from lazyscope.loss import CrossEntropy, Loss, Square

TIMES = 80
"""At which the curve is drawn."""

LONG, STIFF = 1e6, 1e3
"""Natural times n/λ_max up to which it is followed: in closed form, and as an ODE, whose explicit steps are bounded by
λ_max."""


@final
@dataclass(frozen=True)
class Prediction:
    """R along the tangent flow; `floor` is its value at t = ∞ where that is known (the square loss)."""

    times: tuple[float, ...]
    loss: tuple[float, ...]
    floor: float | None
    how: str

    def reaches(self, share: float) -> float | None:
        """When the loss has fallen to this share of its start; None where it does not, as far as it was followed."""
        goal = share * self.loss[0]
        return next((t for t, value in zip(self.times, self.loss, strict=True) if value <= goal), None)

    def readings(self, lr: float) -> list[Reading]:
        """What the report says of it."""
        found = []
        for share, word in ((0.5, "half"), (0.1, "a tenth"), (0.01, "a hundredth")):
            time = self.reaches(share)
            meaning = f"Steps of lr = {lr:.3g} after which the tangent model's loss has fallen to {word}."
            if time is None:
                meaning += " It does not, as far as it was followed."
            found.append(Reading(f"steps to {word}", None if time is None else math.ceil(time / lr), meaning))
        if self.floor is not None:
            floor = "What the tangent model never learns: the part of the loss where K is zero, to rounding."
            found.append(Reading("left at t = ∞", self.floor / self.loss[0] if self.loss[0] > 0 else 0.0, floor, "%"))
        return found


def predict(subject: Subject, kernel: Kernel, tangent: Tangent) -> Prediction | None:
    """Closed form for the square loss, whether K is held or not; for others the flow of equation (5), if K is held."""
    natural = 1 / tangent.top
    square = isinstance(subject.loss, Square)
    times = np.concatenate([[0.0], np.geomspace(0.01, LONG if square else STIFF, TIMES) * natural])
    if square:
        rates, shares = np.array(tangent.rates), np.array(tangent.shares)
        start = 0.5 * float(subject.push.double().square().sum()) / subject.n
        missing = max(0.0, 1 - shares.sum())  # rounding
        loss = start * ((np.exp(-2 * np.outer(times, rates)) * shares).sum(1) + missing)
        noise = 4 * math.sqrt(tangent.size) * torch.finfo(subject.start.dtype).eps * tangent.top
        floor = start * float(shares[rates <= noise].sum())
        how = "in closed form from all eigenvalues" if tangent.dense else "from Lanczos' quadrature of the push"
        return Prediction(tuple(times.tolist()), tuple(loss.tolist()), floor if tangent.dense else None, how)
    if kernel.matrix is None:
        return None
    path = tangent_flow(
        subject.anchored(kernel.matrix), subject.loss, subject.x, subject.y, times=torch.from_numpy(times), rtol=1e-4,
        atol=1e-7,
    )  # fmt: skip
    return Prediction(tuple(times.tolist()), tuple(path.loss.double().tolist()), None, "by the flow of equation (5)")


@final
@dataclass(frozen=True)
class Limits:
    """Learning rates beyond which gradient descent leaves the tangent's valley.

    `start` is 2/λ_max(H½KH½/n) with the Hessian H of ℓ at h(w₀); `safe` is 2/(Mλ₁), which holds wherever the outputs go
    as long as the kernel stays. Both are for R = (1/n)Σℓ as lazyscope sums it: over outputs, averaged over samples.
    """

    start: float
    safe: float
    torch_loss: str
    torch_factor: float
    lr: float

    def readings(self) -> list[Reading]:
        """What the report says of it."""
        return [
            Reading(
                "limit at the start",
                self.start,
                "2/λ_max of the loss' curvature at w₀, seen along the tangent: full-batch gradient descent with a"
                " larger step grows at first. For R = (1/n)Σℓ, summed over outputs.",
            ),
            Reading(
                "limit anywhere",
                self.safe,
                "2/(Mλ₁) with M the smoothness of ℓ: as long as the kernel stays, no outputs need a smaller step.",
            ),
            Reading(
                f"limit for {self.torch_loss}",
                self.start * self.torch_factor,
                f"The first limit for torch's normalisation, which is 1/{self.torch_factor:g} of R. Momentum β allows"
                " (1 + β) times as much; Adam's steps are not comparable.",
            ),
            Reading("used here", self.lr, "A quarter of the smaller limit, or less where that diverged; for every α."),
        ]


def limits_of(subject: Subject, tangent: Tangent, sharpest: float) -> Limits:
    """The limits, and a step well below both."""
    start = 2 / sharpest if sharpest > 0 else math.inf
    safe = 2 / (subject.loss.smoothness * tangent.top) if math.isfinite(subject.loss.smoothness) else start
    name, factor = _torch(subject.loss, subject)
    return Limits(start, safe, name, factor, 0.25 * min(start, safe))


def _torch(loss: Loss, subject: Subject) -> tuple[str, float]:
    """torch's usual loss of the kind, and by how much R exceeds it."""
    if isinstance(loss, Square):
        return "nn.MSELoss()", subject.k / 2
    if isinstance(loss, CrossEntropy):
        positions = int(subject.kept.sum()) // subject.start.shape[-1]  # over which torch takes its mean
        return "nn.CrossEntropyLoss()", positions / subject.counted(subject.n)
    return "a mean over all outputs", float(subject.k)
