"""The objective v ↦ R(y_α(v)), which is F_α of equation (2) in tangent coordinates, for each member of a batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from lazyscope._typing import Inputs, Number, Params
from lazyscope.arguments import check_list, check_number
from lazyscope.errors import InputError
from lazyscope.labels import Target
from lazyscope.linalg.finite import check_finite
from lazyscope.loss import Loss, Risk, check_loss
from lazyscope.model.base import Model
from lazyscope.model.coordinates import Alpha, Coordinates, Studied, check_alpha
from lazyscope.model.ensemble import Ensemble
from lazyscope.model.inputs import Samples, check_samples
from lazyscope.model.two_layer import TwoLayer

Times: TypeAlias = Tensor | Sequence[Number] | NDArray[Any]
"""The times at which a flow is recorded."""


@final
@dataclass(frozen=True)
class Objective:
    """The objective v ↦ R(y_α(v)).

    Its gradient flow in v is equation (4), with the same time and step size for every α.
    """

    coordinates: Coordinates
    risk: Risk

    @classmethod
    def of(cls, model: Studied, loss: Loss, x: Inputs, y: Target, alpha: Alpha, centred: bool) -> Objective:
        """Check the arguments, and create the objective on the given data."""
        check_loss(loss)
        check_alpha(alpha)
        check_samples(x)
        coordinates = in_single(model).coordinates(in_single_inputs(x), alpha, centred=centred)
        with torch.no_grad():
            start = coordinates.outputs(coordinates.zeros())
            objective = cls(coordinates, loss.risk(start, y, len(coordinates.batch)))
            if not coordinates.batch:  # in a batch, the others go on without the member that overflows
                check_finite(start, "The output at the start")
                check_finite(objective.risk(start), "The loss at the start")
        return objective

    def renewed(self, coordinates: Coordinates, target: Target) -> Objective:
        """Create the objective on other samples, whose values are not checked, only their shapes."""
        return Objective(coordinates, self.risk.renewed(target))

    def __call__(self, v: Params) -> Tensor:
        """Compute R(y_α(v)), of shape `batch`."""
        return self.risk(self.coordinates.outputs(v))

    def gradient(self, v: Params) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute R(y_α(v)) and its gradient with respect to v, for each member."""
        y, pull = self.coordinates.linearise(v)
        return self.risk(y), pull(self.risk.gradient(y) / self.risk.shape[0])


_HALVES = (torch.float16, torch.bfloat16)


def in_single(model: Studied) -> Studied:
    """Cast a model with weights in half precision to float32, and return other models as they are.

    The steps of a flow are far smaller than the weights, and would be lost in half precision.
    """
    if isinstance(model, Ensemble):
        members = [in_single(member) for member in model.models]
        if all(new is old for new, old in zip(members, model.models, strict=True)):
            return model
        return Ensemble([each for each in members if isinstance(each, Model)], own_inputs=model.own_inputs)
    if isinstance(model, Model | TwoLayer):
        dtypes = {w.dtype for w in model.params.values()}
        if dtypes & set(_HALVES):
            return model.to(dtype=functools.reduce(torch.promote_types, dtypes, torch.float32))
    return model


def in_single_inputs(x: Inputs) -> Inputs:
    """Cast inputs in half precision to float32."""
    return Samples(x).map(lambda t: t.float() if t.dtype in _HALVES else t)


def flat(v: Params, batch: tuple[int, ...]) -> Float[Tensor, "*batch p"]:
    """Concatenate all parameters of each member to one vector."""
    return torch.cat([value.reshape(*batch, -1) for value in v.values()], dim=-1)


def unflat(vector: Float[Tensor, "*batch p"], like: Params) -> dict[str, Tensor]:
    """Split a vector into parameters, the inverse of `flat`."""
    batch = vector.shape[:-1]
    sizes = [value.numel() // batch.numel() for value in like.values()]
    parts = torch.split_with_sizes(vector, sizes, dim=-1)
    return {name: part.reshape(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}


def check_tolerances(rtol: Number, atol: Number, tolerance: Number) -> None:
    """Raise an error if the tolerances of an ODE solver are not finite and non-negative, or `atol` is 0."""
    check_number("rtol", rtol, least=0)
    check_number("atol", atol, least=0)
    check_number("tolerance", tolerance, least=0)
    if atol == 0:
        raise InputError("atol is 0, but at the start, v = 0, a relative tolerance has no scale; pass atol > 0.")


def check_times(times: Times, *, infinity: bool) -> Float[Tensor, "T"]:
    """Check that times are non-negative and increasing, and return them as float64 on the CPU."""
    check_list("times", times, ndim=None)
    value = torch.as_tensor(times, dtype=torch.float64, device="cpu").detach()
    if value.ndim != 1 or len(value) == 0 or bool(value.isnan().any()):
        raise InputError("The times must be a list of numbers without NaN; pass at least one.")
    if bool((value < 0).any()) or not bool((value[1:] > value[:-1]).all()):
        raise InputError("The times must be non-negative and strictly increasing; sort them and remove duplicates.")
    if bool(value[-1].isinf()) and not infinity:
        raise InputError(
            "An ODE solver cannot reach t = ∞; pass a finite time. The flow stops moving once it has converged."
        )
    return value
