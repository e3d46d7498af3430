"""Storage of tangent models, and special arguments of the entry points."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.conformance import coupled, huggingface
from tests.conformance.entries import Wrong, tiled
from tests.conformance.ordinary import points
from tests.conformance.situations import same, seeded, shift
from tests.conformance.subject import Plain
from torch import Tensor, nn

import lazyscope as ls


# ── storing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _moved() -> list[nn.Module]:
    modules: list[nn.Module] = [ls.Scaled(seeded(), 4.0), ls.Linearised(seeded())]
    for module in modules:
        shift(module)
    return modules


def deep_copies() -> None:
    for module in _moved():
        fresh = copy.deepcopy(module)
        expected = module(points())
        same("a copy", fresh(points()), expected)
        same("a copy of what was called", copy.deepcopy(module)(points()), expected)


def pickles() -> None:
    for module in _moved():
        fresh = pickle.dumps(module)
        expected = module(points())
        same("unpickled", pickle.loads(fresh)(points()), expected)
        same("unpickled after a call", pickle.loads(pickle.dumps(module))(points()), expected)


def across_processes() -> None:
    script = (
        "import sys, torch\n"
        "one, two, x = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.save([one(x).detach(), two(x).detach()], sys.argv[2])\n"
    )
    modules = _moved()
    with tempfile.TemporaryDirectory() as folder:
        there, back = Path(folder) / "there.pt", Path(folder) / "back.pt"
        torch.save([*modules, points()], there)
        command = [sys.executable, "-c", script, str(there), str(back)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
        for module, found in zip(modules, torch.load(back), strict=True):
            same("in another process", found, module(points()))


# ── special arguments ──────────────────────────────────────────────────────────────────────────────────────────────
def whole_batch() -> None:
    """Check the kernel of samples that depend on each other, with `together=True`."""
    for make in (coupled.centred, coupled.gated, coupled.batch_norm, coupled.centred_many):
        plain, subject = Plain(make), make()
        assert isinstance(subject.net, nn.Module)
        subject.net.load_state_dict(plain.start)
        n, k = len(plain.initial), plain.initial.numel() // len(plain.initial)
        found = ls.tangent_kernel(subject.net, subject.x, together=True)
        same("kernel", found, tiled(plain.kernel, (n, k)))


def _vocabulary() -> tuple[nn.Module, Tensor]:
    return nn.Linear(2, 50_257), torch.ones(64, 2)


def _at_once(compute: Callable[[], Any]) -> None:
    """Check that the error is raised before the computation and names all alternatives."""
    before = time.process_time()
    try:
        compute()
    except ls.errors.LazyscopeError as error:
        if time.process_time() - before > 2:
            raise Wrong("refused only after seconds of computation") from error
        missing = [way for way in ('outputs="trace"', "TangentOperator", "zarr") if way not in str(error)]
        if missing:
            raise Wrong(f"the message does not name {missing}: {error}") from error
        raise


def too_large() -> None:
    _at_once(lambda: ls.tangent_kernel(*_vocabulary()))


def too_large_by_layer() -> None:
    _at_once(lambda: ls.tangent_kernel(*_vocabulary(), by_layer=True))


def too_large_spectrum() -> None:
    ls.spectrum(*_vocabulary())


def memory_text() -> None:
    net, x = seeded(), points()
    same("kernel", ls.tangent_kernel(net, x, memory="1GB"), ls.tangent_kernel(net, x))
    same("spectrum", ls.spectrum(net, x, memory="1GB").eigenvalues, ls.spectrum(net, x).eigenvalues)
    ls.inspect(net, x, points(4, 2), steps=2, seconds=1, memory="1GB")


def numpy_targets() -> None:
    net, x, y = seeded(), points(), points(4, 2, seed=9)
    same("κ", ls.relative_scale(net, x, y.numpy(), starts=4).kappa, ls.relative_scale(net, x, y, starts=4).kappa)
    same("inspect", *(ls.inspect(net, x, t, steps=2, seconds=1).scale.relative.residual for t in (y.numpy(), y)))
    runs = [ls.gradient_descent(net, ls.loss.Square(), x, t, lr=0.1, steps=2).outputs for t in (y.numpy(), y)]
    same("gradient_descent", runs[0], runs[1])


def ignored_targets() -> None:
    net, x, y = seeded(), points(), torch.tensor([1, -100, 0, 1])
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(net(x), y, ignore_index=-100)
        losses.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), gradients, strict=True):
                p.sub_(0.3 * g)
    loss_of = ls.loss.CrossEntropy(ignore_index=-100)
    path = ls.gradient_descent(seeded(), loss_of, x, y, lr=0.3, steps=3, record=range(4))
    same("losses", path.loss, losses)


def class_targets() -> None:
    net, x, y = seeded(), points(), torch.tensor([1, 0, 0, 1])
    one, two = (ls.relative_scale(net, x, t, starts=4).kappa for t in (y, F.one_hot(y, 2).double()))
    same("κ", one, two)


def missing_output() -> None:
    class Fields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = seeded()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.inner(x)}

    ls.Model(Fields())(points())


def training_mode() -> None:
    ls.Scaled(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), 2.0)


def integers() -> None:
    ls.tangent_kernel(seeded(), torch.ones(4, 3, dtype=torch.long))


def not_a_number() -> None:
    x = points()
    x[1, 1] = math.nan
    ls.TangentOperator(seeded(), x)


def grouped() -> None:
    """Check that the message names the actual problem and not the shapes."""
    subject = huggingface.mixtral(experts="grouped_mm")
    assert isinstance(subject.net, nn.Module)
    try:
        ls.Model(subject.net, output=subject.output)(subject.x)
    except ls.errors.LazyscopeError as error:
        if "check the shape" in str(error):
            raise Wrong(f"the message blames the shape: {error}") from error
        raise


def tensor_cores() -> None:
    if not torch.cuda.is_available():
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(256, 8, 512, batch_first=True, dropout=0.0)
            net = nn.Sequential(layer, nn.Flatten(), nn.Linear(64 * 256, 1)).cuda().eval()
            x = torch.randn(5, 64, 256).cuda()
        found = ls.tangent_kernel(net, x).double()
        torch.set_float32_matmul_precision("highest")
        exact = ls.tangent_kernel(net.double(), x.double())
        same("kernel", found.cpu(), exact.cpu(), 1e-2)
    finally:
        torch.set_float32_matmul_precision(before)
