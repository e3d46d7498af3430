"""Distances between particle systems: W₂ between point clouds, and cone distances between measures (with POT)."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.extras import required
from lazyscope.model.particles import Domain, Euclidean, Measure

_NETWORK = 10_000_000
"""The maximum number of pivots of the network simplex; POT's default is too small for a few thousand particles."""
_FAR = 100.0
"""A cost so large that no mass is moved: beyond π/2, destroying mass is cheaper than moving it."""


def wasserstein(x: Float[Tensor, "m p"], y: Float[Tensor, "n p"], domain: Domain | None = None) -> float:
    """Compute the distance W₂ between (1/m) Σ δ_{x_i} and (1/n) Σ δ_{y_j} by the network simplex.

    Args:
        x: The points x_i, of shape (m, p).
        y: The points y_j, of shape (n, p).
        domain: The domain of the points. `None` uses Rᵖ.

    Returns:
        The distance.

    Example:
        >>> round(wasserstein(torch.zeros(1, 2), torch.tensor([[3.0, 0.0], [0.0, 4.0]])), 4)  # √((9 + 16)/2)
        3.5355
    """
    space = Euclidean(x.shape[-1]) if domain is None else domain
    return _transport(_distances(space, space.check(x), space.check(y)) ** 2)


def cone_distance(nu: Measure, other: Measure) -> float:
    """Compute Ŵ₂, the distance W₂ on the cone between the particles (√m r_i, θ_i) of two measures, of weight 1/m each.

    The distance on the cone is d² = r² + r'² - 2rr' cos(min(dist(θ, θ'), π)); between particles of unlike signs, the
    path goes through the tip. Ŵ₂ is an upper bound on `hellinger_kantorovich`, which is its infimum over all particle
    systems with these measures.

    Args:
        nu: The first measure.
        other: The second measure, on the same domain.

    Returns:
        The distance.
    """
    _single(nu, other)
    first, second = (len(m) ** 0.5 * m.r.detach().cpu().double().numpy() for m in (nu, other))
    angle = np.minimum(_angles(nu, other), math.pi)
    squared = first[:, None] ** 2 + second**2 - 2 * np.outer(first, second) * np.cos(angle)
    return _transport(np.maximum(squared, 0))


def hellinger_kantorovich(nu: Measure, other: Measure) -> float:
    """Compute the Hellinger-Kantorovich (Wasserstein-Fisher-Rao) distance by unbalanced transport (Liero et al., 2018).

    HK² = min_γ ∫c dγ + KL(γ₁|ν) + KL(γ₂|ν') with c = -2 log cos(min(dist, π/2)). Between r²δ_θ and r'²δ_θ', it is
    r² + r'² - 2rr' cos(min(dist, π/2)). The minimum is found by L-BFGS to about 10⁻⁵. The plan is feasible, so the
    result is an upper bound.

    Args:
        nu: The first measure ν.
        other: The second measure ν', on the same domain.

    Returns:
        The distance.
    """
    _single(nu, other)
    # Particles without mass do not contribute, and their logarithm would be infinite.
    nu, other = (Measure(m.domain, m.theta[m.r > 0], m.r[m.r > 0], m.sign[m.r > 0]) for m in (nu, other))
    a, b = (m.r.detach().cpu().double().square().numpy() for m in (nu, other))
    total = a.sum() + b.sum()
    if not (a.size and b.size):
        return math.sqrt(total)
    cosine = np.cos(np.minimum(_angles(nu, other), math.pi / 2))
    with np.errstate(divide="ignore"):
        cost = np.where(cosine > math.exp(-_FAR / 2), -2 * np.log(cosine), _FAR)
    return math.sqrt(min(max(_unbalanced(a, b, cost), 0.0), total))


def _unbalanced(a: np.ndarray, b: np.ndarray, cost: np.ndarray) -> float:
    """Minimise ∫c dγ + KL(γ₁|a) + KL(γ₂|b) over plans γ ≥ 0.

    POT's multiplicative updates keep all marginals positive but converge slowly, so L-BFGS continues from their result.
    (POT's own L-BFGS passes an option that SciPy has removed.)
    """
    ot = required("ot", "lab", "Distances by optimal transport")  # imported here because it takes seconds

    tiny = np.finfo(float).tiny

    def value(flat: np.ndarray) -> tuple[float, np.ndarray]:
        plan = flat.reshape(cost.shape)
        rows, columns = plan.sum(1), plan.sum(0)
        total = float((cost * plan).sum()) + _divergence(rows, a) + _divergence(columns, b)
        slopes = np.log(np.maximum(rows, tiny) / a)[:, None] + np.log(np.maximum(columns, tiny) / b)
        return total, (cost + slopes).ravel()

    start = ot.unbalanced.mm_unbalanced(a, b, cost, reg_m=1.0, div="kl", numItermax=1000)
    bounds = [(0, None)] * start.size
    options = {"maxiter": 10_000, "maxfun": 20_000, "ftol": 0.0, "gtol": 1e-10}
    from scipy.optimize import minimize  # imported here because it takes 0.3 s

    end = minimize(value, start.ravel(), jac=True, bounds=bounds, method="L-BFGS-B", options=options)
    return float(end.fun)


def _transport(cost: np.ndarray) -> float:
    ot = required("ot", "lab", "Distances by optimal transport")  # imported here because it takes seconds

    m, n = cost.shape
    value = ot.emd2(np.full(m, 1 / m), np.full(n, 1 / n), cost, numItermax=_NETWORK)
    return math.sqrt(max(float(value), 0.0))


def _distances(domain: Domain, x: Tensor, y: Tensor) -> np.ndarray:
    x, y = x.detach().cpu().double(), y.detach().cpu().double()
    if isinstance(domain, Euclidean):
        return torch.cdist(x, y).numpy()
    return domain.distance(x[:, None].expand(-1, len(y), -1), y[None]).numpy()


def _angles(nu: Measure, other: Measure) -> np.ndarray:
    """The distances between the points, with π between points of unlike signs."""
    signs = (nu.sign[:, None] == other.sign).cpu().numpy()
    return np.where(signs, _distances(nu.domain, nu.theta, other.theta), math.pi)


def _divergence(marginal: np.ndarray, given: np.ndarray) -> float:
    """Compute KL(γ|ν) = Σ γ log(γ/ν) - γ + ν."""
    seen = marginal > 0
    return float((marginal[seen] * np.log(marginal[seen] / given[seen])).sum() - marginal.sum() + given.sum())


def _single(nu: Measure, other: Measure) -> None:
    if nu.batch or other.batch:
        raise InputError("A distance is between two single measures; select one measure of each batch first.")
    if nu.domain.size != other.domain.size or type(nu.domain) is not type(other.domain):
        raise InputError("The measures are on different domains; use the same domain for both.")
