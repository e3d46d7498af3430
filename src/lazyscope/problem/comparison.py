"""Equations (4) and (5) side by side: both flows of one model from the same start, and every theorem beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Params
from lazyscope.ambient import without_autocast
from lazyscope.flow.base import Trajectory
from lazyscope.flow.objective import Times
from lazyscope.flow.ode import gradient_flow
from lazyscope.flow.tangent import tangent_flow
from lazyscope.labels import Target, as_target
from lazyscope.loss import Loss, Square
from lazyscope.model.base import Model, studied
from lazyscope.model.coordinates import Studied
from lazyscope.model.two_layer import TwoLayer
from lazyscope.theory.certificate import Certificate, Comparison
from lazyscope.theory.constants import Constants, constants_of
from lazyscope.theory.convergence import linear_rate, over_parameterised, stability
from lazyscope.theory.lazy import finite_horizon, general

Number = float | int

_FINE, _COARSE = 1e-9, 1e-7
"""Relative tolerances of the solver: what both differ by bounds the error of the finer one, with room to spare."""
_ROUNDING = 1e-13


@without_autocast
def compare(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    times: Times,
    centred: bool = False,
    unseen: Inputs | None = None,
) -> Comparison:
    """Follows w_α and w̄_α through `times` (0 is added) in float64, and measures all that the theorems speak of.

    Meant for small models: kernels are dense, one at each time.
    """
    model, x, unseen = _double(model), _double_inputs(x), None if unseen is None else _double_inputs(unseen)
    y = as_target(y, torch.empty(0, dtype=torch.float64, device="cpu"))
    y = y.double() if y.is_floating_point() else y
    times = torch.as_tensor(times, dtype=torch.float64, device="cpu")
    times = times if float(times[0]) == 0 else torch.cat([times.new_zeros(1), times])
    fine, coarse = (_flows(model, loss, x, y, times, float(alpha), centred, rtol) for rtol in (_FINE, _COARSE))
    path, tangent = fine
    assert path.params is not None
    assert tangent.params is not None
    n, scale = path.outputs.shape[1], float(alpha)
    risk = loss.risk(path.outputs[0], y)
    gradients = torch.stack([risk.gradient(out) for out in path.outputs]).flatten(1)
    kernels = [_kernel(model, {k: v[i] for k, v in path.params.items()}, scale, x) / n for i in range(len(times))]
    best = loss.minimiser(risk.target) if hasattr(loss, "minimiser") else torch.full_like(path.outputs[0], math.nan)
    # ‖∇_v R‖² = ∇RᵀK∇R/n², K = Dh Dhᵀ at w_α
    gradient = torch.stack(
        [(g @ kernel @ g / n).clamp(min=0).sqrt() for g, kernel in zip(gradients, kernels, strict=True)]
    )
    shifts = [((kernel - kernels[0]) @ g).norm() for g, kernel in zip(gradients, kernels, strict=True)]
    vague = sum(_apart(a, b, "params") for a, b in zip(fine, coarse, strict=True)) + _ROUNDING * float(
        path.travel.max()
    )
    dim = sum(_apart(a, b, "outputs") for a, b in zip(fine, coarse, strict=True))
    dim = (dim + _ROUNDING * float(path.outputs.flatten(1).norm(dim=1).max())) / math.sqrt(n)
    return Comparison(
        times=times,
        displacement=path.travel / scale,
        weights=(_flat(path.params) - _flat(tangent.params)).norm(dim=1) / scale,
        outputs=(path.outputs - tangent.outputs).flatten(1).norm(dim=1) / math.sqrt(n),
        residual=(path.outputs - best).flatten(1).norm(dim=1) / math.sqrt(n),
        gradient=gradient,
        loss=path.loss,
        kernel_floor=torch.stack([torch.linalg.eigvalsh(kernel)[0] for kernel in kernels]),
        kernel_shift=torch.stack(shifts) / math.sqrt(n),
        unseen=_beyond(model, unseen, scale, centred, path.params, tangent.params, len(times)),
        accuracy={
            "displacement": vague / scale,
            "weights": vague / scale,
            "outputs": dim,
            "residual": dim,
            "unseen": _steepest(model, unseen) * vague,
            "gradient": _steepest(model, x) * dim,
        },
    )


@without_autocast
def certify(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    K: Number = 1.0,
    horizon: Number | None = None,
    centred: bool = False,
    unseen: Inputs | None = None,
    constants: Constants | None = None,
    points: int = 40,
) -> list[Certificate]:
    """Every theorem of section 2 with explicit bounds, beside the measured distance along both flows.

    Theorem 2.2 up to T = `horizon` (K/‖Dh(w₀)‖² unless given), 2.3 (square loss only) up to K/Lip(h)², 2.4 and the
    lemmas as far as the flow was followed. Theorem 2.5 has no explicit bound; see `theory.under_parameterised`.
    """
    model, x, unseen = _double(model), _double_inputs(x), None if unseen is None else _double_inputs(unseen)
    known = constants_of(model, x) if constants is None else constants
    end = float(K / known.jacobian_norm**2 if horizon is None else horizon)
    told = {"alpha": alpha, "centred": centred, "constants": known}
    found = [general(model, loss, x, y, horizon=end, unseen=unseen, **told)]  # type: ignore[arg-type]
    if isinstance(loss, Square):
        found.append(finite_horizon(model, x, y, K=K, unseen=unseen, **told))  # type: ignore[arg-type]
    found.append(over_parameterised(model, loss, x, y, **told))  # type: ignore[arg-type]
    ends = [c.horizon for c in found if math.isfinite(c.horizon)]
    if found[-1].applies:
        # until 2.4's bound has fallen to e⁻⁵, or as many times the fastest one as an explicit solver steps through soon
        ends.append(
            min(5 / found[-1].constants["rate mσ_min²/4"].value, 30 / (loss.smoothness * known.jacobian_norm**2))
        )
    times = torch.cat([torch.linspace(0, time, points, dtype=torch.float64, device="cpu") for time in ends]).unique()
    both = compare(model, loss, x, y, alpha=alpha, times=times, centred=centred, unseen=unseen)
    return [*(c.against(both) for c in found), linear_rate(loss, both), stability(loss, both, known)]


def rank(model: Studied | nn.Module, x: Inputs) -> int:
    """rank Dh(w₀) on the data, in float64: singular values below rounding do not count."""
    kernel = _double(model).coordinates(_double_inputs(x), centred=True).kernel().detach()
    values = torch.linalg.eigvalsh(kernel)
    return int((values > 1e-12 * values[-1]).sum())


def _flows(
    model: Studied, loss: Loss, x: Inputs, y: Tensor, times: Tensor, alpha: float, centred: bool, rtol: float
) -> tuple[Trajectory, Trajectory]:
    """Equations (4) and (5), neither stopped early."""
    told = {"alpha": alpha, "centred": centred, "times": times, "keep_params": True}
    solver = {"rtol": rtol, "atol": rtol / 1e3, "tolerance": 0.0}
    path = gradient_flow(model, loss, x, y, **told, **solver)  # type: ignore[arg-type]
    return path, tangent_flow(model, loss, x, y, **told, **solver)  # type: ignore[arg-type]


def _apart(a: Trajectory, b: Trajectory, what: str) -> float:
    """The largest distance of two trajectories over time."""
    left, right = (_flat(t.params or {}) if what == "params" else t.outputs.flatten(1) for t in (a, b))
    return float((left - right).norm(dim=1).max())


def _steepest(model: Studied, x: Inputs | None) -> float:
    """sup_x ‖D_w f(w₀, x)‖, by which an error in the weights is seen in the outputs."""
    if x is None:
        return 0.0
    return math.sqrt(float(model.coordinates(x, centred=True).kernel().diagonal().max()))


def _double(model: Studied | nn.Module) -> Studied:
    model = studied(model)
    return (
        model.to(torch.float64)
        if isinstance(model, TwoLayer)
        else model.double()
        if isinstance(model, Model)
        else model
    )


def _double_inputs(x: Inputs) -> Inputs:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _kernel(model: Studied, v: Params, alpha: float, x: Inputs) -> Tensor:
    """Dh Dhᵀ at w₀ + v/α."""
    if isinstance(model, TwoLayer):
        return model.moved(v, alpha).coordinates(x, centred=True).kernel()
    assert isinstance(model, Model)
    return model.at({k: w + v[k] / alpha for k, w in model.params.items()}).coordinates(x, centred=True).kernel()


def _flat(params: Params) -> Tensor:
    return torch.cat([value.flatten(1) for value in params.values()], 1)


def _beyond(
    model: Studied,
    x: Inputs | None,
    alpha: float,
    centred: bool,
    path: Params,
    tangent: Params,
    count: int,
) -> Tensor:
    """sup |αf(w_α, x) - αf̄(w̄_α, x)| at each time."""
    if x is None:
        return torch.full((count,), math.nan, dtype=torch.float64, device="cpu")
    # αf̄ = αf(w₀) + Df(w₀)v̄: the offset is in both, so the centred maps are compared
    bent, straight = model.coordinates(x, alpha, centred=True), model.coordinates(x, math.inf, centred=True)
    moments: Sequence[int] = range(count)
    with torch.no_grad():
        gaps = [
            bent.outputs({k: v[i] for k, v in path.items()}) - straight.outputs({k: v[i] for k, v in tangent.items()})
            for i in moments
        ]
    return torch.stack([gap.flatten(1).norm(dim=1).max() if gap.ndim > 1 else gap.abs().max() for gap in gaps])
