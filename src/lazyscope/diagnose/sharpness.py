"""The sharpness, which is the largest eigenvalue of the Hessian of the loss, and the edge of stability."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from lazyscope.ambient import derivatives
from lazyscope.linalg.operator import Symmetric

_TOLERANCE, _ROUNDING = 1e-3, 1e-6
"""The Lanczos method stops if its residual, which bounds the error of the eigenvalue, is this small relative to the
eigenvalue, or relative to the largest absolute value of an eigenvalue."""
_FEWEST, _PRODUCTS = 8, 200
"""The smallest and the largest number of products."""


@final
class LossHessian(Symmetric):
    """The Hessian of a loss with respect to parameters, S∇²L S for a diagonal S, by double backward passes.

    Args:
        loss: The function that maps parameters by name to the loss, a scalar.
        params: The parameters by name, at which the Hessian is computed.
        scale: The diagonal of S by name. `None` is the identity.
    """

    def __init__(
        self,
        loss: Callable[[dict[str, Tensor]], Tensor],
        params: Mapping[str, Tensor],
        scale: Mapping[str, Tensor] | None = None,
    ) -> None:
        with derivatives():
            leaves = {name: w.detach().clone().requires_grad_() for name, w in params.items()}
            value = loss(leaves)
            self._leaves = list(leaves.values())
            self._slopes = torch.autograd.grad(value, self._leaves, create_graph=True, materialize_grads=True)
        self._scale = None if scale is None else torch.cat([scale[name].to(w).flatten() for name, w in params.items()])
        size = sum(w.numel() for w in self._leaves)
        self.shape, self.dtype, self.device = (size, size), self._leaves[0].dtype, self._leaves[0].device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return torch.stack([self._product(column) for column in u.T], 1)

    def _product(self, u: Tensor) -> Tensor:
        u = u if self._scale is None else self._scale * u
        pieces = u.split([w.numel() for w in self._leaves])
        # A slope that does not depend on the parameters has no graph and contributes nothing.
        pairs = [(g, d.view_as(g)) for g, d in zip(self._slopes, pieces, strict=True) if g.requires_grad]
        if not pairs:
            return torch.zeros_like(u)
        slopes, directions = zip(*pairs, strict=True)
        with derivatives():
            rows = torch.autograd.grad(slopes, self._leaves, directions, retain_graph=True, materialize_grads=True)
        flat = torch.cat([row.flatten() for row in rows]).detach()
        return flat if self._scale is None else self._scale * flat


def largest_eigenvalue(operator: Symmetric, *, seed: int = 0) -> float:
    """Compute the largest eigenvalue by the Lanczos method without a stored basis, to a relative error of 10⁻³.

    ARPACK would keep twenty vectors of the size of the network. Three are enough for the eigenvalue alone: without
    reorthogonalisation, copies of eigenvalues appear, but the largest one is found as accurately (Paige, 1980).

    Args:
        operator: The symmetric operator.
        seed: The seed of the starting vector.

    Returns:
        The eigenvalue, or NaN if the residual is above the tolerance after all iterations.
    """
    from scipy.linalg import eigh_tridiagonal  # imported here because it takes 0.2 s

    random = torch.Generator().manual_seed(seed)
    start = torch.randn(operator.shape[0], generator=random, dtype=torch.float64, device="cpu")
    vector = (start / start.norm()).to(operator.device, operator.dtype)
    before, beta = torch.zeros_like(vector), 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    for count in range(1, _PRODUCTS + 1):
        image = operator.matvec(vector)
        diagonal.append(float(vector.double() @ image.double()))
        image = image - diagonal[-1] * vector - beta * before
        beta = float(image.double().norm())
        if not math.isfinite(beta):
            return math.nan
        values, vectors = eigh_tridiagonal(np.array(diagonal), np.array(beside))
        value, residual = float(values[-1]), beta * abs(float(vectors[-1, -1]))
        size = max(abs(values[0]), abs(values[-1]))
        small = residual <= _TOLERANCE * abs(value) or residual <= _ROUNDING * size
        if count == operator.shape[0] or (small and count >= min(_FEWEST, operator.shape[0])):
            return value
        beside.append(beta)
        before, vector = vector, image / beta
    return math.nan


@final
@dataclass(frozen=True)
class Step:
    """The step of an optimiser for one parameter, relative to the largest stable one."""

    size: Tensor | float
    """The learning rate, times the preconditioner of Adam, over the threshold of stability for curvature 1."""
    decay: float
    """The weight decay that is added to the gradient, and hence to the curvature."""


def steps(optimiser: torch.optim.Optimizer, net: nn.Module) -> dict[str, Step] | None:
    """Compute the steps of an optimiser relative to the largest stable ones.

    On a quadratic function of curvature λ, gradient descent is stable for lr·λ < 2, with heavy-ball momentum β for
    lr·λ < 2(1 + β), with Nesterov's momentum for lr·λ < 2(1 + β)/(1 + 2β), and Adam with a fixed preconditioner
    P = 1/(√v̂ + ε) for lr·Pλ < 2(1 + β₁)/(1 - β₁) (Cohen et al., 2021 and 2022). The curvature contains the weight decay
    of SGD and Adam; the decoupled one of AdamW is neglected.

    Args:
        optimiser: The optimiser.
        net: The module that it trains.

    Returns:
        The steps by parameter name. `None` if the optimiser is not SGD, Adam or AdamW, has no state yet, or trains no
        parameter of the module.
    """
    names = {id(p): name for name, p in net.named_parameters()}
    found: dict[str, Step] = {}
    for group in optimiser.param_groups:
        decay = 0.0 if isinstance(optimiser, torch.optim.AdamW) else float(group.get("weight_decay", 0.0))
        for p in group["params"]:
            if id(p) in names and p.requires_grad:
                size = _step_size(optimiser, group, p)
                if size is None:
                    return None
                found[names[id(p)]] = Step(size, decay)
    return found or None


def edge_of_stability(
    loss: Callable[[dict[str, Tensor]], Tensor], params: Mapping[str, Tensor], own: Mapping[str, Step], sharpness: float
) -> float:
    """Compute the ratio of the curvature to the largest one at which the optimiser is stable.

    Args:
        loss: The loss as a function of the parameters.
        params: The parameters that are trained, by name.
        own: The step of each of them.
        sharpness: The largest eigenvalue of the Hessian.

    Returns:
        The largest eigenvalue of S(∇²L + decay)S with S² the relative step sizes. It is 1 at the edge of stability.
    """
    used = [own[name] for name in params]
    first = used[0]
    if all(isinstance(each.size, float) and each == first for each in used):
        return float(first.size) * (sharpness + first.decay)
    scale = {
        name: torch.as_tensor(own[name].size, device=w.device).to(w).expand_as(w).sqrt() for name, w in params.items()
    }
    decay = {name: own[name].decay for name in params}

    def penalised(w: dict[str, Tensor]) -> Tensor:
        return loss(w) + sum(0.5 * decay[name] * w[name].square().sum() for name in w if decay[name])

    return largest_eigenvalue(LossHessian(penalised, params, scale))


def _step_size(optimiser: torch.optim.Optimizer, group: dict[str, Any], p: Tensor) -> Tensor | float | None:
    lr = float(group["lr"])
    if isinstance(optimiser, torch.optim.SGD):
        beta = float(group["momentum"])
        if not beta:
            return lr / 2
        rate = lr * (1 - float(group["dampening"]))
        return rate * (1 + 2 * beta if group["nesterov"] else 1) / (2 * (1 + beta))
    state = optimiser.state.get(p, {})
    if not isinstance(optimiser, torch.optim.Adam | torch.optim.AdamW) or "exp_avg_sq" not in state:
        return None
    first, second = map(float, group["betas"])
    mean: Tensor = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    root = (mean / (1 - second ** float(state["step"]))).sqrt() + float(group["eps"])
    threshold = 2 * (1 + first) / (1 - first)
    size: Tensor = lr / threshold / root
    return size
