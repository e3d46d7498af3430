"""Low-rank adaptation: the network starts as it was, only the factors move, and to first order only B."""

from __future__ import annotations

import torch
from torch import nn

from lazyscope.model.base import Model
from lazyscope.model.lora import LowRank, low_rank
from lazyscope.model.vit import ViT


def net() -> ViT:
    torch.manual_seed(0)
    return ViT(channels=1, side=8, patch=4, width=8, depth=1, heads=2, outputs=3)


def test_the_network_starts_as_it_was() -> None:
    plain, x = net(), torch.randn(5, 1, 8, 8)
    adapted = low_rank(plain, 2, trained=("head",))
    assert torch.equal(adapted(x), plain(x))
    names = {name for name, w in adapted.named_parameters() if w.requires_grad}
    assert {name for name in names if not name.endswith((".a", ".b"))} == {"head.weight", "head.bias"}
    assert sum(isinstance(part, LowRank) for part in adapted.modules()) == 6
    assert all(w.requires_grad for w in plain.parameters())  # the network itself is not changed


def test_only_b_moves_the_outputs_to_first_order() -> None:
    model, x = Model(low_rank(net(), 2)), torch.randn(5, 1, 8, 8)
    start, columns = 0, model.jacobian(x)
    for name, w in model.params.items():
        part = columns[:, start : start + w.numel()]
        assert bool(part.any()) is name.endswith(".b"), name
        start += w.numel()


def test_the_factors_have_the_rank() -> None:
    layer = LowRank(nn.Linear(6, 5), 2, torch.Generator().manual_seed(0))
    nn.init.normal_(layer.b)
    change = layer(torch.eye(6)) - layer.layer(torch.eye(6))
    assert torch.linalg.matrix_rank(change) == 2
