"""What a training run did, and how far it was from that of the tangent model, at equal steps and at equal loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.inspect.probe import Drift
from lazyscope.inspect.reading import Reading, percent

FIT = 0.05
"""Losses are compared until the loss of the tangent model is below this fraction of its initial value."""


@final
@dataclass(frozen=True)
class Tangents:
    """The training of the tangent model. It is the same for every α, because all models start at h(w₀).

    Args:
        lr: The learning rate of gradient descent, or None for a training of the user.
        steps: The recorded steps.
        loss: The loss at these steps.
        outputs: The outputs at these steps, of shape `(len(steps), n, ...)`.
        status: How the run ended, such as "diverged".
    """

    lr: float | None
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    outputs: Float[Tensor, "T ..."] = field(repr=False, compare=False)
    status: str = "horizon"


@final
@dataclass(frozen=True)
class EqualLoss:
    """The model and the tangent model compared when they have the same loss instead of at the same step.

    Args:
        share: The loss that both reach, relative to the initial loss: the larger of their smallest losses.
        step: The recorded step at which the model first reaches it.
        tangent_step: The same for the tangent model.
        unexplained: The distance of the outputs at these steps, relative to the larger of the two changes of the
            outputs.
    """

    share: float
    step: int
    tangent_step: int
    unexplained: float


@final
@dataclass(frozen=True)
class Course:
    """One training run at scale α, compared with the training of the tangent model.

    Here y are the outputs of the model and ȳ those of the tangent model at the same step.

    Args:
        alpha: The scale α.
        steps: The recorded steps.
        loss: The loss at these steps.
        distance: ‖y - ȳ‖/‖h(w₀) - y*‖ at these steps, the quantity bounded by Theorem 2.3.
        unexplained: The largest ‖y - ȳ‖ over the largest of ‖y - h(w₀)‖ and ‖ȳ - h(w₀)‖: the share of the change of the
            outputs that the tangent model does not explain.
        apart: The largest relative difference of the two losses at a step, as long as the loss of the tangent model is
            above 5 % of its initial value.
        displacement: ‖w - w₀‖/‖w₀‖ at these steps.
        status: How the run ended, such as "diverged".
        drifts: The changes of the weights, the kernel, the features and the activations at a few steps.
        moved: The larger of ‖y - h(w₀)‖ and ‖ȳ - h(w₀)‖ at these steps, in the units of `distance`.
        level: The comparison at equal loss, or None if one of the two losses did not decrease.
    """

    alpha: float
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    distance: tuple[float, ...]
    unexplained: float
    apart: float
    displacement: tuple[float, ...]
    status: str
    drifts: tuple[Drift, ...]
    moved: tuple[float, ...] = ()
    level: EqualLoss | None = None

    @property
    def fell_to(self) -> float:
        """The last loss divided by the first."""
        return self.loss[-1] / self.loss[0] if self.loss[0] > 0 else 1.0

    def loss_gap(self, tangents: Tangents) -> float:
        """Compute the largest difference of the two loss curves, relative to the initial loss.

        Args:
            tangents: The training of the tangent model.

        Returns:
            The relative difference.
        """
        gaps = [abs(a - b) for a, b in zip(self.loss, tangents.loss, strict=False)]
        return max(gaps) / self.loss[0] if self.loss[0] > 0 else 0.0

    def until(self, step: int, tangents: Tangents) -> Course:
        """Return the first part of the run, to compare it with a shorter one.

        Args:
            step: The last step of the part, a recorded one.
            tangents: The training of the tangent model.

        Returns:
            The run up to this step.
        """
        if step >= self.steps[-1]:
            return self
        count = sum(each <= step for each in self.steps)
        far, travel = max(self.distance[:count]), max(self.moved[:count], default=0.0)
        return replace(
            self,
            steps=self.steps[:count],
            loss=self.loss[:count],
            distance=self.distance[:count],
            unexplained=far / travel if travel > 0 else 0.0,
            apart=apart(self.loss[:count], tangents.loss),
            displacement=self.displacement[:count],
            drifts=tuple(drift for drift in self.drifts if drift.step <= step) or self.drifts[:1],
            moved=self.moved[:count],
            level=None,
        )

    def readings(self) -> list[Reading]:
        """The rows of the report."""
        last = self.drifts[-1]
        gap = (
            "The share of the change of the outputs that the tangent model does not explain: the largest ‖y - ȳ‖ over"
            " the largest change of the outputs of either model, at equal steps."
        )
        found = [Reading("not explained by the tangent", self.unexplained, gap, "%")]
        if self.level is not None:
            text = (
                f"The same when both have the same loss, {percent(self.level.share)} of its start, which the model"
                f" reaches at step {self.level.step} and the tangent model at step {self.level.tangent_step}."
            )
            found.append(Reading("not explained, at equal loss", self.level.unexplained, text, "%"))
        return [
            *found,
            Reading(
                "distance",
                max(self.distance),
                "The largest ‖y - ȳ‖/‖h(w₀) - y*‖, which is of the order of κ by Theorem 2.3.",
                "%",
            ),
            Reading("last loss", self.fell_to, f"The last loss over the first, after {self.steps[-1]} steps.", "%"),
            Reading("weight change", last.weights, "‖w - w₀‖/‖w₀‖: lazy training barely moves the weights.", "%"),
            Reading("kernel change", last.kernel, "‖K_T - K₀‖/‖K₀‖ after training; zero for a tangent model.", "%"),
            Reading("feature change", last.features, "‖φ_T - φ₀‖/‖φ₀‖ of the input φ of the last layer.", "%"),
            Reading("stable activations", last.activations, "The ReLUs whose state is the same as at the start.", "%"),
        ]


def apart(losses: Sequence[float], straight: Sequence[float]) -> float:
    """Compute the largest |R/R̄ - 1| at a step, as long as R̄ is above `FIT` times its initial value.

    Args:
        losses: The losses R of the model.
        straight: The losses R̄ of the tangent model, at the same steps.

    Returns:
        The relative difference.
    """
    ratios = [a / b for a, b in zip(losses, straight, strict=False) if b > FIT * straight[0]]
    return max((abs(ratio - 1) for ratio in ratios), default=0.0)


def equal_loss(
    steps: Sequence[int],
    ways: tuple[Float[Tensor, "T n"], Float[Tensor, "T n"]],
    losses: tuple[Sequence[float], Sequence[float]],
) -> EqualLoss | None:
    """Compare the model with the tangent model when they have the same loss.

    Args:
        steps: The recorded steps.
        ways: The changes of the outputs of the model and of the tangent model since the start, one row for each step.
        losses: Their losses at these steps.

    Returns:
        The comparison, or None if one of the losses did not decrease.
    """
    start = losses[0][0]
    floor = max(min((value for value in each if math.isfinite(value)), default=math.inf) for each in losses)
    if not floor < start:
        return None
    at = [next(i for i, value in enumerate(each) if value <= floor) for each in losses]
    here, there = (way[i].double() for way, i in zip(ways, at, strict=True))
    size = max(float(torch.linalg.vector_norm(each)) for each in (here, there))
    gap = float(torch.linalg.vector_norm(here - there))
    return EqualLoss(floor / start, steps[at[0]], steps[at[1]], gap / size if size > 0 else 0.0)
