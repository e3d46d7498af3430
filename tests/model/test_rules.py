"""Each increment rule separately, on random arguments, steps and scales."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from lazyscope import FallbackWarning, Model, Scaled
from lazyscope.errors import OperationError
from lazyscope.model.increment import Program, Scale, capture, split

Function = Callable[[Tensor], Tensor]

# name → (function of a matrix, whether its argument must be positive)
FUNCTIONS: dict[str, tuple[Function, bool]] = {
    "exp": (torch.exp, False),
    "expm1": (torch.expm1, False),
    "exp2": (torch.exp2, False),
    "log": (torch.log, True),
    "log1p": (torch.log1p, True),
    "log2": (torch.log2, True),
    "log10": (torch.log10, True),
    "sqrt": (torch.sqrt, True),
    "rsqrt": (torch.rsqrt, True),
    "reciprocal": (torch.reciprocal, True),
    "square": (torch.square, False),
    "cube": (lambda t: t**3, False),
    "power 2.5": (lambda t: t**2.5, True),
    "power -2": (lambda t: t**-2, True),
    "base 3": (lambda t: 3.0**t, False),
    "t to the t": (lambda t: t**t, True),
    "sin": (torch.sin, False),
    "cos": (torch.cos, False),
    "sinh": (torch.sinh, False),
    "cosh": (torch.cosh, False),
    "atan": (torch.atan, False),
    "tanh": (torch.tanh, False),
    "sigmoid": (torch.sigmoid, False),
    "silu": (lambda t: F.silu(t), False),
    "gelu": (F.gelu, False),
    "gelu tanh": (lambda t: F.gelu(t, approximate="tanh"), False),
    "erf": (torch.erf, False),
    "erfc": (torch.erfc, False),
    "softplus": (lambda t: F.softplus(t, beta=2.0), False),
    "logsigmoid": (F.logsigmoid, False),
    "relu": (torch.relu, False),
    "relu6": (lambda t: F.relu6(t), False),
    "leaky": (lambda t: F.leaky_relu(t, 0.2), False),
    "elu": (lambda t: F.elu(t, 1.3), False),
    "hardsigmoid": (lambda t: F.hardsigmoid(t), False),
    "hardswish": (lambda t: F.hardswish(t), False),
    "clamp": (lambda t: t.clamp(-0.5, 0.7), False),
    "clamp below": (lambda t: t.clamp(min=0.1), False),
    "abs": (torch.abs, False),
    "maximum": (lambda t: torch.maximum(t, 0.5 * t.flip(0)), False),
    "minimum": (lambda t: torch.minimum(t, t.new_tensor(0.2)), False),
    "softmax": (lambda t: t.softmax(-1), False),
    "log_softmax": (lambda t: t.log_softmax(0), False),
    "logsumexp": (lambda t: t.logsumexp(-1), False),
    "logsumexp all": (lambda t: t.logsumexp((0, 1)), False),
    "layer_norm": (lambda t: F.layer_norm(t, (t.shape[-1],)), False),
    "var": (lambda t: t.var(0), False),
    "std": (lambda t: t.std(-1, unbiased=False), False),
    "norm": (lambda t: torch.linalg.vector_norm(t, dim=-1), False),
    "1-norm": (lambda t: torch.linalg.vector_norm(t, 1, dim=-1), False),
    "amax": (lambda t: t.amax((0, 1)), False),
    "amin": (lambda t: t.amin(-1), False),
    "max": (lambda t: t.max(0).values, False),
    "min": (lambda t: t.min(), False),
    "divide": (lambda t: t / (2.0 + t.square()), False),
    "matrix": (lambda t: t @ t.T, False),
    "mask": (lambda t: t * (t > 0.1), False),
    "where": (lambda t: torch.where(t > 0, t * t, -t), False),
    "masked_fill": (lambda t: t.masked_fill(t.detach() < -1, 0.0) + t, False),
    "cumsum": (lambda t: t.cumsum(0).prod(-1), False),
    "index": (lambda t: t[:, [0, 2]] + t[1:2, 1:3], False),
    "pad": (lambda t: F.pad(t, (1, 2), value=3.0).roll(1, 0), False),
    "addcmul": (lambda t: torch.addcmul(t, t, t.sin(), value=0.5), False),
    "baddbmm": (
        lambda t: torch.baddbmm(t[None], t[None], t.T[None].expand(1, -1, -1)[..., : t.shape[1]] @ t[None]),
        False,
    ),
}


@pytest.mark.filterwarnings("ignore::lazyscope.FallbackWarning")  # prod has no rule and tests the fallback
@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.floats(0.01, 2.0), log_alpha=st.floats(-1.0, 8.0))
def test_rule_in_float64_and_float32(name: str, seed: int, size: float, log_alpha: float) -> None:
    function, positive = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(4, 4, generator=generator)
    start = start.abs() + 0.5 if positive else start
    move = size * torch.randn(4, 4, generator=generator)
    alpha = 10.0**log_alpha
    move = move.clamp(-0.4 * alpha, 0.4 * alpha) if positive else move  # within the domain of the function

    wide = start.double(), move.double()
    reference = alpha * (function(wide[0] + wide[1] / alpha) - function(wide[0]))
    # Sums of moves may cancel. Then three float32 roundings of the moves (2e-5 · 1e-2 = 3 · 6e-8) are allowed.
    scale = reference.norm() + 1e-2 * move.norm()
    # The error of the reference is about a dozen roundings of the function's value, times α.
    lost = 12.0 * alpha * torch.finfo(torch.float64).eps * function(wide[0]).norm()
    found = increment(name, start, move, alpha)
    assert float((found.double() - reference).norm()) < 2e-5 * float(scale) + float(lost)
    exact = increment(name, *wide, alpha)
    assert float((exact - reference).norm()) < 1e-11 * float(scale) + float(lost)
    tangent = torch.func.jvp(function, (wide[0],), (wide[1],))[1]
    # torch's derivatives of hardsigmoid and hardswish use 1/6 in float32.
    rtol = 1e-7 if name.startswith("hards") else 1e-9
    torch.testing.assert_close(increment(name, *wide, math.inf), tangent, rtol=rtol, atol=1e-11)


@functools.cache
def program(name: str, dtype: torch.dtype) -> Program:
    return split(capture(FUNCTIONS[name][0], [torch.rand(4, 4, dtype=dtype) + 0.5], 1, 1), 1)


def increment(name: str, start: Tensor, move: Tensor, alpha: float) -> Tensor:
    """Compute Δ of a function by the increment rules."""
    traced = program(name, start.dtype)
    return traced.increment(Scale.of(alpha), [move], traced.exact_base(start))


POOLS: dict[str, Callable[[], nn.Module]] = {
    "max 1d": lambda: nn.MaxPool1d(3, 2, 1),
    "max 2d": lambda: nn.MaxPool2d((3, 2), stride=(2, 1), padding=(1, 1)),
    "max 2d dilated": lambda: nn.MaxPool2d(2, 1, dilation=2),
    "max 2d ceil": lambda: nn.MaxPool2d(3, 2, ceil_mode=True),
    "max 3d": lambda: nn.MaxPool3d(2),
    "average 1d": lambda: nn.AvgPool1d(2),
    "average 2d": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "average 3d": lambda: nn.AvgPool3d(2),
    "adaptive max 1d": lambda: nn.AdaptiveMaxPool1d(2),
    "adaptive max 2d": lambda: nn.AdaptiveMaxPool2d((2, 3)),
    "adaptive average 2d": lambda: nn.AdaptiveAvgPool2d((3, 2)),
    "adaptive average 3d": lambda: nn.AdaptiveAvgPool3d(2),
    "power average": lambda: nn.LPPool2d(2, 2),
    "circular": lambda: nn.CircularPad2d(1),
    "reflection": lambda: nn.ReflectionPad2d(1),
    "upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "transposed": lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1),
    "conv 3d": lambda: nn.Conv3d(2, 2, 2),
    "instance": lambda: nn.InstanceNorm2d(2, affine=True),
    "unfold": lambda: nn.Unfold(2),
}


@pytest.mark.parametrize("name", POOLS)
def test_layers_of_every_dimension(name: str) -> None:
    torch.manual_seed(3)
    layer = POOLS[name]()
    rank = 1 if "1d" in name else 3 if "3d" in name else 2
    x = torch.randn(2, 2, *(7, 6, 5)[:rank])
    net = nn.Sequential((nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](2, 2, 1), layer)
    model = Model(net)
    v = {k: 0.5 * torch.randn_like(w) for k, w in model.params.items()}
    wide = model.double()
    moves = {k: t.double() for k, t in v.items()}
    for alpha in (0.5, 30.0, 1e6, math.inf):
        found = model.coordinates(x, alpha, centred=True).outputs(v)
        if math.isinf(alpha):
            reference = torch.func.jvp(lambda w: wide(x.double(), w), (dict(wide.params),), (moves,))[1]
        else:
            now = {k: w + moves[k] / alpha for k, w in wide.params.items()}
            reference = alpha * (wide(x.double(), now) - wide(x.double()))
        assert float((found.double() - reference).norm() / reference.norm()) < 2e-6, f"at α = {alpha}"


def test_an_operation_without_a_rule_falls_back_and_says_so_once_per_model() -> None:
    start = torch.rand(3, 3) + 3.0 * torch.eye(3)
    model = Model(lambda w, x: torch.linalg.inv(w["w"]) @ x.T, {"w": start})
    x = torch.randn(5, 3)
    with pytest.warns(FallbackWarning, match="linalg_inv") as said:
        coordinates = model.coordinates(x, 1e7, centred=True)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.coordinates(torch.randn(4, 3), 1e7)  # another shape is traced again, without a second warning
    with pytest.warns(FallbackWarning, match="linalg_inv"):  # another model issues its own
        Model(lambda w, x: torch.linalg.inv(w["w"]) @ x.T, {"w": start}).coordinates(x, 1e7, centred=True)
    move = torch.randn(3, 3)
    tangent = torch.func.jvp(lambda w: torch.linalg.inv(w) @ x.double().T, (start.double(),), (move.double(),))[1]
    torch.testing.assert_close(coordinates.outputs({"w": move}).double(), tangent, rtol=1e-4, atol=1e-5)


def test_in_place_code_and_views_are_followed() -> None:
    def forward(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        y = x @ w["w"]
        part = y[:, :2]
        part.mul_(3.0)  # writes through a view, so that y changes too
        y.add_(1.0).tanh_()
        y[:, -1] = y[:, 0] * y[:, 1]
        return y

    model = Model(forward, {"w": torch.randn(3, 4)})
    x, move, alpha = torch.randn(5, 3), torch.randn(3, 4), 1e5
    wide = model.double()
    now = {"w": wide.params["w"] + move.double() / alpha}
    reference = alpha * (wide(x.double(), now) - wide(x.double()))
    found = model.coordinates(x, alpha, centred=True).outputs({"w": move})
    assert float((found.double() - reference).norm() / reference.norm()) < 2e-5


def test_an_operation_without_derivative_is_refused_with_the_remedy() -> None:
    scaled = Scaled(Model(lambda w, x: torch.igamma(w["w"] * x, x), {"w": torch.ones(3)}), math.inf)
    with pytest.warns(FallbackWarning), pytest.raises(OperationError, match="replace it"):
        scaled(torch.rand(2, 3))
