"""ResNet-18 for 32×32 images: 3×3 stem, no max-pool, no batch-norm, with a width factor (Section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lazyscope.model.initialise import xavier_


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, features: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(features, wide, 3, stride, 1)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1)
        same = stride == 1 and features == wide
        self.shortcut: nn.Module = nn.Identity() if same else nn.Conv2d(features, wide, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """relu(second(relu(first(x))) + shortcut(x))."""
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def resnet18(*, width: float = 1.0, outputs: int = 10, gain: float = 1.0, seed: int | None = None) -> nn.Sequential:
    """ResNet-18 for 32×32 colour images: 11.2 million parameters at width 1."""
    widths = [max(1, round(c * width)) for c in (64, 128, 256, 512)]
    modules: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1), nn.ReLU()]
    features = widths[0]
    for stage, wide in enumerate(widths):
        modules += [Block(features, wide, 1 if stage == 0 else 2), Block(wide, wide, 1)]
        features = wide
    net = nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, outputs))
    xavier_(net, gain, seed)
    return net
