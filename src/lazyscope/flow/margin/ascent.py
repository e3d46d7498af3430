"""The talk's method: ascent of the soft-min with steps η/√(k+1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.flow.base import Progress, counted
from lazyscope.flow.descent import check_lr, check_record
from lazyscope.flow.margin.base import Predictor, check_signs, log_risk, pressure, tail_of
from lazyscope.labels import Target
from lazyscope.loss import Exponential, Loss

Look: TypeAlias = Callable[[Tensor], Mapping[str, Tensor]]
"""Measures something at w̄; called at the recorded steps."""


@final
@dataclass(frozen=True, repr=False)
class MarginPath:
    """An ascent of the soft-min, recorded at T steps."""

    steps: list[int]
    margin: Float[Tensor, "T *batch"]
    """min_i y_i f(x_i)/‖w‖^degree."""
    log_scale: Float[Tensor, "T *batch"]
    """log ‖w‖: how far it went."""
    soft_min: Float[Tensor, "T *batch"]
    """S(w)/‖w‖^degree: below the margin by log(n)/‖w‖^degree at most."""
    final: Tensor
    """w/‖w‖."""
    observed: dict[str, Tensor] = field(default_factory=dict)

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
    """w ← w + max(1, ‖w‖)^{2-degree} lr/√(k+1) ∇S(w), k = 1, 2, …: the talk's method.

    For the exponential loss unless said. Its steps are relative to ‖w‖, so w̄ performs ascent of a soft-min whose
    temperature falls as ‖w‖ grows.
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
