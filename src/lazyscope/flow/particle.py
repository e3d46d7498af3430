"""Particle gradient flow in mean-field time, w' = -m∇F_m(w) = -∇F'_μ(w_i), with or without noise (talk 004).

As m grows, it converges to the Wasserstein gradient flow of F. Noise of temperature τ adds τ times the negative entropy
to F: dw_i = -∇F'_μ(w_i) dt + √(2τ) dB_i, the noisy gradient descent of Mei, Montanari and Nguyen (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.flow.descent import DIVERGED, Rate, check_lr, check_record
from lazyscope.flow.trajectory import Progress, Status, counted
from lazyscope.linalg.threads import threads_for
from lazyscope.model.particles.energy import Energy

Look: TypeAlias = Callable[[Tensor], Mapping[str, Tensor]]
"""A function that measures quantities of the particles; it is called at the recorded steps."""


@final
@dataclass(frozen=True, repr=False)
class ParticlePath:
    """Particles of shape (*batch, m, p) along a flow, recorded at T times."""

    times: Float[Tensor, "T ..."]
    """The mean-field time Σ lr."""
    value: Float[Tensor, "T *batch"]
    """The objective F(μ)."""
    final: Float[Tensor, "*batch m p"]
    """The particles after the last step."""
    diverged: Bool[Tensor, "*batch"]
    """Whether each member diverged."""
    particles: Float[Tensor, "T *batch m p"] | None = None
    """The particles at the recorded steps, if `keep` was set."""
    observed: dict[str, Tensor] = field(default_factory=dict)
    """The measurements of `look`, stacked over the steps."""

    @property
    def status(self) -> Any:
        """The `Status` of one system, or a NumPy array of them for a batch."""
        names = np.where(self.diverged.cpu().numpy(), Status.DIVERGED, Status.HORIZON).astype(object)
        return names if names.ndim else names.item()

    def __repr__(self) -> str:
        return f"ParticlePath({len(self.times)} times, particles {tuple(self.final.shape)})"


@torch.no_grad()
def particle_flow(
    energy: Energy,
    start: Tensor,
    *,
    lr: Rate,
    steps: int,
    temperature: float | int = 0.0,
    seed: int = 0,
    record: int | Sequence[int] = 100,
    look: Look | None = None,
    keep: bool = False,
    progress: Progress | None = None,
) -> ParticlePath:
    """Integrate the particle gradient flow by Euler's method.

    The step is w_i ← w_i - lr·∇F'_μ(w_i) + √(2·lr·τ) ξ_i, which converges to the flow as lr → 0. In mean-field time,
    the same `lr` is suitable for every number of particles m.

    Args:
        energy: The objective F.
        start: The initial particles, of shape (*batch, m, p).
        lr: The step size, one number or one for each member.
        steps: The number of steps.
        temperature: The temperature τ of the noise. With 0, there is no noise.
        seed: The seed of the noise, which is drawn on the CPU, so that it does not depend on the device.
        record: The steps to record, or the number of steps to record, evenly spaced.
        look: A function that is called with the particles at the recorded steps and returns measurements.
        keep: Whether to store the particles at the recorded steps.
        progress: A callback that receives the completed fraction, from 0 to 1, at the recorded steps.

    Returns:
        The path. If F of a member becomes too large, the member stops moving and is marked as diverged.

    Raises:
        InputError: If the particles are not finite or have the wrong shape, or a number is invalid.
    """
    if start.ndim < 2 or not bool(start.isfinite().all()):
        raise InputError(
            f"Particles must be finite and of shape (…, m, p), and have shape {tuple(start.shape)}; reshape or clean"
            " them."
        )
    if temperature < 0:
        raise InputError(f"The temperature is {temperature}; pass a non-negative number.")
    batch = tuple(start.shape[:-2])
    rates, marks = check_lr(lr, batch), check_record(record, steps)
    rate = rates.to(start).expand(batch)[..., None, None]
    generator = torch.Generator().manual_seed(seed)
    w, last, wanted = start.clone(), marks[-1], set(marks)
    values: list[Tensor] = []
    kept: list[Tensor] = []
    seen: list[Mapping[str, Tensor]] = []
    limit: Tensor | None = None
    moving = torch.ones(batch, dtype=torch.bool, device=start.device)
    with threads_for(w[..., 0].numel() * w.shape[-2]):  # all pairs of particles interact
        for step in counted(last + 1, "particle flow", progress):
            value, field_at = energy.field(w)
            limit = DIVERGED * (1 + value.abs()) if limit is None else limit
            moving = moving & (value <= limit)
            if step in wanted:
                values.append(value)
                if keep:
                    kept.append(w)
                if look is not None:
                    seen.append(look(w))
                if progress is not None:
                    progress(step / max(last, 1))
                if step == last:
                    break
            move = -rate * field_at
            if temperature:
                noise = torch.randn(start.shape, dtype=start.dtype, generator=generator, device="cpu").to(start.device)
                move = move + (2 * temperature * rate).sqrt() * noise
            w = w + torch.where(moving[..., None, None], move, 0)
    return ParticlePath(
        times=torch.tensor(marks, dtype=torch.float64, device="cpu").reshape(-1, *[1] * rates.ndim) * rates,
        value=torch.stack(values),
        final=w,
        diverged=~moving,
        particles=torch.stack(kept) if keep else None,
        observed={name: torch.stack([entry[name] for entry in seen]) for name in seen[0]} if seen else {},
    )
