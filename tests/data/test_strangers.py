"""Files of strangers: whatever they claim or hold, one sentence says what is wrong, and no memory is taken for it."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from tests.data.test_cifar10 import CLASSES, Evil, binary, encode, python3, write_folder, write_parquet, write_tar

from lazyscope.data import archive
from lazyscope.data import cifar10 as module
from lazyscope.data.cifar10 import images
from lazyscope.errors import DataError
from lazyscope.inspect import door

TEN = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)
MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where CIFAR-10 is looked for; one image of a class is a whole set here."""
    monkeypatch.setenv("LAZYSCOPE_DATA", str(tmp_path))
    monkeypatch.setattr(module, "EACH", {"test": 1})
    module._images.cache_clear()
    (tmp_path / "cifar10").mkdir()
    return tmp_path / "cifar10"


@contextmanager
def at_most(memory: int) -> Iterator[None]:
    """Fail if Python takes more bytes than that."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()


def flips(content: bytes, count: int) -> Iterator[bytes]:
    """The content with one bit flipped, at places spread over all of it and all bits of a byte."""
    for place in np.linspace(0, 8 * len(content) - 1, min(count, 8 * len(content))).astype(int):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << (place % 8)
        yield bytes(flipped)


def refused(read: Callable[[], torch.Tensor], expected: torch.Tensor | None = None) -> bool:
    """Whether what is read is refused, in one sentence; otherwise it must be what was written, if that is known."""
    try:
        found = read()
    except DataError as error:
        sentence = str(error)
    else:
        assert expected is None or torch.equal(found, expected)
        return False
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return True


def cifar() -> torch.Tensor:
    module._images.cache_clear()
    return images("test").pixels


# ── tar ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type = size, kind
    return entry.tobuf(tarfile.GNU_FORMAT)


def write_members(path: Path, *members: bytes) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for content in (*members, bytes(1024)):
            file.write(content + bytes(-len(content) % 512))


def test_a_member_larger_than_any_of_the_data_set_is_not_read(folder: Path) -> None:
    file, size = folder / "cifar-10-binary.tar.gz", archive.LARGEST + 1
    sentence = rf"test_batch.bin has {size} bytes, and files of CIFAR-10 have at most"
    write_members(file, member("test_batch.bin", size), bytes(size))
    with (
        at_most(20 * MIB),
        pytest.raises(DataError, match=sentence),
    ):
        images("test")
    file.unlink()
    with (folder / "test_batch.bin").open("wb") as sparse:
        sparse.truncate(size)
    with (
        at_most(20 * MIB),
        pytest.raises(DataError, match=sentence),
    ):
        images("test")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_long_names_are_skipped(kind: bytes, folder: Path) -> None:
    """Python's tarfile takes as much memory as a long name claims to need."""
    content = binary(TEN, CLASSES[:10])
    long = member("././@LongLink", 60 * MIB, kind)
    write_members(
        folder / "cifar-10-binary.tar.gz", long, bytes(60 * MIB), member("a/test_batch.bin", len(content)), content
    )
    with at_most(20 * MIB):
        found = images("test")
    assert torch.equal(found.pixels, torch.from_numpy(TEN))


def test_headers_of_archives_are_not_believed(folder: Path) -> None:
    file = folder / "cifar-10-binary.tar.gz"
    good = member("test_batch.bin", 30730)
    negative, damaged = bytearray(good), bytearray(good)
    negative[124:136] = b"\xff" * 12  # how GNU writes -1
    damaged[3] ^= 1
    for header, reason in (
        (member("././@LongLink", 2**31, tarfile.GNUTYPE_LONGNAME), "it unpacks to more than"),
        (member("other.bin", 2**33 - 1), "it unpacks to more than"),
        (bytes(negative), "the header of a member is damaged"),
        (bytes(damaged), "the header of a member is damaged"),
        (b"x" * 512, "damaged or is not CIFAR-10"),
        (member("test_batch.bin", 30730, tarfile.SYMTYPE) + bytes(30730), "it does not contain test_batch.bin"),
        (member("test_batch.bin", 30730), "it ends too early"),
    ):
        write_members(file, header)
        with at_most(20 * MIB), pytest.raises(DataError, match=reason):
            images("test")


