"""The description of a kernel on disk, `zarr.json`, with a checksum, and which tiles a selection touches."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

OLD = 3600.0
"""Seconds after which an unfinished file has surely lost its writer."""


def description(zarr: Any, **settings: Any) -> dict[str, Any]:
    """What `zarr.json` says of an array, whose chunks are not compressed and end with their CRC-32C.

    Mantissas are noise: packing them takes time and saves a tenth.

    Args:
        zarr: The library, which few need.
        settings: What `zarr.create_array` takes, `attributes={"lazyscope": …}` included.

    Returns:
        The description, with its own SHA-256 among the attributes.
    """
    memory: dict[str, Any] = {}
    checked = [zarr.codecs.Crc32cCodec()]
    zarr.create_array(zarr.storage.MemoryStore(memory), compressors=checked, **settings)
    described: dict[str, Any] = json.loads(memory["zarr.json"].to_bytes())
    described["attributes"]["lazyscope"]["checksum"] = _checksum(described)
    return described


def write_description(path: Path, described: dict[str, Any]) -> None:
    """Write `zarr.json`, whole or not at all.

    Args:
        path: The folder of the array.
        described: The description.
    """
    path.mkdir(parents=True, exist_ok=True)
    temporary = path / f"zarr.json.{uuid.uuid4().hex}.partial"
    try:
        with temporary.open("x", encoding="utf-8") as file:
            json.dump(described, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path / "zarr.json")
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_description(path: Path) -> dict[str, Any]:
    """What the kernel in this folder was made from.

    Args:
        path: The folder of the array.

    Returns:
        The recipe; a `ValueError` says that the description is not the one that was written.
    """
    described = json.loads((path / "zarr.json").read_bytes())
    recipe: dict[str, Any] = dict(described.get("attributes", {})["lazyscope"])
    if recipe.pop("checksum", None) != _checksum(described):
        raise ValueError("the checksum of its zarr.json does not fit")
    return recipe


def _checksum(described: dict[str, Any]) -> str:
    """The SHA-256 of all but itself."""
    attributes = described["attributes"]
    recipe = {name: value for name, value in attributes["lazyscope"].items() if name != "checksum"}
    covered = {**described, "attributes": {**attributes, "lazyscope": recipe}}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


def touched(selection: Any, points: int, tile: int) -> Iterator[tuple[int, int]]:
    """The tiles that hold some of a selection.

    Args:
        selection: As for NumPy, of an array (points, points, outputs, outputs).
        points: The length of the first two dimensions.
        tile: The points of a tile.

    Yields:
        Row and column of each tile.
    """
    parts = selection if isinstance(selection, tuple) else (selection,)
    plain = [part if isinstance(part, slice | int | np.integer) else slice(None) for part in parts[:2]]
    if any(part is Ellipsis or part is None for part in parts):
        plain = []
    every = np.arange(points)
    rows, columns = (np.unique(every[part] // tile) for part in (*plain, slice(None), slice(None))[:2])
    return ((int(i), int(j)) for i in rows for j in columns)
