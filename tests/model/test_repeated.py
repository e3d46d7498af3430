"""Tests of repeated blocks: detection in the graph, checkpointing, and training in several processes."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lazyscope import Linearised, Model, Scaled
from lazyscope.model.increment import Scale, repeated
from lazyscope.model.increment.program import _IncrementWriter


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def network(depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), *(Block(8) for _ in range(depth)), nn.Linear(8, 2))


def calls(net: nn.Module, x: Tensor) -> int:
    """Count the calls of the repeated part."""
    seen: list[Any] = []

    def counted(part: torch.fx.GraphModule) -> Any:
        def call(*inputs: Any) -> Any:
            seen.append(1)
            return part(*inputs)

        return call

    model = Model(net)
    captured = model.graph(model.params, model.state, x)
    writer = _IncrementWriter(captured.module.graph, len(model.params), joint=True)
    program = torch.fx.GraphModule(captured.module, writer.graph)
    (outlined,) = repeated.outlined(program, counted)
    moves = [torch.randn_like(w) for w in model.params.values()]
    leaves = [*model.params.values(), *model.state.values(), x]
    flat, short = program(Scale.of(3.0), *moves, *leaves), outlined(Scale.of(3.0), *moves, *leaves)
    assert all(torch.equal(a, b) for a, b in zip(flat, short, strict=True))
    return len(seen)


def test_blocks_are_found_in_the_graph() -> None:
    x = torch.randn(4, 3)
    assert calls(network(5), x) == 5
    assert calls(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), x) == 0


@pytest.mark.parametrize("alpha", [1.0, 1e4, math.inf])
def test_checkpointed_models_give_the_same_values_and_gradients(alpha: float) -> None:
    net, x = network(4), torch.randn(5, 3)
    results = []
    for checkpointed in (False, True):
        lazy = Scaled(net, alpha, checkpointed=checkpointed)
        torch.manual_seed(1)
        with torch.no_grad():
            for p in lazy.parameters():
                p.normal_(std=0.1)
        out = lazy(x)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in lazy.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_checkpointed_models_keep_less() -> None:
    net, x = network(12), torch.randn(64, 3)

    def kept(checkpointed: bool) -> int:
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        lazy = Linearised(net, checkpointed=checkpointed)
        lazy(x)  # the first call traces the forward
        weights = {p.untyped_storage().data_ptr() for p in (*lazy.parameters(), *lazy.buffers())}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = lazy(x)
        del out
        return sum(size for place, size in sizes.items() if place not in weights)

    assert kept(True) < 0.5 * kept(False)


@pytest.mark.slow
def test_blocks_that_are_compiled_apart_give_the_same_values_and_gradients() -> None:
    # In a separate process, as the run-time type checks of the test suite cannot be compiled.
    script = """
        import math, torch
        from torch import nn
        from lazyscope import Scaled

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

            def forward(self, x):
                return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

        def results(lazy):
            torch.manual_seed(1)
            with torch.no_grad():
                for p in lazy.parameters():
                    p.normal_(std=0.1)
            lazy.zero_grad()
            out = lazy(x)
            out.square().sum().backward()
            return [out.detach(), *(p.grad.clone() for p in lazy.parameters())]

        torch.manual_seed(0)
        x = torch.randn(5, 3)
        deep = nn.Sequential(nn.Linear(3, 8), *(Block() for _ in range(4)), nn.Linear(8, 2))
        plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        for net, alpha, checkpointed in ((deep, 100.0, False), (deep, math.inf, True), (plain, 100.0, False)):
            lazy = Scaled(net, alpha, checkpointed=checkpointed)
            eager = results(lazy)
            torch._dynamo.utils.counters.clear()
            lazy.compile(backend="aot_eager")
            for mine, true in zip(results(lazy), eager, strict=True):
                torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2, "one graph for all blocks"
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
        print("same")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.stdout.strip().endswith("same"), done.stderr[-2000:]


@pytest.mark.slow
def test_training_in_two_processes_with_whole_and_with_sharded_parameters(tmp_path: Path) -> None:
    script = """
        import os, sys, torch
        import torch.distributed as dist
        import torch.multiprocessing as mp
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from lazyscope import Linearised, Scaled

        def data():
            torch.manual_seed(1)
            return torch.randn(8, 3), torch.randn(8, 1)

        def make():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 1))
            return Scaled(net, 10.0), Linearised(net)

        def train(lazy, x, y):
            optimiser = torch.optim.SGD(lazy.parameters(), lr=0.1)
            for _ in range(3):
                optimiser.zero_grad()
                nn.functional.mse_loss(lazy(x), y).backward()
                optimiser.step()
            whole = [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in lazy.parameters()]
            return torch.cat([p.flatten() for p in whole])

        def work(rank, port):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("gloo", rank=rank, world_size=2)
            x, y = data()
            for lazy, sharded, alone in zip(make(), make(), make()):
                true = train(alone, x, y)
                both = train(nn.parallel.DistributedDataParallel(lazy), x[rank::2], y[rank::2])
                torch.testing.assert_close(both, true, rtol=1e-4, atol=1e-6)
                fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
                largest = max(p.numel() for p in alone.parameters())
                assert max(p.to_local().numel() for p in sharded.parameters()) < largest
                torch.testing.assert_close(train(sharded, x[rank::2], y[rank::2]), true, rtol=1e-4, atol=1e-6)
            dist.destroy_process_group()

        if __name__ == "__main__":
            import socket
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                port = s.getsockname()[1]
            mp.spawn(work, (port,), nprocs=2)
            print("same")
    """
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.strip() == "same", done.stderr[-2000:]
