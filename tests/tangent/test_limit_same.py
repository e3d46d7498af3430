"""Modules with the same limit kernel: one that is easily misread, and a plain one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.tangent.limit_free import Free, W, attend, attending, dense, points, signals, times, tokens, variance
from tests.tangent.wide import normal
from torch import Tensor, nn
from torch.nn.functional import linear, unfold

from lazyscope.tangent import limit_kernel
from lazyscope.tangent.limit import _read
from lazyscope.tangent.limit_stack import convolution_stack


def without_gradient(s: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = s.start(x).relu()
    out: Tensor = s.out(s.a(h).relu())
    return out


def two_layers(s: Any, x: Tensor) -> Tensor:
    out: Tensor = s.out(s.a(s.start(x).relu()).relu())
    return out


def frozen() -> Free:
    net = Free(two_layers)
    net.start.requires_grad_(False)
    return net


def each_step(s: Any, x: Tensor) -> Tensor:
    """Convolutions of each of several signals, and a layer over their means."""
    h = s.two(s.one(x.flatten(0, 1)).relu()).relu().mean(2)
    out: Tensor = s.out(s.a(h.view(*x.shape[:2], -1)).relu().mean(1))
    return out


def all_steps(s: Any, x: Tensor) -> Tensor:
    h = s.two(s.one(x.transpose(1, 2)).relu()).relu().mean(3)
    out: Tensor = s.out(s.a(h.transpose(1, 2)).relu().mean(1))
    return out


def on_patches(s: Any, h: Tensor) -> Tensor:
    q = s.a(h)
    out: Tensor = s.out(attend(q, q, s.c(h)).relu().mean(1))
    return out


def averaged(s: Any, x: Tensor) -> Tensor:
    """An activation of an average of a concatenation."""
    h = s.start(x).relu()
    out: Tensor = s.end(torch.cat([s.a(h), s.b(h)], -1).mean(1).relu())
    return out


def shuffled(s: Any, x: Tensor) -> Tensor:
    h = s.start(x).relu()
    out: Tensor = s.out((s.a(h).view(-1, 2, W // 2).transpose(1, 2).flatten(1) + s.b(h)).relu())
    return out


def tied() -> Free:
    return attending(lambda s, h: (q := s.a(h), q))


Case = tuple[nn.Module, Callable[[str, Tensor], float], Tensor]


def in_turn(s: Any, x: Tensor) -> Tensor:
    one, two = s.both(s.start(x)).view(-1, 2, W).unbind(1)
    out: Tensor = s.out(one.relu() + two)
    return out


def halves(s: Any, x: Tensor) -> Tensor:
    h = s.both(s.start(x))
    out: Tensor = s.out(h[:, :W].relu() + h[:, W:])
    return out


def first_and_fourth(s: Any, x: Tensor) -> Tensor:
    each = s.start(x).unbind(-2)
    out: Tensor = s.out(each[0].relu() + s.a(each[3]))
    return out


SAME: dict[str, tuple[Case, Case]] = {
    "unbind along channels": (
        (Free(in_turn, both=nn.Linear(W, 2 * W)), variance, points),
        (Free(halves, both=nn.Linear(W, 2 * W)), variance, points),
    ),
    "unbind along positions": (
        (Free(first_and_fourth), variance, tokens),
        (Free(lambda s, x: (lambda h: s.out(h[:, 0].relu() + s.a(h[:, 3])))(s.start(x))), variance, tokens),
    ),
    "clamp": (
        (Free(lambda s, x: s.out(s.a(s.start(x).clamp(min=0)).clamp_min(0.0))), variance, points),
        (Free(lambda s, x: s.out(s.a(s.start(x).relu()).relu())), variance, points),
    ),
    "factors of addmm": (
        (
            Free(lambda s, x: s.out(torch.addmm(s.a.bias, s.start(x).relu(), s.a.weight, beta=3, alpha=0.5).relu())),
            variance,
            points,
        ),
        (Free(two_layers), times(a_weight=0.25, a_bias=9.0), points),
    ),
    "multiples of weights": (
        (Free(lambda s, x: s.out(linear(s.start(x).relu(), -(2.0 * s.a.weight), s.a.bias).relu())), variance, points),
        (Free(two_layers), times(a_weight=4.0), points),
    ),
    "queries of two layers": (  # of which one is three times as large: the logits are those of one layer times (1+9)/2
        (attending(lambda s, h: (q := torch.cat([s.a(h), 3 * s.b(h)], -1), q)), variance, tokens),
        (tied(), times(a_weight=5.0, a_bias=5.0), tokens),
    ),
    "keys that are tied in part": (
        (
            attending(lambda s, h: (torch.cat([s.b(h), q := s.a(h)], -1), torch.cat([s.d(h), q], -1))),
            variance,
            tokens,
        ),
        (tied(), times(a_weight=0.5, a_bias=0.5), tokens),
    ),
    "normalised keys": (
        (attending(lambda s, h: (s.a(h).relu(), nn.functional.layer_norm(s.b(h).relu(), (W,)))), variance, tokens),
        (attending(lambda s, h: (s.a(h), s.b(h))), variance, tokens),
    ),
    "odd activations": (
        (attending(lambda s, h: (s.a(h).relu(), s.b(h).tanh())), times(b_weight=0.1), tokens),
        (attending(lambda s, h: (s.a(h), s.b(h))), variance, tokens),
    ),
    "rows of a table for the positions": (
        (
            Free(lambda s, x: s.out((s.start(x) + s.place(torch.arange(5))).relu().mean(1)), place=nn.Embedding(7, W)),
            variance,
            tokens,
        ),
        (
            Free(lambda s, x: s.out((s.start(x) + s.place).relu().mean(1)), place=nn.Parameter(torch.randn(5, W))),
            variance,
            tokens,
        ),
    ),
    "norm of the inputs": (
        (dense(nn.LayerNorm(3)), variance, points),
        (dense(), variance, nn.functional.layer_norm(points, (3,))),
    ),
    "batch norm of the inputs": (
        (dense(nn.BatchNorm1d(3, eps=0.21)).eval(), variance, points),
        (dense(), variance, points / 1.1),
    ),
    "detached": (
        (Free(lambda s, x: s.out(s.a(s.start(x).relu().detach()).relu())), variance, points),
        (frozen(), variance, points),
    ),
    "no_grad": ((Free(without_gradient), variance, points), (frozen(), variance, points)),
    "convolutions of each step": (
        (Free(each_step, one=nn.Conv1d(2, W, 3, 2, 1), two=nn.Conv1d(W, W, 2)), variance, signals),
        (
            Free(all_steps, one=nn.Conv2d(2, W, (1, 3), (1, 2), (0, 1)), two=nn.Conv2d(W, W, (1, 2))),
            variance,
            signals,
        ),
    ),
    "tokens of an image": (
        (
            Free(lambda s, x: on_patches(s, s.cut(x).flatten(2).transpose(1, 2)), cut=nn.Conv2d(4, W, 2, 2)),
            variance,
            signals,
        ),
        (
            Free(lambda s, x: on_patches(s, s.cut(unfold(x, 2, stride=2).transpose(1, 2))), cut=nn.Linear(16, W)),
            variance,
            signals,
        ),
    ),
    "activation of an average of a concatenation": (
        (Free(averaged, end=nn.Linear(2 * W, 1)), variance, tokens),
        (
            Free(
                lambda s, x: s.end(s.wide(s.start(x).relu()).mean(1).relu()),
                wide=nn.Linear(W, 2 * W),
                end=nn.Linear(2 * W, 1),
            ),
            variance,
            tokens,
        ),
    ),
    "sum with another number of axes": (
        (Free(lambda s, x: (lambda h: s.out((s.a(h)[:, None] + s.b(h)).relu()[:, 0]))(s.start(x))), variance, points),
        (Free(lambda s, x: (lambda h: s.out((s.a(h) + s.b(h)).relu()))(s.start(x))), variance, points),
    ),
    "sum of channels in another order": (
        (Free(shuffled), variance, points),
        (Free(lambda s, x: (lambda h: s.out((s.a(h) + s.b(h)).relu()))(s.start(x).relu())), variance, points),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_modules_of_the_same_kernel(name: str) -> None:
    for kind in ("ntk", "nngp"):
        (one, two) = (limit_kernel(net.double(), x, kind=kind, variances=v) for net, v, x in SAME[name])
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-12)
    net, rule, x = SAME[name][0]
    torch.testing.assert_close(limit_kernel(net, x, kind="nngp", variances=rule, memory=1), one, rtol=1e-11, atol=0)


def test_means_of_activations_are_logits() -> None:
    """The logits of relu(a(h)) and relu(b(h)) tend to the products of their means, √(Σ_ii Σ_jj)/2π."""
    x = tokens[:1]
    net = attending(lambda s, h: (s.a(h).relu(), s.b(h).relu())).double()
    kernel = limit_kernel(net, x, kind="nngp", variances=variance)

    def layer(product: Tensor, fan_in: int, share: float = 1.5) -> Tensor:
        return share / fan_in * product + 0.1

    start = layer(x[0] @ x[0].T, 3)
    inner = layer(start, 1)
    scale = inner.diagonal().sqrt()
    weights = torch.softmax(scale[:, None] * scale / (2 * math.pi), -1)
    expected = layer((weights @ inner @ weights.T).mean(), 1)
    torch.testing.assert_close(kernel[0, 0], expected, rtol=1e-12, atol=0)


def test_queries_without_keys() -> None:
    """Their result is 0, as that of torch."""
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[2] = False
    net = Free(lambda s, x: (lambda h: s.out(attend(h, s.a(h), s.c(h), attn_mask=mask)[:, 2]))(s.start(x))).double()
    kernel = limit_kernel(net, tokens, kind="nngp", variances=variance)
    torch.testing.assert_close(kernel, torch.full((3, 3), 0.1, dtype=torch.float64), rtol=1e-14, atol=0)


def test_a_stopped_output_has_no_tangent_kernel() -> None:
    net = Free(lambda s, x: s.out(s.start(x).relu()).detach()).double()
    assert not bool(limit_kernel(net, points, variances=variance).any())
    assert bool(limit_kernel(net, points, kind="nngp", variances=variance).all())


def test_means_over_channels_are_not_taken_for_means_over_positions() -> None:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
    body = nn.Sequential(*layers)
    for dims, found in (((2, 3), True), ((1, 2), False)):
        net = Free(lambda s, x, dims=dims: s.end(s.body(x).mean(dims).view(1, 4)), body=body, end=nn.Linear(4, 1))  # type: ignore[misc]
        graph, sites = _read(net, normal(1, 2, 4, 4).float(), "default", "ntk")
        assert (convolution_stack(graph, sites) is not None) == found


def test_global_pooling_of_channels_that_are_last_in_memory() -> None:
    """Torch writes it as a mean and other strides of its axes of length 1."""

    class Normed(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3))

    x = torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for pooling in ([nn.AdaptiveAvgPool2d(1), nn.Flatten()], [Mean()]):
        layers = (nn.Conv2d(2, 16, 3, padding=1), Normed(16), nn.ReLU(), *pooling, nn.Linear(16, 1))
        found.append(limit_kernel(nn.Sequential(*layers).double(), x))
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)
