"""The results store: one atomic file a trial, keyed by what was computed and by the code that computed it."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import time
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lazyscope.errors import ExperimentError
from lazyscope.lab import disk
from lazyscope.lab.experiment import Params, Result, Trial

_META = "meta"
_STALE = 3600.0  # seconds after which a temporary file has surely lost its writer
_FORGOTTEN = 30 * 86400.0  # seconds after which nobody will resume a trial: its code has changed, or it was given up


class DamagedFile(UserWarning):
    """A stored trial could not be read; it was set aside and is computed again."""


@dataclass(frozen=True)
class Key:
    """What a stored trial answers to: the experiment, the grid point, and the hash of the code."""

    experiment: str
    params: Params
    code: str

    def __str__(self) -> str:
        parts = [self.experiment, json.dumps(self.params, sort_keys=True), self.code]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Record:
    """A trial, how long it took, and where it comes from (command, commit, versions, device, date)."""

    trial: Trial
    seconds: float
    provenance: Mapping[str, str]


@dataclass(frozen=True)
class Store:
    """A folder of results: `<root>/<experiment>/trials/<key>.npz`.

    Scales share trials: a grid point that stands in both is measured once.
    """

    root: Path

    def path(self, key: Key) -> Path:
        """Where the trial lies, or would lie."""
        return self.root / key.experiment / "trials" / f"{key}.npz"

    def scratch(self, key: Key) -> Path:
        """The trial's own folder while it runs; the code is in the key, so it never meets files of another."""
        return self.path(key).with_suffix(".scratch")

    def check(self, experiment: str) -> None:
        """Fail now, not in an hour, where nothing can be written; and sweep what killed runs left behind."""
        folder = self.root / experiment / "trials"
        disk.write(folder / ".writable", b"")
        with disk.writing(folder):
            (folder / ".writable").unlink(missing_ok=True)
            for temporary in folder.glob(".*.tmp"):
                if time.time() - temporary.stat().st_mtime > _STALE:
                    temporary.unlink(missing_ok=True)
            for left in folder.glob("*.scratch"):
                if time.time() - left.stat().st_mtime > _FORGOTTEN:
                    shutil.rmtree(left, ignore_errors=True)

    def write(self, key: Key, record: Record) -> None:
        """Store one trial, whole or not at all."""
        meta = {
            "experiment": key.experiment,
            "params": key.params,
            "code": key.code,
            "seconds": record.seconds,
            "provenance": dict(record.provenance),
            "scalars": [name for name, value in record.trial.result.items() if np.isscalar(value)],
        }
        arrays = {f"result/{name}": np.asarray(value) for name, value in record.trial.result.items()}
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise ExperimentError(
                    f"'{name.removeprefix('result/')}' of '{key.experiment}' is no array of numbers or text; "
                    "return numpy arrays, numbers or strings from `trial`."
                )
        content = io.BytesIO()
        # mypy takes the arrays for `allow_pickle`, which savez_compressed has by keyword, too
        np.savez_compressed(content, **{_META: np.asarray(json.dumps(meta))}, **arrays)  # type: ignore[arg-type]
        disk.write(self.path(key), content.getvalue())

    def read(self, key: Key) -> Record | None:
        """The stored trial, or None; a damaged file is set aside, with a word, and counts as absent."""
        path = self.path(key)
        try:
            return _decode(path)
        except FileNotFoundError:
            return None
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, TypeError) as error:
            aside = path.with_suffix(".damaged")
            with disk.writing(path.parent):
                path.replace(aside)
            warnings.warn(
                f"{path} is damaged ({error}); it is now {aside.name}, and its trial is computed again.",
                DamagedFile,
                stacklevel=2,
            )
            return None


def _decode(path: Path) -> Record:
    # Opened here, since NumPy leaves a file that it opened, and cannot read, open.
    with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
        meta = json.loads(str(file[_META]))
        result: Result = {name.removeprefix("result/"): file[name] for name in file.files if name.startswith("result/")}
    for name in meta["scalars"]:
        result[name] = np.asarray(result[name]).item()
    return Record(Trial(meta["params"], result), meta["seconds"], meta["provenance"])
