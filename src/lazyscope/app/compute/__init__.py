"""The computations of the explorer's tabs."""
