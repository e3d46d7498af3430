"""Tangent kernels: dense, matrix-free, stored on disk, and in the limit of infinite width."""

from lazyscope.model.jacobian import JacobianOperator
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.tangent.limit import limit_kernel
from lazyscope.tangent.limit_convolution import limit_kernel_convolution
from lazyscope.tangent.limit_dense import limit_kernel_dense
from lazyscope.tangent.limit_tiles import limit_kernel_to_zarr
from lazyscope.tangent.operator import TangentOperator
from lazyscope.tangent.regression import Regression, kernel_regression
from lazyscope.tangent.spectrum import Spectrum, layer_spectra, spectrum
from lazyscope.tangent.tiles import KernelTiles, open_tangent_kernel, tangent_kernel_to_zarr

__all__ = [
    "JacobianOperator",
    "KernelTiles",
    "Regression",
    "Spectrum",
    "TangentOperator",
    "kernel_regression",
    "layer_spectra",
    "limit_kernel",
    "limit_kernel_convolution",
    "limit_kernel_dense",
    "limit_kernel_to_zarr",
    "open_tangent_kernel",
    "spectrum",
    "tangent_kernel",
    "tangent_kernel_to_zarr",
]
