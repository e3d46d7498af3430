"""Random programs are exact or refused, and none gives a wrong result."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from tests.conformance.entries import Trial, Wrong, quiet
from tests.conformance.programs import OPERATIONS, Program, programs
from torch import Tensor

import lazyscope as ls
from lazyscope.errors import LazyscopeError

SLOW = os.environ.get("LAZYSCOPE_SLOW") == "1"
COUNT = 500 if SLOW else 20
TOLERANCE = 1e-8


def scaled(trial: Trial, alpha: float) -> None:
    """Check the value and the gradient of `Scaled`. The rounding error of the reference is α·10⁻¹⁶ times h."""
    plain = trial.plain
    v = plain.direction()
    w = plain.at(v, 1 / alpha)
    lazy = ls.Scaled(trial.model, alpha)
    out = moved(lazy, v, trial.subject.x)
    expected = alpha * (plain.value(w) - plain.initial)
    noise = alpha * 1e-14 * float(plain.initial.abs().max())
    size = float(expected.abs().max())
    trial.agree(f"Scaled(α = {alpha:g})", out, expected, TOLERANCE + noise / max(size, 1e-3))
    cotangent = plain.target(3)
    gradient = torch.autograd.grad((out * cotangent).sum(), list(lazy.parameters()), materialize_grads=True)
    trial.agree(f"gradient of Scaled(α = {alpha:g})", flat(gradient), flat(plain.gradient(w, cotangent).values()))


def linearised(trial: Trial) -> None:
    plain, v = trial.plain, trial.plain.direction()
    tangent = ls.Linearised(trial.model)
    out = moved(tangent, v, trial.subject.x)
    trial.agree("Linearised", out, plain.initial + plain.along(v))
    cotangent = plain.target(3)
    gradient = torch.autograd.grad((out * cotangent).sum(), list(tangent.parameters()), materialize_grads=True)
    expected = [block.T @ cotangent.flatten() for block in plain.jacobian.values()]
    trial.agree("gradient of Linearised", flat(gradient), flat(expected))


def kernel(trial: Trial) -> None:
    found = ls.tangent_kernel(trial.model, trial.subject.x)
    n, k = trial.tile
    trial.agree("tangent_kernel", found.permute(0, 2, 1, 3).reshape(n * k, n * k), trial.plain.kernel)


def operator(trial: Trial) -> None:
    op = ls.TangentOperator(trial.model, trial.subject.x, batch=2)
    u = trial.plain.target(4).flatten()
    trial.agree("TangentOperator", op @ u, trial.plain.kernel @ u)


CHECKS: dict[str, Callable[[Trial], None]] = {
    "Scaled, α = 3.7": lambda trial: scaled(trial, 3.7),
    "Scaled, α = 10⁴": lambda trial: scaled(trial, 1e4),
    "Linearised": linearised,
    "tangent_kernel": kernel,
    "TangentOperator": operator,
}


def moved(module: torch.nn.Module, v: dict[str, Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(v[name])
    out: Tensor = module(x)
    return out


def flat(tensors: object) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])  # type: ignore[attr-defined]


def degenerate(trial: Trial) -> bool:
    """Check whether the model is not finite, is huge, or has a kink or a tie at w₀, where derivatives are ambiguous."""
    plain = trial.plain
    draw = torch.Generator().manual_seed(11)
    near = {
        name: w + 1e-9 * torch.randn(w.shape, generator=draw, dtype=torch.float64) for name, w in plain.start.items()
    }
    here, there = (flat(j.values()) for j in (plain.jacobian, plain.jacobian_at(near)))
    size = float(here.abs().max())
    if not (size < 1e3 and float(plain.initial.abs().max()) < 1e3):
        return True
    return not float((here - there).abs().max()) <= 1e-5 * max(size, 1e-3)


def outcome(program: Program, check: Callable[[Trial], None], trial: Trial) -> str:
    """Return "exact", "refused" with the message, or "WRONG" with the error."""
    try:
        with quiet():
            check(trial)
    except LazyscopeError as error:
        return "refused: " + re.sub(r" in \S+, line \d+", "", str(error))
    except Wrong as error:
        return f"WRONG {error}\n{program}"
    except Exception as error:
        return f"WRONG {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}\n{program}"
    return "exact"


@pytest.mark.timeout(1800 if SLOW else 900)
def test_no_program_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Counter[str]] = {name: Counter() for name in CHECKS}
    skipped: list[Program] = []

    @settings(
        max_examples=COUNT,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def draw(program: Program) -> None:
        trial = Trial(program.make, TOLERANCE)
        if degenerate(trial):
            skipped.append(program)
            return
        for name, check in CHECKS.items():
            found[name][outcome(program, check, trial)] += 1

    draw()
    if SLOW:
        with capsys.disabled():
            print(f"\n{COUNT} programs, {len(skipped)} of them degenerate")
            for name, counts in found.items():
                print(f"{name}: " + ", ".join(f"{count} × {text}" for text, count in counts.most_common()))
    wrong = [f"{name}: {text}" for name, counts in found.items() for text in counts if text.startswith("WRONG")]
    assert not wrong, "\n".join(wrong)
    assert len(skipped) < COUNT / 4
    for name, counts in found.items():
        assert counts["exact"] > 0.7 * sum(counts.values()), f"{name} refuses too much: {counts}"


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_operations_keep_their_shape(name: str) -> None:
    draw = torch.Generator().manual_seed(0)
    h, g, w = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((3, 4), (3, 4), (4, 4)))
    assert OPERATIONS[name](h, g, w, w[0]).shape == h.shape
