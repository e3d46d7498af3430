"""Modules without a limit kernel are refused by the name of the operation, with what to do instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tests.tangent.limit_free import Free, W, attend, attending, dense, points, signals, tokens, variance
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, linear, softplus
from torch.nn.functional import scaled_dot_product_attention as attention

from lazyscope.errors import ModelError, OperationError
from lazyscope.tangent import limit_kernel
from lazyscope.tangent.limit import _read


def heads(h: Tensor) -> Tensor:
    return h.view(*h.shape[:2], 2, W // 2).transpose(1, 2)


def other_heads(s: Any, x: Tensor) -> Tensor:
    """The channels of each head of the keys are every second one."""
    h = s.start(x)
    q = s.a(h)
    k = q.view(*q.shape[:2], W // 2, 2).permute(0, 3, 1, 2)
    out: Tensor = s.out(attention(heads(q), k, heads(s.c(h)), scale=2 / W).transpose(1, 2).flatten(2).mean(1))
    return out


def grouped(s: Any, x: Tensor) -> Tensor:
    h = s.start(x)
    k, v = (f(h)[..., : W // 2][:, None] for f in (s.b, s.c))
    out = attention(heads(s.a(h)), k, v, scale=2 / W, enable_gqa=True)
    result: Tensor = s.out(out.transpose(1, 2).flatten(2).mean(1))
    return result


def along_heads(s: Any, x: Tensor) -> Tensor:
    """Attention between five heads of each of five tokens, in place of attention between tokens."""
    h = s.start(x)
    q, k, v = (f(h).view(*h.shape[:2], 5, -1) for f in (s.wide0, s.wide1, s.wide2))
    out: Tensor = s.end(attention(q, k, v, scale=0.25).flatten(2).mean(1))
    return out


def half_of_a_shuffle(s: Any, x: Tensor) -> Tensor:
    """A sum of channels in different orders, of which half is added to channels that it contains."""
    h = s.start(x)
    b = s.b(h)
    total = s.a(h) + b.view(-1, W // 2, 2).transpose(1, 2).flatten(1)
    out: Tensor = s.end((total[:, : W // 2] + b[:, W // 2 :]).relu())
    return out


def heads_of_two(s: Any, x: Tensor) -> Tensor:
    """Each of two heads has queries of its own layer."""
    h = s.start(x)
    q = torch.cat([s.a(h), s.b(h)], -1).view(*h.shape[:2], 2, W).transpose(1, 2)
    v = s.c(h).view(*h.shape[:2], 2, W // 2).transpose(1, 2)
    out: Tensor = s.out(attention(q, q, v, scale=1 / W).transpose(1, 2).flatten(2).mean(1))
    return out


def gain() -> nn.Parameter:
    return nn.Parameter(torch.full((W,), 2.0))


EMBEDDING = nn.Embedding(6, W, padding_idx=1)
nn.init.ones_(EMBEDDING.weight)
MOVED = nn.BatchNorm1d(W).eval()
nn.init.ones_(MOVED.running_mean)  # type: ignore[arg-type]
UNEVEN = nn.LayerNorm(W)
nn.init.normal_(UNEVEN.weight)
ORDER = torch.tensor([[0, 1, 2], [3, 1, 1]])

REFUSED: dict[str, tuple[nn.Module, Tensor, str]] = {
    "repeated by a product": (
        Free(lambda s, x: s.out((s.start(x).relu()[:, None] * torch.ones(1, 5, 1)).sum(1))),
        points,
        "mul.*repeats hidden units; multiply by a number",
    ),
    "repeated by a quotient": (
        Free(lambda s, x: s.out((s.start(x).relu()[:, None] / torch.ones(1, 5, 1)).sum(1))),
        points,
        "div.*repeats hidden units",
    ),
    "repeated": (
        Free(lambda s, x: s.end(s.start(x).repeat(1, 2)), end=nn.Linear(2 * W, 1)),
        points,
        "repeat .*repeated; use each of them once",
    ),
    "expanded": (
        Free(lambda s, x: s.end(s.start(x)[:, None].expand(-1, 2, -1).flatten(1)), end=nn.Linear(2 * W, 1)),
        points,
        "expand .*repeated; use each of them once",
    ),
    "equal rows": (
        Free(lambda s, x: s.out(linear(s.start(x), s.row * torch.ones(W, 1))), row=nn.Parameter(torch.randn(1, W))),
        points,
        "mm .*must be one parameter.*; remove what",
    ),
    "weights over their norm": (
        Free(lambda s, x: s.out(linear(s.start(x), s.a.weight / s.a.weight.norm()))),
        points,
        "mm .*such as a weight normalisation",
    ),
    "units times an entry": (
        Free(lambda s, x: s.out(s.start(x) * s.a.weight[0, 0])),
        points,
        "mul.*only products with numbers",
    ),
    "units times a norm": (
        Free(lambda s, x: s.out(s.start(x) * s.a.weight.norm())),
        points,
        "mul.*only products with numbers",
    ),
    "spectral norm": (
        dense(nn.Linear(3, W), nn.utils.parametrizations.spectral_norm(nn.Linear(W, 3))).eval(),
        points,
        "addmm .*weight normalisation",
    ),
    "negative keys": (attending(lambda s, h: (q := s.a(h), -q)), tokens, "attention .*the same tensor"),
    "multiples of queries": (attending(lambda s, h: (q := s.a(h), 2 * q)), tokens, "attention .*the same tensor"),
    "heads of different layers": (Free(heads_of_two), tokens, "attention .*with the same heads"),
    "other heads": (Free(other_heads), tokens, "attention .*with the same heads"),
    "shared heads": (Free(grouped), tokens, "attention .*the same heads; do not share"),
    "attention along heads": (
        Free(along_heads, **{f"wide{i}": nn.Linear(W, 20) for i in range(3)}, end=nn.Linear(20, 1)),
        tokens,
        "attention .*transpose the operands",
    ),
    "attention of inputs": (
        Free(lambda s, x: s.out(attend(x, x, s.start(x)).mean(1))),
        tokens,
        "attention .*pass them through a layer first",
    ),
    "learned mask": (
        Free(
            lambda s, x: (lambda h: s.out(attend(s.a(h), s.b(h), h, attn_mask=s.mask).mean(1)))(s.start(x)),
            mask=nn.Parameter(torch.zeros(5, 5)),
        ),
        tokens,
        "attention .*mask is a parameter; use a constant mask",
    ),
    "clamp from above": (
        Free(lambda s, x: s.out(s.start(x).clamp(0, 6))),
        points,
        r"clamp .*only clamp\(min=0\) has a rule; use nn.ReLU\(\)",
    ),
    "threshold": (Free(lambda s, x: s.out(softplus(s.start(x), threshold=0.3))), points, "softplus .*nn.Softplus"),
    "slope": (Free(lambda s, x: s.out(softplus(s.start(x), 2.0))), points, "softplus .*nn.Softplus"),
    "approximate GELU": (dense(nn.Linear(3, W), nn.GELU("tanh"), nn.Linear(W, 3)), points, r"gelu .*use nn.GELU\(\)"),
    "parameter added to inputs": (
        Free(lambda s, x: s.out(s.start(x + s.place).relu().mean(1)), place=nn.Parameter(torch.randn(5, 3))),
        tokens,
        "add.*inputs.*through a layer first",
    ),
    "one row for two positions": (
        Free(
            lambda s, x: s.out((s.start(x) + s.place(torch.tensor([0, 1, 2, 1, 0]))).relu().mean(1)),
            place=nn.Embedding(7, W),
        ),
        tokens,
        "add.*must be one parameter",
    ),
    "parameter with more axes": (
        Free(lambda s, x: s.out((s.start(x) + s.place)[0]), place=nn.Parameter(torch.randn(1, 1, W))),
        points,
        "add.*more axes",
    ),
    "pooled channels": (
        Free(
            lambda s, x: s.end(avg_pool1d(s.one(x[:, 0]).relu().transpose(1, 2), 2).flatten(1)),
            one=nn.Conv1d(2, W, 3),
            end=nn.Linear(2 * W, 1),
        ),
        signals,
        "avg_pool2d .*along channels; let it act along positions",
    ),
    "pooled channels and positions": (
        Free(
            lambda s, x: s.end(avg_pool1d(s.one(x[:, 0]).relu().flatten(1, 2), 2)),
            one=nn.Conv1d(2, W, 3),
            end=nn.Linear(2 * W, 1),
        ),
        signals,
        "avg_pool2d .*along channels",
    ),
    "division by zero": (Free(lambda s, x: s.out(s.start(x) / 0)), points, "div.*other than 0"),
    "weights over zero": (Free(lambda s, x: s.out(linear(s.start(x), s.a.weight / 0))), points, "mm .*one parameter"),
    "one bias for all channels": (
        Free(lambda s, x: s.out(torch.addmm(s.one, s.start(x), s.a.weight)), one=nn.Parameter(torch.randn(1))),
        points,
        "addmm .*one entry for each output channel",
    ),
    "biases of positions": (
        Free(
            lambda s, x: s.out(torch.addmm(s.place, s.start(x)[0], s.a.weight).mean(0)[None]),
            place=nn.Parameter(torch.randn(5, W)),
        ),
        tokens,
        "addmm .*one entry for each output channel",
    ),
    "half of a shuffle": (Free(half_of_a_shuffle, end=nn.Linear(W // 2, 1)), points, "slice.*different orders"),
    "two outputs": (
        Free(lambda s, x: (lambda h: torch.cat([s.out(h), s.end(h)], 1))(s.start(x)), end=nn.Linear(W, 1)),
        points,
        "cat .*concatenation, whose parts have different kernels; return one",
    ),
    "normalised outputs": (
        nn.Sequential(nn.Linear(3, W), nn.ReLU(), nn.Linear(W, 4), nn.LayerNorm(4)),
        points,
        "native_layer_norm .*outputs, whose number is finite",
    ),
    "attention of outputs": (
        Free(lambda s, x: (lambda h: attend(h, h, h).mean(1))(s.start(x))),
        tokens,
        "attention .*outputs, whose number is finite",
    ),
    "one hidden channel": (
        nn.Sequential(nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 1)),
        points,
        "addmm .*only one channel; use a larger hidden width",
    ),
    "circular padding": (
        Free(
            lambda s, x: s.out(s.two(s.one(x[:, 0]).relu()).mean(2)),
            one=nn.Conv1d(2, W, 3),
            two=nn.Conv1d(W, W, 3, padding=1, padding_mode="circular"),
        ),
        signals,
        "cat .*pad convolutions with zeros",
    ),
    "weights on the left": (
        Free(lambda s, x: s.out((s.a.weight @ s.start(x).T).T)),
        points,
        "mm .*on the right, must be one parameter",
    ),
    "uneven norm": (dense(nn.Linear(3, W), UNEVEN, nn.Linear(W, 3)), points, "reset_parameters"),
    "moved norm": (dense(nn.Linear(3, W), MOVED, nn.Linear(W, 3)).eval(), points, "reset_running_stats"),
    "padding that is not 0": (
        Free(lambda s, x: s.out(s.table(x).mean(1)), table=EMBEDDING),
        ORDER,
        "embedding .*set row 1 to 0",
    ),
    "gradients by frequency": (
        Free(lambda s, x: s.out(s.table(x).mean(1)), table=nn.Embedding(6, W, scale_grad_by_freq=True)),
        ORDER,
        "embedding .*scale_grad_by_freq",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    net, x, words = REFUSED[name]
    with pytest.raises(OperationError, match=f"not known for the operation .*{words}"):
        limit_kernel(net.double(), x, variances=variance)


STANDARD: dict[str, tuple[nn.Module, str]] = {
    "gain": (Free(lambda s, x: s.out(s.start(x) * s.gain), gain=gain()), "mul.*freeze them"),
    "rearranged gain": (Free(lambda s, x: s.out(s.start(x) * s.gain[None]), gain=gain()), "mul.*freeze them"),
    "gain of weights": (
        Free(lambda s, x: s.out(linear(x, s.start.weight * s.gain[0])), gain=gain()),
        "mm .*multiplies its weights .*freeze it",
    ),
    "norm of the inputs": (dense(nn.LayerNorm(3)), "native_layer_norm .*freeze them"),
}


@pytest.mark.parametrize("name", STANDARD)
def test_trained_factors_are_refused_in_the_standard_parametrisation(name: str) -> None:
    """In the NTK parametrisation, parameters that start at a constant do not contribute."""
    net, words = STANDARD[name]
    with pytest.raises(OperationError, match=words):
        limit_kernel(net.double(), points, variances=variance, parametrisation="standard")
    assert bool(limit_kernel(net, points, variances=variance).all())


def test_other_objects_are_refused() -> None:
    read: Any = inspect.unwrap(_read)  # the tests' checks of types would refuse them first
    for other in (None, "relu"):
        with pytest.raises(ModelError, match=r"takes a module or a lazyscope\.Model"):
            read(other, points, "default", "ntk")
