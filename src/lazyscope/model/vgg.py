"""VGG-11 for 32×32 images, without batch-norm, with a width factor (Section 3.2)."""

from __future__ import annotations

from torch import nn

from lazyscope.model.initialise import xavier_

VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
"""Output channels of the 3×3 convolutions of configuration A of Simonyan and Zisserman, and the 2×2 max-pools."""


def vgg(
    layers: tuple[int | str, ...] = VGG11,
    *,
    width: float = 1.0,
    outputs: int = 10,
    channels: int = 3,
    gain: float = 1.0,
    seed: int | None = None,
) -> nn.Sequential:
    """A VGG net: 3×3 convolutions with biases, ReLU, 2×2 max-pools, global average, one linear layer.

    `width` multiplies the channels of every layer. For 32×32 images the five pools of VGG-11 leave one pixel, so that
    the average is the identity there; smaller images need fewer pools.
    """
    modules: list[nn.Module] = []
    features = channels
    for layer in layers:
        if isinstance(layer, str):
            modules.append(nn.MaxPool2d(2))
            continue
        wide = max(1, round(layer * width))
        modules += [nn.Conv2d(features, wide, 3, padding=1), nn.ReLU()]
        features = wide
    net = nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, outputs))
    xavier_(net, gain, seed)
    return net


def vgg11(*, width: float = 1.0, outputs: int = 10, gain: float = 1.0, seed: int | None = None) -> nn.Sequential:
    """VGG-11 for 32×32 colour images: 9.2 million parameters at width 1."""
    return vgg(width=width, outputs=outputs, gain=gain, seed=seed)
