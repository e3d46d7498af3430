"""A damaged, swapped or oversized file is not accepted as a result: it is moved aside and computed again."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazyscope.errors import ExperimentError, StoreError
from lazyscope.flow.checkpoint import Checkpoint, DamagedCheckpoint, _seal
from lazyscope.lab import Experiment, Trial, store
from lazyscope.lab.experiment import Params
from lazyscope.lab.outcome import Outcome
from lazyscope.lab.report import write_report
from lazyscope.lab.run import run
from lazyscope.lab.seal import sealed
from lazyscope.lab.store import DamagedFile, Key, Record, Store

CPU = torch.device("cpu")
PARAMS: Params = {"x": 1, "kind": "plain"}
KEY = Key("toy", PARAMS, "0123")
OUTCOMES = Path(__file__).parents[2] / "docs" / "outcomes"


def flips(content: bytes, count: int | None = None) -> Iterator[bytes]:
    """Yield the content with one bit flipped, for every bit or for a sample of them."""
    bits = np.arange(8 * len(content))
    if count is not None:
        bits = np.random.default_rng(0).choice(bits, count, replace=count > len(bits))
    for bit in bits.tolist():
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


@pytest.fixture
def kept(tmp_path: Path) -> Store:
    """A store with one small trial."""
    found = Store(tmp_path)
    record = Record(Trial(PARAMS, {"y": np.arange(5.0), "n": 3, "word": "yes"}), 0.5, {"device": "cpu"})
    found.write(KEY, record)
    return found


def as_text(record: Record | None) -> str:
    assert record is not None
    return repr((record.trial.params, {k: np.asarray(v).tolist() for k, v in record.trial.result.items()}, record))


def test_no_flipped_bit_of_a_trial_passes(kept: Store) -> None:
    path, content = kept.path(KEY), kept.path(KEY).read_bytes()
    whole = as_text(kept.read(KEY))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for changed in flips(content):
            path.write_bytes(changed)
            assert kept.read(KEY) is None
    assert len(said) == 8 * len(content) > 5000
    assert {warning.category for warning in said} == {DamagedFile}
    path.write_bytes(content)
    assert as_text(kept.read(KEY)) == whole


def test_a_trial_copied_over_another_name_is_not_accepted(tmp_path: Path, toy: Experiment) -> None:
    run(toy, "quick", Store(tmp_path), device=CPU)
    one, two = sorted(tmp_path.rglob("*.npz"))[:2]
    before = two.read_bytes()
    shutil.copy(one, two)
    with pytest.warns(DamagedFile, match=r"is damaged \(it contains another trial\)"):
        assert run(toy, "quick", Store(tmp_path), device=CPU).holds
    assert np.load(two)["result/square"] == np.load(io.BytesIO(before))["result/square"]


def unlike(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda meta: {**meta, **changes}


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (unlike(params={"x": 2, "kind": "plain"}), "another trial"),
        (unlike(params={"x": 1.0, "kind": "plain"}), "another trial"),
        (unlike(experiment="other"), "another trial"),
        (unlike(code="4567"), "another trial"),
        (unlike(setting="float64"), "another trial"),
        (unlike(scalars=["nothing"]), "nothing"),  # KeyError
        (unlike(scalars=3), "int"),  # TypeError
        (lambda meta: {name: value for name, value in meta.items() if name != "seconds"}, "seconds"),  # KeyError
        (lambda meta: [1], "list"),  # TypeError
        (lambda meta: "text", "str"),
    ],
)
def test_metadata_is_compared_with_the_key(kept: Store, edit: Callable[[Any], object], reason: str) -> None:
    """The file is refused even if its checksum is valid, as in a forged file."""
    path = kept.path(KEY)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["meta"] = np.asarray(json.dumps(edit(json.loads(str(arrays["meta"])))))
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    path.write_bytes(sealed(content.getvalue()))
    with pytest.warns(DamagedFile, match=reason):
        assert kept.read(KEY) is None


def test_scalars_come_back_as_they_are_in_python(tmp_path: Path) -> None:
    found = Store(tmp_path)
    values: dict[str, Any] = {
        "single": np.float32(1.5),
        "long": np.int64(7),
        "truth": np.bool_(True),
        "word": np.str_("yes"),
        "double": np.float64(2.5),
    }
    trial = Trial(PARAMS, {})
    trial.result.update(values)  # NumPy scalars, which the type of a Result does not include
    found.write(KEY, Record(trial, 0.0, {}))
    record = found.read(KEY)
    assert record is not None
    kinds = {name: type(value) for name, value in record.trial.result.items()}
    assert kinds == {"single": float, "long": int, "truth": bool, "word": str, "double": float}
    assert record.trial.result == {"single": 1.5, "long": 7, "truth": True, "word": "yes", "double": 2.5}


def test_what_is_not_a_file_is_set_aside(tmp_path: Path, toy: Experiment) -> None:
    """A folder in place of the file cannot be read by any user, like a file without permission."""
    run(toy, "quick", Store(tmp_path), device=CPU)
    victim = sorted(tmp_path.rglob("*.npz"))[3]
    for _ in range(2):  # the second finds that the name is taken
        victim.unlink()
        (victim / "inside").mkdir(parents=True)
        with pytest.warns(DamagedFile, match="Is a directory"):
            assert run(toy, "quick", Store(tmp_path), device=CPU).holds
    assert victim.is_file()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file")
def test_a_trial_without_permission_is_set_aside(kept: Store) -> None:
    kept.path(KEY).chmod(0)
    with pytest.warns(DamagedFile, match="Permission denied"):
        assert kept.read(KEY) is None


def test_archives_that_inflate_are_not_unpacked(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LARGEST", 1 << 20)
    content, size = io.BytesIO(), 1 << 25
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("meta.npy", bytes(size))
    honest = content.getvalue()
    lying = honest.replace(size.to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    assert len(honest) < size // 500
    assert lying != honest
    for bomb, reason in ((honest, "more memory than any trial"), (lying, "CRC|magic")):
        kept.path(KEY).write_bytes(sealed(bomb))
        tracemalloc.start()
        with pytest.warns(DamagedFile, match=reason):
            assert kept.read(KEY) is None
        assert tracemalloc.get_traced_memory()[1] < size // 8, "the file must not be unpacked"
        tracemalloc.stop()
    kept.path(KEY).write_bytes(bytes(1 << 21))
    with pytest.warns(DamagedFile, match="larger than any trial"):
        assert kept.read(KEY) is None
    with pytest.raises(ExperimentError, match=r"returned 1048576 bytes, but at most .* can be stored; return only"):
        kept.write(KEY, Record(Trial(PARAMS, {"y": np.zeros(1 << 17)}), 0.0, {}))


def test_two_readers_of_one_damaged_file(kept: Store) -> None:
    """Two processes find a damaged file: the first moves it aside, the second finds nothing, and neither fails."""
    content = kept.path(KEY).read_bytes()
    errors: list[BaseException] = []
    found: list[Record | None] = []
    barrier = threading.Barrier(2)

    def reader() -> None:
        try:
            for _ in range(100):
                barrier.wait()
                found.append(kept.read(KEY))
                barrier.wait()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    with warnings.catch_warnings(action="ignore"):
        threads = [threading.Thread(target=reader) for _ in range(2)]
        kept.path(KEY).write_bytes(content[:-1])
        threads[0].start()
        threads[1].start()
        for thread in threads:
            while thread.is_alive():
                kept.path(KEY).write_bytes(content[:-1])
                thread.join(0.001)
    assert errors == []
    assert found == [None] * 200


def test_a_good_file_is_not_set_aside_for_the_bad_one_before_it(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process stores the trial after the damaged file is read and before it is moved."""
    path, content = kept.path(KEY), kept.path(KEY).read_bytes()
    path.write_bytes(content[:-1])
    decode = store._decode

    def overtaken(damaged: bytes, key: Key) -> Record:
        if damaged != content:
            (path.parent / "new").write_bytes(content)
            (path.parent / "new").replace(path)
        return decode(damaged, key)

    monkeypatch.setattr(store, "_decode", overtaken)
    assert kept.read(KEY) is not None
    assert not list(path.parent.glob("*.damaged"))


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_no_flipped_bit_of_a_checkpoint_passes(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    state = {"epoch": 3, "weights": {"w": torch.randn(64, 5)}}
    with Checkpoint(path) as checkpoint:
        checkpoint.save(state)
    content = path.read_bytes()
    torch.testing.assert_close(torch.load(path), state, rtol=0, atol=0)  # other readers can still use it
    with Checkpoint(path) as checkpoint, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for changed in flips(content, 1000):
            path.write_bytes(changed)
            assert checkpoint.load() is None
        assert len(said) == 1000
        assert {warning.category for warning in said} == {DamagedCheckpoint}
        path.write_bytes(content)
        torch.testing.assert_close(checkpoint.load(), state, rtol=0, atol=0)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch owned",)


def test_checkpoints_with_checksums_run_no_code_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.pt"
    for content in ({"net": Evil()}, torch.zeros(3)):  # code, and objects that are not states
        torch.save(content, path)
        _seal(path)
        with Checkpoint(path) as checkpoint, pytest.warns(DamagedCheckpoint, match="starts from the beginning"):
            assert checkpoint.load() is None
    assert not (tmp_path / "owned").exists()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    _seal(path)
    with Checkpoint(path) as checkpoint, pytest.warns(DamagedCheckpoint, match="compressed, and checkpoints are not"):
        assert checkpoint.load() is None


# ── outcomes ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_no_flipped_bit_of_an_outcome_passes(tmp_path: Path, toy: Experiment) -> None:
    outcome = run(toy, "quick", Store(tmp_path), device=CPU)
    path = tmp_path / "toy" / "quick.json"
    refused = 0
    for suffix in (".json", ".png", ".svg"):
        file = path.with_suffix(suffix)
        content = file.read_bytes()
        for changed in flips(content, 300):
            file.write_bytes(changed)
            try:
                assert Outcome.load(path) == outcome  # flips may change only whitespace, or the case of an escape
            except StoreError:
                refused += 1
        file.write_bytes(content)
    assert refused > 880


@pytest.mark.parametrize(
    "edit",
    [
        unlike(seconds="abc"),
        unlike(trials="12"),
        unlike(trials=True),
        unlike(claims=3),
        unlike(claims=[{"text": "a", "source": "b", "measured": "c", "holds": "no"}]),
        unlike(claims=[{"text": "a", "source": "b", "measured": 3, "holds": True}]),
        unlike(claims=["text"]),
        unlike(provenance=[]),
        unlike(provenance={"device": 3}),
        unlike(provenance={"device": [3]}),
        unlike(runs=[{}]),
        unlike(name=3),
        unlike(name="other"),
        unlike(scale="paper"),
        unlike(unknown=1),
        lambda table: [table],
        lambda table: None,
    ],
)
@pytest.mark.filterwarnings("ignore::lazyscope.lab.store.DamagedFile")
def test_an_outcome_of_wrong_types_is_left_out_of_the_report(
    tmp_path: Path, toy: Experiment, edit: Callable[[Any], object]
) -> None:
    if not (source := tmp_path.parent / "outcome").exists():  # once for all parameters
        run(toy, "quick", Store(source), device=CPU)
    shutil.copytree(source / "toy", tmp_path / "toy")
    path = tmp_path / "toy" / "quick.json"
    table = json.loads(path.read_text())
    del table["checksum"]  # as written before there were checksums
    path.write_text(json.dumps(edit(table)))
    with pytest.raises(StoreError, match=r"quick\.json is damaged \(.*\); run `lazyscope reproduce toy --scale quick`"):
        Outcome.load(path)
    assert "There are no results yet" in write_report(tmp_path).read_text()
    assert path.with_suffix(".damaged").exists()
    assert run(toy, "quick", Store(tmp_path), device=CPU).holds, "computed again from the stored trials"


def test_recorded_outcomes_are_still_read() -> None:
    found = [Outcome.load(path) for path in sorted(OUTCOMES.glob("*/*.json"))]
    assert len(found) > 20
    assert all(outcome.claims for outcome in found)
