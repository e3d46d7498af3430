"""The GPU program for convolutional limit kernels against the float64 recursion.

Without a GPU, this file is also a script for Triton's interpreter: TRITON_INTERPRET=1 python -m <this module>.
"""

from __future__ import annotations

import pytest
import torch
from tests.tangent.wide import normal

from lazyscope.tangent import limit_kernel_convolution
from lazyscope.tangent.limit_dense import Kind, stack

CASES = [(5, 7, 3, 0.0), (16, 16, 3, 0.1), (20, 32, 5, 0.0)]
"""The height and the width of the images, the side of the kernels, and the variance of the biases."""


def error(kind: Kind, height: int, width: int, size: int, bias: float, device: str, precision: str) -> float:
    """The error of the program, relative to the largest entry."""
    from lazyscope.tangent.triton_limit import pair_kernel

    x = normal(4, 3, height, width, dtype=torch.float32)
    x[1], x[2] = -x[0], 2 * x[0] + 1e-4 * x[2]
    x[3, :, : height // 2] = 0
    place, layers = x.to(device), stack(6, 2.0, bias, None, None)
    found = pair_kernel(place, place, layers, size, kind, precision).cpu().double()
    exact = limit_kernel_convolution(
        x.double(), depth=6, kernel_size=size, kind=kind, weight_variance=2.0, bias_variance=bias
    )
    return float((found - exact).abs().max() / exact.abs().max())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["ntk", "nngp"])
@pytest.mark.parametrize("case", CASES)
def test_pairs_of_images(kind: Kind, case: tuple[int, int, int, float]) -> None:
    pytest.importorskip("triton")
    assert error(kind, *case, "cuda", "tf32x3") < 1e-6


if __name__ == "__main__":
    for case in CASES:
        print(case, *(error(kind, *case, "cpu", "ieee") for kind in ("ntk", "nngp")))
