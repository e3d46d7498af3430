"""The tangent model fitted by least squares without its kernel, from the products u ↦ Dh(w₀)u and c ↦ Dh(w₀)ᵀc alone.

The minimiser of (1/2n)‖h(w₀) + Dh(w₀)v - y‖² + (ridge/2)‖v‖² is computed in a Krylov space of Dh Dhᵀ or DhᵀDh,
whichever is smaller. The solutions for all ridges and the gradient flow at all times come from the same space.

Longer than 350 lines because all arguments are documented.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lazyscope._typing import Inputs, Number, Params
from lazyscope.ambient import full_precision, without_autocast
from lazyscope.errors import InputError
from lazyscope.flow.checkpoint import Checkpoint
from lazyscope.flow.objective import Times, check_times
from lazyscope.labels import Target
from lazyscope.linalg.eigen import Gram
from lazyscope.linalg.krylov import BASIS_MEMORY, Krylov, Projection
from lazyscope.linalg.nystrom import Nystrom
from lazyscope.linalg.operator import Operator, Symmetric
from lazyscope.linalg.residual import RefinedResiduals
from lazyscope.linalg.solve import conjugate_gradients
from lazyscope.linalg.trace import signs
from lazyscope.memory import Memory, default_memory, parse_memory
from lazyscope.model.base import Model
from lazyscope.model.inputs import Samples
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.model.loaded import LoadedBatches
from lazyscope.progress import Bar, fallen
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.tangent.regression import as_outputs

_CHECK = 10
"""The number of iterations after which the residual is computed again."""


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
    memory: Memory | None = None,
    precondition: int = 0,
    seed: int = 0,
    checkpoint: Path | str | None = None,
    every: int = 50,
) -> TangentSolution:
    """Fit the tangent model h(w₀) + Dh(w₀)v to targets by least squares, without forming its kernel.

    v minimises (1/2n)‖h(w₀) + Dh(w₀)v - y‖² + (ridge/2)‖v‖², the square loss that `tangent_flow` and training use.
    Without a ridge it is the minimiser of smallest norm, the limit of the gradient flow from v = 0. The method is
    Lanczos with full orthogonalisation. Each iteration costs one product with Dh(w₀) and one with its transpose, about
    as much as one epoch of training. With `precondition`, the method is GMRES with a Nyström
    preconditioner, which needs far fewer iterations on data with a few large and many small eigenvalues, but gives
    neither the flow nor other ridges. Its products may use TF32 if torch allows it; every solution is then refined with
    exact products. The function returns even if the iteration does not converge, with the residual.

    Args:
        model: A model or a module. It is not modified.
        x: The inputs of n points. Data that does not fit into memory is given as a `DataLoader` of pairs
            (inputs, targets) without shuffling, which is read once for each product; augmented copies are more points.
        y: The targets as a tensor, an array or a nested list, of the shape (n, k) of the outputs. Integers of shape
            (n,) are class indices and stand for one-hot rows. `None` takes those of the loader.
        ridge: The coefficient of ‖v‖²/2, at least 0.
        centred: Whether to leave out h(w₀), so that Dh(w₀)v alone is fitted.
        tolerance: The relative residual of the linear equation at which the iteration stops, for that part of the
            targets which the tangent model can reach. `None` uses 10⁻⁴ for models in float32 and 10⁻¹³ in float64.
        iterations: The maximum number of iterations. `None` uses ten times the smaller dimension.
        batch: The number of points that are processed at a time.
        memory: The memory for the basis of the Krylov space, as a number of bytes or a string such as "20GB". If it is
            full, the iteration starts again from the residual; the flow and other ridges are then not available.
            `None` uses half of the free memory, 4 GiB at most on a CPU and 64 GiB at most on a GPU.
        precondition: The number of points, drawn at random, from which the preconditioner is made. Their kernel with
            all n points is computed and kept, which takes n·precondition numbers. It must be 0 (no preconditioner) if
            there are more outputs than parameters.
        seed: The seed that draws these points.
        checkpoint: A file in which the iteration is stored every `every` iterations. If it exists, the iteration
            continues from it, with the same result to the last bit.
        every: The number of iterations between two checkpoints. With `precondition`, it is also the largest number
            after which the iteration starts again from the residual, so that only so many vectors are kept.

    Returns:
        The solution, which predicts at new points.

    Raises:
        InputError: If the inputs or the targets are invalid, or a number is out of range.
        ModelError: If the model cannot be traced or differentiated.

    Example:
        >>> net, x = torch.nn.Linear(2, 1).double(), torch.eye(2, dtype=torch.float64)
        >>> solution = tangent_solve(net, x, [[1.0], [-1.0]])
        >>> solution.converged, [round(value, 6) for value in solution.predict(x).flatten().tolist()]
        (True, [1.0, -1.0])
    """
    model = Model.of(model)
    jacobian = JacobianOperator(model, _batches(model, x), batch=batch)
    y = _targets(jacobian, y)
    ridge = float(ridge)
    if not 0 <= ridge < math.inf:
        raise InputError(f"The ridge is {ridge}; pass a finite number that is not negative.")
    if iterations is not None and iterations < 1:
        raise InputError(f"iterations={iterations} allows no iteration; pass a positive number.")
    if tolerance is None:
        tolerance = 1e-13 if jacobian.dtype == torch.float64 else 1e-4
    with torch.no_grad():
        start = torch.cat([model(part).double().flatten() for part in jacobian.batches])
    if centred:
        start = torch.zeros_like(start)
    target = as_outputs(y, jacobian.n, jacobian.k).flatten().to(start)
    problem = _Problem(jacobian, start, target, ridge)
    limit = 10 * min(jacobian.shape) if iterations is None else iterations
    bound = parse_memory(memory) or default_memory(jacobian.device, BASIS_MEMORY)
    room = max(2, bound // (2 * problem.equation.shape[0] * jacobian.dtype.itemsize))  # one space kept, one that grows
    stored = None if checkpoint is None else Checkpoint(checkpoint)
    plan = _Plan(tolerance, limit, room, stored, every)
    if precondition == 0:
        return _iterate(problem, plan)
    if isinstance(x, DataLoader):
        raise InputError("The preconditioner needs points at random, which a loader does not give; pass tensors.")
    return _iterate(problem, plan, _preconditioner(problem, x, precondition, seed, bound))


def _batches(model: Model, x: Inputs | DataLoader[Any]) -> Inputs | LoadedBatches:
    return LoadedBatches(x, next(iter(model.params.values())).device) if isinstance(x, DataLoader) else x


def _targets(jacobian: JacobianOperator, y: Target | None) -> Target:
    if y is not None:
        return y
    if not isinstance(jacobian.batches, LoadedBatches):
        raise InputError("There are no targets; pass them as `y`, or pass a DataLoader of pairs (inputs, targets).")
    return jacobian.batches.targets


class _Problem:
    """The least-squares problem as a linear equation (A + shift)u = b, in the outputs or in the parameters."""

    def __init__(self, jacobian: JacobianOperator, start: Tensor, target: Tensor, ridge: float) -> None:
        self.jacobian, self.start, self.target, self.ridge = jacobian, start, target, ridge
        rows, columns = jacobian.shape
        self.space: Literal["outputs", "parameters"] = "outputs" if rows <= columns else "parameters"
        self.equation: Symmetric = Gram(jacobian)
        self.shift = jacobian.n * ridge

    def right(self, residual: Tensor) -> Tensor:
        """The right-hand side of the equation for a residual y - h."""
        return residual if self.space == "outputs" else self._transposed(residual)

    def _transposed(self, c: Tensor) -> Tensor:
        return self.jacobian.rmatvec(c.to(self.jacobian.dtype)).double()

    def weights(self, u: Tensor) -> Tensor:
        """The displacement v of a solution u, flat."""
        return self._transposed(u) if self.space == "outputs" else u

    def outputs(self, v: Tensor) -> Tensor:
        """The outputs of the tangent model at v."""
        return self.start + self.jacobian.matvec(v.to(self.jacobian.dtype)).double()

    def left(self, u: Tensor, v: Tensor) -> tuple[Tensor, float]:
        """Compute b - (A + shift)u and the norm of the gradient of n times the objective, by products."""
        left = self.right(self.target - self.outputs(v)) - self.shift * u
        gradient = self._transposed(left) if self.space == "outputs" else left
        return left, float(gradient.norm())


@dataclass(frozen=True)
class _Plan:
    """When the iteration ends, how many vectors it may keep, and where it is stored."""

    tolerance: float
    limit: int
    room: int
    checkpoint: Checkpoint | None
    every: int


def _preconditioner(problem: _Problem, x: Inputs, points: int, seed: int, memory: int) -> Nystrom:
    """Compute the kernel between all points and some of them, averaged over the outputs."""
    jacobian = problem.jacobian
    if problem.space == "parameters":
        raise InputError(
            f"There are {jacobian.shape[0]} outputs and only {jacobian.shape[1]} parameters, and the preconditioner"
            " acts on the outputs; pass precondition=0."
        )
    if not 0 < points <= jacobian.n:
        raise InputError(f"precondition={points} points cannot be drawn from {jacobian.n}; pass a smaller number.")
    places = torch.randperm(jacobian.n, generator=torch.Generator().manual_seed(seed), device="cpu")[:points]
    places = places.sort().values.to(jacobian.device)
    few = Samples(x).rows(places)
    columns = tangent_kernel(jacobian.model, x, few, outputs="trace", memory=memory)
    return Nystrom(columns, places, shift=problem.shift)


def _iterate(problem: _Problem, plan: _Plan, precondition: Nystrom | None = None) -> TangentSolution:
    """Solve the equation, and solve it again for what rounding and a full memory have left."""
    right = problem.right(problem.target - problem.start)
    size = float(right.norm())
    u, v = torch.zeros_like(right), torch.zeros(problem.jacobian.shape[1], dtype=right.dtype, device=right.device)
    steepest = problem.left(u, v)[1]
    relative, done, whole, largest = float(steepest > 0), 0, None, 0.0
    vectors = min(plan.limit, plan.room if precondition is None else plan.every)
    most = 2 * vectors * problem.equation.shape[0] * problem.jacobian.dtype.itemsize
    most += 0 if precondition is None else precondition.memory
    with ExitStack() as stack, Bar(f"tangent model (vectors of {most / 1e9:.2g} GB at most)", total=1.0) as bar:
        if plan.checkpoint is not None:
            stack.enter_context(plan.checkpoint)
        while relative > plan.tolerance and done < plan.limit:
            goal, most = plan.tolerance * size, plan.limit - done
            stored = _Stored(plan.checkpoint, right) if plan.checkpoint is not None and done == 0 else None
            if precondition is None:
                krylov = Krylov(problem.equation, right)
                met = _grow(krylov, problem.shift, goal, min(plan.room, most), plan.every, stored, bar)
                if done == 0 and (met or krylov.size == plan.limit):
                    whole = krylov
                projection = krylov.project()
                largest = max(largest, float(projection.values.max()))
                # Before the end, the residual of the solution in the space can be larger than that of zero.
                best = projection.solution if met or problem.space == "parameters" else projection.minimiser
                more, count = krylov.combine(best(problem.shift)), krylov.size
            else:
                more, count, met = _refine(problem, right, precondition, plan, stored, bar)
                largest = precondition.largest
            u, done = u + more, done + count
            v = problem.weights(u)
            right, slope = problem.left(u, v)
            previous, relative = relative, slope / steepest
            if met and relative > 0.5 * previous:  # no more than rounding is left
                break
    # A factor of ten distinguishes rounding from failure. The products v = Dhᵀu, Dh v and Dhᵀ(y - Dh v) of long vectors
    # leave a gradient of this size, even at the exact solution.
    long = float(v.norm()) + (math.sqrt(largest) * float(u.norm()) if problem.space == "outputs" else 0.0)
    rounding = torch.finfo(problem.jacobian.dtype).eps * largest * long
    small = relative <= math.sqrt(plan.tolerance)  # in float32, rounding alone can be as large as the gradient
    converged = relative <= 10 * plan.tolerance or (small and relative * steepest <= 10 * rounding)
    return TangentSolution(problem, v, relative, done, converged, whole)


def _grow(krylov: Krylov, shift: float, goal: float, most: int, every: int, stored: _Stored | None, bar: Bar) -> bool:
    """Extend a Krylov space until the residual of the equation is at most `goal`, and return whether it is."""
    if stored is not None:
        stored.resume(krylov)
    while krylov.size < most and not krylov.complete:
        krylov.extend()
        if krylov.size % _CHECK == 0 or krylov.complete:
            left = krylov.project().residual(shift) * krylov.norm
            bar.reach(max(bar.done, fallen(left / krylov.norm, goal / krylov.norm)))
            if left <= goal:
                return True
        if stored is not None and krylov.size % every == 0:
            stored.save(krylov)
    return krylov.complete


def _refine(
    problem: _Problem, right: Tensor, precondition: Nystrom, plan: _Plan, stored: _Stored | None, bar: Bar
) -> tuple[Tensor, int, bool]:
    """Solve the equation with the preconditioner, by products in the precision that torch allows and exact ones."""

    def exact(u: Tensor) -> Tensor:
        with full_precision:
            return problem.equation.matvec(u.to(problem.equation.dtype)).double()

    rough = torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32
    found = RefinedResiduals(
        problem.equation,
        exact,
        right,
        shift=problem.shift,
        tolerance=plan.tolerance,
        precondition=precondition,
        fall=0.3 if rough and right.is_cuda and problem.equation.dtype == torch.float32 else 0.0,
        longest=plan.every,
    )
    if stored is not None:
        stored.resume(found)
    while found.count < plan.limit and not found.done:
        found.step(plan.limit - found.count)
        bar.reach(max(bar.done, fallen(found.left, plan.tolerance)))
        if stored is not None:
            stored.save(found)
    return found.x, found.count, found.done


class _Stored:
    """An iteration in a file, with a checksum of the vector from which it was started."""

    def __init__(self, checkpoint: Checkpoint, right: Tensor) -> None:
        self._checkpoint = checkpoint
        self._name = hashlib.sha256(right.cpu().numpy().tobytes()).hexdigest()

    def save(self, iteration: Krylov | RefinedResiduals) -> None:
        self._checkpoint.save({"name": self._name, **iteration.state()})

    def resume(self, iteration: Krylov | RefinedResiduals) -> None:
        state = self._checkpoint.load()
        if state is None:
            return
        if state.pop("name", None) != self._name or ("images" in state) != isinstance(iteration, RefinedResiduals):
            raise InputError(
                f"The checkpoint {self._checkpoint.path} belongs to another model, to other data or to another method;"
                " pass another file, or delete it."
            )
        iteration.restore(state)


@final
@dataclass(frozen=True, eq=False)
class TangentSolution:
    """The tangent model fitted by `tangent_solve`."""

    _problem: _Problem
    _flat: Float64[Tensor, " p"]
    residual: float
    """The norm of the gradient of the objective, relative to that at v = 0, computed from products."""
    iterations: int
    """The number of iterations, each with one product with Dh(w₀) and one with its transpose."""
    converged: bool
    """Whether the residual is within ten times the tolerance, or within the square root of the tolerance and ten times
    the rounding error of a product."""
    _krylov: Krylov | None

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
        """The number of bytes that the basis of the Krylov space takes."""
        return 0 if self._krylov is None else self._krylov.basis.numel() * self._krylov.basis.element_size()

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
        """
        jacobian = JacobianOperator(self._problem.jacobian.model, x, batch=batch)
        change = jacobian.push_forward(self.v if at is None else at).double()
        if bool(self._problem.start.any()):
            with torch.no_grad():
                change = change + torch.cat([jacobian.model(part).double().flatten() for part in jacobian.batches])
        return change.view(jacobian.n, jacobian.k)

    def _space(self) -> tuple[Krylov, Projection]:
        if self._krylov is None or self._krylov.size == 0:
            raise InputError(
                "The Krylov space was not kept, since its basis did not fit into the memory or a preconditioner was"
                " used; pass a larger `memory` and precondition=0 to tangent_solve."
            )
        return self._krylov, self._krylov.project()

    def flow(self, times: Times) -> TangentCurve:
        """Compute the gradient flow of the tangent model from v = 0 at many times, without further iterations.

        Args:
            times: The times, non-negative and increasing. The last one may be ∞.

        Returns:
            The displacement and the outputs at each time, with a bound on the error of each.
        """
        times = check_times(times, infinity=True)
        _, projection = self._space()
        n, shift = self._problem.jacobian.n, self._problem.shift
        shifted = projection.shifted(shift)
        return self._curve(
            times,
            [shifted.flow(float(t) / n) for t in times],
            [shifted.flow_error(float(t) / n) for t in times],
            projection,
        )

    def path(self, ridges: Sequence[Number]) -> TangentCurve:
        """Compute the solutions for many ridges, without further iterations.

        Args:
            ridges: The ridges, each at least 0.

        Returns:
            The displacement and the outputs for each ridge, with a bound on the error of each.
        """
        if any(not 0 <= float(each) < math.inf for each in ridges):
            raise InputError(f"The ridges are {list(ridges)}; pass finite numbers that are not negative.")
        _, projection = self._space()
        n = self._problem.jacobian.n
        shifts = [n * float(each) for each in ridges]
        errors = []
        for shift in shifts:
            missed = projection.residual(shift) * projection.norm
            errors.append(missed / shift if shift > 0 else math.inf if missed > 0 else 0.0)
        numbers = torch.tensor([float(each) for each in ridges], dtype=torch.float64)
        return self._curve(numbers, [projection.solution(shift) for shift in shifts], errors, projection)

    def _curve(
        self, at: Tensor, coefficients: list[Tensor], errors: list[float], projection: Projection
    ) -> TangentCurve:
        krylov, problem = self._space()[0], self._problem
        size = math.sqrt(max(float(projection.values.max()), 0.0))  # ‖Dh(w₀)‖, by which errors grow
        flat, outputs = [], []
        for each in coefficients:
            u = krylov.combine(each)
            flat.append(problem.weights(u))
            outputs.append(problem.outputs(flat[-1]).view(-1, problem.jacobian.k))
        grows = size**2 if problem.space == "outputs" else size
        return TangentCurve(
            at,
            torch.stack(outputs),
            torch.tensor(errors, dtype=torch.float64) * grows,
            tuple(self._named(each) for each in flat),
        )

    def leave_one_out(self, *, probes: int = 20, seed: int = 0) -> LeaveOneOut:
        """Estimate the loss at points that are left out, and generalised cross-validation, by random probes.

        Args:
            probes: The number of random vectors. The relative error decreases like 1/√probes.
            seed: The seed of the random vectors.

        Returns:
            Both estimates.

        Raises:
            InputError: If the ridge is 0, or `probes` is not positive.
        """
        problem, jacobian = self._problem, self._problem.jacobian
        if problem.ridge == 0 or probes < 1:
            raise InputError("Leaving points out needs a positive ridge and at least one probe; pass them.")
        rows, k, n = jacobian.shape[0], jacobian.k, jacobian.n
        kernel = _Kernel(jacobian)
        z = signs(rows, probes, seed, kernel).double()
        inverse = conjugate_gradients(kernel, z, shift=problem.shift).x
        c = (problem.target - self.outputs.flatten()) / problem.shift
        blocks = torch.einsum("nap,nbp->nab", z.view(n, k, probes), inverse.view(n, k, probes)) / probes
        blocks = (blocks + blocks.mT) / 2
        left = torch.linalg.solve(blocks, c.view(n, k))
        freedom = rows - problem.shift * float((z * inverse).sum()) / probes
        missed = problem.shift * c
        gcv = float(missed.square().sum()) / (2 * n) / (1 - freedom / rows) ** 2
        return LeaveOneOut(float(left.square().sum()) / (2 * n), gcv, freedom)


