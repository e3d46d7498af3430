"""Arguments of `limit_kernel`: variances, pairs of inputs, precisions and modules, and what is refused.

Longer than 350 lines because each argument has its valid values and its refusals.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import weakref
from typing import Any

import mpmath
import pytest
import torch
from tests.tangent.limit_modules import MODULES
from tests.tangent.test_limit_modules import variance
from tests.tangent.wide import normal, relative
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lazyscope.errors import InputError, ModelError
from lazyscope.model.base import Model
from lazyscope.tangent import (
    direction,
    limit_hermite,
    limit_kernel,
    limit_kernel_convolution,
    limit_kernel_dense,
    pairwise,
)
from lazyscope.tangent.limit_covariance import Covariance
from lazyscope.tangent.limit_duals import DUALS, Kinked
from lazyscope.tangent.limit_variances import variance_of


def mlp(*hidden: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 32), *(hidden or [nn.ReLU()]), nn.Linear(32, 1)).double()


# ── variances ──────────────────────────────────────────────────────────────────────────────────────────────────────
WRONG = {
    "a misspelt rule": ("mlp, x, variances='mesured'", "InputError", 'pass "default", "measured", a dictionary'),
    "a rule of torch": ("mlp, x, variances='kaiming'", "InputError", "variances='kaiming' is not known"),
    "one number": ("mlp, x, variances=2.0", "InputError", "variances=2.0 is not known"),
    "no variances": ("mlp, x, variances=None", "InputError", "variances=None is not known"),
    "a list": ("mlp, x, variances=[1, 2]", "InputError", "[1, 2] is not known"),
    "a misspelt name": ("mlp, x, variances={'0.wieght': 5.0}", "InputError", "pass '0.weight' instead"),
    "another name": ("mlp, x, variances={'first': 5.0}", "InputError", "see net.named_parameters()"),
    "a number as name": ("mlp, x, variances={3: 5.0}", "InputError", "contains 3, which is not a parameter"),
    "a name that is not used": ("normed, x, variances={'1.weight': 9.0}", "InputError", "variance does not matter"),
    "no variance": ("mlp, x, variances={'0.weight': None}", "ModelError", "'0.weight' is None; pass a finite"),
    "a text as variance": ("mlp, x, variances={'0.weight': 'a'}", "ModelError", "'0.weight' is 'a'"),
    "infinity": ("mlp, x, variances={'0.weight': math.inf}", "ModelError", "'0.weight' is inf"),
    "a function without result": ("mlp, x, variances=lambda *_: None", "ModelError", "'0.weight' is None"),
    "a function without defaults": ("Model(f, {'w': torch.ones(3, 1)}), x", "ModelError", "'w' has no default init"),
    "no module": ("None, x", "ModelError", "takes a module or a lazyscope.Model, not NoneType"),
    "a name of a module": ("'mlp', x", "ModelError", "not str"),
    "a class": ("nn.Linear, x", "ModelError", "not type"),
}
"""Arguments of `limit_kernel`, the error that they raise, and a part of its message."""

SCRIPT = """
import json, math, torch, lazyscope
from torch import nn
mlp = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1))
normed = nn.Sequential(nn.Linear(3, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))
x, found = torch.randn(2, 3), {}
Model, f = lazyscope.Model, lambda p, x: x @ p["w"]
for name, call in json.loads(input()).items():
    try:
        eval(f"lazyscope.limit_kernel({call})")
    except Exception as error:
        found[name] = type(error).__name__, str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def errors() -> dict[str, tuple[str, str]]:
    """The errors of all calls, in a process that does not check annotations at run time."""
    calls = json.dumps({name: call for name, (call, _, _) in WRONG.items()})
    run = subprocess.run([sys.executable, "-c", SCRIPT], input=calls, capture_output=True, text=True, check=True)
    found: dict[str, tuple[str, str]] = json.loads(run.stdout)
    return found


@pytest.mark.xdist_group("wrong limits")  # one process computes the errors
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str, errors: dict[str, tuple[str, str]]) -> None:
    _, error, words = WRONG[name]
    kind, message = errors[name]
    assert kind == error
    assert words in message


def refused(init: Any, module: nn.Module, draws: int) -> float:
    """The share of draws that are not taken for torch's default initialisation."""
    count = 0
    for _ in range(draws):
        init(module.weight)
        try:
            variance_of("weight", module.weight, "default", module)  # type: ignore[arg-type]
        except ModelError:
            count += 1
    return count / draws


