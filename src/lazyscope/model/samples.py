"""Detection of models whose output for one sample depends on other samples, so that batches cannot be split.

A few samples are evaluated together and one at a time, in float64 and at weights near w₀. At w₀ itself a coupling that
is zero at the initialisation would not be detected, although its derivative is not zero.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from lazyscope._typing import Inputs
from lazyscope.ambient import full_precision
from lazyscope.errors import LazyscopeError, ModelError
from lazyscope.model.base import Model
from lazyscope.model.increment.decisions import reads
from lazyscope.model.inputs import Samples, flatten, signature

_FEW = 3
"""The number of samples that are compared."""

_MANY = 1024
"""The largest number of samples that are compared if the control flow of the forward depends on values."""

_MOVE = 0.1
"""The size of the random displacement of the weights, relative to their mean absolute value."""

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""The relative tolerance by dtype, which is 0.1 for other dtypes.

It is far above the rounding errors, including those of casts to float32 inside a model, and far below the effect of
other samples.
"""


class Coupling(Enum):
    """The ways in which the outputs of a model can depend on the samples of a batch."""

    NONE = "each output depends on its own sample"
    COUPLED = "outputs depend on other samples"
    WHOLE = "the model takes all of its points at once, and no part of them"


def coupling(model: Model, x: Inputs) -> Coupling:
    """Determine how the samples of x are coupled, from a few of them."""
    leaves = flatten(x)[1]
    counts = {len(leaf) if leaf.ndim else 0 for leaf in leaves}
    if len(counts) > 1:
        return Coupling.WHOLE
    n = counts.pop()
    if n < 2:
        return Coupling.NONE
    known = model.coupled.get(kind(x))
    if known is not None:
        return Coupling(known)
    try:
        looked = reads(lambda: model(Samples(x).rows(slice(_FEW))))
    except LazyscopeError:
        looked = False
    # A forward whose control flow depends on values may couple only some samples, so more of them are compared.
    rows = (
        torch.arange(n, device="cpu")[:_MANY]
        if looked
        else torch.tensor(sorted({0, n // 2, n - 1})[:_FEW], device="cpu")
    )
    found = next(
        (found for wide in (model.double(), model) if (found := _compared(wide, x, rows)) is not None), Coupling.WHOLE
    )
    if not looked:  # the result is a property of the function and not of these samples
        model.coupled[kind(x)] = found.value
    return found


def kind(x: Inputs) -> tuple[object, ...]:
    """Return the structure of one sample of the inputs, with its shapes, dtypes and devices."""
    names, leaves = flatten(x)
    return names, *(signature(leaf[:1]) for leaf in leaves)


def check_independent(model: Model, x: Inputs, remedy: str) -> None:
    """Raise an error if the outputs of a model depend on other samples.

    Args:
        model: The model.
        x: Its inputs.
        remedy: The remedy, as the end of the sentence of the error message.

    Raises:
        ModelError: If the outputs depend on other samples.
    """
    if coupling(model, x) is not Coupling.NONE:
        raise ModelError(f"The model's output for a sample depends on the other samples of the batch; {remedy}.")


def _compared(model: Model, x: Inputs, rows: Tensor) -> Coupling | None:
    """Compare the outputs on some samples; return None if the model cannot be evaluated on some of the samples."""
    dtype = next(iter(model.params.values())).dtype
    few = Samples(Samples(x).rows(rows)).cast(dtype)
    for moved in (_moved(model), model):
        try:
            # TF32 is disabled while samples are compared, as its rounding depends on the batch.
            with torch.no_grad(), torch.autocast(Samples(x).device.type, enabled=False), full_precision:
                # A forward that computes derivatives enables gradients itself.
                together = moved(few).detach()
                singles = (Samples(few).rows(slice(i, i + 1)) for i in range(len(rows)))
                alone = [moved(single).detach() for single in singles]
        except LazyscopeError:
            continue
        if together.ndim == 0 or len(together) != len(rows) or any(a.numel() != together[0].numel() for a in alone):
            return Coupling.COUPLED
        apart = torch.stack([each.reshape(together.shape[1:]) for each in alone])  # one sample may lose a dimension
        bound = _TOLERANCE.get(dtype, 0.1) * float(apart.abs().max())
        if not bool(apart.isfinite().all()):
            continue
        return Coupling.NONE if float((together - apart).abs().max()) <= bound else Coupling.COUPLED
    return None


def _moved(model: Model) -> Model:
    random = {device: torch.Generator(device).manual_seed(0) for device in {w.device for w in model.params.values()}}
    moved = {}
    for name, w in model.params.items():
        size = _MOVE * (float(w.abs().mean()) + 0.01)
        drawn = torch.randn(w.shape, generator=random[w.device], dtype=w.dtype, device=w.device)
        moved[name] = w + size * drawn
    return model.at(moved)
