"""The best neuron: max over the unit sphere of |g(θ)|, g(θ) = Σ_i c_i relu(θ·x_i).

The planes θ·x_i = 0 cut the sphere into cells, in each of which g(θ) = θ·v with v the sum of c_i x_i over its active
points. So the maximum is at ±v/‖v‖ of a cell, or at ± the same for v projected on an edge, or at a corner.
"""

from __future__ import annotations

import numpy as np

EXACT = 3
"""The largest dimension whose cells are enumerated."""

_PARALLEL = 1e-13


def extremes(x: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All candidates θ (K, d) and g(θ), for d ≤ 3: the one with the largest |g| has the maximum over the sphere.

    Along the circle θ·x_i = 0 other circles cross at known angles, and a point between two crossings tells which
    samples are active on either side. All cells have an edge, so all are seen. Points in the plane are given a third
    coordinate 0, which makes no neuron better.
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
    # On its own circle a sample, and all that are parallel to it, is active on one side only.
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
    """Local maxima of |g| from many starts, in any dimension; the largest may be missed.

    Each start climbs on its own side, by θ ← v/‖v‖ where that helps, and by steps along v that halve where not.
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
    """g(θ) of many θ, some at a time."""
    parts = np.array_split(theta, max(1, theta.shape[0] * x.shape[0] // 10**7))
    return np.concatenate([np.maximum(part @ x.T, 0) @ c for part in parts])


def _plane(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two orthonormal vectors across each row."""
    axis = np.eye(EXACT)[np.abs(x).argmin(1)]
    first = np.cross(x, axis)
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    second = np.cross(x, first)
    return first, second / np.linalg.norm(second, axis=1, keepdims=True)


def _on_circle(first: np.ndarray, second: np.ndarray, angle: np.ndarray) -> np.ndarray:
    points: np.ndarray = np.cos(angle)[..., None] * first[:, None] + np.sin(angle)[..., None] * second[:, None]
    return points
