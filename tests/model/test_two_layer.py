"""Two-layer families: increments against float64, batches against single networks, kernels against Jacobians."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyscope.data.sphere import sphere
from lazyscope.errors import InputError, ModelError, ScaleError
from lazyscope.flow import gradient_descent
from lazyscope.loss import Square
from lazyscope.model.coordinates import Coordinates
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.teacher import Teacher

ALPHAS = [0.1, 1.0, 1e2, 1e4, 1e6, 1e8, math.inf]
ACTIVATIONS = [torch.relu, torch.tanh, torch.sigmoid, F.gelu, F.silu, F.softplus, torch.erf]

Member = dict[str, Tensor]


def exact(net: TwoLayer, v: Member, x: Tensor, alpha: float) -> Tensor:
    """Compute α(h(w₀ + v/α) - h(w₀)) of one network in float64, or the JVP at α = ∞."""

    def h(a: Tensor, b: Tensor) -> Tensor:
        return TwoLayer(a, b, net.activation)(x.double())

    start = (net.a.double(), net.b.double())
    if math.isinf(alpha):
        tangent: Tensor = torch.func.jvp(h, start, (v["a"], v["b"]))[1]
        return tangent
    return alpha * (h(start[0] + v["a"] / alpha, start[1] + v["b"] / alpha) - h(*start))


def random_v(zeros: Member, size: float = 1.0) -> Member:
    random = torch.Generator().manual_seed(0)
    return {name: size * torch.randn(value.shape, generator=random).to(value) for name, value in zeros.items()}


def gap(value: Tensor, reference: Tensor) -> float:
    return float(((value.double() - reference).norm() / reference.norm()).detach())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_increments_are_exact_at_every_scale(activation: Callable[[Tensor], Tensor]) -> None:
    net = TwoLayer.gaussian(30, 10, [0, 1], activation=activation)
    x = sphere(40, 10, [0, 1])
    coordinates = net[:, None].coordinates(x[:, None], ALPHAS, centred=True)
    assert coordinates.batch == (2, len(ALPHAS))
    v = {name: value.requires_grad_() for name, value in random_v(coordinates.zeros()).items()}
    y = coordinates.outputs(v)
    u = random_v({"u": y.detach()})["u"]
    gradient = dict(zip(v, torch.autograd.grad(y, list(v.values()), u), strict=True))
    for seed in range(2):
        for i, alpha in enumerate(ALPHAS):
            member = {name: value[seed, i].detach().double().requires_grad_() for name, value in v.items()}
            reference = exact(net[seed], member, x[seed], alpha)
            slopes = torch.autograd.grad(reference, list(member.values()), u[seed, i].double())
            assert gap(y[seed, i], reference) < 2e-6
            for name, slope in zip(member, slopes, strict=True):
                assert gap(gradient[name][seed, i], slope) < 5e-6, (alpha, name)


def test_the_float32_difference_fails_where_increments_do_not() -> None:
    net, x = TwoLayer.gaussian(30, 10, [0])[0], sphere(40, 10, [0])[0]
    v = random_v(net.params)
    moved = net.moved(v, 1e6)
    reference = exact(net, {name: value.double() for name, value in v.items()}, x, 1e6)
    assert gap(1e6 * (moved(x) - net(x)), reference) > 0.02
    assert gap(net.coordinates(x, 1e6, centred=True).outputs(v), reference) < 1e-6


@settings(max_examples=80, deadline=None)
@given(
    log_alpha=st.floats(-3, 12),
    size=st.floats(1e-3, 1e3),
    seed=st.integers(0, 10**6),
    width=st.integers(1, 7),
    points=st.integers(1, 9),
)
def test_relu_increments_of_any_net(log_alpha: float, size: float, seed: int, width: int, points: int) -> None:
    alpha = 10**log_alpha
    net, x = TwoLayer.gaussian(width, 3, [seed])[0].to(torch.float64), sphere(points, 3, [seed])[0].double()
    v = random_v(net.params, size)
    pre = net.b @ x.T
    d = v["b"] @ x.T
    # The reference treats the two cases of max(·, 0) separately and avoids the difference of two large numbers.
    step = torch.where(pre > 0, d.maximum(-alpha * pre), (d + alpha * pre).clamp(min=0))
    expected = net.a @ step + v["a"] @ (pre.clamp(min=0) + step / alpha)
    torch.testing.assert_close(
        net.coordinates(x, alpha, centred=True).outputs(v), expected, rtol=1e-9, atol=1e-9 * size * (1 + size / alpha)
    )


def test_the_derivative_is_zero_at_the_kink() -> None:
    """If b·x = 0 exactly, max(·, 0) has slope 0 at every scale, as in torch."""
    net = TwoLayer(torch.ones(1), torch.tensor([[1.0, 0.0]]))
    x = torch.tensor([[0.0, 1.0]])
    for alpha in ALPHAS:
        assert not net.coordinates(x, alpha, centred=True).pull_back(torch.ones(1))["b"].any()


def test_a_derivative_is_applied_once() -> None:
    """Its arrays are reused after the first call, so a second result would be wrong."""
    coordinates = TwoLayer(torch.ones(1), torch.tensor([[1.0, 0.0]])).coordinates(torch.ones(1, 2))
    y, pull = coordinates.linearise(coordinates.zeros())
    pull(y)
    with pytest.raises(InputError, match="linearise again"):
        pull(y)


@pytest.mark.parametrize("activation", [torch.relu, F.softplus])
@pytest.mark.parametrize(
    ("nets", "alphas", "inputs"),
    [
        ((3, 1), (4,), (3, 1)),  # seeds × scales, with different inputs for each seed
        ((3, 1), (4,), ()),  # the same inputs for all
        ((), (4,), (3, 1)),  # one network on several inputs
        ((2, 3, 1), (4,), (3, 1)),  # widths × seeds × scales
        ((4, 3), (1,), (4, 1)),  # members with different initial weights
        ((3, 4), (4, 1, 1), (4,)),  # inputs along the last dimension, so that arrays are reordered
        ((), (), ()),
    ],
)
def test_batched_is_one_by_one(
    activation: Callable[[Tensor], Tensor],
    nets: tuple[int, ...],
    alphas: tuple[int, ...],
    inputs: tuple[int, ...],
) -> None:
    count = math.prod(nets)
    draws = TwoLayer.gaussian(6, 5, range(count), activation=activation)
    net = TwoLayer(draws.a.reshape(*nets, 6), draws.b.reshape(*nets, 6, 5), activation)
    x = sphere(8, 5, range(math.prod(inputs))).reshape(*inputs, 8, 5)
    alpha = torch.logspace(-1, 2, math.prod(alphas), dtype=torch.float64).reshape(alphas)
    family = net.coordinates(x, alpha)
    batch = family.batch
    v = random_v(family.zeros())
    y, kernel, pulled = family.outputs(v), family.kernel(), family.pull_back(family.outputs(v))
    (by_hand, pull), (by_autograd, reference) = family.linearise(v), Coordinates.linearise(family, v)
    torch.testing.assert_close(by_hand, by_autograd)
    torch.testing.assert_close(pull(y), reference(y))
    assert y.shape == (*batch, 8)
    assert kernel.shape == (*batch, 8, 8)
    a, b = net.a.expand(*batch, 6), net.b.expand(*batch, 6, 5)
    x, alpha = x.expand(*batch, 8, 5), alpha.expand(batch)
    for at in itertools.product(*(range(size) for size in batch)):
        one = TwoLayer(a[at], b[at], activation).coordinates(x[at], float(alpha[at]))
        mine = {name: value[at] for name, value in v.items()}
        torch.testing.assert_close(y[at], one.outputs(mine))
        torch.testing.assert_close(kernel[at], one.kernel())
        for name, value in one.pull_back(y[at]).items():
            torch.testing.assert_close(pulled[name][at], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernel_is_that_of_the_dense_jacobian(activation: Callable[[Tensor], Tensor]) -> None:
    net = TwoLayer.gaussian(7, 4, [0], activation=activation)[0].to(torch.float64)
    x = sphere(9, 4, [0])[0].double()

    def h(a: Tensor, b: Tensor) -> Tensor:
        return TwoLayer(a, b, activation)(x)

    jacobian = torch.cat([j.flatten(1) for j in torch.func.jacrev(h, argnums=(0, 1))(net.a, net.b)], dim=1)
    torch.testing.assert_close(net.coordinates(x).kernel(), jacobian @ jacobian.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", [torch.relu, torch.sigmoid])
def test_padding_changes_nothing_and_stays_zero(activation: Callable[[Tensor], Tensor]) -> None:
    nets = [TwoLayer.gaussian(width, 5, [3], activation=activation)[0] for width in (2, 6, 4)]
    x, y = sphere(20, 5, [0])[0], torch.linspace(-1, 1, 20)
    family = TwoLayer.pad(nets)
    together = gradient_descent(family, Square(), x, y, alpha=2.0, lr=0.1, steps=50, keep_params=True)
    assert together.params is not None
    for i, net in enumerate(nets):
        alone = gradient_descent(net, Square(), x, y, alpha=2.0, lr=0.1, steps=50)
        width = net.a.shape[-1]
        torch.testing.assert_close(together.loss[:, i], alone.loss)
        torch.testing.assert_close(family.coordinates(x).kernel()[i], net.coordinates(x).kernel())
        assert not together.params["a"][:, i, width:].any()
        assert not together.params["b"][:, i, width:].any()
    torch.testing.assert_close(family(x), torch.stack([net(x) for net in nets]))


def test_a_start_of_scale_tau_is_the_unit_start_at_alpha_tau_squared() -> None:
    """By 2-homogeneity, descent from τu₀ with step size η is descent from u₀ at α = τ² with step size αη."""
    x, y = sphere(30, 4, [0])[0].double(), torch.linspace(-1, 1, 30, dtype=torch.float64)
    unit = TwoLayer.gaussian(10, 4, [1])[0].to(torch.float64)
    for tau in (0.3, 1.0, 3.0):
        scaled = TwoLayer.gaussian(10, 4, [1], tau=tau)[0].to(torch.float64)
        plain = gradient_descent(scaled, Square(), x, y, lr=0.01, steps=100)
        tangent = gradient_descent(unit, Square(), x, y, alpha=tau**2, lr=0.01 * tau**2, steps=100)
        torch.testing.assert_close(plain.loss, tangent.loss, rtol=1e-5, atol=1e-7)  # the weights are drawn in float32
        torch.testing.assert_close(plain.displacement, tau * tangent.displacement, rtol=1e-5, atol=1e-7)


def test_starts() -> None:
    net = TwoLayer.circle(10, [0, 1], tau=2.0)
    torch.testing.assert_close(net.b.norm(dim=-1), torch.full((2, 10), 2.0))
    assert 1.5 < float(net.a.abs().max()) <= 2.0
    twin = net.symmetrised()
    x = sphere(5, 2, [0])[0]
    assert twin.a.shape == (2, 20)
    assert float(twin(x).abs().max()) < 1e-5
    assert not twin.coordinates(x, math.inf).outputs(twin.coordinates(x).zeros()).any()  # exactly 0, without an offset
    with pytest.raises(ScaleError, match="centred=True"):
        net.coordinates(x, math.inf)
    torch.testing.assert_close(net.coordinates(x, 3.0).outputs(net.coordinates(x).zeros()), 3 * net(x))
    first, again = TwoLayer.gaussian(4, 3, [7]), TwoLayer.gaussian(4, 3, [6, 7])[1:]
    assert torch.equal(first.b, again.b)


def test_a_retained_graph_gives_the_same_gradient_twice() -> None:
    """The arrays of increments are overwritten and reused, and no result may depend on it."""
    net, x = TwoLayer.gaussian(6, 3, [0])[0], sphere(10, 3, [0])[0]
    coordinates = net.coordinates(x, 2.0)
    v, other = ({name: value.requires_grad_() for name, value in random_v(net.params, s).items()} for s in (1.0, 5.0))
    y = coordinates.outputs(v)
    z = coordinates.outputs(other)
    once = torch.autograd.grad(y.sum(), list(v.values()), retain_graph=True)
    torch.autograd.grad(z.sum(), list(other.values()))
    twice = torch.autograd.grad(y.sum(), list(v.values()))
    fresh = torch.autograd.grad(net.coordinates(x, 2.0).outputs(v).sum(), list(v.values()))
    for triple in zip(once, twice, fresh, strict=True):
        assert torch.equal(triple[0], triple[1])
        assert torch.equal(triple[0], triple[2])


def test_misuse_names_the_remedy() -> None:
    net = TwoLayer.gaussian(3, 4, [0])[0]
    for x, remedy in [
        (torch.zeros(5, 3), "reshape"),
        (torch.zeros(4), "reshape"),
        ([1.0], "reshape"),
        (torch.zeros(5, 4, dtype=torch.float64), r"\.to"),
        (torch.zeros(5, 4, dtype=torch.int64), r"\.to"),
        (torch.full((5, 4), math.nan), "remove"),
    ]:
        with pytest.raises(InputError, match=remedy):
            net.coordinates(x)
    with pytest.raises(ScaleError, match="α > 0"):
        net.coordinates(torch.zeros(5, 4), 0.0)
    with pytest.raises(ModelError, match="one b_j"):
        TwoLayer(torch.zeros(1, 3), torch.zeros(3, 4))


def test_the_teacher_is_the_exact_answer() -> None:
    problem = Teacher.draw(dim=6, train=50, test=20, seeds=[0, 5])
    assert not Square()(problem.answer(problem.x), problem.y, 1).any()
    assert not Square()(problem.answer(problem.x_test), problem.y_test, 1).any()
    torch.testing.assert_close((problem.answer.a[..., None] * problem.answer.b).norm(dim=-1), torch.ones(2, 3))
    torch.testing.assert_close(problem.x.norm(dim=-1), torch.ones(2, 50))
    again = Teacher.draw(dim=6, train=50, test=20, seeds=[5])
    assert torch.equal(again.x[0], problem.x[1])
    assert torch.equal(again.y_test[0], problem.y_test[1])


def test_a_student_does_not_know_its_data() -> None:
    """A student, a teacher and data of the same seed are drawn independently."""
    student = TwoLayer.gaussian(50, 100, [0])[0]
    problem = Teacher.draw(dim=100, train=50, test=1, seeds=[0])
    for points in (problem.x[0], problem.answer.b[0]):
        cosine = F.normalize(student.b, dim=-1) @ points.T
        assert float(cosine.abs().max()) < 0.5
