"""Before and after: how far activations, kernels and weights have moved; what is compared is handed over."""

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
