"""Kernels of infinite width on disk: they are those in memory, survive a killed process, and can be solved with."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tangent.wide import normal
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.errors import InputError, StoreError
from lazyscope.tangent import KernelTiles


def small(activation: nn.Module | None = None) -> nn.Module:
    layers = nn.Conv2d(2, 8, 3, padding=1), activation or nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 1)
    return nn.Sequential(*layers).double()


def variance(_: str, w: Tensor) -> float:
    return 2 / w[0].numel() if w.ndim > 1 else 0.1


def test_tiles_are_the_kernel_in_memory(tmp_path: Path) -> None:
    x, path = normal(11, 2, 4, 4), tmp_path / "K.zarr"
    seen: list[tuple[int, int]] = []

    def write(net: nn.Module, **options: Any) -> KernelTiles:
        given: dict[str, Any] = {"kind": "nngp", "variances": variance, "tile": 4, **options}
        return ls.limit_kernel_to_zarr(net, x, path, progress=lambda *so_far: seen.append(so_far), **given)

    tiles = write(small())
    assert tiles.shape == (11, 11, 1, 1)
    assert seen == [(done, 6) for done in range(7)], "the tiles below the diagonal are not computed"
    whole = ls.limit_kernel(small(), x, kind="nngp", variances=variance)
    np.testing.assert_allclose(tiles[...][..., 0, 0], whole.numpy(), rtol=1e-13)
    assert np.array_equal(tiles[...], tiles[...].transpose(1, 0, 2, 3))
    matrix = tiles.to_dask()[..., 0, 0].compute(scheduler="synchronous")
    np.testing.assert_allclose(matrix, whole.numpy(), rtol=1e-13)
    seen.clear()
    write(small())  # the weights do not matter
    assert seen == [(6, 6)]
    for other, words in (
        ({"kind": "ntk"}, "network and kind and outputs"),
        ({"variances": lambda _, w: 2.001 / w[0].numel() if w.ndim > 1 else 0.1}, "network"),
        ({"tile": 6}, "tile"),
    ):
        with pytest.raises(StoreError, match=f"a kernel of other {words}"):
            write(small(), **other)
    with pytest.raises(StoreError, match="network"):
        write(small(nn.LeakyReLU(1e-6)))
    with pytest.raises(StoreError, match="weights"):
        ls.tangent_kernel_to_zarr(small(), x, path, tile=4)
    (path / "c/0/1/0/0").unlink()
    with pytest.raises(StoreError, match="run limit_kernel_to_zarr with"):
        ls.open_tangent_kernel(path)
    with pytest.raises(InputError, match="pass a smaller tile"):
        write(small(), memory=100)


def test_regression_with_a_limit_kernel_on_disk(tmp_path: Path) -> None:
    x, new, classes = normal(12, 2, 4, 4), normal(5, 2, 4, 4, seed=1), torch.arange(12) % 3
    tiles = ls.limit_kernel_to_zarr(small(), x, tmp_path / "K", variances=variance, tile=5)
    stored = ls.kernel_regression(tiles, x, classes, ridge=1e-2, tolerance=1e-12)
    kernel = ls.limit_kernel(small(), x, variances=variance)
    cross = ls.limit_kernel(small(), new, x, variances=variance)
    dense = ls.kernel_regression(kernel, None, classes, ridge=1e-2)
    torch.testing.assert_close(stored.predict(cross), dense.predict(cross), rtol=1e-8, atol=1e-8)
    assert stored.accuracy(cross, torch.zeros(5, dtype=torch.long)) == dense.accuracy(cross, [0] * 5)
    with pytest.raises(InputError, match="or the kernel between the new points"):
        stored.predict(new)


WRITER = """
import sys, torch
from torch import nn
import lazyscope as ls

torch.set_num_threads(1)
torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(400, 20)
say = lambda done, total: print(done, total, flush=True)
ls.limit_kernel_to_zarr(net, x, sys.argv[1], tile=40, progress=say)
"""


def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "K.zarr"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line.split()[0]) == 20:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    done = 55 - sum(1 for _ in KernelTiles(path).missing())
    assert 20 <= done < 55
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(400, 20)
    seen: list[int] = []
    tiles = ls.limit_kernel_to_zarr(net, x, path, tile=40, progress=lambda so_far, _: seen.append(so_far))
    assert seen == list(range(done, 56))
    np.testing.assert_allclose(tiles[...][..., 0, 0], ls.limit_kernel(net, x).numpy(), rtol=1e-5)


CLUSTER = """
import sys, torch
from pathlib import Path
from torch import nn
from distributed import Client, LocalCluster
import lazyscope as ls

if __name__ == "__main__":
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double(), torch.randn(23, 5).double()
    local = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0")
    with local as cluster, Client(cluster) as client:
        variances = lambda _, w: 1 / w[0].numel() ** w.ndim
        tiles = ls.limit_kernel_to_zarr(
            net, x, Path(sys.argv[1]) / "K.zarr", tile=8, client=client, variances=variances
        )
        kernel = torch.from_numpy(tiles[...][..., 0, 0])
    expected = ls.limit_kernel(net, x, variances=variances)
    print(float((kernel - expected).abs().max()))
"""


@pytest.mark.slow
def test_on_a_cluster_of_processes(tmp_path: Path) -> None:
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-13
