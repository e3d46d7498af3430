"""Memory: what users write for it, how much there is, and results that are refused because they would not fit."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lazyscope.errors import InputError

Memory: TypeAlias = int | float | str
"""Bytes, or a text such as "2GB" or "512MiB"."""

_UNITS = {letter: power for power, letter in enumerate(("", "k", "m", "g", "t"))}
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+|[0-9]+\.)(?:e\+?([0-9]{1,2}))?\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)

_SMALL = 1 << 26
"""Bytes below which nothing is checked: finding out how much is free takes a tenth of a millisecond."""

KERNEL_REMEDY = (
    'pass outputs="trace" for the (n, n) kernel, use TangentOperator or spectrum(top=…), which never form it, or write'
    " it to disk with tangent_kernel_to_zarr"
)


def parse_memory(memory: Any) -> int | None:
    """A bound on memory in bytes.

    Args:
        memory: A number of bytes, or a text with a unit: "2GB" is 2·10⁹ bytes, "2GiB" is 2·2³⁰, "512MB", "1.5 TB", "4G"
            (as "4GB") and "1000000" are understood, in upper and lower case. None means that no bound was given.

    Returns:
        The number of bytes, or None if none was given.

    Raises:
        InputError: If it is not a positive, finite amount of at least one byte.

    >>> parse_memory("2GB"), parse_memory("1.5GiB"), parse_memory(2**30), parse_memory(None)
    (2000000000, 1610612736, 1073741824, None)
    """
    if memory is None:
        return None
    amount = _amount(memory) if isinstance(memory, str) else _number(memory)
    if not 1 <= amount < math.inf:
        raise InputError(f"memory={memory!r} is not a positive amount of memory; {_REMEDY}.")
    return int(amount)


_REMEDY = 'pass a number of bytes or a text such as memory="2GB"'


def _amount(text: str) -> float | int:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InputError(f"memory={text!r} is not an amount of memory; {_REMEDY}.")
    number, exponent, unit, binary = match.groups()
    if binary and not unit:
        raise InputError(f"memory={text!r} has no unit in front of 'i'; {_REMEDY}.")
    scale: int = (1024 if binary else 1000) ** _UNITS[unit.lower()]
    return float(f"{number}e{exponent or 0}") * scale


def _number(memory: Any) -> float:
    try:
        if isinstance(memory, bool):
            raise TypeError
        return float(memory)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"memory={memory!r} is not an amount of memory; {_REMEDY}.") from None


def free_memory(device: torch.device | str) -> int | None:
    """Bytes that can still be allocated.

    Args:
        device: Where: a GPU, or the CPU, where the limit of a container (control group) counts too.

    Returns:
        The number of bytes, or None where it cannot be found out.
    """
    device = torch.device(device)
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if device.type != "cpu":
        return None
    known = [amount for amount in (_free_here(), _free_in_container()) if amount is not None]
    return min(known, default=None)


def default_memory(device: torch.device, bounds: Mapping[str, int]) -> int:
    """What a computation may use beside its result where nobody says.

    Args:
        device: Where it runs.
        bounds: The bytes that it makes good use of, for "cpu" at least and other types of devices.

    Returns:
        That number, or half of what is free if this is less.
    """
    now, name = time.monotonic(), str(device)
    if name not in _recent or now - _recent[name][0] > 1:  # asked once a second: it takes longer than a small kernel
        _recent[name] = now, free_memory(device)
    free = _recent[name][1]
    bound = bounds.get(device.type, bounds["cpu"])
    return bound if free is None else max(1, min(bound, free // 2))


_recent: dict[str, tuple[float, int | None]] = {}
"""When it was last asked how much is free on a device, and the answer."""


def check_fits(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    what: str = "The tangent kernel",
    copies: float | int = 1,
    instead: str = KERNEL_REMEDY,
) -> None:
    """Refuses a result that will not fit into memory, before anything is computed.

    Args:
        shape: The shape of the result.
        dtype: Its data type.
        device: Where it will be.
        what: Its name, with which the message begins.
        copies: How many tensors of this size are alive at the peak, the result included.
        instead: What to do instead, with which the message ends.

    Raises:
        InputError: If the memory that is free does not hold it; the message says how large it is, how much is free, and
            what to do instead.

    >>> check_fits((100, 100, 10, 10), torch.float32, "cpu")
    """
    size = math.prod(shape) * dtype.itemsize
    if size * copies <= _SMALL:
        return
    free = free_memory(device)
    if free is None or size * copies <= free:
        return
    needed = "" if copies == 1 else f" and computing it {size_text(size * copies)}"
    raise InputError(
        f"{what}, of shape {tuple(shape)} in {str(dtype).removeprefix('torch.')}, takes {size_text(size)}{needed}, but"
        f" {size_text(free)} of memory are free on {device}; {instead}."
    )


def size_text(size: float | int) -> str:
    """A number of bytes in words.

    Args:
        size: The number.

    Returns:
        Such as "1.44 TB", with powers of 1000.

    >>> size_text(1.44e12), size_text(2**30), size_text(12)
    ('1440 GB', '1.07 GB', '12 bytes')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale / 2:
            return f"{size / scale:.3g} {unit}" if size < 1e3 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} bytes"


def _free_here() -> int | None:
    """What Linux says is available without swapping; elsewhere free pages."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _free_in_container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the limit of the control group leaves; files that it has read can be dropped. Both versions of the files."""
    for folder, limit, used, file in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = int((folder / limit).read_text(encoding="ascii"))
            if most >= 1 << 60:  # no limit, as the older version writes it
                continue
            taken = int((folder / used).read_text(encoding="ascii"))
            lines = [line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()]
            files = next((int(count) for name, count in lines if name == file), 0)
            return max(0, most - taken + files)
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
    return None
