"""lazyscope: does this model learn features, or does it only move along its tangent?

Every public name stands here; the modules behind it may move.
"""

from lazyscope import errors, loss
from lazyscope.flow import (
    Minibatches,
    Status,
    Trajectory,
    gradient_descent,
    gradient_flow,
    log_spaced,
    stochastic_gradient_descent,
    tangent_flow,
)
from lazyscope.model.base import Model
from lazyscope.model.ensemble import Ensemble
from lazyscope.model.increment import FallbackWarning
from lazyscope.model.transform import Linearised, Scaled, Symmetrised

__version__ = "0.1.0"

__all__ = [
    "Ensemble",
    "FallbackWarning",
    "Linearised",
    "Minibatches",
    "Model",
    "Scaled",
    "Status",
    "Symmetrised",
    "Trajectory",
    "__version__",
    "errors",
    "gradient_descent",
    "gradient_flow",
    "log_spaced",
    "loss",
    "stochastic_gradient_descent",
    "tangent_flow",
]
