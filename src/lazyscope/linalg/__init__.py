"""Matrix-free linear algebra on operators that are given by their products with vectors."""

from lazyscope.linalg.density import SpectralDensity, spectral_density, spectral_measure
from lazyscope.linalg.eigen import Eigenpairs, eigenpairs, operator_norm, top_eigenpairs
from lazyscope.linalg.operator import Dense, Operator, Symmetric
from lazyscope.linalg.solve import Solution, conjugate_gradients
from lazyscope.linalg.trace import Estimate, trace

__all__ = [
    "Dense",
    "Eigenpairs",
    "Estimate",
    "Operator",
    "Solution",
    "SpectralDensity",
    "Symmetric",
    "conjugate_gradients",
    "eigenpairs",
    "operator_norm",
    "spectral_density",
    "spectral_measure",
    "top_eigenpairs",
    "trace",
]
