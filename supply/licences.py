"""Write `LICENCES.md`, which lists the licence of every package that the set-up installs, according to its metadata.

`make licences` runs this script in the environment that `make setup` created.
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
"""Short names of licences, by classifier."""

_HEAD = """\
# Licences

lazyscope is released under the [MIT licence](LICENSE). Its tests contain [axe-core](tests/vendor) (MPL-2.0), and its
documentation the font [STIX Two Math](docs/assets/fonts) (OFL-1.1); neither is part of the package. The set-up installs
the following packages, each under its own licence, according to its metadata. `pip install lazyscope` installs those
marked *needed*; the others belong to extras, or are tools for tests and documentation. `make licences` writes the list.

| package | version | licence | |
|---|---|---|---|
"""


def licence(name: str) -> str:
    """Find the licence of an installed package: its licence expression, its classifiers, or the first line of its text.

    Args:
        name: The name of the package.

    Returns:
        The short name of the licence, or an empty string if the package states none.
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
    """Find the packages that `pip install lazyscope` installs, including indirect dependencies.

    Returns:
        The normalised names.
    """
    found: set[str] = set()
    waiting = ["lazyscope"]
    while waiting:
        new = set(dependencies(waiting.pop())) - found
        found |= new
        waiting += sorted(new)
    return found


def main() -> None:
    """Write the table. A package that is not installed, or states no licence, is an error."""
    core, rows, silent = needed(), [], []
    for name, version in pins().items():
        try:
            told = licence(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is pinned but not installed; run make setup first.") from None
        if not told:
            silent.append(name)
        rows.append(f"| {name} | {version} | {told} |{' needed |' if name in core else ' |'}")
    if silent:
        raise SystemExit(f"{', '.join(silent)} state no licence; find their licences, and add them to NAMES.")
    TARGET.write_text(_HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{TARGET}: {len(rows)} packages")


if __name__ == "__main__":
    main()
