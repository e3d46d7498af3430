"""The constants of h around w₀ in the theorems: ‖Dh(w₀)‖, σ_min, and the Lipschitz constants of h and Dh on balls.

Norms of functions are those of F = L² of the empirical measure, and norms of parameters are Euclidean. The Lipschitz
constants are analytic upper bounds for some models, so that a certificate is a proof. Otherwise they are sampled and
labelled as estimates.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.errors import ModelError
from lazyscope.linalg.bilinear import bilinear_norm
from lazyscope.model.base import Model
from lazyscope.model.coordinates import Studied
from lazyscope.model.inputs import Samples
from lazyscope.model.jacobian import Batches, SecondDerivative
from lazyscope.model.two_layer import TwoLayer

_NEAR, _GROWTH, _STARTS = 1 / 16, 4, 8
"""For sampled constants: the first radius relative to ‖w₀‖, or to 1 if w₀ = 0; the ratio of successive radii; and
starts per search."""

BOUNDS: dict[Callable[[Tensor], Tensor], tuple[float, float]] = {
    torch.tanh: (1.0, 4 / (3 * math.sqrt(3))),  # |σ''| = 2 tanh sech², largest at tanh² = 1/3
    torch.sigmoid: (1 / 4, 1 / (6 * math.sqrt(3))),  # half of tanh at half the argument, up to a constant
    torch.erf: (2 / math.sqrt(math.pi), 2 * math.sqrt(2 / (math.pi * math.e))),  # |σ''| = 4|t|e^{-t²}/√π at t² = 1/2
    torch.sin: (1.0, 1.0),
    torch.cos: (1.0, 1.0),
    torch.nn.functional.softplus: (1.0, 1 / 4),  # σ' is the sigmoid
}
"""The suprema of |σ'| and |σ''| on the real line, for activations σ."""


@dataclass(frozen=True)
class Spectrum:
    """The extreme singular values of Dh(w₀) in F, and its rank."""

    largest: float
    """The largest singular value ‖Dh(w₀)‖."""
    least: float
    """The smallest positive singular value, 0 if Dh(w₀) = 0."""
    rank: int
    """The rank of Dh(w₀): the number of singular values above rounding."""
    parameters: int
    """The number p of parameters."""
    outputs: int
    """The dimension of F, the number of outputs of all points."""

    @property
    def injective(self) -> bool:
        """Whether the rank is the number of parameters."""
        return self.rank == self.parameters

    @property
    def surjective(self) -> bool:
        """Whether the rank is the number of outputs."""
        return self.rank == self.outputs

    @staticmethod
    @without_autocast
    def of(model: Studied, x: Inputs) -> Spectrum:
        """Compute the singular values from the dense kernel Dh(w₀)Dh(w₀)ᵀ.

        Args:
            model: The model, with weights w₀.
            x: The inputs of n points.

        Returns:
            The singular values; those below the rounding error of the kernel, in the dtype of the model, count as 0.
        """
        coordinates = model.coordinates(x, centred=True)
        kernel = coordinates.kernel().detach()
        values = torch.linalg.eigvalsh(kernel.double() / len(Samples(x))).flip(0)
        parameters = sum(w.numel() for w in coordinates.zeros().values())
        noise = 4 * math.sqrt(len(values)) * torch.finfo(kernel.dtype).eps * float(values[0])
        positive = [math.sqrt(value) for value in values[:parameters].tolist() if value > noise]
        return Spectrum(
            math.sqrt(max(0.0, float(values[0]))), min(positive, default=0.0), len(positive), parameters, len(values)
        )


