"""What is studied: models, their scalings, and the arithmetic of increments."""
