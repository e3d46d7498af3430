"""Kernels of infinite width against quadrature, published closed forms, 40-digit arithmetic and wide networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import mpmath
import pytest
import torch
from scipy.integrate import dblquad, quad
from tests.tangent.wide import SIGMA, normal, relative, slope
from torch import Tensor

from lazyscope.errors import InputError, LazyscopeError, ModelError
from lazyscope.model.base import Model
from lazyscope.tangent.limit_covariance import Covariance
from lazyscope.tangent.limit_dense import Kind
from lazyscope.tangent.limit_dense import limit_kernel_dense as limit_kernel
from lazyscope.tangent.limit_duals import Dual, Erf, Relu

# ── numerical integration ──────────────────────────────────────────────────────────────────────────────────────────
Function = Callable[[float], float]
ACTIVATIONS: dict[str, tuple[Function, Function]] = {
    "relu": (lambda u: max(u, 0.0), lambda u: float(u > 0)),
    "erf": (math.erf, lambda u: 2 / math.sqrt(math.pi) * math.exp(-u * u)),
}
END = 9.0  # the end of the integration, beyond which the Gaussian has a mass below 1e-18


def density(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def expectation(f: Function, name: str, p: float, q: float, k: float) -> float:
    """Compute E[f(u)f(v)] for normal (u, v) with variances p, q and covariance k by adaptive quadrature.

    For ReLU the integral is over positive arguments only, since quadrature needs smooth functions.
    """
    slope, rest = k / math.sqrt(p), math.sqrt(q - k * k / p)
    kinked = name == "relu"

    def low(z: float) -> float:
        return min(max(-slope * z / rest, -END), END) if kinked else -END

    def integrand(y: float, z: float) -> float:
        return f(math.sqrt(p) * z) * f(slope * z + rest * y) * density(y) * density(z)

    start = 0.0 if kinked else -END
    value, _ = dblquad(integrand, start, END, low, END, epsabs=1e-12, epsrel=1e-12)
    return float(value)


def second_moment(f: Function, p: float) -> float:
    value, _ = quad(lambda z: f(math.sqrt(p) * z) ** 2 * density(z), -END, END, points=[0.0], epsabs=1e-13, limit=200)
    return float(value)


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_quadrature(activation: str) -> None:
    x = torch.tensor([[0.3, -1.1, 0.4], [0.8, 0.2, -0.5]], dtype=torch.float64)
    weight, bias = (1.7, 0.9, 1.3), (0.2, 0.05, 0.4)
    f, slope = ACTIVATIONS[activation]
    a, b, product = float(x[0] @ x[0]), float(x[1] @ x[1]), float(x[0] @ x[1])
    tangent = 0.0
    for w, s in zip(weight[:-1], bias[:-1], strict=True):
        p, q, k = w * a + s, w * b + s, w * product + s
        tangent = (k + w * tangent) * expectation(slope, activation, p, q, k)
        a, b, product = second_moment(f, p), second_moment(f, q), expectation(f, activation, p, q, k)
    nngp = weight[-1] * product + bias[-1]
    ntk = nngp + weight[-1] * tangent
    values: dict[Kind, float] = {"nngp": nngp, "ntk": ntk}
    for kind, value in values.items():
        kernel = limit_kernel(x, depth=3, activation=activation, kind=kind, weight_variance=weight, bias_variance=bias)
        assert abs(float(kernel[0, 1]) - value) < 1e-10
        if kind == "nngp":
            assert abs(float(kernel[0, 0]) - (weight[-1] * a + bias[-1])) < 1e-10


# ── published closed forms ─────────────────────────────────────────────────────────────────────────────────────────
def test_equation_8() -> None:
    x1, x2 = normal(6, 10), normal(5, 10, seed=1)
    inner, norms = x1 @ x2.T, x1.norm(dim=1)[:, None] * x2.norm(dim=1)
    angle = (inner / norms).arccos()
    arc = (math.pi - angle) * angle.cos() + angle.sin()
    unit = inner * (math.pi - angle) / (2 * math.pi) + norms * arc / (2 * math.pi)
    torch.testing.assert_close(limit_kernel(x1, x2), unit, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(limit_kernel(x1, x2, kind="nngp"), norms * arc / (2 * math.pi), rtol=1e-13, atol=1e-13)
    b2, a2 = 0.7, 23.0  # E(b²) and E(‖a‖²)
    general = inner * b2 / (2 * math.pi) * (math.pi - angle) + norms * a2 / (2 * math.pi * 10) * arc
    kernel = limit_kernel(x1, x2, weight_variance=(a2 / 10, b2), weight_rate=1.0)
    torch.testing.assert_close(kernel, general, rtol=1e-13, atol=1e-13)


def test_arc_cosine_composition() -> None:
    """The composed kernels of degree 1 of Cho and Saul (2009), which keep the norm if σ_w² = 2."""
    x = normal(7, 4)
    x = x / x.norm(dim=1, keepdim=True)
    cosine = (x @ x.T).clamp(-1, 1)
    for _ in range(4):
        angle = cosine.arccos()
        cosine = (angle.sin() + (math.pi - angle) * angle.cos()) / math.pi
    kernel = limit_kernel(x, depth=5, kind="nngp", weight_variance=(1, 2, 2, 2, 2))
    torch.testing.assert_close(kernel, cosine, rtol=1e-13, atol=1e-13)


def test_williams() -> None:
    """Williams (1997), with the bias as an additional input: (2/π) arcsin(2x̃ᵀΣx̃'/√((1+2x̃ᵀΣx̃)(1+2x̃'ᵀΣx̃')))."""
    x, w, b = normal(6, 3), 1.4, 0.3
    sigma = w * x @ x.T + b
    scale = (1 + 2 * sigma.diagonal()).sqrt()
    expected = 2 / math.pi * (2 * sigma / (scale[:, None] * scale)).arcsin()
    kernel = limit_kernel(x, activation="erf", kind="nngp", weight_variance=(w, 1.0), bias_variance=(b, 0.0))
    torch.testing.assert_close(kernel, expected, rtol=1e-13, atol=1e-13)


def test_one_layer_is_the_linear_kernel() -> None:
    x1, x2 = normal(4, 3), normal(5, 3, seed=1)
    for kind in ("ntk", "nngp"):
        kernel = limit_kernel(x1, x2, depth=1, kind=kind, weight_variance=2, bias_variance=1)
        torch.testing.assert_close(kernel, 2 * x1 @ x2.T + 1)


# ── precision ──────────────────────────────────────────────────────────────────────────────────────────────────────
def exact_relu_ntk(x: Tensor, y: Tensor, depth: int, weight: float, bias: float) -> float:
    """Compute the textbook recursion with 40 digits."""
    with mpmath.workdps(40):
        u, v = ([mpmath.mpf(float(value)) for value in z] for z in (x, y))
        a, b, k = (mpmath.fdot(*pair) for pair in ((u, u), (v, v), (u, v)))
        theta = mpmath.mpf(0)
        w, s = mpmath.mpf(weight), mpmath.mpf(bias)
        for layer in range(depth):
            a, b, k, theta = w * a + s, w * b + s, w * k + s, w * k + s + w * theta
            if layer < depth - 1:
                root = mpmath.sqrt(a * b)
                angle = mpmath.acos(min(max(k / root, mpmath.mpf(-1)), mpmath.mpf(1)))
                theta *= (mpmath.pi - angle) / (2 * mpmath.pi)
                k = root * (mpmath.sin(angle) + (mpmath.pi - angle) * mpmath.cos(angle)) / (2 * mpmath.pi)
                a, b = a / 2, b / 2
        return float(theta)


@pytest.mark.parametrize("bias", [0.0, 0.3])
@pytest.mark.parametrize("depth", [2, 3, 6])
def test_full_precision_near_the_singularities(depth: int, bias: float) -> None:
    x, r = normal(8), normal(8, seed=1)
    others = [x, 2 * x, -x, -0.5 * x, r]
    for t in (1e-1, 1e-3, 1e-6, 1e-8, 1e-11, 1e-14):
        others += [x + t * r, -x + t * r, 3 * x + t * r]
    y = torch.stack(others)
    kernel = limit_kernel(x[None], y, depth=depth, weight_variance=1.6, bias_variance=bias)[0]
    exact = torch.tensor([exact_relu_ntk(x, other, depth, 1.6, bias) for other in y], dtype=torch.float64)
    assert float((kernel - exact).abs().max() / exact.abs().max()) < 2e-15


def test_textbook_form_loses_half_of_the_digits() -> None:
    """The angle is accurate for close points, for which arccos of a rounded cosine has an error of 1e-8."""
    x = normal(8)
    y = x + 1e-9 * normal(8, seed=1)
    angle = ((x @ y) / (x.norm() * y.norm())).clamp(-1, 1).arccos()
    naive = (x @ y) * (math.pi - angle) / (2 * math.pi)
    careful = limit_kernel(x[None], y[None]) - limit_kernel(x[None], y[None], kind="nngp")
    exact = exact_relu_ntk(x, y, 2, 1.0, 0.0) - float(limit_kernel(x[None], y[None], kind="nngp"))
    assert abs(float(careful) / exact - 1) < 1e-14 < 1e-10 < abs(float(naive) / exact - 1)


@pytest.mark.parametrize("activation", ["relu", "erf"])
@pytest.mark.parametrize("depth", [2, 4])
def test_symmetric_and_positive(activation: str, depth: int) -> None:
    x = normal(60, 5)
    x[1], x[2], x[3] = x[0], x[0] + 1e-10, 0
    for kind in ("ntk", "nngp"):
        kernel = limit_kernel(x, depth=depth, activation=activation, kind=kind, bias_variance=0.1)
        assert torch.equal(kernel, kernel.T)
        assert float(torch.linalg.eigvalsh(kernel)[0]) > -1e-13 * float(kernel.norm())
        torch.testing.assert_close(kernel[1], kernel[0], rtol=1e-14, atol=0)
        crossed = limit_kernel(x, x.clone(), depth=depth, activation=activation, kind=kind, bias_variance=0.1)
        torch.testing.assert_close(crossed, kernel, rtol=1e-14, atol=1e-15)


def test_float32() -> None:
    x = normal(40, 5)
    x[1], x[2] = x[0], -x[0]
    single = limit_kernel(x.float(), depth=4, bias_variance=0.1)
    assert single.dtype == torch.float32
    assert relative(single.double(), limit_kernel(x.float().double(), depth=4, bias_variance=0.1)) < 1e-6


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_relu_is_homogeneous(scale: float) -> None:
    x = normal(5, 3)
    torch.testing.assert_close(
        limit_kernel(scale * x, depth=3), scale**2 * limit_kernel(x, depth=3), rtol=1e-13, atol=0
    )


def test_large_erf() -> None:
    """For large inputs erf becomes the sign, with the kernel (2/π) arcsin c and the diagonal 1."""
    x = normal(4, 3) * 1e9
    cosine = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(x).T
    kernel = limit_kernel(x, activation="erf", kind="nngp")
    torch.testing.assert_close(kernel, 2 / math.pi * cosine.clamp(-1, 1).arcsin(), rtol=0, atol=1e-7)
    torch.testing.assert_close(kernel.diagonal(), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_gradients(activation: str) -> None:
    x1, x2 = normal(3, 4).requires_grad_(), normal(2, 4, seed=1).requires_grad_()
    for kind in ("ntk", "nngp"):
        assert torch.autograd.gradcheck(
            lambda a, b, k=kind: limit_kernel(a, b, depth=3, activation=activation, kind=k, bias_variance=0.2), (x1, x2)
        )


def test_gradients_are_finite_at_the_singularities() -> None:
    x = normal(5, 3)
    x[1], x[2], x[3] = x[0], -x[0], 0
    for activation in ("relu", "erf"):
        for bias in (0.0, 0.1):
            leaf = x.clone().requires_grad_()
            limit_kernel(leaf, depth=3, activation=activation, bias_variance=bias).sum().backward()
            assert bool(leaf.grad.isfinite().all())  # type: ignore[union-attr]
    diagonal = x[:1].clone().requires_grad_()  # Σ(x, x) = |x|²/2 is smooth, so its gradient is exact
    limit_kernel(diagonal, kind="nngp").sum().backward()
    torch.testing.assert_close(diagonal.grad, x[:1])


# ── finite networks ────────────────────────────────────────────────────────────────────────────────────────────────
def dense_net(x: Tensor, width: int, depth: int, activation: str, w: float, b: float, seed: int) -> Model:
    """Build a network in the NTK parametrisation, without the division in the first layer."""
    sizes = [x.shape[1], *[width] * (depth - 1), 1]
    params = {}
    for i in range(depth):
        params[f"w{i}"] = normal(sizes[i + 1], sizes[i], seed=1000 * seed + 2 * i)
        params[f"b{i}"] = normal(sizes[i + 1], seed=1000 * seed + 2 * i + 1)

    def forward(p: Mapping[str, Tensor], z: Tensor) -> Tensor:
        for i in range(depth):
            fan_in = z.shape[1] if i else 1
            z = math.sqrt(w / fan_in) * z @ p[f"w{i}"].T + math.sqrt(b) * p[f"b{i}"]
            z = SIGMA[activation](z) if i < depth - 1 else z
        return z

    return Model(forward, params)


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_finite_nets(activation: str) -> None:
    x, w, b = normal(4, 3), 1.5, 0.2
    limit = limit_kernel(x, depth=3, activation=activation, weight_variance=w, bias_variance=b)
    errors: dict[int, list[float]] = {}
    for width in (16, 64, 256):
        kernels = []
        for seed in range(40):
            jacobian = dense_net(x, width, 3, activation, w, b, seed).jacobian(x)
            kernels.append(jacobian @ jacobian.T)
        errors[width] = [relative(kernel, limit) for kernel in kernels]
    assert abs(slope(errors) + 0.5) < 0.1
    assert relative(torch.stack(kernels).mean(0), limit) < 0.05


def test_standard_parametrisation() -> None:
    """Layers of `torch.nn.Linear` correspond to ρ_w = fan-in and ρ_b = 1 on x/√d, with zero initial biases."""
    d, width = 3, 1024
    x, sizes = normal(4, d, dtype=torch.float32), [d, width, width, 1]
    kernels = []
    for seed in range(4):
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(sizes[i], sizes[i + 1]) for i in range(3)]
        for layer in layers:
            torch.nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.in_features))
            torch.nn.init.zeros_(layer.bias)
        net = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
        jacobian = Model(net).jacobian(x)
        kernels.append(jacobian @ jacobian.T)
    limit = limit_kernel(x / math.sqrt(d), depth=3, weight_variance=2, weight_rate=sizes[:3], bias_rate=1)
    assert relative(torch.stack(kernels).mean(0), limit) < 0.04
    assert relative(limit, limit_kernel(x / math.sqrt(d), depth=3, weight_variance=2)) > 10


