"""Layers with special derivatives, storage or parametrisations."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from tests.conformance.ordinary import mlp, module, points, tokens
from tests.conformance.subject import Subject
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class Bag(nn.Module):
    """A linear readout of the mean embedding of the tokens of a sample."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        out: Tensor = self.head(torch.tanh(h if h.ndim == 2 else h.mean(1)))
        return out


def _bags(layer: nn.Module) -> Subject:
    net = module(Bag(layer))
    plain = module(Bag(nn.Embedding(6, 3)))
    plain.load_state_dict(net.state_dict())
    return Subject(net, tokens(), plain=plain)


def embedding_bag() -> Subject:
    """EmbeddingBag, whose backward torch cannot differentiate again."""
    return _bags(nn.EmbeddingBag(6, 3, mode="mean"))


def sparse_embedding() -> Subject:
    """Embedding(sparse=True), whose gradient is a sparse tensor."""
    return _bags(nn.Embedding(6, 3, sparse=True))


def weight_norm() -> Subject:
    """A layer with `parametrizations.weight_norm`."""
    net = mlp()
    plain = mlp()
    parametrizations.weight_norm(net[0])
    parametrize.register_parametrization(plain[0], "weight", Normalised())
    plain.load_state_dict(net.state_dict())
    return Subject(module(net), points(), plain=module(plain))


class Normalised(nn.Module):
    """The weight g·v/|v| of each row, in operations that torch can differentiate twice."""

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        return g * v / v.square().sum(1, keepdim=True).sqrt()

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return w.square().sum(1, keepdim=True).sqrt(), w


def weight_norm_hook() -> Subject:
    """A layer with the old hook, `torch.nn.utils.weight_norm`."""
    net = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(net[0])
    return Subject(net, points())


def spectral_norm() -> Subject:
    """A spectral norm in evaluation mode, whose singular vectors are buffers."""
    net = mlp()
    parametrizations.spectral_norm(net[0])
    return Subject(module(net), points())


def orthogonal() -> Subject:
    """The matrix exponential of a skew-symmetric matrix."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    parametrizations.orthogonal(net[0], orthogonal_map="matrix_exp")
    return Subject(module(net), points())


class Algebra(nn.Module):
    """A function of a well-conditioned 3 × 3 matrix for each sample."""

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.rule = nn.Linear(3, 9), rule

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.mix(x)).unflatten(-1, (3, 3))
        return self.rule(a @ a.mT + torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)), x)


def _algebra(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Subject]:
    return lambda: Subject(module(Algebra(rule)), points(3))


solve = _algebra(lambda a, x: torch.linalg.solve(a, x))
eigvalsh = _algebra(lambda a, x: torch.linalg.eigvalsh(a))
cholesky = _algebra(lambda a, x: torch.linalg.cholesky(a).sum(-1))
inverse = _algebra(lambda a, x: torch.linalg.inv(a).sum(-1))
determinant = _algebra(lambda a, x: torch.stack([torch.linalg.det(a), torch.logdet(a)], -1))
eigh = _algebra(lambda a, x: torch.linalg.eigh(a)[1].square()[..., 0])
svd = _algebra(lambda a, x: torch.linalg.svdvals(a))
