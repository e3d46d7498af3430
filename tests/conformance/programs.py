"""Small random models, composed of operations on values of shape (n, 4) and three 4 × 4 parameters.

A program is a list of steps. A step applies one operation to two earlier values `h` and `g`, a matrix `W` and a row
`b` of the parameters, and appends its result. The output is a linear function of the last two values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from tests.conformance.subject import Subject
from torch import Tensor, nn

Operation = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function that maps (h, g, W, b) to a value of the shape of h."""

OPERATIONS: dict[str, Operation] = {}
COUPLED: set[str] = set()
"""Operations after which a row of the output may depend on every sample."""


def operation(function: Operation) -> Operation:
    """Register an operation under its name."""
    OPERATIONS[function.__name__] = function
    return function


def coupled(function: Operation) -> Operation:
    """Register an operation that couples samples."""
    COUPLED.add(function.__name__)
    return operation(function)


def _list(**table: Operation) -> None:
    OPERATIONS.update(table)


# Elementwise operations, smooth or with kinks.
_list(
    tanh=lambda h, g, W, b: torch.tanh(h),
    sine=lambda h, g, W, b: torch.sin(h + b),
    gauss=lambda h, g, W, b: torch.exp(-h.square()),
    softplus=lambda h, g, W, b: F.softplus(h - b),
    gelu=lambda h, g, W, b: F.gelu(h) + F.silu(b),
    logarithm=lambda h, g, W, b: torch.log1p(h.square()),
    root=lambda h, g, W, b: torch.sqrt(1 + h.square()) - torch.rsqrt(1 + g.square()),
    power=lambda h, g, W, b: (1 + h.square()) ** torch.sigmoid(b),
    arctangent=lambda h, g, W, b: torch.atan2(h, 2 + g.square()),
    relu=lambda h, g, W, b: F.relu(h + 0.1) + 0.1 * h,
    leaky=lambda h, g, W, b: F.leaky_relu(h - b, 0.2),
    absolute=lambda h, g, W, b: (h - 0.3).abs(),
    clamp=lambda h, g, W, b: torch.clamp(h, -0.7, 0.9) + 0.2 * h,
    extremes=lambda h, g, W, b: torch.maximum(h, g) - torch.minimum(h, b.expand_as(h)),
)
# Arithmetic and products.
_list(
    add=lambda h, g, W, b: h + 0.5 * g + b,
    multiply=lambda h, g, W, b: h * torch.tanh(g),
    divide=lambda h, g, W, b: h / (1 + g.square()),
    scalar=lambda h, g, W, b: h * W[0, 1] + W.sum() * 0.1,
    linear=lambda h, g, W, b: F.linear(h, W, b),
    matmul=lambda h, g, W, b: h @ W + g @ W.T,
    double_product=lambda h, g, W, b: h @ (W @ W.T),
    einsum=lambda h, g, W, b: torch.einsum("ni,ij,nj->nj", h, W, torch.tanh(g)),
    batched=lambda h, g, W, b: torch.bmm(h.unsqueeze(1), (W + torch.tanh(g).unsqueeze(1) * b.unsqueeze(-1))).squeeze(1),
    convolution=lambda h, g, W, b: F.conv1d(h.unsqueeze(1), W[:1, :3].unsqueeze(0), padding=1).squeeze(1),
    solve=lambda h, g, W, b: torch.linalg.solve(W @ W.T + 3 * torch.eye(4, dtype=h.dtype), h.T).T,
    attention=lambda h, g, W, b: F.scaled_dot_product_attention(h.view(-1, 2, 2), g.view(-1, 2, 2), (h * b).view(-1, 2, 2)).flatten(1),  # noqa: E501
)  # fmt: skip
# Reductions and normalisations.
_list(
    total=lambda h, g, W, b: h.sum(-1, keepdim=True) * 0.3 + g,
    spread=lambda h, g, W, b: h * h.std(-1, keepdim=True) + g.var(-1, keepdim=True),
    logsumexp=lambda h, g, W, b: h - torch.logsumexp(g, -1, keepdim=True),
    length=lambda h, g, W, b: torch.linalg.vector_norm(h + 2, dim=-1, keepdim=True) * b,
    product=lambda h, g, W, b: torch.prod(1 + 0.3 * torch.tanh(h), -1, keepdim=True) + g,
    largest=lambda h, g, W, b: h.amax(-1, keepdim=True) - g.amin(-1, keepdim=True) + b,
    running=lambda h, g, W, b: h.cumsum(-1) * 0.4,
    running_product=lambda h, g, W, b: torch.cumprod(1 + 0.3 * torch.tanh(h), -1),
    softmax=lambda h, g, W, b: torch.softmax(h, -1) * 2,
    log_softmax=lambda h, g, W, b: torch.log_softmax(h + b, -1),
    layer_norm=lambda h, g, W, b: F.layer_norm(h, (4,), W[1], b, eps=0.1),
    group_norm=lambda h, g, W, b: F.group_norm(h, 2, W[2], b, eps=0.1),
    rms_norm=lambda h, g, W, b: F.rms_norm(h, (4,), b, eps=0.1),
    normalise=lambda h, g, W, b: F.normalize(h + 1.5, dim=-1) * g,
)
# Constant indices, views and concatenations.
_list(
    permute=lambda h, g, W, b: h[:, [2, 0, 1, 1]] * 0.8,
    flip=lambda h, g, W, b: h.flip(-1) + g.roll(1, -1),
    transpose=lambda h, g, W, b: h.view(-1, 2, 2).mT.reshape(-1, 4),
    slices=lambda h, g, W, b: torch.cat([h[:, 1:3], g[:, ::2]], -1),
    stack=lambda h, g, W, b: torch.stack([h, g, h * g], 1).mean(1),
    chunks=lambda h, g, W, b: torch.cat([c * (i + 1) for i, c in enumerate(h.chunk(2, -1))], -1),
    unfold=lambda h, g, W, b: F.pad(h, (0, 1)).unfold(-1, 2, 1).sum(-1) * 0.6,
    diagonal=lambda h, g, W, b: h * W.diagonal() + torch.diag_embed(g).sum(1),
    triangle=lambda h, g, W, b: h @ W.tril() + W.triu(1).sum(0),
    repeated=lambda h, g, W, b: h.repeat_interleave(2, -1)[:, :4] + g.repeat(1, 2)[:, 2:6],
    strided=lambda h, g, W, b: torch.as_strided(h.contiguous(), h.shape, h.stride()) * b,
)


