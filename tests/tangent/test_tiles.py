"""Kernels on disk: they are correct, survive a killed process, reject other models, and can be solved with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from torch import nn

from lazyscope.errors import InputError, MissingExtraError, ModelError, StoreError
from lazyscope.model.base import Model
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.tangent.operator import as_matrix
from lazyscope.tangent.tiles import KernelTiles, open_tangent_kernel, tangent_kernel_to_zarr

TANH, RELU = nn.Tanh, nn.ReLU


def small(seed: int = 0, activation: type[nn.Module] = TANH) -> Model:
    torch.manual_seed(seed)
    return Model(nn.Sequential(nn.Linear(5, 16), activation(), nn.Linear(16, 3))).double()


def points(n: int = 23, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> KernelTiles:
    return tangent_kernel_to_zarr(small(), points(), tmp_path_factory.mktemp("kernel") / "K.zarr", tile=7)


def test_it_is_the_kernel_for_every_reader(written: KernelTiles) -> None:
    kernel = tangent_kernel(small(), points()).numpy()
    assert written.shape == (23, 23, 3, 3)
    assert written.tile == 6, "four even tiles, not three of 7 and one of 2"
    np.testing.assert_allclose(written[...], kernel, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.asarray(written), kernel, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.asarray(zarr.open_array(written.path, mode="r")), kernel, rtol=1e-12, atol=1e-12)
    lazy = written.to_dask()
    assert lazy.chunksize == (6, 6, 3, 3)
    matrix = lazy.transpose(0, 2, 1, 3).reshape(69, 69)
    np.testing.assert_allclose(matrix.compute(scheduler="synchronous"), as_matrix(torch.from_numpy(kernel)), atol=1e-12)
    assert np.array_equal(written[...], written[...].transpose(1, 0, 3, 2)), "symmetric to the last bit"


@pytest.mark.slow
def test_linear_algebra_from_the_tiles(written: KernelTiles) -> None:
    matrix = as_matrix(tangent_kernel(small(), points()))
    torch.testing.assert_close(written.matrix.to_dense(), matrix)
    y = torch.randn(69, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = written.solve(y, shift=0.1)
    assert found.converged
    exact = torch.linalg.solve(matrix + 0.1 * torch.eye(69, dtype=torch.float64), y)
    torch.testing.assert_close(found.x, exact, rtol=1e-7, atol=1e-7)
    top = written.top(5)
    torch.testing.assert_close(top.values, torch.linalg.eigvalsh(matrix).flip(0)[:5], rtol=1e-9, atol=0)
    assert float(top.residuals.max()) < 1e-8 * float(top.values[0])


def test_one_tile_larger_than_the_data_takes_no_more_room(tmp_path: Path) -> None:
    found = tangent_kernel_to_zarr(small(), points(4), tmp_path / "K", tile=256)
    assert found.tile == 4
    (chunk,) = (path for path in (tmp_path / "K").rglob("*") if path.is_file() and path.name != "zarr.json")
    assert chunk.stat().st_size == 4 * 4 * 3 * 3 * 8 + 4, "and a checksum"


def test_what_is_there_is_kept_and_what_is_missing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "K.zarr"
    whole = tangent_kernel_to_zarr(small(), points(), path, tile=6)[...]
    (path / "c/1/2/0/0").unlink()
    with pytest.raises(StoreError, match=r"1 tiles of .* are not written yet; run tangent_kernel_to_zarr"):
        open_tangent_kernel(path)
    old, young = (path / f"c/1/2/0/0.{name}.partial" for name in ("1234", "5678"))
    for partial in (old, young):
        partial.write_bytes(b"half a tile")
    os.utime(old, (time.time() - 1e5,) * 2)
    seen: list[tuple[int, int]] = []
    again = tangent_kernel_to_zarr(small(), points(), path, tile=6, progress=lambda *so_far: seen.append(so_far))
    assert seen == [(9, 10), (10, 10)]
    assert np.array_equal(again[...], whole)
    assert list(path.rglob("*.partial")) == [young], "it may have a writer that lives"
    monkeypatch.setattr("lazyscope.tangent.source.tangent_kernel", None)  # nothing may be computed a second time
    tangent_kernel_to_zarr(small(), points(), path, tile=6)


@pytest.mark.parametrize(
    ("model", "x", "tile", "other"),
    [
        (small(1), points(), 6, "weights and outputs"),
        (small(), points(seed=2), 6, "data and outputs"),
        (small(), points(22), 6, "data"),
        (small(activation=RELU), points(), 6, "outputs"),
        (small(), points(), 5, "tile"),
        (small().to(torch.float32), points().float(), 6, "weights and data and dtype"),
    ],
    ids=["weights", "data", "fewer points", "code", "tile", "dtype"],
)
def test_another_kernel_is_not_resumed(
    written: KernelTiles, model: Model, x: torch.Tensor, tile: int, other: str
) -> None:
    with pytest.raises(StoreError, match=f"a kernel of other {other}; choose another path, or remove"):
        tangent_kernel_to_zarr(model, x, written.path, tile=tile)


def test_misuse_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("mine")
    with pytest.raises(StoreError, match="is not a kernel; choose another path"):
        tangent_kernel_to_zarr(small(), points(), tmp_path / "full")
    with pytest.raises(StoreError, match="does not contain a tangent kernel"):
        open_tangent_kernel(tmp_path / "nothing")
    zarr.create_array(tmp_path / "foreign", shape=(3,), dtype="float32")
    with pytest.raises(StoreError, match="does not contain a tangent kernel"):
        open_tangent_kernel(tmp_path / "foreign")
    with pytest.raises(InputError, match="pass a smaller tile"):
        tangent_kernel_to_zarr(small(), points(), tmp_path / "K", memory=1000)
    for start in (-1.0, 0.0):  # outputs that are NaN, and finite outputs with infinite gradients
        broken = Model(lambda w, x: (x @ w["w"]).sqrt(), {"w": torch.full((5, 1), start)})
        with pytest.raises(ModelError, match="NaN"):
            tangent_kernel_to_zarr(broken, torch.ones(4, 5), tmp_path / "N")


def test_without_zarr_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingExtraError, match=r"pip install .lazyscope\[cluster\]"):
        tangent_kernel_to_zarr(small(), points(), tmp_path / "K")


def test_changed_tiles_are_set_aside_and_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "K.zarr"
    tiles = tangent_kernel_to_zarr(small(), points(), path, tile=6)
    whole = tiles[...]
    for victim in ("c/1/2/0/0", "c/2/1/0/0"):  # a tile and its mirror image
        content = bytearray((path / victim).read_bytes())
        content[100] ^= 1
        (path / victim).write_bytes(content)
    np.testing.assert_array_equal(tiles[:6, :6], whole[:6, :6])
    with pytest.raises(StoreError, match=r"2 tiles of .* are damaged and were renamed; run tangent_kernel_to_zarr"):
        tiles[3:]
    assert sorted(file.name for file in path.rglob("*.damaged")) == ["0.damaged", "0.damaged"]
    with pytest.raises(StoreError, match=r"1 tiles of .* are missing; run tangent_kernel_to_zarr"):
        tiles.to_dask()[6:12, 12:18].compute(scheduler="synchronous")
    with pytest.raises(StoreError, match=r"1 tiles .* not written yet"):  # a tile of the upper triangle
        open_tangent_kernel(path)
    np.testing.assert_array_equal(tangent_kernel_to_zarr(small(), points(), path, tile=6)[...], whole)


BITS = 1000 if os.environ.get("LAZYSCOPE_SLOW") == "1" else 300


def test_no_flipped_bit_of_a_kernel_passes(tmp_path: Path) -> None:
    """If a bit changes, the kernel is read as it was written, or an error is raised."""
    path = tmp_path / "K.zarr"
    tiles = tangent_kernel_to_zarr(small(), points(3), path, tile=3)
    whole, recipe = tiles[...], tiles.recipe
    files = sorted(file for file in path.rglob("*") if file.is_file())
    contents = {file: file.read_bytes() for file in files}
    random = np.random.default_rng(0)
    refused = 0
    for which, bit in random.integers(0, (len(files), 1 << 40), (BITS, 2)).tolist():
        file = files[which]
        place, bit = divmod(bit % (8 * len(contents[file])), 8)
        file.write_bytes(
            contents[file][:place] + bytes([contents[file][place] ^ (1 << bit)]) + contents[file][place + 1 :]
        )
        try:
            tiles = open_tangent_kernel(path) if file.name == "zarr.json" else tiles
            assert tiles.recipe == recipe
            assert np.array_equal(tiles[...], whole)
        except StoreError:
            refused += 1
        file.write_bytes(contents[file])
    assert refused > 0.95 * BITS, "only layout may change"


def test_a_kernel_written_without_checksums_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "K.zarr"
    tangent_kernel_to_zarr(small(), points(6), path, tile=3)
    described = path / "zarr.json"
    described.write_text(re.sub(r',\s*"checksum": "[0-9a-f]*"', "", described.read_text()))
    with pytest.raises(
        StoreError, match=r"does not contain a tangent kernel \(.*checksum.*\); remove it, and write one"
    ):
        open_tangent_kernel(path)


WRITER = """
import sys, torch
from torch import nn
from lazyscope.tangent.tiles import tangent_kernel_to_zarr

