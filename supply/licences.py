"""Writes `LICENCES.md`: the licence of every package that the set-up installs, as its own metadata say.

`make licences` runs it in the environment that the set-up made.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from supply.pins import ROOT, dependencies, pins

TARGET = ROOT / "LICENCES.md"

NAMES = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
"""Classifiers by the shorter name."""

_HEAD = """\
# Licences

lazyscope itself is under the [MIT licence](LICENSE). It contains no code of other packages. The set-up installs these,
each under its own licence, as its metadata say. `pip install lazyscope` installs those marked *needed*; the others come
with extras, or are tools for tests and documentation. This list is written by `make licences`.

| package | version | licence | |
|---|---|---|---|
"""


def licence(name: str) -> str:
    """The licence of an installed package: its expression, its classifiers, or the first line of its own text.

    Args:
        name: The package.

    Returns:
        A short name; empty if it states none.
    """
    told = distribution(name).metadata
    if expressions := told.get_all("License-Expression"):
        return str(expressions[0])
    classifiers = [text for text in told.get_all("Classifier") or [] if text.startswith("License ::")]
    names = [NAMES.get(text, text) for text in (text.rpartition(" :: ")[2] for text in classifiers)]
    names = [text for text in names if text not in ("OSI Approved", "DFSG approved")]
    own = "".join(told.get_all("License") or []).strip().splitlines()
    return " OR ".join(names) or (own[0].strip() if own and len(own[0]) < 60 else "")


def needed() -> set[str]:
    """What `pip install lazyscope` brings, dependencies of dependencies included.

    Returns:
        Canonical names.
    """
    found: set[str] = set()
    waiting = ["lazyscope"]
    while waiting:
        new = set(dependencies(waiting.pop())) - found
        found |= new
        waiting += sorted(new)
    return found


def main() -> None:
    """Write the table; a package that is not installed, or states no licence, is an error."""
    core, rows, silent = needed(), [], []
    for name, version in pins().items():
        try:
            told = licence(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is pinned and not installed; run make setup first.") from None
        if not told:
            silent.append(name)
        rows.append(f"| {name} | {version} | {told} |{' needed |' if name in core else ' |'}")
    if silent:
        raise SystemExit(f"{', '.join(silent)} state no licence; look for it, and add it to NAMES.")
    TARGET.write_text(_HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{TARGET}: {len(rows)} packages")


if __name__ == "__main__":
    main()
