"""Phase diagrams of training, and checks of how a model's scaling depends on its width and depth."""

from lazyscope.phase.check import CoordinateCheck, coordinate_check
from lazyscope.phase.diagram import PhaseDiagram
from lazyscope.phase.grid import phases, sweep

__all__ = ["CoordinateCheck", "PhaseDiagram", "coordinate_check", "phases", "sweep"]
