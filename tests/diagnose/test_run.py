"""What a monitor says about a run: scale and shape, sharpness, layers, verdicts, and resumption."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.diagnose import LayerKernels, Monitor, Record, kernel_alignment, kernel_drift, read, runs
from lazyscope.diagnose.schedule import WithinBudget
from lazyscope.diagnose.sharpness import LossHessian, largest_eigenvalue
from lazyscope.errors import InputError, StoreError

FAR = 10**9


def data(n: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=random, dtype=dtype)
    return x, (x[:, :1] * x[:, 1:2]).sign().repeat(1, 2)


def mlp(width: int = 24, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, width, bias), nn.ReLU(), nn.Linear(width, width, bias), nn.ReLU(), nn.Linear(width, 2, bias)
    return nn.Sequential(*layers).double()


def square(out: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (out - y).square().sum(-1).mean()


def train(
    net: nn.Module, optimiser: torch.optim.Optimizer, steps: int, then: Callable[[], object], n: int = 12
) -> None:
    x, y = data(n)
    for _ in range(steps):
        optimiser.zero_grad()
        square(net(x), y).backward()
        optimiser.step()
        then()


def same(first: Record, second: Record, rel: float = 1e-9) -> bool:
    return (
        asdict(first) == pytest.approx(asdict(second), rel=rel, abs=1e-12, nan_ok=True)
        if not first.layers
        else all(
            pytest.approx(b, rel=rel, abs=1e-12, nan_ok=True) == a
            for a, b in [
                *zip(first.numbers().values(), second.numbers().values(), strict=True),
                *(
                    (v, asdict(second.layers[k])[f])
                    for k, layer in first.layers.items()
                    for f, v in asdict(layer).items()
                ),
            ]
        )
    )


def test_outputs_that_are_only_rescaled_change_the_scale_and_not_the_shape() -> None:
    net = mlp(bias=False)
    monitor = Monitor(net, data()[0], every=FAR)
    decay = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(10):  # only weight decay: all weights shrink by the same factor
        net(data()[0]).sum().mul(0).backward()
        decay.step()
    record, factor = monitor.look(), 0.95**10
    assert record.kernel_scale == pytest.approx(factor**4, rel=1e-9)  # K is of degree 2(L - 1) for L = 3 layers
    assert record.kernel_shape < 1e-9  # below 1 %
    assert record.kernel_drift == pytest.approx(1 - factor**4, rel=1e-6)


def test_learned_features_change_the_shape() -> None:
    net = mlp()
    monitor = Monitor(net, data()[0], every=FAR)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), 600, lambda: None)
    assert monitor.look().kernel_shape > 0.25
    assert monitor.verdict().word == "feature learning"
    assert set(monitor.verdict().layers) == {"0", "2", "4"}
    assert monitor.verdict().layers["0"] == "feature learning"
    assert monitor.verdict().layers["4"] == "lazy"  # the network is linear in its weights


def test_a_scaled_run_is_lazy() -> None:
    lazy = ls.Scaled(mlp(), 1e4)
    monitor = Monitor(lazy, *data(), loss=square, every=FAR)
    train(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1), 60, lambda: None)
    verdict = monitor.verdict()
    assert verdict.word == "lazy"
    assert verdict.lazy
    assert set(verdict.layers.values()) == {"lazy"}


def test_kernels_of_layers_are_those_of_dense_jacobians() -> None:
    net, (x, _) = mlp(), data()
    model = ls.Model(net)
    monitor = Monitor(net, x, every=FAR)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), 50, lambda: None)
    record = monitor.look()
    before, after = (ls.tangent_kernel(each, x, by_layer=True) for each in (model, ls.Model(net)))
    for layer, own in record.layers.items():
        k0, k1 = (kernels[f"{layer}.weight"] + kernels[f"{layer}.bias"] for kernels in (before, after))
        assert own.kernel_shape == pytest.approx(1 - kernel_alignment(k0, k1), rel=1e-6)
        assert own.kernel_scale == pytest.approx(float(k1.norm() / k0.norm()), rel=1e-9)
    whole = [torch.stack(list(kernels.values())).sum(0) for kernels in (before, after)]
    assert record.kernel_drift == pytest.approx(kernel_drift(*whole), rel=1e-6)
    assert record.kernel_error == 0


def test_a_layer_that_moves_alone_has_the_distance_of_its_own_tangent() -> None:
    net, (x, _) = mlp(), data()
    model = ls.Model(net)
    monitor = Monitor(net, x, every=FAR)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3), dtype=p.dtype))
    now, record = dict(net.named_parameters()), monitor.look()
    jacobian = model.jacobian(x)
    for layer, own in record.layers.items():
        v = {n: (now[n].detach() - w) * (n.rpartition(".")[0] == layer) for n, w in model.params.items()}
        moved = (model(x, {n: w + v[n] for n, w in model.params.items()}) - model(x)).flatten()
        gap = (moved - jacobian @ torch.cat([d.flatten() for d in v.values()])).norm() / moved.norm()
        assert own.tangent_distance == pytest.approx(float(gap), rel=1e-6, abs=1e-9)
    assert record.layers["4"].tangent_distance < 1e-12  # it is linear in its own weights
    assert not math.isnan(record.layers["0"].flipped)
    assert math.isnan(record.layers["4"].flipped)


def test_sketches_of_many_outputs_are_within_five_per_cent() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 60)).double()
    x, y = data(16)[0], torch.randn(16, 60, dtype=torch.float64)
    model, layers = ls.Model(net), {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias")}
    random = torch.Generator().manual_seed(2)
    now = {n: w + 0.3 * torch.randn(w.shape, generator=random, dtype=w.dtype) for n, w in model.params.items()}
    exact = LayerKernels(model, x, layers, columns=60)
    assert exact.exact
    dense = exact.change(exact.kernels(now))[0]
    found = []
    for seed in range(5):
        sketch = LayerKernels(model, x, layers, columns=16, seed=seed)
        assert not sketch.exact
        assert sketch.points == 16
        kernels = sketch.kernels(now)
        near = sketch.change(kernels)[0]
        found.append((near.scale / dense.scale - 1, near.shape / dense.shape - 1, near.error / dense.shape))
        assert sketch.alignment(kernels, y) == pytest.approx(exact.alignment(exact.kernels(now), y), abs=0.05)
    scale, shape, stated = (math.sqrt(sum(row[i] ** 2 for row in found) / 5) for i in range(3))
    assert scale < 0.05
    assert shape < 0.05
    assert shape / 2 < stated < 2 * shape


def test_alignment_is_that_of_centred_dense_kernels() -> None:
    net, (x, y) = mlp(), data()
    record = Monitor(net, x, y, loss=square, every=FAR).look()
    centre = torch.eye(12, dtype=torch.float64) - 1 / 12
    theta = centre @ ls.tangent_kernel(net, x, outputs="trace") @ centre
    labels = centre @ y @ y.T @ centre
    assert record.alignment == pytest.approx(kernel_alignment(theta, labels), rel=1e-9)


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


class Lines:
    """The documented methods of a run of Weights & Biases and of mlflow, one of which is kept."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []


