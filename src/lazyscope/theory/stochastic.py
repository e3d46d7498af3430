"""Stochastic gradient descent in expectation, with explicit constants.

The statement and its proof are on the page "Certificates and proofs" of the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError
from lazyscope.labels import Target
from lazyscope.loss import Loss
from lazyscope.model.coordinates import Studied
from lazyscope.theory.arguments import checked_radius, checked_step
from lazyscope.theory.certificate import Bound, Certificate, Constant, Hypothesis
from lazyscope.theory.constant_rank import Ball, Pace, powers
from lazyscope.theory.constants import Constants
from lazyscope.theory.convergence import well_conditioned
from lazyscope.theory.lazy import Start


@without_autocast
def stochastic_descent(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    lr: Number,
    batch: int = 1,
    centred: bool = False,
    radius: Number | None = None,
    constants: Constants | None = None,
) -> Certificate:
    """Certify stochastic gradient descent with step size η and batches of b samples drawn with replacement.

    Let Dh(w₀) be injective. On the ball of radius r, ‖∇R(αh(w))‖ ≤ ‖∇R(y(0))‖ + αMr Lip(h), so the curvature of F_α is
    in [μ, Λ], with the μ and Λ of `descent` for this bound in place of G. Let μ > 0 and D := ‖∇F_α(w₀)‖/μ < r. Then the
    ball contains a unique critical point w_∞ of F_α, at a distance of at most D from w₀. With J = sup‖D_w f(w, x_i)‖ on
    the ball and G = (2M(R(y(0)) - R(y*)))^½, let s² = 2J²G²/(bα²) and
    Q = max(|1 - ημ|, |1 - ηΛ|)² + 2η²J²M² Lip(h)²/b. If Q < 1, then

    - E[‖w_k - w_∞‖²; w₀, …, w_{k-1} in the ball] ≤ Q^k D² + η²s²(1 - Q^k)/(1 - Q) for all k,
    - the probability that one of w₁, …, w_k is outside the ball is at most (D² + kη²s²)/(r - D)².

    If h(w₀) = 0, then D and s are O(1/α), and the probability is O(1/α²).

    Args:
        model: The module, `Model` or other model with tangent coordinates.
        loss: The loss R, strongly convex with a Lipschitz gradient.
        x: The inputs of n samples.
        y: The targets in the form that the loss takes.
        alpha: The scale α, positive and finite.
        lr: The step size η, positive.
        batch: The number b of samples in a batch, drawn uniformly with replacement.
        centred: Whether to subtract h(w₀) from the outputs, so that they start at 0.
        radius: The radius r. `None` uses the radius at which μ is half of its value at r = 0.
        constants: The Lipschitz constants around w₀, which need the constants of single points. `None` uses
            `constants_of(model, x)`.

    Returns:
        The certificate, with bounds on the mean square distance and on the probability of leaving the ball, as
        functions of t = ηk.

    Raises:
        InputError: If the step size or the batch size is not positive, or the radius is negative or infinite.
        ScaleError: If α is not positive and finite.
    """
    if batch < 1:
        raise InputError(f"The batch size is {batch} and must be positive; pass batch ≥ 1.")
    pace, radius = Pace(checked_step(lr)), checked_radius(radius)
    s = Start.of(model, loss, x, y, alpha, centred, constants)
    found, smooth = s.constants.spectrum, s.loss.smoothness
    evidence = f"rank {found.rank} at w₀, {found.parameters} parameters, {found.outputs} outputs"
    conditions = [s.smooth, well_conditioned(s.loss), Hypothesis("Dh(w₀) is injective", found.injective, evidence)]
    if not all(condition.holds for condition in conditions):
        return Certificate("Stochastic gradient descent", tuple(conditions), s.known(), ())

    def ball_of(r: float) -> Ball:
        return Ball.of(s, r, s.slope + s.alpha * smooth * r * s.constants.lipschitz(r))

    ball = ball_of(_halving(ball_of) if radius is None else radius)
    far = s.gradient / (s.alpha * ball.low) if ball.low > 0 else math.inf
    single = s.constants.at(x)
    steepest = single.jacobian + ball.radius * single.smoothness(ball.radius)
    growth = 2 * (steepest * smooth * s.constants.lipschitz(ball.radius)) ** 2 / batch
    noise = 4 * steepest**2 * smooth * max(0.0, s.excess) / (batch * s.alpha**2)
    gap = pace.gap(ball.low, ball.high)
    # 1 - Q, without cancellation
    rest = gap * (2 - gap) - pace.step**2 * growth
    factor = 1 - rest
    evidence = f"μ = {ball.low:.3g}, D = {far:.3g}, r = {ball.radius:.3g}, Q = {factor:.3g}"
    conditions.append(Hypothesis("μ > 0, D < r and Q < 1", far < ball.radius and rest > 0, evidence))
    numbers = {"rate μ": ball.low, "Λ": ball.high, "D": far, "s²": noise, "Q": factor}
    known = s.known(ball.radius) | {name: Constant(value, s.constants.kind) for name, value in numbers.items()}
    if not conditions[-1].holds:
        return Certificate("Stochastic gradient descent", tuple(conditions), known, ())

    def distance(t: Tensor) -> Tensor:
        log = powers(rest, t / pace.step)
        return log.exp() * far**2 - pace.step**2 * noise * log.expm1() / rest

    def exits(t: Tensor) -> Tensor:
        return torch.clamp((far**2 + t * pace.step * noise) / (ball.radius - far) ** 2, max=1.0)

    bounds = (
        Bound("distance", "E[‖w_k - w_∞‖²; in the ball] ≤ Q^k D² + η²s²(1 - Q^k)/(1 - Q)", distance),
        Bound("exits", "P(outside the ball by step k) ≤ (D² + kη²s²)/(r - D)²", exits),
    )
    return Certificate("Stochastic gradient descent", tuple(conditions), known, bounds)


def _halving(ball_of: Callable[[float], Ball]) -> float:
    """Find the radius at which μ is half of its value at r = 0, by bisection; 0 if μ is not positive there."""
    start = ball_of(0.0).low
    if not start > 0:
        return 0.0
    high = 1.0
    while ball_of(high).low > start / 2 and high < 1e300:
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ball_of(middle).low >= start / 2 else (low, middle)
    return low
