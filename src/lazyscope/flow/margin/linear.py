"""The normalised flow of linear classifiers at any time; reaching ‖w‖ = 10⁶ costs little more than ‖w‖ = 10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.flow.margin.predictor import Tail, check_signs, log_risk, pressure, relaxed, tail_of
from lazyscope.labels import Target
from lazyscope.loss import Exponential, Loss
from lazyscope.progress import track


@final
@dataclass(frozen=True)
class LinearPath:
    """The normalised flow of a linear classifier at T times τ."""

    times: Float[Tensor, " T"]
    """The times τ of the normalised flow."""
    log_time: Float[Tensor, "T *batch"]
    """The logarithm log t of the time at which the gradient flow w' = -∇R(w) reaches the same point."""
    w: Float[Tensor, "T *batch d"]
    """The weights at these times."""

    @property
    def direction(self) -> Float[Tensor, "T *batch d"]:
        """The direction w̄ = w/‖w‖."""
        direction: Tensor = self.w / torch.linalg.vector_norm(self.w, dim=-1, keepdim=True)
        return direction


def linear_margin_flow(
    x: Float[Tensor, "*batch n d"],
    y: Target,
    *,
    times: Float[Tensor, " T"],
    loss: Loss | None = None,
    rtol: float = 1e-8,
) -> LinearPath:
    """Integrate the normalised flow w' = ∇S(w) of a linear classifier f = w·x from w = 0.

    The flow is integrated as a stiff equation in log(1 + τ). Since w grows like τ and converges in direction, a few
    hundred steps of the Radau method reach any τ.

    Args:
        x: The inputs, of shape (*batch, n, d).
        y: The labels -1 and 1, of shape (*batch, n), as a tensor, an array or a nested list.
        times: The times τ to record, positive and increasing.
        loss: `loss.Exponential()` or `loss.Logistic()`. `None` uses the exponential loss.
        rtol: The relative tolerance of the solver.

    Returns:
        The weights at these times, in float64 on the CPU.

    Raises:
        InputError: If a label is not -1 or 1, the inputs are not finite, the times are not increasing, or the solver
            fails.
    """
    tail = tail_of(loss or Exponential())
    y = check_signs(y, x)
    if times.ndim != 1 or not bool((times[1:] > times[:-1]).all()) or not bool((times > 0).all()):
        raise InputError("The times must be positive and increasing; sort them.")
    signed = (y[..., None] * x).detach().double().cpu().reshape(-1, *x.shape[-2:])
    ends = np.log1p(times.double().numpy())
    paths = torch.stack([_stiff(rows, tail, ends, rtol) for rows in track(signed, "margin flow")], dim=1)
    paths = paths.reshape(len(times), *x.shape[:-2], -1)
    later = paths[..., -1]
    return LinearPath(times.double(), later + torch.log(-torch.expm1(-later)), paths[..., :-1])


def _stiff(rows: Tensor, tail: Tail, ends: np.ndarray, rtol: float) -> Tensor:
    """Compute (w, log(1 + t)) at the ends, of shape (T, d + 1), with log(1 + t)' = exp(-log R - log(1 + t))."""

    def ahead(now: float, state: np.ndarray) -> np.ndarray:
        margins = rows @ torch.from_numpy(state[:-1])
        clock = torch.exp(-log_risk(tail, margins) - state[-1])
        change: np.ndarray = np.exp(now) * torch.cat([pressure(tail, margins) @ rows, clock[None]]).numpy()
        return change

    # A difference quotient would be dominated by the rounding of margins, which are as large as τ.
    def jacobian(now: float, state: np.ndarray) -> np.ndarray:
        margins = rows @ torch.from_numpy(state[:-1])
        clock = torch.exp(-log_risk(tail, margins) - state[-1])
        block = torch.zeros(len(state), len(state), dtype=torch.float64, device="cpu")
        block[:-1, :-1] = -rows.T @ relaxed(*tail.forces(margins), rows)
        block[-1, :-1], block[-1, -1] = clock * (pressure(tail, margins) @ rows), -clock
        slope: np.ndarray = np.exp(now) * block.numpy()
        return slope

    from scipy.integrate import solve_ivp  # imported here because it takes 0.3 s

    solved = solve_ivp(
        ahead,
        (0.0, float(ends[-1])),
        np.zeros(rows.shape[1] + 1),
        method="Radau",
        jac=jacobian,
        t_eval=ends,
        rtol=rtol,
        atol=1e-8,
    )
    if not solved.success:
        raise InputError(f"The flow could not be integrated to the last time ({solved.message}); pass earlier times.")
    return torch.from_numpy(solved.y.T.copy())
