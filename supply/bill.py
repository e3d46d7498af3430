"""Write the software bill of materials of a release, in CycloneDX 1.6 JSON, from the installed packages.

`make bill` runs this script in the environment that `make setup` created, and writes the file to `dist`.
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
    """Format the package URL that identifies a package in a bill of materials.

    Args:
        name: The name of the package.
        version: The version of the package.

    Returns:
        The URL `pkg:pypi/name@version`.
    """
    return f"pkg:pypi/{canonical(name)}@{version.replace('+', '%2B')}"


def bill() -> dict[str, Any]:
    """Create the bill of materials: lazyscope, all pinned packages with licences and hashes, and their dependencies.

    Returns:
        A CycloneDX document. Equal pinned versions give equal documents.
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
    """Write the bill of materials."""
    target = ROOT / "dist" / f"lazyscope-{distribution('lazyscope').version}.cdx.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(bill(), indent=1) + "\n", encoding="utf-8")
    print(target)


def _digests(path: Path = HASHES) -> dict[str, list[str]]:
    """Read the hashes of every package from `hashes.txt`."""
    entries = [entry for entry in re.split(r"\n(?=\S)", path.read_text(encoding="utf-8")) if "==" in entry]
    return {canonical(entry.partition("==")[0]): re.findall(r"sha256:(\w+)", entry) for entry in entries}


if __name__ == "__main__":
    main()
