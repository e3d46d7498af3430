"""Targets in various forms, and ignored positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.labels import as_target
from lazyscope.loss import CrossEntropy, Logistic, Loss, Square

IGNORED = -100


def outputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sequences() -> tuple[Tensor, Tensor]:
    """Three padded sequences of four positions. All positions of the last one are ignored."""
    y = outputs(3, 4, 5)
    target = torch.tensor([[1, 0, 4, 2], [3, 3, IGNORED, IGNORED], [IGNORED] * 4])
    return y, target


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (Square(), [[0.5, 1.0], [2.0, -1.0], [0.0, 3.0]]),
        (Logistic(), [[1, -1], [-1, -1], [1, 1]]),
        (CrossEntropy(), [0, 1, 1]),
        (CrossEntropy(), [[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]]),
    ],
    ids=repr,
)
def test_arrays_and_lists_are_as_tensors(loss: Loss, target: list[Any]) -> None:
    y, tensor = outputs(3, 2), torch.tensor(target)
    expected = loss(y, tensor if not tensor.is_floating_point() else tensor.double())
    array = np.array(target)
    array.flags.writeable = False  # like arrays from files
    for given in (target, array, list(tensor), array.astype(np.float32) if array.dtype.kind == "f" else array):
        assert float(loss(y, given)) == float(expected)
    assert loss(y.float(), array).dtype == torch.float32
    risk = loss.risk(y, tensor)
    assert float(risk.renewed(array)(y)) == float(expected)


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64, np.uint32, bool])
def test_all_integers_are_classes(kind: type) -> None:
    found = as_target(np.array([0, 1]).astype(kind), torch.zeros(2, 2))
    assert found.dtype == torch.int64
    assert found.tolist() == [0, 1]


def test_tokens_do_not_turn_reals_into_integers() -> None:
    assert as_target([0.5], torch.tensor([3])).dtype == torch.get_default_dtype()


@pytest.mark.parametrize("nonsense", [None, "abc", [[1.0], [1.0, 2.0]], ["a", "b"], [1j, 2j], [None, 1.0], {"a": 1}])
def test_what_is_not_numbers_is_refused(nonsense: Any) -> None:
    with pytest.raises(InputError, match=r"the same shape|not numbers"):
        as_target(nonsense, torch.zeros(2, 2))


def test_positions_are_summed_over() -> None:
    y, _ = sequences()
    target = torch.tensor([[1, 0, 4, 2], [3, 3, 0, 1], [2, 2, 2, 2]])
    torch.testing.assert_close(CrossEntropy()(y, target), 4 * F.cross_entropy(y.flatten(0, 1), target.flatten()))


def test_ignored_samples_are_those_of_torch() -> None:
    y, target = outputs(7, 5), torch.tensor([1, IGNORED, 0, 4, IGNORED, 2, 3])
    loss = CrossEntropy(ignore_index=IGNORED)
    torch.testing.assert_close(loss(y, target), F.cross_entropy(y, target, ignore_index=IGNORED), rtol=1e-14, atol=0)
    inside = target.where(target != IGNORED, 3)  # any class may be ignored
    torch.testing.assert_close(CrossEntropy(ignore_index=3)(y, inside), F.cross_entropy(y, inside, ignore_index=3))


def test_ignored_positions_add_nothing() -> None:
    y, target = sequences()
    loss = CrossEntropy(ignore_index=IGNORED)
    kept = target != IGNORED
    mean = F.cross_entropy(y.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(loss(y, target), mean * int(kept.sum()) / 2)  # two sequences remain
    gradient = loss.gradient(y, target)
    assert not bool(gradient[~kept].any())
    leaf = y.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(leaf.flatten(0, 1), target.flatten(), reduction="sum"), leaf)
    torch.testing.assert_close(gradient / 3, slope / 2)
    risk = loss.risk(y, target)
    hessian = torch.func.hessian(lambda out: risk(out))(y)
    assert not bool(hessian[~kept].any())
    expected = torch.func.hessian(lambda out: F.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="sum"))(y)
    torch.testing.assert_close(hessian, expected / 2)
    counted = risk.counted
    assert counted is not None
    assert torch.equal(counted, kept[..., None].expand_as(y))


def test_members_with_targets_of_their_own_ignore_their_own() -> None:
    y = outputs(2, 4, 3)
    target = torch.tensor([[0, 1, 2, 0], [1, IGNORED, IGNORED, 2]])
    found = CrossEntropy(ignore_index=IGNORED)(y, target, batch=1)
    expected = torch.stack([F.cross_entropy(a, b) for a, b in zip(y, target, strict=True)])
    torch.testing.assert_close(found, expected)


def test_where_nothing_is_ignored_nothing_changes() -> None:
    y, target = outputs(6, 5), torch.tensor([1, 0, 3, 4, 2, 2])
    loss = CrossEntropy(ignore_index=IGNORED)
    assert float(loss(y, target)) == float(CrossEntropy()(y, target))
    assert loss.risk(y, target).counted is None
    assert CrossEntropy().risk(y, target).counted is None


def test_a_minibatch_of_ignored_samples_has_loss_zero() -> None:
    y, target = outputs(2, 5), torch.tensor([1, 2])
    risk = CrossEntropy(ignore_index=IGNORED).risk(y, target).renewed(torch.tensor([IGNORED, IGNORED]))
    assert float(risk(y)) == 0


@pytest.mark.parametrize(
    ("loss", "target", "says"),
    [
        (CrossEntropy(), [1, IGNORED, 0], r"one is -100; .*CrossEntropy\(ignore_index=-100\)"),
        (CrossEntropy(ignore_index=IGNORED), [IGNORED] * 3, "All targets are -100"),
        (
            CrossEntropy(ignore_index=IGNORED),
            [0, 2, IGNORED],
            r"one is 2; .* give the model more outputs\.",
        ),
        (CrossEntropy(), [[0, 1], [1, 0], [0, 1]], r"target\.float\(\) for probabilities"),
    ],
)
def test_misuse_names_the_remedy(loss: Loss, target: list[Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        loss(outputs(3, 2), target)
