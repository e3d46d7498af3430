"""Comparison of the gradient flow of a model with that of its linearisation and with the bounds of the theorems."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number, Params
from lazyscope.ambient import without_autocast
from lazyscope.flow.objective import Times
from lazyscope.flow.ode import gradient_flow
from lazyscope.flow.tangent import tangent_flow
from lazyscope.flow.trajectory import Trajectory
from lazyscope.labels import Target, as_target
from lazyscope.loss import Loss, Square
from lazyscope.model.base import studied
from lazyscope.model.coordinates import Studied
from lazyscope.model.inputs import Samples
from lazyscope.theory.certificate import Certificate, Comparison
from lazyscope.theory.constants import Constants, constants_of
from lazyscope.theory.convergence import linear_rate, over_parameterised, stability
from lazyscope.theory.lazy import finite_horizon, general

_FINE, _COARSE = 1e-9, 1e-7
"""The relative tolerances of the solver. The difference of both results is a cautious bound on the finer error."""
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
    """Follow the gradient flow of a scaled model and that of its linearisation, and measure how far apart they are.

    Both flows, equations (4) and (5) of Chizat, Oyallon and Bach (2019), start at `w₀` and are integrated in float64,
    twice, with two tolerances, so that the numerical error of every quantity is known. The kernels are dense, one per
    time, so this is meant for small models.

    Args:
        model: A module, a `Model` or a `TwoLayer`.
        loss: The loss, an instance of a class of `lazyscope.loss`.
        x: The inputs, with the samples along the first dimension.
        y: The targets.
        alpha: The scale α.
        times: The times at which the flows are compared; 0 is added when it is missing.
        centred: Whether `h(w₀)` is subtracted from the outputs.
        unseen: Inputs outside the training data on which the predictions are compared as well.

    Returns:
        The distances of weights, outputs and predictions at each time, with their numerical accuracy.

    Example:
        >>> import lazyscope as ls
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x, y = torch.randn(5, 2), torch.randn(5, 1)
        >>> ls.compare(net, ls.loss.Square(), x, y, alpha=10.0, times=[0.1, 1.0]).outputs.shape
        torch.Size([3])
    """
    model, x, unseen = studied(model).double(), _double(x), None if unseen is None else _double(unseen)
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
    kernels = [_kernel(model.moved({k: v[i] for k, v in path.params.items()}, scale), x) / n for i in range(len(times))]
    best = loss.minimiser(risk.target)
    # ‖∇_v R‖² = ∇RᵀK∇R/n², K = Dh Dhᵀ at w_α
    gradient = torch.stack(
        [(g @ kernel @ g / n).clamp(min=0).sqrt() for g, kernel in zip(gradients, kernels, strict=True)]
    )
    shifts = [((kernel - kernels[0]) @ g).norm() for g, kernel in zip(gradients, kernels, strict=True)]
    in_weights = sum(_apart(a, b, "params") for a, b in zip(fine, coarse, strict=True)) + _ROUNDING * float(
        path.travel.max()
    )
    in_outputs = sum(_apart(a, b, "outputs") for a, b in zip(fine, coarse, strict=True))
    in_outputs = (in_outputs + _ROUNDING * float(path.outputs.flatten(1).norm(dim=1).max())) / math.sqrt(n)
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
            "displacement": in_weights / scale,
            "weights": in_weights / scale,
            "outputs": in_outputs,
            "residual": in_outputs,
            "unseen": _steepest(model, unseen) * in_weights,
            "gradient": _steepest(model, x) * in_outputs,
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
    """Evaluate the theorems of section 2 that have explicit bounds, and compare them with distances along both flows.

    Theorem 2.2 is evaluated up to the time `horizon`, Theorem 2.3 (square loss only) up to `K/Lip(h)²`, and Theorem 2.4
    and the lemmas up to the final time of the flow. Theorem 2.5 has no explicit bound; see
    `theory.under_parameterised`.

    Args:
        model: A module, a `Model` or a `TwoLayer`.
        loss: The loss, an instance of a class of `lazyscope.loss`.
        x: The inputs, with the samples along the first dimension.
        y: The targets.
        alpha: The scale α.
        K: The constant of Theorem 2.3, and of the default horizon.
        horizon: The final time of Theorem 2.2. `None` means `K/‖Dh(w₀)‖²`.
        centred: Whether `h(w₀)` is subtracted from the outputs.
        unseen: Inputs outside the training data on which the predictions are compared as well.
        constants: The Lipschitz constants of the model. `None` computes them, which is possible for `TwoLayer`.
        points: The number of times at which the flows are compared, per theorem.

    Returns:
        One certificate per theorem. Its `applies` is True if the hypotheses hold, and its `verdict` tells whether the
        measured distances respect the bounds.

    Example:
        >>> import lazyscope as ls
        >>> net = ls.TwoLayer.gaussian(50, 2, [0], activation=torch.tanh)[0]
        >>> x = torch.randn(4, 2)
        >>> [c.holds for c in ls.certify(net, ls.loss.Square(), x, torch.zeros(4), alpha=10.0, centred=True)][:1]
        [True]
    """
    model, x, unseen = studied(model).double(), _double(x), None if unseen is None else _double(unseen)
    known = constants_of(model, x) if constants is None else constants
    end = float(K / known.jacobian_norm**2 if horizon is None else horizon)
    found = [
        general(model, loss, x, y, alpha=alpha, centred=centred, constants=known, horizon=end, unseen=unseen),
        over_parameterised(model, loss, x, y, alpha=alpha, centred=centred, constants=known),
    ]
    if isinstance(loss, Square):
        own = finite_horizon(model, x, y, alpha=alpha, centred=centred, constants=known, K=K, unseen=unseen)
        found.insert(1, own)
    ends = [c.horizon for c in found if math.isfinite(c.horizon)]
    if found[-1].applies:
        # until the bound of Theorem 2.4 is e⁻⁵, but at most 30 times the fastest time scale, for the explicit solver
        ends.append(
            min(5 / found[-1].constants["rate mσ_min²/4"].value, 30 / (loss.smoothness * known.jacobian_norm**2))
        )
    times = torch.cat([torch.linspace(0, time, points, dtype=torch.float64, device="cpu") for time in ends]).unique()
    both = compare(model, loss, x, y, alpha=alpha, times=times, centred=centred, unseen=unseen)
    return [*(c.against(both) for c in found), linear_rate(loss, both), stability(loss, both, known)]


def rank(model: Studied | nn.Module, x: Inputs) -> int:
    """Compute the rank of `Dh(w₀)` on the data, in float64; singular values at the level of rounding do not count.

    Args:
        model: A module, a `Model` or a `TwoLayer`.
        x: The inputs, with the samples along the first dimension.

    Returns:
        The rank, at most the number of outputs times the number of samples.
    """
    kernel = _kernel(studied(model).double(), _double(x)).detach()
    values = torch.linalg.eigvalsh(kernel)
    return int((values > 1e-12 * values[-1]).sum())


def _flows(
    model: Studied, loss: Loss, x: Inputs, y: Tensor, times: Tensor, alpha: float, centred: bool, rtol: float
) -> tuple[Trajectory, Trajectory]:
    """Integrate equations (4) and (5) up to the last time."""
    options: dict[str, Any] = {"alpha": alpha, "centred": centred, "times": times, "keep_params": True}
    options |= {"rtol": rtol, "atol": rtol / 1e3, "tolerance": 0.0}
    return gradient_flow(model, loss, x, y, **options), tangent_flow(model, loss, x, y, **options)


def _apart(a: Trajectory, b: Trajectory, what: str) -> float:
    """The largest distance between two trajectories over time."""
    left, right = (_flat(t.params or {}) if what == "params" else t.outputs.flatten(1) for t in (a, b))
    return float((left - right).norm(dim=1).max())


def _steepest(model: Studied, x: Inputs | None) -> float:
    """Compute sup_x ‖D_w f(w₀, x)‖, the factor from an error in the weights to an error in the outputs."""
    if x is None:
        return 0.0
    return math.sqrt(float(_kernel(model, x).diagonal().max()))


def _double(x: Inputs) -> Inputs:
    return Samples(x).cast()


def _kernel(model: Studied, x: Inputs) -> Tensor:
    """The tangent kernel Dh Dhᵀ of a model at its own weights."""
    return model.coordinates(x, centred=True).kernel()


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
    """Compute sup |αf(w_α, x) - αf̄(w̄_α, x)| at each time."""
    if x is None:
        return torch.full((count,), math.nan, dtype=torch.float64, device="cpu")
    # αf̄ = αf(w₀) + Df(w₀)v̄ has the same offset as αf, so the centred maps are compared
    bent, straight = model.coordinates(x, alpha, centred=True), model.coordinates(x, math.inf, centred=True)
    with torch.no_grad():
        gaps = [
            bent.outputs({k: v[i] for k, v in path.items()}) - straight.outputs({k: v[i] for k, v in tangent.items()})
            for i in range(count)
        ]
    return torch.stack([gap.flatten(1).norm(dim=1).max() if gap.ndim > 1 else gap.abs().max() for gap in gaps])
