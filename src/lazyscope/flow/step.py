"""One step of stochastic descent that needs nothing from the host, so that a GPU can replay it as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lazyscope.flow.precision import Precision

Objective: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(outputs, classes) ↦ the loss of a batch."""

Compiler: TypeAlias = Callable[[nn.Module], Callable[..., Any]]
"""net ↦ the same function, faster: `torch.compile`, or nothing."""

WARM_UP = 3
"""Steps before a capture, as CUDA graphs ask for: libraries choose their algorithms in them."""


@runtime_checkable
class Sampler(Protocol):
    """Where batches come from; `lazyscope.data.augment.Batches` is one."""

    size: int
    steps: int

    @property
    def device(self) -> torch.device:
        """Where the data are."""

    def epoch(self, number: int) -> Int[Tensor, "steps ..."]:
        """What is random in an epoch, on the CPU: one entry a step."""

    def take(self, draw: Tensor) -> tuple[Tensor, Tensor]:
        """The batch and the classes of one entry, cut out on the device."""


@final
class Step:
    """v ← v - lr·m, m ← momentum·m + ∇R, on the next batch of an epoch.

    All that changes from step to step lies on the device: what the epoch draws, the step sizes, a counter, the sums of
    loss and hits. `begin` fills them for an epoch; then a step is a call without arguments.
    """

    def __init__(
        self,
        net: nn.Module,
        forward: Callable[..., Any],
        objective: Objective,
        batches: Sampler,
        momentum: float | int,
        precision: Precision,
    ) -> None:
        device = batches.device
        self.batches, self.objective, self.precision = batches, objective, precision
        self._net, self._forward = net, forward
        self._rate = torch.zeros((), device=device)
        params = [p for p in net.parameters() if p.requires_grad]
        self.optimiser = torch.optim.SGD(params, lr=self._rate, momentum=momentum, fused=True)
        for parameter in params if momentum else []:  # at once, so that a checkpoint has a place to go to
            self.optimiser.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self._draws = batches.epoch(0).to(device)
        self._rates = torch.zeros(batches.steps, device=device)
        self._counter = torch.zeros(1, dtype=torch.long, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.hits = torch.zeros((), dtype=torch.long, device=device)

    def begin(self, number: int, rates: list[float]) -> None:
        """Prepare an epoch: its draws and step sizes go to the device, counter and sums to zero."""
        self._draws.copy_(self.batches.epoch(number))
        self._rates.copy_(torch.tensor(rates, device="cpu"))
        for each in (self._counter, self.loss, self.hits):
            each.zero_()

    def first_loss(self) -> float:
        """The loss of the epoch's first batch, without a step."""
        x, labels = self.batches.take(self._draws[0])
        with torch.no_grad(), self.precision.forward(self.batches.device):
            out = self._net(x)
        return float(self.objective(out.float(), labels))

    def __call__(self) -> None:
        """One step."""
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
        """The step as a CUDA graph, replayed without the time of launching kernels from Python; elsewhere itself.

        It moves the parameters by some steps; put them back afterwards.
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
