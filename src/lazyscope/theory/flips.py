"""A bound on the number of activations of a two-layer ReLU network that change on a ball around w₀."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope._typing import Number
from lazyscope.errors import InputError, ModelError
from lazyscope.model.two_layer import TwoLayer


def flipped_share(net: TwoLayer, x: Float[Tensor, "n d"], radius: Number) -> float:
    """Bound the share of pairs (neuron, point) of a ReLU network whose activation changes when the weights move by ≤ r.

    If the sign of b_j·x_i changes, then b_j moves by at least d_ij = |b_j·x_i|/|x_i|. If k points change for neuron j,
    then b_j moves by at least the k-th smallest of the d_ij, so Σ_j d_{j(k_j)}² ≤ r². The bound is the largest Σ_j k_j
    under this constraint, where the function k_j ↦ d_{j(k_j)}² is replaced by its convex hull, divided by the number of
    pairs. It holds for all weights in the ball, whatever the training. For a gradient flow of F_α,
    r = (tR(y(0)))^½/α at time t, as in Theorem 2.2, so the share tends to 0 as α → ∞ if no b_j·x_i is 0.

    Nothing more is known for ReLU: Theorems 2.2 to 2.5 need a Lipschitz continuous Dh, and that of a ReLU network jumps
    where an activation changes.

    Args:
        net: The network, with one member and the activation `torch.relu`.
        x: The points, none of which is 0.
        radius: The radius r of the ball.

    Returns:
        An upper bound on the share, from 0 to 1.

    Raises:
        InputError: If a point is 0, the radius is negative, the points do not have the dimension of the network, or a
            number is NaN.
        ModelError: If the network is a batch or is not a ReLU network.

    Example:
        >>> net = TwoLayer(a=torch.ones(2), b=torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
        >>> x = torch.tensor([[1.0, 0.1], [0.1, 1.0]])
        >>> [flipped_share(net, x, radius) for radius in (0.05, 0.2, 1.0, 10.0)]
        [0.0, 0.25, 0.5, 1.0]
    """
    if net.batch or net.activation not in (torch.relu, torch.nn.functional.relu):
        raise ModelError("The bound is for one ReLU network; select one member, for instance net[0], with torch.relu.")
    b = net.b if net.alive is None else net.b[net.alive]
    if x.ndim != 2 or x.shape[1] != b.shape[-1]:
        raise InputError(
            f"The points have shape {tuple(x.shape)}, and the network has {b.shape[-1]} inputs; pass points of shape"
            f" (n, {b.shape[-1]})."
        )
    if not bool(b.isfinite().all() & x.isfinite().all()):
        raise InputError("The weights or the points contain NaN or infinite values; correct or remove them.")
    lengths = x.double().norm(dim=-1)
    if not radius >= 0 or not bool((lengths > 0).all()):
        raise InputError("The radius must not be negative and no point may be 0; remove such points.")
    costs = ((b.double() @ x.double().mT).abs() / lengths).square().sort(dim=-1).values
    rows: list[list[float]] = costs.tolist()
    pieces = [piece for row in rows for piece in _hull([0.0, *row])]
    budget, flips = float(radius) ** 2 * (1 + 1e-12), 0.0
    for price, number in sorted(pieces):  # the price of one flip
        affordable = min(number, budget / price) if price > 0 else number
        flips, budget = flips + affordable, budget - price * affordable
        if affordable < number:
            break
    pairs: int = costs.numel()
    return math.floor(flips + 1e-9) / max(1, pairs)


def _hull(costs: list[float]) -> list[tuple[float, int]]:
    """Return the pieces (slope, length) of the convex hull of k ↦ costs[k], which increases from 0."""
    corners: list[int] = []
    for k, cost in enumerate(costs):
        while len(corners) > 1 and (costs[corners[-1]] - costs[corners[-2]]) * (k - corners[-1]) >= (
            cost - costs[corners[-1]]
        ) * (corners[-1] - corners[-2]):
            corners.pop()
        corners.append(k)
    return [((costs[b] - costs[a]) / (b - a), b - a) for a, b in pairwise(corners)]
