"""Operations that make discrete choices. If a choice changes with the weights, the output has a jump or a kink."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.conformance.ordinary import module, points
from tests.conformance.subject import Subject
from torch import Tensor, nn

REACH = 1.0
"""The size of the move of the weights, large enough for choices to change between w₀ and w."""


class Chooser(nn.Module):
    """A hidden layer of four units, a table with a row for each of them, and a rule that selects rows."""

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.table = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 2))
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self.mix(x), self.table)


def _chooser(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Subject]:
    def make() -> Subject:
        return Subject(module(Chooser(rule)), points(), reach=REACH)

    make.__doc__ = rule.__doc__
    return make


def _topk(h: Tensor, table: Tensor) -> Tensor:
    values, chosen = h.topk(2, -1)
    return (values.softmax(-1).unsqueeze(-1) * table[chosen]).sum(1)


def _argmax(h: Tensor, table: Tensor) -> Tensor:
    return table[h.argmax(-1)] * h.sum(-1, keepdim=True)


def _argmin(h: Tensor, table: Tensor) -> Tensor:
    return h.gather(1, h.argmin(-1, keepdim=True)) + table[h.argmin(-1)]


def _sort(h: Tensor, table: Tensor) -> Tensor:
    return torch.tanh(h.sort(-1).values) @ table


def _argsort(h: Tensor, table: Tensor) -> Tensor:
    return (h.unsqueeze(-1) * table[h.argsort(-1)]).sum(1)


def _boolean(h: Tensor, table: Tensor) -> Tensor:
    rows = [(table[row > 0] * row[row > 0].unsqueeze(-1)).sum(0) for row in h]
    return torch.stack(rows)


def _nonzero(h: Tensor, table: Tensor) -> Tensor:
    sample, unit = (h > 0).nonzero(as_tuple=True)
    return torch.zeros(len(h), 2, dtype=h.dtype).index_add(0, sample, h[sample, unit].unsqueeze(-1) * table[unit])


def _unique(h: Tensor, table: Tensor) -> Tensor:
    both = torch.cat([h.sign().flatten(), torch.tensor([-1.0, 1.0], dtype=h.dtype)])
    _, which = torch.unique(both, return_inverse=True)
    return (h.unsqueeze(-1) * table[which[:-2].view_as(h)]).sum(1)


def _one_hot(h: Tensor, table: Tensor) -> Tensor:
    return (F.one_hot(h.argmax(-1), 4).to(h.dtype) * h) @ table


def _where(h: Tensor, table: Tensor) -> Tensor:
    return torch.where(h > 0.1, h.square(), -h).masked_fill(h < -0.5, 0.3) @ table


def _sign(h: Tensor, table: Tensor) -> Tensor:
    return (h * h.sign() + h.round() * h) @ table


def _maximum(h: Tensor, table: Tensor) -> Tensor:
    return h.max(-1, keepdim=True).values * table.sum(0) + torch.maximum(h[:, :2], h[:, 2:]) * h.amin(-1, keepdim=True)


def _kthvalue(h: Tensor, table: Tensor) -> Tensor:
    return h.kthvalue(2, -1, keepdim=True).values * table[0] + h.median(-1, keepdim=True).values * table[1]


def _bucketize(h: Tensor, table: Tensor) -> Tensor:
    bins = torch.tensor([-0.4, 0.0, 0.4], dtype=h.dtype)
    return (h.unsqueeze(-1) * table[torch.bucketize(h.detach(), bins)]).sum(1)


def _live(h: Tensor, table: Tensor) -> Tensor:
    """The sign of values that are exactly zero at w but were not at w₀."""
    h = h.relu()
    return (h @ table) * (h > 0).sum(-1, keepdim=True) + (torch.remainder(h, 0.3) + (h + 0.1).frac() * h.sign()) @ table


topk, argmax, argmin, sort, argsort = map(_chooser, (_topk, _argmax, _argmin, _sort, _argsort))
boolean, nonzero, unique, one_hot = map(_chooser, (_boolean, _nonzero, _unique, _one_hot))
where, sign, maximum, kthvalue, bucketize = map(_chooser, (_where, _sign, _maximum, _kthvalue, _bucketize))
live = _chooser(_live)


class Experts(nn.Module):
    """Three experts, of which the best two are mixed for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 3, 4)), nn.Parameter(torch.randn(3, 4, 2))


class DenseExperts(Experts):
    """All experts are computed, and the chosen ones are gathered."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        hidden = torch.tanh(torch.einsum("nd,edh->neh", x, self.up))
        out = torch.einsum("neh,eho->neo", hidden, self.down)
        picked = out.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 2))
        mixed: Tensor = (weights.unsqueeze(-1) * picked).sum(1)
        return mixed


class DispatchedExperts(Experts):
    """Each expert is computed only on the samples that chose it."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros(len(x), 2, dtype=x.dtype)
        for expert in range(3):
            sample, slot = torch.where(chosen == expert)
            if sample.numel() == 0:
                continue
            hidden = torch.tanh(x[sample] @ self.up[expert]) @ self.down[expert]
            out.index_add_(0, sample, weights[sample, slot, None] * hidden)
        return out


def experts_dense() -> Subject:
    """A mixture of experts by topk and gather."""
    return Subject(module(DenseExperts()), points(), reach=REACH)


def experts_dispatched() -> Subject:
    """A mixture of experts by dispatch."""
    return Subject(module(DispatchedExperts()), points(6), reach=REACH)
