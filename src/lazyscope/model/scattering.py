"""Scattering features of images: wavelet transforms and moduli, x⋆φ, |x⋆ψ|⋆φ and ||x⋆ψ|⋆ψ'|⋆φ (Bruna, Mallat 2013).

They are computed by the two-dimensional torch front end of kymatio (Andreux et al. 2020).
"""

from __future__ import annotations

import warnings
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.extras import required


@final
class Scattering:
    """The scattering transform of orders 0 to 2 at scale 2^J with 8 angles, applied to each channel separately.

    For J = 2 it has 81 paths, on a grid that is coarser by the factor 2^J.

    Args:
        shape: The height and width of the images, which must be multiples of 2^J.
        scales: The number of scales J.
        device: The device on which the features are computed.

    Raises:
        InputError: If the height or width is not a multiple of 2^J.
        MissingExtraError: If kymatio is not installed.

    Example:
        >>> features = Scattering((8, 8))(torch.zeros(2, 3, 8, 8))  # doctest: +SKIP
        >>> features.shape  # doctest: +SKIP
        torch.Size([2, 3, 81, 2, 2])
    """

    def __init__(self, shape: tuple[int, int], scales: int = 2, device: torch.device | str = "cpu") -> None:
        if any(side % 2**scales for side in shape):
            raise InputError(f"Sides {shape} are not multiples of {2**scales}; crop the images, or use fewer scales.")
        self.shape, self.scales, self.device = shape, scales, torch.device(device)
        self._transform = _front_end()(J=scales, shape=shape, L=8, max_order=2).to(self.device)

    @torch.no_grad()
    def __call__(
        self, x: Float[Tensor, "n channels height width"], images: int = 512
    ) -> Float[Tensor, "n channels paths rows columns"]:
        """Compute the coefficients.

        Args:
            x: The images.
            images: The number of images that are processed at a time.

        Returns:
            The coefficients, in float32.
        """
        parts = [self._transform(part.contiguous().to(self.device, torch.float32)) for part in x.split(images)]
        return torch.cat(parts)


def _front_end() -> Any:
    """Import kymatio's torch module by its path, since `kymatio.torch` also imports code that needs SciPy < 1.17."""
    with warnings.catch_warnings():  # importing it changes the warning filters
        module = required("kymatio.scattering2d.frontend.torch_frontend", "scattering", "Scattering features")
    return module.ScatteringTorch2D
