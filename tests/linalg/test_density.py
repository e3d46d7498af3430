"""Stochastic Lanczos: mass, moments, counts and shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lazyscope.linalg import Symmetric, spectral_density
from lazyscope.linalg.trace import signs

Hidden = Callable[[torch.Tensor], Symmetric]
Law = Callable[..., torch.Tensor]


def test_it_integrates_to_n_and_its_moments_are_exact_for_its_probes(hidden: Hidden, power_law: Law) -> None:
    matrix = power_law(150)
    operator = hidden(matrix)
    density = spectral_density(operator, probes=8, steps=10)
    assert density.moment(0) == pytest.approx((150, 0), abs=1e-10)
    z = signs(150, 8, 0, operator)
    power = torch.eye(150, dtype=torch.float64)
    for degree in range(1, 20):  # Gauss quadrature of 10 nodes is exact below degree 20
        power = power @ matrix
        assert density.moment(degree)[0] == pytest.approx(float((z * (power @ z)).sum(0).mean()), rel=1e-10)


def test_moments_and_counts_match_the_dense_spectrum_within_errors(hidden: Hidden, power_law: Law) -> None:
    matrix = power_law(400, -0.5)
    values = torch.linalg.eigvalsh(matrix)
    density = spectral_density(hidden(matrix), probes=30, steps=60)
    for degree in (1, 2, 3):
        value, error = density.moment(degree)
        assert abs(value - float((values**degree).sum())) < 4 * error
    for threshold in (0.08, 0.1, 0.2):
        value, error = density.above(threshold)
        assert abs(value - float((values > threshold).sum())) < 4 * error + 2  # a node stands for a few eigenvalues


def test_the_smooth_form_has_the_mass_and_the_shape(hidden: Hidden, power_law: Law) -> None:
    matrix = power_law(400, -0.5)
    values = torch.linalg.eigvalsh(matrix)
    density = spectral_density(hidden(matrix), probes=30, steps=80)
    at = torch.linspace(-0.5, 1.5, 4001, dtype=torch.float64)
    smooth = density.smooth(at, 0.02)
    assert float(torch.trapezoid(smooth, at)) == pytest.approx(400, rel=1e-6)
    exact = torch.exp(-0.5 * ((at[:, None] - values) / 0.02) ** 2).sum(1) / (0.02 * (2 * torch.pi) ** 0.5)
    assert float(torch.trapezoid((smooth - exact).abs(), at)) < 0.05 * 400


def test_large_eigenvalues_are_found_once(hidden: Hidden, power_law: Law) -> None:
    matrix = power_law(100, -2.0)
    density = spectral_density(hidden(matrix), probes=40, steps=100)
    value, error = density.above(0.5)
    assert abs(value - 1) < 4 * error
    assert int((density.nodes > 0.5).sum()) == 40, "without orthogonalisation Lanczos finds copies"


def test_an_exhausted_measure_ends_early(hidden: Hidden) -> None:
    q = torch.linalg.qr(torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    density = spectral_density(hidden(q @ q.T), probes=5, steps=20)  # eigenvalues 0 and 1 only
    assert density.moment(0)[0] == pytest.approx(30)
    heavy = density.nodes[density.weights > 1e-9]
    assert float(torch.minimum(heavy.abs(), (heavy - 1).abs()).max()) < 1e-12
    assert spectral_density(hidden(torch.zeros(4, 4)), probes=2).moment(0)[0] == pytest.approx(4)
