"""Random problems with proved constants, on which certificates are tested."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from lazyscope.loss import Huber, Logistic, Loss, Penalised, Square
from lazyscope.model.base import Model
from lazyscope.model.coordinates import Studied
from lazyscope.model.two_layer import TwoLayer
from lazyscope.theory.constants import Constants, GivenConstants, TwoLayerConstants, singular_values
from lazyscope.theory.convergence import over_parameterised

_ACTIVATIONS = (torch.tanh, torch.sigmoid, torch.erf, torch.sin, torch.cos, softplus)
_LOSSES: tuple[Loss, ...] = (
    Square(),
    Square(),
    Huber(0.5),
    Logistic(),
    Penalised(Logistic(), 0.3),
    Penalised(Huber(1.0), 0.5),
)


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
    centred: bool
    """Whether the initial outputs are subtracted."""
    words: str
    """A description of the problem for failure messages."""

    @staticmethod
    def draw(seed: int) -> RandomProblem:
        """Draw a problem.

        The scale α is log-uniform, or close to the threshold of Theorem 2.4 in most problems that have one.

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

        n, loss = integer(2, 5), _LOSSES[integer(0, len(_LOSSES) - 1)]
        model, constants, x, unseen, words = (_net if integer(0, 3) else _quadratic)(n, random)
        y = torch.randn(n, generator=random, dtype=torch.float64, device="cpu")
        y = y.sign() if "Logistic" in repr(loss) else y
        centred = bool(integer(0, 1))
        alpha, k = log_uniform(0.1, 1e4), log_uniform(0.1, 10)
        if loss.strong_convexity and integer(0, 3):
            over = over_parameterised(model, loss, x, y, alpha=1.0, centred=True, constants=constants)
            if "C₀" in over.constants and (c0 := over.constants["C₀"].value) > 1e-6:
                alpha, centred = log_uniform(0.3, 10) * over.constants["‖y*‖"].value / c0, True
        words = f"seed {seed}: {words}, {loss}, n = {n}, α = {alpha:.3g}, K = {k:.3g}, centred: {centred}"
        return RandomProblem(model, constants, loss, x, y, unseen, alpha, k, centred, words)


def _net(n: int, random: torch.Generator) -> tuple[Studied, Constants, Tensor, Tensor, str]:
    """Draw a smooth two-layer network, symmetrised or not, with inputs on the sphere or in the whole space."""
    activation = _ACTIVATIONS[int(torch.randint(len(_ACTIVATIONS), (), generator=random, device="cpu"))]
    width, dim = (int(torch.randint(low, high, (), generator=random, device="cpu")) for low, high in ((2, 30), (1, 5)))
    tau = 10 ** float(torch.rand((), generator=random, device="cpu") - 0.5)
    seed = int(torch.randint(1 << 30, (), generator=random, device="cpu"))
    net = TwoLayer.gaussian(width, dim, [seed], tau=tau, activation=activation)[0].to(torch.float64)
    net = net.symmetrised() if int(torch.randint(2, (), generator=random, device="cpu")) else net
    x, unseen = (torch.randn(count, dim, generator=random, dtype=torch.float64, device="cpu") for count in (n, 5))
    if int(torch.randint(2, (), generator=random, device="cpu")):
        x, unseen = normalize(x, dim=1), normalize(unseen, dim=1)
    words = f"{activation.__name__} net of {net.a.shape[-1]} neurons in dimension {dim}, τ = {tau:.2g}"
    return net, TwoLayerConstants(net, x), x, unseen, words


def _quadratic(n: int, random: torch.Generator) -> tuple[Studied, Constants, Tensor, Tensor, str]:
    """Draw a quadratic map h(w) = c + Jw + ½B(w, w) on n points, which the inputs encode as one-hot vectors.

    Lip(Dh) = ‖B‖ everywhere, and the operator norm of the unfolding R^{p×p} → F of B is an upper bound of it.
    """
    p = int(torch.randint(2, 9, (), generator=random, device="cpu"))
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
    largest, least = singular_values(model, x)
    each = torch.linalg.matrix_norm(bent, 2)
    rows = model.jacobian(x).norm(dim=1)
    constants = GivenConstants(
        largest,
        least,
        float(torch.linalg.matrix_norm(bent.flatten(1), 2)) / math.sqrt(n),
        float(rows.max()),
        float(each.max()),
    )
    return model, constants, x, x, f"quadratic map of {p} parameters, size {size:.2g}"
