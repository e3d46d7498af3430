"""Modular addition learned by the net of the experiment `grokking`, fast enough for a page.

The net Σ_j b_j (a_j·x)²/(2√m) is a polynomial, so its increments have a closed form. With ε = 1/α, z₀ = Xa₀ᵀ and
δ = Xv_aᵀ,

    2√m y_α(v) = (2z₀δ + εδ²)(b₀ + εv_b)ᵀ + z₀²v_bᵀ,

which subtracts no two close numbers, holds at α = ∞, and takes a fifth of the time of the traced model. A test compares
both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.experiments.grokking import MOMENTUM, STEP, modular, net
from lazyscope.flow.descent import gradient_descent, log_spaced
from lazyscope.linalg.eigen import top_eigenpairs
from lazyscope.linalg.operator import Symmetric
from lazyscope.loss import Square
from lazyscope.model.coordinates import Alpha, Coordinates, Pull, Studied, check_alpha


@final
@dataclass(frozen=True)
class QuadraticNet(Studied):
    """The net h(x) = Σ_j b_j (a_j·x)²/(2√m), centred.

    Args:
        a: The hidden weights, of shape `(m, d)`.
        b: The output weights, of shape `(k, m)`.
    """

    a: Float[Tensor, "m d"]
    b: Float[Tensor, "k m"]

    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = True) -> QuadraticCoordinates:
        """Return the map v ↦ α(h(w₀ + v/α) - h(w₀)).

        Args:
            x: The inputs.
            alpha: The scale α > 0. `math.inf` is allowed.
            centred: True; the net has no other form.

        Returns:
            The tangent coordinates on these inputs.
        """
        assert centred
        assert isinstance(x, Tensor)
        return QuadraticCoordinates(self, x, check_alpha(alpha))


@final
class QuadraticCoordinates(Coordinates):
    """The map v ↦ α(h(w₀ + v/α) - h(w₀)), with its derivative.

    Args:
        net: The net.
        x: The inputs.
        alpha: The scale α.
    """

    def __init__(self, net: QuadraticNet, x: Tensor, alpha: Tensor) -> None:
        self.batch, self.alpha, self._net, self._x = (), alpha, net, x
        self._epsilon, self._scale = 1 / float(alpha), 1 / (2 * math.sqrt(len(net.a)))
        self._pre = x @ net.a.mT
        self._act = self._pre.square()

    def zeros(self) -> dict[str, Tensor]:
        return {"a": torch.zeros_like(self._net.a), "b": torch.zeros_like(self._net.b)}

    def outputs(self, v: Params) -> Tensor:
        return self._parts(v)[0]

    @torch.no_grad()
    def linearise(self, v: Params) -> tuple[Tensor, Pull]:
        y, slope, act, b = self._parts(v)
        return y, partial(self._pull, slope, act, b)

    def kernel(self) -> Tensor:
        own = torch.eye(len(self._net.b)).to(self._act)
        output = torch.einsum("im,jm,kl->ikjl", self._act, self._act, own)
        hidden = torch.einsum("im,jm,km,lm,ij->ikjl", *[self._pre] * 2, *[self._net.b] * 2, 4 * self._x @ self._x.mT)
        return (self._scale**2 * (output + hidden)).flatten(2).flatten(0, 1)

    def _parts(self, v: Params) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the outputs, and the arrays of their derivative: 2z, z² and b at w₀ + v/α."""
        delta = self._x @ v["a"].mT
        slope = 2 * self._pre + self._epsilon * delta
        rise = slope * delta
        b = self._net.b + self._epsilon * v["b"]
        y = self._scale * (rise @ b.mT + self._act @ v["b"].mT)
        return y, slope + self._epsilon * delta, self._act + self._epsilon * rise, b

    def _pull(self, slope: Tensor, act: Tensor, b: Tensor, u: Tensor) -> dict[str, Tensor]:
        return {"a": self._scale * ((u @ b) * slope).mT @ self._x, "b": self._scale * u.mT @ act}


@final
class _Kernel(Symmetric):
    """The tangent kernel, by products with the derivative at α = ∞ and its transpose."""

    def __init__(self, net: QuadraticNet, x: Tensor) -> None:
        self._linear, self._size = net.coordinates(x, math.inf), (len(x), len(net.b))
        self.shape = (math.prod(self._size), math.prod(self._size))
        self.dtype, self.device = x.dtype, x.device

    def matmat(self, u: Tensor) -> Tensor:
        pull, push = self._linear.pull_back, self._linear.outputs
        return torch.stack([push(pull(column.view(self._size))).flatten() for column in u.mT], dim=-1)


