"""The measurements of a monitor at one step: of the whole network, and of each of its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, final


@final
@dataclass(frozen=True)
class LayerRecord:
    """The measurements of one layer, that is, of the parameters of one submodule, at one step."""

    displacement: float
    """The relative displacement ‖w_ℓ - w₀_ℓ‖/‖w₀_ℓ‖ of the weights of the layer. For a layer that starts at zero, it is
    divided by the norm of all weights."""
    tangent_distance: float
    """The relative error of the tangent model if only this layer moves, ‖h(w₀ + v_ℓ) - h(w₀) - Dh(w₀)v_ℓ‖ /
    ‖h(w₀ + v_ℓ) - h(w₀)‖. It is 0 for a last linear layer, in whose weights the network is linear. The verdict on a
    layer compares it with thresholds."""
    kernel_scale: float
    """The ratio ‖K_ℓ‖/‖K_ℓ₀‖ of the norms of the kernel of this layer, K_ℓ = D_ℓh D_ℓhᵀ, now and at the start."""
    kernel_shape: float
    """The change of the shape of this kernel, 1 - ⟨K_ℓ, K_ℓ₀⟩/(‖K_ℓ‖‖K_ℓ₀‖)."""
    flipped: float
    """The share of the ReLUs that follow this layer and whose state is not that at the start. It is NaN if no ReLU
    follows it directly."""


@final
@dataclass(frozen=True)
class Record:
    """The measurements of a `Monitor` at one step, with NaN for quantities that are not defined for the model."""

    step: int
    """The training step."""
    displacement: float
    """The relative displacement ‖w - w₀‖/‖w₀‖ of the weights."""
    tangent_distance: float
    """The relative error ‖h(w) - h(w₀) - Dh(w₀)(w - w₀)‖/‖h(w) - h(w₀)‖ of the tangent model at the present weights:
    the share of the change of the outputs that the tangent model does not explain. The verdict compares it with
    thresholds."""
    kernel_drift: float
    """The relative change ‖K - K₀‖/‖K₀‖ of the tangent kernel, which contains its change of scale and of shape."""
    kernel_scale: float
    """The ratio ‖K‖/‖K₀‖ of the norms. A kernel that only grows is not a new kernel: the tangent model learns the same
    functions, only faster."""
    kernel_shape: float
    """The change of shape, 1 - ⟨K, K₀⟩/(‖K‖‖K₀‖), from 0 for a multiple of K₀ to 1 for an orthogonal kernel."""
    kernel_error: float
    """The standard error of `kernel_shape`, from a jackknife over the random combinations of outputs. It is 0 if the
    kernel of all outputs was computed."""
    flipped: float
    """The share of ReLU units (samples × units, mean over layers) whose state is not that at the start. It is NaN if
    the model has no ReLU."""
    alignment: float
    """The centred alignment ⟨Θ̃, ỸỸᵀ⟩/(‖Θ̃‖‖ỸỸᵀ‖) of the trace kernel Θ with the targets Y, both centred over the
    probe (Cortes et al., 2012). It is NaN without targets."""
    loss: float
    """The loss on the probe. It is NaN without targets."""
    sharpness: float
    """The largest eigenvalue λ₁ of the Hessian of this loss, over the parameters that are trained now. It is NaN
    without targets, and for `Linearised` modules."""
    edge: float
    """The ratio of λ₁ to the largest curvature at which the optimiser is stable on a quadratic function: λ₁ · lr/2 for
    plain SGD. It is 1 at the edge of stability. It is NaN if the monitor has no optimiser."""
    layers: Mapping[str, LayerRecord] = field(default_factory=dict)
    """The measurements of each layer, by the name of the submodule."""

    def numbers(self) -> dict[str, float]:
        """Return the measurements of the whole network by name, without the step and the layers.

        Returns:
            A dictionary from names of fields to values.
        """
        return {name: getattr(self, name) for name in NUMBERS}


NUMBERS = tuple(each.name for each in fields(Record) if each.name not in ("step", "layers"))
"""The names of the measurements of the whole network."""

LAYER_NUMBERS = tuple(each.name for each in fields(LayerRecord))
"""The names of the measurements of a layer, which are also measurements of the whole network."""


def number(value: float) -> float:
    """Return a float. NaN is always the same object, so that equal records compare equal."""
    return math.nan if math.isnan(value) else float(value)


def to_plain(record: Record) -> dict[str, Any]:
    """Convert a record to nested dictionaries of numbers.

    Args:
        record: The record.

    Returns:
        The dictionaries, which `from_plain` converts back.
    """
    return {**asdict(record), "layers": {name: asdict(layer) for name, layer in record.layers.items()}}


def from_plain(found: Mapping[str, Any]) -> Record:
    """Convert nested dictionaries of numbers to a record.

    Args:
        found: The dictionaries of `to_plain`.

    Returns:
        The record.
    """
    layers = {
        name: LayerRecord(**{key: number(value) for key, value in layer.items()})
        for name, layer in found["layers"].items()
    }
    return Record(int(found["step"]), **{name: number(found[name]) for name in NUMBERS}, layers=layers)
