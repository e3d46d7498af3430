"""Limit kernels of modules: closed forms, quadrature, precision, blocks, variances and refusals."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tangent.limit_modules import MODULES, Attention, Residual
from tests.tangent.test_limit_modules import variance
from tests.tangent.wide import normal, relative
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lazyscope.errors import InputError, LazyscopeError, ModelError, OperationError
from lazyscope.model.base import Model
from lazyscope.tangent import limit_kernel, limit_kernel_convolution, limit_kernel_dense, tangent_kernel
from lazyscope.tangent.limit import _read
from lazyscope.tangent.limit_covariance import Covariance
from lazyscope.tangent.limit_duals import DUALS, Kinked
from lazyscope.tangent.limit_stack import convolution_stack


def mlp(width: int = 16) -> nn.Module:
    layers = nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    return nn.Sequential(*layers).double()


# ── the parametric forms ───────────────────────────────────────────────────────────────────────────────────────────
def test_dense_and_convolutional_stacks() -> None:
    x = normal(4, 3)
    for kind in ("ntk", "nngp"):
        kernel = limit_kernel(mlp(), x, kind=kind)
        options: dict[str, Any] = {"kind": kind, "weight_variance": 1 / 3}
        dense = limit_kernel_dense(x / math.sqrt(3), depth=3, bias_variance=(1 / 9, 1 / 48, 1 / 48), **options)
        torch.testing.assert_close(kernel, dense, rtol=1e-14, atol=1e-15)
    images = normal(4, 2, 5, 3)
    stack = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()).double()
    for pooled, end in ((False, nn.Linear(120, 1)), (True, nn.Linear(8, 1))):
        middle = nn.AdaptiveAvgPool2d(1) if pooled else nn.Identity()
        net = nn.Sequential(stack, middle, nn.Flatten(), end.double())
        kernel = limit_kernel(net, images, variances=lambda _, w: 1.6 / w[0].numel() if w.ndim > 1 else 0.1)
        options = {"pooled": pooled, "weight_variance": 1.6, "bias_variance": 0.1}
        expected = limit_kernel_convolution(images / math.sqrt(2), depth=3, **options)
        torch.testing.assert_close(kernel, expected, rtol=1e-13, atol=0)


def test_stacks_for_the_gpu_program_are_recognised() -> None:
    """The network that the program computes is the module's, and others are not taken for it."""
    images = normal(3, 2, 5, 4)

    def net(stride: int = 1, end: nn.Module | None = None) -> nn.Module:
        layers = nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride, padding=1), end or nn.ReLU()
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(160 if stride == 1 else 48, 1)).double()

    def recognised(module: nn.Module, parametrisation: Any = "ntk") -> Any:
        graph, sites = _read(module, images, "default", parametrisation)
        return convolution_stack(graph, sites)

    layers = nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()
    pooled = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)).double()
    ways: tuple[Any, ...] = ("ntk", "standard")
    for module, way in product((net(), pooled), ways):
        found = recognised(module, way)
        assert found is not None
        assert found.options["pooled"] == (module is pooled)
        for kind in ("ntk", "nngp"):
            expected = limit_kernel(module, images, kind=kind, parametrisation=way)
            torch.testing.assert_close(limit_kernel_convolution(images, kind=kind, **found.options), expected)
    quarters = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 1)).double()
    assert recognised(quarters) is None
    assert recognised(net(stride=2)) is None
    assert recognised(net(end=nn.GELU())) is None


# ── activations ────────────────────────────────────────────────────────────────────────────────────────────────────
FUNCTIONS: dict[str, Any] = {
    "tanh": np.tanh,
    "sigmoid": lambda u: 1 / (1 + np.exp(-u)),
    "silu": lambda u: u / (1 + np.exp(-u)),
    "softplus": lambda u: np.logaddexp(u, 0),
    "gelu": lambda u: u * np.vectorize(lambda t: 0.5 * math.erfc(-t / math.sqrt(2)))(u),
    "sin": np.sin,
    "cos": np.cos,
    "erf": np.vectorize(math.erf),
}


def one_pair(left: float, right: float, c: float) -> Covariance:
    """The covariance of two variables with given standard deviations and a given correlation."""
    one, two, product = (torch.tensor([[each]], dtype=torch.float64) for each in (left, right, left * right * c))
    return Covariance.from_product(one, two, product[None])


