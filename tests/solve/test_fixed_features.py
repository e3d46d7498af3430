"""Fixed features classify the digits, for any order and units of the images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lazyscope.data.digits import digits
from lazyscope.errors import InputError
from lazyscope.solve.fixed_features import (
    _colours,
    _scales,
    misclassified,
    random_feature_accuracy,
    scattering_accuracy,
)

KYMATIO = "kymatio.scattering2d.filter_bank"
Split = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def split() -> Split:
    """400 training digits, sorted by class, and 200 test digits, in grey with three equal colour channels."""
    x, y = digits(n=600, seed=0)
    x = x.expand(-1, 3, -1, -1)
    order = y[:400].argsort(stable=True)
    return x[:400][order], y[:400][order], x[400:], y[400:]


def test_random_features(split: Split) -> None:
    found = random_feature_accuracy(*split, filters=64)
    assert found.test > 0.93
    assert found.train > 0.99
    assert float(found) == found.test
    assert found.seconds > 0
    assert found.memory == 0  # the memory of a GPU
    again = random_feature_accuracy(*split, filters=64)
    assert (again.train, again.test, again.ridge) == (found.train, found.test, found.ridge)


def test_more_filters_are_better(split: Split) -> None:
    few, many = (random_feature_accuracy(*split, filters=filters).test for filters in (4, 64))
    assert few < many - 0.02


def test_units_of_the_images_do_not_matter(split: Split) -> None:
    x, y, x_test, y_test = split
    found = random_feature_accuracy(x, y, x_test, y_test, filters=32)
    moved = random_feature_accuracy(0.1 * x + 3, y, 0.1 * x_test + 3, y_test, filters=32)
    assert abs(found.test - moved.test) <= 0.01


def test_random_labels_are_not_learned(split: Split) -> None:
    x, y, x_test, y_test = split
    shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    assert random_feature_accuracy(x, shuffled, x_test, y_test, filters=32).test < 0.25


def test_scattering(split: Split) -> None:
    pytest.importorskip(KYMATIO, reason="kymatio is not installed")
    found = scattering_accuracy(*split)
    assert found.test > 0.93
    assert found.train > 0.99


@pytest.mark.slow
def test_scattering_of_grey_images_is_that_of_three_equal_colours(split: Split) -> None:
    pytest.importorskip(KYMATIO, reason="kymatio is not installed")
    x, y, x_test, y_test = split
    grey = scattering_accuracy(x[:, :1], y, x_test[:, :1], y_test)
    assert abs(grey.test - scattering_accuracy(*split).test) <= 0.02


def test_scattering_leaves_a_grid_of_four_by_four_positions_if_it_can() -> None:
    for sides, scales in (((64, 64), 4), ((128, 128), 4), ((56, 56), 3), ((16, 16), 2), ((24, 20), 2), ((6, 6), 1)):
        assert _scales(*sides) == scales


def test_colours_that_are_only_rounding_are_left_out() -> None:
    x = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    assert _colours(x).shape == x.shape
    assert _colours(x[:, :1].expand(-1, 3, -1, -1)).shape == (4, 1, 6, 6)
    torch.testing.assert_close(_colours(x[:, :1].expand(-1, 3, -1, -1)), x[:, :1])


def test_misclassified() -> None:
    outputs = torch.tensor([[0.1, 0.9], [0.2, 0.1], [0.0, 1.0]])
    targets = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert float(misclassified(outputs, targets)) == pytest.approx(1 / 3)


def test_bad_input_is_refused(split: Split) -> None:
    x, y, x_test, y_test = split
    for measure in (random_feature_accuracy, scattering_accuracy):
        with pytest.raises(InputError, match="at least one image"):
            measure(x, y, x_test[:0], y_test[:0])
        with pytest.raises(InputError, match="NaN"):
            measure(x / 0, y, x_test, y_test)
