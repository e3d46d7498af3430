"""Scattering features: agreement with kymatio, symmetries, and the error if kymatio is not installed."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from lazyscope.errors import InputError, MissingExtraError
from lazyscope.model.scattering import Scattering

FRONT_END = "kymatio.scattering2d.frontend.torch_frontend"


def test_without_kymatio_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FRONT_END, None)
    with pytest.raises(MissingExtraError, match=r"pip install .lazyscope\[scattering\]"):
        Scattering((8, 8))


def test_sides_must_be_multiples() -> None:
    with pytest.raises(InputError, match="multiples of 4"):
        Scattering((8, 10))


@pytest.fixture(scope="module")
def small() -> Scattering:
    pytest.importorskip(FRONT_END, reason="kymatio is not installed")
    return Scattering((16, 16))


def test_shape_and_parts(small: Scattering) -> None:
    x = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    whole = small(x)
    assert whole.shape == (5, 3, 1 + 2 * 8 + 8 * 8, 4, 4)
    torch.testing.assert_close(small(x, images=2), whole)
    torch.testing.assert_close(small(x[1:2, 2:3])[0, 0], whole[1, 2])  # channels and images are independent


def test_a_flat_image_has_its_mean_alone(small: Scattering) -> None:
    features = small(torch.full((1, 1, 16, 16), 0.7))[0, 0]
    torch.testing.assert_close(features[0], torch.full((4, 4), 0.7), rtol=1e-4, atol=0)
    assert float(features[1:].abs().max()) < 1e-4


def test_orders_above_0_do_not_see_the_mean_and_scale_with_contrast(small: Scattering) -> None:
    x = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    first, second = small(x), small(3 * x + 0.5)
    torch.testing.assert_close(second[:, :, 1:], 3 * first[:, :, 1:], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def angular() -> Scattering:
    pytest.importorskip(FRONT_END, reason="kymatio is not installed")
    return Scattering((16, 16), angular=True)


def test_wavelets_along_angles_are_those_of_their_definition(angular: Scattering) -> None:
    """All sums are written out: angles of a full turn, and convolutions along them."""
    x = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(3))
    module = pytest.importorskip("kymatio.scattering2d.filter_bank")
    bank = module.filter_bank(24, 24, 2, L=8)
    half = np.array([each["levels"][0] for each in bank["psi"]], dtype=complex).reshape(2, 8, 24, 24)
    opposite = np.roll(half[..., ::-1, ::-1], 1, (-2, -1)).conj()  # of the conjugate in space
    psi = np.concatenate([half, opposite], axis=1)
    padded = np.fft.fft2(np.pad(x[0, 0].double().numpy(), 4, mode="reflect"))
    first = np.fft.fft2(np.abs(np.fft.ifft2(padded * psi[0])))  # 16 angles
    frequency = 2 * np.pi * np.arange(16) / 16
    turns = 2 * np.pi * np.arange(-2, 3)[:, None]

    def bump(centre: float, width: float) -> np.ndarray:
        return np.asarray(np.exp(-((width * (frequency - centre + turns)) ** 2) / 2).sum(0))

    chis = []
    for centre, width in ((0.75 * math.pi, 0.8), (0.375 * math.pi, 1.6)):
        chis.append(bump(centre, width) - bump(centre, width)[0] / bump(0, width)[0] * bump(0, width))
    kept = (range(0, 16, 2), range(0, 16, 4), range(0, 8, 2))
    expected = []
    for shift in range(8):
        second = [np.fft.ifft2(first[theta] * psi[1, (theta + shift) % 16]) for theta in range(16)]
        for spectrum, angles in zip((*chis, bump(0, 1.6)), kept, strict=True):
            chi = np.fft.ifft(spectrum)
            for theta in angles:
                along = sum(chi[(theta - other) % 16] * second[other] for other in range(16))
                smooth = np.fft.ifft2(np.fft.fft2(np.abs(along)) * bank["phi"]["levels"][0]).real
                expected.append(smooth[4:20:4, 4:20:4])
    found = angular(x)[0, 0]
    assert found.shape == (81 + 128, 4, 4)
    np.testing.assert_allclose(found[81:], np.array(expected), atol=1e-5 * float(np.abs(expected).max()))


def test_wavelets_along_angles_turn_with_the_image() -> None:
    """A quarter of a turn moves coefficients by four of the sixteen angles."""
    pytest.importorskip(FRONT_END, reason="kymatio is not installed")
    u, v = torch.meshgrid(torch.arange(32) - 15.5, torch.arange(32) - 15.5, indexing="ij")
    waves = torch.cos(1.0 * u + 0.4 * v) * (1 + 0.5 * torch.cos(0.1 * u - 0.3 * v))
    x = (waves * torch.exp(-(u.square() + v.square()) / 100))[None, None]
    transform = Scattering((32, 32), angular=True)
    one, other = (
        transform(each)[0, 0, 81:].mean((-2, -1)).unflatten(0, (8, 16)) for each in (x, torch.rot90(x, 1, (2, 3)))
    )
    for kept, step in ((slice(0, 8), 2), (slice(8, 12), 1), (slice(12, 16), 2)):
        first, second = one[:, kept], other[:, kept]
        off = (first.roll(step, -1) - second).abs().max()
        assert off < 0.15 * first.max()
        assert off < 0.5 * (first - second).abs().max()


def test_wavelets_along_angles_need_large_images() -> None:
    pytest.importorskip(FRONT_END, reason="kymatio is not installed")
    with pytest.raises(InputError, match="sides above 4"):
        Scattering((4, 4), angular=True)


def test_transposition_swaps_angles(small: Scattering) -> None:
    """Sums over angles are transposed if the image is transposed."""
    x = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    first, second = (small(each)[:, 0] for each in (x, x.mT))
    for order in (slice(1, 9), slice(9, 17), slice(17, None)):
        torch.testing.assert_close(first[:, order].sum(1).mT, second[:, order].sum(1), rtol=1e-3, atol=1e-4)