# ── blocks ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("activation", ["relu", "erf"])
@pytest.mark.parametrize("memory", ["40kB", "1 B"])
def test_blocks_give_the_same_kernel(activation: str, memory: str) -> None:
    """A block has 14 × 14 pairs in float64 if memory is 40 kB, and one pair if memory is one byte."""
    x1, x2 = normal(31, 5), normal(9, 5, seed=1)
    x1[3] = 2 * x1[4]
    options: dict[str, Any] = {"depth": 3, "activation": activation, "bias_variance": 0.3}
    some = limit_kernel(x1, memory=memory, **options)
    torch.testing.assert_close(some, limit_kernel(x1, **options), rtol=1e-13, atol=1e-14)
    assert torch.equal(some, some.T)
    across = limit_kernel(x1, x2, memory=memory, **options)
    torch.testing.assert_close(across, limit_kernel(x1, x2, **options), rtol=1e-13, atol=1e-14)


def test_autograd_goes_through_blocks() -> None:
    x, weights = normal(6, 3), normal(6, 6, seed=1)

    def slope(memory: str | None) -> Tensor:
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((limit_kernel(leaf, depth=3, memory=memory) * weights).sum(), leaf)
        return gradient

    torch.testing.assert_close(slope("1kB"), slope(None), rtol=1e-10, atol=1e-12)


