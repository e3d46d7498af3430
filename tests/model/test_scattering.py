"""Scattering features: agreement with their definition, symmetries, and the error if kymatio is not installed."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from lazyscope.errors import InputError, MissingExtraError
from lazyscope.model.scattering import Scattering

FILTERS = "kymatio.scattering2d.filter_bank"


def test_without_kymatio_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FILTERS, None)
    with pytest.raises(MissingExtraError, match=r"pip install .lazyscope\[scattering\]"):
        Scattering((8, 8))


def test_sides_must_be_multiples() -> None:
    with pytest.raises(InputError, match="multiples of 4"):
        Scattering((8, 10))
    with pytest.raises(InputError, match="at least 1"):
        Scattering((8, 8), 0)


@pytest.fixture(scope="module")
def small() -> Scattering:
    pytest.importorskip(FILTERS, reason="kymatio is not installed")
    return Scattering((16, 16))


def test_shape_and_parts(small: Scattering) -> None:
    x = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    whole = small(x)
    assert small.paths == 1 + 4 * 8 + 8 * 28
    assert whole.shape == (5, 3, small.paths, 4, 4)
    torch.testing.assert_close(small(x, images=2), whole)
    torch.testing.assert_close(small(x[1:2, 2:3])[0, 0], whole[1, 2])  # channels and images are independent


def test_sides_may_differ() -> None:
    pytest.importorskip(FILTERS, reason="kymatio is not installed")
    x = torch.rand(1, 1, 8, 24, generator=torch.Generator().manual_seed(4))
    wide, high = Scattering((8, 24), 1)(x)[0, 0], Scattering((24, 8), 1)(x.mT)[0, 0]
    assert wide.shape == (1 + 2 * 8, 4, 12)
    turned = high[1:].mT.unflatten(0, (2, 8)).flip(1).roll(5, 1).flatten(0, 1)  # θ becomes π/2 - θ
    torch.testing.assert_close(wide[1:], turned, rtol=1e-4, atol=1e-6)


def test_a_flat_image_has_its_mean_alone(small: Scattering) -> None:
    features = small(torch.full((1, 1, 16, 16), 0.7))[0, 0]
    torch.testing.assert_close(features[0], torch.full((4, 4), 0.7), rtol=1e-4, atol=0)
    assert float(features[1:].abs().max()) < 1e-4


def test_orders_above_0_do_not_see_the_mean_and_scale_with_contrast(small: Scattering) -> None:
    x = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    first, second = small(x), small(3 * x + 0.5)
    torch.testing.assert_close(second[:, :, 1:], 3 * first[:, :, 1:], rtol=1e-3, atol=1e-4)


def halved(spectrum: np.ndarray) -> np.ndarray:
    """The frequencies -n/4 … n/4 - 1 of each axis, where -n/4 is the mean of both signs."""
    for axis in (-2, -1):
        n = spectrum.shape[axis]
        rows = [spectrum.take(k % n, axis) for k in range(-n // 4, n // 4)]
        rows[0] = (spectrum.take(-n // 4, axis) + spectrum.take(n // 4, axis)) / 2
        spectrum = np.roll(np.stack(rows, axis), n // 4, axis)
    return spectrum


def test_coefficients_are_those_of_their_definition(small: Scattering) -> None:
    """All sums along angles are written out, and images are filtered before they are subsampled."""
    module = pytest.importorskip(FILTERS)
    x = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(3))
    angles = np.pi * np.arange(8) / 8

    def wavelets(scale: float, frequency: float) -> np.ndarray:
        found = [module.morlet_2d(24, 24, 0.8 * scale, a, frequency / scale, 0.5) for a in angles]
        return np.fft.fft2(np.array(found)).real

    def spectrum(image: np.ndarray, margin: int) -> np.ndarray:
        return np.asarray(np.fft.fft2(np.pad(image, margin, mode="symmetric")))

    phi = np.fft.fft2(module.gabor_2d(24, 24, 1.6, 0, 0)).real

    def low(image: np.ndarray) -> np.ndarray:
        margin = len(image) // 4
        filtered = np.fft.ifft2(spectrum(image, margin) * (phi if margin == 4 else halved(phi))).real
        return np.asarray(filtered[margin:-margin:margin, margin:-margin:margin])

    omega = 2 * np.pi * np.arange(8) / 8
    turns = 2 * np.pi * np.arange(-2, 3)[:, None]

    def bump(centre: float, width: float) -> np.ndarray:
        return np.asarray(np.exp(-((width * (omega - centre + turns)) ** 2) / 2).sum(0))

    width, chis = 2 / math.sqrt(3), list[tuple[np.ndarray, int]]()
    for centre, wide, step in ((0.75 * math.pi, width, 1), (0.375 * math.pi, 2 * width, 2)):
        chi = np.fft.ifft(bump(centre, wide) - bump(centre, wide)[0] / bump(0, wide)[0] * bump(0, wide))
        chis += [(chi, step), (chi.conj(), step)]
    chis.append((np.fft.ifft(bump(0, width)), 2))

    start = spectrum(x[0, 0].double().numpy(), 4)
    expected, finest = [low(x[0, 0].double().numpy())], list[np.ndarray]()
    for scale in 2.0 ** (np.arange(4) / 2):
        psi, step = wavelets(scale, (2**-0.5 + 1) / 2 * math.pi), 1 if scale < 2 else 2
        first = [np.abs(np.fft.ifft2(start * each))[4:-4:step, 4:-4:step] for each in psi]
        expected += [low(each) for each in first]
        finest = finest or first
    for psi in wavelets(2, 0.75 * math.pi):
        maps = [np.fft.ifft2(spectrum(each, 4) * psi)[4:-4:2, 4:-4:2] for each in finest]
        for chi, keep in chis:
            for at in range(0, 8, keep):
                expected.append(low(np.abs(sum(chi[(at - other) % 8] * maps[other] for other in range(8)))))
    found = small(x)[0, 0]
    np.testing.assert_allclose(found, np.array(expected), atol=2e-5 * float(np.abs(expected).max()))


def test_coefficients_turn_with_the_image() -> None:
    """A quarter of a turn moves the angles of both wavelets by four of eight."""
    pytest.importorskip(FILTERS, reason="kymatio is not installed")
    u, v = torch.meshgrid(torch.arange(32) - 15.5, torch.arange(32) - 15.5, indexing="ij")
    waves = torch.cos(1.0 * u + 0.4 * v) * (1 + 0.5 * torch.cos(0.1 * u - 0.3 * v))
    x = (waves * torch.exp(-(u.square() + v.square()) / 100))[None, None]
    transform = Scattering((32, 32))
    one, other = (transform(each)[0, 0].mean((-2, -1)) for each in (x, torch.rot90(x, 1, (2, 3))))
    pairs = [(a.unflatten(0, (4, 8)), b.unflatten(0, (4, 8)).roll(4, 1)) for a, b in ((one[1:33], other[1:33]),)]
    both = one[33:].unflatten(0, (8, 28))[:4], other[33:].unflatten(0, (8, 28))[4:]
    for kept, step in ((slice(0, 8), 1), (slice(8, 16), 1), (slice(16, 20), 2), (slice(20, 24), 2), (slice(24, 28), 2)):
        pairs.append((both[0][:, kept], both[1][:, kept].roll(4 // step, 1)))
    for first, second in pairs:
        assert (first - second).abs().max() < 0.05 * first.max()
        assert (first - second.roll(1, -1)).abs().max() > 0.1 * first.max()


def test_transposition_swaps_angles(small: Scattering) -> None:
    """Sums over angles are transposed if the image is transposed."""
    x = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    first, second = (small(each)[:, 0] for each in (x, x.mT))
    for order in (*(slice(k, k + 8) for k in range(1, 33, 8)), slice(33, None)):
        torch.testing.assert_close(first[:, order].sum(1).mT, second[:, order].sum(1), rtol=1e-3, atol=1e-4)