class _Kernel(Symmetric):
    """The tangent kernel as an operator on outputs."""

    def __init__(self, jacobian: Operator) -> None:
        self._jacobian = jacobian
        self.shape = (jacobian.shape[0], jacobian.shape[0])
        self.dtype, self.device = jacobian.dtype, jacobian.device

    def matmat(self, u: Float[Tensor, "columns m"]) -> Float[Tensor, "rows m"]:
        return self._jacobian.matmat(self._jacobian.rmatmat(u))


@final
@dataclass(frozen=True)
class TangentCurve:
    """The tangent model along the gradient flow or along the ridges, as returned by `TangentSolution`."""

    at: Float64[Tensor, " points"]
    """The times or the ridges."""
    outputs: Float64[Tensor, "points n k"]
    """The outputs at the training points."""
    error: Float64[Tensor, " points"]
    """A bound on the error ‖·‖ of the outputs at each time or ridge, apart from rounding."""
    v: tuple[Any, ...]
    """The displacements by parameter name, which `TangentSolution.predict` accepts as `at`."""


@final
@dataclass(frozen=True)
class LeaveOneOut:
    """Estimates of the loss at points that were not used for the fit."""

    loss: float
    """The mean over the points of ½|f₋ᵢ(xᵢ) - yᵢ|², where f₋ᵢ is fitted without point i."""
    gcv: float
    """Generalised cross-validation: the training loss divided by (1 - freedom/nk)²."""
    freedom: float
    """The effective number of parameters tr K(K + n·ridge)⁻¹."""
