"""The iteration of `tangent_sgd`: accelerated steps of batches, without the largest eigenvalues."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lazyscope._typing import Params
from lazyscope.errors import ModelError
from lazyscope.linalg.krylov import Krylov
from lazyscope.progress import Bar
from lazyscope.solve.deflation import Deflation
from lazyscope.solve.point import Point
from lazyscope.solve.products import Products
from lazyscope.solve.tangent import Problem

ACCELERATION = 4.0
"""How much faster the acceleration is than that for batches chosen at random, which allows for more noise than batches
have that are shuffled and used once a pass. On a tangent kernel of CIFAR-10, 10 still converges, and 40 diverges; on
random problems, 6 overshoots."""

_POWERS = 12
"""The number of products that find the largest eigenvalue of what is left."""

_SINGLE = 32
"""The number of single points whose largest eigenvalue is computed."""

_LARGE = 2.0
"""After an epoch whose loss is this many times that of the best one, acceleration begins anew: either it has overshot,
or the targets cannot be fitted, and it enlarges the noise of batches."""

_LARGER = 10.0
"""An epoch whose loss is this many times that of the best one is undone: the steps were too long, or acceleration has
overshot."""

_HALVINGS = 20
"""How often the step size is halved before the iteration gives up."""


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
class State:
    """The iteration between two epochs. Losses are relative to that at v = 0."""

    at: Point
    ahead: Point
    """The displacement of long steps, to which v is drawn before each step."""
    best: Point
    """Where the epoch with the least loss began."""
    random: Tensor
    """The state of the random generator."""
    sizes: dict[str, float]
    """The factors of products in low precision."""
    step: float
    chosen: Point | None = None
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


class Descent:
    """A problem with what the steps need: products of batches, the deflation, and the step size.

    Args:
        problem: The problem, without a ridge.
        batch: The number of points of a step.
        deflated: The number of eigenvectors that are deflated.
        sample: The number of points from which they are computed.
        acceleration: How fast steps become longer.
        random: The generator of samples and of the order of points.
    """

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

    def fresh(self) -> State:
        """Begin at v = 0."""
        v = torch.zeros(self.jacobian.shape[1], dtype=self.jacobian.dtype, device=self.jacobian.device)
        zero, step = Point(v, v.new_zeros(self.jacobian.n, self.jacobian.k)), self._step_size()
        return State(zero, zero.clone(), zero.clone(), self._random.get_state(), self.jacobian._sizes, step)

    def stored(self, now: State) -> dict[str, Any]:
        """Return what `restored` needs: of a displacement, the weights and its parts along the eigenvectors.

        Args:
            now: The iteration.

        Returns:
            Its fields by name.
        """
        state = {field.name: getattr(now, field.name) for field in fields(now)}
        points = {name: point for name, point in state.items() if isinstance(point, Point)}
        random = {"random": self._random.get_state(), "sizes": self.jacobian._sizes}
        return {**state, **{n: [p.weights, self.deflate.along(p.v)] for n, p in points.items()}, **random}

    def restored(self, state: dict[str, Any]) -> State:
        """Compute the displacements of a stored iteration again.

        Args:
            state: What `stored` has returned.

        Returns:
            The iteration.
        """
        self.jacobian._sizes.update(state["sizes"])
        points = {name: self._point(*pair) for name, pair in state.items() if isinstance(pair, list)}
        return State(**{**state, **points})

    def _point(self, weights: Tensor, along: Tensor) -> Point:
        weights = weights.to(self.jacobian.device)
        v = self.deflate.replaced(self.jacobian.rmatvec(weights.flatten()), along.to(weights.device))
        return Point(v, weights)

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
        now: State,
        epochs: int,
        tolerance: float,
        watch: Callable[[int, Params], float | None] | None,
        save: Callable[[int, Callable[[], dict[str, Any]]], None] | None,
    ) -> tuple[Point, float]:
        """Run the epochs, and undo those that make the loss grow.

        Args:
            now: The iteration, which is changed.
            epochs: The largest number of epochs.
            tolerance: The loss at which it ends, relative to that at v = 0.
            watch: A function of the number of an epoch and the displacement after it, which may return a score.
            save: A function that is called after an epoch with its number and a function that returns the state.

        Returns:
            The result, and the norm of its gradient relative to that at v = 0.
        """
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

    def _undo(self, now: State, loss: float, first: float) -> None:
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

    def _measured(self, point: Point, first: float) -> tuple[float, float]:
        """Compute the loss at a displacement and the norm of its gradient, relative to those at v = 0."""
        missed, gradient = self._problem.left(point.v.double())
        loss = float(missed.square().mean()) / first if first > 0 else 0.0
        return loss, float(gradient.norm()) / self._steepest if self._steepest > 0 else 0.0

    @cached_property
    def _steepest(self) -> float:
        """The norm of the gradient at v = 0."""
        jacobian = self._problem.jacobian
        return float(jacobian.rmatvec(self.right.to(jacobian.dtype)).double().norm())

    def _epoch(self, now: State) -> float:
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


def _choose(now: State, score: float | None) -> None:
    """Keep a displacement if its score is the largest one."""
    if score is not None and score > now.score:
        now.score = float(score)
        if now.chosen is None:
            now.chosen = now.at.clone()
        else:
            now.chosen.copy_(now.at)
