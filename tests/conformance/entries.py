"""The entry points on a subject, compared with the float64 definition computed without lazyscope."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from tests.conformance.subject import Plain, Subject, call, first
from torch import Tensor, nn

import lazyscope as ls

ALPHA = 10.0
"""The finite scale of the table."""

STEPS = 3
"""The number of steps of gradient descent."""


class Wrong(AssertionError):
    """A result that differs from the definition."""


class Trial:
    """One subject, converted to a `Model` once, together with its reference."""

    def __init__(self, make: Callable[[], Subject], tolerance: float) -> None:
        self.make, self.tolerance = make, tolerance

    @cached_property
    def plain(self) -> Plain:
        """The reference."""
        return Plain(self.make)

    @cached_property
    def subject(self) -> Subject:
        """The subject that is passed to lazyscope. It is not shared with the reference."""
        return self.make()

    @cached_property
    def model(self) -> ls.Model:
        """The model as a user would build it. Errors of the constructor and of the first call are raised here."""
        found = bring(self.subject)
        found(self.subject.x)
        return found

    def target(self, seed: int = 2) -> Tensor:
        """Return targets, or weights of the outputs, in the precision of the model."""
        return self.plain.target(seed).to(self.model(self.subject.x).dtype)

    @property
    def points(self) -> int:
        """The number of points n."""
        return len(self.plain.initial)

    @cached_property
    def tile(self) -> tuple[int, int]:
        """The number of points n and of outputs per point k."""
        return self.points, self.plain.initial.numel() // self.points

    def agree(self, what: str, found: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
        """Raise `Wrong` if the error relative to the largest entry exceeds the tolerance."""
        if tuple(found.shape) != tuple(expected.shape):
            raise Wrong(f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
        found, expected = found.detach().double(), expected.detach().double()
        size = float(expected.abs().max()) if expected.numel() else 0.0
        error = float((found - expected).abs().max()) if expected.numel() else 0.0
        allowed = self.tolerance if tolerance is None else tolerance
        if not error <= allowed * max(size, 1e-3):
            raise Wrong(f"{what}: relative error {error / max(size, 1e-3):.1e}, allowed {allowed:g}")

    def close(self, what: str, found: float, expected: float, tolerance: float | None = None) -> None:
        """Compare two numbers in the same way."""
        self.agree(what, numbers(found), numbers(expected), tolerance)


def bring(subject: Subject) -> ls.Model:
    """Convert the subject to a `Model`."""
    if subject.params is not None:
        return ls.Model(subject.net, subject.params)
    return ls.Model(subject.net) if subject.output is None else ls.Model(subject.net, output=subject.output)


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore the warnings of lazyscope and those of torch about slow paths, which are not failures here."""
    with warnings.catch_warnings():
        for category in (ls.FallbackWarning, ls.KinkWarning, FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", message="There is a performance drop")
        warnings.filterwarnings("ignore", message=".*Sparse (CSR|invariant).*")
        yield


# ── one function for each entry point ──────────────────────────────────────────────────────────────────────────────
def evaluation(t: Trial) -> None:
    """Check `model(x)` and `model(x, params=w)`."""
    w = t.plain.at(t.plain.direction())
    t.agree("h(w₀)", t.model(t.subject.x), t.plain.initial)
    own = {name: value.to(t.model.params[name].dtype) for name, value in w.items()}
    t.agree("h(w)", t.model(t.subject.x, params=own), t.plain.value(w))


def scaled(t: Trial) -> None:
    """Check that `Scaled` gives α(h(w₀ + v/α) - h(w₀)), and that its gradient in v is that of h at w₀ + v/α."""
    v = {name: ALPHA * move for name, move in t.plain.direction().items()}
    w = t.plain.at(v, 1 / ALPHA)
    lazy = ls.Scaled(t.model, ALPHA)
    out = _called(lazy, v, t.subject.x)
    t.agree("value", out, ALPHA * (t.plain.value(w) - t.plain.initial))
    _agree_by_name(t, "gradient", _gradient(lazy, out, t.target(3)), t.plain.gradient(w, t.plain.target(3)))
    _agree_by_name(t, "weights()", {name: _pair(each) for name, each in lazy.weights().items()}, w)


def linearised(t: Trial) -> None:
    """Check that `Linearised` gives h(w₀) + Dh(w₀)v, and that its gradient in v is Dh(w₀)ᵀc."""
    v = t.plain.direction()
    tangent = ls.Linearised(t.model)
    out = _called(tangent, v, t.subject.x)
    t.agree("value", out, t.plain.initial + t.plain.along(v))
    cotangent = t.plain.target(3)
    expected = {
        name: (block.T @ cotangent.flatten()).reshape(t.plain.start[name].shape)
        for name, block in t.plain.jacobian.items()
    }
    _agree_by_name(t, "gradient", _gradient(tangent, out, t.target(3)), expected)


def kernel(t: Trial) -> None:
    """Check `tangent_kernel` for all outputs, their trace and their sum, and between two sets of points."""
    found = ls.tangent_kernel(t.model, t.subject.x)
    full = tiled(t.plain.kernel, t.tile)
    t.agree("full", found, full)
    t.agree("trace", ls.tangent_kernel(t.model, t.subject.x, outputs="trace"), full.diagonal(0, 2, 3).mean(-1))
    t.agree("sum", ls.tangent_kernel(t.model, t.subject.x, outputs="sum"), full.sum((2, 3)))
    if t.subject.apart:
        t.agree("x2", ls.tangent_kernel(t.model, t.subject.x, first(t.subject.x, 2)), full[:, :2])


def by_layer(t: Trial) -> None:
    """Check `tangent_kernel(by_layer=True)`, the kernel of each parameter."""
    found = ls.tangent_kernel(t.model, t.subject.x, by_layer=True)
    expected = {name: tiled(block @ block.T, t.tile) for name, block in t.plain.jacobian.items()}
    _agree_by_name(t, "kernel", found, expected)


def operator(t: Trial) -> None:
    """Check the products and the dense form of `TangentOperator`, with a batch size below the number of points."""
    op = ls.TangentOperator(t.model, t.subject.x, batch=_batch(t))
    t.agree("product", op @ t.target(4).flatten(), t.plain.kernel @ t.plain.target(4).flatten())
    t.agree("to_dense()", op.to_dense(), t.plain.kernel)


def spectrum(t: Trial) -> None:
    """Check all eigenvalues of `spectrum`, and the largest one computed matrix-free."""
    found = ls.spectrum(t.model, t.subject.x).eigenvalues
    values = torch.linalg.eigvalsh(t.plain.kernel).flip(0)
    t.agree("all", found, values)
    top = ls.spectrum(t.model, t.subject.x, top=1, batch=_batch(t)).eigenvalues
    t.agree("top=1", top[:1], values[:1], max(t.tolerance, 1e-8))


def relative_scale(t: Trial) -> None:
    """Check the factors of κ in `relative_scale`; no direction found by the power method gives a larger ‖D²h‖."""
    found = ls.relative_scale(t.model, t.subject.x, t.target(), batch=_batch(t))
    _check_scale(t, found, 1e-3)


def descent(t: Trial) -> None:
    """Check `gradient_descent(alpha=1)` against a plain loop with the gradients of the module."""
    y, lr, w = t.plain.target(), _step(t), dict(t.plain.start)
    outputs = [t.plain.initial]
    for _ in range(STEPS):
        slope = t.plain.gradient(w, (outputs[-1] - y) / t.points)
        w = {name: value - lr * slope[name] for name, value in w.items()}
        outputs.append(t.plain.value(w))
    path = ls.gradient_descent(
        t.model, ls.loss.Square(), t.subject.x, t.target(), lr=lr, steps=STEPS, record=range(STEPS + 1)
    )
    t.agree("outputs", path.outputs, torch.stack(outputs), 10 * t.tolerance)


def flow(t: Trial) -> None:
    """Check `gradient_flow(alpha=1)` against the classical Runge–Kutta method with the gradients of the module."""
    y, w, parts = t.plain.target(), dict(t.plain.start), 6
    horizon = 0.02 * _step(t)  # too short for the choices of the forward to change

    def slope(at: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gradient = t.plain.gradient(at, (t.plain.value(at) - y) / t.points)
        return {name: -g for name, g in gradient.items()}

    def moved(by: float, along: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value + by * along[name] for name, value in w.items()}

    for _ in range(parts):
        h = horizon / parts
        one = slope(w)
        two = slope(moved(h / 2, one))
        three = slope(moved(h / 2, two))
        four = slope(moved(h, three))
        w = {name: w[name] + h / 6 * (one[name] + 2 * two[name] + 2 * three[name] + four[name]) for name in w}
    path = ls.gradient_flow(
        t.model, ls.loss.Square(), t.subject.x, t.target(), times=[0.0, horizon], rtol=1e-8, atol=1e-11
    )
    t.agree("outputs", path.outputs[-1], t.plain.value(w), max(t.tolerance, 1e-6))


def tangent_flow(t: Trial) -> None:
    """Check that `tangent_flow` gives y* + exp(-Kt/n)(h(w₀) - y*)."""
    y, time = t.plain.target(), _step(t)
    values, vectors = torch.linalg.eigh(t.plain.kernel / t.points)
    gap = vectors @ ((-values * time).exp() * (vectors.T @ (t.plain.initial - y).flatten()))
    path = ls.tangent_flow(t.model, ls.loss.Square(), t.subject.x, t.target(), times=[0.0, time])
    t.agree("outputs", path.outputs[-1], y + gap.reshape(y.shape))


def inspect(t: Trial) -> None:
    """Check κ with its factors, λ₁, and the loss curves of `inspect` at α = 1, at α = 10 and of the tangent model."""
    y = t.plain.target()
    report = ls.inspect(t.model, t.subject.x, t.target(), alphas=(1.0, ALPHA), steps=STEPS, seconds=2)
    top = float(torch.linalg.eigvalsh(t.plain.kernel / t.points)[-1])
    t.close("λ₁", report.tangent.top, top)
    _check_scale(t, report.scale.relative, 0.5)  # its search has a time budget
    lr = report.limits.lr
    for course in report.courses:
        losses = t.plain.losses(y, lr, course.alpha, course.steps)
        t.agree(f"losses at α = {course.alpha:g}", numbers(*course.loss), numbers(*losses), 10 * t.tolerance)
    steps = report.tangents.steps
    straight = numbers(*t.plain.tangent_losses(y, lr, steps))
    t.agree("losses of the tangent model", numbers(*report.tangents.loss), straight, 10 * t.tolerance)


def monitor(t: Trial) -> None:
    """Check the displacement, tangent distance and kernel drift of `Monitor` after a change of the weights."""
    net = t.make().net
    if not isinstance(net, nn.Module):
        return
    extra: dict[str, Any] = {} if t.subject.output is None else {"output": t.subject.output}
    watch = ls.Monitor(net, t.subject.x, every=1, columns=8, **extra)
    v = {name: 0.2 * move for name, move in t.plain.direction().items()}
    w = t.plain.at(v)
    with torch.no_grad():
        for name, p in zip(t.plain.start, (p for p in net.parameters() if p.requires_grad), strict=True):
            _pair(p).copy_(w[name])
    record = watch.look()
    size = math.sqrt(sum(float(a.square().sum()) for a in t.plain.start.values()))
    t.close("displacement", record.displacement, math.sqrt(sum(float(a.square().sum()) for a in v.values())) / size)
    moved = t.plain.value(w) - t.plain.initial
    gap = float((moved - t.plain.along(v)).norm())
    t.close("tangent distance", record.tangent_distance, gap / float(moved.norm()))
    now = sum((block @ block.T for block in t.plain.jacobian_at(w).values()), torch.zeros(()))
    drift = float((now - t.plain.kernel).norm() / t.plain.kernel.norm())
    if not drift / 4 - 1e-9 <= record.kernel_drift <= 4 * drift + 1e-9:  # estimated from eight random columns
        raise Wrong(f"kernel drift: {record.kernel_drift:.3g}, and {drift:.3g} is true")


ENTRIES: dict[str, Callable[[Trial], None]] = {
    "Model": evaluation,
    "Scaled": scaled,
    "Linearised": linearised,
    "tangent_kernel": kernel,
    "by_layer": by_layer,
    "TangentOperator": operator,
    "spectrum": spectrum,
    "relative_scale": relative_scale,
    "gradient_descent": descent,
    "gradient_flow": flow,
    "tangent_flow": tangent_flow,
    "inspect": inspect,
    "Monitor": monitor,
}


# ── helpers ────────────────────────────────────────────────────────────────────────────────────────────────────────
def numbers(*values: float) -> Tensor:
    """Return floats as a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def tiled(matrix: Tensor, tile: tuple[int, int]) -> Tensor:
    """Reshape a matrix over the outputs of all points to (n, n, k, k)."""
    n, k = tile
    return matrix.reshape(n, k, n, k).permute(0, 2, 1, 3)


def _pair(w: Tensor) -> Tensor:
    """View complex numbers as pairs of reals."""
    return torch.view_as_real(w) if w.is_complex() else w


def _called(module: nn.Module, v: Mapping[str, Tensor], x: Any) -> Tensor:
    """Call the module at v as the network is called, and check that a single tuple or dict gives the same result."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            _pair(p).copy_(v[name])
    out: Tensor = call(module, x)
    with torch.no_grad():
        whole = module(x)
    if not torch.equal(out.detach(), whole):
        raise Wrong("module(x) differs from module(*args, **kwargs)")
    return out


def _gradient(module: nn.Module, out: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    names, leaves = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad((out * cotangent).sum(), leaves, materialize_grads=True)
    return {name: _pair(g) for name, g in zip(names, found, strict=True)}


def _agree_by_name(t: Trial, what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare tensors by name, relative to the largest entry of all, as some gradients may be rounding errors."""
    if set(found) != set(expected):
        raise Wrong(f"{what}: names {sorted(found)} instead of {sorted(expected)}")
    t.agree(
        what,
        torch.cat([found[name].flatten() for name in expected]),
        torch.cat([value.flatten() for value in expected.values()]),
    )


def _batch(t: Trial) -> int:
    """Return a batch size below the number of points if samples are independent, and otherwise at most 128."""
    return max(1, t.points - 1) if t.subject.apart else min(128, t.points)


def _step(t: Trial) -> float:
    """Return a stable step size: half of the inverse of the largest eigenvalue of K/n."""
    return 0.5 * t.points / float(torch.linalg.eigvalsh(t.plain.kernel)[-1])


def _check_scale(t: Trial, found: ls.RelativeScale, slack: float) -> None:
    root = math.sqrt(t.points)
    t.close("residual", found.residual, float((t.plain.initial - t.plain.target()).norm()) / root)
    norm = math.sqrt(float(torch.linalg.eigvalsh(t.plain.kernel)[-1])) / root
    t.close("‖Dh‖", found.jacobian_norm, norm, max(t.tolerance, 1e-8))
    u = found.search.direction.double()
    attained = float((t.plain.second(u) @ u).norm()) / root
    t.close("‖D²h‖ as attained", found.hessian_norm, attained, max(t.tolerance, 1e-8))
    rival = t.plain.rival / root
    if found.hessian_norm < rival * (1 - slack) - 1e-12:
        raise Wrong(f"‖D²h‖: {found.hessian_norm:.6g}, and {rival:.6g} is attained elsewhere")
