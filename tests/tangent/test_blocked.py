"""Eigenpairs, solutions and predictions from the tiles of a kernel, in this process and on workers that die."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.farm import Farm, wait_for
from torch import nn

from lazyscope.errors import InputError, LazyscopeError
from lazyscope.linalg.operator import Symmetric
from lazyscope.model.base import Model
from lazyscope.tangent.blocked import TiledMatrix, block_eigenpairs
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.tangent.operator import as_matrix
from lazyscope.tangent.regression import kernel_regression
from lazyscope.tangent.tiles import KernelTiles, open_tangent_kernel, tangent_kernel_to_zarr

POINTS, OUTPUTS, ROWS = 23, 3, 69


def small(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, OUTPUTS))).double()


def points(n: int = POINTS, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> KernelTiles:
    return tangent_kernel_to_zarr(small(), points(), tmp_path_factory.mktemp("kernel") / "K.zarr", tile=7)


class Counted(Symmetric):
    """A matrix that counts its products."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix, self.products = matrix, 0
        self.shape = (len(matrix), len(matrix))
        self.dtype, self.device = matrix.dtype, matrix.device

    def matmat(self, u: torch.Tensor) -> torch.Tensor:
        self.products += 1
        return self.matrix @ u


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 90), share=st.floats(0.01, 1.0), rank=st.integers(1, 90), decay=st.floats(0.0, 3.0), seed=...
)
def test_eigenpairs_are_those_of_the_dense_twin(size: int, share: float, rank: int, decay: float, seed: bool) -> None:
    """The eigenpairs are correct for matrices of any rank and decay, with repeated eigenvalues."""
    count = max(1, int(share * size))
    generator = torch.Generator().manual_seed(size * 100 + rank + seed)
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    spectrum = torch.arange(1, size + 1, dtype=torch.float64) ** -decay
    spectrum[rank:] = 0
    matrix = (rotation * spectrum) @ rotation.T
    found = block_eigenpairs(Counted((matrix + matrix.T) / 2), count, seed=int(seed))
    torch.testing.assert_close(found.values, spectrum[:count], rtol=0, atol=1e-9)
    torch.testing.assert_close(
        found.vectors.T @ found.vectors, torch.eye(count, dtype=torch.float64), rtol=0, atol=1e-9
    )
    left = matrix @ found.vectors - found.vectors * found.values
    torch.testing.assert_close(left.norm(dim=0), found.residuals, rtol=0, atol=1e-12)
    assert float(found.residuals.max()) < 1e-9


def test_many_eigenpairs_take_few_readings() -> None:
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(600, 600, generator=generator, dtype=torch.float64))[0]
    spectrum = torch.arange(1, 601, dtype=torch.float64) ** -1.5
    matrix = Counted((rotation * spectrum) @ rotation.T)
    found = block_eigenpairs(matrix, 50)
    torch.testing.assert_close(found.values, spectrum[:50], rtol=1e-9, atol=0)
    assert matrix.products < 25, "fewer than half as many readings as eigenpairs"
    with pytest.raises(LazyscopeError, match="within 2 products; increase `tolerance`"):
        block_eigenpairs(matrix, 50, products=2)
    with pytest.raises(LazyscopeError, match="count is 601; pass a number from 1 to 600"):
        block_eigenpairs(matrix, 601)


class Watched:
    """Tiles that record which of them were read."""

    def __init__(self, tiles: KernelTiles) -> None:
        self._tiles = tiles
        self.shape, self.dtype = tiles.shape, tiles.dtype
        self.read: list[tuple[int, ...]] = []

    def __getitem__(self, selection: Any) -> np.ndarray:
        part = self._tiles[selection]
        self.read.append(part.shape)
        return part

    def rows(self, index: int) -> slice:
        return self._tiles.rows(index)

    def upper(self) -> Iterator[tuple[int, int]]:
        return self._tiles.upper()


def test_a_product_reads_half_of_the_kernel_one_tile_at_a_time(tiles: KernelTiles) -> None:
    watched = Watched(tiles)
    u = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    product = TiledMatrix(watched) @ u
    torch.testing.assert_close(product, as_matrix(tangent_kernel(small(), points())) @ u)
    assert len(watched.read) == tiles.count * (tiles.count + 1) // 2
    assert max(watched.read) == (tiles.tile, tiles.tile, OUTPUTS, OUTPUTS)


@pytest.mark.parametrize("sets", [pytest.param(None, marks=pytest.mark.slow), 4], ids=["one set", "four sets"])
def test_regression_is_that_of_the_dense_twin(tiles: KernelTiles, sets: int | None) -> None:
    shape = (POINTS, OUTPUTS) if sets is None else (POINTS, OUTPUTS, sets)
    y = 5 + torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    fit = kernel_regression(tiles, points(), y, ridge=1e-3)
    assert fit.solution.converged
    assert float(fit.solution.residuals.max()) < 1e-9
    matrix = as_matrix(tangent_kernel(small(), points()))
    assert tiles.trace == pytest.approx(float(matrix.trace()), rel=1e-12)
    shifted = matrix + 1e-3 * matrix.trace() / ROWS * torch.eye(ROWS, dtype=torch.float64)
    exact = torch.linalg.solve(shifted, (y - y.mean(0)).reshape(ROWS, -1))
    new = points(20, seed=9)
    cross = as_matrix(tangent_kernel(small(), new, points()))
    expected = (cross @ exact).reshape(20, *y.shape[1:]) + y.mean(0)
    torch.testing.assert_close(fit.predict(new, model=small()), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fit.predict(new, model=small(), memory=200_000), expected, rtol=1e-6, atol=1e-6)


