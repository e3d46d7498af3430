"""Scattering features of images: x⋆φ, |x⋆ψ|⋆φ and, with wavelets along angles too, ||x⋆ψ|⋆ψ'⋆χ|⋆φ.

The choices are those of the program that Oyallon and Mallat (2015) published: two wavelets per octave in the first
layer and one in the second, which is followed by a convolution along the angles of the first. No library has both; the
wavelets are those of kymatio (Andreux et al. 2020).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.extras import required
from lazyscope.progress import track

ANGLES = 8
"""The number of angles of the wavelets in half a turn."""

PER_OCTAVE = (2, 1)
"""The number of wavelets per octave in the first and in the second layer."""

SIGMA, SLANT = 0.8, 4 / ANGLES
"""The width of φ and of the finest wavelets in pixels, and the ratio of the widths of a wavelet."""

OCTAVES, ANGULAR_SIGMA = 2, 2 / math.sqrt(3)
"""The number of wavelets along angles, and the width of the finest, in steps of an angle."""

Bank: TypeAlias = list[tuple[float, list[Tensor]]]
"""Scales as powers of 2 and, for each, the Fourier transforms of the wavelets of all angles at each resolution."""


@final
class Scattering:
    """The scattering transform of orders 0 to 2 at scale 2^J with 8 angles, applied to each channel separately.

    A wavelet of the second layer has at least twice the scale of that of the first. For J = 4 there are 2081 paths, on
    a grid that is coarser by the factor 2^J; for J = 2 there are 257.

    Args:
        shape: The height and width of the images, which must be multiples of 2^J.
        scales: The number of scales J.
        device: The device on which the features are computed.

    Raises:
        InputError: If the height or width is not a multiple of 2^J, or `scales` is not positive.
        MissingExtraError: If kymatio is not installed.

    Example:
        >>> features = Scattering((8, 8))(torch.zeros(2, 3, 8, 8))  # doctest: +SKIP
        >>> features.shape  # doctest: +SKIP
        torch.Size([2, 3, 257, 2, 2])
    """

    def __init__(self, shape: tuple[int, int], scales: int = 2, device: torch.device | str = "cpu") -> None:
        if scales < 1:
            raise InputError(f"scales={scales}; pass at least 1.")
        if any(side % 2**scales for side in shape):
            raise InputError(f"Sides {shape} are not multiples of {2**scales}; crop the images, or use fewer scales.")
        self.shape, self.scales, self.device = shape, scales, torch.device(device)
        margin = 2**scales
        self._padded = (shape[0] + 2 * margin, shape[1] + 2 * margin)
        self._places = [[_mirrored(side >> r, margin >> r).to(self.device) for side in shape] for r in range(scales)]
        self._first, self._second = (self._bank(count) for count in PER_OCTAVE)
        gabor = _kymatio().gabor_2d(*self._padded, SIGMA * 2 ** (scales - 1), 0, 0)
        self._phi = self._resolutions(_transform(gabor))
        self._chi = [(chi.to(self.device)[:, None, None], step) for chi, step in _along_angles()]

    @property
    def paths(self) -> int:
        """The number of coefficients per channel and position."""
        along = sum(ANGLES // step for _, step in self._chi)
        pairs = sum(two >= one + 1 for one, _ in self._first for two, _ in self._second)
        return 1 + ANGLES * len(self._first) + ANGLES * along * pairs

    @torch.no_grad()
    def __call__(
        self, x: Float[Tensor, "n channels height width"], images: int = 128
    ) -> Float[Tensor, "n channels paths rows columns"]:
        """Compute the coefficients.

        Args:
            x: The images.
            images: The number of images that are processed at a time.

        Returns:
            The coefficients, in float32, in the order of their layers.
        """
        grid = [side >> self.scales for side in self.shape]
        found = torch.empty(*x.shape[:2], self.paths, *grid, dtype=torch.float32, device=self.device)
        for pixels, out in zip(track(x.split(images), "scattering"), found.split(images), strict=True):
            at = 0
            for part in self._layers(pixels.to(self.device, torch.float32)):
                out[:, :, at : at + part.shape[2]] = part
                at += part.shape[2]
        return found

    def _layers(self, x: Tensor) -> Iterator[Tensor]:
        """Compute the coefficients by path, each as images × channels × paths × rows × columns."""
        yield self._low(x[:, :, None], 0)
        spectrum = self._spectrum(x[:, :, None], 0)
        # The moduli of the first layer: images × channels × angles × rows × columns.
        waves = [self._filtered(spectrum, psi[0], 0, int(one)).abs() for one, psi in self._first]
        for (one, _), maps in zip(self._first, waves, strict=True):
            yield self._low(maps, int(one))
        for (one, _), maps in zip(self._first, waves, strict=True):
            at = int(one)
            coarser = [(int(two), psi[at]) for two, psi in self._second if two >= one + 1]
            spectrum = self._spectrum(maps, at) if coarser else maps
            for then, turned in coarser:
                for psi in turned:
                    along = torch.fft.fft(self._filtered(spectrum, psi, at, then), dim=2)
                    moduli = [torch.fft.ifft(along * chi, dim=2)[:, :, ::step].abs() for chi, step in self._chi]
                    yield self._low(torch.cat(moduli, dim=2), then)

    def _spectrum(self, maps: Tensor, at: int) -> Tensor:
        """Mirror maps of resolution 2^-at at their edges, and transform them."""
        rows, columns = self._places[at]
        spectrum: Tensor = torch.fft.fft2(maps.index_select(-2, rows).index_select(-1, columns))
        return spectrum

    def _filtered(self, spectrum: Tensor, psi: Tensor, at: int, then: int) -> Tensor:
        """Multiply by the transform of a filter, go from the resolution 2^-at to 2^-then, and remove the margin."""
        product = spectrum * psi
        factor = 2 ** (then - at)
        for dim in (-2, -1):  # keeping every `factor`-th position is a sum over frequencies
            product = product.unflatten(dim, (factor, -1)).sum(dim - 1) / factor
        margin, (rows, columns) = 2**self.scales >> then, (side >> then for side in self.shape)
        maps: Tensor = torch.fft.ifft2(product)[..., margin : margin + rows, margin : margin + columns]
        return maps

    def _low(self, maps: Tensor, at: int) -> Tensor:
        """Convolve with φ, and keep every 2^J-th position of the image."""
        return self._filtered(self._spectrum(maps, at), self._phi[at], at, self.scales).real

    def _bank(self, per_octave: int) -> Bank:
        """Compute the transforms of the wavelets, which are real since the wavelets have Hermitian symmetry."""
        morlet, frequency = _kymatio().morlet_2d, (2 ** (-1 / per_octave) + 1) * math.pi / 2
        bank = []
        for k in range(self.scales * per_octave):
            scale = k / per_octave
            size = SIGMA * 2**scale, frequency / 2**scale
            turned = [
                _transform(morlet(*self._padded, size[0], math.pi * a / ANGLES, size[1], SLANT)) for a in range(ANGLES)
            ]
            bank.append((scale, self._resolutions(torch.stack(turned))))
        return bank

    def _resolutions(self, psi: Tensor) -> list[Tensor]:
        """Keep the frequencies that maps of the resolutions 1, ½, …, 2^(1 - J) have."""
        found = [psi]
        while len(found) < self.scales:
            found.append(_halved(_halved(found[-1], -2), -1))
        return [each.float().to(self.device) for each in found]


def _mirrored(length: int, margin: int) -> Tensor:
    """The positions of an edge that is mirrored on both sides: 1 0 | 0 1 2 | 2 1."""
    around = torch.arange(-margin, length + margin, device="cpu") % (2 * length)
    return torch.minimum(around, 2 * length - 1 - around)


def _transform(wavelet: Any) -> Tensor:
    transform: Tensor = torch.fft.fft2(torch.as_tensor(wavelet, dtype=torch.complex128, device="cpu"))
    return transform.real


def _halved(spectrum: Tensor, dim: int) -> Tensor:
    """Remove the upper half of the frequencies."""
    half = spectrum.shape[dim] // 4
    low, high = spectrum.narrow(dim, 0, half), spectrum.narrow(dim, spectrum.shape[dim] - half, half).clone()
    high.select(dim, 0).add_(spectrum.select(dim, half)).div_(2)  # the highest that is left has both signs
    return torch.cat([low, high], dim)


def _along_angles() -> list[tuple[Tensor, int]]:
    """The transforms of the functions χ of the angle, and of which angles coefficients are kept.

    A wavelet is used for both directions of the turn; the low-pass function has the same moduli for both.
    """
    frequency = 2 * math.pi * torch.arange(ANGLES, device="cpu").double() / ANGLES
    turns = 2 * math.pi * torch.arange(-2, 3, device="cpu")[:, None]

    def bump(centre: float, width: float) -> Tensor:
        return torch.exp(-((width * (frequency - centre + turns)) ** 2) / 2).sum(0)

    found = []
    for octave in range(OCTAVES):
        width = ANGULAR_SIGMA * 2**octave
        wavelet, low = bump(3 * math.pi / 4 / 2**octave, width), bump(0.0, width)
        wavelet = wavelet - wavelet[0] / low[0] * low  # its mean is 0
        found += [(each.float(), 2**octave) for each in (wavelet, wavelet.roll(-1).flip(0))]
    return [*found, (bump(0.0, ANGULAR_SIGMA).float(), 2 ** (OCTAVES - 1))]


def _kymatio() -> Any:
    """Import the filters of kymatio by their path, since `kymatio.torch` also imports code that needs SciPy < 1.17."""
    with warnings.catch_warnings():  # importing it changes the warning filters
        return required("kymatio.scattering2d.filter_bank", "scattering", "Scattering features")