def test_a_kernel_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyscope.memory.free_memory", lambda device: 10**9)
    with pytest.raises(InputError, match=r"limit kernel, of shape \(20000, 20000\) in float64, takes 3.2 GB"):
        limit_kernel(torch.zeros(20_000, 1, dtype=torch.float64))


def test_no_inputs_give_no_kernel() -> None:
    assert limit_kernel(normal(0, 3), normal(4, 3)).shape == (0, 4)


# ── invalid arguments ──────────────────────────────────────────────────────────────────────────────────────────────
def test_an_activation_of_ones_own() -> None:
    class Linear(Dual):
        def __call__(self, covariance: Covariance) -> tuple[Covariance, Tensor]:
            return covariance, torch.ones_like(covariance.below)

    x = normal(4, 3)
    torch.testing.assert_close(limit_kernel(x, depth=5, activation=Linear()), 5 * x @ x.T)
    assert torch.equal(limit_kernel(x, activation=Relu()), limit_kernel(x))
    assert torch.equal(limit_kernel(x, activation=Erf()), limit_kernel(x, activation="erf"))


@pytest.mark.parametrize(
    ("arguments", "error", "remedy"),
    [
        ({"depth": 0}, ModelError, "at least 1"),
        ({"activation": "gelo"}, ModelError, "relu or abs"),
        ({"weight_variance": (1.0, 2.0, 3.0)}, ModelError, "one for each layer"),
        ({"bias_variance": -1.0}, ModelError, "non-negative"),
        ({"x2": normal(2, 4)}, InputError, "reshape"),
        ({"x2": normal(2, 3, dtype=torch.float32)}, InputError, "`.to`"),
        ({"x1": torch.full((2, 3), math.nan, dtype=torch.float64)}, InputError, "nan_to_num"),
        ({"memory": "2 gigs"}, InputError, 'memory="2GB"'),
        ({"memory": 0}, InputError, 'memory="2GB"'),
    ],
)
def test_doors(arguments: dict[str, Any], error: type[LazyscopeError], remedy: str) -> None:
    with pytest.raises(error, match=remedy):
        limit_kernel(**{"x1": normal(2, 3), **arguments})
