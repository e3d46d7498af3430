"""Selected outputs: what they need is computed for the selected entries only, and the kernel is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lazyscope import Model, tangent_kernel
from lazyscope.tangent.sample_graph import SampleGraph, size

VOCABULARY, WIDTH, LENGTH = 50, 6, 5


class Tokens(nn.Module):
    """An embedding, a mixing of the positions, and a head that may be tied to the embedding."""

    def __init__(self, *, tied: bool, bias: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.tanh(self.mix(self.tokens(x).mT).mT)
        out: Tensor = 0.5 * self.head(self.norm(mixed)) + 1.0
        return out


def dense(net: nn.Module, x: Tensor, output: Callable[[Tensor], Tensor]) -> Tensor:
    rows = []
    for i in range(len(x)):
        out = output(net(x[i : i + 1])).flatten()
        for each in out:
            grads = torch.autograd.grad(each, list(net.parameters()), retain_graph=True, allow_unused=True)
            found = zip(net.parameters(), grads, strict=True)
            rows.append(torch.cat([(torch.zeros_like(w) if g is None else g).flatten() for w, g in found]))
    jacobian = torch.stack(rows).view(len(x), -1, sum(w.numel() for w in net.parameters()))
    return torch.einsum("iap,jbp->ijab", jacobian, jacobian)


SELECTIONS: dict[str, Any] = {
    "last position, two logits": lambda o: o[:, -1, :2],
    "last position": lambda o: o[:, -1, 40:],
    "a range of positions": lambda o: o[:, 1:3, 7],
    "negative range": lambda o: o[:, -2:, -3:],
    "twice": lambda o: o[:, :, 5:25][:, 2, 3:6],
    "also used elsewhere": lambda o: o[:, -1, :2] + o.mean((1, 2))[:, None],
    "every other": lambda o: o[:, -1, ::20],
    "empty step": lambda o: o[:, 1:][:, 0, :3],
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", SELECTIONS)
def test_kernels_of_selected_outputs(name: str, bias: bool, tied: bool) -> None:
    torch.manual_seed(0)
    net, output = Tokens(tied=tied, bias=bias).double().eval(), SELECTIONS[name]
    x = torch.randint(VOCABULARY, (4, LENGTH))
    model = Model(net, output=output)
    reference = dense(net, x, output)
    torch.testing.assert_close(tangent_kernel(model, x), reference, rtol=1e-11, atol=1e-11)
    parts = tangent_kernel(model, x, by_layer=True)
    torch.testing.assert_close(sum(parts.values()), reference, rtol=1e-11, atol=1e-11)


def test_the_head_is_computed_for_the_selected_entries_only() -> None:
    torch.manual_seed(0)
    net = Tokens(tied=True, bias=True).eval()
    x = torch.randint(VOCABULARY, (4, LENGTH))
    for output, expected in ((lambda o: o[:, -1, :2], 2), (lambda o: o, VOCABULARY * LENGTH)):
        graph = SampleGraph.of(Model(net, output=output), x)
        (head,) = [node for node in graph.outputs if node.target is torch.ops.aten.addmm.default]
        assert size(head) == expected
