"""Random patches: convolutions against explicit patches, whitening, and invariances of the features."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.model.patches import Patches


def images(n: int = 60, side: int = 14, channels: int = 3, seed: int = 0) -> Tensor:
    """Draw smooth noise, whose neighbouring pixels are correlated, so that whitening has an effect."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, channels, side + 2, side + 2, generator=random, dtype=torch.float64)
    return 0.5 + 0.2 * F.avg_pool2d(noise, 3, stride=1)


def explicit(patches: Patches, x: Tensor) -> Tensor:
    """Compute z of every patch, of shape (n, filters, places), from explicit centred and normalised patches."""
    size = patches.kernels.shape[-1]
    rows = F.unfold(x, size).mT  # (n, places, d)
    rows = rows - rows.mean(-1, keepdim=True)
    rows = rows / (rows.square().mean(-1, keepdim=True) + patches.contrast).sqrt()
    return (rows @ patches.kernels.flatten(1).T - patches.offsets).mT


def test_features_are_those_of_explicit_patches() -> None:
    x = images()
    patches = Patches.draw(x, 5, size=6, bias=0.7)
    z = explicit(patches, x).unflatten(-1, (9, 9))
    windows = (slice(0, 5), slice(2, 7), slice(4, 9))  # of nine positions
    expected = [
        torch.stack([F.relu(side)[:, :, i, j].mean((2, 3)) for i in windows for j in windows], dim=-1).flatten(1)
        for side in (z - 0.7, -z - 0.7)
    ]
    torch.testing.assert_close(patches(x), torch.cat(expected, dim=1))


def test_patches_are_whitened() -> None:
    """For every filter, ⟨f, q⟩ has mean 0 and variance ‖f‖² = 1 over the patches that the filters are drawn from."""
    x = images(n=200)
    z = explicit(Patches.draw(x, 40, size=4, whitening=1e-2), x).transpose(0, 1).flatten(1)
    assert float(z.mean(1).abs().max()) < 0.1
    assert float((z.square().mean(1) - 1).abs().max()) < 0.15
    other = explicit(Patches.draw(x, 40, size=4, seed=1), x).transpose(0, 1).flatten(1)
    assert not torch.allclose(z, other)


def test_blocks_of_filters_and_images_change_nothing() -> None:
    x = images()
    patches = Patches.draw(x, 10)
    whole = patches(x)
    assert whole.shape == (60, 180)
    blocks = list(patches.blocks(x, filters=4, images=7))
    assert [block.shape[1] for block in blocks] == [72, 72, 36]
    torch.testing.assert_close(sum(block @ block.T for block in blocks), whole @ whole.T)


@pytest.mark.parametrize(("scale", "shift"), [(4.0, -2.0), (0.01, 0.3)])
def test_units_of_the_images_do_not_matter(scale: float, shift: float) -> None:
    x = images()
    moved = scale * x + shift
    torch.testing.assert_close(Patches.draw(moved, 8)(moved), Patches.draw(x, 8)(x), rtol=1e-6, atol=1e-8)


def test_float32_and_flat_images() -> None:
    x = images()
    patches = Patches.draw(x, 8)
    single = Patches(patches.kernels.float(), patches.offsets.float(), patches.contrast, patches.bias)
    torch.testing.assert_close(single(x.float()).double(), patches(x), rtol=1e-3, atol=1e-4)
    assert bool(single(torch.full((2, 3, 14, 14), 0.7)).isfinite().all())  # images without any contrast


def test_images_smaller_than_a_patch_are_refused() -> None:
    with pytest.raises(InputError, match="smaller"):
        Patches.draw(images(side=5), 8)


def test_contrast_and_whitening_can_be_left_in() -> None:
    """The features of an image with ten times the contrast are nearly the same if contrast is divided out.

    Otherwise they are ten times as large.
    """
    x = images()
    x = x - x.mean((1, 2, 3), keepdim=True)
    out, left = (Patches.draw(x, 8, bias=0, contrast=c, whitening=1e6) for c in (1e-4, 1e6))
    for patches, factor in ((out, 1.0), (left, 10.0)):
        z, strong = (explicit(patches, scaled) + patches.offsets[:, None] for scaled in (x, 10 * x))
        torch.testing.assert_close(strong, factor * z, rtol=0.02, atol=0.02 * float(z.abs().max()))
    # Without whitening, a filter is a patch minus its mean and the mean patch, of unit length up to one factor.
    lengths = left.kernels.flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths, lengths[:1].expand(8), rtol=0.05, atol=0)
    whitened = Patches.draw(x, 8, bias=0, contrast=1e6).kernels.flatten(1).norm(dim=1)
    assert float(whitened.max() / whitened.min()) > 1.1
