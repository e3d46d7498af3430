"""The bounds of Theorem 2.2 are those of its proof, constant by constant: each is computed here in another way."""

from __future__ import annotations

import math

import pytest
import torch

from lazyscope import Model
from lazyscope._typing import Inputs
from lazyscope.loss import Logistic, Loss, Square
from lazyscope.theory import general
from lazyscope.theory.constants import Constants, Pointwise, Spectrum

ALPHA, END = 3.0, 2.0


class Given(Constants):
    """Lip(h) = 0.7 + 0.4 r and Lip(Dh) = 0.4."""

    kind, spectrum = "upper bound", Spectrum(0.7, 0.1, 1, 1, 2)

    def smoothness(self, radius: float | int) -> float:
        return 0.4

    def at(self, x: Inputs) -> Pointwise:
        return Pointwise(0.9, lambda radius: 0.5)


@pytest.mark.parametrize(("loss", "smooth"), [(Square(), 1.0), (Logistic(), 0.25)])
def test_constants_of_the_general_theorem(loss: Loss, smooth: float) -> None:
    """‖y - ȳ‖' ≤ C₁/α + C₂‖y - ȳ‖ and α‖w_α - w̄_α‖' ≤ D ρ(t) G + L M ‖y - ȳ‖, integrated by small steps."""
    model = Model(lambda w, x: w["w"] * x, {"w": torch.zeros(1, dtype=torch.float64)})
    x, y = torch.ones(2, 1, dtype=torch.float64), torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    found = general(model, loss, x, y, alpha=ALPHA, horizon=END, constants=Given(), unseen=x)
    curves = {bound.quantity: bound.curve for bound in found.bounds}
    # At outputs 0 the losses are 1/2 and log 2, and their slopes 1 and 1/2 at each of the two points.
    risk, slope = (0.5, 1.0) if isinstance(loss, Square) else (math.log(2), 0.5)
    assert loss.smoothness == smooth
    reach = math.sqrt(END * risk)
    lip, bend = 0.7 + 0.4 * reach / ALPHA, 0.4
    steep = slope + smooth * lip * reach
    first, second = 2 * lip * bend * reach * steep, lip**2 * smooth

    steps = 20_000
    times = torch.linspace(0, END, steps + 1, dtype=torch.float64)
    apart = first / ALPHA * torch.expm1(second * times) / second  # solves u' = C₁/α + C₂u
    rate = (bend * (times * risk).sqrt() / ALPHA * steep + lip * smooth * apart) / ALPHA
    weights = torch.cumulative_trapezoid(rate, times)

    torch.testing.assert_close(curves["outputs"](times[1:]), apart[1:], rtol=1e-9, atol=0)
    torch.testing.assert_close(curves["displacement"](times), (times * risk).sqrt() / ALPHA, rtol=1e-12, atol=0)
    torch.testing.assert_close(curves["weights"](times[1000:]), weights[999:], rtol=1e-4, atol=0)
    unseen = ALPHA * (0.5 / 2 * times[1000:] * risk / ALPHA**2 + 0.9 * weights[999:])
    torch.testing.assert_close(curves["unseen"](times[1000:]), unseen, rtol=1e-4, atol=0)
    assert found.constants["C₁"].value == pytest.approx(first)
    assert found.constants["C₂"].value == pytest.approx(second)
