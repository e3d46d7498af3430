"""Kernel ridge regression with a tangent kernel, or a kernel of infinite width, in memory or on disk.

Longer than 350 lines because all arguments are documented.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.ambient import without_autocast
from lazyscope.arguments import check_count, check_number
from lazyscope.errors import InputError
from lazyscope.labels import Target, as_target
from lazyscope.linalg.finite import check_finite
from lazyscope.linalg.solve import Solution, conjugate_gradients
from lazyscope.memory import Memory, parse_memory
from lazyscope.model.base import Model
from lazyscope.model.inputs import Samples
from lazyscope.model.jacobian import Batches
from lazyscope.model.targets import as_outputs, check_classes
from lazyscope.progress import Bar
from lazyscope.tangent.blocked import sums_on_workers
from lazyscope.tangent.kernel import Outputs, tangent_kernel
from lazyscope.tangent.operator import as_matrix
from lazyscope.tangent.source import Tangent
from lazyscope.tangent.tiles import ONE_AT_A_TIME, KernelTiles

if TYPE_CHECKING:
    import distributed

__all__ = ["Regression", "as_outputs", "kernel_regression"]


@without_autocast
def kernel_regression(
    kernel: Model | nn.Module | Tensor | KernelTiles,
    x: Inputs | None,
    y: Target,
    *,
    ridge: float | int = 0.0,
    outputs: Outputs = "trace",
    memory: Memory | None = None,
    tolerance: float | None = None,
    iterations: int | None = None,
) -> Regression:
    """Fit kernel ridge regression with the tangent kernel of a model, or with any kernel, in memory or from disk.

    The fit is f(x) = ȳ + K(x, X)c with (K + λsI)c = y - ȳ, where ȳ is the mean of each output over the points and
    s = tr(K)/N, with N the number of rows of K, makes the ridge λ independent of the number of points and of the scale
    of the kernel. Without a ridge it is the interpolant of smallest norm. In memory, the equation is solved by a
    Cholesky factorisation in float64, which needs one copy of the kernel in float64 (20 GB for 50 000 points). The
    rounding of a kernel in float32 may change the fit by up to 10 %, the more the smaller the ridge; a model in float64
    avoids this, and a fit that would be worse is refused. With a kernel on disk the equation is solved by conjugate
    gradients: each iteration reads the kernel once for all sets of targets, on the Dask client of the tiles if they
    have one.

    Compare `kernel_regression(net, …)` with `kernel_regression(Model(net).at(trained_weights), …)` to see what training
    has added to the kernel, and with the trained network to see what the kernel lacks.

    Args:
        kernel: A model or a module, whose tangent kernel at w₀ is computed; the kernel itself, as a tensor of shape
            (n, n) or (n, n, k, k); or a kernel on disk, from `tangent_kernel_to_zarr` or `limit_kernel_to_zarr`. A
            kernel of shape (n, n), or (n, n, 1, 1) on disk, acts on each output alike.
        x: The inputs of the n points. It may be `None` if `kernel` is a tensor.
        y: The targets as a tensor, an array or a nested list of numbers, of shape (n, k), or (n, k, m) for m sets of
            targets that are fitted at once. Integers of shape (n,) are class indices and stand for one-hot rows.
            Subtracting the same number from all of them, as in 0.9 and -0.1, does not change the classes that are
            predicted, because their mean is subtracted.
        ridge: The ridge λ, in units of s. A kernel on disk needs a positive one.
        outputs: Which kernel of a model to use: "trace" for the mean over its outputs, which acts on each output
            alike, "sum" for the kernel of their sum, or "full" for all pairs of outputs, as in the lazy limit.
        memory: The approximate number of bytes to use for the computation of a kernel in addition to the kernel
            itself, as a number or a string such as "2GB".
        tolerance: The tolerance on the relative residual, for a kernel on disk, as in
            `lazyscope.linalg.conjugate_gradients`.
        iterations: The maximum number of iterations, for a kernel on disk. `None` uses the default of
            `lazyscope.linalg.conjugate_gradients`.

    Returns:
        The fit, which predicts at new points. It is returned even if conjugate gradients do not converge;
        `Regression.solution` reports this.

    Raises:
        InputError: If the targets do not match the kernel or contain NaN, the ridge is out of range, or the kernel is
            empty, not real, not finite or zero, or has negative eigenvalues that the ridge does not outweigh.

    Example:
        >>> net, x = torch.nn.Linear(3, 1), torch.eye(3)
        >>> fit = kernel_regression(net, x, [[1.0], [0.0], [-1.0]], ridge=1e-8)
        >>> [round(value, 4) for value in fit.predict(x).flatten().abs().tolist()]
        [1.0, 0.0, 1.0]
    """
    _check_numbers(ridge, tolerance, iterations)
    on_disk = isinstance(kernel, KernelTiles)
    if not 0 <= ridge < float("inf") or (on_disk and ridge == 0):
        raise InputError(f"The ridge is {ridge}; pass a {'positive' if on_disk else 'non-negative'}, finite number.")
    model = None
    if isinstance(kernel, KernelTiles):
        n, _, own, _ = kernel.shape
        k = own if own > 1 else _columns(y)
        sets = as_outputs(y, n, k, sets=True).to("cpu")
        trace, rows = kernel.trace, n * own
    else:
        if not isinstance(kernel, Tensor):
            if not len(Samples(_given(x))):
                raise InputError("There are no points to fit; pass at least one.")
            model = Model.of(kernel)
            kernel = tangent_kernel(model, _given(x), outputs=outputs, memory=memory)
        _check_precision(kernel)
        kernel = _checked(kernel)
        dense = _matrix(kernel)
        n, rows = len(kernel), len(dense)
        k = _outputs(model, x, y, kernel)
        sets = as_outputs(y, n, k, sets=True).to(dense.device)
        trace = float(dense.diagonal().sum(dtype=torch.float64))
    if not 0 < trace < math.inf:
        raise InputError(
            f"The trace of the kernel is {trace:g}, and that of a kernel that can fit anything is positive; check the"
            " kernel, or the model that it comes from."
        )
    mean = sets.reshape(n, k, -1).mean(0)
    centred = (sets.reshape(n, k, -1) - mean).reshape(rows, -1)
    shift = float(ridge) * trace / rows
    if isinstance(kernel, KernelTiles):
        solution = conjugate_gradients(kernel.matrix, centred, shift=shift, tolerance=tolerance, iterations=iterations)
    else:
        solution = _solve(dense, centred, shift)
        _check_resolved(dense, centred, shift, solution)
    return Regression(kernel, solution, mean, float(ridge), sets.ndim == 2, shift, outputs, model, x)


def _check_numbers(ridge: Any, tolerance: Any, iterations: Any) -> None:
    check_number("ridge", ridge)
    if tolerance is not None:
        check_number("tolerance", tolerance, least=0, below=1)
    if iterations is not None:
        check_count("iterations", iterations)


def _check_precision(kernel: Any) -> None:
    if isinstance(kernel, Tensor) and kernel.dtype in (torch.float16, torch.bfloat16):
        raise InputError(
            f"The kernel is {kernel.dtype}, too rough to be inverted; pass the model and its inputs in float32, such as"
            " net.float() and x.float(), or such a kernel."
        )


_MISSED = 1e-3
"""The relative residual from which a fit in float32 must be due to a kernel that cannot fit the targets."""


def _check_resolved(
    kernel: Float[Tensor, "N N"], right: Float64[Tensor, "N m"], shift: float, solution: Solution
) -> None:
    """Refuse a fit without directions whose eigenvalue is small, but larger than the rounding of the kernel.

    The residual r lies in the directions that are left out. If their eigenvalues are rounding, so is rᵀKr/rᵀr.
    """
    if kernel.dtype == torch.float64 or float(solution.residuals.max()) <= _MISSED:
        return
    missed = right - torch.cat([_rows(kernel, part) @ solution.x for part in _parts(len(kernel))]) - shift * solution.x
    along = sum((missed[part] * (_rows(kernel, part) @ missed)).sum(0) for part in _parts(len(kernel)))
    eigenvalues = (along / missed.square().sum(0))[solution.residuals > _MISSED]
    rounding = 4 * math.sqrt(len(kernel)) * torch.finfo(kernel.dtype).eps * float(kernel.abs().max())
    if bool((eigenvalues > rounding).any()):
        raise InputError(
            f"The targets have parts along eigenvalues of the kernel near {float(eigenvalues.max()):.2g}, too small for"
            f" an exact fit in {str(kernel.dtype).removeprefix('torch.')}; pass the model and its inputs in float64, or"
            " a larger ridge."
        )


def _given(x: Inputs | None) -> Inputs:
    if x is None:
        raise InputError("Without the inputs, the kernel of a model cannot be computed; pass them as `x`.")
    return x


def _checked(kernel: Tensor) -> Tensor:
    """Refuse a kernel that is not one of finite real numbers, and detach it."""
    if not kernel.is_floating_point() or kernel.numel() == 0:
        raise InputError(
            f"A kernel of shape {tuple(kernel.shape)} and {kernel.dtype} cannot be fitted; pass one of floats with at"
            " least one point."
        )
    kernel = kernel.detach()
    # The sum in float64 is not finite if an entry is not; only if it is not finite are the entries examined, in parts.
    if not math.isfinite(float(kernel.sum(dtype=torch.float64))) and not all(
        bool(kernel[part].isfinite().all()) for part in _parts(len(kernel))
    ):
        raise InputError("The kernel contains NaN or infinite values; check the points or the model it comes from.")
    return kernel


def _matrix(kernel: Tensor) -> Float[Tensor, "N N"]:
    """Return a symmetric kernel as a matrix, whose rows are the points, or the outputs of all points."""
    if kernel.ndim not in (2, 4) or kernel.shape[0] != kernel.shape[1] or kernel.shape[2:3] != kernel.shape[3:]:
        raise InputError(
            f"A kernel of shape {tuple(kernel.shape)} is not one of n points with themselves; pass a tensor of shape"
            " (n, n) or (n, n, k, k)."
        )
    matrix = kernel if kernel.ndim == 2 else as_matrix(kernel)
    largest = max(float(matrix[part].abs().max()) for part in _parts(len(matrix)))
    apart = max(float((matrix[part] - matrix[:, part].T).abs().max()) for part in _parts(len(matrix)))
    # Products in lower precision than that of the dtype, such as TF32, may give the halves other roundings.
    if apart > 10 * math.sqrt(torch.finfo(matrix.dtype).eps) * largest:
        raise InputError(
            f"The kernel is not symmetric, since entries differ by up to {apart:.3g} from those across the diagonal;"
            " pass the kernel of the points with themselves."
        )
    return matrix


def _outputs(model: Model | None, x: Inputs | None, y: Target, kernel: Tensor) -> int:
    """Count the outputs of the model, or the outputs that the targets have for a kernel that acts on each alike."""
    if kernel.ndim == 4:
        return kernel.shape[2]
    if model is not None:
        with torch.no_grad():
            return model(Samples(_given(x)).rows(slice(1))).numel()
    return _columns(y)


def _columns(y: Target) -> int:
    """Count the outputs that the targets have."""
    target = as_target(y, torch.empty(0, dtype=torch.float64, device="cpu"))
    if target.ndim > 1:
        return target.shape[1]
    return 1 if target.is_floating_point() or target.numel() == 0 else int(target.max()) + 1


_PART = 2048
"""The number of points whose rows of a kernel are computed or converted at once."""

_AGREES = 1e-6
"""The relative residual up to which a Cholesky factorisation of a kernel without a ridge is trusted."""

_MOVES = 0.1
"""The relative change of the coefficients under rounding of the kernel, up to which the factorisation is trusted."""


def _solve(kernel: Float[Tensor, "N N"], right: Float64[Tensor, "N m"], shift: float) -> Solution:
    """Solve (K + shift)c = b in float64; without a shift, for the solution of smallest norm."""
    norms = right.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)

    def residual(found: Float64[Tensor, "N m"]) -> Float64[Tensor, "m"]:
        """Compute the relative residual block by block, without a second copy of the kernel."""
        parts = (_rows(kernel, part) @ found for part in _parts(len(kernel)))
        result: Tensor = (right - torch.cat(list(parts)) - shift * found).norm(dim=0) / norms
        return result

    factor = _symmetric(kernel, shift)
    torch.linalg.cholesky_ex(factor, out=(factor, failed := torch.empty(0, dtype=torch.int32, device=factor.device)))
    if not bool(failed):
        found = torch.cholesky_solve(right, factor)
        left = residual(found)
        if float(left.max()) <= _AGREES and _is_stable(kernel, factor, found):
            return Solution(found, left, 1, True)
    del factor
    values, vectors = torch.linalg.eigh(_symmetric(kernel, shift))
    precision, largest = torch.finfo(kernel.dtype).eps, float(values[-1].abs())
    # Kernels from products in lower precision, such as TF32, are less exact than their dtype.
    if float(values[0]) < -max(math.sqrt(precision), len(values) * precision) * largest:
        raise InputError(
            f"The kernel has the eigenvalue {float(values[0]) - shift:.3g}, below zero by more than rounding, so that"
            " it is not one of points with themselves; check it, or pass a ridge that outweighs it."
        )
    noise = len(values) * precision * largest
    # Coefficients along eigenvectors whose eigenvalue is rounding add nothing to Kc but rounding.
    inverse = torch.where(values - shift > noise, 1 / values, 0)
    found = vectors @ (inverse[:, None] * (vectors.T @ right))
    return Solution(found, residual(found), 1, True)


def _is_stable(kernel: Float[Tensor, "N N"], factor: Float64[Tensor, "N N"], found: Float64[Tensor, "N m"]) -> bool:
    """Whether rounding of the kernel changes its solution little, by a random rounding E: K⁻¹Ec against c.

    A singular kernel in float32 has eigenvalues that are rounding. If they are positive, it can be factorised in
    float64, and the solution interpolates the targets by large coefficients that mean nothing.
    """
    random, precision = torch.Generator(found.device).manual_seed(0), torch.finfo(kernel.dtype).eps
    moved = torch.zeros_like(found)
    for part in _parts(len(kernel)):
        rows = _rows(kernel, part)[:, part.start :]  # E is symmetric, as the kernel is
        error = precision * rows * torch.randn(rows.shape, generator=random, dtype=rows.dtype, device=rows.device)
        own = error.shape[0]
        error[:, :own] = (error[:, :own] + error[:, :own].T) / 2
        moved[part] += error @ found[part.start :]
        moved[part.stop :] += error[:, own:].T @ found[part]
    change = torch.cholesky_solve(moved, factor)
    return bool((change.norm(dim=0) <= _MOVES * found.norm(dim=0)).all())


def _parts(n: int) -> list[slice]:
    return [slice(start, min(start + _PART, n)) for start in range(0, n, _PART)]


def _rows(kernel: Float[Tensor, "N N"], part: slice) -> Float64[Tensor, "rows N"]:
    """Some rows of (K + Kᵀ)/2 in float64."""
    return (kernel[part].double() + kernel[:, part].T) / 2


def _symmetric(kernel: Float[Tensor, "N N"], shift: float) -> Float64[Tensor, "N N"]:
    """(K + Kᵀ)/2 + shift in float64, with no other array of this size."""
    wide = kernel.new_empty(kernel.shape, dtype=torch.float64)
    for part in _parts(len(kernel)):
        wide[part] = _rows(kernel, part)
    wide.diagonal().add_(shift)
    return wide


@final
@dataclass(frozen=True)
class Regression:
    """A fit of kernel ridge regression, as returned by `kernel_regression`."""

    kernel: Tensor | KernelTiles
    """The kernel of the points, in memory or on disk."""
    solution: Solution
    """The coefficients c, with the residual of their equation and whether conjugate gradients converged."""
    mean: Float64[Tensor, "k sets"]
    """The mean ȳ of each output, for each set of targets."""
    ridge: float
    """The ridge λ, in units of tr(K)/N."""
    single: bool
    """Whether there is one set of targets, so that predictions have shape (n', k)."""
    _shift: float
    _outputs: Outputs
    _model: Model | None
    _x: Inputs | None

    @without_autocast
    def predict(
        self,
        new: Inputs,
        *,
        model: Model | nn.Module | None = None,
        memory: Memory | None = None,
        client: distributed.Client | None = None,
    ) -> Tensor:
        """Evaluate the fit at new points.

        The kernel K(new, X) is computed and multiplied in parts, and is not stored.

        Args:
            new: The inputs of n' new points. If the fit was made from a kernel as a tensor, or from one on disk and
                there is no `model`, pass the kernel between the new points and those of the fit, of shape (n', n) or
                (n', n, k, k).
            model: The model that a tangent kernel on disk was computed from. It is not needed otherwise.
            memory: The approximate number of bytes to use for one part, as a number or a string such as "2GB".
            client: A Dask client whose workers compute the parts for a kernel on disk. `None` computes them in this
                process.

        Returns:
            The predictions in float64, of shape (n', k), or (n', k, m) for m sets of targets.

        Raises:
            InputError: If a kernel on disk was computed from another model or from other points.
        """
        if isinstance(self.kernel, KernelTiles) and not (model is None and self._is_cross(new)):
            product = self._from_disk(self.kernel, new, model, memory, client)
        elif self._model is None:
            product = self._times(self._cross(new))
        else:
            parts = Batches(new, _PART)
            kernels = (
                tangent_kernel(self._model, part, self._x, outputs=self._outputs, memory=memory) for part in parts
            )
            product = torch.cat([self._times(each) for each in kernels])
        predicted = product.reshape(-1, *self.mean.shape) + self.mean
        return predicted[..., 0] if self.single else predicted

    def accuracy(
        self,
        new: Inputs,
        labels: Target,
        *,
        model: Model | nn.Module | None = None,
        memory: Memory | None = None,
        client: distributed.Client | None = None,
    ) -> float:
        """Compute the fraction of new points whose largest prediction is that of their class.

        Args:
            new: The new points, as in `predict`.
            labels: The class indices of the new points, of shape (n',).
            model: The model that a tangent kernel on disk was computed from, as in `predict`.
            memory: The approximate number of bytes to use for one part, as in `predict`.
            client: A Dask client, as in `predict`.

        Returns:
            The accuracy, between 0 and 1.

        Raises:
            InputError: If the labels are not class indices of the new points, or there are several sets of targets.
        """
        predicted = self.predict(new, model=model, memory=memory, client=client)
        classes = as_target(labels, torch.empty(0, dtype=torch.float64, device="cpu"))
        if not self.single or classes.is_floating_point() or classes.shape != predicted.shape[:1]:
            raise InputError(
                f"Accuracies need one set of targets and {len(predicted)} class indices, and the labels have shape"
                f" {tuple(classes.shape)}; pass integers of shape ({len(predicted)},)."
            )
        check_classes(classes, predicted.shape[1])
        return float((predicted.argmax(1) == classes.to(predicted.device)).double().mean())

    def _is_cross(self, kernel: Any) -> bool:
        """Whether this is a kernel between new points and those of the fit."""
        n, _, *outputs = self.kernel.shape
        shapes = {(n, *outputs), (n,)} if outputs == [1, 1] else {(n, *outputs)}
        return isinstance(kernel, Tensor) and tuple(kernel.shape[1:]) in shapes

    def _cross(self, kernel: Any) -> Tensor:
        own = self.kernel
        if not self._is_cross(kernel):
            raise InputError(
                "The fit was made from a kernel, not from a model; pass the kernel between the new points and those of"
                f" the fit, of shape (n', {', '.join(map(str, own.shape[1:]))})."
            )
        check_finite(kernel, "The kernel between the new points and those of the fit")
        result: Tensor = kernel
        return result

    def _times(self, kernel: Tensor) -> Float64[Tensor, "rows k_sets"]:
        """Multiply a kernel with the coefficients, in float64: the terms of the sum cancel."""
        matrix = as_matrix(kernel) if kernel.ndim == 4 else kernel
        x = self.solution.x.reshape(matrix.shape[1], -1)
        return torch.cat([matrix[part].to(x.device).double() @ x for part in _parts(len(matrix)) or [slice(0)]])

    def _from_disk(
        self,
        tiles: KernelTiles,
        new: Inputs,
        model: Model | nn.Module | None,
        memory: Memory | None,
        client: distributed.Client | None,
    ) -> Tensor:
        if model is None:
            raise InputError(
                "A kernel on disk does not hold its model; pass the model that it was computed from, or the kernel"
                " between the new points and those of the fit."
            )
        bound, model = parse_memory(memory), Model.of(model)
        seen = Batches(_given(self._x), tiles.tile)
        if other := tiles.differences(Tangent(model).recipe(seen)):
            raise InputError(f"The kernel was computed from other {' and '.join(other)}; pass those of {tiles.path}.")
        fresh = Batches(new, tiles.tile).even()
        cross = Cross(model, seen, fresh, self.solution.x, bound)
        blocks, places = range(-(-fresh.n // fresh.size)), range(tiles.count)
        if client is not None:
            rows = sums_on_workers(client, cross, [[methodcaller("product", i, j) for j in places] for i in blocks])
            return torch.cat(rows)
        rows = []
        with Bar("predictions", len(blocks) * len(places)) as bar:
            for i in blocks:
                parts = []
                for j in places:
                    parts.append(cross.product(i, j))
                    bar.advance()
                rows.append(torch.stack(parts).sum(0))
        return torch.cat(rows)

    @property
    def leave_one_out(self) -> Float64[Tensor, "n k *sets"]:
        """The prediction at each point of the fit without this point, with the mean ȳ of all points, in closed form."""
        inverse, c = self._inverse(), self.solution.x
        n, (k, sets) = len(self._dense()), self.mean.shape
        if len(inverse) > n:  # all outputs of a point are left out together
            own = inverse.view(n, k, n, k).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            missed = torch.linalg.solve(own, c.reshape(n, k, sets))
        else:
            missed = c.reshape(n, k, sets) / inverse.diagonal()[:, None, None]
        fitted: Tensor = self._targets() - missed
        return fitted[..., 0] if self.single else fitted

    @property
    def gcv(self) -> float:
        """Generalised cross-validation: the training loss (1/2n)Σ|f(xᵢ) - yᵢ|² divided by (1 - tr(K(K + λsI)⁻¹)/N)²."""
        inverse = self._inverse()
        mean = float(inverse.diagonal().mean())
        return float(self.solution.x.square().sum()) / (2 * len(self._dense())) / mean**2

    def _dense(self) -> Tensor:
        if not isinstance(self.kernel, Tensor):
            raise InputError("Leaving points out needs the kernel in memory; pass the model instead of the tiles.")
        return self.kernel

    def _inverse(self) -> Float64[Tensor, "N N"]:
        _check_exact(self)
        kernel = _matrix(self._dense())
        factor, failed = torch.linalg.cholesky_ex(_symmetric(kernel, self._shift))
        random = torch.Generator("cpu").manual_seed(0)
        probes = torch.randn(len(kernel), 4, generator=random, dtype=factor.dtype, device="cpu")
        if bool(failed) or not _is_stable(kernel, factor, torch.cholesky_solve(probes.to(factor.device), factor)):
            raise InputError(
                "The kernel with its ridge is singular up to rounding, so that no point can be left out; pass a"
                f" {'larger ' if self.ridge else ''}ridge."
            )
        return torch.cholesky_inverse(factor)

    def _targets(self) -> Float64[Tensor, "n k sets"]:
        """Recover the targets from the equation that the coefficients solve."""
        kernel = _matrix(self._dense())
        c = self.solution.x.reshape(len(kernel), -1)
        centred = torch.cat([_rows(kernel, part) @ c for part in _parts(len(kernel))]) + self._shift * c
        targets: Tensor = centred.reshape(len(self._dense()), *self.mean.shape) + self.mean
        return targets


def _check_exact(fit: Regression) -> None:
    """Refuse to leave out points of a fit that leaves out directions, as its coefficients are not (K + s)⁻¹y."""
    if isinstance(fit.kernel, Tensor) and float(fit.solution.residuals.max()) > _AGREES:
        raise InputError(
            "The kernel with its ridge is singular up to rounding, so that no point can be left out; pass a"
            f" {'larger ' if fit.ridge else ''}ridge."
        )


@dataclass(frozen=True)
class Cross:
    """The kernel between new points and the points of the fit, multiplied by the coefficients."""

    model: Model
    seen: Batches
    fresh: Batches
    coefficients: Float64[Tensor, "N sets"]
    memory: int | None

    def product(self, i: int, j: int) -> Float64[Tensor, "rows sets"]:
        """K(new_i, X_j)c_j for one block of new points and one tile of the points of the fit."""
        new, known = (slice(b * of.size, (b + 1) * of.size) for b, of in ((i, self.fresh), (j, self.seen)))
        with ONE_AT_A_TIME:
            kernel = tangent_kernel(self.model, self.fresh[new], self.seen[known], memory=self.memory)
        k = kernel.shape[2]
        # Use float64: the coefficients are of order 1/λ, and the terms of the sum cancel.
        return as_matrix(kernel.cpu()).double() @ self.coefficients[k * known.start : k * known.stop]
