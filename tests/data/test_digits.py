"""The digits are scikit-learn's, normalised."""

from __future__ import annotations

import pytest
import torch

from lazyscope.data.digits import digits, normalise
from lazyscope.errors import DataError


def test_all_of_them_in_order() -> None:
    x, y = digits()
    assert x.shape == (1797, 1, 8, 8)
    assert x.dtype == torch.float32
    assert float(x.mean()) == pytest.approx(0, abs=1e-3)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)
    assert y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_a_seed_shuffles_images_and_classes_together() -> None:
    x, y = digits()
    some, classes = digits(n=50, seed=3)
    assert some.shape == (50, 1, 8, 8)
    at = [int((x == image).flatten(1).all(1).nonzero()[0, 0]) for image in some]
    assert y[at].tolist() == classes.tolist()
    assert at != sorted(at)
    assert torch.equal(digits(n=50, seed=3)[0], some)
    assert not torch.equal(digits(n=50, seed=4)[0], some)
    assert torch.equal(digits(n=50)[0], x[:50])


def test_black_and_white_bound_the_pixels() -> None:
    x, _ = digits()
    ends = normalise(torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1)).flatten()
    assert (float(x.min()), float(x.max())) == pytest.approx(tuple(ends.tolist()))


@pytest.mark.parametrize("n", [0, 1798])
def test_more_than_there_are_is_refused(n: int) -> None:
    with pytest.raises(DataError, match="pass n from 1 to 1797"):
        digits(n=n)
