"""Many models of one shape as one batched program: seeds, scales and starts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.errors import ModelError, ScaleError
from lazyscope.model.base import Model, flatten, unflatten
from lazyscope.model.coordinates import Alpha, Coordinates, Studied, check_alpha, offset
from lazyscope.model.increment import Scale


class Ensemble(Studied):
    """Models with the same parameters' names and shapes and the same forward, moved together under `vmap`.

    Members see the same inputs, or, with `own_inputs=True`, each its own: x then has the members as first dimension.
    α is one number or one for each member.

    >>> nets = [torch.nn.Linear(2, 1) for _ in range(3)]
    >>> y = Ensemble(nets).coordinates(torch.ones(5, 2), alpha=[1.0, 10.0, float("inf")], centred=True)
    >>> y.outputs(y.zeros()).shape
    torch.Size([3, 5, 1])
    """

    def __init__(self, models: Sequence[Model | torch.nn.Module], *, own_inputs: bool = False) -> None:
        self.models = [model if isinstance(model, Model) else Model(model) for model in models]
        if not self.models:
            raise ModelError("An ensemble needs at least one model; pass a non-empty list.")
        shapes = [{name: w.shape for name, w in model.params.items()} for model in self.models]
        if any(each != shapes[0] for each in shapes):
            raise ModelError("All models of an ensemble must have the same parameters; group them by architecture.")
        self.own_inputs = own_inputs
        self.params = {name: torch.stack([m.params[name] for m in self.models]) for name in self.models[0].params}
        self.state = {name: torch.stack([m.state[name] for m in self.models]) for name in self.models[0].state}

    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> Coordinates:
        """v ↦ y_α(v) of all members on the inputs x."""
        scales = check_alpha(alpha)
        count = len(self.models)
        if scales.dim() > 1 or (scales.dim() == 1 and len(scales) != count):
            raise ScaleError(f"Got {tuple(scales.shape)} scales for {count} models; pass one α, or one for each model.")
        return EnsembleCoordinates(self, x, scales.expand(count), centred)


class EnsembleCoordinates(Coordinates):
    """All members of an ensemble on given data."""

    def __init__(self, ensemble: Ensemble, x: Inputs, alpha: Tensor, centred: bool) -> None:
        self.batch, self.alpha = (len(ensemble.models),), alpha
        self._ensemble, self._x = ensemble, x
        first = ensemble.models[0]
        keys, leaves = flatten(x)
        sample = unflatten(keys, [t[0] for t in leaves]) if ensemble.own_inputs else x
        captured = first.graph(first.params, first.state, sample)
        if not captured.unconditional:
            raise ModelError(
                "The forward of an ensemble reads values of its tensors (routing, a branch on inputs), which may differ"
                " between members; study the models one by one."
            )
        if bool(alpha.isinf().any()):
            captured.check_limit()
        program = first.program(captured)
        depth = 0 if ensemble.own_inputs else None
        fixed = [*ensemble.params.values(), *ensemble.state.values()]
        with torch.no_grad():
            run = torch.vmap(program.exact_base, in_dims=(*(0 for _ in fixed), *(depth for _ in leaves)))
            self._values: tuple[Any, ...] = run(*fixed, *leaves)
        initial = self._values[-1]
        self._alpha = alpha.to(initial)

        def member(a: Tensor, moves: list[Tensor], values: tuple[Any, ...]) -> Tensor:
            return program.increment(Scale.of(a), moves, values)

        self._increment = torch.vmap(member)
        self._offset = offset(initial, alpha.reshape(-1, *(1,) * (initial.dim() - 1)), centred)

    def zeros(self) -> dict[str, Tensor]:
        """v = 0 for every member."""
        return {name: torch.zeros_like(w) for name, w in self._ensemble.params.items()}

    def outputs(self, v: Params) -> Tensor:
        """y_α(v), members first."""
        delta = self._increment(self._alpha, [v[name] for name in self._ensemble.params], self._values)
        return delta if self._offset is None else delta + self._offset

    def kernel(self) -> Tensor:
        """Dh(w₀)Dh(w₀)ᵀ of each member, dense."""
        keys, leaves = flatten(self._x)
        inputs = (
            [unflatten(keys, [t[i] for t in leaves]) for i in range(self.batch[0])]
            if self._ensemble.own_inputs
            else [self._x] * self.batch[0]
        )
        jacobians = torch.stack([m.jacobian(x) for m, x in zip(self._ensemble.models, inputs, strict=True)])
        return jacobians @ jacobians.transpose(-1, -2)
