"""Resumable training of networks by SGD with momentum, on data that stay on the device.

A `Scaled` or `Linearised` model, whose parameters are v, and a plain module are trained by the same loop: in the
coordinates v, the step size is the same for every α (equation (2) with F_α = R(αh)/α²).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lazyscope._typing import Number
from lazyscope.errors import InputError
from lazyscope.flow.checkpoint import Checkpoint
from lazyscope.flow.descent import DIVERGED
from lazyscope.flow.precision import TF32, Precision
from lazyscope.flow.step import BatchLoss, BatchSource, Compiler, Step
from lazyscope.flow.trajectory import Progress, Status, counted

EpochSchedule: TypeAlias = Callable[[float], Number]
"""A function from the time in epochs, including fractions, to the factor that multiplies the step size."""

Watch: TypeAlias = Callable[[nn.Module], Mapping[str, float]]
"""A function that measures quantities of the network during training, such as its test accuracy."""


def constant(epochs: Number) -> Number:
    """Return 1, for a constant step size."""
    return 1.0


def harmonic(decay: Number) -> EpochSchedule:
    """The schedule 1/(1 + decay·epoch), constant within an epoch: η_t of Section 3.2."""
    return lambda epochs: 1 / (1 + decay * math.floor(epochs))


def one_cycle(length: Number, rise: float = 0.2) -> EpochSchedule:
    """A schedule that increases linearly over the fraction `rise` of the epochs, and then decreases linearly to 0.

    It reaches 0 at the epoch `length` (Smith and Topin, 2017).
    """
    return lambda epochs: min(epochs / (rise * length), max(length - epochs, 0.0) / ((1 - rise) * length))


def eager(net: nn.Module) -> Callable[..., Any]:
    """Return the network unchanged."""
    return net


def compiled(net: nn.Module) -> Callable[..., Any]:
    """Compile the network with `torch.compile`, after clearing its cache.

    Dynamo recompiles a forward pass at most eight times per process and then silently runs it eagerly, which would
    affect a process that trains many networks.
    """
    torch.compiler.reset()
    return torch.compile(net)


@final
@dataclass(frozen=True)
class Recipe:
    """The settings of a training run by `torch.optim.SGD`."""

    epochs: int
    """The number of epochs."""
    lr: Number
    """The step size, which is multiplied by the schedule."""
    schedule: EpochSchedule = constant
    """A function from the time in epochs to the factor that multiplies `lr`."""
    momentum: Number = 0.9
    """The momentum as in `torch.optim.SGD`, in [0, 1)."""
    precision: Precision = TF32
    """The precision of the forward and backward passes."""
    compiler: Compiler = eager
    """The compiler of the network, `eager` or `compiled`."""
    decay: Number = 0.0
    """The weight decay as in `torch.optim.SGD`."""

    def rates(self, epoch: int, steps: int) -> list[float]:
        """Compute the step sizes of an epoch."""
        return [float(self.lr * self.schedule(epoch + step / steps)) for step in range(steps)]

    def __post_init__(self) -> None:
        if self.epochs < 1 or not 0 < self.lr < math.inf or not 0 <= self.momentum < 1:
            raise InputError(
                f"A recipe needs epochs ≥ 1, a finite lr > 0 and a momentum in [0, 1), and these are {self.epochs},"
                f" {self.lr} and {self.momentum}; change them."
            )
        if not 0 <= self.decay < math.inf:
            raise InputError(f"The weight decay is {self.decay}; pass a finite number that is not negative.")


@final
@dataclass
class History:
    """The record of a training run, with one entry per epoch."""

    loss: list[float] = field(default_factory=list)
    """The mean loss over the batches of each epoch, each evaluated before its step."""
    accuracy: list[float] = field(default_factory=list)
    """The mean training accuracy over the batches of each epoch, each evaluated before its step."""
    watched: dict[str, list[float]] = field(default_factory=dict)
    """The measurements of `watch`, NaN in epochs without a measurement."""
    seconds: float = 0.0
    """The time of the steps in seconds, without set-up, evaluation and checkpoints."""
    setup: float = 0.0
    """The time of compilation, warm-up and capture in seconds."""


@final
@dataclass(frozen=True)
class Trained:
    """The result of a training run; the network itself is trained in place."""

    history: History
    """The losses, accuracies and measurements of each epoch."""
    status: Status
    """Whether training reached the last epoch or diverged."""
    images: int
    """The number of images processed."""
    peak_memory: int
    """The peak memory in bytes."""

    @property
    def images_per_second(self) -> float:
        """The throughput of the training steps."""
        return self.images / self.history.seconds if self.history.seconds else math.nan

    def result(self) -> dict[str, np.ndarray | float | int | str]:
        """Return the curves and costs as plain arrays and numbers."""
        curves = {"loss": self.history.loss, "accuracy": self.history.accuracy, **self.history.watched}
        return {
            **{f"curve_{name}": np.array(values) for name, values in curves.items()},
            "status": str(self.status),
            "device_seconds": self.history.seconds,
            "setup_seconds": self.history.setup,
            "images_per_second": self.images_per_second,
            "peak_memory": self.peak_memory,
        }


def train(
    net: nn.Module,
    objective: BatchLoss,
    batches: BatchSource,
    recipe: Recipe,
    *,
    watch: Watch | None = None,
    every: int = 1,
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train `net` in place, on the device of the batches, with the memory format `torch.channels_last`.

    With a checkpoint, an interrupted run continues after the last stored epoch; on a CPU, its result is bitwise equal
    to that of an uninterrupted run. Training stops with the status `DIVERGED` if the loss is not finite or exceeds
    `DIVERGED` times (1 + the first loss).

    Args:
        net: The network to train.
        objective: The loss of a batch.
        batches: The source of the batches.
        recipe: The number of epochs, the step size and the other settings.
        watch: A function that is called with the network after every `every` epochs and after the last one, and returns
            measurements.
        every: The number of epochs between two calls of `watch`.
        checkpoint: Where to store the state of the training. `None` stores nothing.
        progress: A callback that receives the completed fraction, from 0 to 1, after each epoch.

    Returns:
        The history, the status and the costs of the training.
    """
    device = batches.device
    placed: Any = net.to(device)
    net = placed.to(memory_format=torch.channels_last)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with recipe.precision.settings():
        before = time.perf_counter()
        step = Step(net, recipe.compiler(net), objective, batches, recipe.momentum, recipe.precision, recipe.decay)
        limit = DIVERGED * (1 + step.first_loss())  # also traces a scaled net before it is compiled
        start = pytree.tree_map_only(Tensor, torch.clone, _state(net, step, recipe, 0, History()))
        run = step.captured()
        found = checkpoint.load() if checkpoint is not None else None
        epoch, history = _restore(net, step, recipe, found or start)
        history.setup += time.perf_counter() - before
        del start, found
        status = Status.HORIZON
        steps = counted((recipe.epochs - epoch) * batches.steps, "training", progress)
        while epoch < recipe.epochs and status is Status.HORIZON:
            step.begin(epoch, recipe.rates(epoch, batches.steps))
            _wait(device)
            before = time.perf_counter()
            for _ in islice(steps, batches.steps):
                run()
            mean = float(step.loss) / batches.steps  # waits for the device
            history.seconds += time.perf_counter() - before
            history.loss.append(mean)
            history.accuracy.append(int(step.hits) / (batches.steps * batches.size))
            epoch += 1
            if not mean <= limit:
                status = Status.DIVERGED
            last = epoch == recipe.epochs or status is Status.DIVERGED
            if watch is not None:
                _append(history.watched, watch(net) if last or epoch % every == 0 else {}, epoch)
            if checkpoint is not None and (last or epoch % checkpoint.every == 0):
                checkpoint.save(_state(net, step, recipe, epoch, history))
            if progress is not None:
                progress(epoch / recipe.epochs)
        if history.loss and not history.loss[-1] <= limit:  # also for a finished run that is resumed
            status = Status.DIVERGED
    images = epoch * batches.steps * batches.size
    return Trained(history, status, images, peak_memory(device))


