"""Problems: data and loss with the answer that is known to be exact; and both flows of a model side by side."""

from lazyscope.problem.comparison import certify, compare, rank
from lazyscope.problem.deconvolution import Deconvolution
from lazyscope.problem.mixture import Mixture
from lazyscope.problem.population import PopulationTeacher
from lazyscope.problem.quadratic import Quadratic
from lazyscope.problem.random_problem import RandomProblem
from lazyscope.problem.sparse import SparseSolution, solve_sparse
from lazyscope.problem.teacher import Teacher

__all__ = [
    "Deconvolution",
    "Mixture",
    "PopulationTeacher",
    "Quadratic",
    "RandomProblem",
    "SparseSolution",
    "Teacher",
    "certify",
    "compare",
    "rank",
    "solve_sparse",
]
