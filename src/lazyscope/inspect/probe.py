"""What is compared before and after at a few moments of the training: kernel, features, activations, weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lazyscope._typing import Inputs, Params
from lazyscope.diagnose.activations import activation_stability
from lazyscope.diagnose.drift import kernel_drift, weight_displacement
from lazyscope.diagnose.sketch import KernelSketch
from lazyscope.errors import LazyscopeError, ModelError
from lazyscope.inspect.subject import Subject, moved, twin
from lazyscope.model.base import Model, flatten, plain_kernels, unflatten
from lazyscope.tangent import tangent_kernel

POINTS = 32
"""On which kernels and features are compared; a kernel at each moment is the dearest part."""


@final
@dataclass(frozen=True)
class Drift:
    """How far training has come at a step, relative to the start; None where the model has no such thing."""

    step: int
    weights: float
    kernel: float
    features: float | None
    activations: float | None


@final
class Probe:
    """Measures the drift at v, of a model scaled by α."""

    def __init__(self, subject: Subject, notes: list[str]) -> None:
        self._model = subject.model
        self._x, _ = subject.fewer(min(POINTS, subject.n))
        count = min(POINTS, subject.n)
        if count < subject.n:
            notes.append(f"Drifts of kernel, features and activations are measured on {count} of the points.")
        try:
            self._kernel: Tensor | KernelSketch = self._trace(self._model)
        except LazyscopeError:
            self._kernel = KernelSketch(self._model, self._x)
        self._features = None if subject.net is None else Features.of(subject.net, self._x)
        self._start = None if self._features is None else self._features(self._model.params, self._x)
        if self._features is None:
            notes.append("Features could not be told apart from outputs: the drift of features is left out.")
        self._kinked = True
        try:
            self._activations({name: torch.zeros_like(w) for name, w in self._model.params.items()}, 1.0)
        except ModelError:
            self._kinked = False
            notes.append("The model has no ReLU, so there is no activation pattern to compare.")

    def __call__(self, step: int, v: Params, alpha: float) -> Drift:
        """The drift at w₀ + v/α."""
        w = moved(self._model, v, alpha)
        return Drift(
            step,
            weight_displacement(self._model.params, w)[""],
            self._kernel_drift(w),
            self._feature_drift(v, alpha),
            self._activations(v, alpha) if self._kinked else None,
        )

    def _trace(self, model: Model) -> Tensor:
        return tangent_kernel(model, self._x, outputs="trace")

    def _kernel_drift(self, w: Params) -> float:
        if isinstance(self._kernel, KernelSketch):
            return self._kernel.drift(w)
        return kernel_drift(self._kernel, self._trace(self._model.at(w)))

    def _feature_drift(self, v: Params, alpha: float) -> float | None:
        if self._features is None or self._start is None:
            return None
        w = {name: p.double() + v[name].double() / alpha for name, p in self._model.params.items()}
        size = float(self._start.norm())
        return float((self._features(w, self._x) - self._start).norm()) / size if size > 0 else None

    def _activations(self, v: Params, alpha: float) -> float:
        return activation_stability(self._model, self._x, v, alpha).mean


@final
class Features:
    """What enters the last layer with weights of its own that the forward comes to: h's features, in float64."""

    def __init__(self, net: nn.Module, layer: str) -> None:
        self._net, self._layer = twin(net).requires_grad_(False), layer

    @classmethod
    def of(cls, net: nn.Module, x: Inputs) -> Features | None:
        """The features of a module, or nothing where its layers are not called on plain tensors."""
        seen: list[str] = []
        wide = twin(net)
        for name, module in wide.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda _module, _args, name=name: seen.append(name))
        try:
            with torch.no_grad(), plain_kernels:
                _call(wide, x)
            found = cls(net, seen[-1]) if seen else None
            if found is not None:
                found(dict(twin(net).named_parameters()), x)
        except (RuntimeError, TypeError, AttributeError):
            return None  # hooks saw no plain tensor: derivatives inside the forward, or keyword inputs
        return found

    def __call__(self, params: Params, x: Inputs) -> Float[Tensor, " numbers"]:
        """φ(w) on x, flattened."""
        caught: list[Tensor] = []
        module = self._net.get_submodule(self._layer)

        def catch(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append((*args, *kwargs.values())[0].detach().double().flatten())

        handle = module.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            with torch.no_grad(), plain_kernels:
                weights = {name: w.double() for name, w in params.items()}
                torch.func.functional_call(self._net, weights, *_arguments(x))
            whole = torch.cat(caught)
            whole.sum().item()  # a tensor of a transform that has ended has no numbers
        finally:
            handle.remove()
        return whole


def _arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    keys, leaves = flatten(x)
    wide = unflatten(keys, [leaf.double() if leaf.is_floating_point() else leaf for leaf in leaves])
    if isinstance(wide, dict):
        return (), wide
    return (wide if isinstance(wide, tuple) else (wide,)), {}


def _call(net: nn.Module, x: Inputs) -> None:
    args, kwargs = _arguments(x)
    net(*args, **kwargs)
