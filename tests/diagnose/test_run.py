"""What a monitor says about a run: scale and shape, layers, the verdict, writers and the report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnose.training import FAR, data, mlp, square, train
from torch import nn

import lazyscope as ls
from lazyscope.diagnose import LayerKernels, Monitor, kernel_alignment, kernel_drift, read, runs
from lazyscope.diagnose.schedule import WithinBudget
from lazyscope.errors import InputError, StoreError


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
