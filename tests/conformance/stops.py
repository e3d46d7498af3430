"""Models that stop a derivative or take a value out of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.conformance.ordinary import module, points
from tests.conformance.subject import Subject
from torch import Tensor, nn


class Stopped(nn.Module):
    """Two layers and a rule that combines them."""

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.left, self.right, self.rule = nn.Linear(3, 2), nn.Linear(3, 2), rule

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(torch.tanh(self.left(x)), self.right(x))


def _stopped(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Subject]:
    return lambda: Subject(module(Stopped(rule)), points())


def _detach(a: Tensor, b: Tensor) -> Tensor:
    return a * b.detach() + (a - b).square()


def _no_grad(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        scale = b.square().sum(-1, keepdim=True) + 1
    return a * b / scale


def _data(a: Tensor, b: Tensor) -> Tensor:
    return a * b.data + b


def _set_grad_enabled(a: Tensor, b: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        c = torch.sigmoid(a)
        with torch.enable_grad():
            d = b * b
    return c * d + a


def _inference(a: Tensor, b: Tensor) -> Tensor:
    c = b.detach().clone().requires_grad_(False)
    return a * c.exp()


def _straight_through(a: Tensor, b: Tensor) -> Tensor:
    hard = b + (b.round() - b).detach()
    return a * hard


detach, no_grad, data = _stopped(_detach), _stopped(_no_grad), _stopped(_data)
set_grad_enabled, requires_grad_false = _stopped(_set_grad_enabled), _stopped(_inference)
straight_through = _stopped(_straight_through)


def frozen_layer() -> Subject:
    """A layer whose parameters do not require gradients."""
    net = Stopped(lambda a, b: a * b)
    net.right.requires_grad_(False)
    return Subject(module(net), points())


class Exponential(torch.autograd.Function):
    """The function exp with its correct derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        product: Tensor = gradients[0] * y
        return product


class Reversal(torch.autograd.Function):
    """The identity with the sign of its gradient reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def _true_function(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = Exponential.apply(a)  # type: ignore[no-untyped-call]
    return out * b


def _false_function(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = Reversal.apply(a)  # type: ignore[no-untyped-call]
    return out * b


true_function, false_function = _stopped(_true_function), _stopped(_false_function)


# ── values that leave torch ────────────────────────────────────────────────────────────────────────────────────────
def _numpy(a: Tensor, b: Tensor) -> Tensor:
    return a * torch.from_numpy(b.detach().numpy().copy())


def _item(a: Tensor, b: Tensor) -> Tensor:
    return a * b.square().mean().item()


def _tolist(a: Tensor, b: Tensor) -> Tensor:
    return a * torch.tensor(b.tolist(), dtype=a.dtype)


def _float(a: Tensor, b: Tensor) -> Tensor:
    return a * float(b.detach().abs().max())


moved_numpy, moved_item, moved_tolist, moved_float = map(_stopped, (_numpy, _item, _tolist, _float))


class Inputs(nn.Module):
    """A rule that is applied to the inputs, before any parameter."""

    def __init__(self, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.rule = nn.Linear(3, 2), rule

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mix(x)) * self.rule(x)


def _inputs(rule: Callable[[Tensor], Tensor]) -> Callable[[], Subject]:
    return lambda: Subject(module(Inputs(rule)), points())


input_numpy = _inputs(lambda x: torch.from_numpy(abs(x.numpy()).sum(1, keepdims=True)))
input_tolist = _inputs(lambda x: torch.tensor([[sum(row)] for row in x.tolist()], dtype=x.dtype))


def input_item() -> Subject:
    """A model that calls `.item()` on an input, as a temperature for the whole batch."""

    class Warm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.mix(x)) * x.abs().max().item()

    return Subject(module(Warm()), points(), apart=False)
