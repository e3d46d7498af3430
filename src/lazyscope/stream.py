"""Independent random numbers for the parts of one trial: its task, its samples, its net."""

from __future__ import annotations

import numpy as np
import torch

from lazyscope.errors import InputError


def stream(seed: int, part: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one part of what a seed draws; on the CPU, the same numbers on every machine.

    Not `manual_seed(seed + (part << 32))`: torch's CPU generator reads the low 32 bits of a seed only, so that would
    be one stream for all parts. NumPy's `SeedSequence` mixes both numbers into those bits.

    >>> a, b = (torch.rand(1, generator=stream(0, part)) for part in (0, 1))
    >>> bool(a == b)
    False
    """
    if seed < 0 or part < 0:
        raise InputError(f"Seed {seed} and part {part} name no stream; take numbers from 0 on.")
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence((seed, part)).generate_state(1)[0]))
