"""Architectures whose tangent kernels are tested, and the float64 contraction of Jacobians as the reference."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lazyscope import Model
from lazyscope.model.base import flatten, unflatten
from lazyscope.model.resnet import resnet18
from lazyscope.model.vgg import vgg11


class Transformer(nn.Module):
    """One causal pre-norm block with a class token, learnt positions and output weights tied to the embedding."""

    def __init__(self, tokens: int = 9, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(tokens, width, padding_idx=3)
        self.place = nn.Parameter(torch.randn(6, width))
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.attention = nn.Linear(width, 3 * width)
        self.back = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place[: tokens.shape[1]]
        x = torch.cat([self.first.expand(len(tokens), -1, -1), x], 1)
        q, k, v = self.attention(self.norms[0](x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        x = x + self.back(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norms[1](x))
        out: Tensor = self.head(self.norms[2](x).mean(1))
        return out


class Twice(nn.Module):
    """One linear layer called on vectors and then on sequences, and one convolution called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(torch.tanh(self.conv(x))))
        x = torch.tanh(self.mix(x)).mean((1, 2))
        out: Tensor = self.out(torch.tanh(self.mix(x)))
        return out


class Bare(nn.Module):
    """Parameters outside of layers: a scale, a matrix on either side, and one that is used in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.left = nn.Parameter(torch.randn(4, 5))
        self.square = nn.Parameter(torch.randn(6, 6))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:  # (n, 5, 6)
        y = self.scale * torch.tanh(torch.stack([self.left @ each for each in x])) @ self.square
        return torch.tanh(y @ self.square.T).sum(1) + (y.mean(1) * self.square.diagonal())


class Attention(nn.Module):
    """The multi-head attention of torch across two sequences, whose packed matrix is used in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.attention(self.encoder(x), y, y, need_weights=False)[0]
        return out.mean(1)[:, :3]


class Recurrent(nn.Module):
    """An LSTM over time, with a scalar output that has no separate dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(x)[0][:, -1]).squeeze()
        return out


class Filters(nn.Module):
    """A convolution whose weights depend on the input, with a transposed convolution and a quadratic form."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(2, 2 * 2 * 3)
        self.up = nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1)
        self.form = nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor) -> Tensor:  # (n, 2, length)
        weights = self.make(x.mean(-1)).view(-1, 2, 3)
        y = F.conv1d(x.reshape(1, -1, x.shape[-1]), weights, groups=len(x)).view(len(x), 2, -1)
        z = torch.tanh(self.up(y)).mean(-1)
        out: Tensor = self.form(z, z.flip(-1))
        return out


def perturbed(net: nn.Module) -> nn.Module:
    """Change the scales, shifts and statistics of normalisation layers, so that they are not 0 and 1."""
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if tensor.is_floating_point() and (tensor.ndim == 1 or "running" in name):
            tensor.data.add_(0.3 * torch.rand_like(tensor))
    return net.eval()


def _images(n: int, channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(n, channels, size, size)


def _grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2, padding=2, dilation=2),
        nn.SiLU(),
        nn.Conv2d(8, 8, (3, 1), groups=8, stride=(2, 1)),
        nn.Tanh(),
        nn.Conv2d(8, 6, 3, padding=(2, 0), dilation=(1, 3), bias=False),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def _normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Tanh(), nn.LayerNorm([6, 8, 8]), nn.AvgPool2d(2),
        nn.Flatten(2), nn.RMSNorm(16), nn.Flatten(), nn.Linear(96, 2),
    )  # fmt: skip


def _reparametrised() -> nn.Module:
    first, last = parametrizations.weight_norm(nn.Linear(5, 6)), parametrizations.orthogonal(nn.Linear(6, 6))
    return nn.Sequential(first, nn.Tanh(), last, nn.PReLU(6), nn.Linear(6, 2))


