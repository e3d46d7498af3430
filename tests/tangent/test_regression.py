"""Kernel regression in memory, against fits by other means."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.errors import InputError
from lazyscope.tangent.operator import as_matrix

DIGITS = load_digits()
Outputs = Literal["full", "trace", "sum"]
N, K = 14, 3


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, K)).double()


def points(n: int = N, seed: int = 1) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets(n: int = N, sets: tuple[int, ...] = ()) -> Tensor:
    return 2 + torch.randn(n, K, *sets, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def by_hand(x: Tensor, y: Tensor, new: Tensor, ridge: float, outputs: Outputs, mean: Tensor, shift: float) -> Tensor:
    """Fit and predict with dense matrices, one set of targets."""
    kernel, cross = (ls.tangent_kernel(network(), each, x, outputs=outputs) for each in (x, new))
    if outputs == "full":
        matrix = as_matrix(kernel)
        c = torch.linalg.solve(matrix + shift * torch.eye(len(matrix)).double(), (y - mean).flatten())
        whole: Tensor = as_matrix(cross) @ c
        return whole.view(len(new), K) + mean
    each: Tensor = cross @ torch.linalg.solve(kernel + shift * torch.eye(len(x)).double(), y - mean)
    return each + mean


def shift_of(x: Tensor, ridge: float, outputs: Outputs) -> float:
    kernel = ls.tangent_kernel(network(), x, outputs=outputs)
    matrix = as_matrix(kernel) if outputs == "full" else kernel
    return ridge * float(matrix.trace()) / len(matrix)


@pytest.mark.parametrize("ridge", [1e-2, 0.0])
@pytest.mark.parametrize("outputs", ["full", "trace", "sum"])
def test_it_is_the_fit_by_hand(outputs: Outputs, ridge: float) -> None:
    x, y, new = points(), targets(), points(5, 7)
    fit = ls.kernel_regression(network(), x, y, ridge=ridge, outputs=outputs)
    true = by_hand(x, y, new, ridge, outputs, y.mean(0), shift_of(x, ridge, outputs))
    torch.testing.assert_close(fit.predict(new), true, rtol=1e-6, atol=1e-8)
    if ridge == 0:
        torch.testing.assert_close(fit.predict(x), y, rtol=1e-6, atol=1e-8)
    kernels = [ls.tangent_kernel(network(), each, x, outputs=outputs) for each in (x, new)]
    given = ls.kernel_regression(kernels[0], None, y, ridge=ridge)
    torch.testing.assert_close(given.predict(kernels[1]), fit.predict(new))


@pytest.mark.parametrize("outputs", ["full", "trace"])
def test_points_that_are_left_out_are_predicted_as_by_a_fit_without_them(outputs: Outputs) -> None:
    x, y, ridge = points(), targets(), 1e-2
    fit = ls.kernel_regression(network(), x, y, ridge=ridge, outputs=outputs)
    shift = shift_of(x, ridge, outputs)
    for i in range(N):
        others = torch.arange(N) != i
        true = by_hand(x[others], y[others], x[i : i + 1], ridge, outputs, y.mean(0), shift)
        torch.testing.assert_close(fit.leave_one_out[i], true[0], rtol=1e-7, atol=1e-9)


def test_generalised_cross_validation_is_its_definition() -> None:
    x, y, ridge = points(), targets(), 1e-2
    fit = ls.kernel_regression(network(), x, y, ridge=ridge, outputs="full")
    kernel, shift = as_matrix(ls.tangent_kernel(network(), x)), shift_of(x, ridge, "full")
    freedom = float(torch.trace(kernel @ torch.linalg.inv(kernel + shift * torch.eye(N * K).double())))
    loss = float((fit.predict(x) - y).square().sum()) / (2 * N)
    assert fit.gcv == pytest.approx(loss / (1 - freedom / (N * K)) ** 2, rel=1e-8)


def test_the_lazy_limit_of_centred_targets_is_the_fit_with_the_whole_kernel() -> None:
    x, y, new = points(6), targets(6) - targets(6).mean(0), points(5, 7)
    solved = ls.tangent_solve(network(), x, y, centred=True)
    fit = ls.kernel_regression(network(), x, y, outputs="full")
    torch.testing.assert_close(fit.predict(new), solved.predict(new), rtol=1e-5, atol=1e-6)


def test_the_kernel_after_training_is_that_of_the_trained_weights() -> None:
    x, y = points(), targets()
    trained = network(5)
    moved = ls.Model(network()).at(dict(trained.named_parameters()))
    after = ls.kernel_regression(moved, x, y, ridge=1e-3)
    torch.testing.assert_close(after.predict(x), ls.kernel_regression(trained, x, y, ridge=1e-3).predict(x))


def test_classes_and_several_sets() -> None:
    x, classes = points(), torch.arange(N) % K
    rows = nn.functional.one_hot(classes, K).double()
    for outputs in ("full", "trace"):
        fit = ls.kernel_regression(network(), x, classes, ridge=0.1, outputs=outputs)
        torch.testing.assert_close(
            fit.predict(x),
            ls.kernel_regression(network(), x, rows, ridge=0.1, outputs=outputs).predict(x),
        )
        many = ls.kernel_regression(network(), x, targets(sets=(2,)), ridge=0.1, outputs=outputs)
        assert many.predict(x).shape == many.leave_one_out.shape == (N, K, 2)
        one = ls.kernel_regression(network(), x, targets(sets=(2,))[..., 1], ridge=0.1, outputs=outputs)
        torch.testing.assert_close(many.leave_one_out[..., 1], one.leave_one_out)
    kernel = ls.tangent_kernel(network(), x, outputs="trace")
    assert ls.kernel_regression(kernel, None, classes, ridge=0.1).predict(kernel).shape == (N, K)


def test_a_singular_kernel_is_interpolated_with_the_smallest_norm() -> None:
    net = nn.Linear(2, 1).double()
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).double()
    fit = ls.kernel_regression(net, x, [[1.0], [2.0], [3.0]])
    torch.testing.assert_close(fit.predict(x), torch.tensor([[2.0], [2.0], [2.0]]).double())
    with pytest.raises(InputError, match="pass a ridge"):
        _ = fit.leave_one_out


@pytest.mark.parametrize("seed", range(4))
def test_rounding_of_a_singular_kernel_is_not_interpolated(seed: int) -> None:
    """With rows that add up to 1, five features and six points, an eigenvalue of the kernel is rounding."""
    torch.manual_seed(seed)
    x, new = (torch.rand(n, 5, dtype=torch.float64).softmax(1) for n in (6, 4))
    net, y = nn.Linear(5, 1), torch.randn(6, 1).double()
    rough = ls.kernel_regression(net, x.float(), y)
    assert rough.solution.x.abs().max() < 1e4
    predicted = rough.predict(new.float())
    exact = ls.kernel_regression(net.double(), x, y)
    expected = exact.predict(new)
    assert float((predicted - expected).norm() / expected.norm()) < 0.02
    design = torch.cat([x, torch.ones(6, 1)], 1)
    solved = torch.linalg.pinv(design, rtol=1e-10) @ (y - y.mean())
    truth = torch.cat([new, torch.ones(4, 1)], 1) @ solved + y.mean()
    torch.testing.assert_close(expected, truth, rtol=1e-8, atol=1e-8)
    for fit in (rough, exact):
        with pytest.raises(InputError, match="pass a ridge"):
            _ = fit.leave_one_out
        with pytest.raises(InputError, match="pass a ridge"):
            _ = fit.gcv


def test_rounding_with_a_tiny_ridge_is_not_interpolated() -> None:
    """Two equal inputs with different targets."""
    for seed in range(8):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
        x, new, y = torch.randn(8, 4), torch.randn(5, 4), torch.randn(8, 1).double()
        x[1] = x[0]
        rough = ls.kernel_regression(net, x, y, ridge=1e-9)
        exact = ls.kernel_regression(net.double(), x.double(), y, ridge=1e-9).predict(new.double())
        assert float((rough.predict(new) - exact).norm() / exact.norm()) < 1e-3, seed


def test_points_are_left_out_of_the_kernel_that_is_fitted() -> None:
    """The two halves of a kernel in float32 differ by rounding; the fit uses their mean, and so does its inverse."""
    random = torch.Generator().manual_seed(0)
    some = torch.randn(30, 30, generator=random, dtype=torch.float64)
    kernel = some @ some.T / 30 + 0.01 * torch.eye(30, dtype=torch.float64)
    rough = kernel * (1 + 1e-7 * torch.randn(30, 30, generator=random, dtype=torch.float64))
    y = torch.randn(30, 1, generator=random, dtype=torch.float64)
    one, mean = (ls.kernel_regression(each, None, y, ridge=1e-6) for each in (rough, (rough + rough.T) / 2))
    torch.testing.assert_close(one.leave_one_out, mean.leave_one_out, rtol=1e-10, atol=1e-12)
    assert one.gcv == pytest.approx(mean.gcv, rel=1e-10)
    kernel[0, 1] += 0.05
    with pytest.raises(InputError, match="not symmetric"):
        ls.kernel_regression(kernel, None, y)


def test_accuracy_and_shifted_labels() -> None:
    """Labels 0.9 and -0.1 give the same classes as one-hot labels."""
    random = torch.Generator().manual_seed(0)
    x, new = (torch.randn(n, 4, generator=random, dtype=torch.float64) for n in (60, 20))
    classes, labels = x[:, :3].argmax(1), new[:, :3].argmax(1)
    kernel, cross = x @ x.T + (x @ x.T) ** 3, new @ x.T + (new @ x.T) ** 3
    kernel = kernel + 1e-9 * torch.randn(60, 60, generator=random, dtype=torch.float64)  # symmetric to rounding only
    for ridge in (0.0, 1e-3):
        fit = ls.kernel_regression(kernel.float(), None, classes, ridge=ridge)
        shifted = ls.kernel_regression(kernel.float(), None, nn.functional.one_hot(classes, 3) - 0.1, ridge=ridge)
        assert torch.equal(fit.predict(cross).argmax(1), shifted.predict(cross).argmax(1))
        expected = float((fit.predict(cross).argmax(1) == labels).double().mean())
        assert fit.accuracy(cross, labels) == shifted.accuracy(cross, labels.numpy()) == expected
        assert expected > 0.5
    with pytest.raises(InputError, match="class indices"):
        fit.accuracy(cross, labels.double())


def test_the_kernel_is_converted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ls.tangent_kernel(network(), points(), outputs="trace")
    whole = ls.kernel_regression(kernel, None, targets(), ridge=0.1)
    before = kernel.clone()
    monkeypatch.setattr("lazyscope.tangent.regression._PART", 3)
    parts = ls.kernel_regression(kernel, None, targets(), ridge=0.1)
    torch.testing.assert_close(parts.predict(kernel), whole.predict(kernel), rtol=1e-12, atol=1e-12)
    assert torch.equal(kernel, before), "the factorisation in place does not change the kernel of the caller"


@pytest.mark.parametrize("ridge", [-1.0, math.nan, math.inf])
def test_misuse_is_refused_with_a_remedy(ridge: float) -> None:
    with pytest.raises(InputError, match="non-negative, finite"):
        ls.kernel_regression(network(), points(), targets(), ridge=ridge)
    with pytest.raises(InputError, match="pass them as `x`"):
        ls.kernel_regression(network(), None, targets())
    with pytest.raises(InputError, match="not one of n points with themselves"):
        ls.kernel_regression(torch.zeros(3, 2), None, targets(3))
    fit = ls.kernel_regression(torch.eye(N), None, targets())
    with pytest.raises(InputError, match="pass the kernel between the new points"):
        fit.predict(points())


@pytest.mark.parametrize(
    ("kernel", "match"),
    [
        (torch.eye(4).index_fill(0, torch.tensor(0), math.nan), "NaN"),
        (torch.eye(4) * math.inf, "NaN"),
        (-torch.eye(4), "positive"),
        (torch.zeros(4, 4), "positive"),
        (torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.5])), "below zero"),
        (torch.ones(4, 4) - 0.9 * torch.eye(4), "below zero"),
        (torch.eye(4, dtype=torch.complex128), "floats"),
        (torch.eye(4, dtype=torch.int64), "floats"),
        (torch.zeros(0, 0), "at least one point"),
    ],
)
def test_matrices_that_are_not_kernels_are_refused(kernel: Tensor, match: str) -> None:
    with pytest.raises(InputError, match=match):
        ls.kernel_regression(kernel, None, torch.randn(len(kernel), 1))


def test_a_ridge_may_outweigh_a_negative_eigenvalue() -> None:
    kernel, y = torch.diag(torch.tensor([1.0, 1.0, 1.0, -0.01])).double(), torch.arange(4.0).double()
    fit = ls.kernel_regression(kernel, None, y, ridge=0.1)
    shifted = kernel + 0.1 * float(kernel.trace()) / 4 * torch.eye(4).double()
    torch.testing.assert_close(fit.solution.x[:, 0], torch.linalg.solve(shifted, y - y.mean()))


def test_a_kernel_with_a_graph_is_detached() -> None:
    kernel = torch.eye(4, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[1.0], [-1.0], [2.0], [0.0]], dtype=torch.float64)
    fit = ls.kernel_regression(kernel, None, y)
    torch.testing.assert_close(fit.predict(torch.eye(4).double()), y)
    assert not fit.solution.x.requires_grad


def test_a_model_without_points_or_gradients_is_refused() -> None:
    with pytest.raises(InputError, match="at least one"):
        ls.kernel_regression(network(), points()[:0], targets(0))
    net = nn.Linear(3, 1, bias=False)
    with pytest.raises(InputError, match="positive"):
        ls.kernel_regression(net, torch.zeros(2, 3), [[1.0], [2.0]])


@pytest.mark.parametrize("fit", [ls.kernel_regression, ls.tangent_solve, ls.tangent_sgd])
def test_wrong_labels_are_refused_with_a_remedy_that_exists(fit: Callable[..., object]) -> None:
    with pytest.raises(InputError, match=r"0 … 2, but one is -1; relabel them, or leave out"):
        fit(network(), points(4), torch.tensor([0, 1, 2, -1]))
    with pytest.raises(InputError, match="real"):
        fit(network(), points(4), targets(4) * 1j)


def test_a_fit_in_float32_is_exact_or_refused() -> None:
    """Repeated points make a kernel singular; its small eigenvalues are far above rounding, and cannot be left out."""
    x, y = DIGITS.data / 16, torch.tensor(DIGITS.target)
    rows = torch.randint(0, 1000, (300,), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    seen, unseen = torch.tensor(x)[rows], torch.tensor(x)[1200:1300]
    exact = ls.kernel_regression(net, seen, y[rows], ridge=1e-5).predict(unseen)
    with pytest.raises(InputError, match=r"too small for an exact fit in float32; pass the model .* in float64"):
        ls.kernel_regression(net.float(), seen.float(), y[rows])
    rounded = ls.kernel_regression(net.float(), seen.float(), y[rows], ridge=1e-5).predict(unseen.float())
    assert (rounded - exact).norm() < 1e-2 * exact.norm()
    noise = torch.randn(40, 1, generator=torch.Generator().manual_seed(1))
    few = ls.kernel_regression(nn.Linear(4, 1), points(40).float(), noise, ridge=0.0)  # of rank 5, which float32 shows
    assert float(few.solution.residuals.max()) > 0.5


def test_points_are_left_out_exactly_or_not_at_all() -> None:
    """With more points than parameters, a small ridge changes nothing until rounding makes the kernel singular."""
    x, y = points(60), torch.randn(60, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    fits = {ridge: ls.kernel_regression(nn.Linear(4, 1).double(), x, y, ridge=ridge) for ridge in (1e-6, 1e-7, 1e-11)}
    assert fits[1e-7].gcv == pytest.approx(fits[1e-6].gcv, rel=1e-3)
    torch.testing.assert_close(fits[1e-7].leave_one_out, fits[1e-6].leave_one_out, rtol=1e-3, atol=1e-3)
    for name in ("gcv", "leave_one_out"):
        with pytest.raises(InputError, match="singular up to rounding, so that no point can be left out"):
            getattr(fits[1e-11], name)
