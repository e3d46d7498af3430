"""Models whose output for one sample depends on other samples of the batch."""

from __future__ import annotations

import torch
from tests.conformance.ordinary import mlp, module, points
from tests.conformance.subject import Subject
from torch import Tensor, nn


class Centred(nn.Module):
    """The outputs minus their mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y - y.mean(0)


def centred() -> Subject:
    """y - y.mean(0) on fewer samples than the batch size."""
    return Subject(module(Centred()), points(), apart=False)


def centred_many() -> Subject:
    """y - y.mean(0) on 200 samples, which exceed the batch size of 128."""
    return Subject(module(Centred()), points(200), apart=False)


class Gated(nn.Module):
    """Samples coupled through a gate that is zero at w₀, where the coupling affects only the derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = mlp(3, 1), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + self.gate * y.mean(0)


def gated() -> Subject:
    """A coupling that is zero at w₀."""
    return Subject(module(Gated()), points(), apart=False)


def gated_many() -> Subject:
    """A coupling that is zero at w₀, on 200 samples."""
    return Subject(module(Gated()), points(200), apart=False)


class BatchNorm(nn.Module):
    """Batch normalisation by the statistics of the batch, written explicitly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        out: Tensor = (y - y.mean(0)) / (y.var(0, unbiased=False) + 1e-3).sqrt()
        return out


def batch_norm() -> Subject:
    """Batch statistics."""
    return Subject(module(BatchNorm()), points(), apart=False)


EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 4]])


class Graph(nn.Module):
    """Two rounds of messages over the edges, summed by index_add, with one output for each node."""

    def __init__(self, edges: Tensor | None) -> None:
        super().__init__()
        self.enter, self.message, self.leave = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        known = self.edges if edges is None else edges
        assert isinstance(known, Tensor)
        source, target = known
        h = torch.tanh(self.enter(x))
        for _ in range(2):
            h = torch.tanh(h + torch.zeros_like(h).index_add(0, target, self.message(h)[source]))
        out: Tensor = self.leave(h)
        return out


def graph_buffer() -> Subject:
    """A whole graph with its edges in a buffer."""
    return Subject(module(Graph(EDGES.clone())), points(5), apart=False)


def graph_input() -> Subject:
    """A whole graph with its edges as the second input."""
    return Subject(module(Graph(None)), (points(5), EDGES.clone()), apart=False)


class SparseGraph(nn.Module):
    """A constant sparse adjacency matrix times the features."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, 3), nn.Linear(3, 2)
        dense = torch.zeros(5, 5, dtype=torch.float64)
        dense[EDGES[1], EDGES[0]] = 0.5
        self.register_buffer("adjacency", dense.to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.adjacency, Tensor)
        out: Tensor = self.leave(self.adjacency @ torch.tanh(self.enter(x)))
        return out


def sparse_adjacency() -> Subject:
    """A constant sparse CSR matrix."""
    return Subject(SparseGraph().double().eval(), points(5), apart=False)


class SparseWeight(nn.Module):
    """A parameter stored as sparse CSR."""

    def __init__(self) -> None:
        super().__init__()
        dense = torch.tensor([[0.5, 0.0, -1.0], [0.0, 2.0, 0.0]], dtype=torch.float64)
        self.weight = nn.Parameter(dense.to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight @ x.T).T


def sparse_weight() -> Subject:
    """A sparse CSR parameter."""
    return Subject(SparseWeight(), points())