class WandbRun(Lines):
    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert commit is False  # the numbers join the row of the training
        self.rows.append(data)

    def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
        assert (name, step_metric) == ("lazyscope/*", "lazyscope/step")


class Mlflow(Lines):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append({"lazyscope/step": step, **metrics})


def test_writers_get_the_finite_numbers_of_the_network_and_its_layers() -> None:
    net, writers = mlp(), (WandbRun(), Mlflow())
    monitor = Monitor(net, data()[0], every=2, writers=writers)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), 4, monitor)
    for writer in writers:
        assert [row["lazyscope/step"] for row in writer.rows] == [2, 4]
        assert writer.rows[1]["lazyscope/kernel_shape"] == monitor.records[1].kernel_shape
        assert writer.rows[1]["lazyscope/kernel_shape/2"] == monitor.records[1].layers["2"].kernel_shape
        assert "lazyscope/loss" not in writer.rows[1]  # there are no targets
    with pytest.raises(InputError, match="mlflow"):
        Monitor(net, data()[0], writers=[3])


def test_runs_in_one_file_are_told_apart(tmp_path: Path) -> None:
    path, found = tmp_path / "runs.csv", []
    for name in ("a", "b"):
        net = mlp()
        monitor = Monitor(net, data()[0], every=2, csv=path, run=name)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), 4, monitor)
        found.append(monitor.records)
    assert runs(path) == ["a", "b"]
    assert read(path, "b") == found[1]
    assert read(path) == found[0] + found[1]


def test_the_budget_bounds_the_time_and_steps_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("lazyscope.diagnose.schedule.time.perf_counter", lambda: clock[0])
    schedule, measured, spent = WithinBudget(0.02), [], 0.0
    schedule.spent(0, 5.0)  # the measurement at the start takes 5 seconds
    for step in range(1, 20_001):
        clock[0] += 0.1
        if schedule.due(step):
            measured.append(step)
            clock[0] += 3.0
            spent += 3.0
            schedule.spent(step, 3.0)
            assert spent <= 0.02 * clock[0] + 1e-9
    assert measured[0] > 2000  # 5 s are 2 % of 250 s
    assert 8 <= len(measured) <= 14
    with pytest.raises(InputError, match="budget"):
        WithinBudget(2.0)


def test_the_step_may_be_given() -> None:
    net = mlp()
    monitor = Monitor(net, data()[0], every=10)
    assert monitor(5) is None
    assert monitor(20) is not None
    assert monitor.step == 20
    assert set(monitor.layers()) == {"0", "2", "4"}


def test_a_short_or_diverged_run_says_so() -> None:
    net, (x, y) = mlp(), data()
    monitor = Monitor(net, x, y, loss=square, every=FAR)
    assert "have not moved" in monitor.verdict().sentence
    monitor.step += 1
    with torch.no_grad():
        net.get_parameter("4.bias").add_(1e-3)
    assert "more steps" in str(monitor.verdict())
    monitor.step += 1
    with torch.no_grad():
        net.get_parameter("4.bias").fill_(math.nan)
    assert monitor.verdict().word == "unstable"


def test_the_report_is_one_file_with_the_verdict_and_all_layers(tmp_path: Path) -> None:
    net, (x, y) = mlp(), data()
    monitor = Monitor(net, x, y, every=5)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), 20, monitor)
    page = monitor.report(tmp_path / "sub" / "run.html").read_text()
    assert monitor.verdict().sentence in page
    assert page.count("<svg") >= 5
    assert all(f"<td>{layer}</td>" in page for layer in monitor.layers())
    assert "http" not in page.replace("http-equiv", "")
    with pytest.raises(StoreError, match="choose another"):
        monitor.report(tmp_path / "sub" / "run.html" / "again.html")