# ── computed indices and choices ───────────────────────────────────────────────────────────────────────────────────
_list(
    sort=lambda h, g, W, b: h.sort(-1).values * b,
    argsort=lambda h, g, W, b: g.gather(-1, h.argsort(-1)),
    topk=lambda h, g, W, b: torch.cat([h.topk(2, -1).values, g.gather(-1, h.topk(2, -1).indices)], -1),
    table=lambda h, g, W, b: W[h.argmax(-1)] * g,
    one_hot=lambda h, g, W, b: F.one_hot(h.argmin(-1), 4).to(h.dtype) * h + g,
    median=lambda h, g, W, b: h.median(-1, keepdim=True).values + g,
    median_of_each=lambda h, g, W, b: h * (h > g.median(-1, keepdim=True).values),
    where=lambda h, g, W, b: torch.where(h > g, h.sin(), g * 0.5),
    masked=lambda h, g, W, b: h.masked_fill(g > 0.3, 0.2) + b,
    gate=lambda h, g, W, b: (h > 0).to(h.dtype) * g,
    sign=lambda h, g, W, b: torch.sign(h) * g,
    rounded=lambda h, g, W, b: torch.round(2 * h) * 0.3 + g,
    floor=lambda h, g, W, b: torch.floor(h) * 0.3 + torch.frac(g),
    bins=lambda h, g, W, b: W[torch.bucketize(h.detach(), torch.tensor([-0.5, 0.0, 0.5], dtype=h.dtype))].sum(-1) * g,
)


@operation
def nonzero(h: Tensor, g: Tensor, W: Tensor, b: Tensor) -> Tensor:
    sample, unit = (h > 0.1).nonzero(as_tuple=True)
    return torch.zeros_like(g).index_put((sample, unit), (h * g)[sample, unit]) + b


