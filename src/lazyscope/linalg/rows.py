"""Orthonormal vectors that are added one at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from lazyscope.ambient import full_precision

_BLOCK = 16
"""The largest number of vectors that are stored in one tensor."""

_BYTES = 1 << 26
"""The size in bytes from which on a tensor holds one vector, so that no more memory is taken than is needed."""

_ENTRIES = 1 << 20
"""The number of entries that are rotated at a time, or that of one vector if it is larger."""


class Rows:
    """Orthonormal vectors of one length, as the rows of a matrix that grows.

    They are stored in blocks, so that another vector does not copy those before it. In a dtype of low precision they
    are rounded when they are stored, and all sums are computed in float32.

    Args:
        length: The length of the vectors.
        dtype: Their dtype.
        device: Their device.
        near: The number of vectors that the device holds; later ones are kept in the memory of the host. `None` keeps
            all of them on the device.
        most: The number of vectors for which memory is taken. `None` takes it in blocks without a bound.
    """

    def __init__(
        self, length: int, dtype: torch.dtype, device: torch.device, near: int | None = None, most: int | None = None
    ) -> None:
        self._length, self._dtype, self._device, self._near, self._most = length, dtype, device, near, most
        self._each = max(1, min(_BLOCK, _BYTES // max(1, length * dtype.itemsize)))
        self._working = torch.promote_types(dtype, torch.float32)
        self._blocks: list[Tensor] = []
        self.count = 0

    def append(self, vector: Tensor) -> Tensor:
        """Add a vector.

        Args:
            vector: The vector, which is orthogonal to the others.

        Returns:
            The vector as it is stored, in its own dtype.
        """
        if self.count == self._held:
            self._blocks.append(self._block())
        row = self._blocks[-1][self.count - self._held]  # counted from the end of the last block
        row.copy_(vector)
        self.count += 1
        return row.to(vector)

    @property
    def _held(self) -> int:
        """The number of vectors for which there is memory."""
        return sum(len(block) for block in self._blocks)

    def _block(self) -> Tensor:
        """Take memory for further vectors, on the device or on the host, and for no more than will be added."""
        far = self._near is not None and self.count >= self._near
        bounds = [self._most, None if far else self._near]
        size = min([self._each, *[bound - self.count for bound in bounds if bound is not None and bound > self.count]])
        place = torch.device("cpu") if far else self._device
        pinned = far and self._device.type == "cuda"  # which makes copies to the device faster
        return torch.zeros(size, self._length, dtype=self._dtype, device=place, pin_memory=pinned)

    def beside(self, most: int) -> Rows:
        """Create rows of the same kind without vectors, to be kept beside these.

        Args:
            most: The number of vectors for which memory is taken.

        Returns:
            The rows, which take what these leave on the device.
        """
        near = None if self._near is None else max(0, self._near - self.count)
        return Rows(self._length, self._dtype, self._device, near, most)

    def coefficients(self, vector: Tensor) -> Tensor:
        """Compute the inner products with a vector.

        Args:
            vector: The vector.

        Returns:
            The inner products, in float64 on the CPU.
        """
        vector = vector.to(self._working)
        with full_precision:
            parts = [(rows.to(vector) @ vector).double() for rows in self.parts()]
        return torch.cat([vector.new_zeros(0, dtype=torch.float64), *parts]).cpu()

    def orthogonalise(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Subtract the projection of a vector.

        Args:
            vector: The vector.

        Returns:
            What is left of the vector, and the coefficients of the projection, in float64 on the CPU.
        """
        total = torch.zeros(self.count, dtype=torch.float64, device="cpu")
        with full_precision:
            for _ in range(2):  # once leaves what rounding has left
                parts = []
                for stored in self.parts():
                    rows = stored.to(vector)
                    parts.append(rows @ vector)
                    vector = vector - rows.T @ parts[-1]
                total += torch.cat([vector.new_zeros(0), *parts]).double().cpu()
        return vector, total

    def combine(self, coefficients: Tensor) -> Tensor:
        """Compute a linear combination.

        Args:
            coefficients: The coefficients of the first vectors.

        Returns:
            The combination, in float64.
        """
        total = torch.zeros(self._length, dtype=torch.float64, device=self._device)
        rows = (row for part in self.parts() for row in part)
        for row, each in zip(rows, coefficients.tolist(), strict=False):  # one at a time, so that no block is copied
            total.add_(row.to(self._device), alpha=each)
        return total

    def rotate(self, turn: Tensor) -> None:
        """Replace the vectors by combinations of them, without storing both.

        Args:
            turn: The coefficients of the combinations as rows, which are orthonormal.
        """
        turn, parts = turn.to(self._device, self._working), self.parts()
        columns = max(1, max(_ENTRIES, self._length) // max(1, self.count))
        with full_precision:
            for first in range(0, self._length if parts else 0, columns):
                there = slice(first, first + columns)
                turned = turn @ torch.cat([rows[:, there].to(self._device, self._working) for rows in parts])
                at = 0
                for block in self._blocks:
                    rows = turned[at : at + len(block)]
                    block[: len(rows), there], at = rows, at + len(block)
        self.count = len(turn)
        while self._blocks and self._held - len(self._blocks[-1]) >= self.count:
            self._blocks.pop()

    def parts(self) -> list[Tensor]:
        """Return all vectors as the rows of several tensors, without copying them."""
        parts, left = [], self.count
        for block in self._blocks:
            parts.append(block[:left])
            left -= len(parts[-1])
        return parts

    def restore(self, parts: list[Tensor]) -> None:
        """Replace all vectors.

        Args:
            parts: The new vectors, as `parts` returns them.
        """
        self._blocks, self.count = [], 0
        for rows in parts:
            for row in rows:
                self.append(row)

    @property
    def memory(self) -> int:
        """The number of bytes that are taken for the vectors."""
        return sum(block.numel() * block.element_size() for block in self._blocks)
