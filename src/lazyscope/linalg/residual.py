"""Linear systems (K + shift)x = b in which each product is expensive and rounded: minimal residuals, refined.

An inner iteration uses a preconditioner and products that may be rough, such as those with TF32. An outer iteration
computes the product of each inner solution again, exactly, and combines all of them so that the residual is smallest.
It therefore converges to the accuracy of the exact products.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope.linalg.operator import Symmetric

Product = Callable[[Tensor], Tensor]
"""A function that multiplies a vector by a matrix."""


class MinimalResiduals:
    """The solution of (K + shift)x = b of smallest residual in a Krylov space, which grows by one product at a time.

    This is GMRES with a preconditioner from the right: each iterate minimises ‖b - Ax‖ itself, whatever the
    preconditioner. Conjugate gradients minimise the error instead, and their residual can grow by orders of magnitude
    before it falls. Preconditioned MINRES minimises the residual in the norm of the preconditioner. This norm gives
    little weight to the largest eigenvectors, so rounding errors along them grow, and the iteration diverges in low
    precision. SciPy's `gmres` does not run on a GPU.

    Args:
        operator: The symmetric positive semi-definite operator K.
        right: The right-hand side b, in float64 on the device of the operator.
        shift: The number added to the diagonal of K.
        tolerance: The tolerance on ‖b - Ax‖/‖b‖.
        precondition: A function that multiplies a vector by an approximate inverse. `None` is the identity.
    """

    def __init__(
        self,
        operator: Symmetric,
        right: Float[Tensor, " N"],
        *,
        shift: float = 0.0,
        tolerance: float,
        precondition: Product | None = None,
    ) -> None:
        self._operator, self._shift, self._tolerance = operator, shift, tolerance
        self._precondition = precondition or (lambda r: r)
        self._norm = float(right.norm())
        self._basis = (right / self._norm)[None].to(operator.dtype) if self._norm > 0 else right[None][:0]
        self._images: Float[Tensor, "m1 m"] = torch.zeros(1, 0, dtype=torch.float64, device="cpu")
        self._complete = self._norm == 0

    @property
    def count(self) -> int:
        """The number of products."""
        return self._images.shape[1]

    def _coefficients(self) -> tuple[Tensor, Tensor]:
        """Return the coefficients of the iterate and those of its residual, in the basis."""
        first = torch.zeros(len(self._images), 1, dtype=torch.float64, device="cpu")
        first[0] = self._norm
        if self.count == 0:
            return first[:0, 0], first[:, 0]
        found = torch.linalg.lstsq(self._images, first, driver="gelsd").solution
        return found[:, 0], (first - self._images @ found)[:, 0]

    @property
    def left(self) -> float:
        """The relative residual, up to the rounding of the products."""
        return float(self._coefficients()[1].norm()) / self._norm if self._norm > 0 else 0.0

    @property
    def done(self) -> bool:
        """Whether the residual is within the tolerance, or cannot be reduced further."""
        return self._complete or self.left <= self._tolerance

    def step(self) -> None:
        """Extend the space by one product."""
        q = self._precondition(self._basis[-1].double())
        image = self._operator.matvec(q.to(self._operator.dtype)).double() + self._shift * q
        size, column = float(image.norm()), torch.zeros(len(self._basis), dtype=torch.float64, device=image.device)
        image = image.to(self._basis.dtype)
        for _ in range(2):  # once leaves what rounding has left
            more = self._basis @ image
            image = image - self._basis.T @ more
            column += more.double()
        length = float(image.double().norm())
        self._complete = length <= 4 * math.sqrt(len(q)) * torch.finfo(self._basis.dtype).eps * size
        m = self.count
        images = torch.zeros(m + 2, m + 1, dtype=torch.float64, device="cpu")
        images[: m + 1, :m], images[: m + 1, m], images[m + 1, m] = self._images, column.cpu(), length
        self._images = images[: m + 1] if self._complete else images
        if not self._complete:
            self._basis = torch.cat([self._basis, (image / length)[None]])

    def x(self) -> Float[Tensor, " N"]:
        """Compute the iterate."""
        found = self._coefficients()[0]
        if len(found) == 0:
            return torch.zeros(self._basis.shape[1], dtype=torch.float64, device=self._basis.device)
        return self._precondition(found.to(self._basis.device) @ self._basis[: len(found)].double())


class RefinedResiduals:
    """The outer iteration: exact products of inner solutions, combined into the smallest residual (GCR).

    Args:
        operator: The symmetric positive semi-definite operator K, whose products may be rough.
        exact: A function that multiplies a vector by K exactly.
        right: The right-hand side b, in float64 on the device of the operator.
        shift: The number added to the diagonal of K.
        tolerance: The tolerance on ‖b - Ax‖/‖b‖.
        precondition: A function that multiplies a vector by an approximate inverse. `None` is the identity.
        fall: The factor by which an inner iteration reduces the residual, by its own account. Rough products need a
            factor that they can achieve.
        longest: The largest number of products of an inner iteration.
    """

    def __init__(
        self,
        operator: Symmetric,
        exact: Product,
        right: Float[Tensor, " N"],
        *,
        shift: float = 0.0,
        tolerance: float,
        precondition: Product | None = None,
        fall: float = 0.3,
        longest: int = 50,
    ) -> None:
        self._operator, self._exact, self._shift, self._precondition = operator, exact, shift, precondition
        self._tolerance, self._fall, self._longest = tolerance, fall, longest
        self._norm = float(right.norm())
        self.x, self.residual = torch.zeros_like(right), right.clone()
        self._directions = self._images = right[None][:0]
        self.count, self._stuck = 0, False

    @property
    def left(self) -> float:
        """The relative residual, from exact products."""
        return float(self.residual.norm()) / self._norm if self._norm > 0 else 0.0

    @property
    def done(self) -> bool:
        """Whether the residual is within the tolerance, or the last inner iteration reduced it by less than 0.1 %."""
        return self._stuck or self.left <= self._tolerance

    def step(self, most: int | None = None) -> None:
        """Perform one inner iteration, and one exact product.

        Args:
            most: The largest number of products. `None` uses `longest`.
        """
        longest = self._longest if most is None else max(1, min(self._longest, most - 1))
        inner = MinimalResiduals(
            self._operator,
            self.residual,
            shift=self._shift,
            tolerance=max(self._fall, 0.5 * self._tolerance / self.left),
            precondition=self._precondition,
        )
        while inner.count < longest and not inner.done:
            inner.step()
        x = inner.x()
        image = self._exact(x) + self._shift * x
        for _ in range(2):
            within = self._images @ image
            image, x = image - within @ self._images, x - within @ self._directions
        size = float(image.norm())
        self.count += inner.count + 1
        before = self.left
        if size > 0:
            image, x = image / size, x / size
            part = float(image @ self.residual)
            self.x, self.residual = self.x + part * x, self.residual - part * image
            self._directions, self._images = (
                torch.cat([self._directions, x[None]]),
                torch.cat([self._images, image[None]]),
            )
        self._stuck = self.left > 0.999 * before

    def state(self) -> dict[str, Tensor]:
        """Return what `restore` needs to continue with the same bits."""
        vectors = torch.stack([self.x, self.residual])
        count = torch.tensor(self.count, device="cpu")
        return {"vectors": vectors, "directions": self._directions, "images": self._images, "count": count}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from the state of another process.

        Args:
            state: What `state` returned.
        """
        self.x, self.residual = state["vectors"].to(self.x).clone()
        self._directions, self._images = (state[name].to(self.x) for name in ("directions", "images"))
        self.count = int(state["count"])
