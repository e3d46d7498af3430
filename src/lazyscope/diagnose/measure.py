"""The measurements on a probe: one record of a network and of its layers, compared with their start."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar, final

import torch
from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.diagnose.activations import Stability, activation_stability
from lazyscope.diagnose.drift import weight_displacement
from lazyscope.diagnose.kernels import KernelChange, LayerKernels
from lazyscope.diagnose.record import LayerRecord, Record, number
from lazyscope.diagnose.sharpness import LossHessian, edge_of_stability, largest_eigenvalue, steps
from lazyscope.diagnose.subject import Subject
from lazyscope.errors import InputError, LazyscopeError
from lazyscope.labels import Target, as_target
from lazyscope.linalg.finite import check_finite
from lazyscope.loss import Loss
from lazyscope.model.increment import Scale
from lazyscope.notices import collected
from lazyscope.theory.relative_scale import encoded
from lazyscope.torch_loss import TorchLoss, check_callable, evaluated, in_precision, name_of, numbers_of

T = TypeVar("T")


@final
class Probe:
    """Measures a network on given inputs.

    Args:
        subject: The network and its start.
        x: The inputs of the probe.
        y: The targets. `None` leaves out what needs them.
        loss: The loss of the training, as in `Monitor`.
        optimiser: The optimiser of the training. `None` leaves out the edge of stability.
        columns: The largest number of outputs per point of an exact kernel, as in `LayerKernels`.

    Attributes:
        notes: Why a quantity is not defined, by the name of the quantity.
        start: The outputs at w₀.
    """

    def __init__(
        self,
        subject: Subject,
        x: Inputs,
        y: Target | None,
        loss: Loss | TorchLoss | None,
        optimiser: torch.optim.Optimizer | None,
        columns: int,
    ) -> None:
        self.subject, self.x, self.optimiser, self._columns = subject, subject.inputs(x), optimiser, columns
        self.notes: dict[str, str] = {}
        self._y, self._loss = y, loss
        self.begin()

    def begin(self) -> None:
        """Compute the reference quantities at the start."""
        model = self.subject.model
        self._tangent = model.coordinates(self.x, math.inf, centred=True)
        with torch.no_grad():
            self.start = check_finite(model(self.x), "The output for the probe")
        self._layers = self.subject.layers()
        with collected([]):  # the tangent coordinates issue the same notices
            self._kernels = self._attempt(
                "kernels", lambda: LayerKernels(model, self.x, self._layers, columns=self._columns)
            )
        zeros = self._tangent.zeros()
        self._kinked = self._attempt("flipped", lambda: activation_stability(model, self.x, zeros, size=self._n))
        self._numbers: Tensor | None = None
        self._risk: Callable[[Tensor], Tensor] | None = None
        if self._y is not None:
            self._numbers, self._risk = self._targets(self._y)

    @property
    def _n(self) -> int:
        return max(1, len(self.start))

    def _targets(self, y: Target) -> tuple[Tensor | None, Callable[[Tensor], Tensor]]:
        """The targets as numbers, for the alignment, and the loss as a function of the outputs."""
        loss = self._loss
        if loss is None or isinstance(loss, Loss):
            numbers, risk = encoded(loss, as_target(y, self.start).to(self.start.device), self.start.double())
            return numbers, lambda out: risk(out.double())
        given = in_precision(check_callable(loss), self.start.dtype)
        target = as_target(y, self.start).to(self.start.device)
        target = target.to(self.start.dtype) if target.is_floating_point() else target
        with torch.no_grad():
            evaluated(given, self.subject.initial(self.start), target)
        found = self._attempt("alignment", lambda: numbers_of(given, target, self.start).double())
        fits = found is not None and found.ndim > 0 and len(found) == len(self.start)

        def measured(out: Tensor) -> Tensor:
            try:
                value: Tensor = given(out, target)
            except Exception as error:  # at the start it did not, so it is not misuse
                raise InputError(f"{name_of(given)} fails ({type(error).__name__}: {error}).") from error
            return value

        return found if fits else None, measured

    def measure(self, step: int, *, at_start: bool = False) -> Record:
        """Measure at the present weights, or at the start.

        Args:
            step: The training step, which becomes part of the record.
            at_start: Whether to measure at w₀ instead of the present weights.

        Returns:
            The record.
        """
        if self.subject.include():
            self.begin()
        model, alpha = self.subject.model, self.subject.alpha
        with torch.no_grad():
            v = self._tangent.zeros() if at_start else self.subject.displacement()
            now = {name: w + v[name] / alpha for name, w in model.params.items()}
            reached = {name: w + v[name] for name, w in model.params.items()} if math.isinf(alpha) else now
            moved = weight_displacement(model.params, reached)
            distance = self._distance(v)
            apart = {layer: self._distance(self._alone(v, names)) for layer, names in self._layers.items()}
        whole, changes, alignment = self._compared(now)
        states = self._states(v, alpha)
        loss, sharpness, edge = self._curvature(now, v)
        layers = {
            layer: LayerRecord(
                displacement=number(_norm(model.params, reached, names)),
                tangent_distance=number(apart[layer]),
                kernel_scale=number(changes[layer].scale),
                kernel_shape=number(changes[layer].shape),
                flipped=number(_flipped(states, layer)),
            )
            for layer, names in self._layers.items()
        }
        return Record(
            step,
            displacement=number(moved[""]),
            tangent_distance=number(distance),
            kernel_drift=number(whole.drift),
            kernel_scale=number(whole.scale),
            kernel_shape=number(whole.shape),
            kernel_error=number(whole.error),
            flipped=math.nan if states is None else 1 - states.mean,
            alignment=number(alignment),
            loss=number(loss),
            sharpness=number(sharpness),
            edge=number(edge),
            layers=layers,
        )

    def _alone(self, v: Params, names: tuple[str, ...]) -> dict[str, Tensor]:
        """The displacement of one layer alone."""
        return {name: move if name in names else torch.zeros_like(move) for name, move in v.items()}

    def _distance(self, v: Params) -> float:
        """The relative error of the tangent model at w₀ + v/α."""
        model, alpha = self.subject.model, self.subject.alpha
        if self.subject.plain:
            outputs = model(self.x, {name: w + v[name] for name, w in model.params.items()}) - self.start
        else:
            outputs = model.increment(model.params, model.state, self.x, Scale.of(alpha), v)[1]
        along = self._tangent.outputs(v)
        size, gap = float(outputs.double().norm()), float((outputs - along).double().norm())
        return gap / size if size > 0 else (0.0 if gap == 0 else math.inf)

    def _compared(self, now: Params) -> tuple[KernelChange, dict[str, KernelChange], float]:
        nothing = KernelChange(math.nan, math.nan, math.nan)
        if self._kernels is None:
            return nothing, dict.fromkeys(self._layers, nothing), math.nan
        found = self._kernels.kernels(now)
        whole, layers = self._kernels.change(found)
        return whole, layers, math.nan if self._numbers is None else self._kernels.alignment(found, self._numbers)

    def _states(self, v: Params, alpha: float) -> Stability | None:
        if self._kinked is None:
            return None
        return activation_stability(self.subject.model, self.x, v, alpha, size=self._n)

    def _curvature(self, now: Params, v: Params) -> tuple[float, float, float]:
        """The loss, its sharpness and the edge of stability."""
        if self._risk is None:
            return math.nan, math.nan, math.nan
        model, risk, x, free = self.subject.model, self._risk, self.x, self.subject.trained()
        alpha, scaled = self.subject.alpha, self.subject.outputs(x, v)
        with torch.no_grad():
            value = self._attempt("loss", lambda: float(risk(model(x, params=now) if scaled is None else scaled)))
        present = math.nan if value is None else value
        if math.isinf(alpha) or not free or not math.isfinite(present):
            return present, math.nan, math.nan

        def loss(w: dict[str, Tensor]) -> Tensor:
            out: Tensor = model(x, params={**now, **w})
            # For Scaled modules, the value is that of the increment, and the derivatives are those of αh.
            value: Tensor = risk(out if scaled is None else scaled + alpha * (out - out.detach()))
            return value

        trained = {name: now[name] for name in free}
        found = self._attempt("sharpness", lambda: largest_eigenvalue(LossHessian(loss, trained)))
        if found is None:
            return present, math.nan, math.nan
        own = None if self.optimiser is None else steps(self.optimiser, self.subject.net)
        sharpness = found / alpha**2  # in the coordinates v = α(w - w₀), which are trained
        if own is None or any(name not in own for name in free):
            return present, sharpness, math.nan
        edge = edge_of_stability(loss, trained, own, found)
        return present, sharpness, edge / alpha**2

    def _attempt(self, name: str, measure: Callable[[], T]) -> T | None:
        """Measure, and return `None` with a note if the model has no such quantity or no such derivative.

        torch raises NotImplementedError and RuntimeError for operations that it cannot differentiate. One quantity that
        is missing must not end the training that is watched; the report shows the note in its place.
        """
        try:
            return measure()
        except (LazyscopeError, NotImplementedError, RuntimeError) as error:
            self.notes[name] = str(error).splitlines()[0] if str(error) else type(error).__name__
            return None


def _norm(before: Params, after: Params, names: tuple[str, ...]) -> float:
    """The displacement of a layer, relative to its own norm, or to that of all weights if it starts at zero."""
    move = math.sqrt(sum(float((after[name].double() - before[name].double()).square().sum()) for name in names))
    size = math.sqrt(sum(float(before[name].double().square().sum()) for name in names))
    whole = math.sqrt(sum(float(w.double().square().sum()) for w in before.values()))
    return move / (size or whole) if whole else math.nan


def _flipped(states: Stability | None, layer: str) -> float:
    """The mean share of ReLUs after a layer whose state has changed."""
    own = [] if states is None else [s for s, name in zip(states.relu, states.layers, strict=True) if name == layer]
    return 1 - math.fsum(own) / len(own) if own else math.nan