@operation
def dispatch(h: Tensor, g: Tensor, W: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for expert in range(2):
        (rows,) = torch.where((h.sum(-1) > g.sum(-1)) == bool(expert))
        out = out.index_add(0, rows, g[rows] @ W * (expert + 0.5))
    return out


# ── complex intermediate values ────────────────────────────────────────────────────────────────────────────────────
_list(
    filtered=lambda h, g, W, b: torch.fft.irfft(torch.fft.rfft(h) * b[:3], n=4),
    rotated=lambda h, g, W, b: torch.view_as_real(torch.view_as_complex(h.reshape(-1, 2, 2)) * torch.polar(torch.ones(2, dtype=h.dtype), b[:2])).flatten(1),  # noqa: E501
    magnitude=lambda h, g, W, b: torch.fft.fft(h + 2).abs() * 0.2 + g,
    parts=lambda h, g, W, b: (torch.complex(h, g) * torch.complex(b, h)).real + torch.complex(g, h).conj().imag,
    circular=lambda h, g, W, b: torch.fft.ifft(torch.fft.fft(h) * torch.fft.fft(b)).real,
)  # fmt: skip


# ── writes in place ────────────────────────────────────────────────────────────────────────────────────────────────
@operation
def write_column(h: Tensor, g: Tensor, W: Tensor, b: Tensor) -> Tensor:
    c = h.clone()
    c[:, 0] = g[:, 1]
    c[:, 2:] *= b[:2]
    return c


@operation
def write_view(h: Tensor, g: Tensor, W: Tensor, b: Tensor) -> Tensor:
    c = h * 1.5
    part = c[:, 1:3]
    part.sin_()
    c += g
    return c


@operation
def write_masked(h: Tensor, g: Tensor, W: Tensor, b: Tensor) -> Tensor:
    c = h.clone()
    c[g > 0] *= 0.5
    return c + b


@operation
def write_index(h: Tensor, g: Tensor, W: Tensor, b: Tensor) -> Tensor:
    c = torch.zeros_like(h)
    c.scatter_add_(-1, h.argsort(-1), g)
    return c.addcmul_(h, b.expand_as(h), value=0.3)


@operation
def accumulate(h: Tensor, g: Tensor, W: Tensor, b: Tensor) -> Tensor:
    c = torch.zeros(len(h), 4, dtype=h.dtype)
    for i in range(3):
        c.add_(torch.tanh(h * W[i]))
    return c.mul_(g)


# ── stop-gradients ─────────────────────────────────────────────────────────────────────────────────────────────────
_list(
    detached=lambda h, g, W, b: h * g.detach() + b,
    data=lambda h, g, W, b: h.data * b + g,
    straight_through=lambda h, g, W, b: (h + (h.round() - h).detach()) * b,
    detached_weight=lambda h, g, W, b: h @ W.detach() + g,
    normed_by_constant=lambda h, g, W, b: h / (h.detach().norm(dim=-1, keepdim=True) + 1),
)


@operation
def no_grad(h: Tensor, g: Tensor, W: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        scale = 1 / (1 + g.square())
    return h * scale


@operation
def no_grad_mask(h: Tensor, g: Tensor, W: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        keep = (h > g).to(h.dtype)
        shift = g.mean(-1, keepdim=True)
    return h * keep + shift * b


# ── samples that depend on each other, and values that leave torch ─────────────────────────────────────────────────
COUPLED |= {"centred", "standardised", "softmax_over_samples"}
_list(
    centred=lambda h, g, W, b: h - g.mean(0),
    standardised=lambda h, g, W, b: h / (1 + g.var(0, unbiased=False)),
    softmax_over_samples=lambda h, g, W, b: torch.softmax(h, 0) + g,
)


@coupled
def branch(h: Tensor, g: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return h * 2 if bool(h.sum() > 0) else g


@coupled
def item(h: Tensor, g: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return h * g.square().mean().item()


# ── programs ───────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Step:
    """The operation `name`, applied to the values `h` and `g` counted from the end, and to the parameter `w`."""

    name: str
    h: int
    g: int
    w: int


@dataclass(frozen=True)
class Program:
    """A list of steps, and the seed of the weights and inputs."""

    steps: tuple[Step, ...]
    seed: int

    @property
    def apart(self) -> bool:
        """Whether the samples are independent of each other."""
        return not any(step.name in COUPLED for step in self.steps)

    def make(self) -> Subject:
        """Build the module and its inputs. The result is equal for every call."""
        draw = torch.Generator().manual_seed(self.seed)
        x = torch.randn(3, 4, generator=draw, dtype=torch.float64)
        return Subject(Interpreted(self, draw), x, reach=0.5, apart=self.apart)

    def __str__(self) -> str:
        lines = [f"  v{i + 2} = {s.name}(v[-{s.h}], v[-{s.g}], w{s.w})" for i, s in enumerate(self.steps)]
        return "\n".join([f"seed {self.seed}", *lines])


class Interpreted(nn.Module):
    """A program as a module."""

    def __init__(self, program: Program, draw: torch.Generator) -> None:
        super().__init__()
        new: Callable[..., Any] = lambda *shape: nn.Parameter(0.6 * torch.randn(*shape, generator=draw).double())  # noqa: E731
        self.steps = program.steps
        self.matrices = nn.ParameterList([new(4, 4) for _ in range(3)])
        self.rows = nn.ParameterList([new(4) for _ in range(3)])
        self.readout = new(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output, of shape (n, 2)."""
        values = [x @ self.matrices[0] + self.rows[0], torch.tanh(x @ self.matrices[1] + self.rows[1])]
        for step in self.steps:
            h, g = values[-step.h], values[-step.g]
            values.append(OPERATIONS[step.name](h, g, self.matrices[step.w], self.rows[step.w]))
        out: Tensor = (values[-1] + 0.5 * values[-2]) @ self.readout
        return out


def programs(longest: int = 6) -> st.SearchStrategy[Program]:
    """Draw programs of at most `longest` steps, independently, as hypothesis would otherwise vary earlier examples."""

    def drawn(random: Random) -> Program:
        names = random.sample(sorted(OPERATIONS), random.randint(1, longest))
        steps = [Step(name, random.randint(1, 2), random.randint(1, 2), random.randint(0, 2)) for name in names]
        return Program(tuple(steps), random.randint(0, 2**16))

    return st.randoms(use_true_random=True).map(drawn)
