"""Comparison of training a model, by gradient flow or gradient descent, with training its linearisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number, Params
from lazyscope.ambient import without_autocast
from lazyscope.arguments import check_number
from lazyscope.flow.descent import gradient_descent
from lazyscope.flow.objective import Times, check_times
from lazyscope.flow.ode import gradient_flow
from lazyscope.flow.tangent import tangent_flow
from lazyscope.flow.trajectory import Trajectory
from lazyscope.labels import Target, as_target
from lazyscope.loss import Loss, Risk, check_loss
from lazyscope.model.base import studied
from lazyscope.model.coordinates import Studied
from lazyscope.model.inputs import Samples, check_samples
from lazyscope.theory.certificate import Comparison
from lazyscope.theory.curvature import Curvature

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

    Raises:
        InputError: If the loss is not one of `lazyscope.loss`, or there are no times or they do not increase.

    Example:
        >>> import lazyscope as ls
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x, y = torch.randn(5, 2), torch.randn(5, 1)
        >>> ls.compare(net, ls.loss.Square(), x, y, alpha=10.0, times=[0.1, 1.0]).outputs.shape
        torch.Size([3])
    """
    _check_pair(loss, alpha, unseen)
    model, x, unseen = studied(model).double(), doubled(x), None if unseen is None else doubled(unseen)
    times = check_times(times, infinity=False)
    times = times if float(times[0]) == 0 else torch.cat([times.new_zeros(1), times])
    both = _Pair.of(model, loss, x, y, float(alpha), centred)
    options: dict[str, Any] = {"alpha": float(alpha), "centred": centred, "times": times, "keep_params": True}
    fine, coarse = (
        (gradient_flow(model, loss, x, both.target, **at), tangent_flow(model, loss, x, both.target, **at))
        for rtol in (_FINE, _COARSE)
        for at in [options | {"rtol": rtol, "atol": rtol / 1e3, "tolerance": 0.0}]
    )
    return both.compared(times, fine, coarse, unseen)


def _check_pair(loss: Any, alpha: Any, unseen: Inputs | None) -> None:
    check_loss(loss)
    check_number("alpha", alpha)
    if unseen is not None:
        check_samples(unseen)


@without_autocast
def compare_steps(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    lr: Number,
    steps: int,
    centred: bool = False,
    points: int = 10,
) -> Comparison:
    """Follow gradient descent on a scaled model and on its linearisation, and measure how far apart they are.

    Both descents start at `w₀` and run in float64, so the numerical error is that of rounding.

    Args:
        model: A module, a `Model` or a `TwoLayer`.
        loss: The loss, an instance of a class of `lazyscope.loss`.
        x: The inputs, with the samples along the first dimension.
        y: The targets.
        alpha: The scale α.
        lr: The step size η.
        steps: The number of steps.
        centred: Whether `h(w₀)` is subtracted from the outputs.
        points: The number of steps at which the descents are compared.

    Returns:
        The distances at each recorded step k, whose time is ηk.

    Raises:
        InputError: If the loss is not one of `lazyscope.loss`, or a number is invalid.

    Example:
        >>> import lazyscope as ls
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> x, y = torch.randn(5, 2), torch.randn(5, 1)
        >>> compare_steps(net, ls.loss.Square(), x, y, alpha=10.0, lr=0.1, steps=20, points=5).times
        tensor([0.0000, 0.5000, 1.0000, 1.5000, 2.0000], dtype=torch.float64)
    """
    model, x = studied(model).double(), doubled(x)
    both = _Pair.of(model, loss, x, y, float(alpha), centred)
    options: dict[str, Any] = {"lr": lr, "steps": steps, "record": points, "keep_params": True}
    path = gradient_descent(model, loss, x, both.target, alpha=alpha, centred=centred, **options)
    assert path.steps is not None
    tangent = both.tangent_steps(float(lr), set(path.steps.tolist()))
    return both.compared(path.times, (path, tangent), (path, tangent), None)


@dataclass(frozen=True)
class _Path:
    """The outputs and the coordinates v along a path."""

    outputs: Tensor
    params: dict[str, Tensor]


