"""Measurement of how far the weights, the kernel, the features and the activations have changed during training."""

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
from lazyscope.model.base import Model, plain_kernels
from lazyscope.model.inputs import Samples
from lazyscope.tangent import tangent_kernel

POINTS = 32
"""The number of points on which kernels and features are compared. Computing kernels is the most expensive part."""


@final
@dataclass(frozen=True)
class Drift:
    """The changes since the start of training, at one step.

    Args:
        step: The step.
        weights: ‖w - w₀‖/‖w₀‖.
        kernel: ‖K - K₀‖/‖K₀‖.
        features: ‖φ - φ₀‖/‖φ₀‖ of the inputs φ of the last layer, or None if they could not be determined.
        activations: The share of ReLUs in the same state as at the start, or None if the model has no ReLU.
    """

    step: int
    weights: float
    kernel: float
    features: float | None
    activations: float | None


@final
class Probe:
    """A function that measures the changes since the start of training.

    Args:
        subject: The model with its data and loss.
        notes: A list to which notes for the report are added.
    """

    def __init__(self, subject: Subject, notes: list[str]) -> None:
        self._model = subject.model
        self._x, _ = subject.fewer(min(POINTS, subject.n))
        count = min(POINTS, subject.n)
        if count < subject.n:
            notes.append(f"The changes of kernel, features and activations are measured on {count} of the points.")
        try:
            self._kernel: Tensor | KernelSketch = self._trace(self._model)
        except LazyscopeError:
            self._kernel = KernelSketch(self._model, self._x)
        self._features = None if subject.net is None else Features.of(subject.net, self._x)
        self._start = None if self._features is None else self._features(self._model.params, self._x)
        if self._features is None:
            notes.append("The features could not be determined, so their change is not reported.")
        self._kinked = True
        try:
            self._activations({name: torch.zeros_like(w) for name, w in self._model.params.items()}, 1.0)
        except ModelError:
            self._kinked = False
            notes.append("The model has no ReLU, so activation patterns are not compared.")

    def __call__(self, step: int, v: Params, alpha: float) -> Drift:
        """Measure the changes at the weights w₀ + v/α.

        Args:
            step: The step, which is stored in the result.
            v: The increment.
            alpha: The scale α.

        Returns:
            The changes.
        """
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
    """The features of a module: the inputs of the last layer with parameters in the forward pass, in float64.

    Args:
        net: The module.
        layer: The name of the layer.
    """

    def __init__(self, net: nn.Module, layer: str) -> None:
        self._net, self._layer = twin(net).requires_grad_(False), layer

    @classmethod
    def of(cls, net: nn.Module, x: Inputs) -> Features | None:
        """Find the features of a module.

        Args:
            net: The module.
            x: The inputs.

        Returns:
            The features, or None if the layers of the module are not called with plain tensors.
        """
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
            return None  # the hooks received no plain tensor, for example because of derivatives in the forward pass
        return found

    def __call__(self, params: Params, x: Inputs) -> Float[Tensor, " numbers"]:
        """Compute the features.

        Args:
            params: The weights.
            x: The inputs.

        Returns:
            The features as a vector.
        """
        caught: list[Tensor] = []
        module = self._net.get_submodule(self._layer)

        def catch(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            features = (*args, *kwargs.values())[0].detach()
            caught.append((torch.view_as_real(features) if features.is_complex() else features).double().flatten())

        handle = module.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            with torch.no_grad(), plain_kernels:
                weights = {name: w.to(torch.promote_types(w.dtype, torch.float64)) for name, w in params.items()}
                torch.func.functional_call(self._net, weights, *_arguments(x))
            whole = torch.cat(caught)
            whole.sum().item()  # raises if the tensor belongs to a function transform that has ended
        finally:
            handle.remove()
        return whole


def _arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    wide = Samples(x).cast()
    if isinstance(wide, dict):
        return (), wide
    return (wide if isinstance(wide, tuple) else (wide,)), {}


def _call(net: nn.Module, x: Inputs) -> None:
    args, kwargs = _arguments(x)
    net(*args, **kwargs)
