"""min_ν R(∫φ dν) + λ|ν|(Θ), solved by conic particles and certified: for any φ on a torus, a sphere or a box."""

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
from lazyscope.flow.base import Status
from lazyscope.flow.conic import conic_descent, safe_step
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
"""At the start: a grid of about so many, or random points where a grid would have under 4 an edge."""
_NEWTON = 200
"""Newton's method forms the Hessian of at most so many variables."""
_LIGHT = 1e-9
"""Spikes with less than this share of the mass are dropped; the certificate says whether that was right."""


@final
@dataclass(frozen=True)
class SparseSolution:
    """Spikes, and what is proved of them."""

    measure: Measure
    certificate: DualCertificate
    status: Status
    rounds: int

    @property
    def gap(self) -> float:
        """J(ν) - J* is at most this."""
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
    """Minimises J(ν) = R(∫φ dν) + λ|ν|(Θ) until J(ν) - J* ≤ tolerance, by its certificate.

    φ is a torch function (…, size) ↦ (…, k), or `Features`; `target` is y, for R(f) = ½‖f - y‖², or a `Fidelity`.
    Each round runs `steps` of conic descent, merges particles into spikes, polishes these by Newton's method, and asks
    for the certificate; where that finds J' < 0, a new particle is put, and polished, for the next round. With
    `FeatureMap(φ, curvature)` or `Trigonometric` the gap is proved, else the infimum of J' is only as good as the
    search for it. All on the CPU, in float64.

    >>> from lazyscope.model.particles import Torus, Trigonometric
    >>> wave = Trigonometric(order=3, dim=1)
    >>> y = wave.at(torch.tensor([[1.0], [3.0]], dtype=torch.float64)).integrate(torch.ones(2, dtype=torch.float64))
    >>> found = solve_sparse(wave, y, penalty=0.1, domain=Torus(1))
    >>> len(found.measure), found.gap < 1e-8, found.certificate.proved
    (2, True, True)
    """
    if not 0 < penalty < math.inf:
        raise InputError(f"λ is {penalty}; pass a positive number, as without it no bound on the mass is known.")
    features = phi if isinstance(phi, Features) else FeatureMap(phi)
    fidelity = Quadratic(target.detach().cpu().double()) if isinstance(target, Tensor) else target
    functional = Functional(features, fidelity, float(penalty), signed)
    nu = _start(functional, domain, seed) if start is None else start
    if nu.batch:
        raise InputError("One problem is solved at a time; index the family first.")
    best = replace(nu, r=0 * nu.r).merged(math.inf)  # ν = 0
    certificate = dual_certificate(functional, best, seed=seed)
    done = 0
    while certificate.gap > tolerance and done < rounds:
        done += 1
        nu = _descended(functional, nu, steps)
        best = _spikes(functional, nu)
        certificate = dual_certificate(functional, best, seed=seed)
        # Polished at once, so that J falls and no merging may take the new particle back: sliding Frank–Wolfe's step.
        nu = polish(functional, best.joined(_seeds(certificate, best)))
    status = Status.CONVERGED if certificate.gap <= tolerance else Status.HORIZON
    return SparseSolution(best, certificate, status, done)


def polish(functional: Functional, measure: Measure) -> Measure:
    """The local minimum of J over masses and positions of these spikes: L-BFGS, then Newton to rounding.

    In the masses themselves, with the bound 0: as functions of r they would creep towards it. Spikes that reach it
    are dropped.
    """
    with threads_for(0):  # few spikes, many small products
        masses, steps = _lbfgs(functional, measure)
        alive = masses > 0
        theta = measure.domain.step(measure.theta, measure.domain.tangent(measure.theta, steps))
        spikes = Measure(measure.domain, theta[alive], masses[alive].sqrt(), measure.sign[alive])
        return _newton(functional, spikes)


def _objective(functional: Functional, measure: Measure) -> Callable[[Tensor], Tensor]:
    """J as a function of masses and of steps from where the spikes are, in one vector."""
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
    """Masses, at least 0, and steps."""
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
    """Newton's method while gradients fall: near the minimum values of J no longer tell points apart, gradients do."""
    count = len(measure)
    if not 0 < count * (1 + measure.theta.shape[-1]) <= _NEWTON:
        return measure
    for _ in range(steps):
        value = _objective(functional, measure)
        x = torch.cat([measure.r.square(), torch.zeros_like(measure.theta).flatten()])
        gradient = _gradient(value, x)[1]
        low, high = (side.flatten() for side in measure.domain.room(measure.theta))
        # Spikes that a box holds at its boundary stay; lstsq leaves what has a zero row, normals to spheres too.
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
    """Uniform, with the largest mass for which J is not above J(0), halving from the bound R(0)/λ."""
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
    """Conic descent in bursts, with shorter steps after one that raised J and longer ones after others."""
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
    """Merged with the largest radius for which the polished spikes are no worse than the particles."""
    value, light = float(functional(nu)), _LIGHT * float(nu.mass)
    for radius in (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001):
        spikes = nu.merged(radius, light)
        if len(spikes) < _PARTICLES:
            spikes = polish(functional, spikes).merged(1e-5, light)
            if float(functional(spikes)) <= value + 1e-12 * (1 + abs(value)):
                return spikes
    return nu


def _seeds(certificate: DualCertificate, best: Measure) -> Measure:
    """Light particles where J' < 0."""
    mass = 1e-3 * max(float(best.mass), certificate.value / max(certificate.penalty, 1e-12) * 1e-3)
    weights = certificate.sign * (mass / len(certificate.sign))
    return Measure.of(best.domain, certificate.where, weights)
