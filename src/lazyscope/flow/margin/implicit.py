"""The normalised flow of any predictor by an implicit method, which does not mind how cold the soft-min is.

The flow is stiff: support vectors' margins agree up to 1/‖w‖^degree of their size, and explicit steps must be that
small too. Freeze the derivative of f during a step h; margins then follow u' = Mp(u), M = (y_i y_j K_ij) with K the
tangent kernel, and a step of the linearly implicit Euler method is w ← w + h Σ_i q_i y_i ∇f(x_i), (I + hCM)q = p,
C = -∂p/∂u.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.flow.base import Progress, counted
from lazyscope.flow.margin.base import Predictor, check_signs, pressure, relaxed, tail_of
from lazyscope.labels import Target
from lazyscope.loss import Exponential, Loss

_MISSED = 0.5
"""A step counts if Σ_i|p_i(u) - q_i| is at most this times Σ_i p_i after it."""


@final
@dataclass(frozen=True, repr=False)
class MarginFlow:
    """The end of a normalised flow, and the way to it, T steps."""

    margin: Float[Tensor, "T *batch"]
    """min_i y_i f(x_i)/‖w‖^degree."""
    log_scale: Float[Tensor, "T *batch"]
    """log ‖w‖."""
    final: Tensor
    """w/‖w‖."""
    converged: Bool[Tensor, "*batch"]
    """Whether the soft-min came as near to the margin as was asked; else the steps did not suffice."""

    def __repr__(self) -> str:
        return (
            f"MarginFlow({len(self.margin)} steps, {int(self.converged.sum())} of {self.converged.numel()} converged)"
        )


@torch.no_grad()
def margin_flow(
    predictor: Predictor,
    y: Target,
    start: Tensor,
    *,
    loss: Loss | None = None,
    tolerance: float = 1e-2,
    settle: int = 0,
    steps: int = 3000,
    reach: float = 0.05,
    progress: Progress | None = None,
) -> MarginFlow:
    """w' = ∇S(w) for the exponential loss unless said, until log(n)/‖w‖^degree is `tolerance` times the margin.

    Then ‖w‖ is held for `settle` more steps: w̄ climbs the soft-min of that temperature on the sphere, as in the talk's
    "online projected gradient ascent". That is where neurons in better places overtake others, in as many e-foldings as
    the flow itself would need of ‖w‖. Steps are as long as the frozen derivative allows, for each member by itself, and
    move w by at most `reach` of it: so far is the derivative worth freezing.
    """
    tail = tail_of(loss or Exponential())
    y = check_signs(y, start)
    if tolerance <= 0 or steps < 1 or not 0 < reach < 1:
        raise InputError(
            f"Cannot come within {tolerance} in {steps} steps that reach {reach} each; pass a positive tolerance, some"
            " steps, and a reach between 0 and 1."
        )
    batch, degree = y.shape[:-1], predictor.degree
    lift = (*batch, *[1] * (start.ndim - len(batch)))
    w, s = start, y.new_zeros(batch)
    h = y.new_full(batch, 1e-2)
    held = torch.zeros(batch, dtype=torch.bool, device=y.device)
    since = torch.zeros(batch, dtype=torch.int64, device=y.device)
    columns: list[tuple[Tensor, Tensor]] = []
    eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    signs = y[..., :, None] * y[..., None, :]
    outputs, pull = predictor.linearise(w)
    seen = y * outputs
    size = predictor.norm(w)
    for step in counted(steps, "margin flow", progress):
        scale = (degree * s).exp()
        p, bend = tail.forces(scale[..., None] * seen)
        # In w̄ = e^{-s}w the pull is e^{(degree-2)s} times as long, and h counts in that unit: a relative step.
        push = (h * scale)[..., None, None] * signs * predictor.kernel(w)
        system = eye + relaxed(p, bend, push)
        q = torch.linalg.solve(system, p[..., None]).squeeze(-1)
        move = h.reshape(lift) * pull(y * q)
        # From w = 0 any step is infinitely long; up to ‖w‖ = 1 count in units of 1.
        far = predictor.norm(move) / torch.where(s > 0, size, 1 / reach)
        ahead = w + move
        after, _ = predictor.linearise(ahead)
        now = pressure(tail, scale[..., None] * y * after)
        missed = (now - q).abs().sum(-1) / now.sum(-1)
        done = since > settle
        good = (missed <= _MISSED) & (far <= reach) & ~done
        w = torch.where(good.reshape(lift), ahead, w)
        h = torch.where(good, h * 1.3, torch.where(done, h, h / 2))
        size = predictor.norm(w)
        length = torch.where(held, s, (s + size.log()).clamp(min=0))
        shrink = torch.where(held, 1 / size, (s - length).exp())
        w, s, size = w * shrink.reshape(lift), length, size * shrink
        outputs, pull = predictor.linearise(w)
        seen = y * outputs
        whole = size**degree
        margin = seen.amin(-1) / whole
        columns.append((margin, s + size.log()))
        held = held | (math.log(y.shape[-1]) <= tolerance * margin * whole * (degree * s).exp())
        since = since + held
        if step % 20 == 0 and bool((since > settle).all()):
            break
        if progress is not None:
            progress((step + 1) / steps)
    margin, log_scale = (torch.stack(column) for column in zip(*columns, strict=True))
    return MarginFlow(margin, log_scale, w / size.reshape(lift), held)
