"""Random problems with proved constants, on which certificates are tested."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from lazyscope.loss import Huber, Logistic, Loss, Penalised, Square, Welsch
from lazyscope.model.base import Model
from lazyscope.model.coordinates import Studied
from lazyscope.model.two_layer import TwoLayer
from lazyscope.theory.constant_rank import least_scale
from lazyscope.theory.constants import Constants, GivenConstants, Spectrum, TwoLayerConstants
from lazyscope.theory.convergence import over_parameterised

_ACTIVATIONS = (torch.tanh, torch.sigmoid, torch.erf, torch.sin, torch.cos, softplus)
_LOSSES: tuple[Loss, ...] = (
    Square(),
    Square(),
    Huber(0.5),
    Logistic(),
    Penalised(Logistic(), 0.3),
    Penalised(Huber(1.0), 0.5),
    Welsch(1.5),
    Penalised(Welsch(1.0), 1.0),
)

_LARGEST = 1e6
"""The largest threshold close to which α is drawn; the distances for larger α are close to rounding errors."""


@dataclass(frozen=True)
class RandomProblem:
    """A random model with proved constants, with data, a loss, a scale α and a constant K, in float64.

    Example:
        >>> problem = RandomProblem.draw(seed=0)
        >>> len(problem.x) == len(problem.y)
        True
    """

    model: Studied
    """The model, a smooth two-layer network or a quadratic map."""
    constants: Constants
    """The Lipschitz constants of the model."""
    loss: Loss
    """The loss."""
    x: Tensor
    """The training inputs."""
    y: Tensor
    """The targets."""
    unseen: Tensor
    """Inputs on which predictions are compared: new points for a network, the training inputs for a quadratic map."""
    alpha: float
    """The scale α."""
    K: float
    """The constant K of Theorem 2.3."""
    lr: float
    """The step size of gradient descent, up to the threshold of stability of the tangent model."""
    centred: bool
    """Whether the initial outputs are subtracted."""
    words: str
    """A description of the problem for failure messages."""

    @staticmethod
    def draw(seed: int) -> RandomProblem:
        """Draw a problem.

        In a third of the problems, there are fewer parameters than points. The scale α is log-uniform, or close to the
        threshold of Theorem 2.4 or 2.5 in most problems that have one.

        Args:
            seed: The seed.

        Returns:
            The problem.
        """
        random = torch.Generator().manual_seed(seed)

        def integer(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (), generator=random, device="cpu"))

        def log_uniform(low: float | int, high: float | int) -> float:
            return math.exp(
                math.log(low) + math.log(high / low) * float(torch.rand((), generator=random, device="cpu"))
            )

        few = integer(0, 2) == 0
        n, loss = integer(7, 12) if few else integer(2, 5), _LOSSES[integer(0, len(_LOSSES) - 1)]
        model, constants, x, unseen, words = (_net if integer(0, 3) else _quadratic)(n, few, random)
        y = torch.randn(n, generator=random, dtype=torch.float64, device="cpu")
        y = y.sign() if "Logistic" in repr(loss) else y
        centred = bool(integer(0, 1))
        alpha, k, near = log_uniform(0.1, 1e4), log_uniform(0.1, 10), log_uniform(0.3, 10)
        step = log_uniform(0.02, 2.2) / (loss.smoothness * constants.jacobian_norm**2)
        if loss.strong_convexity > 0 and integer(0, 3):
            of = least_scale if few or integer(0, 1) else _threshold_of_four
            if (least := of(model, loss, x, y, constants=constants)) < _LARGEST:
                alpha, centred = near * least, True
        words = (
            f"seed {seed}: {words}, {loss}, n = {n}, α = {alpha:.3g}, K = {k:.3g}, η = {step:.3g}, centred: {centred}"
        )
        return RandomProblem(model, constants, loss, x, y, unseen, alpha, k, step, centred, words)


def _threshold_of_four(model: Studied, loss: Loss, x: Tensor, y: Tensor, *, constants: Constants) -> float:
    """Compute the α from which Theorem 2.4 applies, ∞ if it never does."""
    known = over_parameterised(model, loss, x, y, alpha=1.0, centred=True, constants=constants).constants
    return known["‖y*‖"].value / known["C₀"].value if "C₀" in known else math.inf


def _net(n: int, few: bool, random: torch.Generator) -> tuple[Studied, Constants, Tensor, Tensor, str]:
    """Draw a smooth two-layer network, symmetrised or not, with inputs on the sphere or in the whole space."""
    activation = _ACTIVATIONS[int(torch.randint(len(_ACTIVATIONS), (), generator=random, device="cpu"))]
    sizes = ((1, 3), (1, 3)) if few else ((2, 30), (1, 5))
    width, dim = (int(torch.randint(low, high, (), generator=random, device="cpu")) for low, high in sizes)
    tau = 10 ** float(torch.rand((), generator=random, device="cpu") - 0.5)
    seed = int(torch.randint(1 << 30, (), generator=random, device="cpu"))
    net = TwoLayer.gaussian(width, dim, [seed], tau=tau, activation=activation)[0].to(torch.float64)
    net = net.symmetrised() if int(torch.randint(2, (), generator=random, device="cpu")) else net
    x, unseen = (torch.randn(count, dim, generator=random, dtype=torch.float64, device="cpu") for count in (n, 5))
    if int(torch.randint(2, (), generator=random, device="cpu")):
        x, unseen = normalize(x, dim=1), normalize(unseen, dim=1)
    words = f"{activation.__name__} net of {net.a.shape[-1]} neurons in dimension {dim}, τ = {tau:.2g}"
    return net, TwoLayerConstants(net, x), x, unseen, words


def _quadratic(n: int, few: bool, random: torch.Generator) -> tuple[Studied, Constants, Tensor, Tensor, str]:
    """Draw a quadratic map h(w) = c + Jw + ½B(w, w) on n points, which the inputs encode as one-hot vectors.

    Lip(Dh) = ‖B‖ everywhere, and the operator norm of the unfolding R^{p×p} → F of B is an upper bound of it.
    """
    p = int(torch.randint(1, 5, (), generator=random, device="cpu")) + (0 if few else 3)
    size = 10 ** float(2 * torch.rand((), generator=random, device="cpu") - 1.5)
    offset, linear = (
        torch.randn(*shape, generator=random, dtype=torch.float64, device="cpu") for shape in ((n,), (n, p))
    )
    bent = torch.randn(n, p, p, generator=random, dtype=torch.float64, device="cpu") * size
    bent = (bent + bent.mT) / 2

    def function(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return x @ (offset + linear @ w["w"] + 0.5 * torch.einsum("kij,i,j->k", bent, w["w"], w["w"]))

    model = Model(function, {"w": torch.randn(p, generator=random, dtype=torch.float64, device="cpu")})
    x = torch.eye(n, dtype=torch.float64, device="cpu")
    each = torch.linalg.matrix_norm(bent, 2)
    rows = model.jacobian(x).norm(dim=1)
    constants = GivenConstants(
        Spectrum.of(model, x),
        float(torch.linalg.matrix_norm(bent.flatten(1), 2)) / math.sqrt(n),
        float(rows.max()),
        float(each.max()),
    )
    return model, constants, x, x, f"quadratic map of {p} parameters, size {size:.2g}"
