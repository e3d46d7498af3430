"""A student and its tangent model: coordinates against autograd, the draw of Figure 1, and lazy training."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyscope.app.compute.student import Lesson, Pair, circle_teacher, student, teach
from lazyscope.errors import InputError
from lazyscope.flow.descent import gradient_descent
from lazyscope.loss import Huber, Logistic, Loss, Square
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import Teacher


@given(st.integers(0, 10**6), st.floats(0.01, 100), st.booleans())
@settings(deadline=None, max_examples=25)
def test_pair_is_the_net_and_its_tangent(seed: int, alpha: float, symmetrised: bool) -> None:
    net = student(6, seed, symmetrised=symmetrised)
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 2, generator=random, dtype=torch.float64)
    v = {name: torch.randn(2, *w.shape, generator=random, dtype=torch.float64) for name, w in net.params.items()}
    seen = Pair(net).coordinates(x, alpha).outputs(v)

    def h(w: dict[str, torch.Tensor]) -> torch.Tensor:
        return alpha * torch.relu(x @ w["b"].mT) @ w["a"]

    own = h({name: w + v[name][0] / alpha for name, w in net.params.items()})
    value, slope, *_ = torch.func.jvp(h, (net.params,), ({name: v[name][1] / alpha for name in v},))
    assert torch.allclose(seen[0], own, rtol=1e-9, atol=1e-9)
    assert torch.allclose(seen[1], value + slope, rtol=1e-9, atol=1e-9)


def test_a_pair_is_one_net_at_one_scale() -> None:
    x = torch.ones(1, 2, dtype=torch.float64)
    for net, alpha in ((student(4, 0, symmetrised=True), math.inf), (TwoLayer.circle(4, [0, 1]).to(x.dtype), 1.0)):
        with pytest.raises(InputError, match="one network at one finite α"):
            Pair(net).coordinates(x, alpha)


@pytest.mark.parametrize("seed", range(5))
def test_teacher_and_samples_are_those_of_the_cover(seed: int) -> None:
    problem, teacher = Teacher.draw(2, 15, 1000, [seed]), circle_teacher(3, seed)
    assert torch.equal(teacher.a, problem.answer.a[0].double())
    assert torch.equal(teacher.b, problem.answer.b[0].double())
    seen = lesson(1.0, seed=seed, steps=2)
    assert torch.equal(seen.x, problem.x[0].double())
    assert torch.allclose(seen.y, problem.y[0].double(), atol=1e-6)


def lesson(
    tau: float,
    *,
    loss: Loss | None = None,
    symmetrised: bool = True,
    seed: int = 9,
    steps: int = 300,
) -> Lesson:
    net = student(20, seed, symmetrised=symmetrised)
    return teach(
        net,
        circle_teacher(3, seed),
        loss or Square(),
        samples=15,
        seed=seed,
        alpha=tau**2,
        steps=steps,
        frames=12,
    )


@pytest.mark.parametrize("loss", [Square(), Logistic(), Huber(0.5)])
@pytest.mark.parametrize("symmetrised", [True, False])
def test_both_start_from_one_function_and_learn(loss: Loss, symmetrised: bool) -> None:
    seen = lesson(0.5, loss=loss, symmetrised=symmetrised)
    assert torch.allclose(seen.function[0, 0], seen.function[0, 1])
    assert not bool(seen.function[0].any()) or not symmetrised
    assert bool((seen.loss[-1] < 0.5 * seen.loss[0]).all())
    assert seen.diverged == (False, False)
    assert float(seen.displacement[0]) == 0
    assert float(seen.drift[0]) == 0
    assert float(seen.stability[0]) == 1


def test_a_lazy_student_is_its_tangent_model() -> None:
    far = lesson(30.0)
    assert far.scale.kappa < 1e-3
    assert far.displacement[-1] < 1e-3
    assert far.drift[-1] < 1e-4
    assert float(far.stability[-1]) == 1
    gaps = []
    for alpha in (1e2, 1e4):  # with equal step sizes both are equal up to O(1/α)
        net = student(20, 9, symmetrised=True)
        path = gradient_descent(Pair(net), Square(), far.x, far.y, alpha=alpha, lr=0.1, steps=100, record=2)
        gaps.append(float((path.outputs[-1, 0] - path.outputs[-1, 1]).abs().max()))
    assert gaps[1] < 1e-4
    assert gaps[0] / gaps[1] > 50


def test_kappa_falls_like_the_scale() -> None:
    kappas = [lesson(tau, steps=2).scale.kappa for tau in (0.1, 1.0, 10.0)]
    assert kappas[0] / kappas[1] == pytest.approx(100)
    assert kappas[1] / kappas[2] == pytest.approx(100)


def test_features_are_found_from_a_small_start() -> None:
    """The fraction of the mass within 20° of the teacher's neurons is that of Figure 1."""
    problem = Teacher.draw(2, 15, 1000, [9])
    shares = []
    for tau in (0.1, 2.0):
        seen = lesson(tau, steps=1000)
        end = seen.neurons[-1, 0]
        # |a_j|b_j has the direction of b_j and the mass |a_j|‖b_j‖
        net = TwoLayer(seen.signs[:1].float(), end[None].float())
        shares.append(float(problem.share(net, 20.0)))
    assert shares[0] > 0.8 > 0.4 > shares[1]


def test_logistic_targets_are_signs() -> None:
    seen = lesson(1.0, loss=Logistic(), steps=2)
    assert set(seen.y.tolist()) <= {-1.0, 1.0}
    assert set(seen.target.tolist()) <= {-1.0, 1.0}
