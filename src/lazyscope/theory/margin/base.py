"""What every max-margin problem returns: a classifier, and a dual point that proves how far from best it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError


@final
@dataclass(frozen=True, repr=False)
class MaxMargin:
    """max over ‖f‖ ≤ 1 of min_i y_i f(x_i), between `attained` and `bound`.

    By duality it is min over p in the simplex of sup over ‖f‖ ≤ 1 of Σ_i p_i y_i f(x_i): any p is a proof of a bound.
    """

    attained: float
    """The margin of the classifier found."""
    bound: float
    """No classifier has more: the dual value of `dual`. For ReLU neurons in d > 3 it is the largest value found."""
    proved: bool
    """Whether the bound holds over all classifiers, not just those looked at."""
    dual: Float[Tensor, " n"]
    """p: positive on support vectors only."""
    coefficients: Float[Tensor, " k"]
    """Of the classifier with norm 1: w for a linear one, c in f = Σ_i c_i K(x_i, ·), signed masses of neurons."""
    neurons: Float[Tensor, "k d"] | None = None
    """Unit vectors, for the variation norm."""

    @property
    def gap(self) -> float:
        """How much more than `attained` is possible, relatively."""
        return self.bound / self.attained - 1

    def __repr__(self) -> str:
        proof = "proved" if self.proved else "not proved"
        return f"MaxMargin({self.attained:.6g}, gap {self.gap:.1e} {proof}, {len(self.coefficients)} coefficients)"


def check(x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rows and labels in float64."""
    if len(x) != len(y) or len(y) == 0:
        raise InputError(f"There are {len(x)} rows and {len(y)} labels; pass one label for each row.")
    if not bool(x.isfinite().all()):
        raise InputError("The rows hold NaN or infinite values; drop or repair those samples.")
    if not bool((y.abs() == 1).all()):
        raise InputError("Labels are -1 or 1; map them, as with 2 * y - 1.")
    return x.detach().double().cpu().numpy(), y.detach().double().cpu().numpy()


def separated(attained: float) -> float:
    """The margin, if it is one."""
    if not attained > 0:
        raise InputError("No such classifier separates the samples; use a richer one, or look for equal inputs.")
    return attained
