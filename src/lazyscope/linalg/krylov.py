"""Least squares min ‖b - Av‖² + shift‖v‖² in a Krylov space, for all shifts, and its gradient flow at all times.

The Golub-Kahan process gives orthonormal bases V of the Krylov space of AᵀA from Aᵀb and U of its image, with AV = UR.
The small matrix R then replaces A. In exact arithmetic R is bidiagonal. Here all of its entries are kept as they are
measured: products with Aᵀ of low precision, such as TF32, give another space, but within it AV = UR still holds and
the solution is still the best one. If R is taken to be bidiagonal, errors along the largest singular vectors of A
destroy the solution. SciPy's `lsqr` and `lsmr` run on a CPU, keep no basis, and assume a bidiagonal R.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.errors import InputError
from lazyscope.linalg.finite import check_finite
from lazyscope.linalg.operator import Operator
from lazyscope.linalg.projection import Projection
from lazyscope.linalg.rows import Rows
from lazyscope.memory import Memory, default_memory, parse_memory, size_text

BASIS_MEMORY = {"cpu": 4 << 30, "cuda": 64 << 30}
"""The default number of bytes for the bases; half of the free memory if that is less."""


_WORKING = {"double": 5, "own": 10}
"""The number of vectors of parameters that an iteration holds beside the bases, in float64 and in the dtype of the
operator: the solution, the gradient, their sums, products and what is left of them."""


def vector_memory(operator: Operator, stored: torch.dtype | None = None) -> int:
    """Count the bytes that one dimension of a Krylov space takes, one vector of each basis.

    Args:
        operator: The operator.
        stored: The dtype of the basis V. `None` uses that of the operator.

    Returns:
        The number of bytes.
    """
    rows, columns = operator.shape
    return rows * operator.dtype.itemsize + columns * (stored or operator.dtype).itemsize


def working_memory(operator: Operator) -> int:
    """Count the bytes of the vectors that an iteration holds beside the bases.

    Args:
        operator: The operator.

    Returns:
        The number of bytes.
    """
    return sum(operator.shape) * (_WORKING["double"] * 8 + _WORKING["own"] * operator.dtype.itemsize)


def vectors_within(memory: Memory | None, operator: Operator, each: int, working: int, least: int) -> int:
    """Count the dimensions of a Krylov space that fit into memory.

    Args:
        memory: The memory for the bases and for the vectors that an iteration holds beside them. `None` uses half of
            the free memory, up to a bound, for the bases alone.
        operator: The operator.
        each: The number of bytes of one dimension.
        working: The number of bytes beside the bases.
        least: The smallest number of dimensions with which the iteration can work.

    Returns:
        The number of dimensions.

    Raises:
        InputError: If there are fewer than `least`.
    """
    given = parse_memory(memory)
    bound = default_memory(operator.device, BASIS_MEMORY) if given is None else given - working
    if bound < least * each:
        needed = least * each + (0 if given is None else working)
        free = "the free memory" if given is None else f"memory={memory!r}"
        raise InputError(
            f"{least} vectors of {size_text(each)} each and what an iteration holds beside them do not fit into {free};"
            f" pass memory={needed} or more, or use a smaller model or fewer points."
        )
    return bound // each


class Krylov:
    """The Krylov space of AᵀA from Aᵀb, extended by one product with A and one with its transpose at a time.

    Both bases are orthogonalised in full, twice per step: without that, the process finds copies of the large singular
    values instead of new directions. The products have the precision that torch allows, such as TF32.

    Args:
        operator: The operator A, of any shape.
        b: The right-hand side b, in float64.
        stored: The dtype of the basis V. `None` uses that of the operator. Rounded vectors span another space, whose
            image is the one that is measured.
        near: The number of vectors of each basis on the device of the operator; later ones are kept in the memory of
            the host. `None` keeps all of them on the device.
        most: The largest dimension of the space, for which memory is taken. `None` takes it in blocks without a bound.
    """

    def __init__(
        self,
        operator: Operator,
        b: Float[Tensor, " rows"],
        stored: torch.dtype | None = None,
        near: int | None = None,
        most: int | None = None,
    ) -> None:
        self.operator = operator
        rows, columns = operator.shape
        self._left = Rows(rows, operator.dtype, operator.device, near, most)
        self._right = Rows(columns, stored or operator.dtype, operator.device, near, most)
        self._matrix = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        self._b, self._start = b, torch.zeros(columns, dtype=torch.float64, device=operator.device)
        self._next: Tensor | None = None
        self.speed = self._continue(self._pull(b))

    @property
    def size(self) -> int:
        """The dimension m of the space."""
        return self._right.count

    @property
    def complete(self) -> bool:
        """Whether the space is invariant, so that it contains the solutions for all shifts."""
        return self._next is None

    @property
    def steepest(self) -> Float[Tensor, " columns"]:
        """The vector Aᵀb of a space that has not been extended yet."""
        return self._start.to(self.operator.dtype) if self._next is None else self._next * self.speed

    @property
    def memory(self) -> int:
        """The number of bytes that the bases take."""
        return self._left.memory + self._right.memory

    def _pull(self, u: Tensor) -> Tensor:
        product = self.operator.rmatvec(u.to(self.operator.device, self.operator.dtype))
        return check_finite(product, "A product with the transpose of the operator")

    def _continue(self, vector: Tensor) -> float:
        """Set the next vector of V and the coupling to it, and return the norm of the vector."""
        size = float(vector.double().norm())
        rest, _ = self._right.orthogonalise(vector)
        self._ahead = float(rest.double().norm())
        small = 4 * math.sqrt(len(vector)) * torch.finfo(vector.dtype).eps * size
        ended = self._ahead <= small or self.size == min(self.operator.shape)
        self._next = None if ended else rest / self._ahead
        if ended:
            self._ahead = 0.0
        return size

    def extend(self) -> None:
        """Add one dimension, by one product with the operator and one with its transpose."""
        if self._next is None:
            return
        v = self._right.append(self._next)
        image = check_finite(self.operator.matvec(v), "A product with the operator")
        size = float(image.double().norm())
        rest, column = self._left.orthogonalise(image)
        length = float(rest.double().norm())
        m, matrix = self.size, torch.zeros(self.size, self.size, dtype=torch.float64, device="cpu")
        matrix[: m - 1, : m - 1], matrix[: m - 1, -1] = self._matrix, column
        largest = max(size, float(matrix.norm(dim=0).max()))
        if length <= 4 * math.sqrt(len(image)) * torch.finfo(image.dtype).eps * largest:
            # The image of v lies in that of the space: no new left vector, so that R has a column but no row more.
            self._left.append(torch.zeros_like(rest))
            self._matrix, self._next, self._ahead = matrix, None, 0.0
            return
        matrix[-1, -1], self._matrix = length, matrix
        self._left.append(rest / length)
        self._continue(self._pull(rest / length))

    def project(self, size: int | None = None) -> Projection:
        """Return the small matrix of the space by its singular values.

        Args:
            size: The number of dimensions that are used, at most that of the space. `None` uses all.

        Returns:
            The matrix, with what couples the space to the rest.
        """
        size = self.size if size is None else size
        left, sizes, right = torch.linalg.svd(self._matrix[:size, :size])
        noise = 4 * math.sqrt(max(1, size)) * torch.finfo(self.operator.dtype).eps
        b = self._left.coefficients(self._b)[:size]
        return Projection(
            left,
            sizes,
            right,
            b,
            float((self._b - self._left.combine(b)).norm()),
            self._right.coefficients(self._start)[:size],
            self._ahead if size == self.size else float(self._matrix[size - 1, size].abs()),
            noise * float(sizes.max()) if size else 0.0,
        )

    def combine(self, coefficients: Float[Tensor, " m"]) -> Float[Tensor, " columns"]:
        """Compute the vector with given coefficients in the basis V.

        Args:
            coefficients: The coefficients of the first vectors of the basis.

        Returns:
            The vector, in float64.
        """
        return self._right.combine(coefficients)

    def image(self, coefficients: Float[Tensor, " m"]) -> Float[Tensor, " rows"]:
        """Compute the product of A with the vector of given coefficients, from the images that are stored.

        Args:
            coefficients: The coefficients, one for each vector of the basis V.

        Returns:
            The product, in float64.
        """
        return self._left.combine(self._matrix @ coefficients)

    def restart(
        self,
        b: Float[Tensor, " rows"],
        gradient: Float[Tensor, " columns"],
        start: Float[Tensor, " columns"],
        last: Float[Tensor, " m"],
    ) -> None:
        """Start again for what is left of the problem, from the gradient and the last direction.

        The solution d of the new problem minimises ‖b - Ad‖² + shift‖start + d‖². The last direction is kept because it
        speeds up the convergence of ill-conditioned problems, as in conjugate gradients. The largest singular vectors
        are not: the gradient is orthogonal to them.

        Args:
            b: What is left of the right-hand side, in float64.
            gradient: The vector Aᵀb - shift·start, in float64.
            start: The solution so far, in float64.
            last: The coefficients of the last direction in the basis V.
        """
        image, direction, ratio = self._turned(last)
        self._left.rotate(image)
        self._right.rotate(direction)
        self._begin(ratio, b, gradient, start)

    def branch(
        self,
        b: Float[Tensor, " rows"],
        gradient: Float[Tensor, " columns"],
        start: Float[Tensor, " columns"],
        last: Float[Tensor, " m"],
        most: int,
    ) -> Krylov:
        """Start again as `restart` does, in a new space, and leave this one as it is.

        Args:
            b: What is left of the right-hand side, in float64.
            gradient: The vector Aᵀb - shift·start, in float64.
            start: The solution so far, in float64.
            last: The coefficients of the last direction in the basis V.
            most: The largest dimension of the new space.

        Returns:
            The new space.
        """
        image, direction, ratio = self._turned(last)
        new = self.beside(most)
        if len(image):
            new._left.append(self._left.combine(image[0]))
            new._right.append(self._right.combine(direction[0]))
        new._begin(ratio, b, gradient, start)
        return new

    def beside(self, most: int) -> Krylov:
        """Create a space of the same operator without vectors, which `restore` fills, to be kept beside this one.

        Args:
            most: The largest dimension of the new space.

        Returns:
            The new space.
        """
        new = copy.copy(self)
        new._left, new._right = self._left.beside(most), self._right.beside(most)
        return new

    def _turned(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a direction and its image, each as one row of unit norm or none, and the small matrix of both."""
        image, size = self._matrix @ last, float(last.norm())
        length = float(image.norm())
        count = 1 if length > 0 else 0
        ratio = torch.full((count, count), length / max(size, 1e-300), dtype=torch.float64, device="cpu")
        return (image / max(length, 1e-300))[None][:count], (last / max(size, 1e-300))[None][:count], ratio

    def _begin(self, matrix: Tensor, b: Tensor, gradient: Tensor, start: Tensor) -> None:
        self._matrix, self._b, self._start = matrix, b, start
        self._continue(gradient.to(self.operator.dtype))

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue with the same bits."""
        following = self._b.new_empty(0) if self._next is None else self._next
        numbers = torch.tensor([self._ahead, self.speed], dtype=torch.float64, device="cpu")
        vectors = {"left": self._left.parts(), "right": self._right.parts(), "next": following}
        return {**vectors, "matrix": self._matrix, "b": self._b, "start": self._start, "numbers": numbers}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the state of another process.

        Args:
            state: What `state` returned.
        """
        device = self.operator.device
        self._left.restore(state["left"])
        self._right.restore(state["right"])
        self._matrix = state["matrix"]
        self._b, self._start = state["b"].to(device), state["start"].to(device)
        self._next = state["next"].to(device) if len(state["next"]) else None
        self._ahead, self.speed = state["numbers"].tolist()
