"""Deflated stochastic gradient descent that goes on from a checkpoint, and that is stopped early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.solve.test_sgd import flat, problem
from torch import Tensor, nn

from lazyscope.errors import InputError
from lazyscope.flow.checkpoint import Checkpoint
from lazyscope.model.base import Model
from lazyscope.solve import accelerated, sgd

STEPS = """
import sys, time
from tests.solve.test_sgd import problem
from lazyscope.solve import sgd

model, x, y = problem()
folder, pause = sys.argv[1], float(sys.argv[2])

def watch(epoch, v):
    print(epoch, flush=True)
    time.sleep(pause)

sgd.tangent_sgd(model, x, y, epochs=12, batch=5, tolerance=0.0, deflated=3, checkpoint=folder, every=2, watch=watch)
"""


def test_a_run_that_is_killed_goes_on_with_the_same_result(tmp_path: Path) -> None:
    model, x, y = problem()
    options: dict[str, Any] = {"epochs": 12, "batch": 5, "tolerance": 0.0, "deflated": 3}
    file = tmp_path / "run.pt"
    root, threads = str(Path(__file__).parents[2]), str(torch.get_num_threads())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path]), "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-c", STEPS, str(file), "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as victim:
        assert victim.stdout is not None
        assert [int(victim.stdout.readline()) for _ in range(7)] == list(range(1, 8))
        victim.send_signal(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
    with Checkpoint(file) as stored:
        state = stored.load()
    assert state is not None
    assert 0 < state["done"] < 12
    seen: list[int] = []
    resumed = sgd.tangent_sgd(model, x, y, **options, checkpoint=file, every=2, watch=lambda e, _: seen.append(e))
    assert seen == list(range(state["done"] + 1, 13)), "it does not begin again"
    whole = sgd.tangent_sgd(model, x, y, **options)
    assert torch.allclose(flat(resumed), flat(whole), rtol=1e-10, atol=1e-12)
    assert resumed.iterations == whole.iterations
    assert (resumed.residual, resumed.pace) == pytest.approx((whole.residual, whole.pace), rel=1e-8)


@pytest.mark.parametrize("rounded", [None, torch.float16])
def test_a_run_whose_steps_were_halved_or_rounded_goes_on_with_the_same_result(
    rounded: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, y = problem(dtype=torch.float64 if rounded is None else torch.float32)
    options: dict[str, Any] = {"batch": 6, "tolerance": 0.0, "rounded": rounded}
    if rounded is None:
        chosen, error = accelerated.Descent._step_size, 1e-6
        monkeypatch.setattr(accelerated.Descent, "_step_size", lambda run: 100 * chosen(run))
    else:
        runs = [flat(sgd.tangent_sgd(model, x, y, epochs=20, **{**options, "rounded": r})) for r in (rounded, None)]
        error = 2 * float((runs[0] - runs[1]).norm() / runs[1].norm())
        assert error < 0.1
    whole = sgd.tangent_sgd(model, x, y, epochs=20, **options)
    for epochs in (3, 8, 20):
        part = sgd.tangent_sgd(model, x, y, epochs=epochs, **options, checkpoint=tmp_path / "run.pt")
        assert part.iterations == epochs
    assert (flat(part) - flat(whole)).norm() <= error * flat(whole).norm()
    again = sgd.tangent_sgd(model, x, y, epochs=20, **options, checkpoint=tmp_path / "run.pt")
    assert (flat(again) - flat(part)).norm() <= error * flat(part).norm(), "a run that has ended is not continued"


@pytest.mark.parametrize("deflated", [0, 4])
@pytest.mark.parametrize("hidden", [40, 400])
def test_a_checkpoint_takes_a_few_numbers_for_each_output_of_each_point(
    hidden: int, deflated: int, tmp_path: Path
) -> None:
    model, x, y = problem(dtype=torch.float32, hidden=hidden)
    file = tmp_path / "run.pt"
    options: dict[str, Any] = {"batch": 6, "deflated": deflated, "tolerance": 0.0}
    sgd.tangent_sgd(model, x, y, epochs=3, **options, checkpoint=file)
    with Checkpoint(file) as stored:
        state = stored.load()
    assert state is not None
    numbers = sum(part.numel() for name in ("at", "ahead", "best") for part in state[name])
    assert numbers <= 3 * (y.numel() + deflated) < model.n_params
    assert file.stat().st_size < 20_000
    more = sgd.tangent_sgd(model, x, y, epochs=6, **options, checkpoint=file)
    whole = sgd.tangent_sgd(model, x, y, epochs=6, **options)
    assert (flat(more) - flat(whole)).norm() <= 1e-4 * flat(whole).norm()


def test_the_result_is_the_displacement_with_the_largest_score(tmp_path: Path) -> None:
    model, x, y = problem()
    seen: dict[int, Tensor] = {}

    def watch(epoch: int, v: dict[str, Tensor]) -> float | None:
        seen[epoch] = torch.cat([each.flatten() for each in v.values()])
        return {3: 1.0, 5: 7.0, 8: 6.5}.get(epoch)

    options: dict[str, Any] = {"batch": 6, "tolerance": 0.0, "watch": watch, "checkpoint": tmp_path / "run.pt"}
    assert torch.equal(flat(sgd.tangent_sgd(model, x, y, epochs=4, **options)), seen[3])
    fifth = sgd.tangent_sgd(model, x, y, epochs=7, **options)
    assert torch.equal(flat(fifth), seen[5])
    assert fifth.iterations == 7
    chosen = seen[5]
    last = sgd.tangent_sgd(model, x, y, epochs=9, **options)
    assert max(seen) == 9
    assert torch.allclose(flat(last), chosen, rtol=1e-9, atol=1e-12), "scores are stored with the iteration"
    assert last.loss == pytest.approx(fifth.loss)


def test_checkpoints_of_other_problems_are_refused(tmp_path: Path) -> None:
    model, x, y = problem()
    file = tmp_path / "run.pt"
    sgd.tangent_sgd(model, x, y, epochs=1, batch=6, centred=True, checkpoint=file)
    other = Model(nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 2)).double())
    same: dict[str, Any] = {"model": model, "x": x, "y": y, "epochs": 1, "batch": 6, "centred": True}
    changes: list[dict[str, Any]] = [
        {"model": other},
        {"x": x + 1},
        {"y": y + 1},
        {"centred": False},
        {"batch": 5},
        {"seed": 1},
    ]
    for change in changes:
        with pytest.raises(InputError, match="delete it"):
            sgd.tangent_sgd(**{**same, **change}, checkpoint=file)
    with Checkpoint(file) as stored:
        state = stored.load()
        assert state is not None
        stored.save({"name": state["name"]})
    with pytest.raises(InputError, match="delete it"):
        sgd.tangent_sgd(**same, checkpoint=file)
