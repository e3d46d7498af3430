"""What every flow returns: a `Trajectory` with a `Status`; divergence is a result, not an exception."""

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
"""Measures something at v, such as a test loss; called at the recorded times, without autograd."""

Progress: TypeAlias = Callable[[float], None]
"""Told the fraction of the way, from 0 to 1, at the recorded times."""


@contextmanager
def followed(title: str, total: Number, progress: Progress | None) -> Iterator[Bar]:
    """A line of progress on the terminal, unless the caller is told of it and shows it in another way.

    Args:
        title: What is computed.
        total: How much there is to do.
        progress: What the caller is told by, if anything.

    Returns:
        A context manager with the bar to advance.
    """
    with nullcontext() if progress is None else quiet(), Bar(title, total) as bar:
        yield bar


def counted(steps: int, title: str, progress: Progress | None) -> Iterator[int]:
    """The numbers of the steps, with a line of progress as in `followed`.

    Args:
        steps: How many.
        title: What is computed.
        progress: What the caller is told by, if anything.

    Returns:
        An iterator over 0 … steps - 1.
    """
    with followed(title, steps, progress) as bar:
        for step in range(steps):
            yield step
            bar.advance()


class Status(StrEnum):
    """How a member's trajectory ended."""

    CONVERGED = "converged"
    """‖∇_v R‖ fell to `tolerance` times its value at the start; the member rests from there on."""
    HORIZON = "horizon"
    """The last time or step came first."""
    DIVERGED = "diverged"
    """The loss blew up or was not finite, or the solver's step underflowed; the member is held there."""


@final
@dataclass(frozen=True, repr=False)
class Trajectory:
    """A path v(t) in tangent coordinates, recorded at T times, of one model (`batch` is `()`) or many."""

    times: Float[Tensor, "T ..."]
    """(T,), float64 on the CPU: time, Σ lr for descents; `(T, *batch)` if each member has its own lr."""
    outputs: Float[Tensor, "T ..."]
    """y_α(v), (T, *batch, n, …)."""
    loss: Float[Tensor, "T *batch"]
    """R(y_α(v))."""
    travel: Float[Tensor, "T *batch"]
    """‖v‖, Euclidean: α‖w - w₀‖, which has a limit at α = ∞."""
    alpha: Float[Tensor, "*batch"]
    converged: Bool[Tensor, "*batch"]
    diverged: Bool[Tensor, "*batch"]
    steps: Int[Tensor, "T"] | None = None
    """The recorded steps of a descent."""
    params: dict[str, Tensor] | None = None
    """v by name, (T, *batch, …), on request."""
    observed: dict[str, Tensor] = field(default_factory=dict)
    """What the observer returned, stacked over the times."""

    @property
    def displacement(self) -> Float[Tensor, "T *batch"]:
        """‖w - w₀‖ = ‖v‖/α, Euclidean; 0 at α = ∞."""
        return self.travel / self.alpha.to(self.travel)

    @property
    def status(self) -> Any:
        """The `Status` of a single model; for a batch a NumPy array of them, as in `(t.status == …).any()`."""
        names = np.empty(tuple(self.alpha.shape), dtype=object)
        names.fill(Status.HORIZON)  # np.full would make it a plain string
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
    """Collects a trajectory as a flow moves along.

    A member that has ended is not moved any more, so the last entry repeats when all have ended.
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
        """Whether someone looks at v itself; a flow in function space need not compute it otherwise."""
        return self.keep_params or self.observe is not None

    @torch.no_grad()
    def add(self, v: Params, outputs: Tensor | None = None, travel: Tensor | None = None) -> Tensor:
        """Records v, with outputs and ‖v‖ where the flow has them otherwise than by y_α(v); returns the loss."""
        batch = self.objective.coordinates.batch
        if outputs is None:
            outputs = self.objective.coordinates.outputs(v).clone()  # h(w) = w may hand back v itself, which moves on
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
        """The whole; what was not reached, because all members had ended, repeats the last entry."""
        count = len(times)
        return Trajectory(
            times=times,
            **_stacked(self.columns, count),
            alpha=self.objective.coordinates.alpha,
            converged=converged,
            diverged=diverged,
            steps=steps,
            params=_stacked(self.params, count) if self.keep_params else None,
            observed=_stacked(self.observations, count) if self.observe is not None else {},
        )


def _stacked(entries: list[Any], count: int) -> dict[str, Tensor]:
    entries = entries + [entries[-1]] * (count - len(entries))
    return {name: torch.stack([entry[name] for entry in entries]) for name in entries[0]}
