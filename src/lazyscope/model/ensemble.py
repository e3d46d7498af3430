"""Many models of the same architecture as one batched program, for different seeds, scales and initialisations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.errors import ModelError, ScaleError
from lazyscope.model.base import Model
from lazyscope.model.coordinates import Alpha, Coordinates, Studied, check_alpha, offset
from lazyscope.model.increment import Scale
from lazyscope.model.inputs import Samples


class Ensemble(Studied):
    """Several models of the same architecture, evaluated and trained together as one program under `vmap`.

    The members have the same forward and parameters of the same names and shapes; their initialisations may differ.
    The forward of the first member is traced and used for all of them. Each member can have its own scale α. A flow
    such as `gradient_descent` treats an ensemble as it treats one model, and its results have the members as a
    dimension.

    Args:
        models: The members, as modules or models of one architecture. There must be at least one.
        own_inputs: Whether each member has its own inputs. With True, the first dimension of every input tensor counts
            the members. With False, all members share the same inputs.

    Attributes:
        models: The members, as a list of models.
        params: The initialisations w₀ by name, stacked along a first dimension that counts the members.
        state: The fixed parameters and the buffers by name, stacked in the same way.
        own_inputs: Whether each member has its own inputs.

    Raises:
        ModelError: If there are no models, or if the names or shapes of their parameters differ.

    Shape:
        - Inputs: `(n, ...)`, or `(members, n, ...)` with `own_inputs=True`.
        - Outputs: `(members, n, ...)`.

    Example:
        >>> nets = [torch.nn.Linear(2, 1) for _ in range(3)]
        >>> ensemble = Ensemble(nets)
        >>> y = ensemble.coordinates(torch.ones(5, 2), alpha=[1.0, 10.0, float("inf")], centred=True)
        >>> y.outputs(y.zeros()).shape
        torch.Size([3, 5, 1])
        >>> y.kernel().shape  # one tangent kernel per member
        torch.Size([3, 5, 5])
    """

    def __init__(self, models: Sequence[Model | torch.nn.Module], *, own_inputs: bool = False) -> None:
        self.models = [Model.of(model) for model in models]
        if not self.models:
            raise ModelError("An ensemble needs at least one model; pass a non-empty list.")
        shapes = [{name: w.shape for name, w in model.params.items()} for model in self.models]
        if any(each != shapes[0] for each in shapes):
            raise ModelError("All models of an ensemble must have the same parameters; group them by architecture.")
        self.own_inputs = own_inputs
        self.params = {name: torch.stack([m.params[name] for m in self.models]) for name in self.models[0].params}
        self.state = {name: torch.stack([m.state[name] for m in self.models]) for name in self.models[0].state}

    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> Coordinates:
        """Return the map v ↦ y_α(v) of all members on fixed inputs.

        Args:
            x: The inputs, shared by the members. With `own_inputs=True`, each tensor has the members as its first
                dimension.
            alpha: The scale α > 0, as one number or as one number for each member. `math.inf` is allowed.
            centred: Whether to leave out αh(w₀). It must be True if some α is infinite and h(w₀) is not zero.

        Returns:
            The tangent coordinates, whose `batch` is `(members,)`.

        Raises:
            ScaleError: If α is not positive, if its length is not the number of members, or if αh(w₀) is infinite.
            ModelError: If the control flow of the forward depends on values, which may differ between the members.
        """
        scales = check_alpha(alpha)
        count = len(self.models)
        if scales.dim() > 1 or (scales.dim() == 1 and len(scales) != count):
            raise ScaleError(
                f"α has the shape {tuple(scales.shape)} for {count} models; pass one number, or one for each model."
            )
        return EnsembleCoordinates(self, x, scales.expand(count), centred)


class EnsembleCoordinates(Coordinates):
    """The tangent coordinates of all members of an ensemble on given data."""

    def __init__(self, ensemble: Ensemble, x: Inputs, alpha: Tensor, centred: bool) -> None:
        self.batch, self.alpha = (len(ensemble.models),), alpha
        self._ensemble, self._x = ensemble, x
        first = ensemble.models[0]
        sample = Samples(x).rows(0) if ensemble.own_inputs else x
        captured = first.graph(first.params, first.state, sample)
        if not captured.unconditional:
            raise ModelError(
                "The forward of an ensemble reads values of its tensors (routing, a branch on inputs), which may differ"
                " between members; study the models one at a time."
            )
        if bool(alpha.isinf().any()):
            captured.check_limit()
        program = first.program(captured)
        depth = 0 if ensemble.own_inputs else None
        fixed, leaves = [*ensemble.params.values(), *ensemble.state.values()], Samples(x).tensors
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
        """Return v = 0, the initialisation of every member."""
        return {name: torch.zeros_like(w) for name, w in self._ensemble.params.items()}

    def outputs(self, v: Params) -> Tensor:
        """Compute y_α(v), with the members as the first dimension."""
        delta = self._increment(self._alpha, [v[name] for name in self._ensemble.params], self._values)
        return delta if self._offset is None else delta + self._offset

    def kernel(self) -> Tensor:
        """Compute the tangent kernel Dh(w₀)Dh(w₀)ᵀ of each member as a dense matrix."""
        inputs = (
            [Samples(self._x).rows(i) for i in range(self.batch[0])]
            if self._ensemble.own_inputs
            else [self._x] * self.batch[0]
        )
        jacobians = torch.stack([m.jacobian(x) for m, x in zip(self._ensemble.models, inputs, strict=True)])
        return jacobians @ jacobians.transpose(-1, -2)
