"""Solvers: sparse measures, one-pass stochastic gradient descent, and regression on fixed features."""

from lazyscope.solve.fixed_features import random_feature_accuracy, scattering_accuracy
from lazyscope.solve.one_pass import Nets, Rates, one_pass
from lazyscope.solve.sparse import SparseSolution, solve_sparse

__all__ = [
    "Nets",
    "Rates",
    "SparseSolution",
    "one_pass",
    "random_feature_accuracy",
    "scattering_accuracy",
    "solve_sparse",
]
