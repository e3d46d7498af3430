"""Theorems about a model, as functions that return the proved quantity or a certificate."""

from lazyscope.theory import convex, high_dimension, margin
from lazyscope.theory.certificate import Certificate, Comparison, Constant, Hypothesis, Measurement, Verdict
from lazyscope.theory.constant_rank import descent, under_parameterised
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
from lazyscope.theory.lazy import finite_horizon, general
from lazyscope.theory.relative_scale import KinkWarning, relative_scale

__all__ = [
    "Certificate",
    "Comparison",
    "Constant",
    "Constants",
    "Decay",
    "Descent",
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
    "descent",
    "finite_horizon",
    "general",
    "high_dimension",
    "linear_rate",
    "margin",
    "over_parameterised",
    "relative_scale",
    "stability",
    "under_parameterised",
]
