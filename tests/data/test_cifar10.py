"""CIFAR-10 is read from files in the hub's layout; what is missing or damaged names the remedy."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lazyscope.data.cifar10 import MEAN, STD, cifar10, normalise
from lazyscope.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def encode(pixels: np.ndarray, form: str = "png") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def write(path: Path, images: list[bytes | None], labels: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": image, "path": f"{i}.png"} for i, image in enumerate(images)]
    table = pyarrow.table({"img": rows, "label": labels})
    parquet.write_table(table, path, row_group_size=3)


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAZYSCOPE_DATA", str(tmp_path))
    return tmp_path / "cifar10"


@pytest.mark.parametrize("inside", ["", "plain_text"])
def test_images_and_classes_over_several_files(folder: Path, pixels: np.ndarray, inside: str) -> None:
    for part in (0, 1):
        of = range(5 * part, 5 * part + 5)
        write(folder / inside / f"train-0000{part}-of-00002.parquet", [encode(pixels[i]) for i in of], list(of))
    x, y = cifar10("train", seed=1)
    assert sorted(y.tolist()) == list(range(10))
    assert y.tolist() != list(range(10)), "shuffled"
    raw = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    expected = (raw - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(x, expected[y])
    torch.testing.assert_close(normalise(raw), expected)
    few, classes = cifar10("train", n=4, seed=1)
    assert torch.equal(few, x[:4])
    assert torch.equal(classes, y[:4])


def test_jpeg_and_grey_images_are_read(folder: Path, pixels: np.ndarray) -> None:
    smooth = np.full((32, 32, 3), 100, np.uint8)
    write(folder / "test-00000-of-00001.parquet", [encode(smooth, "jpeg"), encode(pixels[0, :, :, 0])], [0, 1])
    x, y = cifar10("test")
    assert x.shape == (2, 3, 32, 32)
    grey = normalise(torch.full((1, 3, 32, 32), 100 / 255))
    torch.testing.assert_close(x[y == 0], grey, atol=0.05, rtol=0)


def test_absence_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DataError, match=r"no test-\*.parquet in .*cifar10; download .*huggingface.co/datasets.*LAZYSCOPE_DATA"
    ):
        cifar10("test")
    monkeypatch.delenv("LAZYSCOPE_DATA")
    with pytest.raises(DataError, match="LAZYSCOPE_DATA is not set; download"):
        cifar10("train")


def test_damage_says_what_to_do(folder: Path, pixels: np.ndarray) -> None:
    file = folder / "train-00000-of-00001.parquet"
    good = encode(pixels[0])
    write(file, [good, good], [0, 1])
    with pytest.raises(DataError, match="ask for 1 to 2"):
        cifar10("train", n=3)
    for bad in (good[:60], b"", None):
        write(file, [bad], [0])
        with pytest.raises(DataError, match=r"cannot be decoded .* download it again"):
            cifar10("train")
    write(file, [encode(pixels[0, :16, :16])], [0])
    with pytest.raises(DataError, match="not 32×32"):
        cifar10("train")
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"nonsense", b""):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"damaged or no CIFAR-10 .* download it again"):
            cifar10("train")
    parquet.write_table(pyarrow.table({"text": ["a"]}), file)
    with pytest.raises(DataError, match="damaged or no CIFAR-10"):
        cifar10("train")
    parquet.write_table(pyarrow.table({"img": [3], "label": [1]}), file)
    with pytest.raises(DataError, match="damaged or no CIFAR-10"):
        cifar10("train")
