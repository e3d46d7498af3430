"""Ridge regression: kernel form, feature form and float32 against dense float64 solves; the choice of λ."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.linalg.ridge import feature_ridge, gaussian, gram, kernel_ridge, solve


def data(n: int, d: int, train: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features with mean 0 on the training rows, and two targets of them with noise."""
    random = torch.Generator().manual_seed(seed)
    features = torch.randn(n, d, generator=random, dtype=torch.float64) / torch.arange(1, d + 1)
    features -= features[:train].mean(0)
    weights = torch.randn(d, 2, generator=random, dtype=torch.float64)
    noise = torch.randn(n, 2, generator=random, dtype=torch.float64)
    return features, (features @ weights + 0.3 * noise + 5)[:train]


def reference(features: Tensor, y: Tensor, ridge: float) -> Tensor:
    """Least squares with one row more a feature, √(λs)·e_j against 0: the definition, without normal equations."""
    n, d = len(y), features.shape[1]
    scale = (ridge * features[:n].square().sum() / n).sqrt()
    rows = torch.cat([features[:n], scale * torch.eye(d, dtype=y.dtype)])
    targets = torch.cat([y - y.mean(0), torch.zeros(d, y.shape[1], dtype=y.dtype)])
    found: Tensor = features @ torch.linalg.lstsq(rows, targets).solution + y.mean(0)
    return found


@given(
    n=st.integers(5, 40),
    d=st.integers(1, 30),
    exponent=st.floats(-4, 2),
    blocks=st.integers(1, 7),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_both_forms_are_the_definition(n: int, d: int, exponent: float, blocks: int, seed: int) -> None:
    features, y = data(n + 6, d, n, seed)
    ridge = 10.0**exponent
    exact = reference(features, y, ridge)
    kernel = gram(features.split(blocks, dim=1))
    torch.testing.assert_close(kernel, features @ features.T)
    for found in (kernel_ridge(kernel, y, ridges=[ridge]), feature_ridge(features, y, ridges=[ridge])):
        torch.testing.assert_close(found.outputs, exact, rtol=1e-6, atol=1e-6)
        assert found.ridge == ridge
        assert found.errors == {}


def test_float32_is_float64_to_its_precision() -> None:
    """Outputs are off by the rounding of K times its coefficients, Σ_j ε|K_ij||c_j|: about 10⁻⁵ for this λ."""
    features, y = data(400, 60, 300)
    exact = kernel_ridge(features @ features.T, y, ridges=[0.1]).outputs
    single, target = features.float(), y.float()
    for found in (kernel_ridge(gram([single]), target, ridges=[0.1]), feature_ridge(single, target, ridges=[0.1])):
        torch.testing.assert_close(found.outputs.double(), exact, rtol=0, atol=1e-4)


def test_lambda_is_the_best_on_the_rows_held_out() -> None:
    features, y = data(220, 100, 200)
    ridges = [1e-6, 1e-3, 1e-1, 1e2]
    found = kernel_ridge(features @ features.T, y, ridges=ridges)
    by_hand = {}
    for ridge in ridges:
        kept = reference(features, y[:180], ridge)  # scale and mean are those of the rows kept
        by_hand[ridge] = float((kept[180:200] - y[180:]).square().sum(-1).mean())
    assert found.errors == pytest.approx(by_hand, rel=1e-5)
    assert found.ridge == min(by_hand, key=lambda ridge: by_hand[ridge])
    assert found.ridge not in (ridges[0], ridges[-1])  # neither noise nor nothing is fitted
    torch.testing.assert_close(found.outputs, reference(features, y, found.ridge), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(feature_ridge(features, y, ridges=ridges).outputs, found.outputs, rtol=1e-6, atol=1e-6)


def test_the_error_to_choose_by_is_the_callers() -> None:
    features, y = data(220, 100, 200)

    def prefers_small_outputs(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets.mean(0)).square().mean()

    found = kernel_ridge(features @ features.T, y, ridges=[1e-3, 1e3], error=prefers_small_outputs)
    assert found.ridge == 1e3


def test_a_ridge_below_the_precision_never_wins() -> None:
    """Rounding makes the float32 kernel indefinite; the fit goes on by conjugate gradients, and stays finite."""
    features, y = data(220, 10, 200)
    found = kernel_ridge(gram([features.float()]), y.float(), ridges=[1e-12, 1e-3])
    assert bool(found.outputs.isfinite().all())
    assert float((found.outputs[:200] - y).square().mean()) < 0.2


def test_without_room_for_a_factor_conjugate_gradients_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    features, y = data(60, 20, 60)
    matrix = features @ features.T
    exact = solve(matrix, y, 0.1)

    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.linalg, "cholesky_ex", full)
    torch.testing.assert_close(solve(matrix, y, 0.1), exact, rtol=1e-7, atol=1e-7)


def test_gaussian_kernel_is_its_definition() -> None:
    features, _ = data(30, 5, 20)
    distances = torch.cdist(features, features).square()
    mean = distances[:20, :20].sum() / (20 * 19)
    kernel = features @ features.T
    found = gaussian(kernel, train=20, width=0.7)
    assert found.data_ptr() == kernel.data_ptr()  # a kernel that fills half of the memory has no room for a second
    torch.testing.assert_close(found, torch.exp(-distances / (0.7 * mean)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "targets", "ridges", "word"),
    [
        (torch.eye(3), torch.ones(4, 1), [1.0], "first rows"),
        (torch.eye(3), torch.ones(1, 1), [1.0], "at least two"),
        (torch.eye(3), torch.ones(3, 1, dtype=torch.float64), [1.0], "convert one"),
        (torch.eye(3), torch.ones(3, 1), [], "positive"),
        (torch.eye(3), torch.ones(3, 1), [0.0], "positive"),
    ],
)
def test_bad_input_is_refused(rows: Tensor, targets: Tensor, ridges: list[float], word: str) -> None:
    for form in (kernel_ridge, feature_ridge):
        with pytest.raises(InputError, match=word):
            form(rows, targets, ridges=ridges)
    with pytest.raises(InputError, match="at least one block"):
        gram([])
