"""The packages that `constraints.txt` pins, and the dependencies of installed packages."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"


def canonical(name: str) -> str:
    """Normalise the name of a package (PEP 503).

    Args:
        name: The name in any valid spelling.

    Returns:
        The name in lower case, with single hyphens.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path = CONSTRAINTS) -> dict[str, str]:
    """Read the pinned versions from a file of `name==version` lines.

    Args:
        path: A constraints or requirements file.

    Returns:
        The versions by normalised name, in the order of the file.
    """
    found = re.findall(r"^([\w.-]+)==([^\s\\]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonical(name): version for name, version in found}


def dependencies(name: str) -> list[str]:
    """Find the dependencies of an installed package, without its extras.

    Args:
        name: The name of the package.

    Returns:
        The normalised names of the dependencies that are installed, in alphabetical order.
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
