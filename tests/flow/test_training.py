"""Training equals plain SGD, resumes with identical bits after a kill, and reports divergence as a status."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.flow.trainee import EPOCHS, STEPS, images, net
from torch import nn

from lazyscope.ambient import full_precision
from lazyscope.data.augment import Batches
from lazyscope.errors import InputError, ScaleError, StoreError
from lazyscope.flow.checkpoint import Checkpoint, DamagedCheckpoint
from lazyscope.flow.precision import BF16, FLOAT32, TF32, Precision
from lazyscope.flow.step import Compiler
from lazyscope.flow.training import Recipe, constant, eager, evaluate, harmonic, one_cycle, train
from lazyscope.flow.trajectory import Status

TRAINEE = Path(__file__).with_name("trainee.py")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def batches(size: int = 16) -> Batches:
    return Batches(images(), size, seed=3, padding=1, flips=True)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 10))


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_equals_a_plain_loop_of_sgd() -> None:
    recipe = Recipe(3, 0.2, harmonic(0.5), precision=FLOAT32)
    trained = plain()
    done = train(trained, F.cross_entropy, batches(), recipe)
    expected, some = plain(), batches()
    optimiser = torch.optim.SGD(expected.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for epoch in range(3):
        optimiser.param_groups[0]["lr"] = 0.2 / (1 + 0.5 * epoch)
        for draw in some.epoch(epoch):
            x, y = some.take(draw)
            optimiser.zero_grad()
            loss = F.cross_entropy(expected(x), y)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    torch.testing.assert_close(weights(trained), weights(expected), rtol=1e-5, atol=1e-6)
    means = torch.tensor(losses).reshape(3, -1).mean(1).tolist()
    assert done.history.loss == pytest.approx(means, rel=1e-5)
    assert done.status is Status.HORIZON
    assert done.images == 3 * STEPS * 16
    assert done.images_per_second > 0
    assert done.peak_memory > 2**20


def test_scaled_at_one_is_the_centred_plain_net() -> None:
    recipe = Recipe(2, 0.1, constant, precision=FLOAT32)
    scaled, module = net(1.0), plain()
    start = [p.detach().clone() for p in module.parameters()]
    frozen = plain()

    def centred(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, labels)

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.now = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                before = frozen(x)
            out: torch.Tensor = self.now(x) - before
            return out

    train(scaled, centred, batches(), recipe)
    train(Centred(), centred, batches(), recipe)
    moved = torch.cat([(p.detach() - w).flatten() for p, w in zip(module.parameters(), start, strict=True)])
    torch.testing.assert_close(weights(scaled), moved, rtol=1e-3, atol=2e-5)


def run_trainee(folder: Path, pause: float = 0.0) -> subprocess.Popen[bytes]:
    root = TRAINEE.parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(TRAINEE), str(folder), str(pause)], env=environment)


def test_a_run_killed_in_mid_epoch_ends_with_the_same_bits(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    victim = run_trainee(killed, pause=0.1)  # slow, so that it is killed in the middle of an epoch
    beside = run_trainee(whole)
    log = killed / "log.txt"
    middle = 1 + 3 * STEPS + STEPS // 2  # one batch is used for the first loss
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < middle:
        assert victim.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    taken = len(log.read_text().splitlines())
    assert (taken - 1) % STEPS not in (0, STEPS - 1), "it was not killed in the middle of an epoch"
    assert not (killed / "end.pt").exists()
    assert beside.wait() == 0
    assert run_trainee(killed).wait() == 0
    again = len(log.read_text().splitlines()) - taken
    assert again in (1 + 3 * STEPS, 1 + 4 * STEPS), "it did not resume after the second or third epoch"
    ends = [torch.load(folder / "end.pt", weights_only=True) for folder in (killed, whole)]
    for name, value in ends[0]["net"].items():
        assert torch.equal(value, ends[1]["net"][name]), name
    assert ends[0]["loss"] == ends[1]["loss"]
    assert str(ends[0]["watched"]) == str(ends[1]["watched"])
    assert len(ends[0]["loss"]) == EPOCHS
    assert not list(killed.glob("*.tmp"))


def test_divergence_is_a_status_that_resuming_keeps(tmp_path: Path) -> None:
    recipe = Recipe(5, 1e4, constant, precision=FLOAT32)
    for _ in range(2):
        with Checkpoint(tmp_path / "c.pt") as checkpoint:
            done = train(
                net(),
                lambda out, y: out.square().mean() + F.cross_entropy(out, y),
                batches(),
                recipe,
                checkpoint=checkpoint,
            )
        assert done.status is Status.DIVERGED
        assert len(done.history.loss) < 5
        assert done.result()["status"] == "diverged"


def test_a_longer_run_goes_on_and_another_one_is_refused(tmp_path: Path) -> None:
    def attempt(epochs: int, lr: float = 0.1, module: nn.Module | None = None) -> nn.Module:
        module = net() if module is None else module
        with Checkpoint(tmp_path / "c.pt") as checkpoint:
            train(module, F.cross_entropy, batches(), Recipe(epochs, lr, precision=FLOAT32), checkpoint=checkpoint)
        return module

    attempt(2)
    longer = attempt(4)
    (tmp_path / "c.pt").unlink()
    assert torch.equal(weights(longer), weights(attempt(4)))
    with pytest.raises(InputError, match=r"made with lr 0.1.* recipe is lr 0.2.*; remove the checkpoint"):
        attempt(4, lr=0.2)
    with pytest.raises(ScaleError, match="saved at α = 10"):
        attempt(4, module=net(100.0))
    with pytest.raises(InputError, match="of another net"):
        attempt(4, module=plain())


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "c.pt"
    recipe = Recipe(1, 0.1, precision=FLOAT32)
    with Checkpoint(path) as checkpoint:
        train(net(), F.cross_entropy, batches(), recipe, checkpoint=checkpoint)
    content = path.read_bytes()
    for damage in (content[: len(content) // 2], b"", b"nonsense"):
        path.write_bytes(damage)
        with Checkpoint(path) as checkpoint, pytest.warns(DamagedCheckpoint, match="starts from the beginning"):
            train(net(), F.cross_entropy, batches(), recipe, checkpoint=checkpoint)
    kept = {file.read_bytes() for file in path.parent.glob("*.damaged")}
    assert kept == {content[: len(content) // 2], b"", b"nonsense"}, "none of them is lost"


def test_checkpoints_never_run_code(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save({"epoch": 0, "net": Evil()}, path)
    with Checkpoint(path) as checkpoint, pytest.warns(DamagedCheckpoint):
        assert checkpoint.load() is None
    assert not (tmp_path / "owned").exists()


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch owned",)


def test_a_checkpoint_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    checkpoint = Checkpoint(tmp_path / "file" / "c.pt")
    with pytest.raises(StoreError, match=r"c\.pt cannot be written .*; pass a file"), checkpoint:
        checkpoint.save({"epoch": 0})


@pytest.mark.parametrize("precision", [FLOAT32, TF32, BF16], ids=lambda p: p.name)
def test_precisions_train_and_leave_torch_as_it_was(precision: Precision) -> None:
    before = (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark)
    module = net(1e3)
    unchanging = Batches(images(), 16, seed=3)
    done = train(module, F.cross_entropy, unchanging, Recipe(10, 0.02, constant, precision=precision))
    assert done.history.loss[-1] < done.history.loss[0] - 0.1
    data = images()
    loss, accuracy = evaluate(module, F.cross_entropy, data.normalised(), data.labels, size=50, precision=precision)
    out = module(data.normalised())
    assert loss == pytest.approx(F.cross_entropy(out, data.labels).item(), rel=2e-2)
    assert accuracy == pytest.approx((out.argmax(1) == data.labels).float().mean().item(), abs=0.03)
    assert before == (
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.benchmark,
    )


def test_watch_is_called_at_intervals_and_at_the_end() -> None:
    heard: list[float] = []
    done = train(
        net(),
        F.cross_entropy,
        batches(),
        Recipe(5, 0.1, precision=FLOAT32),
        watch=lambda now: {"one": 1.0},
        every=2,
        progress=heard.append,
    )
    assert [math.isnan(value) for value in done.history.watched["one"]] == [True, False, True, False, False]
    assert heard == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_schedules() -> None:
    assert [harmonic(1 / 3)(t) for t in (0, 0.9, 3, 3.5)] == [1, 1, 0.5, 0.5]
    cycle = one_cycle(10, rise=0.2)
    assert [cycle(t) for t in (0, 1, 2, 6, 10)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert Recipe(2, 3.0, one_cycle(2)).rates(1, 2) == pytest.approx([3 / 1.6, 3 * 0.5 / 1.6])


@pytest.mark.parametrize("change", [{"epochs": 0}, {"lr": 0.0}, {"lr": math.inf}, {"momentum": 1.0}])
def test_bad_recipes_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(InputError, match="A recipe needs"):
        Recipe(**{"epochs": 1, "lr": 0.1, **change})  # type: ignore[arg-type]


def compare(alpha: float, compiler: Compiler, device: str) -> None:
    """Two epochs on the device and two plain epochs on the CPU give nearly the same weights."""
    results = []
    for place, chosen in (("cpu", eager), (device, compiler)):
        module = plain() if alpha == 0 else net(alpha)
        data = Batches(images().to(place), 16, seed=3, padding=1, flips=True)
        done = train(module, F.cross_entropy, data, Recipe(2, 0.05, precision=FLOAT32, compiler=chosen))
        results.append((weights(module).cpu(), done.history.loss))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-4)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)


@NEEDS_GPU
@pytest.mark.parametrize("alpha", [0.0, 1.0, 1e3, math.inf])
def test_a_captured_step_is_the_plain_one(alpha: float) -> None:
    """On a GPU a step is a CUDA graph."""
    compare(alpha, eager, "cuda")


COMPILED = """
import math, sys
from lazyscope.flow.training import compiled
from tests.flow.test_training import compare
for alpha in (0.0, 1.0, 1e3, math.inf):
    compare(alpha, compiled, sys.argv[1])
print("same")
"""


@NEEDS_GPU
def test_a_compiled_step_is_the_plain_one() -> None:
    # In a separate process, as the run-time type checks of the test suite cannot be compiled.
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, "cuda"]
    done = subprocess.run(command, cwd=TRAINEE.parents[2], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.strip().endswith("same"), done.stderr[-2000:]


def test_precisions_may_be_nested() -> None:
    """Torch refuses to read a precision that was set for GPUs and not for CPUs."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with TF32.settings():
        with full_precision:
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.allow_tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
