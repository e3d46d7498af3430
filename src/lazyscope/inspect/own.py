"""The user's own training: an optimiser or a step function, and batches, applied alike to every model y_α."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Params
from lazyscope.ambient import derivatives
from lazyscope.errors import InputError
from lazyscope.flow.descent import DIVERGED
from lazyscope.inspect.batches import Batches
from lazyscope.inspect.subject import Subject
from lazyscope.labels import as_numbers
from lazyscope.loss import Square
from lazyscope.model.base import Model
from lazyscope.model.increment import Scale
from lazyscope.model.inputs import Samples, as_inputs

Step: TypeAlias = Callable[[Any, Any], Any]
"""A function that makes one training step on a batch of inputs and targets."""


@final
class Trainee(nn.Module):
    """The model h(w₀) + α(h(w₀ + (w - w₀)/α) - h(w₀)) as a module, whose parameters w start at w₀.

    At α = 1 it is the model of the user, and at α = ∞ its tangent model. Its parameters have the names and the initial
    values of those of the user's module, so that weight decay and normalised optimisers act on all models alike.

    Args:
        model: The model.
        alpha: The scale α.
    """

    def __init__(self, model: Model, alpha: float) -> None:
        super().__init__()
        self._studied, self._scale, self._names = model, Scale.of(alpha), tuple(model.params)
        for name, w in model.params.items():
            owner: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                owner = owner._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            owner._parameters[leaf] = nn.Parameter(w.detach().clone())

    def displacement(self) -> dict[str, Tensor]:
        """Compute v = w - w₀.

        Returns:
            The displacement by name.
        """
        own = dict(self.named_parameters())
        return {name: own[name] - w for name, w in self._studied.params.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the outputs.

        Args:
            *args: The positional arguments of the model. A single tuple or dictionary is unpacked.
            **kwargs: The keyword arguments of the model.

        Returns:
            The outputs.
        """
        model, x = self._studied, as_inputs(args, kwargs)
        if self._scale.alpha == 1:
            own = dict(self.named_parameters())
            return model(x, {name: own[name] for name in self._names})
        initial, delta = model.increment(model.params, model.state, x, self._scale, self.displacement())
        return initial + delta


@final
@dataclass(frozen=True)
class Training:
    """A training of the user.

    Args:
        make: A function that takes a module and returns its step function.
        name: The name, as part of a sentence.
        batches: The batches.
        seed: The seed of random numbers that the steps draw, the same for every model.
        code: The code that creates the optimiser for a module `net`, or a comment if it is not known.
    """

    make: Callable[[nn.Module], Step]
    name: str
    batches: Batches
    seed: int
    code: str = "# then train net as before"

    @contextmanager
    def steps(self, module: nn.Module) -> Iterator[Callable[[int], None]]:
        """Prepare the training of a module.

        Args:
            module: The module.

        Yields:
            A function that makes the step of a given number.
        """
        device = next(module.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), derivatives():
            torch.manual_seed(self.seed)
            step = self.make(module)
            if not callable(step):
                raise InputError(
                    f"training(module) returns {type(step).__name__}; let it return a function step(x, y) that makes"
                    " one training step."
                )
            yield lambda number: _made(step, *self.batches.at(number))


def _made(step: Step, x: Inputs, y: Tensor) -> None:
    with torch.enable_grad():
        step(x, y)


def training_of(
    subject: Subject, loss: Any, optimiser: Any, training: Any, batches: Batches | None, seed: int
) -> Training | None:
    """Combine the arguments of the user to a training.

    Args:
        subject: The model with its data and loss.
        loss: The loss that the user passed, or None.
        optimiser: A function of the parameters that returns an optimiser of PyTorch, or None.
        training: A function of the module that returns its step function, or None.
        batches: The batches of a loader, or None to use all points at each step.
        seed: The seed of random numbers that the steps draw.

    Returns:
        The training, or None if the user passed neither, which means gradient descent on all points.

    Raises:
        InputError: If the arguments contradict each other.
    """
    given = batches if batches is not None else Batches([(subject.x, _targets(subject))])
    size = len(Samples(given.held[0][0]))
    each = f"batches of {size}" if batches is not None else "all points at each step"
    if training is not None:
        if optimiser is not None or not callable(training):
            raise InputError(
                "Pass either optimiser=… or training=…, a function that takes a module and returns its step function."
            )
        return Training(training, f"your training, with {each}", given.to(subject.device), seed)
    if optimiser is None:
        if batches is None:
            return None
        raise InputError(
            "A DataLoader needs an optimiser; pass optimiser=lambda parameters: torch.optim.SGD(parameters, lr=0.1),"
            " or your own."
        )
    if isinstance(optimiser, torch.optim.Optimizer) or not callable(optimiser):
        raise InputError(
            "optimiser is not a function of the parameters, and several models are trained; pass a class of torch.optim"
            " or lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)."
        )
    risk = subject.loss if loss is None else loss
    probe = _optimiser(optimiser, Trainee(subject.model, 1.0))
    rate = probe.param_groups[0].get("lr")
    shown = f" with learning rate {float(rate):g}" if rate is not None else ""
    make = functools.partial(_stepping, optimiser=optimiser, loss=risk)
    return Training(make, f"{type(probe).__name__}{shown} and {each}", given.to(subject.device), seed, _code(probe))


