"""Solvers: the tangent model, sparse measures, one-pass stochastic gradient descent, regression on fixed features."""

from lazyscope.solve.fixed_features import random_feature_accuracy, scattering_accuracy
from lazyscope.solve.left_out import LeaveOneOut
from lazyscope.solve.one_pass import Nets, Rates, one_pass
from lazyscope.solve.sgd import tangent_sgd
from lazyscope.solve.sparse import SparseSolution, solve_sparse
from lazyscope.solve.tangent import TangentCurve, TangentSolution, tangent_solve

__all__ = [
    "LeaveOneOut",
    "Nets",
    "Rates",
    "SparseSolution",
    "TangentCurve",
    "TangentSolution",
    "one_pass",
    "random_feature_accuracy",
    "scattering_accuracy",
    "solve_sparse",
    "tangent_sgd",
    "tangent_solve",
]
