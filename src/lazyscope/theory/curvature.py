"""The convexity constants of a risk on given targets, which depend on the targets if points are ignored.

A loss with an `ignore_index` averages over the n' of n points that it does not ignore, that is, R(y) = (1/n) Σ c_i
ℓ(y_i, t_i) with c_i = n/n' for these points and c_i = 0 for the others. In F, whose norm is over all n points, the
constants of R are therefore M max c_i and m min c_i, and not those of ℓ. `labels.weighted` stores the weights c_i in
the encoded targets, whose sum over the classes is c_i.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.labels import Classes
from lazyscope.loss import Loss, Penalised, Risk, check_loss


@dataclass(frozen=True)
class Curvature:
    """The constants of a risk R in F."""

    strong_convexity: float
    """The largest known m such that R - (m/2)‖y‖² is convex."""
    smoothness: float
    """The smoothness constant M, a Lipschitz constant of ∇R."""

    @staticmethod
    def of(loss: Loss | Risk) -> Curvature:
        """Compute the constants.

        Args:
            loss: The risk on the targets, or a loss without an `ignore_index`, whose constants are those of the risk.

        Returns:
            The constants.

        Raises:
            InputError: If a loss that may ignore points is passed without targets.
        """
        if isinstance(loss, Risk):
            weights = _weights(loss)
            return _scaled(
                loss.loss, *((1.0, 1.0) if weights is None else (float(weights.min()), float(weights.max())))
            )
        if _ignores(check_loss(loss)):
            raise InputError(
                "The constants of a loss with an ignore_index depend on the targets; pass loss.risk(outputs, targets)"
                " in place of the loss."
            )
        return _scaled(loss, 1.0, 1.0)


def _scaled(loss: Loss, least: float, most: float) -> Curvature:
    """The constants of cℓ for all weights c from `least` to `most`; a penalty has the weight 1 at all points."""
    if isinstance(loss, Penalised):
        inner = _scaled(loss.loss, least, most)
        return Curvature(inner.strong_convexity + loss.weight, inner.smoothness + loss.weight)
    low = loss.strong_convexity
    return Curvature(min(low * least, low * most), loss.smoothness * most)


def _weights(risk: Risk) -> Tensor | None:
    """The weight of each point whose target is a class, None for other targets, whose weights are 1."""
    return risk.target.sum(-1) if isinstance(risk.loss.labels, Classes) else None


def _ignores(loss: Loss) -> bool:
    """Whether a loss may ignore points."""
    return isinstance(loss.labels, Classes) and loss.labels.ignore_index is not None
