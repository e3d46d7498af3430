"""CIFAR-10 is read from every form in which it is handed round; what is missing or damaged names the remedy."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lazyscope.data import cifar10 as module
from lazyscope.data.cifar10 import MEAN, STD, cifar10, images, normalise
from lazyscope.data.coding import is_lossy, version
from lazyscope.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

CLASSES = np.tile(np.arange(10), 5)


def encode(pixels: np.ndarray, form: str = "png") -> bytes:
    """One image, (3, 32, 32), as a PNG or JPEG file."""
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, form)
    return file.getvalue()


def write_parquet(path: Path, pictures: list[bytes | None], labels: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": picture, "path": f"{i}.png"} for i, picture in enumerate(pictures)]
    parquet.write_table(pyarrow.table({"img": rows, "label": labels}), path, row_group_size=7)


def binary(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return np.concatenate([labels[:, None].astype(np.uint8), pixels.reshape(len(pixels), -1)], 1).tobytes()


def python2(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """As Python 2 and its NumPy wrote it: bytes for text, `numpy.core`, and integers for the flags of a dtype."""
    rows = pixels.reshape(len(pixels), -1)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR"
        + b"(I1\n(I%d\nI%d\ntcnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntbI00\n" % rows.shape
        + b"T" + len(rows.tobytes()).to_bytes(4, "little") + rows.tobytes() + b"tb"
    )  # fmt: skip
    listed = b"(l" + b"".join(b"I%d\na" % label for label in labels)
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + listed + b"U\x0bbatch_labelU\x05batchu."


def python3(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return pickle.dumps({"data": pixels.reshape(len(pixels), -1), "labels": labels.tolist()}, protocol=2)


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (len(CLASSES), 3, 32, 32), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder cifar10 where the data are looked for; five images of a class are a whole set here."""
    monkeypatch.setenv("LAZYSCOPE_DATA", str(tmp_path))
    monkeypatch.setattr(module, "EACH", {"train": 5, "test": 1})
    return tmp_path / "cifar10"


def members(
    split: str, pixels: np.ndarray, encoder: Callable[[np.ndarray, np.ndarray], bytes], suffix: str
) -> dict[str, bytes]:
    if split == "test":
        return {f"test_batch{suffix}": encoder(pixels[:10], CLASSES[:10])}
    parts = zip(np.split(pixels, 5), np.split(CLASSES, 5), strict=True)
    return {f"data_batch_{i}{suffix}": encoder(*part) for i, part in enumerate(parts, 1)}


