"""Sharpness and the edge of stability, as a monitor measures them."""

from __future__ import annotations

import math

import pytest
import torch
from tests.diagnose.training import FAR, data, mlp, square, train
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.diagnose import Monitor
from lazyscope.diagnose.sharpness import LossHessian, largest_eigenvalue


def test_sharpness_is_the_largest_eigenvalue_of_the_dense_hessian() -> None:
    net, (x, y) = mlp(8), data()
    model = ls.Model(net)
    sizes = [w.numel() for w in model.params.values()]

    def loss(flat: Tensor) -> Tensor:
        pieces = zip(model.params.items(), flat.split(sizes), strict=True)
        return square(model(x, {name: piece.view_as(w) for (name, w), piece in pieces}), y)

    flat = torch.cat([w.flatten() for w in model.params.values()])
    dense = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.3)
    record = Monitor(net, x, y, loss=square, optimiser=optimiser, every=FAR).look()
    assert record.sharpness == pytest.approx(float(dense[-1]), rel=1e-3)
    assert record.edge == pytest.approx(float(dense[-1]) * 0.3 / 2, rel=1e-3)
    assert record.loss == pytest.approx(float(square(model(x), y).detach()))
    single = Monitor(net.float(), x.float(), y.float(), loss=square, every=FAR).look()
    assert single.sharpness == pytest.approx(float(dense[-1]), rel=1e-2)


def test_sharpness_of_scaled_modules_is_that_of_their_coordinates() -> None:
    alpha, (x, y) = 7.0, data()
    scaled = ls.Scaled(mlp(8), alpha)
    optimiser = torch.optim.SGD(scaled.parameters(), lr=0.05)
    monitor = Monitor(scaled, x, y, loss=square, optimiser=optimiser, every=FAR)
    train(scaled, optimiser, 5, lambda: None)
    record, w = monitor.look(), ls.Model(mlp(8)).params

    def loss(v: dict[str, Tensor]) -> Tensor:
        model = ls.Model(mlp(8))
        return square(alpha * (model(x, {n: w[n] + v[n] / alpha for n in v}) - model(x).detach()), y)

    present = {name: p.detach() for name, p in scaled.named_parameters()}
    assert record.loss == pytest.approx(float(loss(present)), rel=1e-9)
    assert record.sharpness == pytest.approx(largest_eigenvalue(LossHessian(loss, present)), rel=1e-3)


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "adam", "groups"])
def test_the_edge_separates_growth_from_decay_on_a_quadratic(kind: str) -> None:
    """On a quadratic function, an optimiser diverges exactly if the edge is above 1."""

    def make(w: nn.Linear, lr: float) -> torch.optim.Optimizer:
        if kind == "groups":
            groups = [{"params": [w.weight], "lr": lr}, {"params": [w.bias], "lr": lr / 3}]
            return torch.optim.SGD(groups, lr=lr)
        return torch.optim.SGD(w.parameters(), lr=lr, momentum=0.8, nesterov=kind == "nesterov")

    x, y = data()
    if kind == "adam":
        net = nn.Linear(4, 2).double()
        optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
        monitor = Monitor(net, x, y, loss=square, optimiser=optimiser, every=FAR)
        assert math.isnan(monitor.initial.edge)  # no state yet
        train(net, optimiser, 3, lambda: None)
        state = optimiser.state[net.weight]
        assert "exp_avg_sq" in state
        scale = {
            n: 1 / ((optimiser.state[p]["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8)
            for n, p in net.named_parameters()
        }
        hessian = LossHessian(
            lambda w: square(x @ w["weight"].T + w["bias"], y),
            dict(net.named_parameters()),
            {n: s.sqrt() for n, s in scale.items()},
        )
        top = float(torch.linalg.eigvalsh(hessian.matmat(torch.eye(10, dtype=torch.float64)))[-1])
        assert monitor.look().edge == pytest.approx(top * 0.01 * 0.1 / (2 * 1.9), rel=1e-3)
        return
    torch.manual_seed(0)
    unit = nn.Linear(4, 2).double()
    edge = Monitor(unit, x, y, loss=square, optimiser=make(unit, 1.0), every=FAR).look().edge
    for factor in (0.95, 1.05):
        net = nn.Linear(4, 2).double()
        used = make(net, factor / edge)
        assert Monitor(net, x, y, loss=square, optimiser=used, every=FAR).look().edge == pytest.approx(factor, rel=1e-3)
        train(net, used, 600, lambda: None)
        assert (float(square(net(x), y).detach()) > 1e3) is (factor > 1)


def test_training_hovers_at_the_edge_of_stability() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    x = torch.randn(20, 3).double()
    y = torch.sin(3 * x[:, :1]) * x[:, 1:2]
    optimiser = torch.optim.SGD(net.parameters(), lr=0.2)
    monitor = Monitor(net, x, y, loss=square, optimiser=optimiser, every=100)
    for _ in range(1100):
        optimiser.zero_grad()
        square(net(x), y).backward()
        optimiser.step()
        monitor()
    edges = [record.edge for record in monitor.records]
    assert edges[0] < 0.5
    assert all(abs(edge - 1) < 0.1 for edge in edges[6:])
