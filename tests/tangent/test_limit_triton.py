"""The GPU program for convolutional limit kernels against the float64 recursion.

Without a GPU, this file is also a script for Triton's interpreter: TRITON_INTERPRET=1 python -m <this module>.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.tangent.wide import normal

import lazyscope
from lazyscope.tangent import limit_kernel_convolution
from lazyscope.tangent.limit_dense import Kind, stack

CASES = [
    (5, 7, 3, 0.0, False),
    (16, 16, 3, 0.1, False),
    (20, 32, 5, 0.0, False),
    (3, 2, 3, 0.1, True),
    (2, 1, 3, 0.0, True),
]
"""The height and the width of the images, the side of the kernels, the variance of the biases, and global pooling."""

LARGE = [(32, 32, 3, 0.0, True), (7, 12, 5, 0.1, True)]
"""Cases that are too large for the interpreter."""

RATES = (0.0, 2.0, 1.0, 0.0, 3.0, 0.5)
"""The rates of the weights of six layers, some of which are fixed."""


def error(kind: Kind, case: tuple[int, int, int, float, bool], device: str) -> float:
    """The larger of the errors with the rates of the NTK parametrisation and with others, over the largest entry."""
    from lazyscope.tangent.triton_limit import pair_kernel

    height, width, size, bias, pooled = case
    x = normal(4, 3, height, width, dtype=torch.float32)
    x[1], x[2] = -x[0], 2 * x[0] + 1e-4 * x[2]
    x[3, :, : height // 2] = 0
    x = x[2:] if pooled else x  # Triton's interpreter is slow
    place, errors = x.to(device), []
    for rates in (None, RATES):
        layers = stack(6, 2.0, bias, rates, None if rates is None else rates[::-1])
        found = pair_kernel(place, place, layers, size, kind, pooled=pooled).cpu().double()
        exact = limit_kernel_convolution(
            x.double(),
            depth=6,
            pooled=pooled,
            kernel_size=size,
            kind=kind,
            weight_variance=2.0,
            bias_variance=bias,
            weight_rate=rates,
            bias_rate=None if rates is None else rates[::-1],
        )
        errors.append(float((found - exact).abs().max() / exact.abs().max()))
    return float(torch.tensor(errors).max())  # NaN if one of them is


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["ntk", "nngp"])
@pytest.mark.parametrize("case", CASES + LARGE)
def test_pairs_of_images(kind: Kind, case: tuple[int, int, int, float, bool]) -> None:
    pytest.importorskip("triton")
    assert error(kind, case, "cuda") < 1e-6


def test_interpreted() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-m", "tests.tangent.test_limit_triton"]
    found = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, check=True)
    errors = [float(word) for word in found.stdout.split()]
    assert len(errors) == 2 * len(CASES)
    assert all(each < 2e-7 for each in errors)


def test_programs_are_not_type_checked() -> None:
    """The import hook of jaxtyping would wrap them, and the compiler would not find the functions that they call."""
    found = 0
    for path in Path(lazyscope.__file__).parent.rglob("triton_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names = [ast.unparse(each) for each in node.decorator_list]
                if any("triton.jit" in name for name in names):
                    found += 1
                    assert "no_type_check" in names, f"{path.name}: {node.name}"
    assert found > 10


if __name__ == "__main__":
    for case in CASES:
        print(*(error(kind, case, "cpu") for kind in ("ntk", "nngp")))
