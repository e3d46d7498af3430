"""Tests of the increments of attention against the float64 formula, with all kinds of masks and steps of all sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyscope import Linearised, Model, Scaled, tangent_kernel
from lazyscope.model.increment import attention_blocks as rules

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# For each name: the shapes of q, k and v, the shape of a trainable bias, the options, and the kind of mask.
CASES: dict[str, tuple[list[tuple[int, ...]], tuple[int, ...] | None, dict[str, Any], str]] = {
    "plain": ([(2, 3, 37, 8)] * 3, None, {}, ""),
    "causal": ([(2, 3, 37, 8)] * 3, None, {"is_causal": True}, ""),
    "long": ([(1, 2, 150, 16)] * 3, None, {"is_causal": True}, ""),
    "own scale": ([(2, 3, 5, 8)] * 3, None, {"scale": 0.7}, ""),
    "cross": ([(2, 3, 37, 12), (2, 3, 20, 12), (2, 3, 20, 5)], None, {}, ""),
    "grouped": ([(2, 6, 20, 8), (2, 2, 20, 8), (2, 2, 20, 8)], None, {"is_causal": True, "enable_gqa": True}, ""),
    "hidden keys": ([(2, 3, 37, 8)] * 3, None, {}, "hidden"),
    "hidden rows": ([(2, 3, 20, 8)] * 3, None, {}, "rows"),
    "distances": ([(2, 3, 37, 8)] * 3, None, {}, "distances"),
    "moving bias": ([(2, 3, 20, 8)] * 3, (1, 3, 20, 20), {}, ""),
    "bias of each image": ([(2, 3, 37, 8)] * 3, (2, 1, 37, 37), {}, ""),
    "bias of all": ([(5, 3, 20, 8)] * 3, (20, 20), {}, ""),
    "bias of keys": ([(2, 6, 20, 8), (2, 2, 37, 8), (2, 2, 37, 8)], (6, 1, 37), {"enable_gqa": True}, ""),
    "three dimensions": ([(4, 20, 8)] * 3, None, {}, ""),
}


def mask_of(kind: str, shapes: list[tuple[int, ...]]) -> Tensor | None:
    queries, keys = shapes[0][-2], shapes[1][-2]
    if kind == "hidden":
        return torch.arange(keys) < torch.tensor([keys, keys - 4])[:, None, None, None]
    if kind == "rows":
        return (torch.arange(keys)[None] <= torch.arange(queries)[:, None]) & (torch.arange(queries) > 2)[:, None]
    if kind == "distances":
        slopes = 2.0 ** -torch.arange(1.0, shapes[0][1] + 1)
        return -slopes[:, None, None] * (torch.arange(queries)[:, None] - torch.arange(keys)).abs()
    return None


def problem(name: str, device: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    shapes, bias, options, kind = CASES[name]
    generator = torch.Generator().manual_seed(0)
    params = {each: torch.randn(*shape, generator=generator) for each, shape in zip("qkv", shapes, strict=True)}
    if bias is not None:
        params["bias"] = torch.randn(*bias, generator=generator)
    mask = mask_of(kind, shapes)
    mask = None if mask is None else mask.to(device)

    def function(w: dict[str, Tensor], x: Tensor) -> Tensor:
        added = w["bias"] if bias is not None else mask
        if added is not None and added.is_floating_point():
            added = added.to(w["q"].dtype)
        return F.scaled_dot_product_attention(w["q"], w["k"], w["v"], added, **options)

    return function, {each: w.to(device) for each, w in params.items()}, torch.zeros(1, device=device)


def formula(function: Any, params: dict[str, Tensor], v: dict[str, Tensor], x: Tensor, alpha: float) -> Any:
    wide = Model(function, {name: w.double() for name, w in params.items()})
    if math.isinf(alpha):
        found = torch.func.jvp(lambda w: wide(x, w), (wide.params,), (v,))[1]
        return found.nan_to_num(0.0)  # torch's derivative is NaN for a row without keys
    return alpha * (wide(x, {name: w + v[name] / alpha for name, w in wide.params.items()}) - wide(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [0.1, 1.0])
@pytest.mark.parametrize("alpha", [1.0, 1e4, math.inf])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(
    name: str, alpha: float, size: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_BUDGET", 500)  # this splits the queries into several blocks
    function, params, x = problem(name, device)
    lazy = Scaled(Model(function, params), alpha)
    generator = torch.Generator().manual_seed(1)
    v = {name: size * torch.randn(w.shape, generator=generator).to(w) for name, w in params.items()}
    with torch.no_grad():
        for each, p in lazy.named_parameters():
            p.copy_(v[each])
    out = lazy(x)
    weights = torch.randn(out.shape, generator=generator).to(out)
    wide = {each: t.double().requires_grad_() for each, t in v.items()}
    reference = formula(function, params, wide, x, alpha)
    assert torch.allclose(out.double(), reference, rtol=0, atol=2e-5 * float(reference.detach().abs().max()))
    if name == "hidden rows" and math.isinf(alpha):
        return  # torch's own gradient is NaN
    found = torch.autograd.grad((out * weights).sum(), list(lazy.parameters()))
    true = torch.autograd.grad((reference * weights.double()).sum(), [wide[n] for n, _ in lazy.named_parameters()])
    for mine, exact in zip(found, true, strict=True):
        assert torch.allclose(mine.double(), exact, rtol=0, atol=2e-5 * max(1.0, float(exact.abs().max())))


@pytest.mark.parametrize("name", ["plain", "distances", "grouped"])
@pytest.mark.parametrize("alpha", [0.1, 1.0, 100.0])
def test_large_steps_in_float64(name: str, alpha: float) -> None:
    function, params, x = problem(name, "cpu")
    wide = {each: w.double() for each, w in params.items()}
    lazy = Scaled(Model(function, wide), alpha)
    with torch.no_grad():
        for p in lazy.parameters():
            p.normal_(std=3.0, generator=torch.Generator().manual_seed(2))
        v = {each: p.clone() for each, p in lazy.named_parameters()}
        assert torch.allclose(lazy(x), formula(function, params, v, x, alpha), rtol=1e-9, atol=1e-9 * max(1.0, alpha))


def test_a_common_shift_of_all_scores_moves_nothing() -> None:
    q, k, v = torch.ones(1, 1, 1, 4), torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4)
    lazy = Scaled(
        Model(lambda w, x: F.scaled_dot_product_attention(q, k + w["shift"], v), {"shift": torch.zeros(4)}), 1.0
    )
    with torch.no_grad():
        next(lazy.parameters()).fill_(-30.0)
    assert float(lazy(torch.zeros(1)).detach().abs().max()) < 1e-5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x).mean(1)
        return out


def test_a_transformer_layer_has_second_derivatives() -> None:
    torch.manual_seed(0)
    net, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)

    def function(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, dict(w), (x, x, x), {"need_weights": False})[0]  # type: ignore[no-any-return]

    model = Model(function, dict(net.named_parameters())).double()
    lazy = Scaled(model, 2.0)
    with torch.no_grad():
        for p in lazy.parameters():
            p.normal_(std=0.3)
    leaves = list(lazy.parameters())
    start = {name: w.clone() for name, w in model.params.items()}
    x = x.double()

    def loss_of(outputs: Tensor) -> Tensor:
        return outputs.pow(3).sum()

    def hessian_product(outputs: Tensor, points: Sequence[Tensor]) -> list[Tensor]:
        slopes = torch.autograd.grad(loss_of(outputs), points, create_graph=True)
        return list(torch.autograd.grad(sum((s * s).sum() for s in slopes), points))  # type: ignore[arg-type]

    found = hessian_product(lazy(x), leaves)
    v = {name: p.detach().clone().requires_grad_() for name, p in lazy.named_parameters()}
    outputs = 2.0 * (model(x, {name: w + v[name] / 2.0 for name, w in start.items()}) - model(x))
    true = hessian_product(outputs, [v[name] for name, _ in lazy.named_parameters()])
    for mine, exact in zip(found, true, strict=True):
        assert torch.allclose(mine, exact, rtol=1e-8, atol=1e-8)


def test_kernels_see_attention_in_its_parts() -> None:
    torch.manual_seed(0)
    net, x = Layer().eval().double(), torch.randn(3, 6, 16, dtype=torch.float64)
    jacobian = Model(net).jacobian(x)
    kernel = tangent_kernel(net, x)
    dense = (jacobian @ jacobian.T).view(3, 16, 3, 16).transpose(1, 2)
    assert torch.allclose(kernel, dense, rtol=1e-9, atol=1e-12)


def test_no_matrix_of_all_queries_by_all_keys_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_BUDGET", 2**10)
    function, params, x = problem("long", "cpu")
    held: list[int] = []

    def pack(t: Tensor) -> Tensor:
        held.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        Linearised(Model(function, params))(x)
    assert max(held) <= max(w.numel() for w in params.values())