class Constants(ABC):
    """The singular values of Dh(w₀) and the Lipschitz constants of h and Dh around w₀."""

    spectrum: Spectrum
    """The singular values of Dh(w₀)."""
    kind: str
    """How the Lipschitz constants are known: "upper bound" or "estimate"."""
    kinked: bool = False
    """Whether Dh jumps at kinks of the model, such as those of ReLU, so that it is not Lipschitz."""

    @property
    def jacobian_norm(self) -> float:
        """The norm ‖Dh(w₀)‖, the largest singular value."""
        return self.spectrum.largest

    @property
    def smallest(self) -> float:
        """The smallest singular value σ_min of Dh(w₀)ᵀ, 0 if Dh(w₀) is not surjective."""
        return self.spectrum.least if self.spectrum.surjective else 0.0

    @abstractmethod
    def smoothness(self, radius: Number) -> float:
        """Compute Lip(Dh) on a ball around w₀.

        Args:
            radius: The radius of the ball.

        Returns:
            The Lipschitz constant of Dh.
        """

    def lipschitz(self, radius: Number) -> float:
        """Compute an upper bound on Lip(h) on a ball around w₀, ‖Dh(w₀)‖ + r Lip(Dh).

        Args:
            radius: The radius r of the ball.

        Returns:
            The Lipschitz constant of h.
        """
        return self.jacobian_norm + radius * self.smoothness(radius)

    @abstractmethod
    def at(self, x: Inputs) -> Pointwise:
        """Compute the constants of single points, which Proposition A.1 needs.

        Args:
            x: The points.

        Returns:
            The constants M₁ and M₂ of Proposition A.1.
        """

    def radius(self, reach: Number) -> float:
        """Compute the smallest r with r · Lip(h) ≥ reach, where Lip(h) is that on the ball of radius r.

        Args:
            reach: The lower bound on r · Lip(h).

        Returns:
            The radius r.
        """
        high = 1.0
        while high * self.lipschitz(high) < reach:
            high *= 2
        return _crossing(lambda r: r * self.lipschitz(r) - reach, 0.0, high)

    def self_consistent_smoothness(self) -> float:
        """Compute the Lip(Dh) of Theorem 2.4, inf{L : Dh is L-Lipschitz on the ball of radius σ_min/(2L)} (B.3)."""
        low, high = self.smoothness(0.0), max(self.smoothness(0.0), 1e-300)
        if low == 0 and self.smoothness(1.0) == 0:
            return 0.0
        while self.smoothness(self.smallest / (2 * high)) > high:
            high *= 2
        return _crossing(lambda bound: bound - self.smoothness(self.smallest / (2 * max(bound, 1e-300))), low, high)


@dataclass(frozen=True)
class Pointwise:
    """The constants of Proposition A.1."""

    jacobian: float
    """M₁ = sup_x ‖D_w f(w₀, x)‖."""
    smoothness: Callable[[Number], float]
    """The function from the radius of a ball to M₂ = sup_x Lip(D_w f(·, x)) on it."""


class TwoLayerConstants(Constants):
    """Analytic upper bounds for a two-layer network f(x) = Σ_j a_j σ(b_j·x) with smooth σ.

    For one neuron, D²φ(u, u) = 2u_a σ'(b·x)(u_b·x) + aσ''(b·x)(u_b·x)². With S₁ = sup|σ'| λ_max(C)^½ and S₂ = sup|σ''|
    max|x| λ_max(C)^½, C = (1/n) Σ xxᵀ, its norm is at most 2S₁|u_a||u_b| + AS₂|u_b|², A = max_j |a_j| + r. The largest
    value of this form on the unit circle is (AS₂ + √(A²S₂² + 4S₁²))/2, which also bounds the whole network because D²f
    is block diagonal.

    Args:
        net: The network.
        x: The inputs, of shape (n, d).

    Raises:
        ModelError: If `net` is a batch of networks, or no bounds on σ' and σ'' are known.
    """

    kind = "upper bound"

    def __init__(self, net: TwoLayer, x: Float[Tensor, "n d"]) -> None:
        if net.batch:
            raise ModelError(f"The network is a batch of shape {net.batch}; select one network, for instance net[0].")
        if net.activation not in BOUNDS:
            known = ", ".join(sorted(function.__name__ for function in BOUNDS))
            raise ModelError(
                f"No bounds on σ' and σ'' are known for this activation; use one of {known}, or SampledConstants for"
                " estimates."
            )
        self._net, self._slope, self._bend = net, *BOUNDS[net.activation]
        self._outer = float((net.a if net.alive is None else net.a * net.alive).abs().max())
        self.spectrum = Spectrum.of(net, x)
        x = x.double()
        self._root = math.sqrt(max(0.0, float(torch.linalg.eigvalsh(x.T @ x / len(x))[-1])))
        self._longest = float(x.norm(dim=-1).max())

    def smoothness(self, radius: Number) -> float:
        return self._form(self._slope * self._root, self._bend * self._longest * self._root, radius)

    def at(self, x: Float[Tensor, "n d"]) -> Pointwise:
        kernel = self._net.to(torch.float64).coordinates(x.double(), centred=True).kernel()
        longest = float(x.double().norm(dim=-1).max())
        return Pointwise(
            math.sqrt(float(kernel.diagonal().max())),
            lambda radius: self._form(self._slope * longest, self._bend * longest**2, radius),
        )

    def _form(self, mixed: float, pure: float, radius: Number) -> float:
        pure *= self._outer + radius
        return (pure + math.hypot(pure, 2 * mixed)) / 2


