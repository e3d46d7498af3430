"""The packages that `constraints.txt` pins, and what an installed one needs."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"


def canonical(name: str) -> str:
    """A package's name as indexes spell it (PEP 503).

    Args:
        name: The name in any spelling.

    Returns:
        The name in lower case, with single hyphens.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path = CONSTRAINTS) -> dict[str, str]:
    """The version of every package in a file of `name==version` lines.

    Args:
        path: A file of constraints or requirements.

    Returns:
        Versions by canonical name, in the order of the file.
    """
    found = re.findall(r"^([\w.-]+)==([^\s\\]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonical(name): version for name, version in found}


def dependencies(name: str) -> list[str]:
    """What an installed package needs here, without its extras.

    Args:
        name: The package.

    Returns:
        Canonical names of those that are installed, in order.
    """
    found = set()
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.add(canonical(requirement.name))
    return sorted(filter(_installed, found))


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
