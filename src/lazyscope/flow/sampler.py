"""Samplers that draw the samples of stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, final

import torch
from torch import Generator, Tensor
from torch.utils import _pytree as pytree

from lazyscope._typing import Inputs
from lazyscope.arguments import check_count
from lazyscope.errors import InputError
from lazyscope.labels import Target, as_target
from lazyscope.model.inputs import check_samples

Sampler: TypeAlias = Callable[[int, Generator], tuple[Inputs, Target]]
"""A function from (step, generator) to the inputs and targets of that step; new samples at each step give one-pass SGD.
"""


@final
class Minibatches:
    """A sampler of minibatches, in a new random order in each epoch.

    The last minibatch of an epoch may be smaller.

    Args:
        x: The inputs of n samples.
        y: The targets, as a tensor, an array or a nested list.
        size: The number of samples in a minibatch.
        dim: The dimension of inputs and targets that counts the samples: 0, or the number of batch dimensions if the
            members of a batch have different samples.

    Raises:
        InputError: If `size` is larger than the number of samples, or the numbers of inputs and targets differ.

    Example:
        >>> draw = Minibatches(torch.arange(4.0), torch.arange(4.0), 3)
        >>> generator = torch.Generator().manual_seed(0)
        >>> [len(draw(step, generator)[1]) for step in range(4)]
        [3, 1, 3, 1]
    """

    def __init__(self, x: Inputs, y: Target, size: int, dim: int = 0) -> None:
        check_samples(x)
        like = next((leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)), torch.empty(0, device="cpu"))
        self.x, self.y, self.size, self.dim = x, as_target(y, like), size, dim
        check_count("size", size, least=0)
        _check_dim(dim, self.y, *pytree.tree_leaves(x))
        self.samples = self.y.shape[dim]
        if not 1 <= size <= self.samples:
            raise InputError(
                f"A minibatch of {size} samples cannot be drawn from {self.samples} samples; pass a size from 1 to"
                f" {self.samples}."
            )
        for leaf in pytree.tree_leaves(x):
            if isinstance(leaf, Tensor) and leaf.shape[dim] != self.samples:
                raise InputError(
                    f"There are {leaf.shape[dim]} inputs and {self.samples} targets; pass one target for each input."
                )

    @property
    def per_epoch(self) -> int:
        """The number of steps in an epoch."""
        return -(-self.samples // self.size)

    def __call__(self, step: int, generator: Generator) -> tuple[Inputs, Tensor]:
        """Draw the minibatch of a step.

        Args:
            step: The step, from 0. Steps must be passed in order, as the order of the samples is drawn at the first
                step of each epoch.
            generator: The CPU generator of the random order.

        Returns:
            The inputs and targets of the minibatch.
        """
        position = step % self.per_epoch
        if position == 0:
            self.order = torch.randperm(self.samples, generator=generator, device="cpu")
        rows = self.order[position * self.size : (position + 1) * self.size].to(self.y.device)

        def take(value: Tensor) -> Tensor:
            return value.index_select(self.dim, rows)

        return pytree.tree_map_only(Tensor, take, self.x), take(self.y)


def _check_dim(dim: int, *values: Any) -> None:
    check_count("dim", dim, least=0)
    least = min(value.ndim for value in values if isinstance(value, Tensor))
    if dim >= least:
        raise InputError(f"dim={dim} does not count samples, as there are inputs or targets of {least} dimensions.")
