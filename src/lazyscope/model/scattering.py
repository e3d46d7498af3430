"""Scattering features of images: wavelet transforms and moduli, x⋆φ, |x⋆ψ|⋆φ and ||x⋆ψ|⋆ψ'|⋆φ (Bruna, Mallat 2013).

They are computed by the two-dimensional torch front end of kymatio (Andreux et al. 2020). The second layer of Oyallon
and Mallat (2015) convolves along angles too, which no library does: it is written here, with the wavelets of kymatio.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.extras import required

ANGLES = 8
"""The number of angles of the wavelets in half a turn."""

OCTAVES, CENTRE, WIDTH = 2, 3 * math.pi / 4, 0.8
"""The number of wavelets along angles, and the frequency and the width of the finest, in steps of an angle."""


@final
class Scattering:
    """The scattering transform of orders 0 to 2 at scale 2^J with 8 angles, applied to each channel separately.

    For J = 2 it has 81 paths, on a grid that is coarser by the factor 2^J. With wavelets along angles, it has 128 more.

    Args:
        shape: The height and width of the images, which must be multiples of 2^J.
        scales: The number of scales J.
        device: The device on which the features are computed.
        angular: Whether to add the second layer with wavelets along angles.

    Raises:
        InputError: If the height or width is not a multiple of 2^J, or is too small for wavelets along angles.
        MissingExtraError: If kymatio is not installed.

    Example:
        >>> features = Scattering((8, 8))(torch.zeros(2, 3, 8, 8))  # doctest: +SKIP
        >>> features.shape  # doctest: +SKIP
        torch.Size([2, 3, 81, 2, 2])
    """

    def __init__(
        self, shape: tuple[int, int], scales: int = 2, device: torch.device | str = "cpu", *, angular: bool = False
    ) -> None:
        if any(side % 2**scales for side in shape):
            raise InputError(f"Sides {shape} are not multiples of {2**scales}; crop the images, or use fewer scales.")
        self.shape, self.scales, self.device = shape, scales, torch.device(device)
        front_end = _kymatio("frontend.torch_frontend").ScatteringTorch2D
        self._transform = front_end(J=scales, shape=shape, L=ANGLES, max_order=2).to(self.device)
        self._angular = _Angular(shape, scales, self.device) if angular else None

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
        parts = []
        for part in x.split(images):
            pixels = part.contiguous().to(self.device, torch.float32)
            found = [self._transform(pixels), *([self._angular(pixels)] if self._angular else [])]
            parts.append(torch.cat(found, dim=2))
        return torch.cat(parts)


class _Angular:
    """The second layer with wavelets along angles: |W⋆χ|⋆φ with W(u, θ) = |x⋆ψ_θ|⋆ψ'_{θ+δ}, for each δ.

    W(u, θ + π) is the conjugate of W(u, θ). The functions χ of the angle are wavelets and a low-pass function, whose
    coefficients are computed at as many angles as they have frequencies.
    """

    def __init__(self, shape: tuple[int, int], scales: int, device: torch.device) -> None:
        self.shape, self.scales, self.pad = shape, scales, 2**scales
        if scales < 2 or min(shape) <= self.pad:
            raise InputError(
                f"Wavelets along angles need two scales and sides above {self.pad}, but the images have {shape}; pass"
                " larger images, or angular=False."
            )
        rows, columns = (side + 2 * self.pad for side in shape)
        bank = _kymatio("filter_bank").filter_bank(rows, columns, scales, L=ANGLES)

        def on_device(found: dict[str, Any]) -> Tensor:
            return torch.as_tensor(found["levels"][0], dtype=torch.complex64, device=device)

        self.phi = on_device(bank["phi"])
        self.psi = torch.stack([on_device(each) for each in bank["psi"]]).unflatten(0, (scales, ANGLES))
        self.chi = [(chi[:, None, None].to(device, torch.complex64), kept) for chi, kept in _along_angles()]

    def __call__(self, x: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n channels paths rows columns"]:
        padded = torch.fft.fft2(F.pad(x, [self.pad] * 4, mode="reflect"))[:, :, None]
        found = []
        for j in range(self.scales - 1):
            first = torch.fft.fft2(torch.fft.ifft2(padded * self.psi[j]).abs())  # n × channels × θ × rows × columns
            for psi in self.psi[j + 1 :]:
                for shift in range(ANGLES):
                    second = torch.fft.ifft2(first * psi.roll(-shift, 0))
                    second[:, :, ANGLES - shift :].imag.neg_()  # ψ_{θ+π} is the conjugate of ψ_θ
                    turn = torch.fft.fft(torch.cat([second, second.conj()], dim=2), dim=2)
                    for chi, kept in self.chi:
                        found.append(self._low(torch.fft.ifft(turn * chi, dim=2)[:, :, kept].abs()))
        return torch.cat(found, dim=2)

    def _low(self, maps: Tensor) -> Tensor:
        """Convolve with φ, and keep every 2^J-th position of the image."""
        smooth: Tensor = torch.fft.ifft2(torch.fft.fft2(maps) * self.phi).real
        (rows, columns), step = self.shape, 2**self.scales
        return smooth[..., self.pad : self.pad + rows : step, self.pad : self.pad + columns : step]


def _along_angles() -> list[tuple[Tensor, slice]]:
    """The Fourier transforms of the functions χ over a full turn, and the angles at which coefficients are kept."""
    frequency = 2 * math.pi * torch.arange(2 * ANGLES, device="cpu").double() / (2 * ANGLES)

    def bump(centre: float, width: float) -> Tensor:
        turns = 2 * math.pi * torch.arange(-2, 3, device="cpu")[:, None]
        return torch.exp(-((width * (frequency - centre + turns)) ** 2) / 2).sum(0)

    found = []
    for octave in range(OCTAVES):
        width = WIDTH * 2**octave
        wavelet, low = bump(CENTRE / 2**octave, width), bump(0.0, width)
        found.append((wavelet - wavelet[0] / low[0] * low, slice(None, None, 2 ** (octave + 1))))  # its mean is 0
    return [*found, (low, slice(0, ANGLES, 2))]  # the other half of the turn has the same moduli


def _kymatio(module: str) -> Any:
    """Import a module of kymatio by its path, since `kymatio.torch` also imports code that needs SciPy < 1.17."""
    with warnings.catch_warnings():  # importing it changes the warning filters
        return required(f"kymatio.scattering2d.{module}", "scattering", "Scattering features")
