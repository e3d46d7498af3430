"""Monitors of runs that are resumed, change their mode, freeze layers or have half precision."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnose.training import FAR, data, mlp, same, square, train
from torch import nn

import lazyscope as ls
from lazyscope.diagnose import Monitor, read, runs
from lazyscope.diagnose.sharpness import LossHessian, largest_eigenvalue
from lazyscope.errors import InputError


@pytest.mark.parametrize("how", ["start", "load_state_dict"])
def test_a_resumed_run_gives_the_records_of_one_that_was_not_stopped(how: str, tmp_path: Path) -> None:
    def watched(net: nn.Module, optimiser: torch.optim.Optimizer, csv: Path, **options: Any) -> Monitor:
        return Monitor(net, *data(), loss=square, optimiser=optimiser, every=4, csv=csv, **options)

    net = mlp()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    whole = watched(net, optimiser, tmp_path / "whole.csv")
    train(net, optimiser, 16, whole)
    net = mlp()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    first = watched(net, optimiser, tmp_path / "parts.csv")
    train(net, optimiser, 10, first)
    checkpoint = io.BytesIO()
    torch.save([net.state_dict(), optimiser.state_dict(), first.state_dict()], checkpoint)
    train(net, optimiser, 3, first)  # these steps are lost
    checkpoint.seek(0)
    weights, state, monitor = torch.load(checkpoint, weights_only=True)
    net = mlp()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    net.load_state_dict(weights)
    optimiser.load_state_dict(state)
    second = watched(net, optimiser, tmp_path / "parts.csv", **({"start": monitor} if how == "start" else {}))
    if how != "start":
        second.load_state_dict(monitor)
    assert second.step == 10
    train(net, optimiser, 6, second)
    assert [record.step for record in second.records] == [4, 8, 12, 16]
    assert all(same(a, b) for a, b in zip(whole.records, second.records, strict=True))
    assert same(whole.initial, second.initial)
    assert runs(tmp_path / "parts.csv") == [second.run]
    assert all(same(a, b) for a, b in zip(read(tmp_path / "parts.csv"), whole.records, strict=True))


def test_the_start_may_be_a_state_dict_of_the_network() -> None:
    net, (x, _) = mlp(), data()
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    watched = Monitor(net, x, every=FAR)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), 20, lambda: None)
    later = Monitor(net, x, every=FAR, start=start)
    assert same(watched.look(), later.look())
    with pytest.raises(InputError, match="lack"):
        Monitor(net, x, start={"0.weight": start["0.weight"]})
    with pytest.raises(InputError, match="shape"):
        Monitor(net, x, start={**start, "0.weight": start["0.weight"][:2]})
    with pytest.raises(InputError, match="probe of that run"):
        Monitor(net, 2 * x, start=watched.state_dict())
    with pytest.raises(InputError, match="state_dict"):
        watched.load_state_dict({"step": 3})


def test_batch_norm_in_training_mode_uses_the_statistics_of_the_probe() -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2)).double()

    net, (x, _) = made(), data()
    monitor = Monitor(net, x, every=FAR)
    with torch.no_grad():
        net.get_parameter("0.weight").mul_(3)  # batch normalisation removes a factor of the weights and of the bias
        net.get_parameter("0.bias").mul_(3)
    found = monitor.look()
    assert 0 <= found.kernel_shape < 1  # the kernels of points that depend on each other are defined
    plain = made().eval()
    frozen = Monitor(plain, x, every=FAR)
    with torch.no_grad():
        plain.get_parameter("0.weight").mul_(3)
        plain.get_parameter("0.bias").mul_(3)
    now, before = plain(x).detach(), made().eval()(x).detach()
    model = ls.Model(made().eval())
    v = torch.cat([(dict(plain.named_parameters())[n].detach() - w).flatten() for n, w in model.params.items()])
    gap = (now - before - (model.jacobian(x) @ v).view_as(now)).norm() / (now - before).norm()
    assert frozen.look().tangent_distance == pytest.approx(float(gap), rel=1e-9)
    # With the statistics of the probe, the outputs have barely changed: only eps breaks the invariance.
    copy = monitor._probe.subject.model
    moved = copy(x, {n: p.detach() for n, p in net.named_parameters()}) - copy(x)
    assert float(moved.norm()) < 1e-3 * float(copy(x).norm())


def test_layers_may_be_frozen_and_unfrozen() -> None:
    net, (x, y) = mlp(), data()
    net[0].requires_grad_(False)
    monitor = Monitor(net, x, y, loss=square, every=FAR)
    assert set(monitor.look().layers) == {"2", "4"}
    net[0].requires_grad_(True)
    net[2].requires_grad_(False)
    train(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1), 5, lambda: None)
    record = monitor.look()
    assert set(record.layers) == {"0", "2", "4"}
    assert record.layers["2"].displacement == 0
    assert record.layers["0"].displacement > 0
    free = {n: p.detach() for n, p in net.named_parameters() if p.requires_grad}
    model = ls.Model(mlp())
    others = {n: p.detach() for n, p in net.named_parameters()}
    hessian = LossHessian(lambda w: square(model(x, {**others, **w}), y), free)
    assert record.sharpness == pytest.approx(largest_eigenvalue(hessian), rel=1e-3)


def test_half_precision_is_studied_in_single_precision() -> None:
    net, x = mlp().bfloat16(), data()[0].bfloat16()
    monitor = Monitor(net, x, every=FAR)
    start = mlp().bfloat16().float()
    with torch.no_grad():
        net.get_parameter("0.weight").mul_(1.5)
    moved = mlp().bfloat16()
    with torch.no_grad():
        moved.get_parameter("0.weight").mul_(1.5)
    model = ls.Model(start)
    v = torch.cat([(p.detach().float() - model.params[n]).flatten() for n, p in moved.named_parameters()])
    change = (moved.float()(x.float()) - start(x.float())).detach()
    gap = (change.flatten() - model.jacobian(x.float()) @ v).norm() / change.norm()
    assert monitor.look().tangent_distance == pytest.approx(float(gap), rel=1e-3)