# ── Parquet and images ────────────────────────────────────────────────────────────────────────────────────────────
def png(width: int, height: int) -> bytes:
    """A PNG that claims to be so large, and holds little."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(4096))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(12000, 12000), (40000, 40000), (32, 33), (2**31 - 1, 1)])
def test_images_are_measured_before_they_are_decoded(folder: Path, size: tuple[int, int]) -> None:
    good = encode(TEN[0])
    write_parquet(folder / "test-00000-of-00001.parquet", [png(*size), *[good] * 9], list(range(10)))
    with pytest.raises(DataError, match=f"an image of {size[0]}×{size[1]} pixels, not 32×32"):
        images("test")


def test_an_image_that_is_repeated_is_measured_once(folder: Path) -> None:
    """Two megabytes that stand for ten gigabytes."""
    large = pyarrow.DictionaryArray.from_arrays(np.zeros(500, np.int32), pyarrow.array([bytes(20 * MIB)]))
    table = {"img": pyarrow.StructArray.from_arrays([large], ["bytes"]), "label": [0] * 500}
    parquet.write_table(pyarrow.table(table), folder / "test-00000-of-00001.parquet", store_schema=False)
    before = pyarrow.total_allocated_bytes()
    with at_most(100 * MIB), pytest.raises(DataError, match=f"it contains an image of {20 * MIB} bytes"):
        images("test")
    assert pyarrow.default_memory_pool().max_memory() - before < 400 * MIB


def test_more_rows_than_the_data_set_has_are_refused(folder: Path) -> None:
    rows = archive.MOST + 1
    table = {"img": pyarrow.array([{"bytes": b""}] * rows), "label": np.zeros(rows, np.int64)}
    parquet.write_table(pyarrow.table(table), folder / "test-00000-of-00001.parquet")
    with pytest.raises(DataError, match=f"it contains {rows} rows"):
        images("test")


@pytest.mark.parametrize("labels", [[[i] for i in range(10)], [None] * 10, [0.5] * 10, [[]] * 10, ["0"] * 10])
def test_labels_are_a_row_of_whole_numbers(folder: Path, labels: list[object]) -> None:
    parquet.write_table(
        pyarrow.table({"img": [{"bytes": encode(TEN[0])}] * 10, "label": labels}),
        folder / "test-00000-of-00001.parquet",
    )
    with pytest.raises(DataError, match="damaged or is not CIFAR-10"):
        images("test")


# ── pickles ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_labels_in_pickles_are_a_row_of_whole_numbers(folder: Path) -> None:
    rows = TEN.reshape(10, -1)
    nested: list[object] = [0] * 100
    for _ in range(6):
        nested = [nested] * 100  # 10¹⁴ numbers in a few bytes
    two = np.arange(10).reshape(10, 1)
    odd: list[object] = [two, two.tolist(), nested, "0123456789", {}, None, [True] * 10, np.array(3), [2**70] * 10]
    for labels in (*odd, [-1] * 10):
        write_folder(folder, {"test_batch": pickle.dumps({"data": rows, "labels": labels}, protocol=2)})
        with at_most(20 * MIB), pytest.raises(DataError, match=r"damaged or is not CIFAR-10|classes -1"):
            images("test")


def test_a_pickle_takes_no_more_memory_than_it_has_bytes(folder: Path) -> None:
    """The unpickler of C makes room for two thousand million objects when told that there is one of this number."""
    for content in (
        b"\x80\x02}r\xff\xff\xff\x7f.",  # LONG_BINPUT
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",  # FRAME
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fab.",  # BINBYTES8
        b"\x80\x02" + b"(" * 10**5,
    ):
        write_folder(folder, {"test_batch": content})
        with at_most(20 * MIB), pytest.raises(DataError, match="damaged or is not CIFAR-10"):
            images("test")


# ── damage ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("form", ["parquet", "tar"])
def test_flipped_bits_are_refused_or_harmless(form: str, folder: Path) -> None:
    plain = np.repeat(np.arange(0, 90, 9, dtype=np.uint8), 3072).reshape(10, *archive.SHAPE)
    if form == "parquet":
        write_parquet(folder / "test-00000-of-00001.parquet", [encode(one) for one in plain], list(range(10)))
    else:
        write_tar(folder / "cifar-10-binary.tar.gz", "in", {"test_batch.bin": binary(plain, CLASSES[:10])})
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    count = 0
    for damaged in flips(whole, 120):
        file.write_bytes(damaged)
        # Of what Parquet holds only the images have checksums, and those that gzip has cover everything.
        count += refused(cifar, torch.from_numpy(plain) if form == "tar" else None)
    assert count > 40


def test_flipped_bits_of_pickles_are_refused_or_read(folder: Path) -> None:
    """A pickle has no checksum: what can be read may be other pixels, and nothing else happens."""
    whole = python3(np.zeros_like(TEN), CLASSES[:10])
    for damaged in flips(whole[:200], 200):
        write_folder(folder, {"test_batch": damaged + whole[200:]})
        refused(cifar)


# ── --data FILE.npz ───────────────────────────────────────────────────────────────────────────────────────────────
def test_flipped_bits_of_an_npz_are_refused_or_harmless(tmp_path: Path) -> None:
    """Of 1899 flips 180 ended in a traceback."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((9, 12)), np.arange(9) % 2
    path = tmp_path / "data.npz"
    np.savez(path, x=x, y=y)
    whole = path.read_bytes()

    def read() -> torch.Tensor:
        first, second = door._data(str(path), 0)
        return torch.cat([first.flatten(), second.double()])

    expected = torch.cat([torch.from_numpy(x).flatten(), torch.from_numpy(y).double()])
    count = 0
    for damaged in flips(whole, 500):
        path.write_bytes(damaged)
        count += refused(read, expected)
    assert count > 250


