"""Batched training dynamics in tangent coordinates: descents, the gradient flow (4) and the tangent flow (5)."""

from lazyscope.flow.descent import Schedule, gradient_descent, log_spaced, stochastic_gradient_descent
from lazyscope.flow.ode import gradient_flow
from lazyscope.flow.sampler import Minibatches, Sampler
from lazyscope.flow.tangent import tangent_flow
from lazyscope.flow.trajectory import Observer, Progress, Status, Trajectory

__all__ = [
    "Minibatches",
    "Observer",
    "Progress",
    "Sampler",
    "Schedule",
    "Status",
    "Trajectory",
    "gradient_descent",
    "gradient_flow",
    "log_spaced",
    "stochastic_gradient_descent",
    "tangent_flow",
]