@final
@dataclass(frozen=True)
class Addition:
    """The training on a + b mod p, recorded at T steps."""

    steps: Int[Tensor, " T"]
    """The recorded steps."""
    train: Float[Tensor, "T 2"]
    """The training loss and accuracy."""
    test: Float[Tensor, "T 2"]
    """The test loss and accuracy."""
    right: Float[Tensor, "T pairs"]
    """1 for each pair (a, b) that is answered correctly, 0 otherwise; training pairs come first."""
    pairs: Int[Tensor, "pairs 2"]
    """The pairs (a, b)."""
    trained: int
    """The number of training pairs."""
    displacement: Float[Tensor, " T"]
    """‖w - w₀‖/‖w₀‖."""
    pure: Float[Tensor, " T"]
    """The mean over the neurons of the largest share of one frequency in the power of their weights on a."""


@cache
def _task(base: int, width: int, seed: int) -> tuple[QuadraticNet, tuple[Tensor, ...], Callable[..., Tensor], float]:
    """Return the net, the data, the decision, and λ_max(K), which do not depend on α."""
    task = modular(base, seed)
    data = tuple(each.double() for each in (task.x, task.y, task.x_test, task.y_test))
    weights = net(2 * base, base, width, seed).params
    model = QuadraticNet(weights["a"].double(), weights["b"].double())
    top = float(top_eigenpairs(_Kernel(model, data[0]), 1, tolerance=1e-3, title="step size").values[0])
    return model, data, task.decide, top


def learn_addition(base: int, alpha: float, *, width: int, seed: int, steps: int, frames: int) -> Addition:
    """Train the net on the table of addition modulo p, as the experiment `grokking` does.

    Args:
        base: The number p.
        alpha: The scale α. `math.inf` trains the tangent model.
        width: The hidden width.
        seed: The seed of the net and of the choice of the training pairs.
        steps: The number of steps.
        frames: The approximate number of recorded steps.

    Returns:
        The recorded training.
    """
    model, (x, y, x_test, y_test), decide, top = _task(base, width, seed)
    unseen = model.coordinates(x_test, alpha)
    path = gradient_descent(
        model,
        Square(),
        x,
        y,
        lr=STEP * len(x) / top * min(1.0, alpha) ** (4 / 3),
        steps=steps,
        alpha=alpha,
        centred=True,
        momentum=MOMENTUM,
        record=log_spaced(steps, frames),
        observe=lambda v: {"test": unseen.outputs(v)},
        keep_params=True,
    )
    assert path.params is not None
    assert path.steps is not None
    seen, test = path.outputs, path.observed["test"]
    right = [(decide(o) == decide(t)).double() for o, t in ((seen, y), (test, y_test))]
    losses = [0.5 * (o - t).square().sum(-1).mean(-1) for o, t in ((seen, y), (test, y_test))]
    inputs = torch.cat([x, x_test])
    return Addition(
        steps=path.steps,
        train=torch.stack([losses[0], right[0].mean(-1)], dim=-1),
        test=torch.stack([losses[1], right[1].mean(-1)], dim=-1),
        right=torch.cat(right, dim=-1),
        pairs=torch.stack([inputs[:, :base].argmax(-1), inputs[:, base:].argmax(-1)], dim=-1),
        trained=len(x),
        displacement=path.displacement / math.hypot(float(model.a.norm()), float(model.b.norm())),
        pure=purity(model.a + path.params["a"] / alpha, base),
    )


def purity(a: Float[Tensor, "*batch m d"], base: int) -> Float[Tensor, "*batch"]:
    """Compute the largest share of one frequency in the power of a neuron's weights on the first number.

    Args:
        a: The hidden weights. Their first p columns are the weights on the first number.
        base: The number p.

    Returns:
        The mean over the neurons: about (ln p)/(p/2) for random weights, and 1 for waves.
    """
    power = torch.fft.rfft(a[..., :base]).abs().square()[..., 1:]
    shares: Tensor = power.amax(-1) / power.sum(-1)
    return shares.mean(-1)