def test_other_initialisations_of_small_layers_are_found() -> None:
    """Glorot's variance is half of the default for 3 inputs and 32 outputs, 5.3 standard errors away from it."""
    torch.manual_seed(0)
    small = nn.Linear(3, 32)
    assert refused(lambda w: small.reset_parameters(), small, 3000) == 0
    assert refused(nn.init.xavier_uniform_, small, 300) == 1
    assert refused(nn.init.xavier_normal_, small, 300) > 0.95
    assert refused(nn.init.kaiming_normal_, small, 300) == 1
    assert refused(nn.init.orthogonal_, nn.Linear(16, 16), 300) == 1
    rounded = nn.Linear(300, 300).bfloat16()
    assert refused(lambda w: rounded.reset_parameters(), rounded, 20) == 0


def test_few_entries_and_embeddings() -> None:
    torch.manual_seed(0)
    one, words = nn.Linear(1, 1), nn.Embedding(3, 2)
    assert refused(lambda w: one.reset_parameters(), one, 1000) == 0
    assert refused(lambda w: words.reset_parameters(), words, 1000) == 0
    assert refused(lambda w: nn.init.normal_(w, std=0.5), nn.Embedding(10, 20), 300) == 1


def test_padding_of_an_embedding_is_not_random() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 1024, padding_idx=0), nn.Flatten(), nn.Linear(3 * 1024, 1))
    tokens = torch.tensor([[1, 2, 0], [0, 0, 0], [1, 2, 4]])
    kernel = limit_kernel(net, tokens, kind="nngp")
    bias = 1 / (9 * 1024)
    torch.testing.assert_close(kernel[0], torch.tensor([2 / 9 + bias, bias, 2 / 9 + bias]))
    assert relative(limit_kernel(net, tokens, variances="measured"), limit_kernel(net, tokens)) < 0.1
    assert variance_of("weight", net[0].weight, "measured", net[0]) == pytest.approx(1, abs=0.1)  # type: ignore[arg-type]


# ── modules ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_models_of_modules() -> None:
    """A `Model` has the layers, the frozen parameters and the default variances of its module."""
    net, x = mlp(), normal(3, 3)
    net[0].requires_grad_(False)
    for parametrisation in ("ntk", "standard"):
        expected = limit_kernel(net, x, parametrisation=parametrisation)
        for other in (Model(net), torch.compile(net)):
            kernel = limit_kernel(other, x, parametrisation=parametrisation)  # type: ignore[arg-type]
            assert torch.equal(kernel, expected)


# ── inputs ─────────────────────────────────────────────────────────────────────────────────────────────────────────
POOLED = nn.Sequential(
    nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)
).double()