def test_an_npz_is_measured_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (door.LARGEST,)})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("y.npy", b"")
        file.writestr("x.npy", head.getvalue())
    claimed = path.read_bytes().replace(
        struct.pack("<II", len(head.getvalue()), len(head.getvalue())),
        struct.pack("<II", len(head.getvalue()), door.LARGEST + 1),
    )
    path.write_bytes(claimed)
    with at_most(MIB), pytest.raises(DataError, match=r"unpacks to 2\.0 GiB, but at most 2 GiB are read; write fewer"):
        door._data(str(path), 0)


def test_odd_arrays_of_an_npz_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    one = np.ones(3)
    for x, reason in (
        (np.array(3.0), "x in .* is a single number; write one row"),
        (1j * one, "x in .* is complex"),
        (np.array(["a", "b", "c"]), "plain arrays"),
        (np.array([{}] * 3), "plain arrays"),
        (np.array([Evil()]), "plain arrays"),
        (np.zeros(3, [("a", "f4")]), "plain arrays"),
    ):
        np.savez(path, x=x, y=one)
        with pytest.raises(DataError, match=reason):
            door._data(str(path), 0)
    np.savez(path, x=one.astype(">f8"), y=one.astype(">i2"))
    assert torch.equal(door._data(str(path), 0)[0], torch.ones(3, dtype=torch.float64))
    np.savez(path, x=one, y=one.astype(">u8"))
    assert torch.equal(door._data(str(path), 0)[1], torch.ones(3, dtype=torch.int64))
    np.save(path.with_suffix(".npy"), one)
    path.with_suffix(".npy").rename(path)
    with pytest.raises(DataError, match="plain arrays"):
        door._data(str(path), 0)
