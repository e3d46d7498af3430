"""Training of networks on data that stay on the device: SGD with momentum, epoch by epoch, resumable.

A `Scaled` or `Linearised` model, whose parameters are v, and a plain module are trained by the same loop: in the
coordinates v the step size is the same for every α (equation (2) with F_α = R(αh)/α²).
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
from lazyscope.flow.base import Progress, Status, counted
from lazyscope.flow.checkpoint import Checkpoint
from lazyscope.flow.descent import DIVERGED
from lazyscope.flow.precision import TF32, Precision
from lazyscope.flow.step import Compiler, Objective, Sampler, Step

Schedule: TypeAlias = Callable[[float], Number]
"""Time in epochs, with fractions, ↦ the factor on the step size."""

Watch: TypeAlias = Callable[[nn.Module], Mapping[str, float]]
"""Measures the net during training, such as its test accuracy."""


def constant(epochs: Number) -> Number:
    """1, always."""
    return 1.0


def harmonic(decay: Number) -> Schedule:
    """1/(1 + decay·epoch), constant within an epoch: Section 3.2's η_t."""
    return lambda epochs: 1 / (1 + decay * math.floor(epochs))


def one_cycle(length: Number, rise: float = 0.2) -> Schedule:
    """Linearly up over the first part `rise` of the epochs, and down to 0 at `length` (Smith and Topin, 2017)."""
    return lambda epochs: min(epochs / (rise * length), max(length - epochs, 0.0) / ((1 - rise) * length))


def eager(net: nn.Module) -> Callable[..., Any]:
    """The net as it is."""
    return net


def compiled(net: nn.Module) -> Callable[..., Any]:
    """The net through `torch.compile`, with an empty cache.

    Dynamo recompiles a forward at most eight times in a process, and then runs it eagerly without a word; a process
    that trains one net after another would come to that.
    """
    torch.compiler.reset()
    return torch.compile(net)


@final
@dataclass(frozen=True)
class Recipe:
    """How long and how fast: lr·schedule(epoch), momentum as in `torch.optim.SGD`, no weight decay."""

    epochs: int
    lr: Number
    schedule: Schedule = constant
    momentum: Number = 0.9
    precision: Precision = TF32
    compiler: Compiler = eager

    def rates(self, epoch: int, steps: int) -> list[float]:
        """The step sizes of an epoch."""
        return [float(self.lr * self.schedule(epoch + step / steps)) for step in range(steps)]

    def __post_init__(self) -> None:
        if self.epochs < 1 or not 0 < self.lr < math.inf or not 0 <= self.momentum < 1:
            raise InputError(
                f"A recipe needs epochs ≥ 1, a finite lr > 0 and a momentum in [0, 1), not {self.epochs}, {self.lr} and"
                f" {self.momentum}; change them."
            )


@final
@dataclass
class History:
    """What was recorded on the way; grows by one entry an epoch."""

    loss: list[float] = field(default_factory=list)
    """Mean over the epoch's batches, each before its step."""
    accuracy: list[float] = field(default_factory=list)
    watched: dict[str, list[float]] = field(default_factory=dict)
    """What `watch` returned, NaN in the epochs between."""
    seconds: float = 0.0
    """Time of the steps: without set-up, evaluation and checkpoints."""
    setup: float = 0.0
    """Time of compiling, warming up and capturing."""


@final
@dataclass(frozen=True)
class Trained:
    """How a training went; the net itself was trained in place."""

    history: History
    status: Status
    images: int
    peak_memory: int

    @property
    def images_per_second(self) -> float:
        """Throughput of the steps."""
        return self.images / self.history.seconds if self.history.seconds else math.nan

    def result(self) -> dict[str, np.ndarray | float | int | str]:
        """Curves and costs as plain arrays and numbers."""
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
    objective: Objective,
    batches: Sampler,
    recipe: Recipe,
    *,
    watch: Watch | None = None,
    every: int = 1,
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> Trained:
    """Train `net` in place, on the device of the batches, channels last.

    `watch(net)` is called after each `every` epochs, and after the last. With a checkpoint, a run that was killed goes
    on after the last epoch written, and on a CPU ends with the same bits as one never stopped. A run whose loss
    exceeds `DIVERGED` times 1 + its first loss, or is not finite, ends there with that status.
    """
    device = batches.device
    placed: Any = net.to(device)
    net = placed.to(memory_format=torch.channels_last)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with recipe.precision.settings():
        before = time.perf_counter()
        step = Step(net, recipe.compiler(net), objective, batches, recipe.momentum, recipe.precision)
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
        if history.loss and not history.loss[-1] <= limit:  # a finished run that is resumed, too
            status = Status.DIVERGED
    images = epoch * batches.steps * batches.size
    return Trained(history, status, images, peak_memory(device))


@torch.no_grad()
def evaluate(
    net: nn.Module, objective: Objective, x: Tensor, labels: Tensor, *, size: int = 1000, precision: Precision = TF32
) -> tuple[float, float]:
    """Loss and accuracy on given images, `size` at a time."""
    loss, hits = torch.zeros((), dtype=torch.float64, device=x.device), torch.zeros((), device=x.device)
    with precision.settings():
        for some, classes in zip(x.split(size), labels.split(size), strict=True):
            with precision.forward(x.device):
                out = net(some.contiguous(memory_format=torch.channels_last))
            loss += objective(out.float(), classes) * len(some)
            hits += (out.argmax(1) == classes).sum()
    return float(loss) / len(x), float(hits) / len(x)


def peak_memory(device: torch.device) -> int:
    """The most bytes held: on a GPU since training began, elsewhere by this process so far."""
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
    """Everything that a later epoch depends on: the draws of an epoch follow from its number."""
    return {
        "epoch": epoch,
        "net": net.state_dict(),
        "optimiser": step.optimiser.state_dict()["state"],
        "history": vars(history),
        "recipe": _signature(step, recipe),
    }


def _signature(step: Step, recipe: Recipe) -> str:
    """What may not change between the parts of one run; it may be made longer."""
    size, steps = step.batches.size, step.batches.steps
    return f"lr {recipe.lr:g}, momentum {recipe.momentum:g}, {recipe.precision.name}, {steps} batches of {size}"


def _restore(net: nn.Module, step: Step, recipe: Recipe, state: Mapping[str, Any]) -> tuple[int, History]:
    """Into the tensors that are there: a captured step knows them by their addresses."""
    if state["recipe"] != (now := _signature(step, recipe)):
        raise InputError(f"The checkpoint was made with {state['recipe']}, not {now}; remove it, or train as before.")
    try:
        net.load_state_dict(state["net"])
        for parameter, kept in zip(step.optimiser.param_groups[0]["params"], state["optimiser"].values(), strict=False):
            step.optimiser.state[parameter]["momentum_buffer"].copy_(kept["momentum_buffer"])
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"The checkpoint is of another net ({reason}); remove it, or name another file.") from error
    return int(state["epoch"]), History(**state["history"])
