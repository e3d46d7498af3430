"""Readers of CIFAR-10 in its common forms: Parquet files from the Hugging Face hub, and the official archives.

The official binary and Python archives can be packed or unpacked. Any problem with a file raises a `DataError` that
names the file and a remedy. Nothing is extracted to the disk, unpickling only creates arrays, lists and text, and the
sizes in a file are compared with those of CIFAR-10 before memory is allocated.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, final

import numpy as np

from lazyscope.errors import DataError
from lazyscope.extras import required

ADDRESS = "https://huggingface.co/datasets/uoft-cs/cifar10"
OFFICIAL = "https://www.cs.toronto.edu/~kriz/cifar.html"
SHAPE = (3, 32, 32)
ROW = 1 + 3072
"""The number of bytes per image in the binary archive: its class, then red, green and blue, row by row."""
LARGEST = 10_000 * ROW + 10_000_000
"""The maximum size in bytes of a file in an archive, including the file names in the Python archive."""
WHOLE = 7 * LARGEST
"""The maximum size in bytes of an unpacked archive: six such files, and some small ones."""
MOST = 50_000
"""The maximum number of images in a split of the data set."""
IMAGE = 2**14
"""The maximum size in bytes of an encoded image: 32×32 pixels of three bytes, and metadata."""


@final
@dataclass(frozen=True)
class Archive:
    """One split of the data set."""

    source: Path
    """The file or folder."""
    labels: np.ndarray
    """The classes of all images."""
    pixels: Callable[[np.ndarray], np.ndarray]
    """A function from m row indices to the pixels of these images, of shape (m, 3, 32, 32)."""


def find(folders: Sequence[Path], split: str) -> Archive | None:
    """Find the first form of the data in one of the folders."""
    for folder in folders:
        if files := sorted(folder.glob(f"{split}-*.parquet")):
            return _parquet(files)
        for names, decode, places in (
            (_BINARY[split], _binary, ("cifar-10-batches-bin", "cifar-10-binary.tar.gz")),
            (_PYTHON[split], _python, ("cifar-10-batches-py", "cifar-10-python.tar.gz")),
        ):
            for place in (folder, *(folder / name for name in places)):
                if place.is_file() or (place / names[0]).exists():
                    return _joined(place, names, decode)
    return None


_BINARY = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
_PYTHON = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Convert any error in reading a file to a `DataError`, since a damaged file may raise any exception."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} is missing; download CIFAR-10 again from {OFFICIAL}.") from error
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{file} is damaged or is not CIFAR-10 ({reason}); download it again from {ADDRESS} or {OFFICIAL}."
        ) from error


# ── the official archives ─────────────────────────────────────────────────────────────────────────────────────────
def _joined(place: Path, names: list[str], decode: Callable[[bytes, Path], tuple[np.ndarray, np.ndarray]]) -> Archive:
    with _reading(place):
        contents = _unpacked(place, names) if place.is_file() else [_content(place / name) for name in names]
    parts = [decode(content, place / name) for content, name in zip(contents, names, strict=True)]
    labels, pixels = (np.concatenate(side) for side in zip(*parts, strict=True))
    return Archive(place, labels, lambda rows: pixels[rows])


def _content(file: Path) -> bytes:
    with file.open("rb") as opened:
        return _exactly(opened, _allowed(file.name, file.stat().st_size))


def _allowed(name: str, size: int) -> int:
    if size > LARGEST:
        raise ValueError(f"{name} has {size} bytes, and files of CIFAR-10 have at most {LARGEST}")
    return size


def _exactly(file: io.BufferedIOBase, size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise EOFError("it ends too early")
    return content


def _unpacked(file: Path, names: list[str]) -> list[bytes]:
    """Read the named members of a tar file in one pass, without writing anything to disk.

    Python's `tarfile` trusts the headers, and allocates 2 GiB for a name that claims to be that long. Here only regular
    files with short names are read; everything else is skipped in small pieces.
    """
    found: dict[str, bytes] = {}
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        tar: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if packed else raw
        left = WHOLE
        while (header := _exactly(tar, 512)).strip(b"\0"):
            size = _size(header)
            name = PurePosixPath(header[:100].split(b"\0")[0].decode("latin1")).name
            left -= 512 + size
            if left < 0:
                raise ValueError(f"it unpacks to more than {WHOLE} bytes")
            padding = -size % 512
            if name in names and header[156:157] in b"0\0":
                found[name] = _exactly(tar, _allowed(name, size))
                size = 0
            for start in range(0, size + padding, 2**20):
                _exactly(tar, min(2**20, size + padding - start))
        while (rest := tar.read(2**20)) and left >= 0:  # read to the end, where gzip verifies its checksum
            left -= len(rest)
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"it does not contain {missing[0]}")
    return [found[name] for name in names]


def _size(header: bytes) -> int:
    """The size of a tar member from its header, whose checksum is verified."""
    told = int(header[148:156].strip(b" \0") or b"0", 8)
    if told != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise ValueError("the header of a member is damaged")
    return int(header[124:136].strip(b" \0") or b"0", 8)


def _binary(content: bytes, file: Path) -> tuple[np.ndarray, np.ndarray]:
    if not content or len(content) % ROW:
        raise DataError(
            f"{file} has {len(content)} bytes, which is not a multiple of {ROW}; download it again from {OFFICIAL}."
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, ROW)
    return rows[:, 0].astype(np.int64), rows[:, 1:].reshape(-1, *SHAPE)


def _python(content: bytes, file: Path) -> tuple[np.ndarray, np.ndarray]:
    with _reading(file), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy deprecates the format of dtypes in these old pickles
        table = _unpickled(content)
        names = {_text(name): value for name, value in table.items()}
        labels, pixels = _classes(names["labels"]), names["data"]
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3072):
            raise ValueError("its data are not rows of 3072 bytes")
        return labels, pixels.reshape(-1, *SHAPE)


def _unpickled(content: bytes) -> Any:
    try:
        return _Arrays(io.BytesIO(content), encoding="bytes").load()
    except EOFError:
        raise EOFError("it is truncated: ran out of input") from None


def _classes(labels: Any) -> np.ndarray:
    """Convert a list or array of integers to an array; nested lists could expand to more than the memory holds."""
    if isinstance(labels, list) and not all(type(label) is int for label in labels):
        raise ValueError("its labels are not integers")
    found = np.asarray(labels)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError("its labels are not a row of integers")
    return found.astype(np.int64)


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


class _Arrays(pickle._Unpickler):
    """An unpickler of arrays, lists, dictionaries, numbers and text, which rejects any other class by its name.

    It is the Python implementation, since the C implementation allocates memory for as many objects as the file claims.
    """

    _KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): lambda text, encoding: text.encode("latin1"),  # how Python 3 writes bytes for Python 2
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not part of CIFAR-10") from None


def holds_jpeg(archive: Archive) -> bool:
    """Whether the first image is coded as JPEG: Parquet files hold PNG or JPEG, the official archives plain bytes."""
    files = sorted(archive.source.glob("*.parquet")) if archive.source.is_dir() else []
    return bool(files) and (_columns(files[0])[0][0] or b"").startswith(b"\xff\xd8")


# ── the hub's files ───────────────────────────────────────────────────────────────────────────────────────────────
def _parquet(files: list[Path]) -> Archive:
    counts = {int(found[1]) for file in files if (found := re.search(r"-of-(\d+)\.parquet$", file.name))}
    if counts and counts != {len(files)}:
        raise DataError(
            f"{files[0].parent} contains {len(files)} of {max(counts)} files like {files[0].name}; download all of them"
            f" from {ADDRESS}."
        )
    columns = [_columns(file) for file in files]
    encoded = [(image, file) for (images, _), file in zip(columns, files, strict=True) for image in images]
    labels = np.concatenate([labels for _, labels in columns])
    return Archive(files[0].parent, labels, lambda rows: _decoded([encoded[row] for row in rows]))


def _columns(file: Path) -> tuple[list[bytes | None], np.ndarray]:
    """Read the encoded images and the classes of one file."""
    parquet = required("pyarrow.parquet", "data", "Parquet files")
    with _reading(file):
        # With dictionary encoding, each distinct image is read once, so that its size is known in advance.
        table = parquet.ParquetFile(file, read_dictionary=["img.bytes"])
        size = sum(table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups))
        if table.metadata.num_rows > MOST or size > WHOLE:
            raise ValueError(f"it contains {table.metadata.num_rows} rows and {size} bytes")
        images: list[bytes | None] = []
        labels = [np.empty(0, np.int64)]
        for group in range(table.num_row_groups):
            for batch in table.iter_batches(10_000, row_groups=[group], columns=["img.bytes", "label"]):
                column = batch.column("img").field("bytes")
                if (longest := max(map(len, column.dictionary.to_pylist()), default=0)) > IMAGE:
                    raise ValueError(f"it contains an image of {longest} bytes")
                images += column.to_pylist()
                labels.append(_classes(batch.column("label").to_numpy(zero_copy_only=False)))
        return images, np.concatenate(labels)


def _decoded(images: list[tuple[bytes | None, Path]]) -> np.ndarray:
    """Decode the images in threads, a few hundred at a time; Pillow releases the interpreter lock."""
    pieces = [images[i : i + 250] for i in range(0, len(images), 250)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        rows = pool.map(lambda piece: b"".join(_pixels(image, file) for image, file in piece), pieces)
        content = np.frombuffer(b"".join(rows), np.uint8)
    return np.ascontiguousarray(content.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def _pixels(image: bytes | None, file: Path) -> bytes:
    """Decode one PNG or JPEG image to 32×32×3 bytes; its size is checked before it is decoded."""
    content = image or b""
    try:
        # Image.open would only warn about large images, and then open them.
        name = "Png" if content.startswith(b"\x89PNG") else "Jpeg"
        kind = getattr(required(f"PIL.{name}ImagePlugin", "data", "Encoded images"), f"{name}ImageFile")
        with kind(io.BytesIO(content)) as opened:
            if opened.size != (32, 32):
                size = "×".join(map(str, opened.size))
                raise DataError(
                    f"{file} contains an image of {size} pixels, not 32×32; download CIFAR-10 from {ADDRESS}."
                )
            pixels: bytes = (opened if opened.mode == "RGB" else opened.convert("RGB")).tobytes()
            return pixels
    except DataError:
        raise
    except Exception as error:  # a damaged image may raise any exception
        raise DataError(f"An image of {file} cannot be decoded ({error}); download it again from {ADDRESS}.") from error
