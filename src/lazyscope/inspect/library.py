"""Models of timm and torchvision by name, such as `timm:resnet18`, adapted to the data."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyscope.errors import InputError, MissingExtraError, ModelError

SIDE = 224
"""The usual width and height of the images of these libraries."""

ENLARGED = 256
"""The largest number of images that are enlarged, which take 150 MB at this size."""


def _timm(name: str, classes: int) -> nn.Module:
    net: nn.Module = _library("timm").create_model(name, pretrained=False, num_classes=classes)
    return net


def _torchvision(name: str, classes: int) -> nn.Module:
    net: nn.Module = _library("torchvision.models").get_model(name, weights=None, num_classes=classes)
    return net


LIBRARIES: dict[str, Callable[[str, int], nn.Module]] = {"timm": _timm, "torchvision": _torchvision}


def from_library(address: str, x: Tensor, y: Tensor) -> tuple[nn.Module, Tensor, Tensor, list[str]]:
    """Create a model with random weights, and adapt the images to it.

    Images of one channel get three, and images that the model refuses are enlarged to the size that it expects. Batch
    normalisation computes its statistics from the images once, since those of a new model are arbitrary. The model is
    in evaluation mode.

    Args:
        address: The library and the name, such as "timm:resnet18".
        x: The images, of shape `(n, channels, height, width)`.
        y: Their classes.

    Returns:
        The model, the images, their classes, and notes for the report.

    Raises:
        MissingExtraError: If the library is not installed.
        ModelError: If it has no such model, or the model does not accept images.
        InputError: If the data are not images with classes.
    """
    library, _, name = address.partition(":")
    if x.ndim != 4 or y.is_floating_point() or y.ndim != 1:
        raise InputError(f"{address} classifies images; pass --data cifar10, or a FILE.npz with x (n, 3, h, w) and y.")
    try:
        net = LIBRARIES[library](name, int(y.max()) + 1)
    except (MissingExtraError, MemoryError):
        raise
    except Exception as error:  # both libraries raise errors of several types
        reason = " ".join(f"{error}".split())
        raise ModelError(f"{library} cannot create '{name}' ({reason}); see {library}'s list of models.") from error
    x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
    net = net.eval()
    notes = []
    if _refusal(net, x) is not None:
        height, width = _size(net)
        notes.append(
            f"{name} does not accept images of {x.shape[-2]} × {x.shape[-1]} pixels, so they are enlarged to"
            f" {height} × {width}."
        )
        x, y = F.interpolate(x[:ENLARGED], (height, width), mode="bilinear", align_corners=False), y[:ENLARGED]
        if (refusal := _refusal(net, x)) is not None:
            shape = " × ".join(str(size) for size in x.shape[1:])
            raise ModelError(f"'{address}' does not accept images of {shape} ({refusal}); choose another model.")
    return net, x, y, [*notes, *_settle(net, x)]


def _library(module: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError, AttributeError) as error:  # a version for another torch raises the latter two
        reason = " ".join(f"{error}".split())
        raise MissingExtraError(
            f"Models of {package} need {package} ({reason}); run: pip install {package}, in a version for torch"
            f" {torch.__version__}."
        ) from error


def _refusal(net: nn.Module, x: Tensor) -> str | None:
    """Return why the model does not accept an image, or None if it does."""
    try:
        with torch.no_grad():
            net(x[:1].to(next(net.parameters()).dtype))
    except (RuntimeError, AssertionError, ValueError) as error:
        return " ".join(f"{error}".split())
    return None


def _size(net: nn.Module) -> tuple[int, int]:
    """The size of images that the model expects: timm's models know it."""
    shape = getattr(net, "default_cfg", {}).get("input_size", (3, SIDE, SIDE))
    return int(shape[-2]), int(shape[-1])


def _settle(net: nn.Module, x: Tensor, batch: int = 128) -> list[str]:
    """Let batch normalisation compute the mean and the variance of its inputs over the images."""
    norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return []
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = None  # a plain average over the batches
    with torch.no_grad():
        for images in x.split(batch):
            if len(images) > 1 or len(x) == 1:
                net(images.to(next(net.parameters()).dtype))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    net.eval()
    return [
        f"The statistics of the {len(norms)} batch-norm layers are those of the data at the initial weights, and stay"
        " fixed."
    ]
