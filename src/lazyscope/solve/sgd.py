"""The tangent model fitted by stochastic gradient descent without its largest eigenvalues.

The largest eigenvalues of the tangent kernel limit the step size, though they are fitted after a few steps. EigenPro
(Ma, Belkin, 2017) finds their eigenvectors from some of the data, and scales the gradient down along them.
Steps are then limited by single points, and a pass over the data, with a step for each batch, reduces the residual more
than an iteration of a Krylov method, which makes one step. Its authors' code is for kernels that can be evaluated; here
only products with the Jacobian are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lazyscope._typing import Inputs, Params
from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError, ModelError
from lazyscope.labels import Target
from lazyscope.linalg.krylov import Krylov
from lazyscope.model.base import Model
from lazyscope.progress import Bar
from lazyscope.solve.products import Products
from lazyscope.solve.tangent import Problem, TangentSolution, posed

MOMENTUM = 0.9

_POWERS = 12
"""The number of products that find the largest eigenvalue of what is left."""

_SINGLE = 32
"""The number of single points whose largest eigenvalue is computed."""

_LARGER = 10.0
"""An epoch whose loss is this many times that of the best one is undone: the steps were too long."""

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
    rounded: torch.dtype | None = None,
    seed: int = 0,
    watch: Callable[[int, Params], None] | None = None,
) -> TangentSolution:
    """Fit the tangent model h(w₀) + Dh(w₀)v to targets by deflated stochastic gradient descent with momentum.

    It minimises the loss of `tangent_solve` without a ridge, from v = 0, so that it tends to the same minimiser of
    smallest norm if the model can fit the targets. For many points it needs a fraction of the passes over the data, and
    the memory of a few vectors instead of one for each pass; but it has no gradient flow, no other ridges and no bound
    on the error, and its result depends on the seed. Use it for fits to a few percent with tens of thousands of
    points or more, and `tangent_solve` for precise ones.

    The step size comes from the largest eigenvalue that is left, and from those of single points. It is halved, and the
    epoch repeated, if an epoch makes the loss grow.

    Args:
        model: A model or a module. It is not modified.
        x: The inputs of n points.
        y: The targets as a tensor, an array or a nested list, of the shape (n, k) of the outputs. Integers of shape
            (n,) are class indices and stand for one-hot rows.
        epochs: The largest number of passes over the data.
        tolerance: The mean loss during an epoch at which the iteration stops, relative to that at v = 0.
        centred: Whether to leave out h(w₀), so that Dh(w₀)v alone is fitted.
        batch: The number of points of a step.
        deflated: The number of eigenvectors along which the gradient is divided. Each takes the memory of the model.
        sample: The number of points from which they are computed, with twice as many products. `None` uses a tenth of
            the points, and at least 500.
        rounded: A dtype of lower precision in which products are computed, as in `tangent_solve`; eigenvectors are then
            stored in bfloat16. `None` uses the dtype of the model.
        seed: The seed of the samples and of the order of points.
        watch: A function that is called after each epoch with its number and the displacement v by parameter name.

    Returns:
        The solution, whose `iterations` are the epochs. It `converged` if the tolerance was reached.

    Raises:
        InputError: If the inputs or the targets are invalid, or a number is out of range.
        ModelError: If the model cannot be traced or differentiated, or no step size makes the loss fall.

    Example:
        >>> net, x = torch.nn.Linear(2, 1).double(), torch.eye(2, dtype=torch.float64)
        >>> solution = tangent_sgd(net, x, [[1.0], [-1.0]], epochs=100, tolerance=1e-8, deflated=1)
        >>> solution.converged, [round(value, 2) for value in solution.predict(x).flatten().tolist()]
        (True, [1.0, -1.0])
    """
    if min(epochs, batch, 1 if sample is None else sample) < 1 or deflated < 0 or not 0 <= tolerance < 1:
        raise InputError(
            f"epochs={epochs}, batch={batch} and sample={sample} must be positive, deflated={deflated} at least 0, and"
            f" tolerance={tolerance} at least 0 and below 1; pass such numbers."
        )
    if isinstance(x, DataLoader):
        raise InputError("Random batches cannot be taken from a DataLoader; pass the inputs, or use tangent_solve.")
    problem = posed(model, x, y, ridge=0.0, centred=centred, batch=batch, rounded=rounded)
    if problem.jacobian.batches.whole:
        raise problem.jacobian.batches.uneven()
    n = problem.jacobian.n
    sample = min(max(500, n // 10) if sample is None else sample, n)
    run = _Run(problem, min(batch, n), deflated, sample, torch.Generator().manual_seed(seed))
    found = run.descend(epochs, tolerance, watch)
    gradient = float(problem.left(found.v)[1].norm())
    first = float(problem.jacobian.rmatvec(run.right.to(problem.jacobian.dtype)).double().norm())
    residual = gradient / first if first > 0 else 0.0
    pace = found.time / found.epochs if found.epochs else 0.0
    return TangentSolution(problem, found.v, residual, found.epochs, found.met, None, pace)


@dataclass(frozen=True)
class _Found:
    v: Float[Tensor, " p"]
    epochs: int
    met: bool
    time: float
    """The time of the gradient flow, the sum of the step sizes that momentum repeats 1/(1 - m) times."""


class _Deflation:
    """The map g ↦ g - Σ (1 - τ/λ) (e·g) e over the eigenvectors e with eigenvalues λ > τ."""

    def __init__(self, vectors: Tensor, values: Tensor, floor: float) -> None:
        self._vectors, self._parts = vectors, (1 - floor / values).to(vectors)

    def __call__(self, g: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        if not len(self._vectors):
            return g
        along = self._parts * (self._vectors @ g.to(self._vectors.dtype))
        return g - (along @ self._vectors).to(g.dtype)


class _Run:
    """The problem with what the steps need: products of batches, the deflation, and the step size."""

    def __init__(self, problem: Problem, batch: int, deflated: int, sample: int, random: torch.Generator) -> None:
        self.jacobian, self.batch, self._random = problem.fast(), batch, random
        self._named, self.right = problem.jacobian.named, problem.target - problem.start
        self.sample = sample
        self.deflate = self._deflation(deflated, problem.rounded)
        self.step = self._step_size()

    def _some(self, count: int) -> Tensor:
        """Choose points at random."""
        rows = torch.randperm(self.jacobian.n, generator=self._random)[:count]
        return rows.to(self.jacobian.device)

    def _noise(self, length: int) -> Tensor:
        noise = torch.randn(length, dtype=torch.float64, generator=self._random)
        return noise.to(self.jacobian.device, self.jacobian.dtype)

    def _deflation(self, count: int, rounded: torch.dtype | None) -> _Deflation:
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
            return _Deflation(torch.zeros(0, part.shape[1], dtype=stored, device=part.device), values[:0], 0.0)
        vectors = torch.empty(count, part.shape[1], dtype=stored, device=part.device)
        for k in range(count):
            vectors[k] = space.combine(found.right[k])
        return _Deflation(vectors, values[:count], float(values[count]))

    def _step_size(self) -> float:
        """One over the largest eigenvalue that is left, plus the noise of single points that momentum amplifies.

        Gradient descent is stable up to twice that without noise. With batches of b points, the noise adds β/b, where β
        is the largest eigenvalue of a single point, and steps that momentum repeats 1/(1 - m) times add as many.
        """
        whole = self._largest(self.jacobian.on(self._some(self.sample)), _POWERS)
        singles = [self._largest(self.jacobian.on(row[None]), 5) for row in self._some(_SINGLE)]
        total = whole + max(singles) / (self.batch * (1 - MOMENTUM))
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

    def descend(self, epochs: int, tolerance: float, watch: Callable[[int, Params], None] | None) -> _Found:
        """Run the epochs, and undo those that make the loss grow."""
        v = torch.zeros(self.jacobian.shape[1], dtype=self.jacobian.dtype, device=self.jacobian.device)
        speed, best, first = torch.zeros_like(v), v.clone(), float(self.right.square().mean())
        least, done, halved, time, met = 1.0, 0, 0, 0.0, first == 0
        with Bar("tangent model", total=epochs) as bar:
            while done < epochs and not met:
                loss = self._epoch(v, speed) / first
                if not loss <= _LARGER * least:
                    halved, self.step = halved + 1, self.step / 2
                    v.copy_(best)
                    speed.zero_()
                    if halved > _HALVINGS:
                        raise ModelError("No step size makes the loss fall; use tangent_solve, or pass rounded=None.")
                    continue
                if loss <= least:
                    least = loss
                    best.copy_(v)
                done, met = done + 1, loss <= tolerance
                time += self.jacobian.n // self.batch * self.step / (1 - MOMENTUM)
                bar.reach(done)
                if watch is not None:
                    watch(done, self._named(v.double()))
        return _Found(v.double(), done, met, time)

    def _epoch(self, v: Tensor, speed: Tensor) -> float:
        """Take one step per batch in place, and return the mean loss before each step; points that remain are left."""
        n, k, b, total = self.jacobian.n, self.jacobian.k, self.batch, 0.0
        right = self.right.view(n, k)
        for rows in self._some(n)[: n - n % b].view(-1, b):
            part = self.jacobian.on(rows)
            missed = right[rows].flatten() - part.matvec(v).double()
            total += float(missed.square().mean())
            speed.mul_(MOMENTUM).add_(self.deflate(part.rmatvec(missed.to(v.dtype))), alpha=1 / b)
            v.add_(speed, alpha=self.step)
        return total / (n // b)
