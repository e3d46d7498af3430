"""The (x, Δ) arithmetic: increments of networks that never cancel."""

from lazyscope.model.increment.base import Pair, Scale
from lazyscope.model.increment.capture import Captured, capture
from lazyscope.model.increment.fallback import FallbackWarning
from lazyscope.model.increment.program import Program, split

__all__ = ["Captured", "FallbackWarning", "Pair", "Program", "Scale", "capture", "split"]
