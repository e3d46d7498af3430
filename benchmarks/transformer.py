"""The cost of one training step of GPT-2 as a scaled and as a linearised model, relative to a plain step.

    python benchmarks/transformer.py [--device cuda] [--batch 4] [--length 1024] [--precision tf32|bf16|float32]
        [--compiled | --whole] [--mode reduce-overhead] [--forward-mode] [--curve]
        [--rows plain,Scaled]

All models are measured in one run, with the same tokens, cross-entropy, optimiser (SGD) and precision. If only matrix
products are counted, a plain step costs 3 units and a scaled step 5. `--forward-mode` adds the usual implementation for
α = ∞, which is `torch.func.jvp` of the functional forward and the backward pass through it. `--curve` repeats all
measurements for lengths from 256 to 8192, with a constant number of tokens where possible. `--compiled` compiles the
plain model as a whole and the other models with their method `compile`, which compiles repeated blocks once. `--whole`
compiles these models as a whole, too. Without a GPU, a small model is measured.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import typer
from torch import Tensor, nn

from lazyscope.model.transform import Linearised, Scaled, TangentModule


class Block(nn.Module):
    """A block of GPT-2: causal attention and a GELU network, each applied after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (
            each.view(n, t, self.heads, d // self.heads).transpose(1, 2)
            for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(n, t, d))
        inner: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + inner


class GPT2(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, w in self.named_parameters():
            if w.dim() == 2:
                shrink = math.sqrt(2 * layers) if "project" in name or "down" in name else 1.0
                nn.init.normal_(w, std=0.02 / shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        out: Tensor = self.norm(self.blocks(x)) @ self.tokens.weight.T
        return out


class ForwardMode(nn.Module):
    """The linearised model h(w₀) + Dh(w₀)v, computed by `torch.func.jvp`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self._net = [net]
        self._start = {name: w.detach() for name, w in net.named_parameters()}
        self.v = nn.ParameterList([torch.zeros_like(w) for w in self._start.values()])

    def forward(self, x: Tensor) -> Tensor:
        v = dict(zip(self._start, self.v, strict=True))
        call = lambda w: torch.func.functional_call(self._net[0], w, (x,))  # noqa: E731
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # other backends lack forward mode
            value, slope = torch.func.jvp(call, (self._start,), (v,))  # type: ignore[misc]
        return value + slope  # type: ignore[no-any-return]


def training_step(net: nn.Module, x: Tensor, y: Tensor, precision: str) -> Callable[[], None]:
    """Return a function that performs one step of SGD on the cross-entropy."""
    optimiser = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = nn.functional.cross_entropy(net(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimiser.step()

    return step


def measured(step: Callable[[], None], repeats: int, cuda: bool) -> tuple[float, float, float]:
    """Measure the time of the first step, the median time of the later steps, and their peak memory in GB."""
    times = []
    for number in range(repeats + 3):
        if cuda:
            torch.cuda.synchronize()
            if number == 1:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() if cuda else kept(step)
    return times[0], statistics.median(times[3:]), memory / 1e9


def kept(step: Callable[[], None]) -> int:
    """Count the bytes that a step saves for its backward pass, including parameters and v. It is used without a GPU."""
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step()
    return sum(sizes.values())


def table(
    shape: dict[str, int], batch: int, device: str, precision: str, kind: str, mode: str, rows: dict[str, Any]
) -> None:
    """Print one line for each model: its time and memory, and their ratios to those of the plain step."""
    cuda, plain = device == "cuda", (math.nan, math.nan)
    print(f"GPT-2, {batch} × {shape['length']} tokens, {shape['layers']} layers, {device}, {precision}, {kind} {mode}")
    for name, wrap in rows.items():
        torch.manual_seed(0)
        x, y = torch.randint(shape["vocabulary"], (2, batch, shape["length"]), device=device)
        try:
            with torch.device(device):
                net: Any = wrap(GPT2(**shape).eval())
            start = time.perf_counter()
            if kind == "whole" and name != "plain":
                with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
                    net(x)  # this traces the program before anything is compiled
            traced = time.perf_counter() - start
            ready: Any = net
            if kind != "eager":
                if kind == "whole" or not isinstance(net, TangentModule):
                    ready = torch.compile(net, mode=mode or None)
                else:
                    net.compile(mode=mode or None)
            step = training_step(ready, x, y, precision)
            first, took, memory = measured(step, 20 if cuda else 3, cuda)
            plain = (took, memory) if name == "plain" else plain
            print(
                f"{name:22} {1e3 * took:9.1f} ms {took / plain[0]:5.2f} ×   {memory:6.1f} GB {memory / plain[1]:5.2f} ×"
                f"   start {traced + first:5.1f} s",
                flush=True,
            )
        except torch.OutOfMemoryError:
            print(f"{name:22} out of memory", flush=True)
        net, step = None, lambda: None
        with contextlib.suppress(AttributeError):
            torch._dynamo.reset()
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()


def main(
    device: str = "cpu",
    batch: int = 4,
    length: int = 1024,
    vocabulary: int = 50304,
    precision: str = "tf32",
    compiled: bool = False,
    whole: bool = False,
    mode: str = "",
    forward_mode: bool = False,
    curve: bool = False,
    rows: str = "plain,Scaled,Linearised,checkpointed,torch",
) -> None:
    """Print the table for one length, or for several lengths with `--curve`."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    shape = {"layers": 12, "width": 768, "heads": 12, "vocabulary": vocabulary}
    lengths = [256, 512, 1024, 2048, 4096, 8192] if curve else [length]
    if device != "cuda":
        shape, batch = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 1024}, 2
        lengths = [each for each in lengths if each <= 1024]
    all_rows: dict[str, Any] = {
        "plain": lambda net: net,
        "Scaled α=1000": lambda net: Scaled(net, 1e3),
        "Linearised (α=∞)": Linearised,
        "checkpointed α=1000": lambda net: Scaled(net, 1e3, checkpointed=True),
        "checkpointed α=∞": lambda net: Linearised(net, checkpointed=True),
    }
    if forward_mode:
        all_rows["torch.func.jvp"] = ForwardMode
    wanted = {name: wrap for name, wrap in all_rows.items() if name.startswith(tuple(rows.split(",")))}
    for each in lengths:
        size = max(1, (4096 if device == "cuda" else 1024) // each) if curve else batch
        kind = "whole" if whole else "compiled" if compiled else "eager"
        table({**shape, "length": each}, size, device, precision, kind, mode, wanted)


if __name__ == "__main__":
    typer.run(main)
