"""The outputs of all layers of a net as one output, so that their increments come from one program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Params
from lazyscope.ambient import derivatives
from lazyscope.errors import ModelError
from lazyscope.labels import as_target
from lazyscope.loss import Loss, Risk, check_loss, matching_loss
from lazyscope.model.base import Model
from lazyscope.model.coordinates import Coordinates
from lazyscope.model.inputs import Call

FEW = 4
"""The number of layers of a group of which the own changes are measured."""


@final
class Probe(nn.Module):
    """A net that returns its own output and those of its layers, one row per sample.

    Args:
        net: The net.
        layers: The names of the layers.
    """

    def __init__(self, net: nn.Module, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.net, self.layers = net, layers

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the outputs, joined along the second dimension.

        Args:
            *args: The positional arguments of the net.
            **kwargs: The keyword arguments of the net.

        Returns:
            A tensor of shape (n, sizes).
        """
        with heard(self.net, self.layers) as seen:
            out = self.net(*args, **kwargs)
        return torch.cat([_rows(out), *(_rows(seen[name][1]) for name in self.layers)], dim=1)


@contextmanager
def heard(net: nn.Module, layers: tuple[str, ...]) -> Iterator[dict[str, tuple[Any, Tensor]]]:
    """Collect the first input and the output of layers during a forward pass.

    Args:
        net: The net.
        layers: The names of its layers.

    Yields:
        A dictionary that the forward pass fills.
    """
    seen: dict[str, tuple[Any, Tensor]] = {}

    def listener(name: str) -> Any:
        def listen(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, Tensor) or name in seen:
                raise ModelError(
                    f"The layer '{name}' runs more than once, or does not return one tensor, so that it has no"
                    " coordinates to check; leave it out with `layers`."
                )
            seen[name] = (args[0] if args else None), output

        return listen

    handles = [net.get_submodule(name).register_forward_hook(listener(name)) for name in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def layers_of(net: nn.Module) -> tuple[str, ...]:
    """Return the names of all modules that own trainable parameters, in the order of the net.

    Args:
        net: The net.

    Returns:
        The names, without those of parametrisations, which belong to their layers.
    """
    owners = {_owner(name) for name, p in net.named_parameters() if p.requires_grad}
    return tuple(name for name, _ in net.named_modules() if name in owners)


def _owner(parameter: str) -> str:
    """The layer that a parameter belongs to, from `layer.weight` or `layer.parametrizations.weight.original`."""
    before, found, _ = parameter.partition(".parametrizations.")
    return before if found else parameter.rpartition(".")[0]


@final
@dataclass(frozen=True)
class Measured:
    """How the coordinates of the layers of one net start and change, as root mean squares."""

    start: dict[str, float]
    """The output of a layer over its input, before training."""
    change: dict[str, float]
    """The change of the output of a layer after all steps. The name "" is the output of the net."""
    own: dict[str, float]
    """That part of it which the weights of the layer itself cause, with its first input."""
    rate: dict[str, float]
    """The change of the output of a layer by its own matrices in the first step, over the gradient with respect to this
    output, its number of coordinates, and the mean square of the input."""
    vector_rate: dict[str, float]
    """The same for its vectors, such as a bias or a gain, without the input."""
    effect: dict[str, float]
    """The change of the output of the net if only the weights of one group of layers have moved."""
    sizes: dict[str, tuple[int, int]]
    """The number of coordinates of the input and of the output of a layer, per sample."""


def measure(
    net: nn.Module,
    x: Inputs,
    y: Any,
    loss: Loss | None,
    lr: float,
    steps: int,
    groups: Mapping[str, str],
) -> Measured:
    """Take a few steps of gradient descent, in increments, and measure the coordinates of the layers.

    Args:
        net: The net.
        x: The inputs.
        y: The targets.
        loss: The loss, or None for one that matches the targets.
        lr: The learning rate.
        steps: The number of steps.
        groups: The group of each layer to study.

    Returns:
        The measurements.
    """
    layers = tuple(groups)
    plain = Model(net)
    with torch.no_grad():
        outputs = plain(x)
    target = as_target(y, outputs)
    risk = (matching_loss(target, outputs) if loss is None else check_loss(loss)).risk(outputs, target, 0)
    seen = _at_start(net, layers, x, risk)
    whole = Model(Probe(net, layers)).coordinates(x, 1.0, centred=True)
    widths = [outputs.flatten(1).shape[1], *(seen[name].outputs for name in layers)]
    first, last = _descend(whole, outputs, risk, lr, steps, widths[0])
    parts = _parts(whole, last, widths, layers)
    named = {group: [name for name in layers if groups[name] == group] for group in dict.fromkeys(groups.values())}
    some = [name for members in named.values() for name in _few(members)]
    alone = {name: _parts(whole, _only(last, {name}), widths, layers)[name] for name in some}
    matrices = {name: value if value.ndim > 1 else torch.zeros_like(value) for name, value in first.items()}
    vectors = {name: value if value.ndim < 2 else torch.zeros_like(value) for name, value in first.items()}
    steps_of = {
        name: [_rms(_parts(whole, _only(v, {name}), widths, layers)[name]) for v in (matrices, vectors)]
        for name in some
    }
    return Measured(
        start={name: layer.gain for name, layer in seen.items()},
        change={name: _rms(part) for name, part in parts.items()},
        own={name: _rms(part) for name, part in alone.items()},
        rate={name: _over(steps_of[name][0], seen[name].unit * seen[name].size ** 2) for name in some},
        vector_rate={name: _over(steps_of[name][1], seen[name].unit) for name in some},
        effect={g: _rms(_parts(whole, _only(last, {*members}), widths, layers)[""]) for g, members in named.items()},
        sizes={name: (layer.inputs, layer.outputs) for name, layer in seen.items()},
    )


def _few(members: list[str]) -> list[str]:
    """A few layers of a group, evenly spaced: each needs an evaluation of the whole net."""
    return [members[i] for i in sorted({round(i * (len(members) - 1) / (FEW - 1)) for i in range(FEW)})]


@final
@dataclass(frozen=True)
class _Layer:
    """A layer in one forward and backward pass at the start."""

    inputs: int
    """The number of coordinates of its input, per sample."""
    outputs: int
    """The number of coordinates of its output, per sample."""
    slope: Tensor
    """The gradient of the loss with respect to its output."""
    gain: float
    """The root mean square of its output over that of its input."""
    size: float
    """The root mean square of its input; 1 for an input of integers."""

    @property
    def unit(self) -> float:
        """The gradient times the number of coordinates, which a step with maximal updates is proportional to."""
        return _rms(self.slope) * self.outputs


def _at_start(net: nn.Module, layers: tuple[str, ...], x: Inputs, risk: Risk) -> dict[str, _Layer]:
    """Run the net forward and backward once."""
    call = Call.of(x)
    with derivatives(), heard(net, layers) as seen:
        out = net(*call.args, **call.kwargs)
        slopes = torch.autograd.grad(risk(out), [seen[name][1] for name in layers], retain_graph=True)
        return {name: _layer(*seen[name], slope) for name, slope in zip(layers, slopes, strict=True)}


def _layer(into: Any, out: Tensor, slope: Tensor) -> _Layer:
    if not (isinstance(into, Tensor) and into.is_floating_point()):
        return _Layer(1, _rows(out).shape[1], slope, _rms(out), 1.0)
    many, few = _rows(into).shape[1], _rows(out).shape[1]
    gain = _over(_rms(out), _rms(into))
    if many > few and into.requires_grad and bool(slope.any()):
        # The mean of a few outputs is random, and the gradient has more coordinates: for a linear layer with weights
        # of variance σ², both gains are σ√fan_in.
        (back,) = torch.autograd.grad(out, into, slope, retain_graph=True)
        gain = _rms(back) / _rms(slope) * math.sqrt(many / few)
    return _Layer(many, few, slope, gain, _rms(into))


def _descend(
    whole: Coordinates, outputs: Tensor, risk: Risk, lr: float, steps: int, size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take the steps, and return v after the first and after the last."""
    v = whole.zeros()
    first = v
    for step in range(steps):
        moved, pull = whole.linearise(v)
        slope = torch.zeros_like(moved)
        now = outputs + moved[:, :size].reshape(outputs.shape)
        slope[:, :size] = _rows(risk.gradient(now)) / len(outputs)
        v = {
            name: value - lr * gradient for (name, value), gradient in zip(v.items(), pull(slope).values(), strict=True)
        }
        first = v if step == 0 else first
    return first, v


def _parts(whole: Coordinates, v: Params, widths: list[int], layers: tuple[str, ...]) -> dict[str, Tensor]:
    with torch.no_grad():
        pieces = whole.outputs(v).split(widths, dim=1)
    return dict(zip(("", *layers), pieces, strict=True))


def _only(v: Params, layers: set[str]) -> dict[str, Tensor]:
    """Keep the movement of some layers; the names of a probe begin with `net.`."""
    return {
        name: value if _owner(name).removeprefix("net").removeprefix(".") in layers else torch.zeros_like(value)
        for name, value in v.items()
    }


def _rows(t: Tensor) -> Tensor:
    return t.reshape(len(t), -1)


def _rms(t: Tensor) -> float:
    return float(t.detach().double().square().mean().sqrt())


def _over(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan
