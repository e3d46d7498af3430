"""The inverse relative scale κ and the first criterion of section 1.2, assembled from norms.

Training is lazy if the loss F decreases considerably before Dh changes: if ‖∇F‖/F is far above ‖D²h‖/‖Dh‖. The ratio
F ‖D²h‖/(‖∇F‖ ‖Dh‖) is the criterion. For the square loss, F = ½‖h(w₀) - y*‖² and ∇F = Dhᵀ(h(w₀) - y*), so that the
criterion is κ divided by twice the alignment ‖Dhᵀr‖/(‖Dh‖ ‖r‖) of the residual r.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lazyscope._typing import Number
from lazyscope.arguments import check_number
from lazyscope.errors import InputError, ModelError, ScaleError
from lazyscope.linalg.bilinear import BilinearNorm
from lazyscope.linalg.finite import check_finite
from lazyscope.loss import Risk, Square

LAZY = 0.1
"""The value of κ or of the criterion up to which theory predicts lazy training. The condition κ ≪ 1 of section 1.2 is
taken as κ ≤ 0.1."""


@dataclass(frozen=True)
class Descent:
    """The loss and its gradients at given outputs."""

    excess: float
    """The loss F above its infimum over all outputs."""
    residual: float
    """The norm ‖r‖ of the residual r = ∇R, the gradient of the loss with respect to the outputs."""
    gradient: float
    """The norm ‖∇F‖ = ‖Dhᵀr‖ of the gradient with respect to the weights, in the metric."""

    @classmethod
    def of(cls, risk: Risk, outputs: Tensor, pull: Callable[[Tensor], float]) -> Descent:
        """Evaluate the loss at given outputs.

        Args:
            risk: The loss R, in float64.
            outputs: The outputs on n points, in float64.
            pull: The function r ↦ |Jᵀr| with the Euclidean norm and the Jacobian J of all outputs, in the metric.

        Returns:
            The loss and its gradients, in the norm of the points that count.

        Raises:
            InputError: If the loss is penalised at outputs whose targets are ignored.
            ModelError: If the loss or its gradient overflows.
        """
        slopes, n, counted = risk.gradient(outputs), len(outputs), len(outputs)
        if risk.counted is not None:
            counted = int(risk.counted.reshape(n, -1).any(1).sum())
            if bool(slopes[~risk.counted].any()):
                raise InputError(
                    "The loss has a penalty on outputs whose targets are ignored; omit the penalty, or pass only the"
                    " samples that count."
                )
        # Ignored samples have no slope, and the others are weighted by n/counted.
        norms = float(risk.excess(outputs)), float(slopes.norm()) * math.sqrt(counted) / n, pull(slopes) / n
        check_finite(torch.tensor(norms, dtype=torch.float64, device="cpu"), "The loss or its gradient at w₀")
        return cls(*norms)


@dataclass(frozen=True)
class RelativeScale:
    """The inverse relative scale κ, the criterion, and their factors.

    Norms of functions are those of L² of the empirical measure, ‖g‖² = (1/n) Σ |g(x_i)|². The norms ‖h(w₀)‖, ‖y*‖ and
    ‖h(w₀) - y*‖ determine the residual of every scaled model. In a metric P = SSᵀ, Dh stands for Dh S, D²h for
    D²h(S·, S·), and ∇F for Sᵀ∇F.
    """

    initial: float
    """The norm ‖h(w₀)‖ of the initial outputs."""
    target: float
    """The norm ‖y*‖ of the targets."""
    residual: float
    """The residual ‖h(w₀) - y*‖."""
    jacobian_norm: float
    """The operator norm ‖Dh(w₀)‖."""
    hessian_norm: float
    """The operator norm ‖D²h(w₀)‖, a lower bound that the search attained."""
    search: BilinearNorm
    """The search for ‖D²h(w₀)‖: its residual, its status, and the number of starts that agree."""
    loss: str
    """The name of the loss, such as "CrossEntropy"."""
    at_zero: Descent
    """The loss and its gradients at the outputs 0, where the centred model starts."""
    at_start: Descent | None
    """The loss and its gradients at the initial outputs, or `None` if they are not known for a scaled model."""
    notice: str = ""
    """A notice if the model has kinks, for instance from ReLU."""

    @classmethod
    def assembled(
        cls,
        outputs: Tensor,
        target: Tensor,
        risk: Risk,
        jacobian: float,
        pull: Callable[[Tensor], float],
        search: BilinearNorm,
        *,
        searched: int | None = None,
        notice: str = "",
    ) -> RelativeScale:
        """Build the inverse relative scale from Euclidean norms over n points, which are √n times those of L².

        Args:
            outputs: The initial outputs h(w₀) in float64, of shape `(n, …)`.
            target: The targets y*, of the same shape; zeros where they are ignored.
            risk: The loss on these outputs, in float64.
            jacobian: The Euclidean operator norm of Dh(w₀) on all points that count.
            pull: The function r ↦ |Dh(w₀)ᵀr| with the Euclidean norm.
            search: The search for the Euclidean norm of D²h(w₀).
            searched: The number of points of that search, the first ones; `None` means all of them.
            notice: A notice about the second derivative.

        Returns:
            The inverse relative scale with its factors.

        Raises:
            ModelError: If Dh(w₀) = 0.
        """
        if not jacobian > 0:
            raise ModelError(
                "Dh(w₀) = 0: no output changes with the weights, so κ is not defined; use another initialisation."
            )
        at_zero, at_start = (Descent.of(risk, each, pull) for each in (torch.zeros_like(outputs), outputs))
        count, some, kept = len(outputs), len(outputs) if searched is None else searched, risk.counted
        if kept is not None:
            counted = kept.reshape(len(kept), -1).any(1)
            outputs, count, some = outputs * kept, int(counted.sum()), int(counted[:some].sum())
        return cls(
            initial=float(outputs.norm()) / math.sqrt(count),
            target=float(target.norm()) / math.sqrt(count),
            residual=float((outputs - target).norm()) / math.sqrt(count),
            jacobian_norm=jacobian / math.sqrt(count),
            hessian_norm=search.value / math.sqrt(some),
            search=search,
            loss=type(risk.loss).__name__,
            at_zero=at_zero,
            at_start=at_start,
            notice=notice,
        )

    @property
    def kappa(self) -> float:
        """The inverse relative scale κ = ‖h(w₀) - y*‖ ‖D²h‖ / ‖Dh‖²."""
        return self.residual * self.hessian_norm / self.jacobian_norm**2

    @property
    def criterion(self) -> float:
        """The first criterion of section 1.2, F ‖D²h‖/(‖∇F‖ ‖Dh‖), where F is the loss minus its infimum.

        It is infinite if ∇F = 0 away from the infimum.
        """
        at = self._descent
        if at.excess * self.hessian_norm == 0:
            return 0.0
        return at.excess * self.hessian_norm / (at.gradient * self.jacobian_norm) if at.gradient > 0 else math.inf

    @property
    def alignment(self) -> float:
        """The alignment ‖Dhᵀr‖/(‖Dh‖ ‖r‖) of r = ∇R with Dh, from 0 to 1; NaN if r = 0."""
        at = self._descent
        return at.gradient / (self.jacobian_norm * at.residual) if at.residual > 0 else math.nan

    @property
    def symbol(self) -> str:
        """The number that belongs to the loss: "κ" for the square loss, and "criterion" for all others."""
        return "κ" if self.loss == Square.__name__ else "criterion"

    @property
    def value(self) -> float:
        """The value of the number that belongs to the loss: κ for the square loss, and otherwise the criterion."""
        return self.kappa if self.symbol == "κ" else self.criterion

    @property
    def promises(self) -> str:
        """The prediction of the number that belongs to the loss: "lazy", "undecided" or "not lazy"."""
        return "lazy" if self.value <= LAZY else "undecided" if self.value < 1 else "not lazy"

    @property
    def _descent(self) -> Descent:
        if self.at_start is None:
            raise ScaleError(
                "The loss at the initial outputs of this scaled model is not known; call relative_scale with the scaled"
                " model, or centred() first."
            )
        return self.at_start

    def scaled(self, alpha: Number) -> RelativeScale:
        """Compute κ of the scaled model αh, κ_{αh}(w₀) = (1/α) ‖αh(w₀) - y*‖ ‖D²h‖/‖Dh‖² (section 1.2).

        The criterion of the scaled model is known if h(w₀) = 0, as after `centred`; it is then proportional to 1/α.

        Args:
            alpha: The scale α, positive and finite.

        Returns:
            The inverse relative scale of αh with its factors.
        """
        return self._times(output=_positive(alpha), first=alpha, second=alpha)

    def centred(self) -> RelativeScale:
        """Compute κ and the criterion of the centred model h - h(w₀), whose outputs start at 0.

        κ is also that of a symmetrised h, up to a factor of both norms.
        """
        return replace(self, initial=0.0, residual=self.target, at_start=self.at_zero)

    def started_at(self, factor: Number, degree: Number) -> RelativeScale:
        """Compute κ at λw₀ for a model that is q-homogeneous in w.

        h, Dh and D²h grow like λ^q, λ^{q-1} and λ^{q-2} (section 1.2).

        Args:
            factor: The factor λ, positive and finite.
            degree: The degree q of homogeneity.

        Returns:
            The inverse relative scale at λw₀ with its factors.
        """
        check_number("degree", degree)
        _positive(factor)
        return self._times(factor**degree, factor ** (degree - 1), factor ** (degree - 2))

    def widened(self, factor: Number, exponent: Number) -> RelativeScale:
        """Compute κ to leading order for a two-layer network α(m) Σ_j φ(θ_j) of another hidden width m.

        With α(m) ∝ m^exponent and independent neurons with Eφ = 0, h(w₀) and Dh grow like √m α(m), and D²h like α(m)
        (supplement, A.2). Then h(w₀) is independent of y*. For the exponent -1/2, κ decreases like m^(-1/2); for the
        exponent -1, it has a limit.

        Args:
            factor: The factor of the hidden width, positive and finite.
            exponent: The exponent of m in α(m).

        Returns:
            The inverse relative scale of the network of `factor` times the width, with its factors.
        """
        check_number("exponent", exponent)
        _positive(factor)
        grown = factor ** (exponent + 0.5)
        found = self._times(grown, grown, factor**exponent)
        return replace(found, residual=math.hypot(found.initial, self.target), at_start=None)

    def lazy_scale(self, value: Number = LAZY) -> float:
        """Compute the scale α at which the centred model αh has a given κ, or for other losses a given criterion.

        Both are proportional to 1/α: for the square loss, α = ‖y*‖ ‖D²h‖/(κ‖Dh‖²).

        Args:
            value: The value of κ or of the criterion, positive and finite.

        Returns:
            The scale α.
        """
        return self.centred().value / _positive(value)

    def _times(self, output: Number, first: Number, second: Number) -> RelativeScale:
        at_zero = replace(self.at_zero, gradient=self.at_zero.gradient * first)
        # ‖λh - y‖² = λ‖h - y‖² + (λ - 1)(λ‖h‖² - ‖y‖²), which does not cancel where h is close to y and λ to 1.
        across = (output - 1) * (output * self.initial**2 - self.target**2)
        return replace(
            self,
            initial=self.initial * output,
            residual=math.sqrt(max(0.0, output * self.residual**2 + across)),
            jacobian_norm=self.jacobian_norm * first,
            hessian_norm=self.hessian_norm * second,
            at_zero=at_zero,
            at_start=at_zero if self.initial == 0 else None,
        )

    def __str__(self) -> str:
        found = "" if self.search.status == "converged" else " (search stopped early: a lower bound)"
        lines = [
            f"κ = {self.kappa:.4g}{found}",
            f"  ‖h(w₀) - y*‖ = {self.residual:.4g}   distance between the initial outputs and the targets",
            f"  ‖Dh(w₀)‖     = {self.jacobian_norm:.4g}   rate of change of the outputs with the weights",
            f"  ‖D²h(w₀)‖    = {self.hessian_norm:.4g}   rate of change of Dh with the weights",
        ]
        if self.at_start is not None:
            lines += [
                f"criterion = {self.criterion:.4g}{found}",
                f"  F            = {self.at_start.excess:.4g}   {self.loss} above its infimum",
                f"  ‖∇F(w₀)‖     = {self.at_start.gradient:.4g}   rate of change of the loss with the weights",
                f"  alignment    = {self.alignment:.4g}   of the residual with Dh, ‖Dhᵀr‖/(‖Dh‖ ‖r‖)",
            ]
        lines.append(f"The number that belongs to the loss {self.loss} is {self.symbol}.")
        return "\n".join([*lines, *([f"  {self.notice}"] if self.notice else [])])


def _positive(value: Number) -> Number:
    if not 0 < value < math.inf:
        raise ScaleError(f"The scale must be positive and finite, but it is {value}; for α = ∞, κ is 0.")
    return value
