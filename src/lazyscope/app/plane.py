"""Neurons in the plane, in a frame that is the same for every scale of the initialisation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lazyscope.app.scene import Arrows, Axis, Dots, Line, Mark, Panel, Trails
from lazyscope.lab.style import BLUE, RED

_GROWTH = 0.25
"""The distance in the panel for each factor e of the radius, beyond the linear part."""
_TURN = np.linspace(0, 2 * np.pi, 100)


def bend(points: Tensor, linear: float = 1.0) -> Tensor:
    """Map points radially: distances up to a bound are linear, those beyond it are logarithmic.

    Args:
        points: The points, of shape `(…, 2)`.
        linear: The radius up to which distances are linear. It is mapped to 1.

    Returns:
        The mapped points.
    """
    radius = points.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    mapped: Tensor = points / radius * (radius / linear).where(radius <= linear, 1 + _GROWTH * (radius / linear).log())
    return mapped


def bent(radius: float, linear: float = 1.0) -> float:
    """Map one radius as `bend` does.

    Args:
        radius: The radius.
        linear: The radius up to which distances are linear.

    Returns:
        The radius in the panel.
    """
    return radius / linear if radius <= linear else 1 + _GROWTH * math.log(radius / linear)


def neurons(
    title: str,
    paths: Tensor,
    signs: Tensor,
    teacher: tuple[Tensor, Tensor],
    *,
    rings: Sequence[float],
    linear: float = 1.0,
    note: str = "",
) -> Panel:
    """Draw neurons with their paths, in red if a_j > 0 and in blue otherwise, as in the paper.

    Args:
        title: The title.
        paths: The neurons, of shape `(T, m, 2)`.
        signs: The signs of a_j, of shape `(m,)`.
        teacher: The arrows, of shape `(k, 2)`, and their signs.
        rings: The radii of the circles. The last one is the edge of the panel.
        linear: The radius up to which distances are linear.
        note: A note below the panel. The note adds how many neurons end outside of it.

    Returns:
        The panel.
    """
    reach = bent(rings[-1], linear)
    beyond = int((paths[-1].norm(dim=-1) > rings[-1]).sum())
    outside = f"{beyond} of {len(signs)} neurons end outside" if beyond else ""
    drawn, arrows = bend(paths, linear), bend(teacher[0], linear)
    kinds = [(True, RED, "aⱼ > 0"), (False, BLUE, "aⱼ < 0")]
    circles = [
        Line(bent(r, linear) * np.cos(_TURN), bent(r, linear) * np.sin(_TURN), "#777777", dash="2 4", width=1)
        for r in rings
    ]
    dots: list[Mark] = [
        Dots(drawn[:, own, 0], drawn[:, own, 1], colour, f"neuron, {word}", size=4)
        for positive, colour, word in kinds
        if bool((own := (signs > 0) == positive).any())
    ]
    return Panel(
        title,
        Axis(-reach, reach, ticks=False),
        Axis(-reach, reach, ticks=False),
        [
            *circles,
            Trails(drawn[..., 0], drawn[..., 1], colours(signs)),
            Arrows(arrows[:, 0], arrows[:, 1], colours(teacher[1]), "teacher"),
            *dots,
        ],
        note="; ".join(text for text in (note, outside) if text),
        equal=True,
    )


def colours(signs: Tensor) -> list[str]:
    """Return red for positive and blue for other signs.

    Args:
        signs: The signs.

    Returns:
        The colours.
    """
    return [RED if sign > 0 else BLUE for sign in signs.tolist()]
