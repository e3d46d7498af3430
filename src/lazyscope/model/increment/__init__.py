"""Increments of networks, computed with pairs (x₀, Δ) so that no digits are lost to cancellation."""

from lazyscope.model.increment.base import Pair, Scale
from lazyscope.model.increment.capture import Captured, capture
from lazyscope.model.increment.fallback import FallbackWarning
from lazyscope.model.increment.program import Program, split
from lazyscope.model.increment.repeated import Blocks

__all__ = ["Blocks", "Captured", "FallbackWarning", "Pair", "Program", "Scale", "capture", "split"]
