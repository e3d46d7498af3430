"""The GPU programs of deflation against float64.

Without a GPU, this file is also a script for Triton's interpreter: TRITON_INTERPRET=1 python -m <this module>.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

CASES = [
    (24, 100_003, torch.bfloat16),
    (1, 5, torch.float32),
    (5, 3 << 12, torch.float32),
    (40, 70_000, torch.float16),
]
"""The number of vectors, their length and their dtype."""


def errors(count: int, length: int, dtype: torch.dtype, device: str) -> tuple[float, float]:
    """The errors of inner products and of differences, relative to the numbers that they are sums of."""
    from lazyscope.solve.triton_deflation import inner, less

    random = torch.Generator().manual_seed(0)
    vectors = torch.randn(count, length, generator=random).to(dtype)
    g, along = torch.randn(length, generator=random), torch.randn(count, dtype=torch.float64, generator=random)
    place, there = vectors.to(device), g.to(device)
    found, left = inner(place, there).cpu(), less(there, place, along.to(device)).cpu()
    exact, rest = vectors.double() @ g.double(), g.double() - along @ vectors.double()
    sizes = vectors.double().norm(dim=1) * g.double().norm()
    return float(((found - exact).abs() / sizes).max()), float((left - rest).abs().max() / rest.abs().max())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES)
def test_inner_products_and_differences(case: tuple[int, int, torch.dtype]) -> None:
    pytest.importorskip("triton")
    assert max(errors(*case, "cuda")) < 1e-6


def test_interpreted() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-m", "tests.solve.test_triton_deflation"]
    found = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, check=True)
    numbers = [float(word) for word in found.stdout.split()]
    assert len(numbers) == 2 * len(CASES)
    assert max(numbers) < 1e-6


if __name__ == "__main__":
    for case in CASES:
        print(*errors(*case, "cpu"))
