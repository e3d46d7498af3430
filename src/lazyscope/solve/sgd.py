"""The tangent model fitted by stochastic gradient descent without its largest eigenvalues.

The largest eigenvalues of the tangent kernel limit the step size, though they are fitted after a few steps. EigenPro
(Ma, Belkin, 2017) finds their eigenvectors from some of the data, and scales the gradient down along them.
Steps are then limited by single points, and a pass over the data, with a step for each batch, reduces the residual more
than an iteration of a Krylov method, which makes one step. Its authors' code is for kernels that can be evaluated; here
only products with the Jacobian are used. Steps are accelerated like those of Kaczmarz's method by Liu and Wright (2016,
"An accelerated randomized Kaczmarz algorithm"): t passes do about what t²/2 do without.

Longer than 350 lines because all arguments are documented.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lazyscope._typing import Inputs, Params
from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError, ModelError
from lazyscope.flow.checkpoint import Checkpoint
from lazyscope.labels import Target
from lazyscope.linalg.krylov import Krylov
from lazyscope.model.base import Model
from lazyscope.model.inputs import check_samples, flatten
from lazyscope.progress import Bar
from lazyscope.solve.deflation import Deflation
from lazyscope.solve.identity import identity
from lazyscope.solve.products import Products
from lazyscope.solve.tangent import Problem, TangentSolution, posed

_POWERS = 12
"""The number of products that find the largest eigenvalue of what is left."""

_SINGLE = 32
"""The number of single points whose largest eigenvalue is computed."""

_CHECKED = 50
"""The number of points on which both ways of computing products are compared, in full precision."""

ACCELERATION = 4.0
"""How much faster the acceleration is than that for batches chosen at random, which allows for more noise than batches
have that are shuffled and used once a pass. On a tangent kernel of CIFAR-10, 10 still converges, and 40 diverges; on
random problems, 6 overshoots."""

_LARGE = 2.0
"""After an epoch whose loss is this many times that of the best one, acceleration begins anew: either it has overshot,
or the targets cannot be fitted, and it enlarges the noise of batches."""

_LARGER = 10.0
"""An epoch whose loss is this many times that of the best one is undone: the steps were too long, or acceleration has
overshot."""

_HALVINGS = 20
"""How often the step size is halved before the iteration gives up."""


@without_autocast
def tangent_sgd(
    model: Model | nn.Module,
    x: Inputs,
    y: Target,
    *,
    epochs: int = 20,
    tolerance: float = 1e-4,
    centred: bool = False,
    batch: int = 128,
    deflated: int = 24,
    sample: int | None = None,
    acceleration: float = ACCELERATION,
    rounded: torch.dtype | None = None,
    seed: int = 0,
    watch: Callable[[int, Params], float | None] | None = None,
    checkpoint: Path | str | None = None,
    every: int = 1,
) -> TangentSolution:
    """Fit the tangent model h(w₀) + Dh(w₀)v to targets by deflated, accelerated stochastic gradient descent.

    It minimises the loss of `tangent_solve` without a ridge, from v = 0, so that it tends to the same minimiser of
    smallest norm if the model can fit the targets. For many points it needs a fraction of the passes over the data, and
    the memory of a few vectors instead of one for each pass; but it has no gradient flow, no other ridges and no bound
    on the error, and its result depends on the seed. Use it for fits to a few percent with tens of thousands of
    points or more, and `tangent_solve` for precise ones.

    The step size comes from the largest eigenvalue that is left, and from those of single points. Acceleration makes
    steps longer with each pass. The loss of an epoch is measured during it, at no cost. If it is twice that of the best
    epoch, acceleration begins anew. If it is ten times as large, the iteration returns to where the best epoch began,
    and measures the loss there. The step size is halved, unless the loss has stayed below that at the last return and
    has fallen to half of it: then acceleration alone has overshot, as it does when an epoch has few steps.

    Args:
        model: A model or a module. It is not modified.
        x: The inputs of n points.
        y: The targets as a tensor, an array or a nested list, of the shape (n, k) of the outputs. Integers of shape
            (n,) are class indices and stand for one-hot rows.
        epochs: The largest number of passes over the data.
        tolerance: The loss at which the iteration stops, relative to that at v = 0. The mean loss during an epoch must
            be as small, and then the loss at its end.
        centred: Whether to leave out h(w₀), so that Dh(w₀)v alone is fitted.
        batch: The number of points of a step. An epoch leaves out the points that remain, other ones each time.
        deflated: The number of eigenvectors along which the gradient is divided. Each takes the memory of the model.
        sample: The number of points from which they are computed, with twice as many products. `None` uses a tenth of
            the points, and at least 500.
        acceleration: How fast steps become longer, at least 1. The number of passes falls like one over its root. If
            batches resemble each other, as those of hundreds of images do, twice the default still converges. Values
            that are too large overshoot.
        rounded: A dtype of lower precision in which products are computed, as in `tangent_solve`; eigenvectors are then
            stored in bfloat16. `None` uses the dtype of the model.
        seed: The seed of the samples and of the order of points.
        watch: A function that is called after each epoch with its number and the displacement v by parameter name. If
            it returns numbers, such as the accuracy on points that are not fitted, the result is the displacement with
            the largest number, rather than the last one. It may return `None` after some of the epochs.
        checkpoint: A file in which the iteration is stored every `every` epochs. If it exists, the iteration continues
            from it, with the same result up to rounding. A displacement is stored as the weights of the outputs of
            which it is the gradient, so that the file takes a few numbers for each output of each point, however large
            the model is. The eigenvectors are computed again. `epochs` and `tolerance` may change.
        every: The number of epochs between two checkpoints.

    Returns:
        The solution, whose `iterations` are the epochs. It `converged` if the tolerance was reached, by its own loss.
        Epochs that are undone are not counted.

    Raises:
        InputError: If the inputs or the targets are invalid, or a number is out of range.
        ModelError: If the model cannot be traced or differentiated, or no step size makes the loss fall.

    Example:
        >>> net, x = torch.nn.Linear(2, 1).double(), torch.eye(2, dtype=torch.float64)
        >>> solution = tangent_sgd(net, x, [[1.0], [-1.0]], epochs=100, tolerance=1e-8, deflated=1)
        >>> solution.converged, [round(value, 2) for value in solution.predict(x).flatten().tolist()]
        (True, [1.0, -1.0])
    """
    if min(epochs, batch, every, 1 if sample is None else sample) < 1 or deflated < 0 or not 0 <= tolerance < 1:
        raise InputError(
            f"epochs={epochs}, batch={batch}, every={every} and sample={sample} must be positive, deflated={deflated}"
            f" at least 0, and tolerance={tolerance} at least 0 and below 1; pass such numbers."
        )
    if not 1 <= acceleration < math.inf:
        raise InputError(f"acceleration={acceleration} is not a finite number that is at least 1; pass one.")
    if isinstance(x, DataLoader):
        raise InputError("Random batches cannot be taken from a DataLoader; pass the inputs, or use tangent_solve.")
    check_samples(x)
    few = _CHECKED if len(flatten(x)[1][0]) > batch > _CHECKED else batch
    problem = posed(model, x, y, ridge=0.0, centred=centred, batch=few, rounded=rounded)
    if problem.jacobian.batches.whole:
        raise problem.jacobian.batches.uneven()
    problem.jacobian.batches.size = batch
    n = problem.jacobian.n
    sample = min(max(500, n // 10) if sample is None else sample, n)
    options = {"batch": batch, "deflated": deflated, "sample": sample, "rounded": str(rounded), "seed": seed}
    options["acceleration"] = acceleration
    with nullcontext() if checkpoint is None else Checkpoint(checkpoint, every=every) as file:
        stored = None if file is None else _Stored(file, problem, options)
        state = None if stored is None else stored.load()
        run = _Run(problem, min(batch, n), deflated, sample, acceleration, torch.Generator().manual_seed(seed))
        now = run.fresh() if state is None else run.restored(state)
        end, residual = run.descend(now, epochs, tolerance, watch, None if stored is None else stored.save)
    pace = now.time / now.done if now.done else 0.0
    return TangentSolution(problem, end.v.double(), residual, now.done, now.reached <= tolerance, None, pace)


def accelerated(gain: float, count: int, acceleration: float = ACCELERATION) -> tuple[float, float]:
    """Compute the next step of the acceleration, without a bound on the smallest eigenvalue.

    Args:
        gain: The length of the last long step, in units of a short one; 0 at the beginning.
        count: The number of batches of a pass.
        acceleration: How fast steps become longer.

    Returns:
        The length γ of the next long step, with γ² - γ/turns = gain², and how far the point of short steps is drawn to
        that of long ones before it.
    """
    turns = 1 + (count - 1) / acceleration
    longer = (1 / turns + math.sqrt(1 / turns**2 + 4 * gain**2)) / 2
    return longer, 1 / (longer * turns)


@dataclass
class _Point:
    """A displacement v, and the weights of outputs of which it is the gradient Jᵀw, apart from the eigenvectors."""

    v: Tensor
    weights: Float[Tensor, "n k"]

    def clone(self) -> _Point:
        return _Point(self.v.clone(), self.weights.clone())

    def copy_(self, other: _Point) -> None:
        self.v.copy_(other.v)
        self.weights.copy_(other.weights)

    def lerp_(self, other: _Point, part: float) -> None:
        """Draw it to another one."""
        self.v.lerp_(other.v, part)
        self.weights.lerp_(other.weights, part)

    def step_(self, gradient: Tensor, rows: Tensor, missed: Tensor, length: float) -> None:
        """Add a gradient, which is deflated, of weights of the outputs of some points."""
        self.v.add_(gradient, alpha=length)
        self.weights[rows] += length * missed


@dataclass
class _State:
    """The iteration between two epochs. Losses are relative to that at v = 0."""

    at: _Point
    ahead: _Point
    """The displacement of long steps, to which v is drawn before each step."""
    best: _Point
    """Where the epoch with the least loss began."""
    random: Tensor
    """The state of the random generator."""
    sizes: dict[str, float]
    """The factors of products in low precision."""
    step: float
    chosen: _Point | None = None
    """The displacement with the largest score, if there are scores."""
    score: float = -math.inf
    gain: float = 0.0
    """The length of the steps of `ahead` in units of those of v; 0 where acceleration begins."""
    least: float = 1.0
    """The least mean loss of an epoch, or the loss where an epoch that was undone has begun again."""
    rest: float = 1.0
    """The loss where the iteration last began, or to which it returned."""
    reached: float = math.inf
    """The loss at the result, where it has been computed."""
    done: int = 0
    halved: int = 0
    time: float = 0.0
    """The sum of the step sizes of v, which is the time of the gradient flow without acceleration."""
    mark: float = 0.0
    """The time at `best`."""


class _Stored:
    """The iteration in a file, with a checksum of the problem and of the options."""

    def __init__(self, checkpoint: Checkpoint, problem: Problem, options: dict[str, object]) -> None:
        self._checkpoint = checkpoint
        self._name = identity(problem.jacobian, problem.target, (problem.centred, *options.items()))

    def save(self, done: int, state: Callable[[], dict[str, Any]]) -> None:
        if done % self._checkpoint.every == 0:
            self._checkpoint.save({"name": self._name, **state()})

    def load(self) -> dict[str, Any] | None:
        state = self._checkpoint.load()
        if state is None:
            return None
        if state.pop("name", None) != self._name or set(state) != {field.name for field in fields(_State)}:
            raise InputError(
                f"The checkpoint {self._checkpoint.path} belongs to another model, to other data or to other options;"
                " pass another file, or delete it."
            )
        return state


class _Run:
    """The problem with what the steps need: products of batches, the deflation, and the step size."""

    def __init__(
        self,
        problem: Problem,
        batch: int,
        deflated: int,
        sample: int,
        acceleration: float,
        random: torch.Generator,
    ) -> None:
        self._problem, self.jacobian, self.batch, self._random = problem, problem.fast(), batch, random
        self._acceleration = acceleration
        self._named, self.right = problem.jacobian.named, problem.target - problem.start
        self.sample = sample
        self.deflate = self._deflation(deflated, problem.rounded)

    def fresh(self) -> _State:
        """The iteration at v = 0."""
        v = torch.zeros(self.jacobian.shape[1], dtype=self.jacobian.dtype, device=self.jacobian.device)
        zero, step = _Point(v, v.new_zeros(self.jacobian.n, self.jacobian.k)), self._step_size()
        return _State(zero, zero.clone(), zero.clone(), self._random.get_state(), self.jacobian._sizes, step)

    def stored(self, now: _State) -> dict[str, Any]:
        """Return what `restored` needs: of a displacement, the weights and its parts along the eigenvectors."""
        state = {field.name: getattr(now, field.name) for field in fields(now)}
        points = {name: point for name, point in state.items() if isinstance(point, _Point)}
        random = {"random": self._random.get_state(), "sizes": self.jacobian._sizes}
        return {**state, **{n: [p.weights, self.deflate.along(p.v)] for n, p in points.items()}, **random}

    def restored(self, state: dict[str, Any]) -> _State:
        """Compute the displacements of a stored iteration again."""
        self.jacobian._sizes.update(state["sizes"])
        points = {name: self._point(*pair) for name, pair in state.items() if isinstance(pair, list)}
        return _State(**{**state, **points})

    def _point(self, weights: Tensor, along: Tensor) -> _Point:
        weights = weights.to(self.jacobian.device)
        v = self.deflate.replaced(self.jacobian.rmatvec(weights.flatten()), along.to(weights.device))
        return _Point(v, weights)

    def _some(self, count: int) -> Tensor:
        """Choose points at random."""
        rows = torch.randperm(self.jacobian.n, generator=self._random)[:count]
        return rows.to(self.jacobian.device)

    def _noise(self, length: int) -> Tensor:
        noise = torch.randn(length, dtype=torch.float64, generator=self._random)
        return noise.to(self.jacobian.device, self.jacobian.dtype)

    def _deflation(self, count: int, rounded: torch.dtype | None) -> Deflation:
        """Compute the largest eigenvectors of a sample, in a Krylov space of twice the dimension."""
        part = self.jacobian.on(self._some(self.sample))
        stored = self.jacobian.dtype if rounded is None else torch.bfloat16  # entries may be too small for float16
        count = min(count, min(part.shape) // 2)
        # A random start has a part along every eigenvector; targets may be orthogonal to some of the largest.
        space = Krylov(part, self._noise(part.shape[0]).double(), stored=stored)
        size = 3 * count * part.shape[1] * stored.itemsize / 1e9
        with Bar(f"largest eigenvectors ({size:.2g} GB)", total=max(1, 2 * count)) as bar:
            while space.size < 2 * count and not space.complete:
                space.extend()
                bar.reach(space.size)
        found = space.project()
        values = found.sizes.square() / part.n
        count = min(count, int((values > 0).sum()) - 1) if len(values) else 0
        if count < 1:
            return Deflation(torch.zeros(0, part.shape[1], dtype=stored, device=part.device), values[:0], 0.0)
        vectors = torch.empty(count, part.shape[1], dtype=stored, device=part.device)
        for k in range(count):
            vectors[k] = space.combine(found.right[k])
        return Deflation(vectors, values[:count], float(values[count]))

    def _step_size(self) -> float:
        """One over the largest eigenvalue of a batch: that of all points, plus β/b for the noise of b single points.

        β is the largest eigenvalue of a single point.
        """
        whole = self._largest(self.jacobian.on(self._some(self.sample)), _POWERS)
        singles = [self._largest(self.jacobian.on(row[None]), 5) for row in self._some(_SINGLE)]
        total = whole + max(singles) / self.batch
        if not math.isfinite(total):
            raise ModelError("Products with the Jacobian are not finite; check the weights, or pass rounded=None.")
        return 1 / total if total > 0 else 0.0

    def _largest(self, part: Products, powers: int) -> float:
        """Estimate the largest eigenvalue of the deflated JᵀJ/n of some points by power iteration."""
        g, value = self.deflate(part.rmatvec(self._noise(part.shape[0]))), 0.0
        for _ in range(powers):
            size = float(g.double().norm())
            if size == 0:
                return 0.0
            g = self.deflate(part.rmatvec(part.matvec(g / size))) / part.n
            value = float(g.double().norm())
        return value

    def descend(
        self,
        now: _State,
        epochs: int,
        tolerance: float,
        watch: Callable[[int, Params], float | None] | None,
        save: Callable[[int, Callable[[], dict[str, Any]]], None] | None,
    ) -> tuple[_Point, float]:
        """Run the epochs, undo those that make the loss grow, and return the result with its relative gradient."""
        self._random.set_state(now.random)
        self.jacobian._sizes.update(now.sizes)
        first, begun, residual = float(self.right.square().mean()), now.at.clone(), None
        if first == 0:
            now.reached = 0.0
        with Bar("tangent model", total=epochs) as bar:
            while now.done < epochs and now.reached > tolerance and now.halved <= _HALVINGS:
                begun.copy_(now.at)
                loss = self._epoch(now) / first
                now.reached, residual = math.inf, None
                if not loss <= _LARGER * now.least:
                    self._undo(now, loss, first)
                    continue
                if loss > _LARGE * now.least:
                    now.ahead.copy_(now.at)
                    now.gain = 0.0
                if loss <= now.least:
                    now.best, begun, now.least, now.mark = begun, now.best, loss, now.time
                now.done += 1
                now.time += self.jacobian.n // self.batch * now.step
                if loss <= tolerance:
                    now.reached, residual = self._measured(now.at, first)
                bar.reach(now.done)
                if watch is not None:
                    _choose(now, watch(now.done, self._named(now.at.v.double())))
                if save is not None:
                    save(now.done, lambda: self.stored(now))
        if now.halved > _HALVINGS and not bool(now.best.v.any()):
            raise ModelError("No step size makes the loss fall; use tangent_solve, or pass rounded=None.")
        if now.chosen is not None:
            now.reached, residual = self._measured(now.chosen, first)
            return now.chosen, residual
        if residual is None:
            now.reached, residual = self._measured(now.at, first)
        if now.reached <= _LARGER * now.least:
            return now.at, residual
        now.time = now.mark  # the last epoch is undone, too
        now.reached, residual = self._measured(now.best, first)
        return now.best, residual

    def _undo(self, now: _State, loss: float, first: float) -> None:
        """Go back to where the best epoch began, and take half of the step size if it was too long.

        With a step size that is stable, the loss stays below that at the last beginning: an oscillator with friction
        does not gain energy. A loss that has fallen to half of it is progress.
        """
        missed = self.right - self.jacobian.matvec(now.best.v).double()
        measured = float(missed.square().mean()) / first
        if not (loss <= now.rest and measured <= now.rest / 2):
            now.halved, now.step = now.halved + 1, now.step / 2
        now.at.copy_(now.best)
        now.ahead.copy_(now.best)
        now.gain = 0.0
        now.least = now.rest = measured
        now.time = now.mark

    def _measured(self, point: _Point, first: float) -> tuple[float, float]:
        """Compute the loss at a displacement and the norm of its gradient, relative to those at v = 0."""
        missed, gradient = self._problem.left(point.v.double())
        loss = float(missed.square().mean()) / first if first > 0 else 0.0
        return loss, float(gradient.norm()) / self._steepest if self._steepest > 0 else 0.0

    @cached_property
    def _steepest(self) -> float:
        """The norm of the gradient at v = 0."""
        jacobian = self._problem.jacobian
        return float(jacobian.rmatvec(self.right.to(jacobian.dtype)).double().norm())

    def _epoch(self, now: _State) -> float:
        """Take one step per batch, and return the mean loss before each step; points that remain are left.

        v is where steps of the safe length lead, `ahead` where longer and longer ones do, of which the noise of batches
        would not let v take any. Between two steps, v is drawn to `ahead`, by as much as keeps both convergent.
        """
        n, k, b, total = self.jacobian.n, self.jacobian.k, self.batch, 0.0
        count, right = n // b, self.right.view(n, k)
        for rows in self._some(n)[: count * b].view(count, b):
            now.gain, pull = accelerated(now.gain, count, self._acceleration)
            now.at.lerp_(now.ahead, pull)
            part = self.jacobian.on(rows)
            missed = right[rows].flatten() - part.matvec(now.at.v).double()
            total += float(missed.square().mean())
            missed = missed.to(now.at.v.dtype)
            gradient, weights = self.deflate(part.rmatvec(missed)), missed.view(b, k)
            now.at.step_(gradient, rows, weights, now.step / b)
            now.ahead.step_(gradient, rows, weights, now.step * now.gain / b)
        return total / count


def _choose(now: _State, score: float | None) -> None:
    """Keep a displacement if its score is the largest one."""
    if score is not None and score > now.score:
        now.score = float(score)
        if now.chosen is None:
            now.chosen = now.at.clone()
        else:
            now.chosen.copy_(now.at)
