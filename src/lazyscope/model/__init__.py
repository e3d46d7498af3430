"""Models, their scalings, and the arithmetic of increments."""