@torch.no_grad()
def evaluate(
    net: nn.Module, objective: BatchLoss, x: Tensor, labels: Tensor, *, size: int = 1000, precision: Precision = TF32
) -> tuple[float, float]:
    """Compute the loss and the accuracy on given images, `size` at a time."""
    loss, hits = torch.zeros((), dtype=torch.float64, device=x.device), torch.zeros((), device=x.device)
    with precision.settings():
        for some, classes in zip(x.split(size), labels.split(size), strict=True):
            with precision.forward(x.device):
                out = net(some.contiguous(memory_format=torch.channels_last))
            loss += objective(out.float(), classes) * len(some)
            hits += (out.argmax(1) == classes).sum()
    return float(loss) / len(x), float(hits) / len(x)


def peak_memory(device: torch.device) -> int:
    """The peak memory in bytes: on a GPU since training began, otherwise of this process since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _append(watched: dict[str, list[float]], seen: Mapping[str, float], epoch: int) -> None:
    for name in {**watched, **seen}:
        curve = watched.setdefault(name, [])
        curve += [math.nan] * (epoch - 1 - len(curve)) + [float(seen.get(name, math.nan))]


def _state(net: nn.Module, step: Step, recipe: Recipe, epoch: int, history: History) -> dict[str, Any]:
    """Everything that later epochs depend on; the draws of an epoch are determined by its number."""
    return {
        "epoch": epoch,
        "net": net.state_dict(),
        "optimiser": step.optimiser.state_dict()["state"],
        "history": vars(history),
        "recipe": _signature(step, recipe),
    }


def _signature(step: Step, recipe: Recipe) -> str:
    """The settings that must not change when a run is resumed; the number of epochs may be increased."""
    size, steps = step.batches.size, step.batches.steps
    decay = f", decay {recipe.decay:g}" if recipe.decay else ""
    return f"lr {recipe.lr:g}, momentum {recipe.momentum:g}{decay}, {recipe.precision.name}, {steps} batches of {size}"


def _restore(net: nn.Module, step: Step, recipe: Recipe, state: Mapping[str, Any]) -> tuple[int, History]:
    """Load a state into the existing tensors, since a captured step refers to their addresses."""
    if state["recipe"] != (now := _signature(step, recipe)):
        raise InputError(
            f"The checkpoint was made with {state['recipe']}, and the recipe is {now}; remove the checkpoint, or use"
            " its recipe."
        )
    try:
        net.load_state_dict(state["net"])
        for parameter, kept in zip(step.optimiser.param_groups[0]["params"], state["optimiser"].values(), strict=False):
            step.optimiser.state[parameter]["momentum_buffer"].copy_(kept["momentum_buffer"])
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"The checkpoint is of another network ({reason}); remove it, or choose another file."
        ) from error
    return int(state["epoch"]), History(**state["history"])
