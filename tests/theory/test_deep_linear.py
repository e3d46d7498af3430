"""Deep linear nets: closed forms against SciPy's ODE solver, and their limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from lazyscope.errors import InputError
from lazyscope.theory.deep_linear import balanced_start, mode_flow, two_layer_flow

TIMES = [0.0, 0.3, 1.0, 4.0, 30.0]


def ode(layers: list[np.ndarray], target: np.ndarray, times: list[float]) -> list[list[np.ndarray]]:
    """Integrate W_l' = -∂R/∂W_l for R = ½‖W_L … W_1 - Σ‖², and return the layers at each time."""
    shapes = [w.shape for w in layers]

    def split(flat: np.ndarray) -> list[np.ndarray]:
        ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends), shapes, strict=True)]

    def product(parts: list[np.ndarray], size: int) -> np.ndarray:
        total = np.eye(size)
        for part in parts:
            total = part @ total
        return total

    def field(_: float, flat: np.ndarray) -> np.ndarray:
        w = split(flat)
        missed = target - product(w, target.shape[1])
        moves = []
        for i in range(len(w)):
            above = product(w[i + 1 :], w[i].shape[0])
            moves.append(above.T @ missed @ product(w[:i], target.shape[1]).T)
        return np.concatenate([move.ravel() for move in moves])

    start = np.concatenate([w.ravel() for w in layers])
    path = solve_ivp(field, (0, times[-1]), start, t_eval=times, method="DOP853", rtol=1e-11, atol=1e-13)
    return [split(column) for column in path.y.T]


@pytest.mark.parametrize("balance", [-3.0, 0.0, 0.5, 20.0])
def test_two_layers_against_the_ode(balance: float) -> None:
    w1, w2 = balanced_start(3, balance, 0.05, seed=1)
    target = torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    path = two_layer_flow(w1, w2, target, TIMES)
    for i, (first, second) in enumerate(ode([w1.numpy(), w2.numpy()], target.numpy(), TIMES)):
        np.testing.assert_allclose(path.product[i], second @ first, atol=1e-6)
        np.testing.assert_allclose(path.first[i], first.T @ first, atol=1e-6)
        np.testing.assert_allclose(path.second[i], second @ second.T, atol=1e-6)


def test_rectangular_layers() -> None:
    random = torch.Generator().manual_seed(0)
    w2 = torch.linalg.qr(torch.randn(5, 2, generator=random, dtype=torch.float64)).Q * 1.5
    w1 = torch.linalg.qr(torch.randn(4, 2, generator=random, dtype=torch.float64)).Q.T * 0.5  # λ = 2
    target = torch.randn(5, 4, generator=random, dtype=torch.float64)
    path = two_layer_flow(w1, w2, target, TIMES)
    for i, (first, second) in enumerate(ode([w1.numpy(), w2.numpy()], target.numpy(), TIMES)):
        np.testing.assert_allclose(path.product[i], second @ first, atol=1e-6)


def test_late_times_do_not_overflow() -> None:
    w1, w2 = balanced_start(2, 1.0, 0.01, seed=0)
    target = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(two_layer_flow(w1, w2, target, [1e3]).product[0], target, atol=1e-9, rtol=0)


@pytest.mark.parametrize("depth", [2, 3, 5])
@pytest.mark.parametrize("strength", [0.7, 3.0])
def test_modes_against_the_ode(depth: int, strength: float) -> None:
    layers = [np.full((1, 1), 0.02 ** (1 / depth))] * depth
    expected = [float(np.prod(parts)) for parts in ode(layers, np.full((1, 1), strength), TIMES)]
    np.testing.assert_allclose(mode_flow(0.02, strength, depth, TIMES), expected, atol=1e-8)


def test_two_layers_are_modes_of_depth_two() -> None:
    target = torch.diag(torch.tensor([2.0, 0.5], dtype=torch.float64))
    start = math.sqrt(0.1) * torch.eye(2, dtype=torch.float64)
    path = two_layer_flow(start, start, target, TIMES)
    for i, strength in enumerate((2.0, 0.5)):
        torch.testing.assert_close(path.product[:, i, i], mode_flow(0.1, strength, 2, TIMES))


def test_a_balanced_start_is_balanced() -> None:
    w1, w2 = balanced_start(4, -2.0, 0.3, seed=3)
    torch.testing.assert_close(w2.T @ w2 - w1 @ w1.T, -2.0 * torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(torch.linalg.svdvals(w2 @ w1), torch.full((4,), 0.3, dtype=torch.float64))


def test_misuse_is_refused() -> None:
    one = torch.eye(2)
    with pytest.raises(InputError, match="λI"):
        two_layer_flow(one, torch.diag(torch.tensor([1.0, 2.0])), one, [1.0])
    with pytest.raises(InputError, match="increasing"):
        two_layer_flow(one, one, one, [1.0, 0.5])
    with pytest.raises(InputError, match="start"):
        mode_flow(2.0, 1.0, 2, [1.0])
    with pytest.raises(InputError, match="depth"):
        mode_flow(0.1, 1.0, 1, [1.0])
