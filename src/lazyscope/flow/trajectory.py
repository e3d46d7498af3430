"""The result of every flow: a `Trajectory` with a `Status`. Divergence is a result, not an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lazyscope._typing import Number, Params
from lazyscope.flow.objective import Objective, flat
from lazyscope.progress import Bar, quiet

Observer: TypeAlias = Callable[[Params], Mapping[str, Tensor]]
"""A function that measures quantities at v, such as a test loss; it is called at the recorded times, without autograd.
"""

Progress: TypeAlias = Callable[[float], None]
"""A callback that receives the completed fraction, from 0 to 1, at the recorded times."""


@contextmanager
def followed(title: str, total: Number, progress: Progress | None) -> Iterator[Bar]:
    """Show a progress bar on the terminal, unless the caller passes a callback to show progress in another way.

    Args:
        title: What is computed.
        total: The amount of work.
        progress: The callback of the caller, or `None`.

    Returns:
        A context manager with the progress bar to advance.
    """
    with nullcontext() if progress is None else quiet(), Bar(title, total) as bar:
        yield bar


def counted(steps: int, title: str, progress: Progress | None) -> Iterator[int]:
    """Iterate over the steps, with a progress bar as in `followed`.

    Args:
        steps: The number of steps.
        title: What is computed.
        progress: The callback of the caller, or `None`.

    Returns:
        An iterator over 0 … steps - 1.
    """
    with followed(title, steps, progress) as bar:
        for step in range(steps):
            yield step
            bar.advance()


class Status(StrEnum):
    """How the trajectory of a member ended."""

    CONVERGED = "converged"
    """‖∇_v R‖ fell to `tolerance` times its initial value; the member does not move after that."""
    HORIZON = "horizon"
    """The last time or step was reached before convergence."""
    DIVERGED = "diverged"
    """The loss became too large or was not finite, or the step of the solver underflowed; the member does not move
    after that."""


@final
@dataclass(frozen=True, repr=False)
class Trajectory:
    """A path v(t) in tangent coordinates, recorded at T times, of one model (`batch` is `()`) or of a batch."""

    times: Float[Tensor, "T ..."]
    """The recorded times, in float64 on the CPU, of shape (T,). For a descent, time is Σ lr, and the shape is
    `(T, *batch)` if the members have different step sizes."""
    outputs: Float[Tensor, "T ..."]
    """The outputs y_α(v), of shape (T, *batch, n, …)."""
    loss: Float[Tensor, "T *batch"]
    """The loss R(y_α(v))."""
    travel: Float[Tensor, "T *batch"]
    """The Euclidean norm ‖v‖ = α‖w - w₀‖, which has a limit as α → ∞."""
    alpha: Float[Tensor, "*batch"]
    """The scale α of each member."""
    converged: Bool[Tensor, "*batch"]
    """Whether each member converged."""
    diverged: Bool[Tensor, "*batch"]
    """Whether each member diverged."""
    steps: Int[Tensor, "T"] | None = None
    """The recorded steps of a descent; `None` for a flow."""
    params: dict[str, Tensor] | None = None
    """The coordinates v by parameter name, each of shape (T, *batch, …), if `keep_params` was set."""
    observed: dict[str, Tensor] = field(default_factory=dict)
    """The measurements of the observer, stacked over the times."""

    @property
    def displacement(self) -> Float[Tensor, "T *batch"]:
        """The Euclidean norm ‖w - w₀‖ = ‖v‖/α, which is 0 at α = ∞."""
        return self.travel / self.alpha.to(self.travel)

    @property
    def status(self) -> Any:
        """The `Status` of a single model, or a NumPy array of them for a batch, as in `(t.status == …).any()`."""
        names = np.empty(tuple(self.alpha.shape), dtype=object)
        names.fill(Status.HORIZON)  # np.full would convert it to a plain string
        names[self.converged.cpu().numpy()] = Status.CONVERGED
        names[self.diverged.cpu().numpy()] = Status.DIVERGED
        return names if names.ndim else names.item()

    def __len__(self) -> int:
        return len(self.times)

    def __repr__(self) -> str:
        members, count = self.alpha.numel(), len(self)
        end = self.times[-1].max().item()
        if not self.alpha.ndim:
            first, last = self.loss[0].item(), self.loss[-1].item()
            return f"Trajectory({self.status}, {count} times to {end:g}, loss {first:.3g} → {last:.3g})"
        tally = {status: int((self.status == status).sum()) for status in Status}
        ended = ", ".join(f"{number} {status}" for status, number in tally.items() if number)
        return f"Trajectory({members} members {tuple(self.alpha.shape)}: {ended}; {count} times to {end:g})"


class Recording:
    """Collects the trajectory of a flow.

    A member that has ended does not move any more, so the last entry is repeated when all members have ended.
    """

    def __init__(self, objective: Objective, observe: Observer | None, keep_params: bool) -> None:
        self.objective = objective
        self.observe = observe
        self.keep_params = keep_params
        self.columns: list[dict[str, Tensor]] = []
        self.observations: list[Mapping[str, Tensor]] = []
        self.params: list[dict[str, Tensor]] = []

    @property
    def needs_params(self) -> bool:
        """Whether v itself is needed; otherwise a flow in function space does not have to compute it."""
        return self.keep_params or self.observe is not None

    @torch.no_grad()
    def add(self, v: Params, outputs: Tensor | None = None, travel: Tensor | None = None) -> Tensor:
        """Record v and return the loss; a flow that already has the outputs and ‖v‖ can pass them."""
        batch = self.objective.coordinates.batch
        if outputs is None:
            outputs = self.objective.coordinates.outputs(v).clone()  # h(w) = w may return v itself, which changes
        if travel is None:
            travel = torch.linalg.vector_norm(flat(v, batch), dim=-1)
        loss = self.objective.risk(outputs)
        self.columns.append({"outputs": outputs, "loss": loss, "travel": travel})
        if self.observe is not None:
            self.observations.append({name: value.detach().clone() for name, value in self.observe(v).items()})
        if self.keep_params:
            self.params.append({name: value.detach().clone() for name, value in v.items()})
        return loss

    def trajectory(
        self,
        times: Float[Tensor, "T ..."],
        converged: Bool[Tensor, "*batch"],
        diverged: Bool[Tensor, "*batch"],
        steps: Int[Tensor, "T"] | None = None,
    ) -> Trajectory:
        """Build the trajectory; times that were not reached because all members had ended repeat the last entry."""
        count = len(times)
        lost = ~torch.stack([column["loss"].isfinite() for column in self.columns]).all(
            0
        )  # overflow, even at the start
        return Trajectory(
            times=times,
            **_stacked(self.columns, count),
            alpha=self.objective.coordinates.alpha,
            converged=converged & ~lost,
            diverged=diverged | lost,
            steps=steps,
            params=_stacked(self.params, count) if self.keep_params else None,
            observed=_stacked(self.observations, count) if self.observe is not None else {},
        )


def _stacked(entries: list[Any], count: int) -> dict[str, Tensor]:
    entries = entries + [entries[-1]] * (count - len(entries))
    return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}
