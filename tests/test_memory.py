"""Memory sizes in the forms that users write, and results that would not fit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lazyscope import memory
from lazyscope.errors import InputError
from lazyscope.memory import check_fits, free_memory, parse_memory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GB", 2 * 10**9),
        ("2gb", 2 * 10**9),
        ("2 G", 2 * 10**9),
        ("512MB", 512 * 10**6),
        ("1.5GiB", 3 << 29),
        (".5 TiB", 1 << 39),
        ("100kB", 10**5),
        ("1000000", 10**6),
        ("1e9", 10**9),
        ("12b", 12),
        (2**30, 2**30),
        (1.5e9, 1_500_000_000),
        (np.int64(4096), 4096),
        (torch.tensor(4096), 4096),
        (None, None),
    ],
)
def test_amounts_of_memory_are_understood(text: object, expected: int | None) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize(
    "nonsense",
    [
        *("", "GB", "2XB", "two", "-2GB", "0GB", "nan", "inf", "1iB", "2 GB please", "1.2.3", "9" * 400),
        *(0, -1, 0.5, math.nan, math.inf, -math.inf, True, [1], (1, 2), torch.ones(2), b"2GB"),
    ],
)
def test_nonsense_is_refused_with_the_remedy(nonsense: object) -> None:
    with pytest.raises(InputError, match='such as memory="2GB"'):
        parse_memory(nonsense)


def test_free_memory_of_the_cpu_is_known_here() -> None:
    free = free_memory("cpu")
    assert free is not None
    assert free > 1 << 24
    assert free_memory("meta") is None


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 5\ninactive_file 100\n"}, 400),
        ({"memory.max": "max", "memory.current": "700", "memory.stat": ""}, None),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "1200",
                "memory/memory.stat": "total_inactive_file 0\n",
            },
            0,
        ),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ({}, None),
    ],
)
def test_a_container_has_its_own_limit(tmp_path: Path, files: dict[str, str], free: int | None) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert memory._free_in_container(tmp_path) == free


def test_what_does_not_fit_is_refused_with_its_size_and_three_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**9)
    check_fits((10_000, 10_000), torch.float32, "cpu")
    with pytest.raises(InputError) as caught:
        check_fits((60_000, 60_000, 10, 10), torch.float32, "cpu")
    text = str(caught.value)
    for part in ("(60000, 60000, 10, 10) in float32", "1440 GB", "1 GB of memory are free on cpu"):
        assert part in text
    for way in ('outputs="trace"', "TangentOperator", "tangent_kernel_to_zarr"):
        assert way in text


def test_copies_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**9)
    with pytest.raises(InputError, match=r"The matrix.* takes 400 MB and computing it 1.2 GB, but .*; buy more\."):
        check_fits((10_000, 10_000), torch.float32, "cpu", what="The matrix", copies=3, instead="buy more")


def test_where_the_free_memory_is_unknown_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    check_fits((10**6, 10**6), torch.float32, "cpu")