torch.set_num_threads(1)
torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(400, 20)
say = lambda done, total: print(done, total, flush=True)
tangent_kernel_to_zarr(net, x, sys.argv[1], tile=40, memory=2**26, progress=say)
"""


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "K.zarr"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line.split()[0]) == 20:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    stored = {file: file.stat().st_mtime_ns for file in path.rglob("c/*/*/0/0")}
    before = KernelTiles(path)
    done = 55 - sum(1 for _ in before.missing())
    assert 20 <= done < 55
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)), torch.randn(400, 20)
    seen: list[int] = []
    tiles = tangent_kernel_to_zarr(net, x, path, tile=40, memory=2**26, progress=lambda so_far, _: seen.append(so_far))
    assert seen == list(range(done, 56))
    upper = [path / f"c/{i}/{j}/0/0" for i, j in tiles.upper()]
    assert all(file.stat().st_mtime_ns == stored[file] for file in upper if file in stored), "written once"
    random = np.random.default_rng(0)
    for i, j in random.integers(0, 10, (8, 2)).tolist():
        rows, columns = tiles.rows(i), tiles.rows(j)
        direct = tangent_kernel(Model(net), x[rows], x[columns]).numpy()
        np.testing.assert_allclose(tiles[rows, columns], direct, rtol=1e-4, atol=1e-4 * direct.max())


CLUSTER = """
import os, sys, torch
from pathlib import Path
from torch import nn
from distributed import Client, LocalCluster
from lazyscope import Model
from lazyscope.errors import ModelError
from lazyscope.tangent.tiles import tangent_kernel_to_zarr

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double(), torch.randn(23, 5).double()
    torch.save((net, x), folder / "case.pt")
    local = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0")
    with local as cluster, Client(cluster) as client:
        assert os.getpid() not in client.run(os.getpid).values()
        tangent_kernel_to_zarr(net, x, folder / "K.zarr", tile=8, client=client)
        broken = Model(lambda w, x: (x @ w["w"]).sqrt(), {"w": torch.zeros(5, 1)})
        try:
            tangent_kernel_to_zarr(broken, torch.ones(4, 5), folder / "N.zarr", client=client)
        except ModelError as error:
            print(error)
"""


@pytest.mark.slow
def test_on_a_cluster_of_processes(tmp_path: Path) -> None:
    """The client runs in a separate process, as a model with run-time type checks cannot be sent to a worker."""
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "contains NaN or infinite values" in done.stdout
    net, x = torch.load(tmp_path / "case.pt", weights_only=False)
    found = open_tangent_kernel(tmp_path / "K.zarr")
    assert found.shape == (23, 23, 3, 3)
    np.testing.assert_allclose(found[...], tangent_kernel(net, x).numpy(), rtol=1e-12, atol=1e-12)
