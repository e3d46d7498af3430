"""A training run in a separate process, to be killed: python trainee.py FOLDER. It logs every batch that it uses."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyscope.data.augment import Batches
from lazyscope.data.images import Images
from lazyscope.flow.checkpoint import Checkpoint
from lazyscope.flow.precision import FLOAT32
from lazyscope.flow.training import Recipe, harmonic, train
from lazyscope.model.transform import Scaled

EPOCHS, STEPS = 6, 8


def net(alpha: float = 10.0) -> Scaled:
    torch.manual_seed(0)
    return Scaled(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 4, 10)), alpha
    )


def images(n: int = 16 * STEPS + 3) -> Images:
    random = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 17, (n, 1, 6, 6), dtype=torch.uint8, generator=random)
    return Images(pixels, torch.randint(0, 10, (n,), generator=random), (0.5,), (0.3,), white=16)


def main(folder: Path, pause: float) -> None:
    torch.set_num_threads(1)
    batches = Batches(images(), 16, seed=3, padding=1, flips=True)
    original = batches.take

    def take(draw: Tensor) -> tuple[Tensor, Tensor]:
        with (folder / "log.txt").open("a") as log:
            log.write("batch\n")
        time.sleep(pause)
        return original(draw)

    batches.take = take  # type: ignore[method-assign]
    trained = net()
    with Checkpoint(folder / "training.pt") as checkpoint:
        done = train(
            trained,
            F.cross_entropy,
            batches,
            Recipe(EPOCHS, 0.1, harmonic(1 / 3), precision=FLOAT32),
            checkpoint=checkpoint,
            watch=lambda now: {"size": float(now.displacement())},  # type: ignore[operator]
            every=2,
        )
    assert math.isfinite(done.history.seconds)
    torch.save(
        {"net": trained.state_dict(), "loss": done.history.loss, "watched": done.history.watched}, folder / "end.pt"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
