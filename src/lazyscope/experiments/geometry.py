"""Supplement, Figure 5: the image of a model with two parameters in R³, its tangent plane, and both paths.

The figure of the supplement is a drawing; this one is computed. The model h: R² → R³ is a graph over its tangent plane
at w₀ = 0, so p < dim F, and all y* outside the plane are out of reach of the tangent model.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.style import BLACK, BLUE, ORANGE, RED, legend_below, panels

TARGET = np.array([1.0, 0.7, 0.6])
"""The target y*, at the distance 0.6 from the tangent plane."""
SHOWN = (1.5, 6.0)
"""The two scales α that are drawn."""
TIMES = np.linspace(0, 30, 121)[1:]


def surface(w: np.ndarray) -> np.ndarray:
    """Compute h(w) = (w₁ + w₁w₂/4, w₂ - w₁²/4, w₁²/2 + w₁w₂/2 - w₂²/4), (…, 3)."""
    a, b = w[..., 0], w[..., 1]
    image: np.ndarray = np.stack([a + a * b / 4, b - a**2 / 4, a**2 / 2 + a * b / 2 - b**2 / 4], -1)
    return image


def slope(w: np.ndarray) -> np.ndarray:
    """Compute Dh(w), (3, 2)."""
    a, b = w
    return np.array([[1 + b / 4, a / 4], [-a / 2, 1.0], [a + b / 2, (a - b) / 2]])


def flow(alpha: float) -> np.ndarray:
    """Compute v = α(w_α - w₀) by v' = -Dh(w)ᵀ(αh(w) - y*), (times, 2), also for the tangent model, α = ∞.

    A flow of two parameters takes milliseconds with SciPy. A test compares it with descent by autograd.
    """
    from scipy.integrate import solve_ivp  # imported here because it takes 0.3 s

    def velocity(_: float, v: np.ndarray) -> np.ndarray:
        if math.isinf(alpha):
            return np.asarray(TARGET[:2] - v)  # Dh(w₀) is the identity on the first two axes
        moved: np.ndarray = -slope(v / alpha).T @ (alpha * surface(v / alpha) - TARGET)
        return moved

    done = solve_ivp(velocity, (0.0, TIMES[-1]), np.zeros(2), "DOP853", TIMES, rtol=1e-10, atol=1e-12)
    path: np.ndarray = done.y.T
    return path


def grid(scale: str) -> list[Params]:
    """List the scales α."""
    count = 13 if scale == "paper" else 5
    return [{"alpha": alpha} for alpha in (*SHOWN, *(float(a) for a in np.geomspace(10, 1000, count)))]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Compute both paths in R³ at the same times, until they have converged, on the CPU."""
    line = np.concatenate([flow(math.inf), np.zeros((len(TIMES), 1))], axis=1)  # Dh(w₀) is the first two axes
    results: list[Result] = []
    for point in points:
        alpha = float(point["alpha"])
        w = flow(alpha) / alpha
        results.append(
            {
                "path": alpha * surface(w),
                "line": line,
                "gradient": float(np.linalg.norm(slope(w[-1]).T @ (alpha * surface(w[-1]) - TARGET))),
                "rank": int(np.linalg.matrix_rank(slope(w[-1]))),
            }
        )
    return results


