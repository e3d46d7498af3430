"""Measurements of how far activations, tangent kernels and weights move during training."""

from lazyscope.diagnose.activations import Stability, activation_stability
from lazyscope.diagnose.drift import kernel_alignment, kernel_drift, target_alignment, weight_displacement
from lazyscope.diagnose.monitor import Monitor, Record
from lazyscope.diagnose.sketch import KernelSketch

__all__ = [
    "KernelSketch",
    "Monitor",
    "Record",
    "Stability",
    "activation_stability",
    "kernel_alignment",
    "kernel_drift",
    "target_alignment",
    "weight_displacement",
]
