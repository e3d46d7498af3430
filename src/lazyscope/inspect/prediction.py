"""The training curve and the largest stable learning rates that the tangent model predicts, without training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch

from lazyscope.errors import InputError
from lazyscope.flow import tangent_flow
from lazyscope.inspect.reading import Reading, short
from lazyscope.inspect.subject import Subject
from lazyscope.inspect.tangent import Kernel, Tangent
from lazyscope.loss import CrossEntropy, Loss, Square
from lazyscope.torch_loss import Given, Smoothed

TIMES = 80
"""The number of times at which the curve is computed."""

LONG, STIFF = 1e6, 1e3
"""The end of the curve, in units of n/λ_max: for the closed form, and for the ODE, whose explicit steps are limited by
λ_max."""


@final
@dataclass(frozen=True)
class Prediction:
    """The loss along the gradient flow of the tangent model.

    Args:
        times: The times t.
        loss: The loss at these times.
        floor: The loss at t = ∞, or None if it is unknown. It is known for the square loss and a dense kernel.
        how: How the curve was computed, as part of a sentence.
    """

    times: tuple[float, ...]
    loss: tuple[float, ...]
    floor: float | None
    how: str

    def reaches(self, share: float) -> float | None:
        """Find the time at which the loss has decreased to a fraction of its initial value.

        Args:
            share: The fraction.

        Returns:
            The time, or None if the loss does not decrease that far before the last time.
        """
        goal = share * self.loss[0]
        return next((t for t, value in zip(self.times, self.loss, strict=True) if value <= goal), None)

    def readings(self, lr: float) -> list[Reading]:
        """Return the rows of the report.

        Args:
            lr: The learning rate, which converts times to steps.

        Returns:
            The rows.
        """
        found = []
        for share, word in ((0.5, "half"), (0.1, "a tenth"), (0.01, "a hundredth")):
            time = self.reaches(share)
            meaning = f"Steps with learning rate {lr:.3g} until the tangent model's loss is {word} of its start."
            if time is None:
                meaning += " It does not decrease that far within the computed time."
            found.append(Reading(f"steps to {word}", None if time is None else math.ceil(time / lr), meaning))
        if self.floor is not None:
            floor = "The share of the loss that the tangent model never learns, where K is zero up to rounding."
            share = self.floor / self.loss[0] if self.loss[0] > 0 else 0.0
            found.append(Reading("loss left at t = ∞", share, floor, "%"))
        return found


def predict(subject: Subject, kernel: Kernel, tangent: Tangent) -> Prediction | None:
    """Predict the training curve of the tangent model.

    For the square loss the curve has a closed form. For other losses the gradient flow of equation (5) is integrated,
    which needs the kernel as a matrix.

    Args:
        subject: The model with its data and loss.
        kernel: The tangent kernel.
        tangent: The spectrum of the tangent kernel.

    Returns:
        The predicted curve, or None for a loss other than the square loss, if the kernel is not available as a matrix
        or the loss is a function of the user.
    """
    natural = 1 / tangent.top
    square = isinstance(subject.loss, Square)
    times = np.concatenate([[0.0], np.geomspace(0.01, LONG if square else STIFF, TIMES) * natural])
    if square:
        rates, shares = np.array(tangent.rates), np.array(tangent.shares)
        start = 0.5 * float(subject.negative_gradient.double().square().sum()) / subject.n
        missing = max(0.0, 1 - shares.sum())  # rounding
        loss = start * ((np.exp(-2 * np.outer(times, rates)) * shares).sum(1) + missing)
        noise = 4 * math.sqrt(tangent.size) * torch.finfo(subject.start.dtype).eps * tangent.top
        floor = start * float(shares[rates <= noise].sum())
        how = "in closed form from all eigenvalues" if tangent.dense else "by Lanczos quadrature"
        return Prediction(tuple(times.tolist()), tuple(loss.tolist()), floor if tangent.dense else None, how)
    if kernel.matrix is None or isinstance(subject.loss, Given):
        return None
    path = tangent_flow(
        subject.anchored(kernel.matrix), subject.loss, subject.x, subject.y, times=torch.from_numpy(times), rtol=1e-4,
        atol=1e-7,
    )  # fmt: skip
    how = "by integrating the gradient flow of equation (5)"
    return Prediction(tuple(times.tolist()), tuple(path.loss.double().tolist()), None, how)


@final
@dataclass(frozen=True)
class Limits:
    """The largest learning rates at which gradient descent on the tangent model is stable.

    They are for R = (1/n)Σℓ as defined in lazyscope: summed over outputs, averaged over samples.

    Args:
        start: 2/λ_max(H½KH½/n), where H is the Hessian of ℓ at h(w₀): the limit at the start of training.
        safe: 2/(Mλ₁), where M is the smoothness constant of ℓ, times n/n' if only n' of the n samples count: a limit
            for all outputs, as long as the kernel does not change.
        torch_loss: The name of the corresponding loss of PyTorch.
        torch_factor: The factor by which R exceeds that loss.
        lr: The learning rate that the inspection uses.

    The limits and the learning rate are NaN if the loss has no curvature at h(w₀) and M is not known.
    """

    start: float
    safe: float
    torch_loss: str
    torch_factor: float
    lr: float

    @property
    def suggested(self) -> float:
        """A safe learning rate for PyTorch's loss: the one used here, well below the limits."""
        return self.lr * self.torch_factor

    @property
    def shown(self) -> str:
        """The safe learning rate as text."""
        return "not known" if math.isnan(self.lr) else short(self.suggested)

    def checked(self) -> Limits:
        """Raise an error if no stable learning rate is known.

        Returns:
            The limits.

        Raises:
            InputError: If it is not known.
        """
        if math.isnan(self.lr):
            raise InputError(
                f"The second derivative of {self.torch_loss} at h(w₀) is zero or not defined, so no stable learning"
                " rate is known; pass your optimiser, as optimiser=lambda parameters: torch.optim.SGD(parameters,"
                " lr=0.01)."
            )
        return self

    def readings(self) -> list[Reading]:
        """The rows of the report."""
        rows = [
            Reading(
                "safe learning rate",
                self.suggested,
                f"A quarter of the limits below, or less if that diverged, for plain SGD on all samples with"
                f" {self.torch_loss}. With mini-batches or other optimisers, take it as the order of magnitude.",
            ),
            Reading(
                "limit at the start",
                self.start,
                "2/λ_max of the curvature of the tangent model's loss at w₀: with a larger learning rate, full-batch"
                " gradient descent is unstable at first. For R = (1/n)Σℓ, summed over outputs.",
            ),
            Reading(
                "limit anywhere",
                self.safe,
                "2/(Mλ₁), where M is the smoothness constant of ℓ: a stable learning rate for all outputs, as long as"
                " the kernel does not change.",
            ),
            Reading(
                f"limit for {self.torch_loss}",
                self.start * self.torch_factor,
                f"The first limit for PyTorch's normalisation, which is R divided by {self.torch_factor:g}. With"
                " momentum β the limit is (1 + β) times as large; it does not apply to Adam.",
            ),
            Reading(
                "the same for R",
                self.lr,
                "The safe learning rate in the normalisation of R. Gradient descent uses it here for every α.",
            ),
        ]
        return [replace(row, value=None) if math.isnan(row.value or 0.0) else row for row in rows]


