"""Ctrl-C ends every long computation within two seconds."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import signal, sys, torch
import lazyscope as ls
from torch import nn
from lazyscope.linalg import conjugate_gradients
from lazyscope.linalg.operator import Symmetric
from lazyscope.loss import Square

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))
x, y = torch.randn(2000, 20), torch.randn(2000, 4)

class Steep(Symmetric):
    shape, dtype, device = (2000, 2000), torch.float64, torch.device("cpu")
    def matmat(self, u):
        return torch.logspace(-12, 0, 2000, dtype=u.dtype)[:, None] * u

ls.relative_scale(net, x[:2], y[:2])  # what is imported late must not be interrupted on its way
ls.tangent_kernel(net, x[:2])
ls.gradient_flow(net, Square(), x[:2], y[:2], times=[1e-3])
runs = {
    "kernel": lambda: ls.tangent_kernel(net, x, memory="10MB"),
    "spectrum": lambda: ls.spectrum(net, x, top=300),
    "relative scale": lambda: ls.relative_scale(net, x, y, tolerance=0.0, iterations=10**6),
    "limit kernel": lambda: ls.limit_kernel_dense(torch.randn(8000, 20), depth=9, memory="100MB"),
    "gradient descent": lambda: ls.gradient_descent(net, Square(), x, y, lr=1e-3, steps=10**6),
    "gradient flow": lambda: ls.gradient_flow(net, Square(), x, y, times=[1e6], tolerance=0.0),
    "solve": lambda: conjugate_gradients(Steep(), torch.ones(2000).double(), tolerance=1e-200, iterations=10**9),
}
for name, run in runs.items():
    try:
        print(name, flush=True)
        run()
        print("finished", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except RuntimeError as error:  # if the signal comes while torch.vmap begins, torch fails as it cleans up
        print("interrupted" if isinstance(error.__context__, KeyboardInterrupt) else repr(error), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of POSIX")
def test_long_computations_stop_within_two_seconds() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        ended: dict[str, tuple[str, float]] = {}
        for name in child.stdout:
            time.sleep(0.8)  # let the computation start
            sent = time.perf_counter()
            child.send_signal(signal.SIGINT)
            ended[name.strip()] = (child.stdout.readline().strip(), time.perf_counter() - sent)
        child.wait(30)
    assert len(ended) == 7, ended
    assert all(word == "interrupted" for word, _ in ended.values()), ended
    assert all(seconds < 2 for _, seconds in ended.values()), ended
