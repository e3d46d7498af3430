"""What the tiles of a kernel on disk are computed from: a tangent kernel, or a kernel of infinite width."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope._typing import Inputs
from lazyscope.ambient import without_autocast
from lazyscope.errors import ModelError
from lazyscope.model.base import Model
from lazyscope.model.jacobian import Batches
from lazyscope.tangent.kernel import tangent_kernel

Recipe: TypeAlias = dict[str, str | int | list[float]]
"""The description that identifies a kernel on disk."""


class Source(ABC):
    """A kernel that is computed tile by tile; it is sent to workers."""

    @abstractmethod
    def kernel(self, one: Inputs, two: Inputs | None, memory: int | None) -> Float[Tensor, "n1 n2 k k"]:
        """Compute one tile; `None` for the second inputs uses the first ones."""

    @abstractmethod
    def outputs(self, batches: Batches) -> int:
        """The number k of outputs."""

    @abstractmethod
    def recipe(self, batches: Batches) -> Recipe:
        """The description that identifies the kernel; values at three points stand for the code of the model."""


@final
@dataclass(frozen=True)
class Tangent(Source):
    """The tangent kernel of a model."""

    model: Model

    def kernel(self, one: Inputs, two: Inputs | None, memory: int | None) -> Float[Tensor, "n1 n2 k k"]:
        return tangent_kernel(self.model, one, two, memory=memory)

    def outputs(self, batches: Batches) -> int:
        with torch.no_grad():
            return self.model(batches[slice(1)]).numel()

    def recipe(self, batches: Batches) -> Recipe:
        with torch.no_grad():
            outputs = without_autocast(self.model)(batches[slice(3)])
        if not bool(outputs.isfinite().all()):
            raise ModelError("The model's outputs contain NaN or infinite values; check its initialisation.")
        return {
            "weights": digest({**self.model.params, **self.model.state}.items()),
            "data": digest(enumerate(batches.leaves)),
            "outputs": outputs.flatten().double().tolist(),
            "dtype": str(outputs.dtype).removeprefix("torch."),
            "tile": batches.size,
        }


def digest(tensors: Iterable[tuple[Any, Tensor]]) -> str:
    """Compute the SHA-256 checksum of named tensors."""
    found = hashlib.sha256()
    for name, t in tensors:
        found.update(json.dumps([str(name), list(t.shape), str(t.dtype)]).encode())
        found.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
