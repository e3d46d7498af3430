"""Scattering features: agreement with kymatio, symmetries, and the error if kymatio is not installed."""

from __future__ import annotations

import sys

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


def test_transposition_swaps_angles(small: Scattering) -> None:
    """Sums over angles are transposed if the image is transposed."""
    x = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    first, second = (small(each)[:, 0] for each in (x, x.mT))
    for order in (slice(1, 9), slice(9, 17), slice(17, None)):
        torch.testing.assert_close(first[:, order].sum(1).mT, second[:, order].sum(1), rtol=1e-3, atol=1e-4)
