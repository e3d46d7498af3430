"""The change of the tangent kernel and of the kernels of its layers, split into scale and shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.ambient import derivatives
from lazyscope.errors import InputError, LazyscopeError
from lazyscope.model.base import Model
from lazyscope.model.inputs import Samples
from lazyscope.model.samples import Coupling, coupling
from lazyscope.tangent.kernel import tangent_kernel

_ROWS, _COUPLED_ROWS = 1024, 64
"""The largest number of rows of a kernel. For larger probes, kernels are those of the first points. The second number
is for points that depend on each other, such as those of batch normalisation, where each row takes a backward pass over
the whole probe."""
_SHARED = 4
"""The number of further combinations, the same for all points, that estimate the trace kernel."""


@final
@dataclass(frozen=True)
class KernelChange:
    """The change of a kernel K₀ to K, in the Frobenius norm."""

    scale: float
    """The ratio ‖K‖/‖K₀‖."""
    shape: float
    """The change of shape, 1 - ⟨K, K₀⟩/(‖K‖‖K₀‖)."""
    error: float = 0.0
    """The standard error of `shape`, which is 0 for exact kernels."""

    @property
    def drift(self) -> float:
        """The relative change ‖K - K₀‖/‖K₀‖."""
        return math.sqrt(max(0.0, (1 - self.scale) ** 2 + 2 * self.scale * self.shape))


@final
class LayerKernels:
    """The tangent kernels K_ℓ = D_ℓh D_ℓhᵀ of the layers of a model on a probe, compared with those at its start.

    For a model with at most `columns` outputs per point, the kernels are exact. Otherwise the outputs of point i are
    replaced by `columns` combinations Rᵢ of them with random signs, independent for all points. Two different rows of
    the kernel of these combinations are then products with independent vectors, so that the mean of ⟨RᵀKR, RᵀK'R⟩ over
    pairs of different rows is an unbiased estimate of ⟨K, K'⟩; scale and shape are ratios of such means. A jackknife
    over the columns gives their error. Further combinations, the same for all points, estimate the trace kernel.

    Args:
        model: The model, with weights w₀.
        x: The inputs of n points.
        layers: The parameters of each layer: names of parameters by names of layers.
        columns: The largest number of outputs, or combinations of outputs, per point; at least 3.
        seed: The seed of the random signs.

    Raises:
        InputError: If there are fewer than 3 columns, or the kernel at w₀ is zero.
    """

    def __init__(
        self, model: Model, x: Inputs, layers: Mapping[str, tuple[str, ...]], *, columns: int = 16, seed: int = 0
    ) -> None:
        if columns < 3:
            raise InputError(f"The kernels need at least 3 columns, and columns is {columns}; pass, for instance, 16.")
        self._layers = layers
        with torch.no_grad():
            out = model(x)
        count, outputs = len(out), out[0].numel()
        self.exact = outputs <= columns
        self._columns = outputs if self.exact else columns
        width = outputs if self.exact else columns + _SHARED
        self._joint = coupling(model, x) is not Coupling.NONE
        self.points = min(count, max(2, (_COUPLED_ROWS if self._joint else _ROWS) // width))
        self._model, self._x = model, x
        if not self.exact:
            self._model, self._x = _read_out(model, x, out, columns, seed)
        if not self._joint:
            self._x = Samples(self._x).rows(slice(self.points))
        self._start = self._first(model.params)
        if not any(bool(kernel.any()) for kernel in self._start.values()):
            raise InputError(
                "The first kernel is zero, so its relative change is not defined; check the initialisation."
            )

    def _first(self, params: Params) -> dict[str, Tensor]:
        """The kernels at the start, from one backward pass per row if they cannot be computed layer by layer."""
        try:
            return self.kernels(params)
        # torch raises these for operations that it cannot differentiate or batch, which the model of a user may have.
        except (LazyscopeError, NotImplementedError, RuntimeError):
            if self._joint:
                raise
            self._joint, self.points = True, min(self.points, max(2, _COUPLED_ROWS // max(1, self._columns)))
            return self.kernels(params)

    def kernels(self, params: Params) -> dict[str, Float[Tensor, "n n c c"]]:
        """Compute the kernels of all layers.

        Args:
            params: The weights w by name.

        Returns:
            The kernels by layer in float64, of the outputs or of their random combinations.
        """
        model = self._model.at(params)
        if self._joint:
            return _joint_kernels(model, self._x, self._layers, self.points)
        found = tangent_kernel(model, self._x, by_layer=True)
        return {
            layer: torch.stack([found[name] for name in names]).double().sum(0) for layer, names in self._layers.items()
        }

    def change(self, kernels: Mapping[str, Float[Tensor, "n n c c"]]) -> tuple[KernelChange, dict[str, KernelChange]]:
        """Compare kernels with those at the start.

        Args:
            kernels: The kernels by layer, from `kernels`.

        Returns:
            The change of the whole kernel, and that of the kernel of each layer.
        """
        whole = self._compare(_sum(self._start), _sum(kernels))
        return whole, {name: self._compare(self._start[name], kernel) for name, kernel in kernels.items()}

    def alignment(self, kernels: Mapping[str, Float[Tensor, "n n c c"]], y: Float[Tensor, "n *out"]) -> float:
        """Compute the centred alignment of the trace kernel with the targets.

        Args:
            kernels: The kernels by layer, from `kernels`.
            y: The targets as numbers, of shape (n, …).

        Returns:
            The alignment ⟨Θ̃, ỸỸᵀ⟩/(‖Θ̃‖‖ỸỸᵀ‖), or NaN if the centred kernel or the centred targets are zero.
        """
        own = slice(None) if self.exact else slice(self._columns, None)
        theta = _sum(kernels)[:, :, own, own].diagonal(dim1=2, dim2=3).mean(-1)
        theta = theta - theta.mean(0) - theta.mean(1)[:, None] + theta.mean()
        rows = y[: self.points].double().reshape(self.points, -1)
        rows = rows - rows.mean(0)
        labels = rows @ rows.T
        sizes = float(theta.norm() * labels.norm())
        return float((theta * labels).sum()) / sizes if sizes > 0 else math.nan

    def _compare(self, before: Tensor, after: Tensor) -> KernelChange:
        if self.exact:
            products = (before * before).sum(), (before * after).sum(), (after * after).sum()
            return _change(*(float(each) for each in products))
        own = slice(self._columns)
        tables = [
            _pairs(a[:, :, own, own], b[:, :, own, own]) for a, b in ((before, before), (before, after), (after, after))
        ]
        whole, count = _change(*(float(table.sum()) for table in tables)), self._columns
        without = [
            _change(*(float(table.sum() - table[c].sum() - table[:, c].sum() + table[c, c]) for table in tables)).shape
            for c in range(count)
        ]
        mean = math.fsum(without) / count
        error = math.sqrt((count - 1) / count * math.fsum((each - mean) ** 2 for each in without))
        return KernelChange(whole.scale, whole.shape, error)


def _pairs(a: Tensor, b: Tensor) -> Tensor:
    """The sums of products over all pairs of points, by columns, without products of a row with itself."""
    own = (a.diagonal(dim1=0, dim2=1) * b.diagonal(dim1=0, dim2=1)).sum(-1)
    return (a * b).sum((0, 1)) - own.diag().diag()


def _change(first: float, mixed: float, last: float) -> KernelChange:
    """The change from the inner products ⟨K₀, K₀⟩, ⟨K₀, K⟩ and ⟨K, K⟩; NaN for a kernel that starts at zero."""
    if first <= 0:
        return KernelChange(math.nan, math.nan)
    if last <= 0:
        return KernelChange(0.0, math.nan)
    return KernelChange(math.sqrt(last / first), max(0.0, 1 - mixed / math.sqrt(first * last)))


def _sum(kernels: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(kernels.values())).sum(0)


def _read_out(model: Model, x: Inputs, out: Tensor, columns: int, seed: int) -> tuple[Model, Inputs]:
    """The model whose outputs are random combinations of the outputs, which are further inputs.

    For outputs (n, …, k), the sign of an entry is a product of one over the last dimension and one over the others, as
    only pairs of signs need to be uncorrelated. This takes far less memory for the logits of long sequences.
    """
    random = torch.Generator().manual_seed(seed)
    n, last = len(out), out.shape[-1] if out.ndim > 1 else 1
    others = out[0].numel() // last

    def signs(*shape: int) -> Tensor:
        own = torch.randint(0, 2, (n, *shape, columns), generator=random, device="cpu")
        shared = torch.randint(0, 2, (1, *shape, _SHARED), generator=random, device="cpu").expand(n, *shape, _SHARED)
        return (torch.cat([own, shared], -1) * 2 - 1).to(out)

    first, second = signs(others), signs(last) / math.sqrt(others * last)

    def function(w: Params, inputs: Inputs) -> Tensor:
        found = model(inputs["x"], params=w)
        rows = found.reshape(found.shape[0], others, last) @ inputs["last"]
        mixed: Tensor = (rows * inputs["others"]).sum(1)
        return mixed

    return Model(function, model.params), {"x": x, "others": first, "last": second}


def _joint_kernels(
    model: Model, x: Inputs, layers: Mapping[str, tuple[str, ...]], points: int
) -> dict[str, Float[Tensor, "n n c c"]]:
    """The kernels of the first points of a batch whose points depend on each other, one backward pass per row."""
    with derivatives():
        leaves = {name: w.detach().requires_grad_() for name, w in model.params.items()}
        out = model(x, params=leaves)[:points].reshape(points, -1)
        rows = [
            torch.autograd.grad(each, list(leaves.values()), retain_graph=True, materialize_grads=True)
            for each in out.flatten()
        ]
    place = {name: at for at, name in enumerate(leaves)}
    found: dict[str, Tensor] = {}
    for layer, names in layers.items():
        flat = torch.stack([torch.cat([row[place[name]].flatten() for name in names]) for row in rows]).double()
        found[layer] = (flat @ flat.T).view(points, -1, points, out.shape[1]).permute(0, 2, 1, 3)
    return found
