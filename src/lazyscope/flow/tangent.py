"""Equation (5), the gradient flow of the tangent model y_0 + Dh(w₀)v, in function space."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import singledispatch

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError
from lazyscope.flow.matrix_free import matrix_free_flow
from lazyscope.flow.objective import Objective, Times, check_times, check_tolerances, flat
from lazyscope.flow.ode import Integration
from lazyscope.flow.trajectory import Observer, Progress, Recording, Trajectory
from lazyscope.labels import Target, as_target
from lazyscope.linalg.eigen import COPIES
from lazyscope.linalg.finite import check_finite
from lazyscope.loss import Loss, Square, check_loss
from lazyscope.memory import Memory, check_fits
from lazyscope.model.base import Model, ModelCoordinates, studied
from lazyscope.model.coordinates import Alpha, Studied
from lazyscope.model.ensemble import Ensemble
from lazyscope.model.inputs import Samples, check_samples
from lazyscope.model.targets import as_outputs
from lazyscope.progress import Bar, quiet, track


@without_autocast
def tangent_flow(
    model: Studied | nn.Module,
    loss: Loss,
    x: Inputs,
    y: Target,
    *,
    times: Times,
    alpha: Alpha = 1.0,
    centred: bool = False,
    rtol: Number = 1e-6,
    atol: Number = 1e-9,
    tolerance: Number = 1e-5,
    observe: Observer | None = None,
    keep_params: bool = False,
    progress: Progress | None = None,
    matrix_free: bool = False,
    batch: int = 128,
    memory: Memory | None = None,
) -> Trajectory:
    """Compute the gradient flow of the tangent model, equation (5), at the given times.

    The flow is w̄' = -(1/α) Dh(w₀)ᵀ∇R(αh̄(w̄)). With the tangent kernel K = Dh(w₀)Dh(w₀)ᵀ and v = Dh(w₀)ᵀc, it is
    c' = -∇R(y) with y = y_0 + Kc, in the Euclidean geometry of the N outputs. For the square loss, the solution is in
    closed form: K is diagonalised once, in O(N³), and any time can be evaluated, including t = ∞. At late times, small
    eigenvalues matter, which K holds as squares: if rounding would show, the singular values of Dh(w₀) are computed,
    which needs its N × p entries in memory. For other losses, the ODE is integrated numerically. The scale α only
    enters through y_0 = αh(w₀) and the displacement ‖v‖/α. With `matrix_free`, the kernel is never formed, so that all
    of CIFAR-10 can be used: all times come from one Krylov space, whose products cost about as much as an epoch of
    training each.

    Args:
        model: The module, `Model` or other model with tangent coordinates to train. It is not modified.
        loss: The loss, one of `lazyscope.loss`.
        x: The inputs of n samples.
        y: The targets in the form that the loss takes, as a tensor, an array or a nested list. For the square loss,
            integers of shape (n,) are class indices and stand for one-hot rows if the model has several outputs.
        times: The times to record, non-negative and increasing, as a tensor, an array or a list. For the square loss,
            the last one may be ∞.
        alpha: The scale α, one number or one for each member of a batch; `math.inf` is its limit.
        centred: Whether to subtract h(w₀) from the outputs, so that they start at 0.
        rtol: The relative tolerance of a step, for losses that need an ODE solver. With `matrix_free`, the outputs at
            all times are computed within rtol‖y* - y_0‖, where y* are the targets, apart from the rounding of products.
        atol: The absolute tolerance of a step, for losses that need an ODE solver.
        tolerance: A member has converged when ‖v'‖ is at most `tolerance` times its initial value.
        observe: A function that is called with v at the recorded times and returns measurements, which are stored in
            `Trajectory.observed`.
        keep_params: Whether to store v at the recorded times.
        progress: A callback that receives the completed fraction, from 0 to 1, at the recorded times. If it is given,
            no progress bar is shown.
        matrix_free: Whether to compute the flow without the kernel, for the square loss and one model. Late times need
            many products. For t = ∞, the space grows until it contains the limit or the targets are fitted within
            `rtol`; use `tangent_solve` if that takes too much memory.
        batch: The number of points that are processed at a time, with `matrix_free`.
        memory: The memory for the vectors of the Krylov space and some fifteen more, with `matrix_free`, as a number of
            bytes or a string such as "20GB". `None` uses half of the free memory for the space, 4 GiB at most on a CPU
            and 64 GiB at most on a GPU.

    Returns:
        The trajectory with its status.

    Raises:
        InputError: If the data, the targets or a number are invalid, or the kernel does not fit into memory.
        ModelError: If the model cannot be traced or differentiated, or the outputs or the loss overflow at the start.
        ScaleError: If α is not positive.

    Example:
        >>> from lazyscope.loss import Square
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> path = tangent_flow(torch.nn.Linear(1, 1), Square(), x, 3 * x, times=[0.0, 1.0, math.inf])
        >>> path.status, float(path.loss[-1]) < 1e-6
        (<Status.CONVERGED: 'converged'>, True)
    """
    check_loss(loss)
    check_tolerances(rtol, atol, tolerance)
    times = check_times(times, infinity=True)
    model = studied(model)
    if isinstance(loss, Square):
        y = _as_numbers(model, x, y)
    if matrix_free:
        check_samples(x)
        with nullcontext() if progress is None else quiet():
            return matrix_free_flow(
                model,
                loss,
                x,
                y,
                times,
                alpha=alpha,
                centred=centred,
                rtol=float(rtol),
                tolerance=float(tolerance),
                observe=observe,
                keep_params=keep_params,
                progress=progress,
                batch=batch,
                memory=memory,
            )
    objective = Objective.of(model, loss, x, y, alpha, centred)
    recording = Recording(objective, observe, keep_params)
    _check_fits(objective, loss)
    with nullcontext() if progress is None else quiet():
        kernel = check_finite(objective.coordinates.kernel().detach(), "The tangent kernel")
        path = TangentPath(objective, kernel, recording, progress)
        return _follow(loss, path, times, rtol, atol, tolerance)


def _as_numbers(model: Studied, x: Inputs, y: Target) -> Target:
    """Convert targets of shape (n,) to the shape of the outputs of a model, as `tangent_solve` does.

    Class indices stand for one-hot rows if there are several outputs; for one output, its dimension may be left out.
    """
    target = as_target(y, torch.empty(0, dtype=torch.float64, device="cpu"))
    if target.is_complex():
        raise InputError(f"The targets are {target.dtype}, and outputs are real; pass real and imaginary parts.")
    member = model.models[0] if isinstance(model, Ensemble) and not model.own_inputs else model
    if not isinstance(member, Model) or target.ndim not in (1, 2) or not len(target) or target.shape[1:].numel() != 1:
        return y
    check_samples(x)
    samples = Samples(x)
    with torch.no_grad():
        first = member(samples.rows(slice(1)))
    shape = tuple(first.shape[1:])
    classes = target.ndim == 1 and not target.is_floating_point() and len(shape) == 1
    if len(target) != len(samples) or not (math.prod(shape) == 1 or classes):
        return y
    return (
        as_outputs(y, len(target), math.prod(shape))
        .view(-1, *shape)
        .to(y.device if isinstance(y, Tensor) else first.device)
    )


def _check_fits(objective: Objective, loss: Loss) -> None:
    """Raise if the kernel, with the eigenvectors that the closed form needs, does not fit into memory."""
    target, members = objective.risk.target, math.prod(objective.coordinates.batch)
    size = math.prod(objective.risk.shape)
    check_fits(
        (size, size) if members == 1 else (members, size, size),
        target.dtype,
        target.device,
        copies=1 + COPIES * 8 / target.element_size() if isinstance(loss, Square) else 1,
        instead="use fewer points, or pass matrix_free=True if the loss is Square(), or train the tangent model by"
        " gradient_descent(…, alpha=math.inf), neither of which forms the kernel",
    )


class TangentPath:
    """The outputs y_0 + Kc for the coefficients c of v = Dh(w₀)ᵀc, and their recording."""

    def __init__(
        self,
        objective: Objective,
        kernel: Float[Tensor, "*batch N N"],
        recording: Recording,
        progress: Progress | None,
    ) -> None:
        self.risk = objective.risk
        self.coordinates = objective.coordinates
        self.batch = objective.coordinates.batch
        self.kernel = kernel
        self.recording = recording
        self.progress = progress
        with torch.no_grad():
            self.start = self.coordinates.outputs(self.coordinates.zeros())

    @property
    def samples(self) -> int:
        """The number of samples n, which divides ∇R; the kernel has N = n · outputs rows."""
        return self.risk.shape[0]

    def vector(self, outputs: Tensor) -> Float[Tensor, "*batch N"]:
        """Reshape the outputs of each member to a vector."""
        return outputs.reshape(*self.batch, -1)

    def outputs(self, vector: Float[Tensor, "*batch N"]) -> Tensor:
        """Reshape a vector to outputs, the inverse of `vector`."""
        return vector.reshape(self.start.shape)

    def apply(self, c: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch N"]:
        """Compute Kc."""
        return (self.kernel @ c[..., None])[..., 0]

    def jacobian(self) -> Float[Tensor, "*batch N p"]:
        """Compute Dh(w₀) as a dense matrix."""
        if isinstance(self.coordinates, ModelCoordinates):
            return self.coordinates._model.jacobian(self.coordinates._x).detach()
        size = self.kernel.shape[-1]
        rows = torch.eye(size, dtype=self.kernel.dtype, device=self.kernel.device).expand(*self.batch, size, size)
        pulled = (self.coordinates.pull_back(self.outputs(rows[..., i, :])) for i in range(size))
        return torch.stack([flat(row, self.batch).detach() for row in pulled], -2)

    def add(
        self,
        c: Float[Tensor, "*batch N"],
        change: Float[Tensor, "*batch N"],
        travel: Float[Tensor, "*batch"],
        fraction: float,
    ) -> None:
        """Record the point with coefficients c, outputs y_0 + change (change = Kc) and ‖v‖ = travel."""
        v = self.coordinates.pull_back(self.outputs(c)) if self.recording.needs_params else {}
        self.recording.add(v, self.start + self.outputs(change), travel)
        if self.progress is not None:
            self.progress(fraction)


@singledispatch
def _follow(loss: Loss, path: TangentPath, times: Tensor, rtol: Number, atol: Number, tolerance: Number) -> Trajectory:
    """Integrate the ODE c' = -∇R(y_0 + Kc), with speed ‖v'‖ = ‖Dh(w₀)ᵀ∇R‖, for any loss."""
    times = check_times(times, infinity=False)

    def length(c: Tensor) -> Tensor:
        """Compute ‖Dh(w₀)ᵀc‖ = √(cᵀKc)."""
        return (c * path.apply(c)).sum(-1).clamp(min=0).sqrt()

    def field(c: Tensor) -> tuple[Tensor, Tensor]:
        gradient = path.vector(path.risk.gradient(path.start + path.outputs(path.apply(c)))) / path.samples
        return -gradient, length(gradient)

    flow = Integration(field, torch.zeros_like(path.vector(path.start)), rtol=rtol, atol=atol, tolerance=tolerance)
    with Bar("tangent flow", float(times[-1])) as bar:
        for done, c in enumerate(flow.through(times, bar), 1):
            path.add(c, path.apply(c), length(c), done / len(times))
    return path.recording.trajectory(times, flow.converged, flow.diverged)


@_follow.register(Square)
def _follow_square(
    loss: Square, path: TangentPath, times: Tensor, rtol: Number, atol: Number, tolerance: Number
) -> Trajectory:
    """Evaluate the closed form for the square loss: with K/n = UΛUᵀ, y(t) = y_0 + U(e^{-Λt} - 1)Uᵀ(y_0 - y*)."""
    # Use float64 for any dtype of the model, since the small eigenvalues matter at late times.
    with Bar(f"eigenvalues of a {path.kernel.shape[-1]} × {path.kernel.shape[-1]} kernel"):
        eigenvalues, basis = torch.linalg.eigh(path.kernel.double() / path.samples)
    residual = path.vector(path.start - path.risk.target).double()
    # Rounding changes an eigenvalue of the kernel by about √N·eps·λ_max, and a singular value of Dh(w₀) by about
    # √N·eps·σ_max. One that is smaller counts as zero. Its vector u then has Dh(w₀)ᵀu = 0: the outputs do not move
    # along u, and its coefficient, which would grow like t, is omitted.
    noise = 4 * math.sqrt(basis.shape[-2]) * torch.finfo(path.kernel.dtype).eps
    null = eigenvalues <= noise * eigenvalues[..., -1:]
    modes = (basis.mT @ residual[..., None])[..., 0]
    if _is_rough(path, eigenvalues, modes, noise, float(times[-1])):
        sizes, basis = _singular_values(path)
        null = sizes <= noise * sizes[..., :1]
        eigenvalues, modes = sizes.square() / path.samples, (basis.mT @ residual[..., None])[..., 0]
    modes, eigenvalues = modes.masked_fill(null, 0), eigenvalues.masked_fill(null, 1)

    scales = eigenvalues.sqrt()

    def rotate(coefficients: Tensor) -> Tensor:
        rotated: Tensor = (basis @ coefficients[..., None])[..., 0]
        return rotated.to(path.kernel.dtype)

    def length(coefficients: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(coefficients, dim=-1)
        return (norm / math.sqrt(path.samples)).to(path.kernel.dtype)

    for done, time in enumerate(track(times.to(basis.device), "tangent flow"), 1):
        shrunk = modes * torch.expm1(-eigenvalues * time)
        c = rotate(shrunk / eigenvalues) / path.samples
        path.add(c, rotate(shrunk), length(shrunk / scales), done / len(times))
    # ‖v'‖² = ∇RᵀK∇R = (1/n) Σ λ (e^{-λt} modes)²
    speed = length(scales * modes * torch.exp(-eigenvalues * times[-1].item()))
    converged = speed <= tolerance * length(scales * modes)
    return path.recording.trajectory(times, converged, torch.zeros_like(converged))


def _is_rough(path: TangentPath, eigenvalues: Tensor, modes: Tensor, noise: float, last: float) -> bool:
    """Whether the rounding of the kernel changes the flow by more than the square root of the precision.

    An eigenvalue whose rounding error is not small compared with it changes the flow if the last time is late enough
    and the targets have a part along its vector.
    """
    allowed = math.sqrt(torch.finfo(path.kernel.dtype).eps)
    error = noise * eigenvalues[..., -1:]
    matters = modes.abs() > allowed * torch.linalg.vector_norm(modes, dim=-1, keepdim=True)
    return bool(((eigenvalues <= error / allowed) & matters & (error * last > allowed)).any())


_COLUMNS = 1 << 16
"""The number of columns of a Jacobian that are converted to float64 at once."""


def _singular_values(path: TangentPath) -> tuple[Tensor, Tensor]:
    """Compute the singular values σ of Dh(w₀) and its left singular vectors.

    The kernel holds σ², so that rounding makes all σ below σ_max√eps wrong; those of Dh(w₀) itself are right down to
    σ_max·eps. Parameters are reduced to N by QR factorisations of some columns at a time.
    """
    rows, batch = path.kernel.shape[-1], path.batch
    zeros = path.coordinates.zeros()
    columns = sum(w.numel() for w in zeros.values()) // math.prod(batch)
    check_fits(
        (*batch, rows, columns),
        path.kernel.dtype,
        path.kernel.device,
        copies=1.0,
        instead="use fewer points or earlier times, or pass matrix_free=True for one model: at late times, this kernel"
        " is so badly conditioned that its Jacobian is needed",
    )
    with Bar(f"singular values of a {rows} × {columns} Jacobian"):
        jacobian, reduced = path.jacobian(), None
        for part in jacobian.split(max(_COLUMNS, 4 * rows), -1):
            wide = part.double().mT
            stacked = wide if reduced is None else torch.cat([reduced, wide], -2)
            reduced = torch.linalg.qr(stacked, mode="r")[1] if columns > rows else stacked
        assert reduced is not None
        basis, sizes, _ = torch.linalg.svd(reduced.mT, full_matrices=False)
    return sizes, basis
