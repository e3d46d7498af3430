"""Solve min_ν R(∫φ dν) + λ|ν|(Θ) by conic particle descent, with a certificate, on a torus, a sphere or a box."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError
from lazyscope.flow.conic import conic_descent, safe_step
from lazyscope.flow.trajectory import Status
from lazyscope.linalg.threads import threads_for
from lazyscope.model.particles import (
    Domain,
    DualCertificate,
    FeatureMap,
    Features,
    Fidelity,
    Functional,
    Measure,
    Quadratic,
    dual_certificate,
)

_PARTICLES = 256
"""The approximate number of initial particles, on a grid, or at random if the grid had fewer than 4 per axis."""
_NEWTON = 200
"""The largest number of variables for which Newton's method forms the Hessian."""
_LIGHT = 1e-9
"""The fraction of the mass below which spikes are dropped; the certificate shows whether that was correct."""


@final
@dataclass(frozen=True)
class SparseSolution:
    """A sparse measure with a certificate of its suboptimality."""

    measure: Measure
    """The measure ν, a sum of spikes."""
    certificate: DualCertificate
    """The dual certificate of ν."""
    status: Status
    """`Status.CONVERGED` if the gap is at most the tolerance, `Status.HORIZON` if the rounds were used up."""
    rounds: int
    """The number of rounds."""

    @property
    def gap(self) -> float:
        """The upper bound of J(ν) - J* from the certificate."""
        return self.certificate.gap

    def __str__(self) -> str:
        return f"{self.status} after {self.rounds} rounds: {len(self.measure)} spikes; {self.certificate}"


@without_autocast
def solve_sparse(
    phi: Features | Callable[[Tensor], Tensor],
    target: Tensor | Fidelity,
    penalty: float | int,
    domain: Domain,
    *,
    signed: bool = False,
    start: Measure | None = None,
    tolerance: float | int = 1e-8,
    rounds: int = 30,
    steps: int = 300,
    seed: int = 0,
) -> SparseSolution:
    """Minimise J(ν) = R(∫φ dν) + λ|ν|(Θ) over measures ν, until a certificate shows J(ν) - J* ≤ tolerance.

    Each round runs conic particle descent, merges the particles into spikes, refines these by Newton's method, and
    computes the dual certificate. Where the certificate finds J' < 0, a new particle is added and refined for the next
    round. The gap is proved if `phi` is `Trigonometric` or a `FeatureMap` with a curvature bound; otherwise it relies
    on a numerical search for the infimum of J'. The computation runs on the CPU, in float64.

    Args:
        phi: The feature map φ: `Features`, or a function of torch tensors from shape `(..., size)` to shape `(..., k)`.
        target: The target y of the fidelity R(f) = ½‖f - y‖², or another `Fidelity`.
        penalty: The regularisation λ, a positive finite number.
        domain: The domain Θ: a torus, a sphere or a box.
        signed: Whether to minimise over signed measures. With False, measures are nonnegative.
        start: The initial particles. `None` means a uniform grid, or random points where a grid would be too coarse.
        tolerance: The largest acceptable gap J(ν) - J*.
        rounds: The largest number of rounds.
        steps: The number of steps of conic descent per round.
        seed: The seed of the random initial points and of the search of the certificate.

    Returns:
        The measure with its certificate. Check `gap` or `status` for convergence.

    Raises:
        InputError: If λ is not positive and finite, or if `start` is a family of measures.

    Example:
        >>> from lazyscope.model.particles import Torus, Trigonometric
        >>> wave = Trigonometric(order=3, dim=1)
        >>> y = wave.at(torch.tensor([[1.0], [3.0]], dtype=torch.float64)).integrate(torch.ones(2, dtype=torch.float64))
        >>> found = solve_sparse(wave, y, penalty=0.1, domain=Torus(1))
        >>> len(found.measure), found.gap < 1e-8, found.certificate.proved
        (2, True, True)
    """
    if not 0 < penalty < math.inf:
        raise InputError(f"λ is {penalty}; pass a positive and finite number, which bounds the mass.")
    features = phi if isinstance(phi, Features) else FeatureMap(phi)
    fidelity = Quadratic(target.detach().cpu().double()) if isinstance(target, Tensor) else target
    functional = Functional(features, fidelity, float(penalty), signed)
    nu = _start(functional, domain, seed) if start is None else start
    if nu.batch:
        raise InputError("The start is a family of measures; pass one member at a time.")
    best = replace(nu, r=0 * nu.r).merged(math.inf)  # ν = 0
    certificate = dual_certificate(functional, best, seed=seed)
    done = 0
    while certificate.gap > tolerance and done < rounds:
        done += 1
        nu = _descended(functional, nu, steps)
        best = _spikes(functional, nu)
        certificate = dual_certificate(functional, best, seed=seed)
        # Refine immediately, as in sliding Frank-Wolfe, so that J decreases and merging cannot undo the new particle.
        nu = polish(functional, best.joined(_seeds(certificate, best)))
    status = Status.CONVERGED if certificate.gap <= tolerance else Status.HORIZON
    return SparseSolution(best, certificate, status, done)


def polish(functional: Functional, measure: Measure) -> Measure:
    """Find a local minimum of J over the masses and positions of spikes, by L-BFGS followed by Newton's method.

    The variables are the masses with the bound 0, rather than r, in which convergence towards 0 would be slow. Spikes
    whose mass reaches 0 are dropped.

    Args:
        functional: The functional J.
        measure: The initial spikes.

    Returns:
        The refined spikes.
    """
    with threads_for(0):  # few spikes and many small products
        masses, steps = _lbfgs(functional, measure)
        alive = masses > 0
        theta = measure.domain.step(measure.theta, measure.domain.tangent(measure.theta, steps))
        spikes = Measure(measure.domain, theta[alive], masses[alive].sqrt(), measure.sign[alive])
        return _newton(functional, spikes)


