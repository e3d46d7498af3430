"""D²h by nested derivatives is the derivative of Dh, even if torch's nested derivatives are wrong or missing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.model.jacobian import JacobianOperator, SecondDerivative

STEP = 1e-5


class Last(nn.Module):
    """The last output of a recurrent network that reads its input in three pieces."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.unflatten(1, (3, 4)))[0][:, -1]
        return out


LAYERS: dict[str, list[nn.Module]] = {
    "layer-norm": [nn.LayerNorm(12)],
    "layer-norm, plain": [nn.LayerNorm(12, elementwise_affine=False)],
    "group-norm": [nn.GroupNorm(2, 12)],
    "instance-norm": [nn.Unflatten(1, (2, 6)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()],
    "batch-norm": [nn.BatchNorm1d(12).eval()],
    "rms-norm": [nn.RMSNorm(12)],
    "silu": [nn.SiLU()],
    "mish": [nn.Mish()],
    "glu": [nn.GLU(), nn.Linear(6, 12)],
    "gelu": [nn.GELU()],
    "softmax": [nn.Softmax(1)],
    "tanh": [nn.Tanh()],
    "lstm": [Last(nn.LSTM(4, 12, batch_first=True))],
    "gru": [Last(nn.GRU(4, 12, batch_first=True))],
    "attention": [nn.Unflatten(1, (3, 4)), nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Flatten()],
}


@pytest.mark.parametrize("name", LAYERS)
def test_products_are_the_derivative_of_the_jacobian(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 12), *LAYERS[name], nn.Linear(12, 2)).double()
    for parameter in net.parameters():  # normalisation layers start at 1 and 0, where some terms vanish
        parameter.data += 0.1 * torch.randn_like(parameter)
    model, x = ls.Model(net), torch.randn(6, 5, dtype=torch.float64)
    form = SecondDerivative(model, x, batch=4)
    u, v, g = (torch.randn(2, size, dtype=torch.float64) for size in (form.shape[1], form.shape[1], form.shape[0]))
    u, v = u / u.norm(dim=1, keepdim=True), v / v.norm(dim=1, keepdim=True)
    for i in range(2):
        ahead, behind = (_moved(model, x, sign * STEP * u[i]) for sign in (1, -1))
        pair = (ahead.matvec(v[i]) - behind.matvec(v[i])) / (2 * STEP)
        contraction = (ahead.rmatvec(g[i]) - behind.rmatvec(g[i])) / (2 * STEP)
        torch.testing.assert_close(form.pair(u, v)[i], pair, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(form.contract(g, u)[i], contraction, rtol=1e-6, atol=1e-6)
    dense = form.to_dense()
    torch.testing.assert_close(dense.pair(u, v), form.pair(u, v))
    torch.testing.assert_close(dense.contract(g, u), form.contract(g, u))


def _moved(model: ls.Model, x: Tensor, move: Tensor) -> JacobianOperator:
    pieces = move.split([w.numel() for w in model.params.values()])
    named = zip(model.params.items(), pieces, strict=True)
    return JacobianOperator(model.at({name: w + piece.view_as(w) for (name, w), piece in named}), x)


def test_relative_scale_of_a_larger_net_with_silu_and_norms() -> None:
    """The model is too large for the dense tensor, so every product is a nested derivative."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 300), nn.SiLU(), nn.LayerNorm(300), nn.Linear(300, 2)).double()
    x, y = torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    found = ls.relative_scale(net, x, y)
    direction = found.search.direction
    ahead, behind = (_moved(ls.Model(net), x, sign * STEP * direction) for sign in (1, -1))
    second = (ahead.matvec(direction) - behind.matvec(direction)) / (2 * STEP)
    assert found.hessian_norm == pytest.approx(float(second.norm()) / 8**0.5, rel=1e-5)
