"""Models with complex intermediate values, complex parameters or complex outputs."""

from __future__ import annotations

import torch
from tests.conformance.ordinary import module, points
from tests.conformance.subject import Subject
from torch import Tensor, nn


class Filter(nn.Module):
    """The filter irfft(rfft(Wx) · w) with real w."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 6)
        self.filter = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.fft.irfft(torch.fft.rfft(self.mix(x)) * self.filter, n=6)
        return out


def real_filter() -> Subject:
    """A filter in Fourier space."""
    return Subject(module(Filter()), points())


class Operator(nn.Module):
    """A one-dimensional Fourier neural operator, with complex weights stored as pairs of reals."""

    def __init__(self, view: bool = True, width: int = 2, modes: int = 3) -> None:
        super().__init__()
        self.view = view
        self.lift, self.project = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
        self.skip = nn.Conv1d(width, width, 1)
        self.spectral = nn.Parameter(0.3 * torch.randn(width, width, modes, 2))
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x.unsqueeze(1))
        for _ in range(2):
            spectrum = torch.fft.rfft(h)
            out = torch.zeros_like(spectrum)
            weights = torch.view_as_complex(self.spectral) if self.view else torch.complex(*self.spectral.unbind(-1))
            out[..., : self.modes] = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], weights)
            h = torch.nn.functional.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.skip(h))
        result: Tensor = self.project(h).squeeze(1)
        return result


def neural_operator() -> Subject:
    """A Fourier neural operator. Plain autograd differentiates view_as_complex only once."""
    net, plain = module(Operator()), module(Operator(view=False))
    plain.load_state_dict(net.state_dict())
    return Subject(net, points(3, 6), plain=plain)


class Rotary(nn.Module):
    """Rotations by view_as_complex, as in rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.angle = nn.Linear(3, 4), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.view_as_complex(self.mix(x).unflatten(-1, (2, 2)))
        turned = h * torch.polar(torch.ones_like(self.angle), self.angle)
        return torch.view_as_real(turned).flatten(1)


def rotary() -> Subject:
    """A model with view_as_complex and polar."""
    return Subject(module(Rotary()), points())


class Magnitude(nn.Module):
    """The absolute value, the angle, the real part and the imaginary part of an FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(torch.tanh(self.mix(x)))
        return torch.stack([z.abs().sum(-1), z[..., 1].angle(), (z * z.conj()).real.sum(-1), z.imag[..., 1]], -1)


def magnitude() -> Subject:
    """A model that returns to real numbers by abs, angle, real and imag."""
    return Subject(module(Magnitude()), points())


class ComplexLayer(nn.Module):
    """The layer |Wx| with a complex weight W, stored as a complex tensor or as its real and imaginary parts."""

    def __init__(self, pair: Tensor, held: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.view_as_complex(pair) if held else pair)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.complex(*self.weight.unbind(-1))
        out: Tensor = (x.to(weight.dtype) @ weight.T).abs()
        return out


class Spectrum(nn.Module):
    """A model with a complex output."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.fft.fft(torch.tanh(self.mix(x)))
        return out


def complex_parameters() -> Subject:
    """A parameter of dtype complex128, studied as its real and imaginary parts."""
    pair = torch.randn(2, 3, 2, dtype=torch.float64)
    return Subject(ComplexLayer(pair.clone(), True), points(), plain=ComplexLayer(pair, False))


def complex_output() -> Subject:
    """An output of dtype complex128."""
    return Subject(module(Spectrum()), points())


def complex_output_chosen() -> Subject:
    """The same model with `output=torch.view_as_real`."""
    return Subject(module(Spectrum()), points(), output=torch.view_as_real)
