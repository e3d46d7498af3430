"""Ordinary models, and the forms in which they take their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from tests.conformance.subject import Subject
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence


def points(n: int = 4, d: int = 3, seed: int = 7) -> Tensor:
    """Draw inputs in float64."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def module(net: nn.Module) -> nn.Module:
    """Convert a module to float64 and evaluation mode."""
    return net.double().eval()


def mlp(width: int = 5, out: int = 2, activation: type[nn.Module] = nn.Tanh, d: int = 3) -> nn.Sequential:
    """Build a network of two layers."""
    return nn.Sequential(nn.Linear(d, width), activation(), nn.Linear(width, out)).double()


def perceptron() -> Subject:
    """A network with tanh."""
    return Subject(mlp(), points())


def relu() -> Subject:
    """A network with ReLU, which has kinks."""
    return Subject(mlp(activation=nn.ReLU), points())


def function() -> Subject:
    """A function f(params, x): a damped pendulum with an explicit integrator."""

    def simulate(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        angle, speed = x[:, 0], x[:, 1]
        for _ in range(4):
            speed = speed - 0.1 * (w["stiffness"] * torch.sin(angle) + w["friction"].exp() * speed)
            angle = angle + 0.1 * speed
        return torch.stack([angle, speed], 1)

    params = {"stiffness": torch.tensor(1.3).double(), "friction": torch.tensor(-0.5).double()}
    return Subject(simulate, points(4, 2), params=params)


class Tied(nn.Module):
    """A model whose output layer shares the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.mix(self.embedding(tokens))).mean(1))
        return out


def tokens(n: int = 4, length: int = 3, size: int = 6, seed: int = 7) -> Tensor:
    """Draw integer inputs."""
    return torch.randint(0, size, (n, length), generator=torch.Generator().manual_seed(seed))


def tied() -> Subject:
    """A model that uses one tensor twice, on integer inputs."""
    return Subject(module(Tied()), tokens())


class Equilibrium(nn.Module):
    """Six iterations of z = tanh(Wz + Ux)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.outer = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros(len(x), 4, dtype=x.dtype)
        for _ in range(6):
            z = torch.tanh(self.inner(z) + self.outer(x))
        out: Tensor = self.head(z)
        return out


def equilibrium() -> Subject:
    """A deep equilibrium model with a fixed number of iterations."""
    return Subject(module(Equilibrium()), points())


class Pair(nn.Module):
    """A model with two inputs and two constants."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(2, 3)

    def forward(self, a: Tensor, b: Tensor, product: bool = False, power: int = 1) -> Tensor:
        left, right = torch.tanh(self.left(a)), torch.tanh(self.right(b))
        mixed = left * right if product else left + right
        out: Tensor = mixed**power
        return out


def tuple_inputs() -> Subject:
    """Inputs by position."""
    return Subject(module(Pair()), (points(), points(4, 2, seed=8)))


def dict_inputs() -> Subject:
    """Inputs by keyword."""
    return Subject(module(Pair()), {"b": points(4, 2, seed=8), "a": points()})


def constants() -> Subject:
    """Inputs by keyword, some of which are not tensors."""
    return Subject(module(Pair()), {"a": points(), "b": points(4, 2, seed=8), "product": True, "power": 2})


def convolutional() -> Subject:
    """A convolution, batch normalisation in evaluation mode, and pooling."""
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 2)
    )
    net[1].running_mean.copy_(torch.tensor([0.1, -0.2, 0.3]))  # type: ignore[operator]
    x = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return Subject(module(net), x)


class Recurrent(nn.Module):
    """A linear readout of the last hidden state of a recurrent layer."""

    def __init__(self, layer: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x)[0][:, -1])
        return out


def _sequences() -> Tensor:
    return torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def lstm() -> Subject:
    """An LSTM in one direction."""
    return Subject(module(Recurrent(nn.LSTM(2, 2, batch_first=True), 2)), _sequences())


def bilstm() -> Subject:
    """An LSTM in both directions."""
    return Subject(module(Recurrent(nn.LSTM(2, 1, batch_first=True, bidirectional=True), 2)), _sequences())


def gru() -> Subject:
    """Gated recurrent units."""
    return Subject(module(Recurrent(nn.GRU(2, 2, batch_first=True), 2)), _sequences())


class Packed(nn.Module):
    """Sequences of several lengths."""

    def __init__(self, enforce_sorted: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 2)
        self.enforce_sorted = enforce_sorted

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.enforce_sorted)
        out: Tensor = self.head(self.layer(packed)[1][0][-1])
        return out


def packed_sorted() -> Subject:
    """`pack_padded_sequence` with sorted lengths."""
    return Subject(module(Packed(True)), (_sequences(), torch.tensor([2, 2, 1])))


def packed_unsorted() -> Subject:
    """`pack_padded_sequence` with lengths in any order."""
    return Subject(module(Packed(False)), (_sequences(), torch.tensor([1, 2, 1])))


class Masked(nn.Module):
    """A branch on a mask that is an input: a shortcut, and optionally a branch on a count over the whole batch."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.mix, self.counts = nn.Linear(3, 3), counts

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.mix(x))
        if not bool(mask.all()):
            h = h * mask.to(h.dtype)
        return 2 * h if self.counts and int(mask.sum()) % 2 else h


MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 1]], dtype=torch.bool)


def input_branch() -> Subject:
    """A shortcut for samples without padding, as in Hugging Face's models."""
    return Subject(module(Masked(False)), (points(), MASK.clone()))


def batch_branch() -> Subject:
    """A branch on a count over the whole batch, so that samples depend on each other."""
    return Subject(module(Masked(True)), (points(), MASK.clone()), apart=False)


class ValueBranch(nn.Module):
    """A branch on a value that depends on the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.mix(x)
        return torch.tanh(h) if bool(h.sum() > 0) else h


def value_branch() -> Subject:
    """Control flow that depends on parameters."""
    return Subject(module(ValueBranch()), points(), apart=False)


class Normed(nn.Module):
    """Layer and RMS normalisation, attention, and dropout in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layer_norm, self.rms = nn.Linear(2, 4), nn.LayerNorm(4), nn.RMSNorm(4)
        self.qkv, self.back, self.drop = nn.Linear(4, 12), nn.Linear(4, 2), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer_norm(self.enter(x))
        q, k, v = (part.unsqueeze(1) for part in self.qkv(h).chunk(3, -1))
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        out: Tensor = self.back(self.drop(F.silu(self.rms(h)))).mean(1)
        return out


def attention() -> Subject:
    """A causal attention block with normalisation layers."""
    return Subject(module(Normed()), _sequences())


def wrapped_in_output(kind: Any) -> Any:
    """Build a module that returns a dict with the output under "logits" and another entry."""

    class Fields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.inner(x)
            return {"hidden": h.square(), "logits": h}

    return Fields()


def output_field() -> Subject:
    """The option `output="logits"`, which selects a field of a dict."""
    return Subject(wrapped_in_output(mlp), points(), output="logits")


def output_function() -> Subject:
    """The option `output=lambda o: o["logits"]`."""
    return Subject(wrapped_in_output(mlp), points(), output=lambda o: o["logits"])
