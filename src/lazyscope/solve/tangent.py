"""The tangent model fitted by least squares without its kernel, from the products u ↦ Dh(w₀)u and c ↦ Dh(w₀)ᵀc alone.

The minimiser of (1/2n)‖h(w₀) + Dh(w₀)v - y‖² + (ridge/2)‖v‖² is computed in a Krylov space of DhᵀDh. The solutions
for all ridges and the gradient flow at all times come from the same space.

Longer than 350 lines because all arguments are documented.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lazyscope._typing import Inputs, Number, Params
from lazyscope.ambient import check_autocast, full_precision, without_autocast
from lazyscope.arguments import check_count, check_list, check_number
from lazyscope.errors import InputError
from lazyscope.flow.checkpoint import Checkpoint
from lazyscope.flow.objective import Times, check_times, in_single, in_single_inputs
from lazyscope.labels import Target
from lazyscope.linalg.krylov import Krylov, vector_memory, vectors_within, working_memory
from lazyscope.linalg.projection import Projection
from lazyscope.memory import Memory, parse_memory, size_text
from lazyscope.model.base import Model, check_inputs, flatten
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.model.loaded import LoadedBatches
from lazyscope.progress import Bar, fallen
from lazyscope.solve.identity import identity, sizes
from lazyscope.solve.left_out import EXACT, LeaveOneOut, exact_left_out, probed_left_out
from lazyscope.solve.notice import announce
from lazyscope.solve.products import Products
from lazyscope.tangent.regression import as_outputs

_CHECK = 10
"""The number of iterations after which the residual is computed again."""

_ROUNDED = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes of products of low precision; float32 is one for models in float64."""

_AGREED = {True: 1e-3, False: 1e-2}
"""The largest relative difference of gradients that are the same up to rounding, with and without full precision."""

_LEAST = 4
"""The smallest number of vectors of a space in which the iteration is started again."""


