"""Measurements of how far activations, tangent kernels and weights move during training."""

from lazyscope.diagnose.activations import Stability, activation_stability
from lazyscope.diagnose.drift import kernel_alignment, kernel_drift, target_alignment, weight_displacement
from lazyscope.diagnose.kernels import KernelChange, LayerKernels
from lazyscope.diagnose.monitor import Monitor
from lazyscope.diagnose.record import LayerRecord, Record
from lazyscope.diagnose.sinks import read, runs
from lazyscope.diagnose.sketch import KernelSketch
from lazyscope.diagnose.verdict import RunVerdict

__all__ = [
    "KernelChange",
    "KernelSketch",
    "LayerKernels",
    "LayerRecord",
    "Monitor",
    "Record",
    "RunVerdict",
    "Stability",
    "activation_stability",
    "kernel_alignment",
    "kernel_drift",
    "read",
    "runs",
    "target_alignment",
    "weight_displacement",
]
