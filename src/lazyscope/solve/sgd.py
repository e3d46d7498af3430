"""The tangent model fitted by stochastic gradient descent without its largest eigenvalues.

The largest eigenvalues of the tangent kernel limit the step size, though they are fitted after a few steps. EigenPro
(Ma, Belkin, 2017) finds their eigenvectors from some of the data, and scales the gradient down along them.
Steps are then limited by single points, and a pass over the data, with a step for each batch, reduces the residual more
than an iteration of a Krylov method, which makes one step. Its authors' code is for kernels that can be evaluated; here
only products with the Jacobian are used. Steps are accelerated like those of Kaczmarz's method by Liu and Wright (2016,
"An accelerated randomized Kaczmarz algorithm"): t passes do about what t²/2 do without. The iteration is in
`accelerated`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lazyscope._typing import Inputs, Params
from lazyscope.ambient import without_autocast
from lazyscope.arguments import check_count, check_number
from lazyscope.errors import InputError
from lazyscope.flow.checkpoint import Checkpoint
from lazyscope.labels import Target
from lazyscope.model.base import Model
from lazyscope.model.inputs import check_samples, flatten
from lazyscope.solve.accelerated import ACCELERATION, Descent, State
from lazyscope.solve.identity import identity
from lazyscope.solve.tangent import Problem, TangentSolution, posed

_CHECKED = 50
"""The number of points on which both ways of computing products are compared, in full precision."""


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
        batch: The number of points of a step. Points that do not fill a batch are left out; they differ between epochs.
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
    _check_options(epochs, batch, every, sample, deflated, tolerance, acceleration, seed)
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
        run = Descent(problem, min(batch, n), deflated, sample, acceleration, torch.Generator().manual_seed(seed))
        now = run.fresh() if state is None else run.restored(state)
        end, residual = run.descend(now, epochs, tolerance, watch, None if stored is None else stored.save)
    pace = now.time / now.done if now.done else 0.0
    return TangentSolution(problem, end.v.double(), residual, now.done, now.reached <= tolerance, None, pace)


def _check_options(
    epochs: Any, batch: Any, every: Any, sample: Any, deflated: Any, tolerance: Any, acceleration: Any, seed: Any
) -> None:
    counts = {"epochs": epochs, "batch": batch, "every": every, "sample": 1 if sample is None else sample}
    for name, count in counts.items():
        check_count(name, count)
    check_count("deflated", deflated, least=0)
    check_number("tolerance", tolerance, least=0, below=1)
    check_number("acceleration", acceleration, least=1)
    check_count("seed", seed, least=0)
    if seed >= 2**64:
        raise InputError(f"seed={seed} has more than 64 bits; pass a smaller one.")


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
        if state.pop("name", None) != self._name or set(state) != {field.name for field in fields(State)}:
            raise InputError(
                f"The checkpoint {self._checkpoint.path} belongs to another model, to other data or to other options;"
                " pass another file, or delete it."
            )
        return state
