"""Independent random number streams for the parts of one trial: its task, its samples, its network.

The rule for seeds: what draws from one generator seeds it with `manual_seed(seed)`; what needs several independent
generators for one seed takes them from `stream(seed, part)`, with a constant `part` for each use.
"""

from __future__ import annotations

import numpy as np
import torch

from lazyscope.errors import InputError


def stream(seed: int, part: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Create a random number generator for one part of a trial.

    Generators with different `part` are independent, although they share a seed. They are not seeded with
    `manual_seed(seed + (part << 32))`, because PyTorch's CPU generator uses only the low 32 bits of a seed, so all
    parts would share one stream. NumPy's `SeedSequence` mixes both numbers into those bits.

    Args:
        seed: The seed of the trial, a non-negative integer.
        part: The index of the part, a non-negative integer.
        device: The device of the generator. On the CPU it produces the same numbers on every machine.

    Returns:
        The generator.

    Raises:
        InputError: If `seed` or `part` is negative.

    Example:
        >>> a, b = (torch.rand(1, generator=stream(0, part)) for part in (0, 1))
        >>> bool(a == b)
        False
    """
    if seed < 0 or part < 0:
        raise InputError(f"seed and part must be non-negative, but they are {seed} and {part}; pass integers from 0.")
    return torch.Generator(device).manual_seed(int(np.random.SeedSequence((seed, part)).generate_state(1)[0]))
