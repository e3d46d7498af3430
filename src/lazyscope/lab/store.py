"""The store of results: one file per trial, written atomically, whose name is a hash of the trial and its code."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lazyscope.errors import ExperimentError
from lazyscope.lab import disk
from lazyscope.lab.experiment import Params, Result, Trial
from lazyscope.lab.failure import one_line
from lazyscope.lab.scratch import discard, lost
from lazyscope.lab.seal import seal_of, sealed

_META = "meta"
_STALE = 3600.0  # seconds after which a temporary file is assumed to be abandoned
_FORGOTTEN = 30 * 86400.0  # seconds after which the checkpoint of an unfinished trial is removed
_ATTEMPTS = 5  # at reading a file that another process replaces at the same time

LARGEST = 1 << 30
"""The largest number of bytes that one trial may take in memory, a protection against compressed files."""


class DamagedFile(UserWarning):
    """A stored file could not be read or verified. It was renamed, and its content is computed again."""


@dataclass(frozen=True)
class Key:
    """The key of a stored trial. Its string form is a hash of all fields.

    Args:
        experiment: The name of the experiment.
        params: The grid point.
        code: The hash of the code.
        setting: The default dtype, followed by a hash of the declared files and environment variables if there are any.
    """

    experiment: str
    params: Params
    code: str
    setting: str = "float32"

    def __str__(self) -> str:
        parts = [self.experiment, json.dumps(self.params, sort_keys=True), self.code, self.setting]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Record:
    """A stored trial, with its running time and provenance.

    Args:
        trial: The grid point and its result.
        seconds: The running time, in seconds.
        provenance: The command, commit, versions, device and date.
        checksum: The checksum of the file from which it was read.
    """

    trial: Trial
    seconds: float
    provenance: Mapping[str, str]
    checksum: str = ""


@dataclass(frozen=True)
class Store:
    """A folder of results: `<root>/<experiment>/trials/<key>.npz`.

    The scales share trials: a grid point that is in both grids is run once. Every file contains its checksum and key.

    Args:
        root: The folder.
    """

    root: Path

    def path(self, key: Key) -> Path:
        """Return the path of the file of a trial, which may not exist.

        Args:
            key: The key of the trial.

        Returns:
            The path.
        """
        return self._folder(key.experiment) / f"{key}.npz"

    def scratch(self, key: Key) -> Path:
        """Return the scratch folder of a trial.

        The key contains the hash of the code, so different versions of the code never share a folder.

        Args:
            key: The key of the trial.

        Returns:
            The path of the folder, which may not exist.
        """
        return self.path(key).with_suffix(".scratch")

    def lost(self, experiment: str) -> list[tuple[Path, dict[str, Any]]]:
        """Find the chunks of an experiment that were started by a process which was killed before they ended.

        Args:
            experiment: The name of the experiment.

        Returns:
            The scratch folder of each such chunk, and the note that was stored with it.
        """
        return lost(self._folder(experiment))

    def check(self, experiment: str) -> None:
        """Check that results can be written, and remove old temporary files of killed runs.

        Args:
            experiment: The name of the experiment.

        Raises:
            StoreError: If no file can be written.
        """
        folder = self._folder(experiment)
        disk.check(folder)
        now = time.time()
        with disk.writing(folder):
            for pattern in (".*.tmp", ".writable.*"):
                for temporary in folder.glob(pattern):
                    with suppress(FileNotFoundError):  # another run has removed it
                        if now - temporary.stat().st_mtime > _STALE:
                            temporary.unlink()
            for left in [*folder.glob("*.scratch"), *folder.glob("*.begun")]:
                with suppress(FileNotFoundError):
                    if now - left.stat().st_mtime > _FORGOTTEN:
                        discard(left.with_suffix(".scratch"))

    def write(self, key: Key, record: Record) -> None:
        """Store one trial atomically.

        Args:
            key: The key of the trial.
            record: The trial, with its running time and provenance.

        Raises:
            ExperimentError: If the result cannot be stored, or is too large.
            StoreError: If the file cannot be written.
        """
        meta = {
            **_identity(key),
            "seconds": record.seconds,
            "provenance": dict(record.provenance),
            "scalars": [name for name, value in record.trial.result.items() if np.isscalar(value)],
        }
        arrays = {f"result/{name}": np.asarray(value) for name, value in record.trial.result.items()}
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise ExperimentError(
                    f"'{name.removeprefix('result/')}' of '{key.experiment}' is not an array of numbers or text; "
                    "return numpy arrays, numbers or strings from `trial`."
                )
        if (size := sum(array.nbytes for array in arrays.values())) > LARGEST // 2:
            raise ExperimentError(
                f"A trial of '{key.experiment}' returned {size} bytes, but at most {LARGEST // 2} can be stored; return"
                " only what the figure and the claims need."
            )
        content = io.BytesIO()
        # mypy believes that the arrays could be the keyword argument `allow_pickle` of savez_compressed
        np.savez_compressed(content, **{_META: np.asarray(json.dumps(meta))}, **arrays)  # type: ignore[arg-type]
        disk.write(self.path(key), sealed(content.getvalue()))

    def read(self, key: Key) -> Record | None:
        """Read a stored trial.

        A file that cannot be read, whose checksum does not match, or that belongs to another key is renamed, with a
        `DamagedFile` warning, and treated as absent.

        Args:
            key: The key of the trial.

        Returns:
            The trial, or None if it is not stored.
        """
        path = self.path(key)
        for _ in range(_ATTEMPTS):
            found: os.stat_result | None = None
            try:
                with path.open("rb") as file:
                    found = os.fstat(file.fileno())
                    if found.st_size > LARGEST:
                        raise ValueError("it is larger than any trial can be")
                    content = file.read()
                return _decode(content, key)
            except FileNotFoundError:
                return None
            except Exception as error:  # whatever the reason, it is not a valid result
                aside = disk.set_aside(path, found)
                if aside is not None:
                    warnings.warn(
                        f"{path} is damaged ({one_line(error)}); it was renamed to {aside.name}, and its trial is"
                        " computed again.",
                        DamagedFile,
                        stacklevel=2,
                    )
                    return None
        return None

    def _folder(self, experiment: str) -> Path:
        return self.root / experiment / "trials"


def _identity(key: Key) -> dict[str, object]:
    return {"experiment": key.experiment, "params": key.params, "code": key.code, "setting": key.setting}


def _decode(content: bytes, key: Key) -> Record:
    checksum = seal_of(content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > LARGEST:
            raise ValueError("it would take more memory than any trial can")
        arrays = {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}
    meta = json.loads(str(arrays.pop(_META)))
    asked = _identity(key)
    if json.dumps({name: meta[name] for name in asked}, sort_keys=True) != json.dumps(asked, sort_keys=True):
        raise ValueError("it contains another trial")
    result: Result = {name.removeprefix("result/"): array for name, array in arrays.items()}
    for name in meta["scalars"]:
        result[name] = np.asarray(result[name]).item()
    return Record(Trial(meta["params"], result), meta["seconds"], meta["provenance"], checksum)


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Read one array, and at most as many bytes as the archive declares."""
    with archive.open(member) as file:
        content = file.read(member.file_size + 1)
    array: np.ndarray = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return array
