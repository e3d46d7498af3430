"""Example models for `lazyscope inspect examples.models:NAME`.

A factory returns a module, which needs the option `--data`, or (module, x, y), or (module, x, y, loss). All models have
random weights, and most are small enough for two cores.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyscope.data.digits import digits
from lazyscope.loss import CrossEntropy, Square
from lazyscope.model.resnet import resnet18
from lazyscope.model.vgg import vgg11


def mlp() -> nn.Module:
    """A two-layer MLP for --data digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


# ── convolutional nets ─────────────────────────────────────────────────────────────────────────────────────────────
def vgg() -> nn.Module:
    """VGG-11 for --data cifar10: 9.2 million parameters."""
    return vgg11(seed=0)


def resnet() -> nn.Module:
    """ResNet-18 for --data cifar10, with group normalisation, which does not depend on the other samples of a batch."""
    return resnet18(seed=0)


def cnn() -> nn.Module:
    """A LeNet-like network with batch normalisation and dropout, in evaluation mode, for --data digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 10),
    ).eval()  # fmt: skip


# ── transformers ───────────────────────────────────────────────────────────────────────────────────────────────────
class Block(nn.Module):
    """A transformer block: attention and an MLP, each with layer normalisation before it and a residual connection."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to x of shape (n, positions, width)."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.mix(self.norms[0](x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.back(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class ViT(nn.Module):
    """A vision transformer with patches, a class token and learned position embeddings."""

    def __init__(self, size: int = 8, channels: int = 1, patch: int = 2, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, 1 + (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, 4, causal=False) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the class scores of images of shape (n, channels, size, size)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1) + self.place
        out: Tensor = self.head(self.blocks(tokens)[:, 0])
        return out


def vit() -> nn.Module:
    """A vision transformer for --data digits."""
    return ViT()


class GPT(nn.Module):
    """A GPT: causal transformer blocks, with the output layer tied to the embedding.

    Weights have a standard deviation of 0.02, and those that add to the residual stream one that is √(2·depth) times
    smaller, as in GPT-2. With the default N(0, 1) of `nn.Embedding`, the tied output layer would start at huge outputs.
    """

    def __init__(self, tokens: int, places: int, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.place = nn.Parameter(0.02 * torch.randn(places, width))
        self.blocks = nn.Sequential(*(Block(width, 4, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            for last in (block.back, block.mlp[2]):
                assert isinstance(last, nn.Linear)
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * depth))
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the scores of the next token at every position, of shape (n, positions, tokens)."""
        x = self.embedding(tokens) + self.place[: tokens.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


TEXT = "to be or not to be that is the question whether tis nobler in the mind to suffer the slings and arrows "


def gpt() -> tuple[nn.Module, Tensor, Tensor, CrossEntropy]:
    """A small GPT that predicts the next character of a sentence, with the cross-entropy loss."""
    alphabet = sorted(set(TEXT))
    codes = torch.tensor([alphabet.index(letter) for letter in 3 * TEXT])
    rows = torch.stack([codes[start : start + 9] for start in range(0, 96, 3)])
    return GPT(len(alphabet), 8), rows[:, :-1], rows[:, 1:], CrossEntropy()


# ── other outputs ──────────────────────────────────────────────────────────────────────────────────────────────────
def autoencoder() -> tuple[nn.Module, Tensor, Tensor, Square]:
    """An autoencoder of the digits with a bottleneck of 16 units and 64 outputs, with the square loss."""
    x = digits(n=64, seed=0)[0].flatten(1)
    net = nn.Sequential(
        nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16), nn.SiLU(), nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64)
    )
    return net, x, x.clone(), Square()


class Heat(nn.Module):
    """A physics-informed network: u(t, x) on the boundary, and the residual u_t - u_xx of the heat equation inside.

    Both are outputs, so that the square loss applies to them. The derivatives are computed with torch.func.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, place: Tensor, inside: Tensor) -> Tensor:
        """Compute, for points (n, 2), the value where `inside` is 0 and the residual where it is 1, of shape (n, 1)."""
        one, zero = torch.ones_like(place[:, :1]), torch.zeros_like(place[:, :1])
        along_t, along_x = torch.cat([one, zero], 1), torch.cat([zero, one], 1)

        def slope(at: Tensor) -> Tensor:
            out: Tensor = torch.func.jvp(self.u, (at,), (along_x,))[1]
            return out

        u_t: Tensor = torch.func.jvp(self.u, (place,), (along_t,))[1]
        u_xx: Tensor = torch.func.jvp(slope, (place,), (along_x,))[1]
        out: Tensor = (1 - inside) * self.u(place) + inside * (u_t - u_xx)
        return out


def pinn() -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor, Square]:
    """The heat equation on [0, 1]² with u(0, x) = sin πx and u = 0 at both ends."""
    random = torch.Generator().manual_seed(0)
    inner = torch.rand(40, 2, generator=random)
    start = torch.stack([torch.zeros(12), torch.linspace(0, 1, 12)], 1)
    ends = torch.stack([torch.rand(12, generator=random), torch.arange(12) % 2], 1)
    place = torch.cat([inner, start, ends])
    inside = torch.cat([torch.ones(40, 1), torch.zeros(24, 1)])
    values = torch.where(place[:, :1] == 0, torch.sin(math.pi * place[:, 1:]), 0.0)
    return Heat(), (place, inside), (1 - inside) * values, Square()
