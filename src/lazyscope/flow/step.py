"""One step of stochastic gradient descent without host synchronisation, so that a GPU can replay it as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lazyscope.flow.precision import Precision

BatchLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function from (outputs, classes) to the loss of a batch."""

Compiler: TypeAlias = Callable[[nn.Module], Callable[..., Any]]
"""A function that compiles a network, such as `torch.compile`, or returns it unchanged."""

WARM_UP = 3
"""The number of steps before a capture, as CUDA graphs require: libraries choose their algorithms in these steps."""


@runtime_checkable
class BatchSource(Protocol):
    """A source of batches, such as `lazyscope.data.augment.Batches`."""

    size: int
    steps: int

    @property
    def device(self) -> torch.device:
        """The device of the data."""

    def epoch(self, number: int) -> Int[Tensor, "steps ..."]:
        """Draw the random numbers of an epoch on the CPU, one entry per step."""

    def take(self, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Build the batch and the classes of one entry on the device."""


@final
class Step:
    """A step m ← momentum·m + ∇R + decay·v, v ← v - lr·m on the next batch of an epoch.

    Everything that changes between steps is stored on the device: the random draws of the epoch, the step sizes, a
    counter, and the sums of losses and of correct predictions. `begin` sets them for an epoch; then each step is a call
    without arguments.
    """

    def __init__(
        self,
        net: nn.Module,
        forward: Callable[..., Any],
        objective: BatchLoss,
        batches: BatchSource,
        momentum: float | int,
        precision: Precision,
        decay: float | int = 0.0,
    ) -> None:
        device = batches.device
        self.batches, self.objective, self.precision = batches, objective, precision
        self._net, self._forward = net, forward
        self._rate = torch.zeros((), device=device)
        params = [p for p in net.parameters() if p.requires_grad]
        self.optimiser = torch.optim.SGD(params, lr=self._rate, momentum=momentum, weight_decay=decay, fused=True)
        for parameter in params if momentum else []:  # created now, so that a checkpoint can be loaded into them
            self.optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self._draws = batches.epoch(0).to(device)
        self._rates = torch.zeros(batches.steps, device=device)
        self._counter = torch.zeros(1, dtype=torch.long, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.hits = torch.zeros((), dtype=torch.long, device=device)

    def begin(self, number: int, rates: list[float]) -> None:
        """Prepare an epoch: copy its draws and step sizes to the device, and reset the counter and the sums."""
        self._draws.copy_(self.batches.epoch(number))
        self._rates.copy_(torch.tensor(rates, device="cpu"))
        for each in (self._counter, self.loss, self.hits):
            each.zero_()

    def first_loss(self) -> float:
        """Compute the loss of the first batch of the epoch, without taking a step."""
        x, labels = self.batches.take(self._draws[0])
        with torch.no_grad(), self.precision.forward(self.batches.device):
            out = self._net(x)
        return float(self.objective(out.float(), labels))

    def __call__(self) -> None:
        """Take one step."""
        self._rate.copy_(self._rates.index_select(0, self._counter)[0])
        x, labels = self.batches.take(self._draws.index_select(0, self._counter)[0])
        self.optimiser.zero_grad(set_to_none=True)
        with self.precision.forward(self.batches.device):
            out = self._forward(x)
        out = out.float()
        loss = self.objective(out, labels)
        loss.backward()
        self.optimiser.step()
        with torch.no_grad():
            self._counter += 1
            self.loss += loss
            self.hits += (out.argmax(1) == labels).sum()

    def captured(self) -> Callable[[], Any]:
        """Return the step as a CUDA graph, which avoids the time to launch kernels from Python, or itself on a CPU.

        The capture takes some steps, so restore the parameters afterwards.
        """
        if self.batches.device.type != "cuda":
            return self
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._counter.zero_()  # an epoch may have fewer steps
                self()
            self._counter.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph.replay
