"""Targets of flows in various forms, ignored positions, and progress reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.flow.test_doors import FLOWS
from torch import Tensor, nn

import lazyscope as ls
from lazyscope import progress
from lazyscope.errors import InputError
from lazyscope.flow import gradient_descent, tangent_flow
from lazyscope.flow.margin import linear_margin_flow
from lazyscope.loss import CrossEntropy, Square

NAMES = ["descent", "flow", "tangent", "stochastic"]


def tagger() -> tuple[nn.Module, Tensor, Tensor]:
    """Three padded sequences of four positions with five classes. All positions of the last one are ignored."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    target = torch.tensor([[1, 0, 4, 2], [3, 3, -100, -100], [-100] * 4])
    return net, torch.randn(3, 4, 3, dtype=torch.float64), target


@pytest.mark.parametrize("flow", FLOWS, ids=NAMES)
def test_targets_may_be_arrays_and_lists(linear: Any, flow: Callable[..., Any]) -> None:
    expected = flow(linear.model, Square(), linear.x, linear.y).loss
    for y in (linear.y.numpy(), linear.y.tolist()):
        torch.testing.assert_close(flow(linear.model, Square(), linear.x, y).loss, expected, rtol=0, atol=0)


@pytest.mark.parametrize("flow", FLOWS, ids=NAMES)
def test_sequences_of_classes_with_padding(flow: Callable[..., Any]) -> None:
    net, x, target = tagger()
    loss = CrossEntropy(ignore_index=-100)
    found = flow(net, loss, x, target.numpy())
    with torch.no_grad():
        start = F.cross_entropy(net(x).flatten(0, 1), target.flatten(), reduction="sum") / 2
    torch.testing.assert_close(found.loss[0] if len(found) > 1 else start, start)
    assert float(found.loss[-1]) < float(start)
    assert len({tuple(out.shape) for out in found.outputs}) == 1


def test_descent_is_that_of_torch() -> None:
    net, x, target = tagger()
    found = gradient_descent(net, CrossEntropy(ignore_index=-100), x, target, lr=0.2, steps=10, record=[0, 10])
    optimiser = torch.optim.SGD(net.parameters(), lr=0.2)
    for _ in range(10):
        optimiser.zero_grad()
        (F.cross_entropy(net(x).flatten(0, 1), target.flatten(), reduction="sum") / 2).backward()
        optimiser.step()
    torch.testing.assert_close(found.outputs[-1], net(x).detach(), rtol=1e-10, atol=1e-12)


def test_signs_may_be_a_list() -> None:
    x = torch.tensor([[1.0, 0.5], [-0.3, -1.0], [0.2, 0.9]], dtype=torch.float64)
    times = torch.tensor([1.0, 10.0])
    expected = linear_margin_flow(x, torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64), times=times)
    torch.testing.assert_close(linear_margin_flow(x, [1, -1, 1], times=times).w, expected.w)


def test_a_kernel_that_does_not_fit_is_refused_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyscope.memory.free_memory", lambda device: 10**9)
    net = nn.Linear(1, 1).double()
    x = torch.zeros(10_000, 1, dtype=torch.float64)
    with pytest.raises(InputError, match=r"takes 0.8 GB and computing it 4.8 GB, .*gradient_descent"):
        tangent_flow(net, Square(), x, x, times=[1.0])


def test_who_is_told_of_the_progress_sees_no_line(linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hushed: list[int] = []
    gradient_descent(
        linear.model, Square(), linear.x, linear.y, lr=0.1, steps=3, progress=lambda _: hushed.append(progress._hushed)
    )
    assert min(hushed) == 2  # inside `quiet` and inside the bar of the descent
    assert progress._hushed == 0


@pytest.mark.parametrize("matrix_free", [False, True])
def test_the_square_loss_takes_the_labels_of_tangent_solve(matrix_free: bool) -> None:
    torch.manual_seed(0)
    x, classes = torch.randn(6, 3).double(), torch.tensor([0, 1, 2, 2, 1, 0])

    def end(net: torch.nn.Module, y: Any, data: Any = x) -> torch.Tensor:
        found = tangent_flow(net, Square(), data, y, times=[1.0], matrix_free=matrix_free, rtol=1e-10)
        return found.outputs[-1]

    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    rows = torch.nn.functional.one_hot(classes, 3)
    for labels in (classes, classes.int(), classes.tolist(), classes.numpy()):
        torch.testing.assert_close(end(net, labels), end(net, rows.double()))
    with pytest.raises(InputError, match=r"0 … 2, but one is -1; relabel them, or leave out"):
        end(net, classes - 1)
    with pytest.raises(InputError, match="real"):
        end(net, rows * 1j)
    with pytest.raises(InputError, match="at least one"):
        end(net, rows[:0], x[:0])
    one = torch.nn.Linear(3, 1).double()
    for y in (classes, classes.double()):
        torch.testing.assert_close(end(one, y), end(one, y.double()[:, None]))
    flat = torch.nn.Sequential(one, torch.nn.Flatten(0)).double()
    torch.testing.assert_close(end(flat, classes[:, None]), end(flat, classes.double()))
    if not matrix_free:
        pair = ls.Ensemble([ls.Model(net), ls.Model(net)])
        torch.testing.assert_close(end(pair, classes), end(pair, rows.double()))  # type: ignore[arg-type]


def test_no_points_are_refused_with_a_remedy_that_exists() -> None:
    with pytest.raises(InputError, match="pass at least one"):
        ls.tangent_sgd(torch.nn.Linear(3, 1), torch.zeros(0, 3), torch.zeros(0, 1))
