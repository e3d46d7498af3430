"""CIFAR-10 as it is handed round: hub Parquet files, the official binary and Python archives, folders of either.

Whatever is wrong with a file ends as a `DataError` that names it and the remedy. Nothing is extracted to the disk, and
pickles rebuild arrays, lists and text, never anything else.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, final

import numpy as np

from lazyscope.errors import DataError

ADDRESS = "https://huggingface.co/datasets/uoft-cs/cifar10"
OFFICIAL = "https://www.cs.toronto.edu/~kriz/cifar.html"
SHAPE = (3, 32, 32)
ROW = 1 + 3072
"""Bytes of an image in the binary archive: its class, then red, green and blue, row by row."""
LARGEST = 10_000 * ROW + 10_000_000
"""Bytes of the largest file of an archive, with room for the file names in the Python one."""


@final
@dataclass(frozen=True)
class Archive:
    """One half of the data set: all classes, and a function that gives the pixels of chosen rows, (m, 3, 32, 32)."""

    source: Path
    labels: np.ndarray
    pixels: Callable[[np.ndarray], np.ndarray]


def find(folders: Sequence[Path], split: str) -> Archive | None:
    """The first form of the data that lies in one of the folders."""
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
def _reading(file: Path, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Say what is wrong with a file in one sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} is missing; download CIFAR-10 again from {OFFICIAL}.") from error
    except errors as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{file} is damaged or no CIFAR-10 ({reason}); download it again from {ADDRESS} or {OFFICIAL}."
        ) from error


# ── the official archives ─────────────────────────────────────────────────────────────────────────────────────────
def _joined(place: Path, names: list[str], decode: Callable[[bytes, Path], tuple[np.ndarray, np.ndarray]]) -> Archive:
    with _reading(place, (OSError, EOFError, ValueError, tarfile.TarError, zlib.error)):
        contents = _unpacked(place, names) if place.is_file() else [(place / name).read_bytes() for name in names]
    parts = [decode(content, place / name) for content, name in zip(contents, names, strict=True)]
    labels, pixels = (np.concatenate(side) for side in zip(*parts, strict=True))
    return Archive(place, labels, lambda rows: pixels[rows])


def _unpacked(file: Path, names: list[str]) -> list[bytes]:
    """The named members of a tar file, read in one pass and never written anywhere."""
    found: dict[str, bytes] = {}
    with tarfile.open(file) as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            content = tar.extractfile(member) if name in names and member.isfile() else None
            if content is not None and member.size <= LARGEST:
                found[name] = content.read()
        while tar.fileobj is not None and tar.fileobj.read(2**20):
            pass  # to the end, where gzip compares its checksum
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"it holds no {missing[0]}")
    return [found[name] for name in names]


def _binary(content: bytes, file: Path) -> tuple[np.ndarray, np.ndarray]:
    if not content or len(content) % ROW:
        raise DataError(
            f"{file} has {len(content)} bytes, which is no multiple of {ROW}; download it again from {OFFICIAL}."
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, ROW)
    return rows[:, 0].astype(np.int64), rows[:, 1:].reshape(-1, *SHAPE)


def _python(content: bytes, file: Path) -> tuple[np.ndarray, np.ndarray]:
    with _reading(file, (Exception,)), warnings.catch_warnings():  # a damaged pickle may raise anything
        warnings.simplefilter("ignore")  # NumPy deprecates the way in which the authors' NumPy wrote its dtypes
        table = _Arrays(io.BytesIO(content), encoding="bytes").load()
        names = {_text(name): value for name, value in table.items()}
        labels, pixels = np.asarray(names["labels"]), names["data"]
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3072):
            raise ValueError("its data are no rows of 3072 bytes")
        return labels.astype(np.int64, casting="safe"), pixels.reshape(-1, *SHAPE)


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


class _Arrays(pickle.Unpickler):
    """Unpickles arrays, lists, dicts, numbers and text; any other name is refused before it is looked up."""

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
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 file needs") from None


# ── the hub's files ───────────────────────────────────────────────────────────────────────────────────────────────
def _parquet(files: list[Path]) -> Archive:
    counts = {int(found[1]) for file in files if (found := re.search(r"-of-(\d+)\.parquet$", file.name))}
    if counts and counts != {len(files)}:
        raise DataError(
            f"{files[0].parent} holds {len(files)} of {max(counts)} files like {files[0].name}; download all from"
            f" {ADDRESS}."
        )
    columns = [_columns(file) for file in files]
    encoded = [(image, file) for (images, _), file in zip(columns, files, strict=True) for image in images]
    labels = np.concatenate([labels for _, labels in columns])
    return Archive(files[0].parent, labels, lambda rows: _decoded([encoded[row] for row in rows]))


def _columns(file: Path) -> tuple[list[bytes | None], np.ndarray]:
    """The encoded images and the classes of one file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("Reading these files needs pyarrow; run pip install pyarrow.") from error
    with _reading(file, (OSError, KeyError, TypeError, pyarrow.ArrowException)):
        table = pyarrow.parquet.read_table(file, columns=["img", "label"]).flatten()
        labels = table.column("label").to_numpy()
        return table.column("img.bytes").to_pylist(), labels.astype(np.int64, casting="safe")


def _decoded(images: list[tuple[bytes | None, Path]]) -> np.ndarray:
    """Decoded by threads, a few hundred at a time: Pillow leaves the interpreter while it decodes."""
    pieces = [images[i : i + 250] for i in range(0, len(images), 250)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        rows = pool.map(lambda piece: b"".join(_pixels(image, file) for image, file in piece), pieces)
        content = np.frombuffer(b"".join(rows), np.uint8)
    return np.ascontiguousarray(content.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def _pixels(image: bytes | None, file: Path) -> bytes:
    """One PNG or JPEG as 32×32×3 bytes."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(image or b""), formats=("PNG", "JPEG")) as opened:
            size = opened.size
            pixels = (opened if opened.mode == "RGB" else opened.convert("RGB")).tobytes()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"An image of {file} cannot be decoded ({error}); download it again from {ADDRESS}.") from error
    if size != (32, 32):
        raise DataError(f"{file} holds an image of {size} pixels, not 32×32; download CIFAR-10 from {ADDRESS}.")
    return pixels