def quadrature(name: str, p: float, q: float, c: float, step: float = 1e-4) -> tuple[float, float]:
    """Compute E[σ(u)σ(v)] and E[σ'(u)σ'(v)] by Gauss–Hermite quadrature in the plane, with numerical derivatives."""
    z, w = np.polynomial.hermite_e.hermegauss(120)
    w = w / math.sqrt(2 * math.pi)
    u = math.sqrt(p) * z[:, None] + 0 * z
    v = math.sqrt(q) * (c * z[:, None] + math.sqrt(1 - c * c) * z)
    f = FUNCTIONS[name]

    def slope(t: np.ndarray) -> np.ndarray:
        return np.asarray((8 * (f(t + step) - f(t - step)) - f(t + 2 * step) + f(t - 2 * step)) / (12 * step))

    return float(w @ (f(u) * f(v)) @ w), float(w @ (slope(u) * slope(v)) @ w)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_by_quadrature(name: str) -> None:
    for p, q, c in ((0.6, 1.1, 0.35), (0.3, 0.9, -0.8), (1.0, 1.0, 0.95)):
        found, slope = DUALS[name](one_pair(math.sqrt(p), math.sqrt(q), c))
        product, expected = quadrature(name, p, q, c)
        assert abs(float(found.product) - product) < 1e-10
        assert abs(float(slope) - expected) < 1e-9  # the numerical derivative is the less accurate one


@settings(max_examples=30, deadline=None)
@given(st.floats(-1.5, 1.5), st.floats(-1.0, 1.0), st.floats(0.1, 3.0), st.floats(0.1, 3.0))
def test_leaky_activations_are_sums_of_closed_forms(alpha: float, c: float, left: float, right: float) -> None:
    """max(u, αu)-like functions are u·p + |u|·m; the moments of |u| are those of Cho and Saul (2009)."""
    found, slope = Kinked(alpha)(one_pair(left, right, c))
    angle, p, m = math.acos(c), (1 + alpha) / 2, (1 - alpha) / 2
    absolute = 2 / math.pi * (math.sin(angle) + (math.pi / 2 - angle) * math.cos(angle))
    assert math.isclose(float(found.product), left * right * (p * p * c + m * m * absolute), abs_tol=1e-13)
    assert math.isclose(float(slope), p * p + m * m * (1 - 2 * angle / math.pi), abs_tol=1e-7)


# ── precision, blocks and symmetry ─────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "name",
    ["vgg", "attention", "tied attention", "attention of activations", "strides", "dilation", "norm after an average"],
)
def test_blocks_and_pairs(name: str) -> None:
    make, inputs = MODULES[name]
    net, x = make(8).double(), inputs()
    whole = limit_kernel(net, x, variances=variance)
    assert torch.equal(whole, whole.T)
    assert float(torch.linalg.eigvalsh(whole)[0]) > 0
    torch.testing.assert_close(limit_kernel(net, x, variances=variance, memory=1), whole, rtol=1e-11, atol=0)
    torch.testing.assert_close(limit_kernel(net, x[:2], x[1:], variances=variance), whole[:2, 1:], rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", ["vgg", "strides", "resnet", "pre-norm", "norm after activations"])
def test_float32(name: str) -> None:
    make, inputs = MODULES[name]
    x = torch.cat([inputs(), -inputs()[:1], inputs()[:1], 2 * inputs()[:1]]).float()
    single = limit_kernel(make(8), x, variances=variance)
    assert single.dtype == torch.float32
    double = limit_kernel(make(8).double(), x.double(), variances=variance)
    assert float((single - double).abs().max() / double.abs().max()) < 1e-6


def test_close_inputs() -> None:
    """A ReLU network keeps the precision of the angle; with averages before a ReLU, the error is below 1e-7."""
    x = normal(2, 2, 4, 4)
    x[1] = x[0] + 1e-12
    for name, bound in (("strides", 1e-11), ("vgg", 1e-7)):
        kernel = limit_kernel(MODULES[name][0](8).double(), x, variances=variance)
        assert abs(float(kernel[0, 1] / kernel[0, 0]) - 1) < bound


def test_gradients() -> None:
    net = nn.Sequential(nn.Conv1d(1, 8, 2), nn.ReLU(), nn.Conv1d(8, 8, 2), nn.GELU(), nn.Flatten(), nn.Linear(8, 1))
    x = normal(2, 1, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: limit_kernel(net.double(), z[:1], z[1:]), (x,))


def test_close_inputs_of_a_norm_after_a_kink() -> None:
    net = nn.Sequential(
        nn.Linear(3, 8), nn.ReLU(), nn.LayerNorm(8, eps=0.0), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)
    )
    x, step = normal(2, 3), normal(3, seed=3)
    angles = []
    for size in (1e-6, 1e-9):
        x[1] = x[0] + size * step
        kernel = limit_kernel(net.double(), x, variances=lambda _, w: 2 / w[0].numel() if w.ndim > 1 else 0.0)
        angles.append(float(1 - kernel[0, 1] / kernel.diagonal().prod().sqrt()) / size)
    assert math.isclose(*angles, rel_tol=1e-4)  # the kernel falls linearly, as the angle does


