"""The monitor: what it records is what it says, its files survive a kill, and its net is not touched."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from lazyscope import Linearised, Model, Scaled, relative_scale, tangent_kernel
from lazyscope.diagnose import KernelSketch, Monitor, activation_stability, kernel_drift
from lazyscope.diagnose.monitor import read
from lazyscope.errors import InputError, LazyscopeError, ModelError, StoreError
from lazyscope.loss import CrossEntropy


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2)).double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(10, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(net: nn.Sequential, x: Tensor, monitor: Callable[[], object], steps: int, lr: float = 0.05) -> None:
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        (net(x) - 1).square().sum(-1).mean().backward()
        optimiser.step()
        monitor()


def test_it_records_what_dense_float64_formulas_give(net: nn.Sequential, x: Tensor) -> None:
    model = Model(net)
    monitor = Monitor(net, x, every=4, columns=100)  # as many as needed for a good estimate
    train(net, x, monitor, 9)
    assert [record.step for record in monitor.records] == [4, 8]
    train(net, x, monitor, 3)
    record = monitor.records[-1]
    now = {name: p.detach() for name, p in net.named_parameters()}
    v = {name: now[name] - w for name, w in model.params.items()}
    flat = torch.cat([each.flatten() for each in v.values()])
    moved = (model(x, now) - model(x)).flatten()
    gap = (moved - model.jacobian(x) @ flat).norm() / moved.norm()
    assert record.tangent_distance == pytest.approx(float(gap), rel=1e-9)
    size = torch.cat([w.flatten() for w in model.params.values()]).norm()
    assert record.displacement == pytest.approx(float(flat.norm() / size), rel=1e-12)
    assert record.flipped == 1 - activation_stability(model, x, v).mean
    exact = kernel_drift(tangent_kernel(model, x), tangent_kernel(model.at(now), x))
    assert record.kernel_drift == pytest.approx(exact, rel=0.15)  # 100 columns: some per cent


def test_sketches_of_more_columns_come_nearer(net: nn.Sequential, x: Tensor) -> None:
    model = Model(net)
    now = {name: 1.3 * w for name, w in model.params.items()}
    exact = kernel_drift(tangent_kernel(model, x), tangent_kernel(model.at(now), x))
    errors = {
        columns: sum(abs(KernelSketch(model, x, columns=columns, seed=seed).drift(now) - exact) for seed in range(6))
        for columns in (1, 64)
    }
    assert errors[64] < errors[1]
    assert errors[64] / 6 < 0.05 * exact


def test_without_movement_all_is_zero_and_stable(net: nn.Sequential, x: Tensor) -> None:
    record = Monitor(net, x).look()
    assert (record.displacement, record.tangent_distance, record.kernel_drift, record.flipped) == (0, 0, 0, 0)


def test_the_net_is_not_touched(net: nn.Sequential, x: Tensor) -> None:
    net.train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    Monitor(net, x, every=1)()
    assert net.training
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_batch_norm_and_dropout_in_training_mode(x: Tensor) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    monitor = Monitor(net, x, every=2)
    train(net, x, monitor, 4)
    first, second = monitor.records
    assert 0 < first.displacement < second.displacement
    assert 0 < first.tangent_distance < 1


def test_nets_without_relu_have_no_stability_and_tokens_are_inputs_too() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(7, 6), nn.Flatten(), nn.Linear(18, 5), nn.Tanh(), nn.Linear(5, 2))
    monitor = Monitor(net, torch.randint(0, 7, (9, 3)), every=1)
    with torch.no_grad():
        next(net[2].parameters()).mul_(1.1)
    record = monitor()
    assert record is not None
    assert math.isnan(record.flipped)
    assert record.kernel_drift > 0


def test_csv_is_appended_to_and_a_torn_line_is_cut_off(net: nn.Sequential, x: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run.csv"
    first = Monitor(net, x, every=1, csv=path)
    train(net, x, first, 2)
    with path.open("a") as file:
        file.write("3,0.12")  # killed here
    second = Monitor(net, x, every=1, csv=path, start=2)
    train(net, x, second, 1)
    assert read(path) == [*first.records, *second.records]
    assert [record.step for record in read(path)] == [1, 2, 3]


def test_other_files_are_not_overwritten(net: nn.Sequential, x: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "thesis.csv"
    path.write_text("chapter,words\n1,2000\n")
    with pytest.raises(StoreError, match="choose another"):
        Monitor(net, x, csv=path)
    assert path.read_text() == "chapter,words\n1,2000\n"
    with pytest.raises(StoreError, match="cannot write"):
        Monitor(net, x, csv=tmp_path / "thesis.csv" / "run.csv")


@pytest.mark.parametrize("passed", ["folder", "writer"])
def test_tensorboard_holds_the_same_numbers(passed: str, net: nn.Sequential, x: Tensor, tmp_path: Path) -> None:
    where: Path | SummaryWriter = tmp_path if passed == "folder" else SummaryWriter(str(tmp_path))
    monitor = Monitor(net, x, every=2, tensorboard=where)
    train(net, x, monitor, 4)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for name in ("displacement", "tangent_distance", "kernel_drift", "flipped"):
        seen = [(event.step, event.value) for event in events.Scalars(f"lazyscope/{name}")]
        assert seen == [(r.step, pytest.approx(getattr(r, name), rel=1e-6)) for r in monitor.records]


def test_refusals_name_the_remedy(net: nn.Sequential, x: Tensor) -> None:
    cases: list[tuple[Callable[[], object], type[LazyscopeError], str]] = [
        (lambda: Monitor(lambda x: x, x), ModelError, "pass the nn.Module"),
        (lambda: Monitor(net, x, every=0), InputError, "every=1"),
        (lambda: Monitor(net, x, tensorboard=3), InputError, "SummaryWriter"),
        (lambda: Monitor(net, x[:, :3]), InputError, "check the shape"),
        (lambda: Monitor(net, x * math.nan), InputError, "NaN"),
    ]
    for call, kind, remedy in cases:
        with pytest.raises(kind, match=remedy):
            call()
    monitor = Monitor(net, x, every=1)
    net[2] = nn.Linear(24, 2, bias=False)
    with pytest.raises(ModelError, match="new monitor"):
        monitor()


def test_it_predicts_with_the_number_that_belongs_to_the_loss(x: Tensor) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    labels = torch.tensor([0, 1] * 5)
    assert Monitor(net, x).scale is None
    for y, symbol in ((labels, "criterion"), (labels[:, None].expand(-1, 2).double(), "κ")):
        found, known = Monitor(net, x, y).scale, relative_scale(net, x, y)
        assert found is not None
        assert found.symbol == symbol
        assert found.value == pytest.approx(known.value, rel=1e-2)  # the search stops earlier
        assert found.promises == known.promises
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    with pytest.raises(InputError, match="step"):
        Monitor(net, x, labels, metric=optimiser)
    net(x).square().sum().backward()
    optimiser.step()
    found, known = Monitor(net, x, labels, metric=optimiser).scale, relative_scale(net, x, labels, metric=optimiser)
    assert found is not None
    assert found.value == pytest.approx(known.value, rel=1e-2)
    found, known = Monitor(Scaled(net, 2.0), x, labels).scale, relative_scale(net, x, labels).centred().scaled(2.0)
    assert found is not None
    assert found.value == pytest.approx(known.value, rel=1e-2)
    assert Monitor(Linearised(net), x, labels).scale is None


def test_it_predicts_for_losses_of_torch_and_of_the_user(x: Tensor) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    labels = torch.tensor([0, 1] * 5)
    numbers = torch.eye(2).double()[labels]
    known = Monitor(net, x, labels)
    assert known.scale is not None
    found = Monitor(net, x, labels, loss=nn.CrossEntropyLoss())
    assert found.scale is not None
    assert (found.scale.value, found.scale.loss) == (known.scale.value, known.scale.loss)
    assert "scale" not in found.notes
    smoothed = Monitor(net, x, labels, loss=nn.CrossEntropyLoss(label_smoothing=0.2)).scale
    exact = relative_scale(net, x, 0.8 * numbers + 0.1, loss=CrossEntropy())
    assert smoothed is not None
    assert smoothed.value == pytest.approx(exact.value, rel=1e-2)
    assert smoothed.value < 0.9 * known.scale.value, "the loss is closer to its infimum"
    square = Monitor(net, x, numbers, loss=nn.MSELoss()).scale
    same = Monitor(net, x, numbers).scale
    assert square is not None
    assert same is not None
    assert (square.value, square.symbol) == (same.value, "κ")
    own = Monitor(net, x, numbers, loss=lambda out, y: (out - y).square().mean())
    assert own.scale is not None
    assert own.scale.criterion == pytest.approx(square.criterion, rel=1e-2)
    assert "assumes that it is 0" in own.notes["scale"]
    negative = Monitor(net, x, numbers, loss=lambda out, y: (out - y).square().mean() - 9)
    assert negative.scale is None
    assert "negative" in negative.notes["scale"]


def test_a_network_with_kinks_is_noted_in_the_prediction(net: nn.Sequential, x: Tensor) -> None:
    found = Monitor(net, x, torch.tensor([0, 1] * 5)).scale
    assert found is not None
    assert "kinks" in found.notice
