"""Stochastic gradient descent on a small model, in expectation over all sequences of samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import derivatives, without_autocast
from lazyscope.certify.comparison import doubled
from lazyscope.errors import InputError, ModelError
from lazyscope.flow.objective import Objective, flat, unflat
from lazyscope.labels import Target, as_target
from lazyscope.loss import Loss, check_loss
from lazyscope.model.base import studied
from lazyscope.model.coordinates import Studied
from lazyscope.theory.certificate import Expectation

_PATHS = 10_000
"""The largest number of sequences of samples."""
_NEWTON = 60
"""The largest number of Newton steps; near the minimum, each of them doubles the number of correct digits."""
_ROUNDING = 1e-12


@without_autocast
def expect(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    lr: Number,
    steps: int,
    radius: Number,
    centred: bool = False,
) -> Expectation:
    """Compute the expectations that `theory.stochastic_descent` bounds, for batches of one sample.

    All nᵏ sequences of samples are followed, so the expectations are exact up to rounding. The critical point w_∞ is
    computed by Newton's method. This is meant for few samples and few steps.

    Args:
        model: A module, a `Model` or a `TwoLayer`.
        loss: The loss, an instance of a class of `lazyscope.loss`.
        x: The inputs of n samples.
        y: The targets.
        alpha: The scale α.
        lr: The step size η.
        steps: The number of steps.
        radius: The radius of the ball around w₀.
        centred: Whether `h(w₀)` is subtracted from the outputs.

    Returns:
        The mean square distance to w_∞ and the probability of having left the ball, after each step.

    Raises:
        InputError: If there are more than 10 000 sequences, or the loss is not one of `lazyscope.loss`.
        ModelError: If Newton's method finds no critical point in the ball.

    Example:
        >>> import lazyscope as ls
        >>> net = ls.TwoLayer(torch.tensor([1.0]), torch.tensor([[2.0]]), torch.tanh)
        >>> x, y = torch.tensor([[0.5], [1.0], [2.0]]), torch.tensor([0.1, -0.1, 0.2])
        >>> options = {"alpha": 1e3, "lr": 0.1, "steps": 2, "centred": True}
        >>> expect(net, ls.loss.Square(), x, y, radius=0.1, **options).exits
        tensor([0., 0., 0.], dtype=torch.float64)
    """
    loss, model, x = check_loss(loss), studied(model).double(), doubled(x)
    target = as_target(y, torch.empty(0, dtype=torch.float64, device="cpu"))
    target = target.double() if target.is_floating_point() else target
    objective = Objective.of(model, loss, x, target, float(alpha), centred)
    like = objective.coordinates.zeros()
    start = flat(like, ())
    with torch.no_grad():
        n = len(objective.coordinates.outputs(like))
    if n**steps > _PATHS:
        raise InputError(f"There are {n}^{steps} sequences of samples; use fewer steps or samples.")
    end = _critical(objective, start, like, float(radius) * float(alpha))
    points, inside = start[None], torch.ones(1, dtype=torch.bool, device=start.device)
    spread, left = [(start - end).square().sum()], [start.new_zeros(())]
    for _ in range(steps):
        moves = torch.cat([_each(objective, point, like, n) for point in points])
        # w_k counts if w₀, …, w_{k-1} are in the ball
        counted = inside.repeat_interleave(n)
        points = points.repeat_interleave(n, 0) - float(lr) * moves
        spread.append(((points - end).square().sum(1) * counted).mean())
        inside = counted & (points.norm(dim=1) <= radius * alpha)
        left.append(1 - inside.double().mean())
    return Expectation(
        times=float(lr) * torch.arange(steps + 1, dtype=torch.float64, device="cpu"),
        distance=torch.stack(spread) / float(alpha) ** 2,
        exits=torch.stack(left),
        accuracy={"distance": _ROUNDING * float(max(spread)) / float(alpha) ** 2},
    )


def _each(objective: Objective, point: Tensor, like: dict[str, Tensor], n: int) -> Tensor:
    """Compute the gradient with respect to v of the loss of each sample."""
    with derivatives():
        leaf = point.detach().requires_grad_()
        y = objective.coordinates.outputs(unflat(leaf, like))
        terms = (y * objective.risk.gradient(y.detach())).reshape(n, -1).sum(1)
        rows = [torch.autograd.grad(terms[i], leaf, retain_graph=True)[0] for i in range(n)]
    return torch.stack(rows)


def _critical(objective: Objective, start: Tensor, like: dict[str, Tensor], reach: float) -> Tensor:
    """Find the critical point of v ↦ R(y_α(v)) by Newton's method."""

    def risk(v: Tensor) -> Tensor:
        return objective.risk(objective.coordinates.outputs(unflat(v, like)))

    v, first = start, math.nan
    for _ in range(_NEWTON):
        gradient = torch.autograd.functional.jacobian(risk, v)
        first = float(gradient.norm()) if math.isnan(first) else first
        if float(gradient.norm()) <= _ROUNDING * first:
            break
        v = v - torch.linalg.solve(torch.autograd.functional.hessian(risk, v), gradient)
    if not (float(gradient.norm()) <= 1e3 * _ROUNDING * first and float(v.norm()) <= reach):
        raise ModelError("Newton's method finds no critical point in the ball; use a larger α or a larger radius.")
    return v