@without_autocast
def tangent_solve(
    model: Model | nn.Module,
    x: Inputs | DataLoader[Any],
    y: Target | None = None,
    *,
    ridge: Number = 0.0,
    centred: bool = False,
    tolerance: float | None = None,
    iterations: int | None = None,
    batch: int = 128,
    rounded: torch.dtype | None = None,
    memory: Memory | None = None,
    host: Memory | None = None,
    checkpoint: Path | str | None = None,
    every: int = 50,
) -> TangentSolution:
    """Fit the tangent model h(w₀) + Dh(w₀)v to targets by least squares, without forming its kernel.

    v minimises (1/2n)‖h(w₀) + Dh(w₀)v - y‖² + (ridge/2)‖v‖², the square loss that `tangent_flow` and training use.
    Without a ridge it is the minimiser of smallest norm, the limit of the gradient flow from v = 0. The method is
    Golub-Kahan bidiagonalisation with full orthogonalisation. Each iteration costs one product with Dh(w₀) and one with
    its transpose, about as much as one epoch of training. If torch allows TF32, the products use it; the residual is
    computed in full precision, and the iteration starts again from it as long as it is larger than the tolerance. Every
    iterate has the smallest loss in its space, so that the loss falls with every iteration. The function returns even
    if the iteration does not converge, with the residual.

    Args:
        model: A model or a module. It is not modified. One in half precision is cast to float32, as for `tangent_flow`.
        x: The inputs of n points. Data that does not fit into memory is given as a `DataLoader` of pairs
            (inputs, targets) without shuffling, which is read once for each product; augmented copies are more points.
        y: The targets as a tensor, an array or a nested list, of the shape (n, k) of the outputs. Integers of shape
            (n,) are class indices and stand for one-hot rows. `None` takes those of the loader.
        ridge: The coefficient of ‖v‖²/2, at least 0.
        centred: Whether to leave out h(w₀), so that Dh(w₀)v alone is fitted.
        tolerance: The norm of the gradient of the objective at which the iteration stops, relative to that at v = 0, at
            least 0 and below 1. `None` uses 10⁻⁴ for models in float32 and 10⁻¹³ in float64.
        iterations: The maximum number of iterations. `None` uses ten times the smaller dimension.
        batch: The number of points that are processed at a time.
        rounded: A dtype of lower precision, `torch.float16` or `torch.bfloat16`, in which products are computed and the
            vectors of parameters are stored, for models with hundreds of millions of parameters. float16 is as fast and
            eight times as accurate; factors that it cannot hold are scaled. The solution is still the best one of its
            space, but the space stops improving when the residual reaches the precision of products. The residual is
            computed in the dtype of the model, with the precision that torch allows. `None` uses the dtype of the
            model.
        memory: The memory for the vectors, as a number of bytes or a string such as "20GB": those of the bases, and
            some fifteen more that an iteration holds. An iteration adds as many numbers to the bases as the model has
            parameters and the data has outputs. A checkpoint takes as much again, in the memory of the host. What the
            model needs for one batch is not counted. If the memory is full, the iteration starts again from the
            residual; the flow and other ridges are then not available. They are available if it is restarted only to
            remove rounding errors, provided that the memory holds both spaces. The maximum memory of the bases is shown
            before the iteration: in the title of the progress bar or, if stderr is not a terminal and the iteration may
            take longer than a minute, as a line on stderr. `None` uses half of the free memory for the bases, 4 GiB at
            most on a CPU and 64 GiB at most on a GPU.
        host: Memory of the host for vectors that do not fit into `memory`, as a number of bytes or a string. `None`
            uses none.
        checkpoint: A file in which the iteration is stored every `every` iterations. If it exists, the iteration
            continues from it, with the same result to the last bit.
        every: The number of iterations between two checkpoints.

    Returns:
        The solution, which predicts at new points.

    Raises:
        InputError: If the inputs or the targets are invalid, a number is out of range, or the memory is too small.
        StoreError: If the checkpoint cannot be written.
        ModelError: If the model cannot be traced or differentiated.

    Example:
        >>> net, x = torch.nn.Linear(2, 1).double(), torch.eye(2, dtype=torch.float64)
        >>> solution = tangent_solve(net, x, [[1.0], [-1.0]])
        >>> solution.converged, [round(value, 6) for value in solution.predict(x).flatten().tolist()]
        (True, [1.0, -1.0])
    """
    _check_numbers(ridge, tolerance, iterations, batch, every)
    problem = posed(model, x, y, ridge=float(ridge), centred=centred, batch=batch, rounded=rounded)
    jacobian = problem.jacobian
    if tolerance is None:
        tolerance = 1e-13 if jacobian.dtype == torch.float64 else 1e-4
    limit = 10 * min(jacobian.shape) if iterations is None else iterations
    # The copy that is written in the background is in the memory of the host.
    copies = 2 if checkpoint is not None and jacobian.device.type == "cpu" else 1
    each, most = problem.each * copies, min(limit, *jacobian.shape)
    problem.near = vectors_within(memory, jacobian, each, working_memory(jacobian) * copies, min(_LEAST, most))
    room = problem.near + _parse_host(host) // each
    plan = _Plan(tolerance, limit, room, min(room, most), every)
    if checkpoint is None:
        return _iterate(problem, plan, None)
    with Checkpoint(checkpoint) as stored:
        return _iterate(problem, plan, stored)


def _parse_host(host: Memory | None) -> int:
    try:
        return parse_memory(host) or 0
    except InputError as error:
        raise InputError(str(error).replace("memory=", "host=")) from None


def _check_numbers(ridge: Any, tolerance: Any, iterations: Any, batch: Any, every: Any) -> None:
    check_number("ridge", ridge)
    if tolerance is not None:
        check_number("tolerance", tolerance, least=0, below=1)
    if iterations is not None:
        check_count("iterations", iterations)
    check_count("batch", batch)
    check_count("every", every)


