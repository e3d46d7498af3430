"""Monitors with losses of the user: where the loss is evaluated, what its infimum is, and what is refused."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.diagnose.training import FAR
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

import lazyscope as ls
from lazyscope.diagnose import Monitor
from lazyscope.errors import InputError
from lazyscope.torch_loss import Given, understood


def net_of(outputs: int = 3, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).to(dtype)


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


CLASSES = torch.tensor([0, 1, 2, 1, 0, 2, 2, 1])


def watched(net: nn.Module, y: Any, loss: Any, x: Tensor | None = None, **options: Any) -> Monitor:
    return Monitor(net, inputs() if x is None else x, y, loss=loss, every=FAR, **options)


def criterion(net: nn.Sequential, alpha: float, centred: bool, risk: Callable[[Tensor], Tensor]) -> float:
    """F ‖D²h‖/(‖∇F‖ ‖Dh‖) of α(h - h(w₀)) or αh, with dense derivatives."""
    x, n = inputs(), 8
    w0 = torch.cat([p.detach().flatten() for p in net.parameters()])

    def g(w: Tensor) -> Tensor:
        parts = w.split([p.numel() for p in net.parameters()])
        named = {name: part.reshape(p.shape) for (name, p), part in zip(net.named_parameters(), parts, strict=True)}
        out: Tensor = functional_call(net, named, (x,))
        return alpha * (out - (net(x).detach() if centred else 0))

    first = jacrev(g)(w0).reshape(-1, len(w0))
    second = hessian(g)(w0).reshape(-1, len(w0), len(w0)).detach()
    u = torch.randn(100, len(w0), generator=torch.Generator().manual_seed(2), dtype=w0.dtype)
    u = u / u.norm(dim=1, keepdim=True)
    for _ in range(200):
        z = torch.einsum("kij,si,sj->sk", second, u, u)
        values, vectors = torch.linalg.eigh(torch.einsum("kij,sk->sij", second, z / z.norm(dim=1, keepdim=True)))
        u = vectors[torch.arange(len(u)), :, values.abs().argmax(1)]
    curvature = float(torch.einsum("kij,si,sj->sk", second, u, u).norm(dim=1).max()) / math.sqrt(n)
    start = g(w0).detach().requires_grad_()
    value = risk(start)
    (slope,) = torch.autograd.grad(value, start)
    norm = float(torch.linalg.matrix_norm(first.detach(), 2)) / math.sqrt(n)
    return float(value.detach()) * curvature / (float((first.detach().T @ slope.flatten()).norm()) * norm)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("name", ["smooth", "classes", "square", "lazyscope"])
def test_the_loss_of_a_scaled_module_is_taken_at_its_own_start(name: str, centred: bool, tmp_path: Path) -> None:
    y = torch.randn(8, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    target, loss, risk = {
        "smooth": (y, nn.SmoothL1Loss(beta=0.7), lambda out: F.smooth_l1_loss(out, y, beta=0.7)),
        "classes": (CLASSES, nn.CrossEntropyLoss(), lambda out: F.cross_entropy(out, CLASSES)),
        "square": (y, nn.MSELoss(), lambda out: F.mse_loss(out, y)),
        "lazyscope": (y, ls.loss.Huber(0.5), lambda out: F.huber_loss(out, y, delta=0.5)),
    }[name]
    net = net_of()
    monitor = watched(ls.Scaled(net, 3.0, centred=centred), target, loss)
    found = monitor.scale
    assert found is not None
    assert found.criterion == pytest.approx(criterion(net, 3.0, centred, risk), rel=1e-3)
    assert found.promises in monitor.report(tmp_path / "run.html").read_text()


def test_the_sign_and_the_target_of_a_loss_are_those_at_the_start_of_a_scaled_module() -> None:
    net, y = net_of(1), torch.randn(8, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        list(net.parameters())[3].add_(20.0)  # the loss is positive at h(w₀)

    def negative(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean() - y.square().mean() - 0.1

    monitor = watched(ls.Scaled(net, 2.0), y, negative)
    assert monitor.scale is None
    assert "negative at the start" in monitor.notes["scale"]

    def squeezed(out: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (out.squeeze(1) - y).square().mean()

    for centred in (True, False):
        scaled = ls.Scaled(net, 2.0, centred=centred)
        found, known = watched(scaled, y[:, 0], squeezed).scale, watched(scaled, y, ls.loss.Square()).scale
        assert found is not None
        assert known is not None
        assert found.kappa == pytest.approx(known.kappa, rel=1e-6)


def lowest(loss: Any, y: Tensor, start: Tensor) -> float:
    """The infimum by minimisation over the outputs."""
    out = start.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [out], max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        search.zero_grad()
        value: Tensor = loss(out, y)
        value.backward()
        return value

    search.step(closure)
    return float(loss(out, y).detach())


SOFT = torch.rand(8, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
COUNTS = torch.tensor([[0.0, 1.0, 10.0]] * 8, dtype=torch.float64)
WEIGHTS = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "y", "positive"),
    [
        (nn.BCEWithLogitsLoss(), SOFT, False),
        (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS, weight=WEIGHTS.flip(0)), SOFT, False),
        (nn.BCEWithLogitsLoss(reduction="sum"), SOFT.round(), False),
        (F.binary_cross_entropy_with_logits, SOFT, False),
        (nn.PoissonNLLLoss(), COUNTS, False),
        (nn.PoissonNLLLoss(full=True), COUNTS, False),
        (nn.PoissonNLLLoss(log_input=False), COUNTS + 1, True),
        (nn.PoissonNLLLoss(log_input=False, full=True, reduction="sum"), COUNTS + 1, True),
        (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), CLASSES, False),
        (nn.CrossEntropyLoss(weight=WEIGHTS), SOFT / SOFT.sum(1, keepdim=True), False),
        (nn.L1Loss(), SOFT, False),
        (nn.SmoothL1Loss(beta=0.3), SOFT, False),
    ],
)
def test_the_infimum_of_losses_of_pytorch_is_known(loss: Any, y: Tensor, positive: bool) -> None:
    start = torch.ones(8, 3, dtype=torch.float64) if positive else inputs() @ torch.ones(2, 3, dtype=torch.float64)
    known, _, words = understood(loss, y, start)
    assert isinstance(known, Given)
    assert known.lowest == pytest.approx(lowest(loss, y, start), abs=2e-4)
    assert known.lowest <= lowest(loss, y, start) + 1e-12
    assert f"{known.lowest:.4g}" in " ".join(words)
    excess = known.risk(start, start, 0).excess(start)
    assert float(excess) == pytest.approx(float(loss(start, y)) - known.lowest, rel=1e-9)


def test_the_criterion_of_counts_is_that_above_a_negative_infimum() -> None:
    net, y = net_of(1), torch.full((8, 1), 10.0, dtype=torch.float64)
    found = watched(net, y, nn.PoissonNLLLoss()).scale
    exact = criterion(net, 1.0, False, lambda out: F.poisson_nll_loss(out, y) - (10 - 10 * math.log(10)))
    assert found is not None
    assert found.criterion == pytest.approx(exact, rel=1e-3)
    own = watched(net, y, lambda out, y: F.poisson_nll_loss(out, y) + 20)
    assert "if it is smaller, the true criterion is larger" in own.notes["scale"]


@pytest.mark.parametrize(("loss", "y"), [(nn.BCEWithLogitsLoss(), 3.0), (nn.PoissonNLLLoss(), -1.0)])
def test_a_loss_that_is_unbounded_below_has_no_criterion(loss: nn.Module, y: float) -> None:
    monitor = watched(net_of(1), torch.full((8, 1), y, dtype=torch.float64), loss)
    assert monitor.scale is None
    assert "unbounded below" in monitor.notes["scale"]


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.HuberLoss(), nn.MSELoss()])
def test_weights_in_half_precision_are_measured_in_float32(loss: nn.Module) -> None:
    net, y = net_of(1, torch.bfloat16), (CLASSES > 0)[:, None]
    half = watched(net, y.bfloat16(), loss, inputs(torch.bfloat16)).initial
    full = watched(net, y.float(), loss, inputs(torch.bfloat16)).initial
    assert half.loss == full.loss
    assert half.sharpness == pytest.approx(full.sharpness, rel=1e-6)


def test_weights_of_classes_in_half_precision_are_cast_too() -> None:
    net, weight = net_of(3, torch.bfloat16), WEIGHTS.bfloat16()
    half = watched(net, CLASSES, nn.CrossEntropyLoss(weight), inputs(torch.bfloat16)).initial
    full = watched(net, CLASSES, nn.CrossEntropyLoss(weight.float()), inputs(torch.bfloat16)).initial
    assert half.loss == full.loss


@pytest.mark.parametrize("index", [-1, 255, -100])
@pytest.mark.parametrize("options", [{}, {"weight": WEIGHTS}, {"label_smoothing": 0.1}])
def test_the_ignored_index_is_that_of_the_loss(index: int, options: dict[str, Any]) -> None:
    y = CLASSES.clone()
    y[0] = index
    found = watched(net_of(), y, nn.CrossEntropyLoss(ignore_index=index, **options))
    counted = Monitor(net_of(), inputs()[1:], y[1:], loss=nn.CrossEntropyLoss(**options), every=FAR)
    assert found.initial.loss == pytest.approx(counted.initial.loss, rel=1e-9)
    assert math.isfinite(found.initial.alignment)
    assert found.scale is not None
    assert counted.scale is not None
    assert found.scale.at_start is not None
    assert counted.scale.at_start is not None
    assert found.scale.at_start.excess == pytest.approx(counted.scale.at_start.excess, rel=1e-9)
    assert found.scale.at_start.gradient == pytest.approx(counted.scale.at_start.gradient, rel=1e-9)


def test_indices_that_are_no_classes_only_leave_out_what_needs_them() -> None:
    def own(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, ignore_index=-1)

    y = CLASSES.clone()
    y[0] = -1
    monitor = watched(net_of(), y, own)
    assert math.isfinite(monitor.initial.sharpness)
    assert monitor.scale is not None
    assert "Class indices" in monitor.notes["alignment"]


@pytest.mark.parametrize("y", [(CLASSES > 0).long(), CLASSES > 0])
def test_one_output_has_no_classes(y: Tensor) -> None:
    def own(out: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out.squeeze(1), y.double())

    found = watched(net_of(1), y, own)
    known = watched(net_of(1), (CLASSES > 0).double()[:, None], nn.BCEWithLogitsLoss())
    assert found.scale is not None
    assert known.scale is not None
    assert found.scale.criterion == pytest.approx(known.scale.criterion, rel=1e-9)
    assert found.initial.alignment == pytest.approx(known.initial.alignment, rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "y", "remedy"),
    [
        (nn.MSELoss(), torch.ones(8, 2), "pass a function of"),
        (nn.CrossEntropyLoss(), torch.ones(8), "pass a function of"),
        (nn.CrossEntropyLoss(), CLASSES[:5], "pass a function of"),
        (nn.CrossEntropyLoss(), CLASSES + 5, "pass a function of"),
        (nn.CrossEntropyLoss(), CLASSES.int(), "pass a function of"),
        (nn.BCEWithLogitsLoss(), torch.ones(8, 3) > 0, "pass a function of"),
        (nn.MSELoss(reduction="none"), torch.ones(8, 3), "average it"),
        (nn.CrossEntropyLoss, CLASSES, "pass an object of it"),
        (ls.loss.CrossEntropy, CLASSES, "pass an object of it"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(loss: Any, y: Tensor, remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        watched(net_of(), y, loss)


def test_probabilities_that_are_rounded_have_a_note_instead_of_a_prediction() -> None:
    y = (SOFT / SOFT.sum(1, keepdim=True)).bfloat16()
    monitor = watched(net_of(), y, nn.CrossEntropyLoss())
    assert monitor.scale is None
    assert "do not sum to one" in monitor.notes["scale"]
    assert math.isfinite(monitor.initial.loss)


def test_a_loss_of_probabilities_needs_no_value_at_zero() -> None:
    net = net_of()

    def own(out: Tensor, y: Tensor) -> Tensor:
        return -out.log()[torch.arange(len(out)), y].mean()

    found = watched(nn.Sequential(*net, nn.Softmax(-1)), CLASSES, own).scale
    assert found is not None
    assert found.at_start is not None
    assert found.at_start.excess == pytest.approx(float(F.cross_entropy(net(inputs()), CLASSES).detach()), rel=1e-9)
    assert 0 < found.criterion < math.inf
    assert found.centred().criterion == math.inf


def test_a_loss_that_fails_later_does_not_end_the_run() -> None:
    net = net_of(1)

    def own(out: Tensor, y: Tensor) -> Tensor:
        if bool((out > 10).any()):
            raise ValueError("too large")
        return (out - y).square().mean()

    monitor = watched(net, torch.zeros(8, 1, dtype=torch.float64), own)
    with torch.no_grad():
        list(net.parameters())[3].fill_(20.0)
    assert math.isnan(monitor.look().loss)
    assert monitor.notes["loss"] == "own() fails (ValueError: too large)."


def test_notes_are_part_of_the_state() -> None:
    def own(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y)

    first = watched(net_of(), CLASSES, own)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert "assumes that it is 0" in first.notes["scale"]
    assert watched(net_of(), CLASSES, own, start=state).notes == first.notes
    del state["notes"]  # as in older versions
    assert str(watched(net_of(), CLASSES, own, start=state).scale) == str(first.scale)


def test_arguments_of_wrong_types_are_refused_without_the_checks_of_the_tests() -> None:
    """In another process, since the tests check types before the library can."""
    code = """if True:
        import torch, lazyscope as ls
        for options in {"loss": "mse"}, {"start": 3.0}:
            try:
                ls.Monitor(torch.nn.Linear(2, 3), torch.zeros(8, 2), torch.zeros(8, 3), **options)
            except ls.errors.InputError as error:
                print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert "pass a loss of lazyscope.loss" in first
    assert "as an int, or a state dict" in second
