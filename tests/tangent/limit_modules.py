"""Modules of a given width for the tests of infinite width, each with some inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.tangent.wide import normal
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Abs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class Erf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Concatenated(nn.Module):
    """Two branches of different widths and activations, and the inputs themselves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, width), nn.Linear(3, width // 2)
        self.inner, self.out = nn.Linear(width + width // 2 + 3, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.one(x).relu(), torch.tanh(self.two(x)), x], dim=1)
        out: Tensor = self.out(self.inner(joined).relu())
        return out


class Attention(nn.Module):
    """One block of attention over five tokens, with logits q·k/d."""

    def __init__(self, width: int, *, tied: bool = False, causal: bool = False, heads: int = 2) -> None:
        super().__init__()
        self.tied, self.causal, self.heads = tied, causal, heads
        self.start, self.place = nn.Linear(3, width), nn.Parameter(torch.randn(1, 5, width))
        self.qkv, self.end = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x) + self.place
        n, t, c = x.shape
        q, k, v = (
            each.view(n, t, self.heads, c // self.heads).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1)
        )
        scale = self.heads / c
        y = scaled_dot_product_attention(q, q if self.tied else k, v, is_causal=self.causal, scale=scale)
        x = x + self.end(y.transpose(1, 2).reshape(n, t, c))
        out: Tensor = self.out(self.norm(x).relu().mean(1))
        return out


class Chosen(nn.Module):
    """Attention whose queries and keys are activations, which have means, and attention of its results to themselves.

    The results of the first attention are added to those of the second one, so their scales are needed as well.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.start, self.out = nn.Linear(3, width), nn.Linear(width, 1)
        self.q, self.k, self.v, self.w = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)[:, None]
        scale = 1 / x.shape[-1]
        y = scaled_dot_product_attention(self.q(x).relu(), self.k(x).relu(), self.v(x), scale=scale)
        z = scaled_dot_product_attention(y, y, self.w(x), scale=scale)
        out: Tensor = self.out((z + y.relu())[:, 0].mean(1))
        return out


class Tokens(nn.Module):
    """An embedding of tokens, read out after a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.start, self.conv = nn.Embedding(6, width), nn.Conv1d(width, width, 2)
        self.out = nn.Linear(4 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.conv(self.start(x).transpose(1, 2)).relu().flatten(1))
        return out


def vgg(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, width, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 1),
    )


def resnet(width: int) -> nn.Module:
    def block() -> nn.Module:
        return Residual(
            nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    return nn.Sequential(
        nn.Conv2d(2, width, 3, padding=1),
        block(),
        block(),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 1),
    )


def pre_norm(width: int) -> nn.Module:
    def block() -> nn.Module:
        return Residual(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    return nn.Sequential(nn.Linear(3, width), block(), block(), nn.LayerNorm(width), nn.Linear(width, 1))


def normed(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))


def post_norm(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(3, width), nn.ReLU(), nn.LayerNorm(width)]
    for each in (nn.GELU(), nn.LeakyReLU(2.0)):
        layers += [nn.Linear(width, width), each, nn.LayerNorm(width)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


class PooledNorm(nn.Module):
    """Layer normalisation of a negative average of activations, and of a residual sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.inner, self.out = nn.Conv1d(2, width, 2), nn.Linear(width, width), nn.Linear(width, 1)
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = -self.conv(x).relu().mean(2)
        out: Tensor = self.out(self.two(self.inner(self.one(x)) - x))
        return out


def strided(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, width, 3, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(width, width, (1, 2), stride=(2, 1), groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * 2 * width, 1),
    )


def stack(*activations: nn.Module) -> Callable[[int], nn.Module]:
    def make(width: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(3, width)]
        for each in activations[:-1]:
            layers += [each, nn.Linear(width, width)]
        return nn.Sequential(*layers, activations[-1], nn.Linear(width, 1))

    return make


def dilated(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, width, 3, dilation=2, padding=1),
        nn.SiLU(),
        nn.Conv1d(width, width, 2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(3 * width, 1),
    )


def images() -> Tensor:
    return normal(3, 2, 4, 4)


def points() -> Tensor:
    return normal(3, 3)


MODULES: dict[str, tuple[Callable[[int], nn.Module], Callable[[], Tensor]]] = {
    "vgg": (vgg, images),
    "resnet": (resnet, images),
    "pre-norm": (pre_norm, points),
    "gelu": (stack(nn.GELU(), nn.GELU()), points),
    "layer norm": (
        lambda width: nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1)),
        points,
    ),
    "norm after activations": (post_norm, points),
    "norm after an average": (PooledNorm, lambda: normal(3, 2, 5)),
    "attention": (Attention, lambda: normal(3, 5, 3)),
    "tied attention": (lambda width: Attention(width, tied=True, causal=True), lambda: normal(3, 5, 3)),
    "attention of activations": (Chosen, lambda: normal(3, 5, 3)),
    "strides": (strided, images),
    "concatenation": (Concatenated, points),
    "embedding": (Tokens, lambda: torch.tensor([[0, 1, 2, 3, 4], [5, 5, 2, 0, 4], [1, 3, 2, 3, 0]])),
    "dropout": (stack(nn.ReLU(), nn.Dropout(0.5)), points),
    "leaky, abs, erf": (stack(nn.LeakyReLU(0.2), Abs(), Erf()), points),
    "sine, tanh, softplus": (stack(Sine(), nn.Tanh(), nn.Softplus()), points),
    "dilation": (dilated, lambda: normal(3, 2, 6)),
}