def posed(
    model: Model | nn.Module,
    x: Inputs | DataLoader[Any],
    y: Target | None,
    *,
    ridge: float,
    centred: bool,
    batch: int,
    rounded: torch.dtype | None,
) -> Problem:
    """Check the arguments of a least-squares problem of a tangent model, and pose it.

    Args:
        model: A model or a module.
        x: The inputs of n points, or a loader of pairs (inputs, targets).
        y: The targets, or `None` for those of the loader.
        ridge: The coefficient of ‖v‖²/2.
        centred: Whether to leave out h(w₀).
        batch: The number of points that are processed at a time.
        rounded: The dtype of products, or `None` for that of the model.

    Returns:
        The problem.
    """
    if not 0 <= ridge < math.inf:
        raise InputError(f"The ridge is {ridge}; pass a finite number that is not negative.")
    if rounded is not None and rounded not in _ROUNDED:
        raise InputError(f"rounded={rounded} has no products here; pass torch.float16, torch.bfloat16 or None.")
    single = in_single(Model.of(model))
    assert isinstance(single, Model)
    jacobian = JacobianOperator(single, _batches(single, x), batch=batch)
    y = _targets(jacobian, y)
    if isinstance(y, Tensor) and y.is_complex():
        raise InputError("The targets are complex numbers; pass real ones, such as y.real.")
    with torch.no_grad():
        start = torch.cat([single(part).double().flatten() for part in jacobian.batches])
    if centred:
        start = torch.zeros_like(start)
    target = as_outputs(y, jacobian.n, jacobian.k).flatten().to(start)
    check_size(target - start)
    return Problem(jacobian, start, target, ridge, rounded, centred)


_LARGEST, _SMALLEST = 1e150, 1e-150
"""The largest and the smallest number, apart from 0, whose square is computed in float64 without loss."""


def check_size(missed: Tensor) -> None:
    """Raise an error if the square of what is to be fitted overflows, or vanishes by rounding.

    Args:
        missed: The targets minus the outputs at v = 0.

    Raises:
        InputError: If it does.
    """
    size = float(missed.abs().max()) if missed.numel() else 0.0
    if size > _LARGEST or 0 < size < _SMALLEST:
        raise InputError(
            f"The targets are up to {size:.3g} away from the outputs, and the square of that cannot be represented;"
            " scale the targets and the outputs."
        )


class _SingleBatches(LoadedBatches):
    """The batches of a loader, with inputs in half precision cast to float32."""

    def __iter__(self) -> Iterator[Inputs]:
        return (in_single_inputs(part) for part in super().__iter__())


def _batches(model: Model, x: Inputs | DataLoader[Any]) -> Inputs | LoadedBatches:
    if isinstance(x, DataLoader):
        return _SingleBatches(x, next(iter(model.params.values())).device)
    check_inputs(x)
    if any(t.ndim > 0 and len(t) == 0 for t in flatten(x)[1]):
        raise InputError("There are no points to fit; pass at least one.")
    return in_single_inputs(x)


def _targets(jacobian: JacobianOperator, y: Target | None) -> Target:
    if y is not None:
        return y
    if not isinstance(jacobian.batches, LoadedBatches):
        raise InputError("There are no targets; pass them as `y`, or pass a DataLoader of pairs (inputs, targets).")
    return jacobian.batches.targets