def _code(optimiser: torch.optim.Optimizer) -> str:
    """Write the code that creates such an optimiser for `net`, with the options that are not its defaults."""
    kind = type(optimiser)
    if getattr(torch.optim, kind.__name__, None) is not kind or len(optimiser.param_groups) > 1:
        return Training.code
    usual = kind([torch.zeros(1, requires_grad=True, device="cpu")]).defaults
    options = {name: value for name, value in optimiser.defaults.items() if name == "lr" or value != usual.get(name)}
    shown = "".join(f", {name}={float(value) if name == 'lr' else value!r}" for name, value in options.items())
    return f"optimiser = torch.optim.{kind.__name__}(net.parameters(){shown})"


def _targets(subject: Subject) -> Tensor:
    targets = getattr(subject.loss, "targets", subject.y)
    assert isinstance(targets, Tensor)
    return targets


def _optimiser(factory: Callable[[Any], Any], module: nn.Module) -> torch.optim.Optimizer:
    try:
        found = factory(module.parameters())
    except TypeError as error:  # such as SGD without a learning rate in old versions of PyTorch
        raise InputError(
            f"optimiser(parameters) fails ({error}); pass lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        ) from error
    if not isinstance(found, torch.optim.Optimizer):
        raise InputError(f"optimiser(parameters) returns {type(found).__name__}; let it return an optimiser.")
    return found


def _stepping(module: nn.Module, *, optimiser: Callable[[Any], Any], loss: Any) -> Step:
    own = _optimiser(optimiser, module)

    def step(x: Inputs, y: Tensor) -> None:
        def closure() -> Tensor:
            own.zero_grad()
            out = module(x)
            value: Tensor = loss(out, as_numbers(y, out) if isinstance(loss, Square) else y)
            value.backward()
            return value

        own.step(closure)  # type: ignore[arg-type, unused-ignore]  # L-BFGS needs a closure, others accept it

    return step


@final
@dataclass(frozen=True)
class Walk:
    """The course of one training, at the recorded steps.

    Args:
        outputs: The outputs on the points, of shape `(T, n, …)`.
        loss: The loss on the points.
        displacement: ‖w - w₀‖ for the weights of the model, which is 0 for the tangent model.
        status: How it ended, "horizon" or "diverged".
    """

    outputs: Tensor
    loss: Tensor
    displacement: Tensor
    status: str


def walk(
    subject: Subject,
    training: Training,
    alpha: float,
    marks: Sequence[int],
    observe: Callable[[Params], object],
    progress: Callable[[float], None],
) -> Walk:
    """Train y_α with the training of the user, and record it on the points.

    Args:
        subject: The model with its data and loss.
        training: The training.
        alpha: The scale α.
        marks: The steps to record, in increasing order, from 0.
        observe: A function that is called with v = w - w₀ at each recorded step.
        progress: A function that is called with the fraction of the steps that are done.

    Returns:
        The course of the training. If it diverges, its last entry is repeated.

    Raises:
        InputError: If a step does not change the weights because the step function does not train the module.
    """
    module = Trainee(copy.copy(subject.model), alpha)
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    first, status, done = math.inf, "horizon", 0
    with training.steps(module) as step:
        for mark in marks:
            for number in range(done, mark):
                step(number)
            done = mark
            with torch.no_grad():
                v = module.displacement()
                outputs = module(subject.x).detach()
                value = subject.risk(outputs)
                travel = torch.stack([move.double().square().sum() for move in v.values()]).sum().sqrt()
            first = float(value) if not mark else first
            if not math.isfinite(float(value)) or float(value) > DIVERGED * (1 + first):
                status = "diverged"
                break
            rows.append((outputs, value.double().cpu(), travel.cpu() / alpha))
            observe(v)
            progress(mark / max(1, marks[-1]))
    if status != "diverged" and marks[-1] and float(travel) == 0:
        raise InputError("The training does not change the weights; let step(x, y) train the module that it was given.")
    rows += [rows[-1]] * (len(marks) - len(rows))
    outputs, losses, moves = (torch.stack(each) for each in zip(*rows, strict=True))
    return Walk(outputs, losses, moves, status)
