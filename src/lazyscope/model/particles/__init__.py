"""Measures represented by weighted particles, and convex functionals of them, after talk 004 and Chizat (2019)."""

from lazyscope.model.particles.certificate import DualCertificate, dual_certificate
from lazyscope.model.particles.domain import Box, Cells, Domain, Euclidean, Sphere, Torus
from lazyscope.model.particles.energy import AutogradEnergy, Energy, ReluPopulation, relu_interaction
from lazyscope.model.particles.features import Evaluated, FeatureMap, Features, Trigonometric
from lazyscope.model.particles.functional import (
    Fidelity,
    Functional,
    Quadratic,
    Smooth,
    Variation,
    frechet_derivative,
)
from lazyscope.model.particles.measure import Measure

__all__ = [
    "AutogradEnergy",
    "Box",
    "Cells",
    "Domain",
    "DualCertificate",
    "Energy",
    "Euclidean",
    "Evaluated",
    "FeatureMap",
    "Features",
    "Fidelity",
    "Functional",
    "Measure",
    "Quadratic",
    "ReluPopulation",
    "Smooth",
    "Sphere",
    "Torus",
    "Trigonometric",
    "Variation",
    "dual_certificate",
    "frechet_derivative",
    "relu_interaction",
]
