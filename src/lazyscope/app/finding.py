"""What the numbers of a scene show, in words."""

from __future__ import annotations

import math

_ALIKE = 1.25
"""Test losses within this factor of each other are called similar. Both models have their own step size, and differ by
up to 14 % even in the lazy limit."""


def compared(network: float, tangent: float, steps: int) -> str:
    """Say which of a network and its tangent model generalises better after training.

    Args:
        network: The test loss of the network.
        tangent: The test loss of the tangent model.
        steps: The number of training steps.

    Returns:
        One sentence, with both test losses. A model whose loss is not finite has diverged.
    """
    losses = {"network": network, "tangent model": tangent}
    lost = [name for name, loss in losses.items() if not math.isfinite(loss)]
    if lost:
        return f"After {steps} steps, the {' and the '.join(lost)} diverged."
    better, worse = sorted(losses, key=losses.__getitem__)
    if losses[worse] <= _ALIKE * losses[better]:
        return (
            f"After {steps} steps, both generalise about equally well: the test loss of the network is {network:.2g},"
            f" that of the tangent model {tangent:.2g}."
        )
    return (
        f"After {steps} steps, the {better} generalises better: its test loss is {losses[better]:.2g}, that of the"
        f" {worse} {losses[worse]:.2g}."
    )
