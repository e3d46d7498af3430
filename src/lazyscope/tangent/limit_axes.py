"""Axes of a hidden tensor of an infinitely wide network: which of them are channels, and which are positions.

An axis of a traced tensor is a product of atoms, in row-major order. A channel atom counts units with independent,
identically distributed weights, whose number tends to infinity. A position atom counts places in an image or in a
sequence. Axes of size one have no atoms. Reshaping, transposing and squeezing only rearrange atoms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, eq=False)
class Atom:
    """A factor of an axis.

    Attributes:
        size: The number of indices.
        channel: Whether it counts channels.
        step: The number of underlying channels for each index of a channel atom.
    """

    size: int
    channel: bool = False
    step: int = 1


Axis: TypeAlias = tuple[Atom, ...]
Axes: TypeAlias = tuple[Axis, ...]


def axis(*atoms: Atom) -> Axis:
    """An axis without the atoms of size one."""
    return tuple(atom for atom in atoms if atom.size > 1)


def size_of(one: Axis) -> int:
    """The number of indices of an axis."""
    return math.prod(atom.size for atom in one)


def channels(axes: Axes) -> list[Atom]:
    """The channel atoms, in the order of the axes."""
    return [atom for one in axes for atom in one if atom.channel]


def positions(axes: Axes) -> list[Atom]:
    """The position atoms, in the order of the axes."""
    return [atom for one in axes for atom in one if not atom.channel]


def reshaped(axes: Axes, sizes: Sequence[int]) -> tuple[Axes, dict[Atom, Axis]] | None:
    """Regroup the atoms into axes of the given sizes.

    Returns the axes and the atoms that were split, each with its parts; `None` if the sizes do not match the atoms.
    """
    left, split, result = [atom for one in axes for atom in one], dict[Atom, Axis](), list[Axis]()
    for size in sizes:
        taken: list[Atom] = []
        while size > 1:
            if not left:
                return None
            atom = left.pop(0)
            if size % atom.size == 0:
                taken.append(atom)
                size //= atom.size
            elif atom.size % size == 0:
                inner = atom.size // size
                parts = Atom(size, atom.channel, atom.step * inner), Atom(inner, atom.channel, atom.step)
                _record(split, atom, parts)
                taken.append(parts[0])
                left.insert(0, parts[1])
                size = 1
            else:
                return None
        result.append(tuple(taken))
    return (tuple(result), split) if not left else None


def _record(split: dict[Atom, Axis], atom: Atom, parts: tuple[Atom, Atom]) -> None:
    for whole, pieces in split.items():
        if atom in pieces:
            place = pieces.index(atom)
            split[whole] = (*pieces[:place], *parts, *pieces[place + 1 :])
            return
    split[atom] = parts