def limits_of(subject: Subject, tangent: Tangent, sharpest: float) -> Limits:
    """Compute the limits, and choose a learning rate well below both.

    If only n' of the n samples count, R is the mean over them, so the curvature is at most (n/n')Mλ₁.

    Args:
        subject: The model with its data and loss.
        tangent: The spectrum of the tangent kernel.
        sharpest: The value of `steepest`, or NaN if it is not defined.

    Returns:
        The limits.
    """
    smoothness = subject.loss.smoothness * subject.n / subject.counted(subject.n)
    start = 2 / sharpest if sharpest > 0 else math.inf if math.isfinite(smoothness) else math.nan
    safe = 2 / (smoothness * tangent.top) if math.isfinite(smoothness) else start
    name, factor = _torch(subject.loss, subject)
    return Limits(start, safe, name, factor, 0.25 * min(start, safe))


def _torch(loss: Loss, subject: Subject) -> tuple[str, float]:
    """Return the name of the corresponding loss of PyTorch, and the factor by which R exceeds it."""
    if isinstance(loss, Square):
        return "nn.MSELoss()", subject.k / 2
    if isinstance(loss, CrossEntropy | Smoothed):
        positions = int(subject.kept.sum()) // subject.start.shape[-1]  # over which PyTorch averages
        options = f"label_smoothing={loss.share:g}" if isinstance(loss, Smoothed) else ""
        return f"nn.CrossEntropyLoss({options})", positions / subject.counted(subject.n)
    return (loss.name, 1.0) if isinstance(loss, Given) else ("a mean over all outputs", float(subject.k))