def _objective(functional: Functional, measure: Measure) -> Callable[[Tensor], Tensor]:
    """J as a function of one vector that contains the masses and the displacements of the spikes."""
    count, domain = len(measure), measure.domain

    def value(x: Tensor) -> Tensor:
        step = domain.tangent(measure.theta, x[count:].reshape(measure.theta.shape))
        return functional.value(measure.sign * x[:count], domain.step(measure.theta, step))

    return value


def _gradient(value: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    loss = value(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def _lbfgs(functional: Functional, measure: Measure) -> tuple[Tensor, Tensor]:
    """Minimise by L-BFGS, and return the masses, at least 0, and the displacements."""
    value, count = _objective(functional, measure), len(measure)
    first = torch.cat([measure.r.square(), torch.zeros_like(measure.theta).flatten()])

    def both(x: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = _gradient(value, torch.tensor(x, device="cpu"))
        return float(loss), gradient.numpy()

    low, high = (side.flatten().tolist() for side in measure.domain.room(measure.theta))
    bounds = [(0, math.inf)] * count + list(zip(low, high, strict=True))
    options = {"maxiter": 300, "ftol": 0.0, "gtol": 1e-9}
    from scipy.optimize import minimize  # imported here because it takes 0.3 s

    x = torch.from_numpy(minimize(both, first.numpy(), jac=True, bounds=bounds, method="L-BFGS-B", options=options).x)
    return x[:count], x[count:].reshape(measure.theta.shape)


def _newton(functional: Functional, measure: Measure, steps: int = 10) -> Measure:
    """Run Newton's method while the norm of the gradient decreases.

    Near the minimum the values of J are equal up to rounding, and only the gradients distinguish points.
    """
    count = len(measure)
    if not 0 < count * (1 + measure.theta.shape[-1]) <= _NEWTON:
        return measure
    for _ in range(steps):
        value = _objective(functional, measure)
        x = torch.cat([measure.r.square(), torch.zeros_like(measure.theta).flatten()])
        gradient = _gradient(value, x)[1]
        low, high = (side.flatten() for side in measure.domain.room(measure.theta))
        # Coordinates held at the boundary of a box stay fixed; lstsq does not move zero rows, such as sphere normals.
        held = ((low == 0) & (gradient[count:] > 0)) | ((high == 0) & (gradient[count:] < 0))
        free = torch.cat([torch.ones(count, dtype=torch.float64, device="cpu"), 1.0 - held.double()])
        hessian: Tensor = torch.autograd.functional.hessian(value, x) * free * free[:, None]
        step = torch.linalg.lstsq(hessian, (free * gradient)[:, None], rcond=1e-12, driver="gelsd").solution[:, 0]
        x = x - step
        after = free * _gradient(value, x)[1]
        lower = torch.linalg.vector_norm(after) < torch.linalg.vector_norm(free * gradient)
        if not bool(lower) or not bool((x[:count] > 0).all()):
            break
        walk = measure.domain.tangent(measure.theta, x[count:].reshape(measure.theta.shape))
        measure = replace(measure, r=x[:count].sqrt(), theta=measure.domain.step(measure.theta, walk))
    return measure


def _start(functional: Functional, domain: Domain, seed: int) -> Measure:
    """A uniform measure whose mass is halved from the bound R(0)/λ until J is at most J(0)."""
    number = int((_PARTICLES / len(domain.cells(1).centres)) ** (1 / domain.dim))
    if number >= 4:
        nu = Measure.grid(domain, number, signed=functional.signed)
    else:
        theta = domain.random(_PARTICLES, torch.Generator().manual_seed(seed))
        sign = torch.ones(_PARTICLES, dtype=torch.float64, device="cpu")
        sign[1::2] = -1.0 if functional.signed else 1.0
        nu = Measure.of(domain, theta, sign / _PARTICLES)
    zero = float(functional(replace(nu, r=0 * nu.r)))
    scale = max(zero - functional.fidelity.least, 1e-12) / float(functional.penalty)
    while float(functional(replace(nu, r=nu.r * scale**0.5))) > zero and scale > 1e-12:
        scale /= 2
    return replace(nu, r=nu.r * scale**0.5)


def _descended(functional: Functional, nu: Measure, steps: int, burst: int = 50) -> Measure:
    """Run conic descent in bursts. A burst that increases J is undone, and the step size is reduced; else it grows."""
    rate, value, done = safe_step(functional, nu), float(functional(nu)), 0
    while done < steps:
        path = conic_descent(functional, nu, alpha=rate, beta=rate, steps=burst, record=[burst])
        new = float(path.value[-1])
        if new <= value:
            nu, value, rate = path.final, new, 1.5 * rate
        else:
            rate /= 4
        done += burst
    return nu


def _spikes(functional: Functional, nu: Measure) -> Measure:
    """Merge particles within the largest radius for which the refined spikes have no larger J than the particles."""
    value, light = float(functional(nu)), _LIGHT * float(nu.mass)
    for radius in (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001):
        spikes = nu.merged(radius, light)
        if len(spikes) < _PARTICLES:
            spikes = polish(functional, spikes).merged(1e-5, light)
            if float(functional(spikes)) <= value + 1e-12 * (1 + abs(value)):
                return spikes
    return nu


def _seeds(certificate: DualCertificate, best: Measure) -> Measure:
    """Create particles of small mass where J' < 0."""
    mass = 1e-3 * max(float(best.mass), certificate.value / max(certificate.penalty, 1e-12) * 1e-3)
    weights = certificate.sign * (mass / len(certificate.sign))
    return Measure.of(best.domain, certificate.where, weights)