@dataclass(frozen=True)
class GivenConstants(Constants):
    """Known constants, with the same Lip(Dh) on every ball: 0 for linear maps, ‖D²h‖ for quadratic maps."""

    spectrum: Spectrum
    """The singular values of Dh(w₀)."""
    hessian_norm: float
    """Lip(Dh) on every ball."""
    pointwise_jacobian: float = math.inf
    """M₁ = sup_x ‖D_w f(w₀, x)‖ of Proposition A.1."""
    pointwise_hessian: float = math.inf
    """M₂ = sup_x Lip(D_w f(·, x)) of Proposition A.1."""
    kind: str = "upper bound"
    """How the constants are known: "upper bound" or "estimate"."""

    def smoothness(self, radius: Number) -> float:
        return self.hessian_norm

    def at(self, x: Inputs) -> Pointwise:
        return Pointwise(self.pointwise_jacobian, lambda radius: self.pointwise_hessian)


_FAR = 1e8
"""The largest radius, in units of the smallest one, for which Lip(Dh) is sampled."""


def _check_radius(radius: Number, unit: float) -> None:
    if not radius <= _FAR * unit:
        raise ModelError(
            f"The theorems need Lip(Dh) within {float(radius):.3g} of the weights, too far to be sampled; pass a larger"
            " α or a smaller K, or constants that hold everywhere."
        )


class SampledConstants(Constants):
    """Sampled estimates for any model.

    Lip(Dh) is the largest ‖D²h(w)‖ at w₀ and at random points at the given distance from w₀, an estimate from below.
    For a model with kinks, D²h is the second derivative almost everywhere, which does not account for the kinks; the
    theorems do not apply to it.

    Args:
        model: The model.
        x: The inputs of n points.
        samples: The number of random points for each radius.
        seed: The seed of the random points.
    """

    kind = "estimate"

    def __init__(self, model: Model, x: Inputs, *, samples: int = 4, seed: int = 0) -> None:
        self._model, self._x, self._samples, self._seed = model, x, samples, seed
        self._points = Batches(x, 1).n
        self.kinked = model.kinked(x)
        self.spectrum = Spectrum.of(model, x)
        length = math.sqrt(sum(float(w.square().sum()) for w in model.params.values()))
        self._unit = _NEAR * (length if length > 0 else 1.0)
        self._known: list[float] = []

    def smoothness(self, radius: Number) -> float:
        # Computed once for each of a few growing radii, so that the estimate increases with the radius.
        _check_radius(radius, self._unit)
        last = 0 if radius <= self._unit else math.ceil(math.log(radius / self._unit, _GROWTH))
        for k in range(len(self._known), last + 1):
            here = self._largest(self._x, self._unit * _GROWTH**k) / math.sqrt(self._points)
            self._known.append(max([here, *self._known[-1:]]))
        return self._known[last]

    def at(self, x: Inputs) -> Pointwise:
        single = list(Batches(x, 1))
        jacobian = max(Spectrum.of(self._model, part).largest for part in single)
        return Pointwise(jacobian, lambda radius: max(self._largest(part, radius) for part in single))

    @without_autocast
    def _largest(self, x: Inputs, radius: Number) -> float:
        random = torch.Generator().manual_seed(self._seed)
        found = bilinear_norm(SecondDerivative(self._model, x, batch=512).compact(), starts=_STARTS).value
        for _ in range(self._samples if radius else 0):
            moves = {k: _drawn(w, random) for k, w in self._model.params.items()}
            length = math.sqrt(sum(float(move.square().sum()) for move in moves.values()))
            moved = self._model.at({k: w + moves[k] * (radius / length) for k, w in self._model.params.items()})
            found = max(found, bilinear_norm(SecondDerivative(moved, x, batch=512).compact(), starts=_STARTS).value)
        return found


def constants_of(model: Studied, x: Inputs) -> Constants:
    """Compute the best known constants of a model: analytic for smooth two-layer networks, sampled otherwise.

    Args:
        model: A `TwoLayer` network or a `Model`.
        x: The inputs of n points.

    Returns:
        The constants.

    Raises:
        ModelError: If the model is a batch of networks or of another type.
    """
    if isinstance(model, TwoLayer):
        if not model.batch and model.activation in BOUNDS:
            return TwoLayerConstants(model, x)
        if model.batch:
            raise ModelError(f"The network is a batch of shape {model.batch}; select one network, for instance net[0].")
        activation = model.activation
        return SampledConstants(Model(lambda w, x: activation(x @ w["b"].mT) @ w["a"], model.params), x)
    if isinstance(model, Model):
        return SampledConstants(model, x)
    raise ModelError(f"Constants are not known for a model of type {type(model).__name__}; pass a Model or a TwoLayer.")


def _drawn(like: Tensor, random: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=random, dtype=torch.float32, device="cpu").to(like)


def _crossing(function: Callable[[float], float], low: float, high: float) -> float:
    """Find where an increasing function becomes ≥ 0, by bisection, and return the upper end of the last interval."""
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if function(middle) >= 0 else (middle, high)
    return high