def test_targets_of_a_regression_may_be_arrays_lists_and_classes(tiles: KernelTiles) -> None:
    classes = torch.arange(POINTS) % OUTPUTS
    y = torch.nn.functional.one_hot(classes, OUTPUTS)
    expected = kernel_regression(tiles, points(), y.double(), ridge=1.0)
    for target in (y, y.numpy(), y.double().tolist(), classes, classes.numpy()):
        fit = kernel_regression(tiles, points(), target, ridge=1.0)
        torch.testing.assert_close(fit.solution.x, expected.solution.x)
    found = fit.predict(points(2), model=small(), memory="1MB")
    torch.testing.assert_close(found, expected.predict(points(2), model=small()))
    with pytest.raises(InputError, match="relabel"):
        kernel_regression(tiles, points(), classes + 1, ridge=1.0)
    with pytest.raises(InputError, match='memory="2GB"'):
        fit.predict(points(2), model=small(), memory="little")


def test_an_unfinished_solution_is_a_result(tiles: KernelTiles) -> None:
    fit = kernel_regression(tiles, points(), points(POINTS, 4)[:, :OUTPUTS], ridge=1e-6, iterations=2)
    assert not fit.solution.converged
    assert fit.solution.iterations == 2
    assert float(fit.solution.residuals.max()) > 1e-6


def test_misuse_names_the_remedy(tiles: KernelTiles) -> None:
    y = torch.zeros(POINTS, OUTPUTS)
    with pytest.raises(InputError, match=r"pass targets of shape \(23, 3\), or \(23, 3, m\)"):
        kernel_regression(tiles, points(), y[:5], ridge=1.0)
    with pytest.raises(InputError, match="positive, finite number"):
        kernel_regression(tiles, points(), y, ridge=0)
    with pytest.raises(InputError, match="NaN or infinite"):
        kernel_regression(tiles, points(), y / 0, ridge=1.0)
    fit = kernel_regression(tiles, points(), y, ridge=1.0)
    with pytest.raises(InputError, match="computed from other weights and outputs; pass those of"):
        fit.predict(points(2), model=small(1))
    with pytest.raises(InputError, match="computed from other data and outputs"):
        kernel_regression(tiles, points(seed=7), y, ridge=1.0).predict(points(2), model=small())
    with pytest.raises(InputError, match="pass the model"):
        fit.predict(points(2))
    with pytest.raises(InputError, match="pass the model instead of the tiles"):
        _ = fit.leave_one_out


CLIENT = """
import os, signal, sys, torch
from pathlib import Path
from torch import nn
from distributed import Client
from lazyscope.tangent.regression import kernel_regression
from lazyscope.tangent.tiles import tangent_kernel_to_zarr

torch.set_num_threads(1)
folder, address, victim = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4)).double()
x, new, y = torch.randn(240, 20).double(), torch.randn(30, 20).double(), torch.randn(240, 4).double()

def results(tiles, client):
    fit = kernel_regression(tiles, x, y, ridge=10.0, tolerance=1e-12)  # well conditioned: few readings, all digits
    assert fit.solution.converged
    return tiles.top(5).values, fit.predict(new, model=net, client=client)

def shoot(done, total):
    if done == 10:
        os.kill(victim, signal.SIGKILL)
        print("killed at", done, "of", total, flush=True)

with Client(address, set_as_default=False) as client:
    client.wait_for_workers(2)
    tiles = tangent_kernel_to_zarr(net, x, folder / "K.zarr", tile=24, client=client, progress=shoot)
    print("written with", len(client.nthreads()), "left", flush=True)
    client.wait_for_workers(2)
    there = results(tiles, client)
serial = tangent_kernel_to_zarr(net, x, folder / "serial.zarr", tile=24)
assert (tiles[...] == serial[...]).all()
for one, two in zip(there, results(serial, None), strict=True):
    torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)
print("equal", flush=True)
"""


@pytest.mark.slow
def test_a_worker_dies_in_the_middle_of_a_kernel(tmp_path: Path) -> None:
    """The client runs in a separate process, as a model with run-time type checks cannot be sent to a worker."""
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    log = tmp_path / "log.txt"
    with Farm(tmp_path) as farm:
        victim, _ = farm.start_worker(), farm.start_worker()
        command = [sys.executable, str(script), str(tmp_path), farm.address, str(victim.pid)]
        with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as client:
            wait_for(lambda: "left" in log.read_text() or client.poll() is not None)
            farm.start_worker()
            client.wait(120)
        assert client.returncode == 0, log.read_text() + farm.say()
    said = log.read_text()
    assert "killed at 10 of 55" in said
    assert "written with 1 left" in said
    assert "equal" in said
    assert open_tangent_kernel(tmp_path / "K.zarr").shape == (240, 240, 4, 4)
