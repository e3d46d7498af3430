"""Implicit bias: flows and ascents for losses with an exponential tail, which are numerically stable at any time."""

from lazyscope.flow.margin.ascent import MarginPath, soft_min_ascent
from lazyscope.flow.margin.implicit import MarginFlow, margin_flow
from lazyscope.flow.margin.linear import LinearPath, linear_margin_flow
from lazyscope.flow.margin.predictor import BothLayers, Linear, Predictor

__all__ = [
    "BothLayers",
    "Linear",
    "LinearPath",
    "MarginFlow",
    "MarginPath",
    "Predictor",
    "linear_margin_flow",
    "margin_flow",
    "soft_min_ascent",
]
