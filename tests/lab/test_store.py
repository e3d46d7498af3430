"""Stored results can be read back, damaged files are moved aside, and invalid results give a one-line error."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from lazyscope.errors import ExperimentError, StoreError
from lazyscope.lab import Trial
from lazyscope.lab.experiment import Params, Result
from lazyscope.lab.store import DamagedFile, Key, Record, Store

PARAMS: Params = {"tau": 0.1, "seed": 3, "kind": "plain", "centred": True}
KEY = Key("toy", PARAMS, "0123")


def record(**result: np.ndarray | float | int | str) -> Record:
    return Record(Trial(PARAMS, result), 1.5, {"device": "cpu"})


def test_round_trip(tmp_path: Path) -> None:
    store = Store(tmp_path)
    result: Result = {
        "path": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32),
        "loss": float("nan"),
        "steps": 7,
        "status": "converged",
        "scalar_array": np.asarray(2.0),
    }
    store.write(KEY, record(**result))
    found = store.read(KEY)
    assert found is not None
    assert found.trial.params == PARAMS
    assert (found.seconds, found.provenance) == (1.5, {"device": "cpu"})
    assert found.trial.result.keys() == result.keys()
    for name, value in result.items():
        back = found.trial.result[name]
        assert type(back) is type(value)
        np.testing.assert_array_equal(back, value)
    path = found.trial.result["path"]
    assert isinstance(path, np.ndarray)
    assert path.dtype == np.float32


def test_key_tells_experiment_params_and_code() -> None:
    other_params: Params = {**PARAMS, "seed": 4}
    keys = [KEY, Key("other", PARAMS, "0123"), Key("toy", other_params, "0123"), Key("toy", PARAMS, "4567")]
    assert len({str(key) for key in keys}) == 4
    assert str(Key("toy", dict(reversed(PARAMS.items())), "0123")) == str(KEY)


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "text"])
def test_damaged_file_is_set_aside(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path)
    store.write(KEY, record(path=np.arange(1000.0)))
    path = store.path(KEY)
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
    path.write_bytes({"empty": b"", "truncated": content[:-30], "flipped": flipped, "text": b"not a trial\n"}[damage])
    with pytest.warns(DamagedFile, match="computed again"):
        assert store.read(KEY) is None
    assert not path.exists()
    assert path.with_suffix(".damaged").exists()
    assert store.read(KEY) is None  # it is now absent


def test_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="'path' of 'toy'"):
        Store(tmp_path).write(KEY, record(path=np.asarray([{}, None])))
    assert not list(tmp_path.rglob("*.npz"))


def test_old_temporary_files_are_swept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.check("toy")
    folder = store.path(KEY).parent
    old, new = folder / ".a.npz.x.tmp", folder / ".b.npz.y.tmp"
    for file in (old, new):
        file.touch()
    os.utime(old, (time.time() - 1e5,) * 2)
    store.check("toy")
    assert [path.name for path in folder.iterdir()] == [new.name]


def test_results_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("occupied")
    with pytest.raises(StoreError, match=r"results.*--out"):
        Store(tmp_path / "results").check("toy")
