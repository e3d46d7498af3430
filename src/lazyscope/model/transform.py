"""Laziness as a coordinate: modules whose parameters are v, trained by any torch optimiser.

`Scaled` is y_α(v) = α(h(w₀ + v/α) - h(w₀)), `Linearised` its limit h(w₀) + Dh(w₀)v, `Symmetrised` a net that starts at
zero. Each is an ordinary `nn.Module`: state dicts, `.to`, autocast, `torch.compile` and optimisers work as always.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from lazyscope.errors import ModelError, ScaleError
from lazyscope.model.base import Model
from lazyscope.model.coordinates import check_alpha
from lazyscope.model.increment import Scale
from lazyscope.model.inputs import as_inputs


class _Tree(nn.Module):
    """Tensors under dotted names, so that state dicts have the names of the original module."""

    def extra_repr(self) -> str:
        """The shapes of the tensors here."""
        named = [*self._parameters.items(), *self._buffers.items()]
        return ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in named if tensor is not None)


def _plant(root: nn.Module, name: str, tensor: Tensor, *, trainable: bool) -> None:
    *path, leaf = name.split(".")
    for part in path:
        # straight into the dictionaries: a child may bear the name of an attribute of the root, such as "alpha"
        root = root._modules.setdefault(part, _Tree())  # type: ignore[assignment]
    if trainable:
        root._parameters[leaf] = nn.Parameter(torch.zeros_like(tensor))
    else:
        root._buffers[leaf] = tensor.clone()


class TangentModule(nn.Module):
    """A module with parameters v around a model: what `Scaled` and `Linearised` share."""

    def __init__(self, model: Model | nn.Module, scale: Scale) -> None:
        super().__init__()
        studied = model if isinstance(model, Model) else Model(model)
        self._studied: Model = studied
        self._scale = scale
        self._names = tuple(studied.params)
        self._state_names = tuple(studied.state)
        self._modules["_start"] = _Tree()  # w₀ and the model's own buffers travel with the module and its state dict
        for name, w in studied.params.items():
            _plant(self, name, studied.as_given(name, w), trainable=True)
            _plant(self._modules["_start"], name, studied.as_given(name, w), trainable=False)  # type: ignore[arg-type]
        for name, b in studied.state.items():
            _plant(self._modules["_start"], name, b, trainable=False)  # type: ignore[arg-type]

    def _increment(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """(h(w₀), Δ) on the inputs."""
        start = dict(self._modules["_start"].named_buffers())  # type: ignore[union-attr]
        model = self._studied
        w0 = {name: model.as_studied(name, start[name]) for name in self._names}
        state = {name: start[name] for name in self._state_names}
        found = dict(self.named_parameters(remove_duplicate=False))
        v = {name: model.as_studied(name, found[name]) for name in self._names}
        return model.increment(w0, state, as_inputs(args, kwargs), self._scale, v)

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The output on the inputs of the model's own forward; a single tuple or dict is unpacked."""

    @property
    @abstractmethod
    def alpha(self) -> float:
        """The scale; infinite for the tangent model."""

    def model_now(self) -> Model:
        """The model inside, at w₀ and with the buffers that travel with this module."""
        start = dict(self._modules["_start"].named_buffers())  # type: ignore[union-attr]
        model = copy.copy(self._studied)
        model.params = {name: self._studied.as_studied(name, start[name]) for name in self._names}
        model.state = {name: start[name] for name in self._state_names}
        return model

    def displacement(self) -> Tensor:
        """‖v‖, the Euclidean distance travelled in tangent coordinates."""
        return torch.stack([p.detach().abs().square().sum() for p in self.parameters()]).sum().sqrt()


class Scaled(TangentModule):
    """y_α(v) = α(h(w₀ + v/α) - h(w₀)); `centred=False` adds αh(w₀).

    Gradient descent on v with any loss R is gradient descent on F_α(w) = R(αh(w))/α² (equation (2)) with the same step
    for every α; α = ∞ is the tangent model. Float32 is enough for all of them.

    >>> lazy = Scaled(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)), alpha=1e6)
    >>> float(lazy(torch.ones(1, 2)).detach().abs())
    0.0
    """

    def __init__(self, model: Model | nn.Module, alpha: float, *, centred: bool = True) -> None:
        value = float(check_alpha(alpha))
        if math.isinf(value) and not centred:
            raise ScaleError("At α = ∞ the output αh(w₀) is infinite; pass centred=True, or use Linearised.")
        super().__init__(model, Scale.of(value))
        self._centred = centred

    @property
    def alpha(self) -> float:
        """The scale."""
        return float(self._scale.alpha)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """α(h(w₀ + v/α) - h(w₀)), plus αh(w₀) when not centred.

        Args:
            *args: The inputs as the model itself takes them; a single tuple or dict is unpacked.
            **kwargs: The inputs that it takes by name.
        """
        initial, delta = self._increment(args, kwargs)
        return delta if self._centred else delta + self._scale.alpha * initial

    def weights(self) -> dict[str, Tensor]:
        """w₀ + v/α, ready for `net.load_state_dict(…, strict=False)`."""
        start = dict(self._modules["_start"].named_buffers())  # type: ignore[union-attr]
        v = dict(self.named_parameters())
        return {name: start[name] + v[name].detach() * self._scale.epsilon for name in self._names}

    def get_extra_state(self) -> Tensor:
        """α goes into the state dict, since v means nothing without it."""
        return torch.tensor(self.alpha, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Refuse the v of another α."""
        if float(state) != self.alpha:
            raise ScaleError(
                f"This state was saved at α = {float(state)}, not {self.alpha}; build Scaled with that α first."
            )

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"alpha={self.alpha:g}, centred={self._centred}"


class Linearised(TangentModule):
    """The tangent model h(w₀) + Dh(w₀)v; `centred=True` drops h(w₀) and equals `Scaled(alpha=inf)`.

    >>> net = torch.nn.Linear(2, 1)
    >>> x = torch.ones(1, 2)
    >>> bool((Linearised(net)(x) == net(x)).all())
    True
    """

    def __init__(self, model: Model | nn.Module, *, centred: bool = False) -> None:
        super().__init__(model, Scale.of(math.inf))
        self._centred = centred

    @property
    def alpha(self) -> float:
        """∞."""
        return math.inf

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """h(w₀) + Dh(w₀)v, or Dh(w₀)v when centred.

        Args:
            *args: The inputs as the model itself takes them; a single tuple or dict is unpacked.
            **kwargs: The inputs that it takes by name.
        """
        initial, delta = self._increment(args, kwargs)
        return delta if self._centred else initial + delta

    def weights(self) -> dict[str, Tensor]:
        """w₀ + v: the w̄ at which the linearised model is evaluated."""
        start = dict(self._modules["_start"].named_buffers())  # type: ignore[union-attr]
        v = dict(self.named_parameters())
        return {name: start[name] + v[name].detach() for name in self._names}

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"centred={self._centred}"


class Symmetrised(nn.Module):
    """h(w_a) - h(w_b) with w_a(0) = w_b(0): zero at the start, with the differential of h twice over (Section 3.1).

    >>> twin = Symmetrised(torch.nn.Linear(2, 1))
    >>> float(twin(torch.ones(1, 2)).detach().abs())
    0.0
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise ModelError("Symmetrised takes a module; write a function's twin as f(a, x) - f(b, x).")
        self.a = copy.deepcopy(net)
        self.b = copy.deepcopy(net)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """h(w_a) - h(w_b)."""
        difference: Tensor = self.a(*args, **kwargs) - self.b(*args, **kwargs)
        return difference