@pytest.mark.parametrize(
    ("x1", "x2"),
    [
        (normal(1, 2, 6, 6), normal(1, 2, 4, 9)),
        (normal(1, 2, 6, 6), normal(1, 3, 6, 6)),
        (normal(1, 2, 6, 6), normal(2, 6, 6)),
        (normal(1, 2, 6, 6), normal(1, 2, 6, 6).float()),
    ],
)
def test_pairs_of_different_inputs_are_refused(x1: Tensor, x2: Tensor) -> None:
    for one, two in ((x1, x2), (x2, x1)):
        with pytest.raises(InputError, match="alike but for their numbers of points"):
            limit_kernel(POOLED, one, two)
    with pytest.raises(InputError, match="same tuples"):
        limit_kernel(POOLED, x1, (x1,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden", [nn.ReLU, nn.Tanh, nn.GELU])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, hidden: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layers = nn.Conv1d(2, 16, 3, padding=1), hidden(), nn.Conv1d(16, 16, 3), hidden(), nn.Flatten(), nn.Linear(48, 1)
    words = nn.Embedding(7, 64), nn.Flatten(), nn.Linear(192, 64), hidden(), nn.Linear(64, 1)
    for net, x in (
        (nn.Sequential(*layers), normal(3, 2, 5).to(dtype)),
        (nn.Sequential(*words), torch.ones(2, 3).int()),
    ):
        single = limit_kernel(net, x.float() if x.is_floating_point() else x)
        half = limit_kernel(net.to(dtype), x)
        assert half.dtype == dtype
        assert torch.equal(half, single.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parametric_forms_in_half_precision(dtype: torch.dtype) -> None:
    dense, images = normal(4, 7).to(dtype), normal(3, 2, 5, 4).to(dtype)
    for kernel, x in ((limit_kernel_dense, dense), (limit_kernel_convolution, images)):
        half = kernel(x, depth=3, bias_variance=0.1)
        assert torch.equal(half, kernel(x.float(), depth=3, bias_variance=0.1).to(dtype))
    with pytest.raises(ModelError, match="limit kernel"):
        limit_kernel_dense(torch.full((1, 2), 1e3, dtype=torch.float16))  # 10⁶ is too large for float16


# ── precision and range ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_abs_near_opposite_inputs(dtype: torch.dtype) -> None:
    """Without biases, a network of absolute values is even; the float64 kernel agrees with 40 digits."""
    x = torch.cat([normal(20, 5), normal(20, 5) + 1e-9 * normal(20, 5, seed=1)]).to(dtype)
    options: dict[str, Any] = {"activation": "abs", "depth": 4}
    kernel, turned = limit_kernel_dense(x, **options), limit_kernel_dense(x, -x, **options)
    eps = torch.finfo(dtype).eps
    assert float((kernel - turned).abs().max() / kernel.max()) < 4 * eps
    if dtype == torch.float64:
        exact = [exact_kinked(x[i], -x[j], -1.0, 4) for i, j in ((0, 0), (0, 20), (3, 5))]
        found = [float(turned[i, j]) for i, j in ((0, 0), (0, 20), (3, 5))]
        assert max(abs(a - b) / float(kernel.max()) for a, b in zip(found, exact, strict=True)) < 4 * eps


@pytest.mark.parametrize("alpha", [-1.2, -0.9, -0.3])
def test_negative_slopes_near_opposite_inputs(alpha: float) -> None:
    x = normal(5).float().double()
    y = torch.stack([-x, -x + 1e-3, -x + 1e-6 * normal(5, seed=2), x + 1e-6]).float().double()
    exact = torch.tensor([exact_kinked(x, each, alpha, 4) for each in y], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        kernel = limit_kernel_dense(x[None].to(dtype), y.to(dtype), activation=Kinked(alpha), depth=4)[0]
        assert float((kernel.double() - exact).abs().max() / exact.abs().max()) < 8 * torch.finfo(dtype).eps


def exact_kinked(x: Tensor, y: Tensor, alpha: float, depth: int) -> float:
    """Compute the NTK of max(u, αu)-like activations with 40 digits: they are pu + m|u|."""
    with mpmath.workdps(40):
        u, v = ([mpmath.mpf(float(value)) for value in z] for z in (x, y))
        a, b, k = (mpmath.fdot(*pair) for pair in ((u, u), (v, v), (u, v)))
        p, m, theta = (1 + mpmath.mpf(alpha)) / 2, (1 - mpmath.mpf(alpha)) / 2, mpmath.mpf(0)
        for layer in range(depth):
            theta += k
            if layer < depth - 1:
                root = mpmath.sqrt(a * b)
                angle = mpmath.acos(min(max(k / root, mpmath.mpf(-1)), mpmath.mpf(1)))
                theta *= p * p + m * m * (1 - 2 * angle / mpmath.pi)
                bent = root * (mpmath.sin(angle) + (mpmath.pi / 2 - angle) * mpmath.cos(angle)) * 2 / mpmath.pi
                k, a, b = p * p * k + m * m * bent, (p * p + m * m) * a, (p * p + m * m) * b
        return float(theta)


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("c", [-0.999, -0.4, 0.7, 1.0])
def test_gelu_at_all_scales(scale: float, c: float) -> None:
    """E[σ(u)σ(v)] and E[σ'(u)σ'(v)] by adaptive quadrature over z, given which the other variable is integrated."""
    left, right = scale, 1.3 * scale

    def expected(one: Any, mean_of_other: Any) -> float:
        cuts = [-12, -3, -1, -3 / scale, 0, 3 / scale, 1, 3, 12] if scale > 3 else [-12, -3, 0, 3, 12]
        value = mpmath.quad(lambda z: one(left * z) * mean_of_other(c * right * z) * mpmath.npdf(z), sorted(cuts))
        return float(value)

    spread = right**2 * (1 - c * c)  # of v given u; E[σ(m + √q z)] has a closed form by Stein's identity
    size = mpmath.sqrt(1 + spread)

    def average(m: Any) -> Any:
        return m * mpmath.ncdf(m / size) + spread / size * mpmath.npdf(m / size)

    def average_slope(m: Any) -> Any:
        return mpmath.ncdf(m / size) + m / size * mpmath.npdf(m / size) / size**2

    def slope(z: Any) -> Any:
        return mpmath.ncdf(z) + z * mpmath.npdf(z)

    sides = tuple(torch.tensor([each], dtype=torch.float64) for each in (left, right))
    exact = torch.tensor([[c]], dtype=torch.float64)
    found, slopes = DUALS["gelu"](Covariance(sides[0], sides[1], 1 - exact, 1 + exact))
    assert math.isclose(float(found.product), expected(lambda z: z * mpmath.ncdf(z), average), abs_tol=1e-13 * scale**2)
    assert math.isclose(float(slopes), expected(slope, average_slope), abs_tol=1e-13)
    means = float(mpmath.quad(lambda z: left * z * mpmath.ncdf(left * z) * mpmath.npdf(z), [-12, -1, 0, 1, 12]))
    assert math.isclose(float(DUALS["gelu"].mean(sides[0])), means, rel_tol=1e-10)


@pytest.mark.parametrize(("name", "reach"), [("tanh", 3.5), ("sigmoid", 7.0), ("silu", 7.0), ("softplus", 9.0)])
def test_range_of_the_series(name: str, reach: float) -> None:
    """The series converges up to the stated standard deviation, and larger ones are refused at once."""
    pair = torch.tensor([reach, 0.1], dtype=torch.float64)
    product = pair[:, None] * pair * torch.tensor([[1.0, -0.5], [-0.5, 1.0]], dtype=torch.float64)
    found, slope = DUALS[name](Covariance.from_product(pair, pair, product))
    assert bool(found.product.isfinite().all() and slope.isfinite().all())
    started = time.perf_counter()
    for scale in (1.01 * reach, 1e6):
        with pytest.raises(ModelError, match=f"up to {reach:g}; normalise the inputs"):
            limit_kernel_dense(torch.full((1, 1), scale, dtype=torch.float64), activation=name)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("name", ["tanh", "gelu", "softplus"])
def test_series_in_float32(name: str) -> None:
    x = normal(6, 4).float()
    single = limit_kernel_dense(x, activation=name, depth=3)
    assert single.dtype == torch.float32
    assert relative(single.double(), limit_kernel_dense(x.double(), activation=name, depth=3)) < 1e-6


def test_parts_of_a_series_give_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a series is bounded by computing it for some positions at a time."""
    layers = nn.Conv1d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv1d(8, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(32, 1)
    net, x = nn.Sequential(*layers).double(), normal(3, 2, 6)
    whole = limit_kernel(net, x)
    monkeypatch.setitem(limit_hermite.ENTRIES, "cpu", 1)
    torch.testing.assert_close(limit_kernel(net, x), whole, rtol=1e-12, atol=0)


class Peak(TorchDispatchMode):
    """The largest number of bytes of the tensors that exist at once, of those that are made in this context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and id(t.untyped_storage()) not in given | self._known:
                storage = t.untyped_storage()
                self._known.add(id(storage))
                self.live += storage.nbytes()
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        return out

    def _gone(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.live -= size


def test_memory_of_a_series() -> None:
    """65536 scales have 209 values of an activation each, which would be 110 MB for each copy of them."""
    positions = 1 << 15
    scales = torch.linspace(0.1, 1, positions, dtype=torch.float64)[:, None]
    below = torch.full((positions, 1, 1), 0.3, dtype=torch.float64)
    with Peak() as peak:
        DUALS["tanh"](Covariance(scales, scales, below, 2 - below))
    assert 1 << 20 < peak.most < pairwise.DEFAULT["cpu"]


# ── distances by coordinates, and blocks ───────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["vgg", "strides", "resnet"])
def test_differences_by_coordinates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, differences are summed one coordinate after the other, as `torch.cdist` does for each pair."""
    make, inputs = MODULES[name]
    x = torch.cat([inputs(), -inputs()[:1], inputs()[:1] + 1e-12, 2 * inputs()[:1]])
    net = make(8).double()
    whole = limit_kernel(net, x, variances=variance)
    monkeypatch.setitem(direction.FEW, "cpu", 64)
    torch.testing.assert_close(limit_kernel(net, x, variances=variance), whole, rtol=1e-13, atol=0)


def test_coordinates_keep_the_precision_of_close_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    u = nn.functional.normalize(normal(4, 9), dim=1)
    v = u + 1e-9 * normal(4, 9, seed=1)
    exact = [
        float(sum((mpmath.mpf(a) - mpmath.mpf(b)) ** 2 for a, b in zip(s, t, strict=True)) / 2)
        for s, t in zip(u.tolist(), v.tolist(), strict=True)
    ]
    for most in (4, 64):
        monkeypatch.setitem(direction.FEW, "cpu", most)
        found = direction.half_distance(u, v).diagonal()
        torch.testing.assert_close(found, torch.tensor(exact, dtype=torch.float64), rtol=4e-15, atol=0)


def test_blocks_have_at_most_so_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "SIDE", 3)
    sizes = []

    def block(i: slice, j: slice) -> Tensor:
        sizes.append((i.stop - i.start, j.stop - j.start))
        return torch.ones(*sizes[-1])

    kernel = pairwise.by_slices(block, (8, None), torch.ones(0), 1000, False, "kernel")
    assert torch.equal(kernel, torch.ones(8, 8))
    assert max(max(each) for each in sizes) <= 3
    assert len(sizes) == 6
