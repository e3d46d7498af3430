"""The moments of cubic targets equal quadrature, and the exact fit has no risk."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lazyscope.errors import InputError
from lazyscope.problem.cubic import Cubic
from lazyscope.problem.quadratic import gaussian


def quadrature(dim: int, nodes: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points and weights of a rule that is exact for polynomials of degree 2·nodes - 1 in each coordinate."""
    points, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(nodes))
    grid = torch.cartesian_prod(*[torch.arange(nodes)] * dim)
    return points[grid], (weights / weights.sum())[grid].prod(-1)


def test_moments_equal_quadrature() -> None:
    problem = Cubic(dim=3, directions=2)
    w = gaussian(3, 3, [0])[0]
    unit = torch.nn.functional.normalize(w, dim=-1)
    x, mass = quadrature(3)
    y, u = problem.target(x), x @ unit.mT
    features = (x[:, None, :] * (1 + 2 * u + 3 * u.square())[..., None]).flatten(1)
    features = features - mass @ features
    gram, overlaps = problem.moments(unit)
    torch.testing.assert_close((features.mT * mass) @ features, gram, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close((features.mT * mass) @ y, overlaps, rtol=1e-10, atol=1e-10)
    assert float(mass @ y.square()) == pytest.approx(1, abs=1e-12)
    a, pre = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64), x @ w.mT
    f = (pre + pre.square() + pre**3) @ a
    measured = mass @ (y - f + mass @ f).square()
    assert float(problem.network_risk(a, w)) == pytest.approx(float(measured), rel=1e-10)


def test_few_neurons_fit_what_the_tangent_class_does_not() -> None:
    problem = Cubic(dim=12, directions=2)
    assert float(problem.network_risk(*problem.exact_fit())) == pytest.approx(0, abs=1e-12)
    risks = [problem.neural_tangent(gaussian(12, 12, [0])[0][:count]) for count in (1, 6, 12)]
    assert 1 > risks[0] > risks[1] > risks[2] > 0.5


def test_refusals() -> None:
    with pytest.raises(InputError, match="pass 1 to dim"):
        Cubic(dim=3, directions=4)
    with pytest.raises(InputError, match="linearly dependent"):
        Cubic(dim=3, directions=1).neural_tangent(gaussian(9, 3, [0])[0])
