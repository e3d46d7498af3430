"""VGG-11 for 32×32 images, without batch normalisation and with a width factor (Section 3.2)."""

from __future__ import annotations

from torch import nn

from lazyscope.model.initialise import xavier_

VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
"""The layers of configuration A of Simonyan and Zisserman: output channels of 3×3 convolutions, and 2×2 max-pools."""


def vgg(
    layers: tuple[int | str, ...] = VGG11,
    *,
    width: float = 1.0,
    outputs: int = 10,
    channels: int = 3,
    gain: float = 1.0,
    seed: int | None = None,
) -> nn.Sequential:
    """Build a VGG network: 3×3 convolutions with biases, ReLU, 2×2 max-pools, a global average and one linear layer.

    For 32×32 images the five max-pools of VGG-11 leave one pixel, so that the global average does nothing. Smaller
    images need fewer max-pools.

    Args:
        layers: The layers in order: the number of output channels of a convolution, or `"pool"` for a max-pool.
        width: The factor that multiplies the number of channels of every layer.
        outputs: The number of outputs.
        channels: The number of channels of the images.
        gain: The factor that multiplies the initial weights.
        seed: The random seed of the initialisation. `None` uses torch's global random state.

    Returns:
        The network, for inputs of shape `(n, channels, height, width)`.
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
    """Build VGG-11 for 32×32 colour images, with 9.2 million parameters at width 1.

    Args:
        width: The factor that multiplies the number of channels of every layer.
        outputs: The number of outputs.
        gain: The factor that multiplies the initial weights.
        seed: The random seed of the initialisation. `None` uses torch's global random state.

    Returns:
        The network, for inputs of shape `(n, 3, 32, 32)`.
    """
    return vgg(width=width, outputs=outputs, gain=gain, seed=seed)
