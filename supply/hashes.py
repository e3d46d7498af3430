"""Write `hashes.txt`: every pinned package with the SHA-256 of its files on PyPI, for `pip --require-hashes`.

Run `make hashes` after `constraints.txt` has changed; it needs access to the network. For each version it keeps the
hashes of all files that a supported machine could use: wheels for CPython 3.11 or later on 64-bit Linux (glibc), macOS
and Windows, and source archives.
"""

from __future__ import annotations

import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from urllib.parse import unquote

from supply.pins import canonical, pins

INDEX = "https://pypi.org/simple"
TARGET = Path(__file__).with_name("hashes.txt")

ELSEWHERE = {
    # The CPU build of torch for CPython 3.11 on Linux, x86-64, on which the tests run. It is not on PyPI.
    ("torch", "2.13.0"): ["6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"],
}
"""The hashes of files on other indexes, by package and version."""

_HEAD = """\
# Written by `make hashes` from constraints.txt; do not edit. `pip --require-hashes` installs nothing else.
# All files of a version on PyPI that CPython 3.11 or later can use on Linux (glibc), macOS and Windows, 64 bits.
"""
_OLD = re.compile(r"cp(2\d*|3[0-9]|310|3\d\dt)$|pp\d+|graalpy.*|py2$")
_OTHER = re.compile(r"musllinux|win32|win_arm64|i686|armv|ppc64|s390x|riscv64|loongarch|android|ios|pyodide|wasm")


def usable(file: str) -> bool:
    """Decide whether a supported machine could install a file.

    Args:
        file: The name of the file.

    Returns:
        True for a source archive, and for a wheel for a supported version of Python and a supported platform.
    """
    if not file.endswith(".whl"):
        return file.endswith((".tar.gz", ".zip"))
    python, abi, platform = file.removesuffix(".whl").split("-")[-3:]
    tags = python.split(".")
    old = all(_OLD.fullmatch(tag) for tag in tags) and not abi.startswith("abi3")
    return not old and not re.fullmatch(r"cp\d+t", abi) and not all(map(_OTHER.search, platform.split(".")))


def version_of(file: str) -> str:
    """Extract the version from the name of a wheel or a source archive.

    Args:
        file: The name of the file.

    Returns:
        The version, as it is written in the name.
    """
    if file.endswith(".whl"):
        return file.split("-")[1]
    return re.sub(r"\.(tar\.gz|zip)$", "", file).rpartition("-")[2]


def files(name: str) -> dict[str, str]:
    """List all files of a package on PyPI.

    Args:
        name: The name of the package.

    Returns:
        The SHA-256 of each file, by file name.
    """
    with urllib.request.urlopen(f"{INDEX}/{canonical(name)}/", timeout=60) as page:
        text = page.read().decode()
    links = re.findall(r'href="([^"#]+)#sha256=([0-9a-f]{64})"', text)
    return {unquote(unescape(link)).rpartition("/")[2]: digest for link, digest in links}


def entry(name: str, version: str) -> str:
    """Format the lines of one package.

    Args:
        name: The name of the package.
        version: The pinned version.

    Returns:
        The pinned version and its hashes, in the format of pip.
    """
    known = [digest for file, digest in files(name).items() if version_of(file) == version and usable(file)]
    digests = sorted({*known, *ELSEWHERE.get((name, version), [])})
    if not digests:
        raise SystemExit(f"PyPI has no installable file of {name} {version}; pin another version.")
    return " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in digests)])


def main() -> None:
    """Query PyPI for all packages, eight at a time, and write the file."""
    with ThreadPoolExecutor(8) as pool:
        entries = list(pool.map(entry, *zip(*pins().items(), strict=True)))
    TARGET.write_text(_HEAD + "\n".join(entries) + "\n", encoding="utf-8")
    print(f"{TARGET}: {len(entries)} packages")


if __name__ == "__main__":
    main()
