"""The best neuron: the maximum over the unit sphere of |g(θ)|, g(θ) = Σ_i c_i relu(θ·x_i).

The planes θ·x_i = 0 divide the sphere into cells. In each cell, g(θ) = θ·v, where v is the sum of c_i x_i over its
active points. Therefore the maximum is at ±v/‖v‖ for a cell, at the same point for v projected on an edge, or at a
corner.
"""

from __future__ import annotations

import numpy as np

EXACT = 3
"""The largest dimension whose cells are enumerated."""

_PARALLEL = 1e-13


def extremes(x: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute all candidates θ (K, d) and g(θ) for d ≤ 3; the largest |g| is the maximum over the sphere.

    Other circles cross the circle θ·x_i = 0 at known angles, and a point between two crossings determines which samples
    are active on either side. Every cell has an edge, so all cells are found. Points in the plane get a third
    coordinate 0, which does not change the maximum.
    """
    dim = x.shape[1]
    x = np.pad(x, ((0, 0), (0, EXACT - dim)))
    keep = (c != 0) & (np.abs(x).max(1) > 0)
    if not keep.any():
        return np.eye(EXACT)[:1, :dim], np.zeros(1)
    x, c = x[keep], c[keep]
    first, second = _plane(x)
    along = np.stack([first @ x.T, second @ x.T], axis=-1)  # (circles, samples, 2)
    angle = np.arctan2(-along[..., 0], along[..., 1])
    angle = np.sort(np.concatenate([angle, angle + np.pi], axis=1) % (2 * np.pi), axis=1)
    after = np.concatenate([angle[:, 1:], angle[:, :1] + 2 * np.pi], axis=1)
    corners, middles = (_on_circle(first, second, a) for a in (angle, (angle + after) / 2))
    products = middles @ x.T  # (circles, arcs, samples)
    size = np.linalg.norm(x, axis=1)
    # On the circle of a sample, this sample and all parallel ones are active on one side only.
    across = np.where(np.abs(along).max(-1) <= _PARALLEL * size, x @ x.T, 0)[:, None, :]
    sides = [((np.where(across == 0, products, side * across) > 0) * c) @ x for side in (1, -1)]
    unit = x / size[:, None]
    edges = sides[0] - (sides[0] * unit[:, None]).sum(-1, keepdims=True) * unit[:, None]
    tops = np.concatenate([v.reshape(-1, EXACT) for v in (*sides, edges)])
    found = np.concatenate([tops, -tops, corners.reshape(-1, EXACT)])[:, :dim]
    norm = np.linalg.norm(found, axis=1)
    found = found[norm > 0] / norm[norm > 0, None]
    return found, value(found, x[:, :dim], c)


def climb(x: np.ndarray, c: np.ndarray, starts: np.ndarray, steps: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Find local maxima of |g| from many starts in any dimension; the global maximum may be missed.

    Each start keeps the sign of g, and moves by θ ← v/‖v‖ if that increases |g|, otherwise by steps along v of
    decreasing length.
    """
    theta = starts / np.linalg.norm(starts, axis=1, keepdims=True)
    now = value(theta, x, c)
    side = np.where(now >= 0, 1.0, -1.0)
    step = np.ones(len(theta))
    for _ in range(steps):
        v = side[:, None] * (((theta @ x.T > 0) * c) @ x)
        length = np.linalg.norm(v, axis=1, keepdims=True).clip(1e-300)
        for move in (v / length, theta + step[:, None] * v / length):
            move = move / np.linalg.norm(move, axis=1, keepdims=True).clip(1e-300)
            reached = value(move, x, c)
            better = side * reached > side * now
            theta, now = np.where(better[:, None], move, theta), np.where(better, reached, now)
        step = np.where(better, step, step / 2)
    return theta, now


def value(theta: np.ndarray, x: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Compute g(θ) for many θ, some at a time."""
    parts = np.array_split(theta, max(1, theta.shape[0] * x.shape[0] // 10**7))
    return np.concatenate([np.maximum(part @ x.T, 0) @ c for part in parts])


def _plane(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two orthonormal vectors orthogonal to each row."""
    axis = np.eye(EXACT)[np.abs(x).argmin(1)]
    first = np.cross(x, axis)
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    second = np.cross(x, first)
    return first, second / np.linalg.norm(second, axis=1, keepdims=True)


def _on_circle(first: np.ndarray, second: np.ndarray, angle: np.ndarray) -> np.ndarray:
    points: np.ndarray = np.cos(angle)[..., None] * first[:, None] + np.sin(angle)[..., None] * second[:, None]
    return points
