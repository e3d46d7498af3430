"""The result of a max-margin problem: a classifier, and a dual point that bounds its distance to the optimum."""

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
    """A solution of the problem to maximise min_i y_i f(x_i) over ‖f‖ ≤ 1.

    The maximum is between `attained` and `bound`. By duality, it is the minimum over p in the simplex of the supremum
    over ‖f‖ ≤ 1 of Σ_i p_i y_i f(x_i), so any p proves an upper bound.
    """

    attained: float
    """The margin of the classifier found."""
    bound: float
    """The dual value of `dual`, an upper bound on every margin. For ReLU neurons in d > 3, it is the largest value
    found, which may be too small."""
    proved: bool
    """Whether the bound is proved for all classifiers, and not only for those that were searched."""
    dual: Float[Tensor, " n"]
    """The dual point p, which is positive on support vectors only."""
    coefficients: Float[Tensor, " k"]
    """The coefficients of the classifier of norm 1: w of a linear classifier, c in f = Σ_i c_i K(x_i, ·), or the signed
    masses of neurons."""
    neurons: Float[Tensor, "k d"] | None = None
    """The directions of the neurons as unit vectors, for the variation norm."""

    @property
    def gap(self) -> float:
        """The relative difference between `bound` and `attained`."""
        return self.bound / self.attained - 1

    def __repr__(self) -> str:
        proof = "proved" if self.proved else "not proved"
        return f"MaxMargin({self.attained:.6g}, gap {self.gap:.1e} {proof}, {len(self.coefficients)} coefficients)"


def check(x: Tensor, y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Check rows and labels, and return them in float64."""
    if len(x) != len(y) or len(y) == 0:
        raise InputError(f"There are {len(x)} rows and {len(y)} labels; pass one label for each row.")
    if not bool(x.isfinite().all()):
        raise InputError("The rows contain NaN or infinite values; remove or correct those samples.")
    if not bool((y.abs() == 1).all()):
        raise InputError("The labels must be -1 or 1; convert them, for instance with 2 * y - 1.")
    return x.detach().double().cpu().numpy(), y.detach().double().cpu().numpy()


def separated(attained: float) -> float:
    """Return the margin, and raise if it is not positive."""
    if not attained > 0:
        raise InputError(
            "No such classifier separates the samples; use a richer class, or check for equal inputs with different"
            " labels."
        )
    return attained
