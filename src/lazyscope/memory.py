"""Memory: parsing amounts of it, measuring how much is free, and refusing results that would not fit."""

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
"""An amount of memory: a number of bytes, or a string such as "2GB" or "512MiB"."""

_UNITS = {letter: power for power, letter in enumerate(("", "k", "m", "g", "t"))}
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+|[0-9]+\.)(?:e\+?([0-9]{1,2}))?\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)

_SMALL = 1 << 26
"""Results of at most this many bytes are not checked, because finding out how much memory is free takes 0.1 ms."""

KERNEL_REMEDY = (
    'pass outputs="trace" for the (n, n) kernel, use TangentOperator or spectrum(top=…), which never form it, or write'
    " it to disk with tangent_kernel_to_zarr"
)


def parse_memory(memory: Any) -> int | None:
    """Convert an amount of memory to bytes.

    Args:
        memory: A number of bytes, or a string with a unit: "2GB" is 2·10⁹ bytes and "2GiB" is 2·2³⁰ bytes. "512MB",
            "1.5 TB", "4G" (the same as "4GB") and "1000000" are also accepted, in upper or lower case. None means that
            there is no bound.

    Returns:
        The number of bytes, or None if `memory` is None.

    Raises:
        InputError: If `memory` is not a finite amount of at least one byte.

    Example:
        >>> parse_memory("2GB"), parse_memory("1.5GiB"), parse_memory(2**30), parse_memory(None)
        (2000000000, 1610612736, 1073741824, None)
    """
    if memory is None:
        return None
    amount = _amount(memory) if isinstance(memory, str) else _number(memory)
    if not 1 <= amount < math.inf:
        raise InputError(f"memory={memory!r} is not a positive amount of memory; {_REMEDY}.")
    return int(amount)


_REMEDY = 'pass a number of bytes or a string such as memory="2GB"'


def _amount(text: str) -> float | int:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InputError(f"memory={text!r} is not an amount of memory; {_REMEDY}.")
    number, exponent, unit, binary = match.groups()
    if binary and not unit:
        raise InputError(f"memory={text!r} has no unit before 'i'; {_REMEDY}.")
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
    """Find out how much memory can still be allocated on a device.

    Args:
        device: A CUDA device or the CPU. On the CPU, the memory limit of a container (control group) is respected.

    Returns:
        The number of bytes, or None if it cannot be determined.
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
    """Choose how much memory a computation may use, besides its result, if the user sets no limit.

    Args:
        device: The device on which the computation runs.
        bounds: The number of bytes beyond which more memory does not help, by device type. It must contain "cpu",
            which is used for device types that it does not contain.

    Returns:
        The bound for this device, or half of the free memory if that is less.
    """
    now, name = time.monotonic(), str(device)
    if name not in _recent or now - _recent[name][0] > 1:  # once per second: it takes longer than a small kernel
        _recent[name] = now, free_memory(device)
    free = _recent[name][1]
    bound = bounds.get(device.type, bounds["cpu"])
    return bound if free is None else max(1, min(bound, free // 2))


_recent: dict[str, tuple[float, int | None]] = {}
"""The time of the last measurement of the free memory, and its result, by device."""


def check_fits(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    what: str = "The tangent kernel",
    copies: float | int = 1,
    instead: str = KERNEL_REMEDY,
) -> None:
    """Raise an error if a result would not fit into memory, before anything is computed.

    Args:
        shape: The shape of the result.
        dtype: The data type of the result.
        device: The device on which the result will be.
        what: The name of the result, with which the error message begins.
        copies: The number of tensors of this size that exist at the peak, including the result.
        instead: What to do instead, with which the error message ends.

    Raises:
        InputError: If the result does not fit into the free memory. The message states the size of the result, how
            much memory is free, and what to do instead.

    Example:
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
        f" only {size_text(free)} of memory are free on {device}; {instead}."
    )


def size_text(size: float | int) -> str:
    """Format a number of bytes for a message.

    Args:
        size: The number of bytes.

    Returns:
        The number with a unit, such as "1.07 GB". Units are powers of 1000.

    Example:
        >>> size_text(1.44e12), size_text(2**30), size_text(12)
        ('1440 GB', '1.07 GB', '12 bytes')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale / 2:
            return f"{size / scale:.3g} {unit}" if size < 1e3 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} bytes"


def _free_here() -> int | None:
    """Return the memory that is available without swapping on Linux, and the size of the free pages elsewhere."""
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
    """Return what the limit of the control group (version 1 or 2) leaves, counting cached files as free."""
    for folder, limit, used, file in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = int((folder / limit).read_text(encoding="ascii"))
            if most >= 1 << 60:  # how version 1 writes "no limit"
                continue
            taken = int((folder / used).read_text(encoding="ascii"))
            lines = [line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()]
            files = next((int(count) for name, count in lines if name == file), 0)
            return max(0, most - taken + files)
        except (OSError, ValueError):  # there is no such group, or "max", which means no limit
            continue
    return None
