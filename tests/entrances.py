"""Every public computation on two small models, as functions that return the resulting numbers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.loss import Logistic, Square
from lazyscope.model.particles import Torus, Trigonometric
from lazyscope.theory.constants import GivenConstants, Spectrum

Numbers: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Data:
    """A network with three points and their targets."""

    net: nn.Module
    x: Tensor
    y: Tensor


class Encoder(nn.Module):
    """One layer with attention, layer norm and GELU, on sequences of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, activation="gelu", batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(x).mean(1))
        return out


def _drawn(net: nn.Module, *shape: int, dtype: torch.dtype) -> Data:
    """Create weights and data with fixed values, independent of the global generator and defaults of torch."""
    random = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64, device="cpu").to(dtype)

    net = net.to(dtype).eval()
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(draw(*weight.shape) / math.sqrt(weight.shape[-1]))
    return Data(net, draw(3, *shape), draw(3, 1))


def mlp(dtype: torch.dtype = torch.float64) -> Data:
    """A network with one hidden layer."""
    return _drawn(nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)), 2, dtype=dtype)


def encoder(dtype: torch.dtype = torch.float64) -> Data:
    """A transformer encoder."""
    return _drawn(Encoder(), 2, 4, dtype=dtype)


# ── one function per computation ───────────────────────────────────────────────────────────────────────────────────
def scaled(d: Data) -> Numbers:
    lazy = ls.Scaled(d.net, 10.0)
    for v in lazy.parameters():
        v.data.fill_(0.1)
    lazy(d.x).square().sum().backward()
    return {"value": lazy(d.x).detach(), **{n: v.grad for n, v in lazy.named_parameters() if v.grad is not None}}


def linearised(d: Data) -> Numbers:
    tangent = ls.Linearised(d.net)
    for v in tangent.parameters():
        v.data.fill_(0.1)
    return {"value": tangent(d.x).detach()}


def kernel(d: Data) -> Numbers:
    return {"kernel": ls.tangent_kernel(d.net, d.x)}


def kernel_by_layer(d: Data) -> Numbers:
    return ls.tangent_kernel(d.net, d.x, by_layer=True)


def operator(d: Data) -> Numbers:
    found = ls.TangentOperator(d.net, d.x)
    return {"product": found @ torch.ones(3, dtype=d.x.dtype, device="cpu")}


def spectra(d: Data) -> Numbers:
    layers = ls.layer_spectra(d.net, d.x)
    return {"all": ls.spectrum(d.net, d.x).eigenvalues, **{n: s.eigenvalues for n, s in layers.items()}}


def relative_scale(d: Data) -> Numbers:
    found = ls.relative_scale(d.net, d.x, d.y, starts=2)
    return numbers(kappa=found.kappa, jacobian=found.jacobian_norm, hessian=found.hessian_norm)


def gradient_flow(d: Data) -> Numbers:
    return _path(ls.gradient_flow(d.net, Square(), d.x, d.y, times=[0.0, 0.5]))


def tangent_flow(d: Data) -> Numbers:
    return _path(ls.tangent_flow(d.net, Square(), d.x, d.y, times=[0.5, math.inf], alpha=2.0, centred=True))


def tangent_ode(d: Data) -> Numbers:
    return _path(ls.tangent_flow(d.net, Logistic(), d.x, d.y.sign(), times=[0.0, 0.5]))


def descents(d: Data) -> Numbers:
    batches = ls.Minibatches(d.x, d.y, 2)
    plain = ls.gradient_descent(d.net, Square(), d.x, d.y, lr=0.1, steps=2, alpha=3.0)
    drawn = ls.stochastic_gradient_descent(d.net, Square(), d.x, d.y, sampler=batches, lr=0.1, steps=2)
    return {**_path(plain), "drawn": drawn.loss}


def ensemble(d: Data) -> Numbers:
    nets = ls.Ensemble([d.net, d.net])
    return _path(ls.gradient_descent(nets, Square(), d.x, d.y, lr=0.1, steps=2, alpha=[1.0, 2.0]))


def monitor(d: Data) -> Numbers:
    look = ls.Monitor(d.net, d.x, every=1)
    with torch.no_grad():
        for weight in d.net.parameters():
            weight.mul_(1.1)
    found = look()
    assert found is not None
    with torch.no_grad():
        for weight in d.net.parameters():
            weight.div_(1.1)
    return numbers(moved=found.displacement, missed=found.tangent_distance, drift=found.kernel_drift)


def inspection(d: Data) -> Numbers:
    report = ls.inspect(d.net, d.x, d.y, Square(), alphas=[10], steps=3, seconds=600)
    losses = {f"loss at {course.alpha:g}": listed(course.loss) for course in report.courses}
    return {**numbers(kappa=report.scale.kappa), **losses}


def certificates(d: Data) -> Numbers:
    constants = GivenConstants(Spectrum.of(ls.Model(d.net), d.x), 5.0, kind="estimate")
    found = ls.certify(d.net, Square(), d.x, d.y, alpha=100.0, centred=True, K=1e-3, points=1, constants=constants)
    return {"bounds": listed([each.bound for each in found if each.bounds])}


def limits(d: Data) -> Numbers:
    flat = d.x.flatten(1)
    images = torch.cat([flat, flat], 1)[:, None, :2, None].expand(-1, 1, 2, 2).contiguous()
    return {"dense": ls.limit_kernel_dense(flat), "convolution": ls.limit_kernel_convolution(images, depth=2)}


def tiles(d: Data) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        stored = ls.tangent_kernel_to_zarr(d.net, d.x, Path(folder) / "kernel.zarr", tile=2)
        fit = ls.kernel_regression(stored, d.x, d.y, ridge=0.1)
        here = ls.kernel_regression(d.net, d.x, d.y, ridge=0.1)
        fits = {"fit": fit.predict(d.x, model=d.net), "in memory": here.predict(d.x), "left out": here.leave_one_out}
        return {"kernel": torch.from_numpy(stored[:]), **fits}


def measures(d: Data) -> Numbers:
    wave = Trigonometric(order=1, dim=1)
    found = ls.solve_sparse(wave, d.y[:, 0].double(), penalty=1.0, domain=Torus(1), rounds=1, steps=10)
    return numbers(gap=found.gap, mass=float(found.measure.mass))


ENTRANCES: Mapping[str, Callable[[Data], Numbers]] = {
    each.__name__: each
    for each in (
        scaled,
        linearised,
        kernel,
        kernel_by_layer,
        operator,
        spectra,
        relative_scale,
        gradient_flow,
        tangent_flow,
        tangent_ode,
        descents,
        ensemble,
        monitor,
        inspection,
        certificates,
        limits,
        tiles,
        measures,
    )
}


def numbers(**found: float) -> Numbers:
    """Convert Python numbers to tensors."""
    return {name: torch.tensor(value, dtype=torch.float64, device="cpu") for name, value in found.items()}


def listed(values: Sequence[float]) -> Tensor:
    """Convert Python numbers to one tensor."""
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _path(found: ls.Trajectory) -> Numbers:
    return {"outputs": found.outputs, "loss": found.loss, "travel": found.travel}
