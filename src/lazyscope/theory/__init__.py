"""Theorems about a model, as functions that return the proved quantity or a certificate."""

from lazyscope.theory import convex, deep_linear, diagonal, high_dimension, margin
from lazyscope.theory.certificate import (
    Certificate,
    Comparison,
    Constant,
    Expectation,
    Hypothesis,
    Measurement,
    Verdict,
)
from lazyscope.theory.constant_rank import descent, least_scale, under_parameterised
from lazyscope.theory.constants import (
    Constants,
    GivenConstants,
    SampledConstants,
    Spectrum,
    TwoLayerConstants,
    constants_of,
)
from lazyscope.theory.convergence import Decay, linear_rate, over_parameterised, stability
from lazyscope.theory.criterion import Descent, RelativeScale
from lazyscope.theory.flips import flipped_share
from lazyscope.theory.lazy import finite_horizon, general
from lazyscope.theory.relative_scale import KinkWarning, relative_scale
from lazyscope.theory.stochastic import stochastic_descent

__all__ = [
    "Certificate",
    "Comparison",
    "Constant",
    "Constants",
    "Decay",
    "Descent",
    "Expectation",
    "GivenConstants",
    "Hypothesis",
    "KinkWarning",
    "Measurement",
    "RelativeScale",
    "SampledConstants",
    "Spectrum",
    "TwoLayerConstants",
    "Verdict",
    "constants_of",
    "convex",
    "deep_linear",
    "descent",
    "diagonal",
    "finite_horizon",
    "flipped_share",
    "general",
    "high_dimension",
    "least_scale",
    "linear_rate",
    "margin",
    "over_parameterised",
    "relative_scale",
    "stability",
    "stochastic_descent",
    "under_parameterised",
]
