"""Limit kernels are those of independent parameters: copies and shared memory are refused, and constants are known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tangent.wide import normal
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.errors import ModelError, StoreError
from lazyscope.model.base import Model
from lazyscope.tangent import limit_kernel


def deep(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(3, 16), nn.ReLU(), make(), nn.ReLU(), make(), nn.ReLU(), nn.Linear(16, 1)
    return nn.Sequential(*layers).double()


def copies() -> nn.Sequential:
    """The idiom clones(module, N)."""
    one = nn.Linear(16, 16)
    return deep(lambda: copy.deepcopy(one))


@pytest.mark.parametrize("variances", ["default", "measured", {"2.weight": 0.1, "2.bias": 0.0}])
@pytest.mark.parametrize("form", [lambda net: net, Model])
def test_copies_are_refused(variances: object, form: Callable[[nn.Module], nn.Module | Model]) -> None:
    with pytest.raises(ModelError, match=r"'2\.weight' and '4\.weight' have equal entries.*reset_parameters\(\)"):
        limit_kernel(form(copies()), normal(2, 3), variances=variances)  # type: ignore[arg-type]


def test_copies_with_given_variances_or_new_draws_are_independent() -> None:
    x, names = normal(2, 3), [f"{i}.{each}" for i in (2, 4) for each in ("weight", "bias")]
    given = dict.fromkeys(names, 1 / 48)
    expected = limit_kernel(deep(lambda: nn.Linear(16, 16)), x)
    assert torch.equal(limit_kernel(copies(), x, variances=given), expected)
    assert bool(limit_kernel(copies(), x, variances=lambda *_: 0.1).all())
    net = copies()
    net[4].reset_parameters()  # type: ignore[operator]
    assert torch.equal(limit_kernel(net, x), expected)


def test_shared_memory_is_refused() -> None:
    net = deep(lambda: nn.Linear(16, 16))
    net[2].weight.data = net[4].weight.data
    for variances in ("default", lambda *_: 0.1):
        with pytest.raises(ModelError, match=r"'2\.weight' and '4\.weight' share their memory"):
            limit_kernel(net, normal(2, 3), variances=variances)


def test_equal_constants_are_independent() -> None:
    """Biases that start at 0 have equal entries, and small parameters may be equal by chance."""
    net = deep(lambda: nn.Linear(16, 16))
    for i in (2, 4):
        nn.init.zeros_(net[i].bias)  # type: ignore[arg-type]
    assert bool(limit_kernel(net, normal(2, 3)).all())
    small = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    small[4].weight.data.copy_(small[2].weight.data)  # type: ignore[operator, arg-type]
    assert bool(limit_kernel(small, normal(2, 3), variances="measured").all())


def test_networks_without_axes_in_their_output() -> None:
    """On one sample, the output of a squeezed readout has no axes."""

    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = deep(lambda: nn.Linear(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x).squeeze()
            return out

    net, x = Squeezed(), normal(4, 3)
    for n in (1, 4):
        assert torch.equal(limit_kernel(net, x[:n]), limit_kernel(net.inner, x[:n]))


class Table(nn.Module):
    """A network that reads its inputs from a table."""

    def __init__(self, table: Tensor, gain: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 16).double(), nn.Linear(16, 1).double()
        self.register_buffer("table", table)
        self.gain = nn.Parameter(torch.full((16,), gain, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(self.table[x[:, 0]]).relu() * self.gain)  # type: ignore[index]
        return out


def test_stored_kernels_of_other_constants_are_not_continued(tmp_path: Path) -> None:
    """The first three points, whose kernel is compared too, do not show that another row of the table has changed."""
    x, table = torch.arange(7)[:, None], normal(7, 3)
    other = table.clone()
    other[5] += 1
    ls.limit_kernel_to_zarr(Table(table), x, tmp_path / "K", tile=3)
    tiles = ls.limit_kernel_to_zarr(Table(table.clone()), x, tmp_path / "K", tile=3)
    np.testing.assert_allclose(tiles[...][..., 0, 0], limit_kernel(Table(table), x).numpy(), rtol=1e-13)
    for net in (Table(other), Table(table, 2.0001)):
        with pytest.raises(StoreError, match="a kernel of other network"):
            ls.limit_kernel_to_zarr(net, x, tmp_path / "K", tile=3)
