"""Certificates of the theorems for a model, with the measured distances beside the bounds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.certify.comparison import compare, compare_steps, doubled
from lazyscope.errors import InputError, ModelError
from lazyscope.labels import Target
from lazyscope.loss import Loss, Square, check_loss
from lazyscope.model.base import studied
from lazyscope.model.coordinates import Studied
from lazyscope.theory.arguments import checked_constant, checked_horizon, checked_step
from lazyscope.theory.certificate import Certificate
from lazyscope.theory.constant_rank import descent, under_parameterised
from lazyscope.theory.constants import Constants, constants_of
from lazyscope.theory.convergence import linear_rate, over_parameterised, stability
from lazyscope.theory.curvature import Curvature
from lazyscope.theory.lazy import finite_horizon, general, risk_at

_RATES = ("rate mσ_min²/4", "rate μ")
"""The names of the rates of Theorems 2.4 and 2.5."""


@without_autocast
def certify(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    alpha: Number,
    K: Number = 1.0,
    horizon: Number | None = None,
    centred: bool = False,
    unseen: Inputs | None = None,
    constants: Constants | None = None,
    points: int = 40,
    lr: Number | None = None,
    steps: int = 100,
) -> list[Certificate]:
    """Evaluate the theorems of section 2, and compare them with distances along both flows.

    Theorem 2.2 is evaluated up to the time `horizon`, Theorem 2.3 (square loss only) up to `K/Lip(h)²`, and Theorem
    2.4, Theorem 2.5 with the constants of `theory.under_parameterised`, and the lemmas up to the final time of the
    flow. With a step size `lr`, gradient descent is certified as well, and compared with
    gradient descent on the linearised model.

    Args:
        model: A module, a `Model` or a `TwoLayer`.
        loss: The loss, an instance of a class of `lazyscope.loss`.
        x: The inputs, with the samples along the first dimension.
        y: The targets.
        alpha: The scale α.
        K: The constant of Theorem 2.3, and of the default horizon.
        horizon: The final time of Theorem 2.2. `None` means `K/‖Dh(w₀)‖²`.
        centred: Whether `h(w₀)` is subtracted from the outputs.
        unseen: Inputs outside the training data on which the predictions are compared as well.
        constants: The Lipschitz constants of the model. `None` computes them, which is possible for `TwoLayer`.
        points: The number of times at which the flows are compared, per theorem.
        lr: The step size of gradient descent. `None` certifies flows only.
        steps: The number of steps of gradient descent.

    Returns:
        One certificate per theorem. Its `applies` is True if the hypotheses hold, and its `verdict` tells whether the
        measured distances respect the bounds.

    Raises:
        InputError: If the loss is not one of `lazyscope.loss`, or K, the horizon, the step size or a count is not
            positive and finite.
        ModelError: If `Dh(w₀) = 0` and no horizon is given, or `h` does not depend on the weights.
        ScaleError: If α is not positive and finite.

    Example:
        >>> import lazyscope as ls
        >>> net = ls.TwoLayer.gaussian(50, 2, [0], activation=torch.tanh)[0]
        >>> x = torch.randn(4, 2)
        >>> [c.holds for c in ls.certify(net, ls.loss.Square(), x, torch.zeros(4), alpha=10.0, centred=True)][:1]
        [True]
    """
    loss, K = check_loss(loss), checked_constant(K)
    end = None if horizon is None else checked_horizon(horizon)
    if points < 1 or (lr is not None and (points < 2 or steps < 1)):
        raise InputError(
            f"The number of times is {points} and that of steps is {steps}; pass points ≥ 1, and with a step size also"
            " points ≥ 2 and steps ≥ 1."
        )
    lr = None if lr is None else checked_step(lr)
    model, x, unseen = studied(model).double(), doubled(x), None if unseen is None else doubled(unseen)
    known = constants_of(model, x) if constants is None else constants
    steepness = known.jacobian_norm**2
    if end is None and not steepness > 0:
        raise ModelError("Dh(w₀) is 0, so the horizon K/‖Dh(w₀)‖² is infinite; pass horizon=… or use other weights.")
    end = K / steepness if end is None else end
    options: dict[str, Any] = {"alpha": alpha, "centred": centred, "constants": known}
    found = [
        general(model, loss, x, y, horizon=end, unseen=unseen, **options),
        over_parameterised(model, loss, x, y, **options),
        under_parameterised(model, loss, x, y, **options),
    ]
    if isinstance(loss, Square):
        found.insert(1, finite_horizon(model, x, y, K=K, unseen=unseen, **options))
    ends = [c.horizon for c in found if math.isfinite(c.horizon)]
    rates = [c.constants[name].value for c in found for name in _RATES if c.applies and name in c.constants]
    # until the bounds for all times are e⁻⁵, but at most 30 times the fastest time scale, for the explicit solver
    risk = risk_at(model, loss, x, y, alpha, centred)
    ends += [min(5 / rate, 30 / (Curvature.of(risk).smoothness * steepness)) for rate in rates]
    times = torch.cat([torch.linspace(0, time, points, dtype=torch.float64, device="cpu") for time in ends]).unique()
    both = compare(model, loss, x, y, alpha=alpha, times=times, centred=centred, unseen=unseen)
    found = [*(c.against(both) for c in found), linear_rate(risk, both), stability(risk, both, known)]
    if lr is not None:
        stepped = descent(model, loss, x, y, lr=lr, **options)
        if stepped.applies:
            walked = compare_steps(model, loss, x, y, alpha=alpha, lr=lr, steps=steps, centred=centred, points=points)
            stepped = stepped.against(walked)
        found.append(stepped)
    return found
