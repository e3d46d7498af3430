"""One-pass SGD on all widths and draws in one batch equals a loop over modules with autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.problem.mixture import Mixture
from lazyscope.problem.quadratic import Quadratic
from lazyscope.solve.one_pass import RELU, SQUARE, Activation, Nets, Rates, one_pass
from lazyscope.stream import stream
from lazyscope.theory import high_dimension as theory

DIM, WIDTHS, SEEDS, BATCH = 5, (2, 4), [0, 1], 16


@pytest.mark.parametrize("activation", [SQUARE, RELU], ids=["square", "relu"])
@pytest.mark.parametrize("steps", [1, 70])  # fewer steps than one chunk, and between one and two chunks
def test_it_is_a_loop_of_autograd(activation: Activation, steps: int) -> None:
    problem, rates = Quadratic.draw(DIM, SEEDS), Rates(w=0.02, a=0.01, c=0.1)
    nets = Nets.draw(WIDTHS, DIM, SEEDS, lambda normal: normal)
    found = one_pass(nets, activation, problem.sample, rates=rates, batch=BATCH, steps=steps, seed=3)
    random = stream(3, 3)  # the part of the seed that samples use
    batches: list[tuple[Tensor, Tensor]] = []
    while len(batches) < steps:
        x, y = problem.sample((50, BATCH), random)
        batches += list(zip(x, y, strict=True))
    for draw in range(len(SEEDS)):
        for j, (w, a) in enumerate(zip(nets.w[draw].split(WIDTHS), nets.a[draw].split(WIDTHS), strict=True)):
            w, a, c = (value.clone().requires_grad_() for value in (w, a, nets.c[draw, j]))
            for step, (x, y) in enumerate(batches[:steps]):
                output = activation.value(x[draw] @ w.mT) @ a + c
                loss = 0.5 * (y[draw] - output).square().mean()
                gradients = torch.autograd.grad(loss, (w, a, c))
                with torch.no_grad():
                    for value, gradient, rate in zip((w, a, c), gradients, (rates.w, rates.a, rates.c), strict=True):
                        value -= (1 - step / steps) * rate * gradient
            torch.testing.assert_close(found.w[draw].split(WIDTHS)[j], w.detach(), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(found.a[draw].split(WIDTHS)[j], a.detach(), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(found.c[draw, j], c.detach(), rtol=1e-4, atol=1e-6)


def test_what_is_given_does_not_change() -> None:
    problem, nets = Quadratic.draw(DIM, SEEDS), Nets.draw(WIDTHS, DIM, SEEDS, torch.ones_like)
    before = nets.w.clone()
    found = one_pass(nets, SQUARE, problem.sample, rates=Rates(0.01, 0.0, 0.1), batch=BATCH, steps=5)
    assert torch.equal(nets.w, before)
    assert not torch.equal(found.w, before)
    assert torch.equal(found.a, torch.ones_like(found.a))


def test_nets_side_by_side() -> None:
    """Outputs and padded arrays are those of each network, and the size of a neuron is of order 1/√N."""
    nets = Nets.draw(WIDTHS, DIM, SEEDS, lambda normal: normal)
    x = torch.randn(2, 7, DIM, generator=torch.Generator().manual_seed(0))
    w, a = nets.padded()
    expected = (torch.relu(x[:, None].double() @ w.mT) @ a[..., None])[..., 0] + nets.c[..., None]
    torch.testing.assert_close(nets.outputs(x, RELU).double(), expected.mT, rtol=1e-5, atol=1e-6)
    assert bool((w[:, 0, 2:] == 0).all() and (a[:, 0, 2:] == 0).all())
    wide = Nets.draw([100, 400], 50, [0], torch.ones_like)
    sizes = [float(part.norm(dim=-1).mean()) for part in wide.w[0].split((100, 400))]
    assert sizes[0] / sizes[1] == pytest.approx(2, rel=0.05)


def moments(x: Tensor) -> Tensor:
    return x.double().square().mean(-2)


def test_samples_are_those_of_the_problem() -> None:
    random = torch.Generator().manual_seed(0)
    problem = Mixture.draw(8, [0, 1])
    x, y = problem.sample((2, 40_000), random)
    assert x.shape == (2, 2, 40_000, 8)
    for sign in (1, -1):
        for draw in range(2):
            part = x[0, draw][y[0, draw] == sign]
            torch.testing.assert_close(moments(part), 1 + sign * problem.spectrum[draw], rtol=0.06, atol=0)
    target = Quadratic.draw(8, [0, 1])
    x, y = target.sample((40_000,), random)
    torch.testing.assert_close(y, ((x.square() - 1) * target.spectrum[:, None].float()).sum(-1))


def test_it_learns_the_leading_directions() -> None:
    """The risk is within 0.03 of the Σ_{i>N} λ_i² of Theorem 3 at d = 20."""
    problem, widths = Quadratic.draw(20, [0, 1, 2]), [2, 6, 12, 20, 30]
    nets = Nets.draw(widths, 20, [0, 1, 2], torch.ones_like)
    rates = Rates(w=0.5 * 100 / (4 * 20**1.5), a=0.0, c=0.1)
    found = one_pass(nets, SQUARE, problem.sample, rates=rates, batch=100, steps=1500)
    risk = problem.forms.network_risk(found.padded()[0])
    assert float((risk - theory.network(torch.tensor(widths), problem.spectrum)).abs().max()) < 0.03


def test_divergence_shows() -> None:
    """Step sizes beyond the stability limit give risks that are not finite, without an error."""
    problem, nets = Quadratic.draw(DIM, SEEDS), Nets.draw(WIDTHS, DIM, SEEDS, torch.ones_like)
    found = one_pass(nets, SQUARE, problem.sample, rates=Rates(50.0, 0.0, 0.1), batch=BATCH, steps=100)
    assert not bool(problem.forms.network_risk(found.padded()[0]).isfinite().any())


def test_refusals() -> None:
    problem, nets = Quadratic.draw(DIM, SEEDS), Nets.draw(WIDTHS, DIM, SEEDS, torch.ones_like)
    with pytest.raises(InputError, match="at least 1 for both"):
        one_pass(nets, SQUARE, problem.sample, rates=Rates(0.1, 0.0, 0.1), batch=0, steps=5)