# ── variances and parametrisations ─────────────────────────────────────────────────────────────────────────────────
def test_variances() -> None:
    net, x = mlp(), normal(4, 3)
    default = limit_kernel(net, x)
    named = {name: 1 / (3 * (3 if name.startswith("0") else 16)) for name, _ in net.named_parameters()}
    assert torch.equal(limit_kernel(net, x, variances=named), default)
    assert relative(limit_kernel(mlp(512), x, variances="measured"), limit_kernel(mlp(512), x)) < 0.3
    nn.init.normal_(net[2].weight, std=1.0)  # type: ignore[index]
    with pytest.raises(ModelError, match=r"'2.weight' has not been initialised as torch does"):
        limit_kernel(net, x)
    assert torch.equal(limit_kernel(net, x, variances={"2.weight": 1 / 48}), default)
    with pytest.raises(ModelError, match="non-negative"):
        limit_kernel(net, x, variances={"2.weight": -1.0})


def test_standard_parametrisation() -> None:
    x, width = normal(3, 3), 1024
    kernels = []
    for seed in range(4):
        torch.manual_seed(seed)
        kernels.append(tangent_kernel(mlp(width), x)[:, :, 0, 0])
    limit = limit_kernel(mlp(width), x, parametrisation="standard")
    assert relative(torch.stack(kernels).mean(0), limit) < 0.05
    frozen = mlp(width)
    for layer in (frozen[0], frozen[2]):  # type: ignore[index]
        layer.requires_grad_(False)
    readout = limit_kernel(frozen, x, parametrisation="standard")
    assert relative(tangent_kernel(frozen, x)[:, :, 0, 0], readout) < 0.1
    assert bool((readout.diagonal() < 0.6 * limit.diagonal()).all())


def test_functions_of_parameters() -> None:
    """A function in the NTK parametrisation, with factors in its forward and standard normal parameters."""
    sizes = (3, 32, 32, 1)
    params = {f"w{i}": normal(sizes[i + 1], sizes[i], seed=i) for i in range(3)}

    def forward(p: Any, x: Tensor) -> Tensor:
        x = torch.relu(x @ p["w0"].T / math.sqrt(3))
        x = torch.relu(x @ (p["w1"] * math.sqrt(2 / 32)).T)
        out: Tensor = math.sqrt(2 / 32) * x @ p["w2"].T
        return out

    x = normal(4, 3)
    kernel = limit_kernel(Model(forward, params), x, variances=lambda *_: 1.0)
    expected = limit_kernel_dense(x / math.sqrt(3), depth=3, weight_variance=(1.0, 2.0, 2.0))
    torch.testing.assert_close(kernel, expected, rtol=1e-13, atol=0)


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────
class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.inner, self.out = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.inner(self.inner(self.start(x)).relu()).relu())
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.one(x) * torch.sigmoid(self.two(x)))
        return out


class NormedPair(Gated):
    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.one(x).relu(), self.two(x).relu()], dim=1)
        out: Tensor = self.out(nn.functional.layer_norm(both, (16,))[:, :8])
        return out


class Scaled(Attention):
    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)[:, None]
        out: Tensor = self.out(scaled_dot_product_attention(x, x, x)[:, 0].mean(1))
        return out


def wrapped(*layers: nn.Module, start: nn.Module | None = None, width: int = 8) -> nn.Module:
    return nn.Sequential(start or nn.Linear(3, 8), *layers, nn.Linear(width, 1))


REFUSED: dict[str, tuple[nn.Module, Tensor, type[LazyscopeError], str]] = {
    "max-pooling": (
        wrapped(nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), start=nn.Conv1d(2, 8, 3), width=16),
        normal(2, 2, 6),
        OperationError,
        "max_pool2d_with_indices",
    ),
    "two activations": (wrapped(nn.ReLU(), nn.Tanh()), normal(2, 3), OperationError, "tanh.*not normal"),
    "unknown activation": (wrapped(nn.Hardswish()), normal(2, 3), OperationError, "hardswish"),
    "shared weights": (Twice(), normal(2, 3), ModelError, "'inner.weight' is used more than once"),
    "product": (Gated(), normal(2, 3), OperationError, "mul.*only products with numbers"),
    "attention": (Scaled(8), normal(2, 5, 3), OperationError, "scale=1/d"),
    "residual of the inputs": (
        nn.Sequential(Residual(nn.Linear(3, 3)), nn.ReLU(), nn.Linear(3, 1)),
        normal(2, 3),
        OperationError,
        "through a layer first",
    ),
    "last activation": (nn.Sequential(mlp(), nn.Tanh()), normal(2, 3), OperationError, "last activation"),
    "dependent terms": (wrapped(Residual(nn.ReLU())), normal(2, 3), OperationError, "independent"),
    "positions in the output": (nn.Sequential(nn.Conv1d(2, 1, 3)), normal(2, 2, 6), OperationError, "positions"),
    "depthwise": (
        wrapped(nn.ReLU(), nn.Conv1d(8, 8, 2, groups=8), nn.Flatten(), start=nn.Conv1d(2, 8, 3), width=24),
        normal(2, 2, 6),
        OperationError,
        "each group",
    ),
    "norm of a concatenation": (NormedPair(), normal(2, 3), OperationError, "normalise each of them first"),
    "inputs": (mlp(), torch.full((2, 3), math.nan), InputError, "NaN"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    net, x, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        limit_kernel(net.double(), x.double())
