"""The (x, Δ) arithmetic: increments of networks that never cancel."""

from lazyscope.model.increment.base import Pair, Scale
from lazyscope.model.increment.fallback import FallbackWarning
from lazyscope.model.increment.program import Program, trace

__all__ = ["FallbackWarning", "Pair", "Program", "Scale", "trace"]