def write_folder(place: Path, files: dict[str, bytes]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (place / name).write_bytes(content)


def write_tar(path: Path, inside: str, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in {"readme.html": b"<p>", **files}.items():
            entry = tarfile.TarInfo(f"{inside}/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def lay(form: str, folder: Path, split: str, pixels: np.ndarray) -> None:
    """Write one split in one of the forms that there are."""
    if form in ("parquet", "hub"):
        count = len(pixels) if split == "train" else 10
        for part in range(2):
            rows = np.arange(part * count // 2, (part + 1) * count // 2)
            file = folder / ("plain_text" if form == "hub" else "") / f"{split}-0000{part}-of-00002.parquet"
            write_parquet(file, [encode(pixels[i]) for i in rows], CLASSES[rows].tolist())
    elif form == "binary folder":
        write_folder(folder / "cifar-10-batches-bin", members(split, pixels, binary, ".bin"))
    elif form == "binary archive":
        write_tar(folder / "cifar-10-binary.tar.gz", "cifar-10-batches-bin", members(split, pixels, binary, ".bin"))
    elif form == "python folder":  # also what torchvision leaves in its root
        write_folder(folder.parent / "cifar-10-batches-py", members(split, pixels, python2, ""))
    elif form == "python 3 folder":
        write_folder(folder, members(split, pixels, python3, ""))
    else:
        write_tar(folder / "cifar-10-python.tar.gz", "cifar-10-batches-py", members(split, pixels, python2, ""))


FORMS = [
    "parquet", "hub", "binary folder", "binary archive", "python folder", "python 3 folder", "python archive"
]  # fmt: skip


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_images(form: str, split: str, folder: Path, pixels: np.ndarray) -> None:
    lay(form, folder, split, pixels)
    count = 50 if split == "train" else 10
    with warnings.catch_warnings(action="error"):
        found = images("train" if split == "train" else "test")
    assert torch.equal(found.pixels, torch.from_numpy(pixels[:count]))
    assert found.labels.tolist() == CLASSES[:count].tolist()
    raw = torch.from_numpy(pixels[:count]) / 255
    torch.testing.assert_close(found.normalised(), normalise(raw), rtol=1e-5, atol=1e-6)


def test_some_images_are_shuffled_by_seed(folder: Path, pixels: np.ndarray) -> None:
    lay("parquet", folder, "train", pixels)
    x, y = cifar10("train", seed=1)
    assert sorted(y.tolist()) == sorted(CLASSES.tolist())
    assert y.tolist() != CLASSES.tolist()
    few, classes = cifar10("train", n=4, seed=1)
    assert torch.equal(few, x[:4])
    assert torch.equal(classes, y[:4])
    expected = (torch.from_numpy(pixels) / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    distance = (x[0] - expected).abs().amax((1, 2, 3))
    assert float(distance.min()) < 1e-5
    with pytest.raises(DataError, match="pass n from 1 to 50"):
        cifar10("train", n=51)


def test_jpeg_and_grey_images_are_read(folder: Path, pixels: np.ndarray) -> None:
    grey = io.BytesIO()
    Image.fromarray(np.full((32, 32), 100, np.uint8)).save(grey, "png")
    smooth = encode(np.full((3, 32, 32), 100, np.uint8), "jpeg")
    write_parquet(folder / "test-00000-of-00001.parquet", [grey.getvalue(), *[smooth] * 9], list(range(10)))
    assert (images("test").pixels.float() - 100).abs().max() <= 2


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_losses_of_the_coding_are_known(folder: Path, pixels: np.ndarray, kind: str) -> None:
    write_parquet(folder / "test-00000-of-00001.parquet", [encode(each, kind) for each in pixels[:10]], list(range(10)))
    assert is_lossy() == (kind == "jpeg")


def test_copies_with_and_without_losses_are_told_apart(
    folder: Path, tmp_path: Path, pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert version() == ""
    found = {}
    for form in FORMS:
        place = tmp_path / form
        monkeypatch.setenv("LAZYSCOPE_DATA", str(place))
        lay(form, place / "cifar10", "test", pixels)
        found[form] = version()
    assert len(set(found.values())) == 1
    monkeypatch.setenv("LAZYSCOPE_DATA", str(tmp_path / "jpeg"))
    file = tmp_path / "jpeg" / "cifar10" / "test-00000-of-00001.parquet"
    write_parquet(file, [encode(each, "jpeg") for each in pixels[:10]], list(range(10)))
    assert version() not in {"", *found.values()}


@pytest.mark.parametrize("form", FORMS[2:])
def test_official_archives_have_no_losses(form: str, folder: Path, pixels: np.ndarray) -> None:
    lay(form, folder, "test", pixels)
    assert not is_lossy()


def test_absence_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DataError,
        match=r"no CIFAR-10 \('test'\) in .*; download .*huggingface.co/datasets.*--data-dir or LAZYSCOPE_DATA",
    ):
        cifar10("test")
    monkeypatch.delenv("LAZYSCOPE_DATA")
    with pytest.raises(DataError, match="LAZYSCOPE_DATA is not set; download"):
        images("train")


def test_counts_and_classes_are_checked(folder: Path, pixels: np.ndarray) -> None:
    file = folder / "test-00000-of-00001.parquet"
    good = encode(pixels[0])
    write_parquet(file, [good] * 9, list(range(9)))
    with pytest.raises(DataError, match=r"has 9 images for 'test', 0 to 1 per class.* 1 per class; download"):
        images("test")
    write_parquet(file, [good] * 10, [0, *range(9)])
    with pytest.raises(DataError, match=r"has 10 images for 'test', 0 to 2 per class"):
        images("test")
    write_parquet(file, [good] * 10, [*range(9), 10])
    with pytest.raises(DataError, match="classes 0 to 10, not 0 to 9"):
        images("test")
    write_parquet(folder / "train-00000-of-00002.parquet", [good] * 50, CLASSES.tolist())
    with pytest.raises(DataError, match=r"contains 1 of 2 files like train-.*download all"):
        images("train")


def test_damaged_parquet_says_what_to_do(folder: Path, pixels: np.ndarray) -> None:
    file = folder / "test-00000-of-00001.parquet"
    good = encode(pixels[0])
    for bad in (good[:60], good[:-30], b"", None, b"GIF89a"):
        write_parquet(file, [bad, *[good] * 9], list(range(10)))
        with pytest.raises(DataError, match=r"cannot be decoded .* download it again"):
            images("test")
    write_parquet(file, [encode(pixels[0, :, :16, :16]), *[good] * 9], list(range(10)))
    with pytest.raises(DataError, match="not 32×32"):
        images("test")
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"nonsense", b""):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"damaged or is not CIFAR-10 .* download it again"):
            images("test")
    for table in ({"text": ["a"]}, {"img": [3], "label": [1]}, {"img": [{"bytes": b""}], "label": ["cat"]}):
        parquet.write_table(pyarrow.table(table), file)
        with pytest.raises(DataError, match="damaged or is not CIFAR-10"):
            images("test")


@pytest.mark.parametrize("form", ["binary archive", "python archive"])
def test_damaged_archives_say_what_to_do(form: str, folder: Path, pixels: np.ndarray) -> None:
    lay(form, folder, "test", pixels)
    with pytest.raises(DataError, match=r"damaged or is not CIFAR-10 \(it does not contain data_batch_1"):
        images("train")
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for content in (whole[: len(whole) // 2], bytes(flipped), b"nonsense", b""):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"(damaged or is not CIFAR-10|not a multiple of 3073).* download it again"):
            images("test")


def test_damaged_folders_say_what_to_do(folder: Path, pixels: np.ndarray) -> None:
    lay("binary folder", folder, "train", pixels)
    place = folder / "cifar-10-batches-bin"
    (place / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4.bin is missing; download"):
        images("train")
    (place / "data_batch_4.bin").write_bytes(b"\x01" * 5000)
    with pytest.raises(DataError, match="has 5000 bytes, which is not a multiple of 3073"):
        images("train")


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch owned",)


def test_pickles_are_refused_or_told(folder: Path, pixels: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    rows = pixels[:10].reshape(10, -1)
    good = python2(pixels[:10], CLASSES[:10])
    bad = {
        "posix.system": pickle.dumps({"data": Evil(), "labels": []}),
        "not rows of 3072": pickle.dumps({"data": rows[:5], "labels": list(range(10))}, protocol=2),
        "not rows": pickle.dumps({"data": rows.astype(float), "labels": list(range(10))}, protocol=2),
        "labels": pickle.dumps({"data": rows}, protocol=2),
        "truncated": good[: len(good) // 2],
        "ran out of input": b"",
        "not integers": pickle.dumps({"data": rows, "labels": [0.5] * 10}, protocol=2),
    }
    for reason, content in bad.items():
        write_folder(folder, {"test_batch": content})
        with pytest.raises(DataError, match=rf"test_batch is damaged or is not CIFAR-10 .*{reason}"):
            images("test")
    assert not (folder.parent / "owned").exists()


def test_the_whole_set_at_its_own_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYSCOPE_DATA", str(tmp_path))
    rows = np.zeros((10_000, 3073), np.uint8)
    rows[:, 0] = np.arange(10_000) % 10
    rows[:, 1] = np.arange(10_000) % 251
    (tmp_path / "test_batch.bin").write_bytes(rows.tobytes())
    found = images("test")
    assert found.pixels.shape == (10_000, 3, 32, 32)
    assert found.pixels[:, 0, 0, 0].tolist() == (np.arange(10_000) % 251).tolist()
    (tmp_path / "test_batch.bin").write_bytes(rows[:-10].tobytes())
    with pytest.raises(DataError, match="has 9990 images"):
        cifar10("test", n=5)