@dataclass(frozen=True)
class _Pair:
    """A model on its data, and its linearisation, from the same start."""

    model: Studied
    x: Inputs
    alpha: float
    centred: bool
    target: Tensor
    risk: Risk

    @staticmethod
    def of(model: Studied, loss: Loss, x: Inputs, y: Target, alpha: float, centred: bool) -> _Pair:
        loss, coordinates = check_loss(loss), model.coordinates(x, alpha, centred=centred)
        with torch.no_grad():
            y0 = coordinates.outputs(coordinates.zeros())
        target = as_target(y, y0)
        target = target.double() if target.is_floating_point() else target
        return _Pair(model, x, alpha, centred, target, loss.risk(y0, target))

    def tangent_steps(self, lr: float, recorded: set[int]) -> _Path:
        """Gradient descent on v ↦ R(y(0) + Dh(w₀)v), at the recorded steps."""
        straight = self.model.coordinates(self.x, math.inf, centred=True)
        bent = self.model.coordinates(self.x, self.alpha, centred=self.centred)
        v = straight.zeros()
        with torch.no_grad():
            start = bent.outputs(v)
        outputs, params = [], []
        for step in range(max(recorded) + 1):
            increment, pull = straight.linearise(v)
            if step in recorded:
                outputs.append(start + increment)
                params.append(v)
            slope = pull(self.risk.gradient(start + increment) / len(start))
            v = {name: value - lr * slope[name] for name, value in v.items()}
        return _Path(torch.stack(outputs), {name: torch.stack([v[name] for v in params]) for name in v})

    def gradients(self, path: Trajectory | _Path) -> Tensor:
        """Compute ‖∇_v R‖ along the path of the model."""
        coordinates, found = self.model.coordinates(self.x, self.alpha, centred=self.centred), []
        for i in range(len(path.outputs)):
            y, pull = coordinates.linearise({name: v[i] for name, v in (path.params or {}).items()})
            slope = pull(self.risk.gradient(y) / len(y))
            found.append(torch.cat([g.flatten() for g in slope.values()]).norm())
        return torch.stack(found)

    def compared(
        self,
        times: Tensor,
        fine: tuple[Trajectory, Trajectory | _Path],
        coarse: tuple[Trajectory, Trajectory | _Path],
        unseen: Inputs | None,
    ) -> Comparison:
        """Measure the distances along two paths; the coarse ones have a larger numerical error, or none."""
        (path, tangent), model, x, alpha = fine, self.model, self.x, self.alpha
        assert path.params is not None
        assert tangent.params is not None
        n = path.outputs.shape[1]
        slopes = torch.stack([self.risk.gradient(out) for out in path.outputs]).flatten(1)
        moved = [model.moved({k: v[i] for k, v in path.params.items()}, alpha) for i in range(len(times))]
        kernels = [_kernel(each, x) / n for each in moved]
        best, gradient = self.risk.loss.minimiser(self.risk.target), self.gradients(path)
        shifts = [((kernel - kernels[0]) @ g).norm() for g, kernel in zip(slopes, kernels, strict=True)]
        in_weights = sum(_apart(a, b, "params") for a, b in zip(fine, coarse, strict=True))
        in_weights += _ROUNDING * float(path.travel.max())
        in_outputs = sum(_apart(a, b, "outputs") for a, b in zip(fine, coarse, strict=True))
        in_outputs = (in_outputs + _ROUNDING * float(path.outputs.flatten(1).norm(dim=1).max())) / math.sqrt(n)
        in_gradient = 0.0 if coarse is fine else float((gradient - self.gradients(coarse[0])).abs().max())
        # the rounding error of ∇R(y) is relative to ∇R, and also to y, where it is a difference of outputs and targets
        smooth, size = Curvature.of(self.risk).smoothness, float(path.outputs.flatten(1).norm(dim=1).max())
        largest = float(slopes.norm(dim=1).max()) + (smooth * size if math.isfinite(smooth) else 0.0)
        in_gradient += _ROUNDING * _steepest(model, x) * largest / math.sqrt(n)
        return Comparison(
            times=times,
            displacement=path.travel / alpha,
            weights=(_flat(path.params) - _flat(tangent.params)).norm(dim=1) / alpha,
            outputs=(path.outputs - tangent.outputs).flatten(1).norm(dim=1) / math.sqrt(n),
            residual=(path.outputs - best).flatten(1).norm(dim=1) / math.sqrt(n),
            gradient=gradient,
            loss=path.loss,
            kernel_floor=torch.stack([torch.linalg.eigvalsh(kernel)[0] for kernel in kernels]),
            kernel_shift=torch.stack(shifts) / math.sqrt(n),
            unseen=_beyond(model, unseen, alpha, path.params, tangent.params, len(times)),
            accuracy={
                "displacement": in_weights / alpha,
                "weights": in_weights / alpha,
                "outputs": in_outputs,
                "residual": in_outputs,
                "unseen": _steepest(model, unseen) * in_weights,
                "gradient": in_gradient,
            },
        )


def _apart(a: Trajectory | _Path, b: Trajectory | _Path, what: str) -> float:
    """The largest distance between two trajectories over time."""
    left, right = (_flat(t.params or {}) if what == "params" else t.outputs.flatten(1) for t in (a, b))
    return float((left - right).norm(dim=1).max())


def _steepest(model: Studied, x: Inputs | None) -> float:
    """Compute sup_x ‖D_w f(w₀, x)‖, the factor from an error in the weights to an error in the outputs."""
    if x is None:
        return 0.0
    return math.sqrt(float(_kernel(model, x).diagonal().max()))


def doubled(x: Inputs) -> Inputs:
    """Cast inputs to float64."""
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
