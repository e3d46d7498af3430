"""Transport distances against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyscope.diagnose.transport import cone_distance, hellinger_kantorovich, wasserstein
from lazyscope.errors import InputError
from lazyscope.model.particles import Measure, Sphere, Torus

brief = settings(deadline=None, max_examples=20)
seeds = st.integers(0, 10_000)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spikes(angles: list[float], weights: list[float]) -> Measure:
    theta, masses = (torch.tensor(side, dtype=torch.float64) for side in (angles, weights))
    return Measure.of(Torus(1), theta[:, None], masses)


@brief
@given(seed=seeds, n=st.integers(1, 30))
def test_on_the_line_sorting_is_optimal(seed: int, n: int) -> None:
    x, y = draw(seed, n, 1), draw(seed + 1, n, 1)
    expected = (x.sort(0).values - y.sort(0).values).square().mean().sqrt()
    assert wasserstein(x, y) == pytest.approx(float(expected), abs=1e-7)


@brief
@given(seed=seeds, m=st.integers(1, 12), n=st.integers(1, 12), p=st.integers(1, 4))
def test_a_shift_is_a_distance(seed: int, m: int, n: int, p: int) -> None:
    """W₂ is translation: moving a cloud by v costs ‖v‖; repeating its points costs nothing."""
    x, way = draw(seed, m, p), draw(seed + 1, p)
    assert wasserstein(x, x + way) == pytest.approx(float(way.norm()), rel=1e-6)
    assert wasserstein(x, x.repeat(n, 1)) == pytest.approx(0, abs=1e-7)


def test_on_a_domain_distances_are_geodesic() -> None:
    assert wasserstein(torch.tensor([[0.1]]), torch.tensor([[2 * math.pi - 0.1]]), domain=Torus(1)) == pytest.approx(
        0.2, rel=1e-5
    )
    north, south = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.0, 0.0, -1.0]])
    assert wasserstein(north, south, domain=Sphere(3)) == pytest.approx(math.pi, rel=1e-6)


@brief
@given(angle=st.floats(0, 3.1), a=st.floats(0.1, 2), b=st.floats(0.1, 2))
def test_between_two_spikes_the_cone_says_how_far(angle: float, a: float, b: float) -> None:
    nu, other = spikes([0.0], [a**2]), spikes([angle], [b**2])
    expected = math.sqrt(a**2 + b**2 - 2 * a * b * math.cos(min(angle, math.pi / 2)))
    assert hellinger_kantorovich(nu, other) == pytest.approx(expected, abs=1e-4)
    assert cone_distance(nu, other) == pytest.approx(
        math.sqrt(max(a**2 + b**2 - 2 * a * b * math.cos(angle), 0)), abs=1e-7
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_cone_distance_bounds_the_other_which_is_a_distance(seed: int) -> None:
    nus = [Measure.of(Torus(1), 3 * draw(seed + k, 6, 1), draw(seed + k + 9, 6).abs()) for k in range(3)]
    ab, bc, ac = (hellinger_kantorovich(nus[i], nus[j]) for i, j in ((0, 1), (1, 2), (0, 2)))
    assert ab <= cone_distance(nus[0], nus[1]) + 1e-4
    assert ac <= ab + bc + 1e-4
    assert hellinger_kantorovich(nus[0], nus[0]) == pytest.approx(0, abs=1e-3)


def test_signs_and_nothing_at_all() -> None:
    assert hellinger_kantorovich(spikes([1.0], [1.0]), spikes([1.0], [-1.0])) == pytest.approx(math.sqrt(2))
    assert cone_distance(spikes([1.0], [1.0]), spikes([1.0], [-1.0])) == pytest.approx(2)
    assert hellinger_kantorovich(spikes([1.0], [4.0]), spikes([1.0], [0.0])) == pytest.approx(2)
    with pytest.raises(InputError, match="select one measure"):
        cone_distance(spikes([1.0], [1.0]).expand(2), spikes([1.0], [1.0]))
    with pytest.raises(InputError, match="domains"):
        cone_distance(spikes([1.0], [1.0]), Measure.grid(Sphere(2), 2))
