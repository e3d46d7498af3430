"""Tests of the Triton kernels against the float64 formulas. They require a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F

from lazyscope import Model, Scaled
from lazyscope.model.increment import fused
from lazyscope.model.increment.smooth import SLOPES

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@needs_gpu
@pytest.mark.parametrize("epsilon", [1.0, 1e-4, 0.0])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "tanh", "sigmoid"])
def test_smooth_functions(name: str, epsilon: float) -> None:
    base, delta = 3.0 * torch.randn(7, 333, device="cuda"), 2.0 * torch.randn(7, 333, device="cuda")
    assert fused.fusible(name, base, delta)
    true = delta.double() * SLOPES[name](base.double(), delta.double() * epsilon)
    found = fused.fused_increment(name, base, delta, epsilon)
    assert float((found - true).abs().max()) < 2e-6 * float(true.abs().max())


@needs_gpu
@pytest.mark.parametrize("alpha", [1.0, 1e4, float("inf")])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(affine: bool, alpha: float) -> None:
    torch.manual_seed(0)
    params = {"x": torch.randn(5, 100), "w": torch.randn(100), "b": torch.randn(100)}

    def function(w: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(w["x"], (100,), *((w["w"], w["b"]) if affine else ())) * w["w"] + w["b"]

    results = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        lazy = Scaled(Model(function, {name: w.to(device, dtype) for name, w in params.items()}), alpha)
        torch.manual_seed(1)
        with torch.no_grad():
            for p in lazy.parameters():
                p.copy_(torch.randn(p.shape))
        out = lazy(torch.zeros(1, device=device, dtype=dtype))
        out.square().sum().backward()
        results.append([t.detach().cpu().double() for t in (out, *(p.grad for p in lazy.parameters()))])
    for found, true in zip(*results, strict=True):
        assert float((found - true).norm()) < 1e-5 * float(true.norm())
