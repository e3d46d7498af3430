"""Orthonormal vectors that are added one at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from lazyscope.ambient import full_precision

_BLOCK = 16
"""The largest number of vectors that are stored in one tensor."""

_BYTES = 1 << 26
"""The size in bytes from which on a tensor holds one vector, so that no more memory is taken than is needed."""

_COLUMNS = 1 << 20
"""The number of columns that are rotated at a time."""


class Rows:
    """Orthonormal vectors of one length, as the rows of a matrix that grows.

    They are stored in blocks, so that another vector does not copy those before it.

    Args:
        length: The length of the vectors.
        dtype: Their dtype.
        device: Their device.
    """

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._length, self._dtype, self._device = length, dtype, device
        self._each = max(1, min(_BLOCK, _BYTES // max(1, length * dtype.itemsize)))
        self._blocks: list[Tensor] = []
        self.count = 0

    def append(self, vector: Tensor) -> None:
        """Add a vector.

        Args:
            vector: The vector, which is orthogonal to the others.
        """
        if self.count == len(self._blocks) * self._each:
            self._blocks.append(torch.zeros(self._each, self._length, dtype=self._dtype, device=self._device))
        self._blocks[-1][self.count % self._each] = vector
        self.count += 1

    def _parts(self) -> list[Tensor]:
        return [block[: self.count - at * self._each] for at, block in enumerate(self._blocks)]

    def coefficients(self, vector: Tensor) -> Tensor:
        """Compute the inner products with a vector.

        Args:
            vector: The vector.

        Returns:
            The inner products, in float64 on the CPU.
        """
        with full_precision:
            parts = [(rows @ vector.to(rows.dtype)).double() for rows in self._parts()]
        return torch.cat([vector.new_zeros(0, dtype=torch.float64), *parts]).cpu()

    def orthogonalise(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Subtract the projection of a vector.

        Args:
            vector: The vector, in the dtype of the others.

        Returns:
            What is left of the vector, and the coefficients of the projection, in float64 on the CPU.
        """
        total = torch.zeros(self.count, dtype=torch.float64, device="cpu")
        with full_precision:
            for _ in range(2):  # once leaves what rounding has left
                parts = []
                for rows in self._parts():
                    parts.append(rows @ vector)
                    vector = vector - rows.T @ parts[-1]
                total += torch.cat([vector.new_zeros(0), *parts]).double().cpu()
        return vector, total

    def combine(self, coefficients: Tensor) -> Tensor:
        """Compute a linear combination.

        Args:
            coefficients: The coefficients, one for each vector.

        Returns:
            The combination, in float64.
        """
        total = torch.zeros(self._length, dtype=torch.float64, device=self._device)
        parts = self._parts()
        for rows, some in zip(parts, coefficients.to(total).split(self._each) if parts else [], strict=True):
            for row, each in zip(rows, some, strict=True):  # one at a time, so that no block is copied to float64
                total += each * row
        return total

    def rotate(self, turn: Tensor) -> None:
        """Replace the vectors by combinations of them, without storing both.

        Args:
            turn: The coefficients of the combinations as rows, which are orthonormal.
        """
        turn, parts = turn.to(self._device, self._dtype), self._parts()
        with full_precision:
            for first in range(0, self._length if parts else 0, _COLUMNS):
                there = slice(first, first + _COLUMNS)
                turned = turn @ torch.cat([rows[:, there] for rows in parts])
                for block, rows in zip(self._blocks, turned.split(self._each), strict=False):
                    block[: len(rows), there] = rows
        self.count = len(turn)
        self._blocks = self._blocks[: -(-self.count // self._each)]

    def stacked(self) -> Tensor:
        """Return all vectors as the rows of one tensor."""
        return torch.cat([torch.zeros(0, self._length, dtype=self._dtype, device=self._device), *self._parts()])

    def restore(self, rows: Tensor) -> None:
        """Replace all vectors.

        Args:
            rows: The new vectors, as `stacked` returns them.
        """
        self._blocks, self.count = [], 0
        for row in rows:
            self.append(row)

    @property
    def memory(self) -> int:
        """The number of bytes that the vectors take."""
        return sum(rows.numel() * rows.element_size() for rows in self._parts())
