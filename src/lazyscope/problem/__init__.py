"""Problems with known exact solutions."""

from lazyscope.problem.deconvolution import Deconvolution
from lazyscope.problem.mixture import Mixture
from lazyscope.problem.population import PopulationTeacher
from lazyscope.problem.quadratic import Quadratic
from lazyscope.problem.random_problem import RandomProblem
from lazyscope.problem.teacher import Teacher

__all__ = ["Deconvolution", "Mixture", "PopulationTeacher", "Quadratic", "RandomProblem", "Teacher"]
