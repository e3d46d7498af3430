"""Scattering features of images: wavelet transforms and moduli, x⋆φ, |x⋆ψ|⋆φ and ||x⋆ψ|⋆ψ'|⋆φ (Bruna, Mallat 2013).

They come from kymatio (Andreux et al. 2020), by its two-dimensional torch front end.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError, ModelError


@final
class Scattering:
    """Orders 0 to 2 at scale 2^J with 8 angles, each colour by itself: 81 paths at J = 2, on a grid coarser by 2^J.

    >>> features = Scattering((8, 8))(torch.zeros(2, 3, 8, 8))  # doctest: +SKIP
    >>> features.shape  # doctest: +SKIP
    torch.Size([2, 3, 81, 2, 2])
    """

    def __init__(self, shape: tuple[int, int], scales: int = 2, device: torch.device | str = "cpu") -> None:
        if any(side % 2**scales for side in shape):
            raise InputError(f"Sides {shape} are no multiples of {2**scales}; crop the images, or take fewer scales.")
        self.shape, self.scales, self.device = shape, scales, torch.device(device)
        self._transform = _front_end()(J=scales, shape=shape, L=8, max_order=2).to(self.device)

    @torch.no_grad()
    def __call__(
        self, x: Float[Tensor, "n channels height width"], images: int = 512
    ) -> Float[Tensor, "n channels paths rows columns"]:
        """The coefficients, some images at a time."""
        parts = [self._transform(part.contiguous().to(self.device, torch.float32)) for part in x.split(images)]
        return torch.cat(parts)


def _front_end() -> Any:
    """kymatio's torch module, by its own path: kymatio.torch imports more, which needs a SciPy before 1.17."""
    try:
        with warnings.catch_warnings():  # it changes the filters of warnings when it is imported
            module = importlib.import_module("kymatio.scattering2d.frontend.torch_frontend")
    except ImportError as error:
        raise ModelError(f"Scattering features need kymatio ({error}); run pip install kymatio.") from error
    return module.ScatteringTorch2D
