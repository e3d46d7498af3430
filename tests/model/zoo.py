"""Architectures on which the increments are tested, and the float64 formula that is the reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyscope import Model, Scaled
from lazyscope.model.resnet import resnet18
from lazyscope.model.vgg import vgg11

ALPHAS = (0.1, 1.0, 1e2, 1e4, 1e6, 1e8, math.inf)


class Transformer(nn.Module):
    """Two causal pre-norm blocks over tokens, with output weights tied to the embedding."""

    def __init__(self, tokens: int = 40, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(tokens, width)
        self.place = nn.Parameter(0.1 * torch.randn(16, width))
        self.attention = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place[: tokens.shape[1]]
        for i in range(2):
            q, k, v = self.attention[i](self.norms[2 * i](x)).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
            x = x + self.back[i](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        out: Tensor = self.head(self.norms[4](x).mean(1))
        return out


class Everything(nn.Module):
    """Operations that the other networks lack: in-place code, indexing, products, tied and reused layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=2, dilation=2, groups=2)
        self.line = nn.Conv1d(8, 6, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 8), nn.BatchNorm2d(8), nn.RMSNorm(6)])
        self.mix = nn.Linear(6, 6)
        self.bare = nn.Parameter(torch.randn(6))
        self.out = nn.Bilinear(6, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[1](self.norms[0](self.conv(x)))
        x = F.relu(x, inplace=True)
        pooled = [F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1), F.adaptive_max_pool2d(x, 2).repeat(1, 1, 2, 2)]
        x = torch.stack([p[..., :2, :2] for p in pooled]).mean(0).flatten(2)
        x = self.line(x).transpose(1, 2)
        x = self.norms[2](x)
        x = self.mix(torch.tanh(self.mix(x)))  # one layer used twice
        x += self.bare
        x[:, 0] *= 2.0
        x.sigmoid_()
        a, b = x[:, ::2].amax(1), torch.cat([x[:, 1:2], x[:, 2:3]], 1).logsumexp(1)
        a = torch.where(a > 0.5, a * a, 0.5 * a) / (1.0 + b.abs())
        gate = (b > 0.9).to(a.dtype)
        out: Tensor = self.out(a, b * gate + F.softplus(b) * (1 - gate)).softmax(-1).std(-1, keepdim=True)
        out = out + F.elu(a - 0.3)[:, :2] * F.hardswish(b)[:, :2] + torch.linalg.vector_norm(a, dim=-1, keepdim=True)
        return out


def mlp(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 24), activation(), nn.Linear(24, 24), activation(), nn.Linear(24, 3))


class Erf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


SMOOTH: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "gelu": nn.GELU,
    "gelu-tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "erf": Erf,
    "mish": nn.Mish,
}
KINKED: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky": nn.LeakyReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "hardtanh": nn.Hardtanh,
    "hardswish": nn.Hardswish,
    "prelu": nn.PReLU,
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Build a network by name with inputs for it. The result is the same for every call."""
    torch.manual_seed(0)
    if name in SMOOTH or name in KINKED:
        return mlp((SMOOTH | KINKED)[name]), torch.randn(7, 5)
    if name == "vgg11":
        return vgg11(seed=0), torch.randn(2, 3, 32, 32)
    if name == "resnet18":
        return resnet18(seed=0), torch.randn(2, 3, 32, 32)
    if name == "transformer":
        return Transformer(), torch.randint(0, 40, (4, 9))
    return Everything().eval(), torch.randn(5, 4, 9, 9)


NETS = [*SMOOTH, *KINKED, "vgg11", "resnet18", "transformer", "everything"]


def movement(model: Model, size: float) -> dict[str, Tensor]:
    """Draw a random v of `size` times the mean absolute weight of each tensor, or times 0.1 for zero tensors."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: size * torch.randn(w.shape, generator=generator) * (w.abs().mean() if w.any() else 0.1)
        for name, w in model.params.items()
    }


def exact(model: Model, x: Tensor, v: dict[str, Tensor], alpha: float, u: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Compute α(h(w₀ + v/α) - h(w₀)) and its gradient against u in float64, or the JVP and the VJP at w₀ for α = ∞."""
    wide = model.double()
    inputs = x.double() if x.is_floating_point() else x
    moves = {name: each.double().requires_grad_() for name, each in v.items()}
    if math.isinf(alpha):
        detached = {name: each.detach() for name, each in moves.items()}
        value = torch.func.jvp(lambda w: wide(inputs, w), (dict(wide.params),), (detached,))[1]
        (gradient,) = torch.func.vjp(lambda w: wide(inputs, w), dict(wide.params))[1](u.double())
        return value, list(gradient.values())
    value = alpha * (wide(inputs, {name: wide.params[name] + moves[name] / alpha for name in moves}) - wide(inputs))
    return value.detach(), list(torch.autograd.grad(value, list(moves.values()), u.double()))


def ours(model: Model, x: Tensor, v: dict[str, Tensor], alpha: float) -> tuple[Tensor, list[Tensor], Tensor]:
    """Compute the value of the float32 scaled model and its gradient against a random u, which is also returned."""
    scaled = Scaled(model, alpha)
    parameters = dict(scaled.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(v[name])
    value = scaled(x)
    u = torch.randn(value.shape, generator=torch.Generator().manual_seed(2))
    return value.detach(), list(torch.autograd.grad(value, [parameters[name] for name in v], u)), u


def distance(found: list[Tensor], reference: list[Tensor]) -> float:
    """Compute the relative Euclidean distance of two lists of tensors."""
    error = sum(float((a.double() - b).square().sum()) for a, b in zip(found, reference, strict=True))
    return math.sqrt(error / sum(float(b.square().sum()) for b in reference))