def claims(trials: Trials) -> list[Claim]:
    """Check that the paths approach each other and the plane like 1/α, and where they end."""
    large = Trials(t for t in trials if float(t.params["alpha"]) >= 10)
    alphas, paths, lines = (large.column(name) for name in ("alpha", "path", "line"))
    apart = np.linalg.norm(paths - lines, axis=-1).max(-1)
    above = np.abs(paths[..., 2]).max(-1)
    powers = exponent(alphas, apart), exponent(alphas, above)
    projection = np.array([*TARGET[:2], 0.0])
    miss = float(np.abs(lines[:, -1] - projection).max())
    steep = float(trials.column("gradient").max())
    few = trials[: len(SHOWN)]
    far = np.linalg.norm(few.column("path") - few.column("line"), axis=-1).max(-1)
    return [
        Claim(
            "p = 2 < 3: the distance between αh(w_α) and αh̄(w̄_α), at all times, falls like α^s, s = -1 ± 0.03",
            "Theorem 2.5: O(1/α) until convergence",
            f"s = {against(powers[0], -1, 4)}; {far[0]:.3f} at α = {SHOWN[0]:g}, {far[1]:.3f} at α = {SHOWN[1]:g}",
            abs(powers[0] + 1) <= 0.03 and bool(far[1] < far[0]),
        ),
        Claim(
            "the distance of αh(w_α) from the tangent plane falls like α^s, s = -1 ± 0.03",
            "Figure 5: the image of h is a manifold with this tangent plane",
            f"s = {against(powers[1], -1, 4)}",
            abs(powers[1] + 1) <= 0.03,
        ),
        Claim(
            "the linearised path ends at the projection of y* on the plane, within 10⁻⁶",
            "under-parameterised: p < dim F",
            f"{miss:.1e}",
            miss <= 1e-6,
        ),
        Claim(
            "the path ends where y* - αh is orthogonal to the manifold, of rank 2, for every α: |Dhᵀ(αh - y*)| ≤ 10⁻⁶",
            "Theorem 2.5: a strict local minimum",
            f"{steep:.1e}; rank {int(trials.column('rank').min())}",
            steep <= 1e-6 and int(trials.column("rank").min()) == 2,
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw the manifold αh(R²), its tangent plane and both paths in R³, at two scales α."""
    canvas, axes = panels(1, 2, width=4.3, height=3.9, subplot_kw={"projection": "3d"})
    side = np.linspace(-0.3, 1.5, 25)
    w = np.stack(np.meshgrid(side, side), -1)
    for axis, alpha in zip(axes[0], SHOWN, strict=True):
        result = trials.where(alpha=alpha)[0].result
        x, y, z = (alpha * surface(w / alpha)).transpose(2, 0, 1)
        axis.plot_surface(x, y, z, color=BLUE, alpha=0.25, linewidth=0)
        axis.plot_wireframe(*w.transpose(2, 0, 1), 0 * z, rstride=6, cstride=6, color="0.6", linewidth=0.5)
        for name, colour in (("path", RED), ("line", BLACK)):
            path = np.concatenate([np.zeros((1, 3)), np.asarray(result[name])])
            axis.plot(*path.T, "--", color=colour)
            axis.plot(*path[-1:].T, "o", color=colour)
        axis.plot(*TARGET[:, None], "*", color=ORANGE, markersize=8)
        axis.set_title(rf"scale $\alpha={alpha:g}$")
        axis.view_init(elev=18, azim=-60)
        axis.set(zlim=(-0.3, 0.9), xticks=[0, 1], yticks=[0, 1], zticks=[0, 0.6])
        axis.set(xlabel="first output", ylabel="second output", zlabel="third output")
        for each in (axis.xaxis, axis.yaxis, axis.zaxis):
            each.labelpad = -8
            each.set_tick_params(pad=-3)
        axis.set_box_aspect((4, 4, 3), zoom=1.05)
    marks: list[Artist] = [
        Patch(color=BLUE, alpha=0.25, label=r"outputs of the model, $\alpha h(w)$"),
        Line2D([], [], color="0.6", linewidth=0.5, label="tangent plane"),
        Line2D([], [], color=RED, linestyle="--", marker="o", label="training of the model, and its end"),
        Line2D([], [], color=BLACK, linestyle="--", marker="o", label="training of the linearised model"),
        Line2D([], [], color=ORANGE, linestyle="", marker="*", markersize=8, label="target $y^*$"),
    ]
    legend_below(canvas, marks, columns=3)
    return canvas


EXPERIMENT = Experiment(
    name="geometry",
    source="Chizat, Oyallon, Bach 2019, supplement, Figure 5",
    title="A model with two parameters in three dimensions: the manifold, its tangent plane and both paths",
    caption=(
        "A model with two parameters is a surface, and its linearisation is the tangent plane. The larger the"
        " scale α, the closer the path of training on the surface stays to the path in the plane."
    ),
    cost={"quick": "2 s on two cores", "paper": "4 s on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
