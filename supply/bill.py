"""Writes the software bill of materials of a release, CycloneDX 1.6 in JSON, from what is installed.

`make bill` runs it in the environment that the set-up made, and puts it into `dist`, beside the wheel.
"""

from __future__ import annotations

import json
import re
import uuid
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from supply.hashes import TARGET as HASHES
from supply.licences import licence
from supply.pins import ROOT, canonical, dependencies, pins


def reference(name: str, version: str) -> str:
    """A package's URL, by which a bill of materials names it.

    Args:
        name: The package.
        version: Its version.

    Returns:
        `pkg:pypi/name@version`.
    """
    return f"pkg:pypi/{canonical(name)}@{version.replace('+', '%2B')}"


def bill() -> dict[str, Any]:
    """The bill of this release: lazyscope, every pinned package with its licence and hashes, and who needs whom.

    Returns:
        A CycloneDX document. The same pins give the same document.
    """
    pinned, digests = pins(), _digests()
    own = distribution("lazyscope").version
    known = {name: reference(name, version) for name, version in {"lazyscope": own, **pinned}.items()}
    components = [
        {
            "type": "library",
            "bom-ref": known[name],
            "name": name,
            "version": version,
            "purl": known[name],
            "licenses": [{"license": {"name": licence(name)}}],
            "externalReferences": [
                {
                    "type": "distribution",
                    "url": f"https://pypi.org/project/{name}/{version}/",
                    "hashes": [{"alg": "SHA-256", "content": digest} for digest in digests[name]],
                }
            ],
        }
        for name, version in pinned.items()
    ]
    graph = [
        {"ref": known[name], "dependsOn": [known[one] for one in dependencies(name) if one in known]} for name in known
    ]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([own, pinned]))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": known["lazyscope"],
                "name": "lazyscope",
                "version": own,
                "purl": known["lazyscope"],
                "licenses": [{"license": {"id": "MIT"}}],
            }
        },
        "components": components,
        "dependencies": graph,
    }


def main() -> None:
    """Write the bill."""
    target = ROOT / "dist" / f"lazyscope-{distribution('lazyscope').version}.cdx.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(bill(), indent=1) + "\n", encoding="utf-8")
    print(target)


def _digests(path: Path = HASHES) -> dict[str, list[str]]:
    """The hashes of every package in `hashes.txt`."""
    entries = [entry for entry in re.split(r"\n(?=\S)", path.read_text(encoding="utf-8")) if "==" in entry]
    return {canonical(entry.partition("==")[0]): re.findall(r"sha256:(\w+)", entry) for entry in entries}


if __name__ == "__main__":
    main()
