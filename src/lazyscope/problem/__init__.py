"""Problems: data and loss with the answer that is known to be exact."""

from lazyscope.problem.teacher import Teacher

__all__ = ["Teacher"]