def _foreign(module: str, name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        library = importlib.import_module(module)
        net: nn.Module = getattr(library, name)(num_classes=2)
        return net

    return build


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)),
        lambda n: torch.randn(n, 5),
    ),
    "scalar": (lambda: nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1)), lambda n: torch.randn(n, 5)),
    "vgg11": (lambda: vgg11(width=1 / 32, outputs=3), lambda n: _images(n, size=32)),
    "resnet18": (lambda: resnet18(width=1 / 32, outputs=3), lambda n: _images(n)),
    "grouped-dilated": (_grouped, lambda n: _images(n, 4)),
    "strided-1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 6, 5, 3, padding=2), nn.GELU(), nn.Conv1d(6, 4, 3, stride=2), nn.Flatten(), nn.Linear(12, 3)
        ),
        lambda n: torch.randn(n, 2, 21),
    ),
    "convolution-3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(375, 2)),
        lambda n: torch.randn(n, 1, 4, 4, 4),
    ),
    "transformer": (Transformer, lambda n: torch.randint(0, 9, (n, 5))),
    "twice": (Twice, lambda n: torch.randn(n, 3, 4, 4)),
    "batch-norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 5, 3),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.BatchNorm1d(45),
            nn.Linear(45, 3),
        ),
        _images,
    ),
    "bare": (Bare, lambda n: torch.randn(n, 5, 6)),
    "group-layer-norm": (_normed, _images),
    "attention": (Attention, lambda n: (torch.randn(n, 4, 8), torch.randn(n, 3, 8))),
    "recurrent": (Recurrent, lambda n: torch.randn(n, 4, 3)),
    "filters": (Filters, lambda n: torch.randn(n, 2, 7)),
    "reparametrised": (_reparametrised, lambda n: torch.randn(n, 5)),
}

FOREIGN: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "torchvision": (_foreign("torchvision.models", "squeezenet1_1"), lambda n: _images(n, size=32)),
    "timm": (_foreign("timm.models", "mobilenetv3_small_050"), lambda n: _images(n, size=32)),
}


def build(name: str, n: int, dtype: torch.dtype = torch.float64) -> tuple[Model, Any]:
    """Build a model of the list and n samples for it. The result is the same for every call."""
    torch.manual_seed(len(name))
    make, sample = {**ARCHITECTURES, **FOREIGN}[name]
    net, x = make(), sample(n)
    with torch.no_grad():
        net(*x) if isinstance(x, tuple) else net(x)  # initialises lazy layers
    return Model(perturbed(net).to(dtype)), cast(x, dtype)


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Convert inputs to another precision, except for integer tokens."""
    keys, leaves = flatten(x)
    return unflatten(keys, [leaf.to(dtype) if leaf.is_floating_point() else leaf for leaf in leaves])


def part(x: Any, rows: slice) -> Any:
    """Select some of the samples."""
    keys, leaves = flatten(x)
    return unflatten(keys, [leaf[rows] for leaf in leaves])


def contraction(model: Model, x1: Any, x2: Any) -> Tensor:
    """Compute J₁J₂ᵀ in float64, of shape (n1, n2, k, k)."""
    model = model.double()
    one, two = (jacobian(model, cast(x, torch.float64)) for x in (x1, x2))
    return torch.einsum("iap,jbp->ijab", one, two)


def jacobian(model: Model, x: Any) -> Tensor:
    """Compute Dh(w₀), of shape (n, k, p), by one `torch.func.vjp` per output and sample, without batching rules."""
    pulling: Any = torch.func.vjp(lambda w: model(x, w).flatten(), dict(model.params))
    out, pull = pulling
    rows = [torch.cat([g.flatten() for g in pull(seed)[0].values()]) for seed in torch.eye(len(out), dtype=out.dtype)]
    return torch.stack(rows).view(len(flatten(x)[1][0]), -1, model.n_params)


def error(found: Tensor, reference: Tensor) -> float:
    """Compute the largest deviation relative to the largest entry."""
    return float((found - reference).abs().max() / reference.abs().max())
