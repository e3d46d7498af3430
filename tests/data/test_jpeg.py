"""Images that are coded as JPEG once more."""

from __future__ import annotations

import pytest
import torch

from lazyscope.data import digits
from lazyscope.data.images import Images
from lazyscope.data.jpeg import coded_again


@pytest.mark.parametrize("channels", [1, 3])
def test_a_second_code_changes_pixels_a_little_and_nothing_else(channels: int) -> None:
    found = digits.images(seed=0)[:20]
    images = Images(found.pixels.expand(-1, channels, -1, -1), found.labels, (0.5,) * channels, (1.0,) * channels, 16)
    good, poor = (coded_again(images, quality=quality) for quality in (95, 10))
    assert good.pixels.shape == images.pixels.shape
    assert good.pixels.dtype == torch.uint8
    assert torch.equal(good.labels, images.labels)
    assert (good.mean, good.std, good.white) == (images.mean, images.std, images.white)
    errors = [(each.pixels.double() - images.pixels.double()).abs().mean().item() for each in (good, poor)]
    assert errors[0] < 0.1 < 0.3 < errors[1] < 6, "of 16 levels of grey"
    assert int(poor.pixels.max()) <= images.white
