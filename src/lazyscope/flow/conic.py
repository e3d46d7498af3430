"""Conic particle gradient descent (talk 004; Chizat, 2019): r' = -2αrJ'_ν(θ), θ' = -β∇J'_ν(θ), with retractions.

It discretises the gradient flow of J in the Wasserstein-Fisher-Rao metric on nonnegative measures. With β = 0, the
positions are fixed, and it is mirror descent on the masses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError
from lazyscope.flow.descent import DIVERGED, Rate, check_record
from lazyscope.flow.trajectory import Progress, Status, counted
from lazyscope.linalg.threads import threads_for
from lazyscope.model.particles import Functional, Measure, dual_certificate

Retraction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function from (r, δ) to the new r, where δ = -2αJ' is the step of log r."""

Watch: TypeAlias = Callable[[Measure], Mapping[str, Tensor]]
"""A function that measures quantities of ν; it is called at the recorded steps."""


def mirror(r: Tensor, step: Tensor) -> Tensor:
    """The multiplicative update r e^δ, for which β = 0 is mirror descent with the entropy; r stays positive."""
    return r * step.exp()


def canonical(r: Tensor, step: Tensor) -> Tensor:
    """The update r(1 + δ) of gradient descent on r; a step beyond the tip of the cone, r = 0, ends there."""
    return r * (1 + step).clamp(min=0)


@final
@dataclass(frozen=True, repr=False)
class ConicPath:
    """A path ν_t of one measure or of a batch of measures, recorded at T steps."""

    steps: Int[Tensor, "T"]
    """The recorded steps."""
    value: Float[Tensor, "T *batch"]
    """The objective J(ν)."""
    final: Measure
    """The measure after the last step."""
    converged: Bool[Tensor, "*batch"]
    """Whether each member converged."""
    diverged: Bool[Tensor, "*batch"]
    """Whether each member diverged."""
    measures: list[Measure] = field(default_factory=list)
    """The measures at the recorded steps, if `keep` was set."""
    observed: dict[str, Tensor] = field(default_factory=dict)
    """The measurements of `watch`, stacked over the steps."""

    @property
    def status(self) -> Any:
        """The `Status` of one measure, or a NumPy array of them for a batch."""
        names = np.empty(tuple(self.converged.shape), dtype=object)
        names.fill(Status.HORIZON)
        names[self.converged.cpu().numpy()] = Status.CONVERGED
        names[self.diverged.cpu().numpy()] = Status.DIVERGED
        return names if names.ndim else names.item()

    def __repr__(self) -> str:
        return f"ConicPath({self.status}, {int(self.steps[-1])} steps, {self.final!r})"


@torch.no_grad()
@without_autocast
def conic_descent(
    functional: Functional,
    start: Measure,
    *,
    alpha: Rate,
    beta: Rate,
    steps: int,
    retraction: Retraction = mirror,
    tolerance: float | int = 0.0,
    record: int | Sequence[int] = 100,
    watch: Watch | None = None,
    keep: bool = False,
    progress: Progress | None = None,
) -> ConicPath:
    """Minimise a functional of nonnegative measures by conic particle gradient descent.

    The step is r ← retraction(r, -2αJ'), θ ← step(θ, -β∇J'), for all members of a batch at once.

    Args:
        functional: The functional J.
        start: The initial measure, or a batch of measures.
        alpha: The step size α of the masses, one positive number or one for each member.
        beta: The step size β of the positions, one non-negative number or one for each member.
        steps: The number of steps.
        retraction: The update of the masses, `mirror` or `canonical`.
        tolerance: A member has converged when, at a recorded step, the gap of its dual certificate is at most
            `tolerance`. The gap is a proven bound if the curvature of the features is known, as the certificate
            reports. With 0, no certificate is computed.
        record: The steps to record, or the number of steps to record, evenly spaced.
        watch: A function that is called with the measure at the recorded steps and returns measurements.
        keep: Whether to store the measures at the recorded steps.
        progress: A callback that receives the completed fraction, from 0 to 1, at the recorded steps.

    Returns:
        The path. If J of a member is not finite or becomes too large, the member stops moving and is marked as
        diverged.

    Raises:
        InputError: If a step size or the steps to record are invalid.
    """
    rates = [_rate(name, value, start) for name, value in (("alpha", alpha), ("beta", beta))]
    if not bool((rates[0] > 0).all()) or not bool((rates[1] >= 0).all()):
        raise InputError("The step sizes must satisfy alpha > 0 for masses and beta ≥ 0 for positions; change them.")
    marks = check_record(record, steps)
    nu, last, values = start, marks[-1], []
    measures: list[Measure] = []
    watched: list[Mapping[str, Tensor]] = []
    limit: Tensor | None = None
    converged = torch.zeros(start.batch, dtype=torch.bool, device=start.r.device)
    moving = ~converged
    wanted = set(marks)
    with threads_for(start.r.numel() * functional.predictor(start).shape[-1]):
        for step in counted(last + 1, "conic descent", progress):
            value, derivative, slope = functional.variation(nu)
            limit = DIVERGED * (1 + value) if limit is None else limit
            moving = moving & (value <= limit)
            if step in wanted:
                if tolerance:
                    proved = _proved(functional, nu, moving, float(tolerance))
                    converged, moving = converged | proved, moving & ~proved
                values.append(value)
                if keep:
                    measures.append(nu)
                if watch is not None:
                    watched.append(watch(nu))
                if progress is not None:
                    progress(step / max(last, 1))
                if step == last or not bool(moving.any()):
                    break
            # Members that have ended take a step of 0. Use a mask, since NaN times 0 is NaN.
            change = torch.where(moving[..., None], -2 * rates[0] * derivative, 0)
            walk = torch.where(moving[..., None, None], -rates[1][..., None] * slope, 0)
            nu = replace(nu, r=retraction(nu.r, change), theta=nu.domain.step(nu.theta, walk))
    missing = len(marks) - len(values)
    return ConicPath(
        steps=torch.tensor(marks, device="cpu"),
        value=torch.stack(values + values[-1:] * missing),
        final=nu,
        converged=converged,
        diverged=~(moving | converged),
        measures=measures + measures[-1:] * missing,
        observed={name: torch.stack([w[name] for w in watched + watched[-1:] * missing]) for name in watched[0]}
        if watched
        else {},
    )


def safe_step(functional: Functional, measure: Measure) -> float:
    """A first guess for α = β in `conic_descent`: 1/(4·max(|J'|, λ)) at the start, for steps of log r below ½."""
    derivative = functional.variation(measure).derivative.abs()
    size = max(float(derivative.max()), float(torch.as_tensor(functional.penalty, device="cpu").max()))
    return 1 / (4 * size) if size else math.inf


def _proved(functional: Functional, measure: Measure, moving: Tensor, tolerance: float) -> Tensor:
    """Find the moving members whose gap is at most the tolerance."""
    found = torch.zeros_like(moving)
    for index in np.ndindex(*measure.batch):
        if bool(moving[index]):
            found[index] = dual_certificate(functional[index], measure[index]).gap <= tolerance
    return found


def _rate(name: str, value: Rate, start: Measure) -> Float[Tensor, "*batch 1"]:
    rate = torch.as_tensor(value, dtype=start.r.dtype, device=start.r.device)
    if rate.shape not in (torch.Size(), torch.Size(start.batch)) or not bool(rate.isfinite().all()):
        raise InputError(f"{name} is {value}; pass one finite number, or one for each member {start.batch}.")
    return rate.expand(start.batch)[..., None]
