"""Maximum margins against other solvers, brute force and duality."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from sklearn.svm import SVC
from torch import Tensor

from lazyscope.data.clusters import Clusters
from lazyscope.errors import InputError
from lazyscope.theory.margin import conjugate_kernel, kernel_svm, svm, variation_margin
from lazyscope.theory.margin.sphere import climb, extremes, value


def separable(seed: int, n: int = 20, dim: int = 3) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=random, dtype=torch.float64)
    y = torch.where(torch.rand(n, generator=random, dtype=torch.float64) < 0.5, -1.0, 1.0).double()
    x[:, 0] = y * (0.1 + x[:, 0].abs())
    return x, y


def clusters(seed: int, n: int) -> tuple[Tensor, Tensor]:
    x, y = Clusters.draw(3, 3, [seed]).sample(n)
    return x[0].double(), y[0].double()


@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(1, 6), st.floats(0.01, 100))
@settings(max_examples=30, deadline=None)
def test_svm_is_certified_and_scales(seed: int, n: int, dim: int, scale: float) -> None:
    x, y = separable(seed, n, dim)
    found, scaled = svm(x, y), svm(scale * x, y)
    assert abs(found.gap) <= 1e-8
    assert found.attained >= 0.1 - 1e-9
    assert float((y * (x @ found.coefficients)).min()) == pytest.approx(found.attained, rel=1e-9)
    assert scaled.attained == pytest.approx(scale * found.attained, rel=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_svm_is_libsvms(seed: int) -> None:
    """The intercept of LIBSVM is 0 if the data contain the mirror image of every sample."""
    x, y = separable(seed)
    machine = SVC(kernel="linear", C=1e6, tol=1e-8).fit(torch.cat([x, -x]).numpy(), torch.cat([y, -y]).numpy())
    assert svm(x, y).attained == pytest.approx(1 / np.linalg.norm(machine.coef_), rel=1e-4)


def test_kernel_svm_of_a_linear_kernel_is_the_svm() -> None:
    x, y = separable(5)
    plain, kernel = svm(x, y), kernel_svm(x @ x.T, y)
    assert kernel.attained == pytest.approx(plain.attained, rel=1e-6)
    torch.testing.assert_close(x.T @ kernel.coefficients, plain.coefficients, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kernel.dual[plain.dual == 0], torch.zeros(int((plain.dual == 0).sum())).double())


def test_conjugate_kernel_is_an_average_of_neurons() -> None:
    x, _ = clusters(0, 5)
    a = torch.randn(400_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    products = (x @ a.T).relu()
    sampled = products @ products.T / len(a)
    torch.testing.assert_close(conjugate_kernel(x, x), sampled, rtol=0.02, atol=0)


def test_margin_of_many_random_features_is_the_limits() -> None:
    """The margin on m features converges to that of the limit kernel, the margin of F₂."""
    x, y = clusters(1, 24)
    limit = kernel_svm(conjugate_kernel(x, x), y)
    off = []
    for m in (300, 30_000):
        a = torch.randn(m, 3, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
        phi = (x @ a.T).relu() / m**0.5
        off.append(abs(kernel_svm(phi @ phi.T, y).attained / limit.attained - 1))
    assert off[1] < 0.02
    assert off[1] < off[0]


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_extremes_beat_every_direction(seed: int, n: int, dim: int, degenerate: bool) -> None:
    """The maximum is that over 20 000 directions and local searches, also with repeated, opposite and zero samples."""
    random = np.random.default_rng(seed)
    x, c = random.standard_normal((n, dim)), random.standard_normal(n)
    if degenerate:
        x, c = np.concatenate([x, 2 * x[:1], -x[:1], 0 * x[:1]]), np.concatenate([c, random.standard_normal(3)])
    found, g = extremes(x, c)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(g, value(found, x, c))
    directions = random.standard_normal((20_000, dim))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    tried = np.abs(value(directions, x, c))
    best = float(np.abs(g).max())
    assert best >= tried.max() - 1e-12
    climbed = float(np.abs(climb(x, c, directions[np.argsort(-tried)[:50]])[1]).max())
    assert climbed <= best + 1e-9
    assert climbed >= 0.999 * best  # a local search attains it


def test_variation_margin_in_the_plane_is_a_dense_program() -> None:
    """The margin equals that of the linear program on 4000 directions of the circle."""
    random = torch.Generator().manual_seed(3)
    x = torch.cat([torch.ones(10, 1), 2 * torch.rand(10, 1, generator=random) - 1], dim=1).double()
    y = torch.where(torch.rand(10, generator=random) < 0.5, -1.0, 1.0).double()
    angle = np.linspace(0, 2 * np.pi, 4000, endpoint=False)
    phi = np.maximum(x.numpy() @ np.stack([np.cos(angle), np.sin(angle)]), 0) * y.numpy()[:, None]
    rows = np.block([[-phi, phi, np.ones((10, 1))], [np.ones((1, 8000)), np.zeros((1, 1))]])
    cost, limits = np.append(np.zeros(8000), -1.0), [(0, None)] * 8000 + [(None, None)]
    dense = -linprog(cost, A_ub=rows, b_ub=np.append(np.zeros(10), 1.0), bounds=limits).fun
    found = variation_margin(x, y)
    assert found.proved
    assert 0 <= found.gap <= 1e-6
    assert dense <= found.bound + 1e-9
    assert found.attained == pytest.approx(dense, rel=3e-3)  # the error of the grid


@pytest.mark.parametrize("seed", range(3))
def test_variation_margin_is_attained_and_certified(seed: int) -> None:
    x, y = clusters(seed, 40)
    found = variation_margin(x, y, tolerance=1e-7)
    assert found.proved
    assert found.neurons is not None
    assert 0 <= found.gap <= 1e-7
    assert float(found.coefficients.abs().sum()) == pytest.approx(1)
    outputs = (x @ found.neurons.T).relu() @ found.coefficients
    assert float((y * outputs).min()) == pytest.approx(found.attained, rel=1e-9)
    assert float(found.dual.sum()) == pytest.approx(1)
    slack = y * outputs - found.attained  # complementary slackness: p is supported on the samples of smallest margin
    assert float((found.dual * slack).sum()) <= 1e-6 * found.attained
    # ‖f‖_{F₂} ≥ ‖f‖_{F₁} for neurons on the sphere, so F₂ cannot have the larger margin.
    assert kernel_svm(conjugate_kernel(x, x) / 3, y).attained <= found.bound


@given(st.integers(0, 1000), st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_no_net_has_more_than_the_bound(seed: int, m: int) -> None:
    x, y = clusters(0, 12)
    bound = BOUND.setdefault(0, variation_margin(x, y).bound)
    random = torch.Generator().manual_seed(seed)
    phi = (x @ torch.nn.functional.normalize(torch.randn(m, 3, generator=random).double(), dim=-1).T).relu()
    c = torch.linalg.lstsq(phi, y[:, None], driver="gelsd").solution[:, 0]
    assert float((y * (phi @ c)).min()) <= bound * (1 + 1e-12) * float(c.abs().sum())


BOUND: dict[int, float] = {}


def test_higher_dimension_is_solved_but_not_proved() -> None:
    x, y = (part[0].double() for part in Clusters.draw(2, 5, [0]).sample(20))
    found = variation_margin(x, y, starts=200)
    assert not found.proved
    assert 0 <= found.gap <= 1e-6
    random = torch.nn.functional.normalize(torch.randn(100_000, 5, generator=torch.Generator().manual_seed(1)), dim=-1)
    assert float(((x @ random.double().T).relu().T @ (found.dual * y)).abs().max()) <= found.bound


def test_one_sample() -> None:
    x, y = torch.tensor([[3.0, 4.0]]), torch.tensor([-1.0])
    assert variation_margin(x, y).attained == pytest.approx(5)
    assert svm(x, y).attained == pytest.approx(5)
    assert kernel_svm(conjugate_kernel(x, x), y).attained == pytest.approx(math.sqrt(12.5), rel=1e-3)


@pytest.mark.parametrize("solve", [svm, variation_margin, lambda x, y: kernel_svm(x @ x.T, y)])
def test_what_no_classifier_separates_is_refused(solve: object) -> None:
    assert callable(solve)
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    with pytest.raises(InputError, match="separates"):
        solve(x, torch.tensor([1.0, -1.0]))
    with pytest.raises(InputError, match="2 \\* y - 1"):
        solve(x, torch.tensor([0.0, 1.0]))
    with pytest.raises(InputError, match="NaN"):
        solve(x * math.nan, torch.tensor([1.0, -1.0]))


def test_a_kernel_must_be_symmetric() -> None:
    with pytest.raises(InputError, match="symmetric"):
        kernel_svm(torch.tensor([[1.0, 0.5], [0.0, 1.0]]), torch.tensor([1.0, -1.0]))
