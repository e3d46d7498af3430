"""The results store: one atomic file per trial, keyed by what was computed and by the code that computed it."""

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
_STALE = 3600.0  # seconds after which a temporary file has surely lost its writer
_FORGOTTEN = 30 * 86400.0  # seconds after which nobody will resume a trial: its code has changed, or it was given up
_ATTEMPTS = 5  # at reading a file that others write at the same time

LARGEST = 1 << 30
"""Bytes that one trial may take in memory, so that no file, however small on disk, can use up all of it."""


class DamagedFile(UserWarning):
    """A stored file could not be read or verified; it was set aside, and is made again."""


@dataclass(frozen=True)
class Key:
    """What a stored trial answers to.

    Args:
        experiment: The name of the experiment.
        params: The grid point.
        code: The hash of the code.
        setting: What the trial depends on besides: the default dtype, and files and variables that are declared.
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
    """A trial, how long it took, and where it comes from.

    Args:
        trial: The point, and what was measured there.
        seconds: How long it took.
        provenance: The command, commit, versions, device and date.
        checksum: That of the file that it was read from.
    """

    trial: Trial
    seconds: float
    provenance: Mapping[str, str]
    checksum: str = ""


@dataclass(frozen=True)
class Store:
    """A folder of results: `<root>/<experiment>/trials/<key>.npz`.

    Scales share trials: a grid point that is in both is measured once. Every file holds its own checksum and its key.

    Args:
        root: The folder.
    """

    root: Path

    def path(self, key: Key) -> Path:
        """Where the trial lies, or would lie.

        Args:
            key: Of the trial.
        """
        return self._folder(key.experiment) / f"{key}.npz"

    def scratch(self, key: Key) -> Path:
        """The trial's own folder while it runs; the code is in the key, so it never meets files of another.

        Args:
            key: Of the trial.
        """
        return self.path(key).with_suffix(".scratch")

    def lost(self, experiment: str) -> list[tuple[Path, dict[str, Any]]]:
        """The chunks of an experiment that processes had begun and did not live to end.

        Args:
            experiment: Its name.

        Returns:
            The folder that was lent to each, and the note that was left with it.
        """
        return lost(self._folder(experiment))

    def check(self, experiment: str) -> None:
        """Fail now, not in an hour, where nothing can be written; and sweep what killed runs left behind.

        Args:
            experiment: Its name.
        """
        folder = self._folder(experiment)
        disk.check(folder)
        now = time.time()
        with disk.writing(folder):
            for pattern in (".*.tmp", ".writable.*"):
                for temporary in folder.glob(pattern):
                    with suppress(FileNotFoundError):  # another run sweeps here as well
                        if now - temporary.stat().st_mtime > _STALE:
                            temporary.unlink()
            for left in [*folder.glob("*.scratch"), *folder.glob("*.begun")]:
                with suppress(FileNotFoundError):
                    if now - left.stat().st_mtime > _FORGOTTEN:
                        discard(left.with_suffix(".scratch"))

    def write(self, key: Key, record: Record) -> None:
        """Store one trial, whole or not at all.

        Args:
            key: Of the trial.
            record: The trial, and where it comes from.
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
                f"A trial of '{key.experiment}' returned {size} bytes, and at most {LARGEST // 2} can be stored; return"
                " only what figure and claims need."
            )
        content = io.BytesIO()
        # mypy takes the arrays for `allow_pickle`, which savez_compressed has by keyword, too
        np.savez_compressed(content, **{_META: np.asarray(json.dumps(meta))}, **arrays)  # type: ignore[arg-type]
        disk.write(self.path(key), sealed(content.getvalue()))

    def read(self, key: Key) -> Record | None:
        """The stored trial, or None where there is none.

        A file that cannot be read, whose checksum does not fit, or that belongs to another key is set aside, with a
        `DamagedFile` warning, and counts as absent.

        Args:
            key: Of the trial.
        """
        path = self.path(key)
        for _ in range(_ATTEMPTS):
            found: os.stat_result | None = None
            try:
                with path.open("rb") as file:
                    found = os.fstat(file.fileno())
                    if found.st_size > LARGEST:
                        raise ValueError("it is larger than any trial")
                    content = file.read()
                return _decode(content, key)
            except FileNotFoundError:
                return None
            except Exception as error:  # whatever is wrong with it, it is not a result
                aside = disk.set_aside(path, found)
                if aside is not None:
                    warnings.warn(
                        f"{path} is damaged ({one_line(error)}); it is now {aside.name}, and its trial is computed"
                        " again.",
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
            raise ValueError("it would take more memory than any trial")
        arrays = {member.filename.removesuffix(".npy"): _array(archive, member) for member in members}
    meta = json.loads(str(arrays.pop(_META)))
    asked = _identity(key)
    if json.dumps({name: meta[name] for name in asked}, sort_keys=True) != json.dumps(asked, sort_keys=True):
        raise ValueError("it is another trial under this name")
    result: Result = {name.removeprefix("result/"): array for name, array in arrays.items()}
    for name in meta["scalars"]:
        result[name] = np.asarray(result[name]).item()
    return Record(Trial(meta["params"], result), meta["seconds"], meta["provenance"], checksum)


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One array, of no more bytes than the archive says that it has."""
    with archive.open(member) as file:
        content = file.read(member.file_size + 1)
    array: np.ndarray = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    return array
