"""Where the samples of a stochastic descent come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, final

import torch
from torch import Generator, Tensor
from torch.utils import _pytree as pytree

from lazyscope._typing import Inputs
from lazyscope.errors import InputError
from lazyscope.flow.objective import check_inputs
from lazyscope.labels import Target, as_target

Sampler: TypeAlias = Callable[[int, Generator], tuple[Inputs, Target]]
"""(step, generator) ↦ the inputs and targets of that step; drawing fresh ones makes a descent one-pass."""


@final
class Minibatches:
    """The samples in a new random order each epoch, `size` at a time; the last of an epoch may be fewer.

    Args:
        x: Inputs of n samples.
        y: Their targets: a tensor, array or nested list.
        size: The samples of a minibatch.
        dim: The dimension of inputs and targets that counts samples: 0, or the number of batch dimensions when members
            have their own.

    Raises:
        InputError: If there are not so many samples, or not as many inputs as targets.

    >>> draw = Minibatches(torch.arange(4.0), torch.arange(4.0), 3)
    >>> generator = torch.Generator().manual_seed(0)
    >>> [len(draw(step, generator)[1]) for step in range(4)]
    [3, 1, 3, 1]
    """

    def __init__(self, x: Inputs, y: Target, size: int, dim: int = 0) -> None:
        check_inputs(x)
        like = next((leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)), torch.empty(0, device="cpu"))
        self.x, self.y, self.size, self.dim = x, as_target(y, like), size, dim
        self.samples = self.y.shape[dim]
        if not 1 <= size <= self.samples:
            raise InputError(
                f"A minibatch of {size} cannot be drawn from {self.samples} samples; pass 1 … {self.samples}."
            )
        for leaf in pytree.tree_leaves(x):
            if isinstance(leaf, Tensor) and leaf.shape[dim] != self.samples:
                raise InputError(
                    f"There are {leaf.shape[dim]} inputs and {self.samples} targets; pass one target an input."
                )

    @property
    def per_epoch(self) -> int:
        """Steps in an epoch."""
        return -(-self.samples // self.size)

    def __call__(self, step: int, generator: Generator) -> tuple[Inputs, Tensor]:
        """The minibatch of this step; the order is drawn at the first step of each epoch."""
        position = step % self.per_epoch
        if position == 0:
            self.order = torch.randperm(self.samples, generator=generator, device="cpu")
        rows = self.order[position * self.size : (position + 1) * self.size].to(self.y.device)

        def take(value: Tensor) -> Tensor:
            return value.index_select(self.dim, rows)

        return pytree.tree_map_only(Tensor, take, self.x), take(self.y)