class Problem:
    """The least-squares problem min ‖y - h - Dh v‖² + shift‖v‖²."""

    def __init__(
        self,
        jacobian: JacobianOperator,
        start: Tensor,
        target: Tensor,
        ridge: float,
        rounded: torch.dtype | None,
        centred: bool,
    ) -> None:
        self.jacobian, self.start, self.target, self.ridge = Products(jacobian), start, target, ridge
        self.centred = centred
        self.shift, self.rounded = jacobian.n * ridge, rounded
        self.each = vector_memory(jacobian, rounded)
        """The number of bytes that an iteration adds to the bases."""
        self.near = 0
        """The number of vectors that are kept on the device."""

    def fast(self) -> Products:
        """The Jacobian whose products have the precision of the iteration."""
        exact = self.jacobian
        return exact if self.rounded is None else Products(exact, self.rounded, exact.automatic)

    def krylov(self, right: Tensor, most: int) -> Krylov:
        """Start the Krylov space from a right-hand side."""
        return Krylov(self.fast(), right, stored=self.rounded, near=self.near, most=most)

    def outputs(self, v: Tensor) -> Tensor:
        """The outputs of the tangent model at v."""
        return self.start + self.jacobian.matvec(v.to(self.jacobian.dtype)).double()

    def left(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the residual y - h - Dh v and half of the negative gradient, by products that are not rounded."""
        with full_precision if self.rounded is None else nullcontext():
            missed = self.target - self.outputs(v)
            return missed, self.jacobian.rmatvec(missed.to(self.jacobian.dtype)).double() - self.shift * v


@dataclass(frozen=True)
class _Plan:
    """When the iteration ends, how many vectors it may keep, and how often it is stored."""

    tolerance: float
    limit: int
    room: int
    most: int
    """The largest dimension of the first space."""
    every: int


@dataclass
class _Iteration:
    """The solution so far, with the space in which it is being improved."""

    krylov: Krylov
    v: Tensor
    done: int = 0
    """The number of iterations of all spaces."""
    relative: float = 1.0
    restarts: int = 0
    first: Krylov | None = None
    """The first space, if what rounding has left of the problem is solved in another one."""

    @property
    def kept(self) -> Krylov | None:
        """The space that starts from the whole problem, if it is still there."""
        return self.krylov if self.restarts == 0 else self.first

    def room(self, plan: _Plan) -> int:
        """The number of vectors that the present space may have."""
        return plan.room - (0 if self.first is None else self.first.size)

    def again(self, missed: Tensor, gradient: Tensor, direction: Tensor, plan: _Plan, *, met: bool) -> None:
        """Start another space from what is left, and keep the first one if it is good and the memory allows it."""
        room = plan.room - self.krylov.size
        if met and self.restarts == 0 and room >= _LEAST:
            self.first = self.krylov
            self.krylov = self.krylov.branch(missed, gradient, self.v, direction, room)
        else:
            self.krylov.restart(missed, gradient, self.v, direction)
        self.restarts += 1

    def state(self) -> dict[str, Any]:
        first = None if self.first is None else self.first.state()
        numbers = {"done": self.done, "relative": self.relative, "restarts": self.restarts}
        return {"v": self.v, "first": first, **numbers, **self.krylov.state()}

    def restore(self, state: dict[str, Any], plan: _Plan) -> None:
        if state["first"] is not None:
            self.first = self.krylov
            self.first.restore(state["first"])
            self.krylov = self.first.beside(self.room(plan))
        self.krylov.restore(state)
        self.v = state["v"].to(self.v.device)
        self.done, self.relative, self.restarts = state["done"], state["relative"], state["restarts"]


def _iterate(problem: Problem, plan: _Plan, checkpoint: Checkpoint | None) -> TangentSolution:
    """Solve the problem, and solve it again for what rounding and a full memory have left."""
    jacobian, right = problem.jacobian, problem.target - problem.start
    zero = torch.zeros(jacobian.shape[1], dtype=torch.float64, device=jacobian.device)
    began = time.monotonic()
    now = _Iteration(problem.krylov(right, plan.most), zero)
    title = f"tangent model ({plan.most} vectors take {size_text(plan.most * problem.each)} at most)"
    announce(title, 2 * plan.most * (time.monotonic() - began))
    stored = None if checkpoint is None else _Stored(checkpoint, problem, now, plan.every)
    if stored is not None:
        stored.resume(now, plan)
    largest, steepest = 0.0, now.krylov.speed
    with Bar(title, total=1.0) as bar:
        while steepest > 0:
            met = _grow(now, problem.shift, plan, stored, bar)
            projection = now.krylov.project()
            largest = max(largest, float(projection.sizes.max()) ** 2 if len(projection.sizes) else 0.0)
            direction = projection.solution(problem.shift)
            v = now.v + now.krylov.combine(direction)
            missed, gradient = problem.left(v)
            previous, now.v, now.relative = now.relative, v, float(gradient.norm()) / steepest
            # What rounding has left is accepted up to ten times the tolerance.
            enough = now.relative <= (10 if met else 1) * plan.tolerance
            stuck = met and now.restarts > 0 and now.relative > 0.5 * previous  # no more than rounding is left
            if enough or now.done >= plan.limit or stuck:
                break
            now.again(missed, gradient, direction, plan, met=met)
    # The products Dh v and Dhᵀ(y - Dh v) leave a gradient of this size by rounding, even at the exact solution. A
    # factor of ten distinguishes rounding from failure.
    rounding = torch.finfo(jacobian.dtype).eps * largest * float(now.v.norm()) / max(steepest, 1e-300)
    relative = now.relative if steepest > 0 else 0.0
    small = relative <= math.sqrt(plan.tolerance)  # in float32, rounding alone can be as large as the gradient
    converged = relative <= 10 * plan.tolerance or (small and relative <= 10 * rounding)
    return TangentSolution(problem, now.v, relative, now.done, converged, now.kept)


def _grow(now: _Iteration, shift: float, plan: _Plan, stored: _Stored | None, bar: Bar) -> bool:
    """Extend the space until the gradient is within the tolerance, and return whether it is."""
    krylov, goal = now.krylov, plan.tolerance * now.krylov.speed
    while krylov.size < now.room(plan) and now.done < plan.limit and not krylov.complete:
        krylov.extend()
        now.done += 1
        if now.done % _CHECK == 0 or krylov.complete:
            projection = krylov.project()
            left = projection.residual(projection.solution(shift))
            bar.reach(max(bar.done, fallen(left / krylov.speed, plan.tolerance)))
            if left <= goal:
                return True
        if stored is not None:
            stored.save(now)
    return krylov.complete


class _Stored:
    """An iteration in a file, with what identifies its problem."""

    def __init__(self, checkpoint: Checkpoint, problem: Problem, now: _Iteration, every: int) -> None:
        checkpoint.check()
        self._checkpoint, self._every = checkpoint, every
        self._agreed = _AGREED[problem.rounded is None]
        options = (problem.ridge, problem.centred, str(problem.rounded))
        self._name = identity(problem.jacobian, problem.target, options)
        self._sizes = sizes(problem.jacobian, now.krylov.steepest)

    def save(self, now: _Iteration) -> None:
        if now.done % self._every == 0:
            self._checkpoint.save({"name": self._name, "sizes": self._sizes, **now.state()})

    def resume(self, now: _Iteration, plan: _Plan) -> None:
        state = self._checkpoint.load()
        if state is None:
            return
        if state.keys() != {"name", "sizes", *now.state()}:
            self._checkpoint.set_aside("it does not contain an iteration")
            return
        if state.pop("name") != self._name or not self._agree(state.pop("sizes")):
            raise InputError(
                f"The checkpoint {self._checkpoint.path} belongs to another model or to other data; pass another file,"
                " or delete it."
            )
        now.restore(state, plan)

    def _agree(self, stored: Tensor) -> bool:
        """Whether the first gradient is the same up to the order of sums, which a GPU may change."""
        return len(stored) == len(self._sizes) and bool(
            ((stored - self._sizes).abs() <= self._agreed * self._sizes.max()).all()
        )


@final
@dataclass(frozen=True, eq=False)
class TangentSolution:
    """The tangent model fitted by `tangent_solve`."""

    _problem: Problem
    _flat: Float64[Tensor, " p"]
    residual: float
    """The norm of the gradient of the objective, relative to that at v = 0, computed from products."""
    iterations: int
    """The number of iterations, each with one product with Dh(w₀) and one with its transpose."""
    converged: bool
    """Whether the residual is within ten times the tolerance, or within the square root of the tolerance and ten times
    the rounding error of a product."""
    _krylov: Krylov | None
    pace: float | None = None
    """The sum of the step sizes of a pass of `tangent_sgd`, on average; `None` for `tangent_solve`.

    It is the time of the gradient flow that a pass would take without acceleration. Up to the noise of batches, and
    apart from the largest eigenvalues, t passes with the default acceleration reach about the time `pace`·t²/2, and
    with another one a time in proportion to it.
    """

    @property
    def ridge(self) -> float:
        """The ridge."""
        return self._problem.ridge

    @property
    def v(self) -> Params:
        """The displacement v by parameter name, which `Linearised(model).load_state_dict(…, strict=False)` accepts."""
        return self._named(self._flat)

    @property
    def outputs(self) -> Float64[Tensor, "n k"]:
        """The outputs of the fitted tangent model at the training points."""
        return self._problem.outputs(self._flat).view(-1, self._problem.jacobian.k)

    @property
    def loss(self) -> float:
        """The training loss (1/2n)‖h(w₀) + Dh(w₀)v - y‖², without the ridge."""
        missed = self._problem.target.view(-1, self._problem.jacobian.k) - self.outputs
        return float(missed.square().sum()) / (2 * self._problem.jacobian.n)

    @property
    def memory(self) -> int:
        """The number of bytes that the bases of the Krylov space take."""
        return 0 if self._krylov is None else self._krylov.memory

    @property
    def largest(self) -> float:
        """The largest eigenvalue λ of the tangent kernel, as the Krylov space has found it, which is a lower bound.

        The component along its eigenvector has converged after a few times n/λ. No other component is faster.
        """
        sizes = self._space()[1].sizes
        return float(sizes.max()) ** 2 if len(sizes) else 0.0

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        return self._problem.jacobian.named(flat)

    def predict(self, x: Inputs, *, batch: int = 128, at: Params | None = None) -> Tensor:
        """Evaluate the fitted tangent model at new points.

        Args:
            x: The inputs of n' points.
            batch: The number of points that are processed at a time.
            at: Another displacement, such as one of `flow` or `path`. `None` uses `v`.

        Returns:
            The outputs, of shape (n', k), in float64.

        Raises:
            InputError: If the inputs are invalid, or `at` does not have the names and shapes of the parameters.
        """
        check_autocast()
        check_count("batch", batch)
        fitted = self._problem.jacobian
        if at is not None:
            _check_displacement(fitted.model, at)
        jacobian = Products(
            JacobianOperator(fitted.model, _batches(fitted.model, x), batch=batch), None, fitted.automatic
        )
        change = jacobian.push_forward(self.v if at is None else at).double()
        if not self._problem.centred:
            with torch.no_grad():
                change = change + torch.cat([jacobian.model(part).double().flatten() for part in jacobian.batches])
        return change.view(jacobian.n, jacobian.k)

    def _space(self) -> tuple[Krylov, Projection]:
        if self._krylov is None:
            raise InputError(
                "There is no Krylov space, because its bases did not fit into the memory or tangent_sgd was used; pass"
                " a larger `memory` or `tolerance` to tangent_solve."
            )
        return self._krylov, self._krylov.project()

    def flow(self, times: Times, *, iterations: int | None = None) -> TangentCurve:
        """Compute the gradient flow of the tangent model from v = 0 at many times, without further iterations.

        Args:
            times: The times, non-negative and increasing. The last one may be ∞.
            iterations: The number of iterations whose result is used; fewer show how far the flow has converged.
                `None` uses all.

        Returns:
            The displacement and the outputs at each time, with a bound on the error of each.
        """
        check_autocast()
        times = check_times(times, infinity=True)
        krylov, projection = self._space()
        if iterations is not None and iterations != krylov.size:
            if not 1 <= iterations <= krylov.size:
                raise InputError(
                    f"There are {krylov.size} iterations in the space of the flow, not {iterations}; pass a number from"
                    " 1 to that."
                )
            projection = krylov.project(iterations)
        n, shift = self._problem.jacobian.n, self._problem.shift
        return self._curve(
            times,
            [projection.flow(float(t) / n, shift) for t in times],
            [projection.flow_error(float(t) / n, shift) for t in times],
        )

    def path(self, ridges: Times) -> TangentCurve:
        """Compute the solutions for many ridges, without further iterations.

        Args:
            ridges: The ridges, each at least 0, as a list, an array or a tensor.

        Returns:
            The displacement and the outputs for each ridge, with a bound on the error of each.
        """
        check_autocast()
        check_list("ridges", ridges, ndim=None)
        numbers = torch.as_tensor(ridges, dtype=torch.float64, device="cpu").detach()
        if numbers.ndim != 1 or len(numbers) == 0 or not bool(((numbers >= 0) & numbers.isfinite()).all()):
            raise InputError(f"The ridges are {ridges}; pass a list of finite numbers that are not negative.")
        projection = self._space()[1]
        shifts = [self._problem.jacobian.n * each for each in numbers.tolist()]
        solutions = [projection.solution(shift) for shift in shifts]
        return self._curve(numbers, solutions, [projection.solution_error(shift) for shift in shifts])

    def _curve(self, at: Tensor, coefficients: list[Tensor], errors: list[float]) -> TangentCurve:
        krylov, problem = self._space()[0], self._problem
        flat = [krylov.combine(each) for each in coefficients]
        return TangentCurve(
            at,
            torch.tensor(errors, dtype=torch.float64, device="cpu"),
            tuple(self._named(each) for each in flat),
            lambda: torch.stack([problem.outputs(each).view(-1, problem.jacobian.k) for each in flat]),
        )

    def leave_one_out(self, *, probes: int = 20, seed: int = 0) -> LeaveOneOut:
        """Compute the loss at points that are left out, and generalised cross-validation.

        If there are at most 5000 outputs in total, the kernel is formed in float64, and all numbers are exact up to
        rounding. Otherwise generalised cross-validation is estimated from random probes, with its standard error, and
        the loss at points that are left out is not available.

        Args:
            probes: The number of random vectors if the kernel is not formed, at least 2. The error of `freedom`
                decreases like 1/√probes.
            seed: The seed of the random vectors.

        Returns:
            Both numbers.

        Raises:
            InputError: If the ridge is 0 or too small for the precision, or there are fewer than 2 probes.
        """
        check_count("probes", probes, least=0)
        check_count("seed", seed, least=0)
        problem, jacobian = self._problem, self._problem.jacobian
        if problem.ridge == 0 or probes < 2:
            raise InputError("Leaving points out needs a positive ridge and at least two probes; pass them.")
        if jacobian.shape[0] <= EXACT:
            return exact_left_out(jacobian, problem.target - problem.start, problem.shift)
        return probed_left_out(jacobian, problem.target - self.outputs.flatten(), problem.shift, probes, seed)


def _check_displacement(model: Model, v: Params) -> None:
    if not isinstance(v, Mapping) or not all(isinstance(each, Tensor) for each in v.values()):
        raise InputError("A displacement has one tensor for each parameter; pass `v`, or one of the `v` of a curve.")
    if v.keys() != model.params.keys():
        wrong = sorted(v.keys() ^ model.params.keys())
        raise InputError(f"The displacement and the parameters differ in the names {wrong}; pass one tensor for each.")
    for name, w in model.params.items():
        if v[name].shape != w.shape:
            raise InputError(
                f"The displacement of {name} has shape {tuple(v[name].shape)}, and the parameter {tuple(w.shape)}; pass"
                " the same shape."
            )
        if not bool(v[name].isfinite().all()) or (v[name].is_complex() and not w.is_complex()):
            raise InputError(f"The displacement of {name} has entries that are not finite, real numbers; pass such.")


@final
@dataclass(frozen=True)
class TangentCurve:
    """The tangent model along the gradient flow or along the ridges, as returned by `TangentSolution`."""

    at: Float64[Tensor, " points"]
    """The times or the ridges."""
    error: Float64[Tensor, " points"]
    """A bound on the error ‖·‖ of the outputs at each time or ridge, apart from rounding."""
    v: tuple[Any, ...]
    """The displacements by parameter name, which `TangentSolution.predict` accepts as `at`."""
    _evaluate: Callable[[], Tensor]

    @cached_property
    def outputs(self) -> Float64[Tensor, "points n k"]:
        """The outputs at the training points, computed when they are first used."""
        check_autocast()
        return self._evaluate()
