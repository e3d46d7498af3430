"""ResNet-18 for 32×32 images, with a 3×3 stem and a width factor, without max-pooling or batch normalisation.

See Section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lazyscope.model.initialise import xavier_


class Block(nn.Module):
    """A residual block of two 3×3 convolutions and a shortcut, which is a 1×1 convolution if the shape changes.

    Args:
        features: The number of input channels.
        wide: The number of output channels.
        stride: The stride of the first convolution and of the shortcut.
    """

    def __init__(self, features: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(features, wide, 3, stride, 1)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1)
        same = stride == 1 and features == wide
        self.shortcut: nn.Module = nn.Identity() if same else nn.Conv2d(features, wide, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Compute relu(second(relu(first(x))) + shortcut(x))."""
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def resnet18(*, width: float = 1.0, outputs: int = 10, gain: float = 1.0, seed: int | None = None) -> nn.Sequential:
    """Build ResNet-18 for 32×32 colour images, with 11.2 million parameters at width 1.

    Args:
        width: The factor that multiplies the number of channels of every layer.
        outputs: The number of outputs.
        gain: The factor that multiplies the initial weights.
        seed: The random seed of the initialisation. `None` uses torch's global random state.

    Returns:
        The network, for inputs of shape `(n, 3, 32, 32)`.
    """
    widths = [max(1, round(c * width)) for c in (64, 128, 256, 512)]
    modules: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1), nn.ReLU()]
    features = widths[0]
    for stage, wide in enumerate(widths):
        modules += [Block(features, wide, 1 if stage == 0 else 2), Block(wide, wide, 1)]
        features = wide
    net = nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, outputs))
    xavier_(net, gain, seed)
    return net
