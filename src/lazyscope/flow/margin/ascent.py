"""The method of talk 004: gradient ascent on the soft-min with step sizes η/√(k+1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.flow.descent import check_lr, check_record
from lazyscope.flow.margin.predictor import Predictor, check_signs, log_risk, pressure, tail_of
from lazyscope.flow.trajectory import Progress, counted
from lazyscope.labels import Target
from lazyscope.loss import Exponential, Loss

Look: TypeAlias = Callable[[Tensor], Mapping[str, Tensor]]
"""A function that measures quantities at w̄; it is called at the recorded steps."""


@final
@dataclass(frozen=True, repr=False)
class MarginPath:
    """Gradient ascent on the soft-min, recorded at T steps."""

    steps: list[int]
    """The recorded steps."""
    margin: Float[Tensor, "T *batch"]
    """The normalised margin min_i y_i f(x_i)/‖w‖^degree."""
    log_scale: Float[Tensor, "T *batch"]
    """The logarithm log ‖w‖."""
    soft_min: Float[Tensor, "T *batch"]
    """The normalised soft-min S(w)/‖w‖^degree, which differs from the margin by at most log(n)/‖w‖^degree."""
    final: Tensor
    """The direction w/‖w‖ after the last step."""
    observed: dict[str, Tensor] = field(default_factory=dict)
    """The measurements of `look`, stacked over the steps."""

    def __repr__(self) -> str:
        return f"MarginPath({len(self.steps)} records, {self.steps[-1]} steps, w {tuple(self.final.shape)})"


@torch.no_grad()
def soft_min_ascent(
    predictor: Predictor,
    y: Target,
    start: Tensor,
    *,
    steps: int,
    lr: float | int = 0.5,
    loss: Loss | None = None,
    record: int | Sequence[int] = 100,
    look: Look | None = None,
    progress: Progress | None = None,
) -> MarginPath:
    """Maximise the margin by gradient ascent on the soft-min S = -log R (talk 004).

    The step is w ← w + max(1, ‖w‖)^{2-degree} lr/√(k+1) ∇S(w) for k = 1, 2, … The steps are relative to ‖w‖, so the
    direction w̄ = w/‖w‖ performs gradient ascent on a soft-min whose temperature decreases as ‖w‖ grows.

    Args:
        predictor: The classifier, positively homogeneous in w.
        y: The labels -1 and 1, of shape (*batch, n), as a tensor, an array or a nested list.
        start: The initial weights w, with the dimensions `batch` first.
        steps: The number of steps.
        lr: The step size η, relative to ‖w‖.
        loss: `loss.Exponential()` or `loss.Logistic()`. `None` uses the exponential loss.
        record: The steps to record, or the number of steps to record, evenly spaced.
        look: A function that is called with w, up to its scale, at the recorded steps and returns measurements.
        progress: A callback that receives the completed fraction, from 0 to 1, at the recorded steps.

    Returns:
        The margins, norms and soft-mins along the path, and the final direction.

    Raises:
        InputError: If a label is not -1 or 1, the weights are not finite, or a number is invalid.
    """
    tail, marks = tail_of(loss or Exponential()), check_record(record, steps)
    rate = float(check_lr(lr, ()))
    y = check_signs(y, start)
    w, s, wanted = start.clone(), torch.zeros(start.shape[: y.ndim - 1], dtype=y.dtype, device=y.device), set(marks)
    lift = [1] * (start.ndim - y.ndim + 1)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    seen: list[Mapping[str, Tensor]] = []
    for step in counted(marks[-1] + 1, "ascent of the soft-min", progress):
        length = (s + predictor.norm(w).log()).clamp(min=0)
        w, s = w * (s - length).exp().reshape(*s.shape, *lift), length
        outputs, pull = predictor.linearise(w)
        scale = (predictor.degree * s).exp()
        margins = scale[..., None] * y * outputs
        if step in wanted:
            size = predictor.norm(w)
            whole = scale * size**predictor.degree
            columns.append((margins.amin(-1) / whole, s + size.log(), -log_risk(tail, margins) / whole))
            if look is not None:
                seen.append(look(w))
            if progress is not None:
                progress(step / max(marks[-1], 1))
        w = w + rate / (step + 2) ** 0.5 * pull(y * pressure(tail, margins))
    margin, log_scale, soft_min = (torch.stack(column) for column in zip(*columns, strict=True))
    final = w / predictor.norm(w).reshape(*s.shape, *lift)
    observed = {name: torch.stack([entry[name] for entry in seen]) for name in seen[0]} if seen else {}
    return MarginPath(marks, margin, log_scale, soft_min, final, observed)
