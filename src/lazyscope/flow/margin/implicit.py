"""The normalised flow of any predictor by an implicit method, which is stable for a soft-min of any temperature.

The flow is stiff: the margins of the support vectors agree up to a relative difference of 1/‖w‖^degree, and explicit
steps would have to be that small. With the derivative of f frozen during a step h, the margins follow u' = Mp(u), where
M = (y_i y_j K_ij) and K is the tangent kernel. A step of the linearly implicit Euler method is
w ← w + h Σ_i q_i y_i ∇f(x_i), (I + hCM)q = p, C = -∂p/∂u.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.flow.margin.predictor import Predictor, check_signs, pressure, relaxed, tail_of
from lazyscope.flow.trajectory import Progress, counted
from lazyscope.labels import Target
from lazyscope.loss import Exponential, Loss

_MISSED = 0.5
"""A step is accepted if Σ_i|p_i(u) - q_i| is at most this number times Σ_i p_i after the step."""


@final
@dataclass(frozen=True, repr=False)
class MarginFlow:
    """A normalised flow of T steps."""

    margin: Float[Tensor, "T *batch"]
    """The normalised margin min_i y_i f(x_i)/‖w‖^degree."""
    log_scale: Float[Tensor, "T *batch"]
    """The logarithm log ‖w‖."""
    final: Tensor
    """The direction w/‖w‖ after the last step."""
    converged: Bool[Tensor, "*batch"]
    """Whether the difference between the soft-min and the margin reached the tolerance within the given steps."""

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
    """Integrate the normalised flow w' = ∇S(w) until the soft-min is close to the margin.

    The flow runs until log(n)/‖w‖^degree is at most `tolerance` times the margin. Then ‖w‖ is fixed for `settle` more
    steps: the direction w̄ ascends the soft-min of that temperature on the sphere, as in the "online projected gradient
    ascent" of the talk. During these steps, neurons with better directions overtake the others, which would take the
    flow itself as many e-foldings of ‖w‖. The step size is adapted for each member.

    Args:
        predictor: The classifier, positively homogeneous in w.
        y: The labels -1 and 1, of shape (*batch, n), as a tensor, an array or a nested list.
        start: The initial weights w, with the dimensions `batch` first.
        loss: `loss.Exponential()` or `loss.Logistic()`. `None` uses the exponential loss.
        tolerance: The difference between soft-min and margin, relative to the margin, at which the flow stops.
        settle: The number of steps with fixed ‖w‖ after that.
        steps: The maximum number of steps.
        reach: The maximum length of a step relative to ‖w‖, over which the derivative of f is frozen, between 0 and 1.
        progress: A callback that receives the completed fraction of the steps, from 0 to 1.

    Returns:
        The margins and norms along the flow, the final direction, and which members converged.

    Raises:
        InputError: If a label is not -1 or 1, the weights are not finite, or a number is invalid.
    """
    tail = tail_of(loss or Exponential())
    y = check_signs(y, start)
    if tolerance <= 0 or steps < 1 or not 0 < reach < 1:
        raise InputError(
            f"The tolerance is {tolerance}, the number of steps {steps} and the reach {reach}; pass a positive"
            " tolerance, at least one step, and a reach between 0 and 1."
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
        # For w̄ = e^{-s}w, the pull is multiplied by e^{(degree-2)s}, and h is in that unit: a relative step.
        push = (h * scale)[..., None, None] * signs * predictor.kernel(w)
        system = eye + relaxed(p, bend, push)
        q = torch.linalg.solve(system, p[..., None]).squeeze(-1)
        move = h.reshape(lift) * pull(y * q)
        # Relative to w = 0, any step is infinitely long; up to ‖w‖ = 1, steps are measured in units of 1.
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
