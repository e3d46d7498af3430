"""Every kind of module works, or is refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.model.zoo import Transformer
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.errors import ModelError, OperationError
from lazyscope.inspect import Report, inspect
from lazyscope.loss import CrossEntropy, Loss, Square


class Case(NamedTuple):
    net: nn.Module | ls.Model
    x: Any
    y: Tensor
    loss: Loss | None = None


class Recurrent(nn.Module):
    """An LSTM with a scalar output per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(x)[0][:, -1])[:, 0]
        return out


class Counting(nn.Linear):
    """A module that changes a buffer at each call."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


def conv(norm: nn.Module) -> nn.Sequential:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.MaxPool2d(2), *head)


def images(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 8, 8), torch.arange(n) % 3


def attention() -> Case:
    """The encoder of torch, whose fused kernel has no forward derivative."""
    encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, activation="gelu")
    return Case(nn.Sequential(encoder, nn.Flatten(), nn.Linear(24, 2)).eval(), torch.randn(5, 3, 8), torch.randn(5, 2))


def function() -> Case:
    start = {"a": torch.randn(6), "b": torch.randn(6, 2)}
    model = ls.Model(lambda w, x: torch.tanh(x @ w["b"].T) @ w["a"], start)
    return Case(model, torch.randn(7, 2), torch.randn(7))


CASES: dict[str, Callable[[], Case]] = {
    "convolutions, classes": lambda: Case(conv(nn.Identity()), *images()),
    "batch-norm, evaluated": lambda: Case(conv(nn.BatchNorm2d(4)).eval(), *images()),
    "group-norm": lambda: Case(conv(nn.GroupNorm(2, 4)), *images()),
    "dropout, evaluated": lambda: Case(
        nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Dropout(0.5), nn.Linear(6, 2)).eval(),
        torch.randn(6, 4),
        torch.randn(6, 2),
    ),
    "tied weights, tokens": lambda: Case(
        Transformer(tokens=7, width=8, heads=2), torch.randint(0, 7, (5, 6)), torch.randint(0, 7, (5,)), CrossEntropy()
    ),
    "fused attention": attention,
    "float64": lambda: Case(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double(),
        torch.randn(6, 4).double(),
        torch.randn(6, 1).double(),
    ),
    "one output, recurrent": lambda: Case(Recurrent().double(), torch.randn(6, 5, 3).double(), torch.randn(6).double()),
    "outputs of two dimensions": lambda: Case(
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)),
        torch.randn(4, 5, 3),
        torch.randint(0, 4, (4, 5)),
        CrossEntropy(),
    ),
    "two inputs by name": lambda: Case(
        nn.Bilinear(2, 3, 4), {"input1": torch.randn(5, 2), "input2": torch.randn(5, 3)}, torch.randn(5, 4)
    ),
    "one frozen layer": lambda: Case(
        nn.Sequential(nn.Linear(4, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 2)),
        torch.randn(6, 4),
        torch.randint(0, 2, (6,)),
        Square(),
    ),
    "a function of its parameters": function,
}


LONGER = {"group-norm", "dropout, evaluated", "fused attention"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONGER else ()) for name in CASES]
)
def test_it_works(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    report = inspect(case.net, case.x, case.y, case.loss, alphas=(50.0,), steps=4, seconds=0.5)
    assert isinstance(report, Report)
    own, far = report.courses
    assert own.loss[0] == pytest.approx(far.loss[0], rel=1e-5)
    assert own.loss[-1] < own.loss[0]  # with a quarter of the largest stable step size the loss decreases
    assert far.unexplained <= own.unexplained + 1e-5
    linear = name in ("one frozen layer", "two inputs by name")  # linear in its weights, so there is no curvature
    assert (report.kappa < 1e-6) if linear else (1e-3 < report.kappa < 1e3)
    dtype = case.net.params if isinstance(case.net, ls.Model) else dict(case.net.named_parameters())
    assert report.about.dtype == str(next(iter(dtype.values())).dtype).removeprefix("torch.")
    assert (own.drifts[-1].features is None) == (name == "a function of its parameters")


def test_what_the_notes_say_about_models(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    x, y = images()
    notes = " ".join(inspect(conv(nn.BatchNorm2d(4)).eval(), x, y, alphas=(1,), steps=2, seconds=0.5).notes)
    assert "performance drop" not in capfd.readouterr().err  # torch prints it past Python's filters
    assert "have seen no data" in notes
    assert "kinks" in notes
    assert "CrossEntropy" in notes
    smooth = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 2))
    notes = " ".join(inspect(smooth, torch.randn(5, 4), torch.randn(5, 2), alphas=(1,), steps=2, seconds=0.5).notes)
    assert "central differences" not in notes, "D²h of SiLU has a formula"
    assert "no ReLU" in notes


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: conv(nn.BatchNorm2d(4)), "net.eval\\(\\)"),
        (lambda: conv(nn.Dropout(0.5)), "net.eval\\(\\)"),
    ],
)
def test_training_mode_is_refused(make: Callable[[], nn.Module], remedy: str) -> None:
    with pytest.raises(ModelError, match=remedy):
        inspect(make(), *images())


@pytest.mark.parametrize(("net", "remedy"), [(Counting(), "remove the update"), (Noisy(4, 2), "random numbers")])
def test_forwards_that_cannot_be_followed_are_refused(net: nn.Module, remedy: str) -> None:
    with pytest.raises(ModelError, match=remedy):
        inspect(net, torch.randn(5, 4), torch.randn(5, 2))


def test_an_lstm_in_float32_on_a_cpu_is_refused_before_anything_is_measured() -> None:
    """In this case torch uses a oneDNN kernel that has no float64 variant; models in float64 work, as above."""
    seen: list[str] = []
    with pytest.raises(OperationError, match="replace it"):
        inspect(Recurrent(), torch.randn(6, 5, 3), torch.randn(6), progress=lambda name, _: seen.append(name))
    assert set(seen) == {"the model and its data"}


def test_the_module_is_not_touched() -> None:
    torch.manual_seed(0)
    net = conv(nn.Identity()).train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    inspect(net, *images(), alphas=(1,), steps=3, seconds=0.5)
    assert net.training
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


def test_a_model_that_never_moves_is_refused() -> None:
    first = nn.Linear(3, 4)
    with torch.no_grad():
        first.weight.zero_()
        first.bias.fill_(-1.0)
    net = nn.Sequential(first, nn.ReLU(), nn.Linear(4, 2, bias=False))
    with pytest.raises(ModelError, match="start elsewhere"):
        inspect(net, torch.randn(4, 3), torch.randn(4, 2))
