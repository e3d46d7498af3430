"""The supply chain: hashes and licences of all pins, the bill of materials of a release, pinned workflows."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from supply.bill import _digests, bill
from supply.hashes import TARGET, usable, version_of
from supply.licences import TARGET as LICENCES
from supply.licences import licence
from supply.pins import ROOT, canonical, pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DATED = {"pyarrow", "pillow", "dask", "distributed", "cryptography"}
"""Projects whose major version reflects the release schedule, not incompatible changes."""


def test_every_pin_has_hashes() -> None:
    assert pins(TARGET) == pins(), "run `make hashes` after a change of constraints.txt"
    digests = _digests()
    assert digests.keys() == pins().keys()
    assert all(found and all(re.fullmatch("[0-9a-f]{64}", one) for one in found) for found in digests.values())
    assert TARGET.read_text().count("--hash=sha256:") == sum(map(len, digests.values()))


def test_every_pin_has_a_licence() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| (\S+) \| (.+?) \|", LICENCES.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {name: (version, text) for name, version, text in rows if name != "package"}
    assert {name: version for name, (version, _) in listed.items()} == pins(), "run `make licences`"
    assert all(text.strip() for _, text in listed.values())
    assert listed["jinja2"][1] == licence("jinja2")


def test_all_that_is_needed_is_pinned_and_capped_where_it_may_break() -> None:
    listed = [text for texts in PROJECT["optional-dependencies"].values() for text in texts]
    extras = [text for text in listed if Requirement(text).name != "lazyscope"]  # extras may contain other extras
    for text in (*PROJECT["dependencies"], *extras):
        assert canonical(Requirement(text).name) in pins()
    tools = set(PROJECT["optional-dependencies"]["dev"])
    for text in {*PROJECT["dependencies"], *extras} - tools:
        requirement = Requirement(text)
        assert ("<" in str(requirement.specifier)) != (requirement.name in DATED), text
        assert requirement.specifier.contains(pins()[canonical(requirement.name)])


def test_the_set_up_checks_hashes() -> None:
    recipe = (ROOT / "Makefile").read_text()
    assert "PINS    ?= supply/hashes.txt" in recipe
    assert "--no-index --find-links $(VENV)/wheels --requirement $(PINS)" in recipe
    assert "--no-build-isolation" in recipe


def test_pip_refuses_a_file_with_another_hash(tmp_path: Path) -> None:
    """Run the installation of the set-up with a package that the test creates."""
    wheel = tmp_path / "made_here-1.0-py3-none-any.whl"
    info = "made_here-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: made-here\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for told, accepted in ((digest, True), ("0" * 64, False)):
        (tmp_path / "pins.txt").write_text(f"made-here==1.0 \\\n    --hash=sha256:{told}\n")
        command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--dry-run"]
        options = [
            "--no-deps",
            "--no-index",
            "--find-links",
            str(tmp_path),
            "--requirement",
            str(tmp_path / "pins.txt"),
        ]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        assert (done.returncode == 0) == accepted, done
        assert accepted or "DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize(
    ("file", "kept"),
    [
        ("a-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("a-1.0-cp314-cp314-manylinux_2_28_aarch64.whl", True),
        ("a-1.0-cp37-abi3-macosx_11_0_arm64.whl", True),
        ("a-1.0-py2.py3-none-any.whl", True),
        ("a-1.0.tar.gz", True),
        ("a-1.0-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("a-1.0-cp313-cp313t-win_amd64.whl", False),
        ("a-1.0-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("a-1.0-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", False),
    ],
)
def test_hashes_of_files_that_can_be_installed_are_kept(file: str, kept: bool) -> None:
    assert usable(file) == kept
    assert version_of(file) == "1.0"


def test_the_bill_of_materials_is_whole() -> None:
    made = bill()
    assert made == bill(), "the same pins give the same bill"
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", made["serialNumber"])
    listed = [component["bom-ref"] for component in made["components"]]
    assert len(listed) == len(set(listed)) == len(pins())
    own = made["metadata"]["component"]
    assert (own["name"], own["version"]) == ("lazyscope", PROJECT["version"])
    known = {*listed, own["bom-ref"]}
    graph = {node["ref"]: node["dependsOn"] for node in made["dependencies"]}
    assert graph.keys() == known
    assert all(set(needs) <= known for needs in graph.values())
    assert f"pkg:pypi/torch@{pins()['torch']}" in graph[own["bom-ref"]]
    for component in made["components"]:
        assert component["licenses"][0]["license"]["name"]
        assert component["externalReferences"][0]["hashes"]


def test_workflows_run_no_action_that_can_change() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        for used in re.findall(r"^\s*-?\s*uses:\s*(\S+)", text, re.MULTILINE):
            assert re.search(r"@[0-9a-f]{40}$", used), f"{path.name}: {used} is not pinned by a commit"
        assert "permissions:" in text
        assert "pull_request_target" not in text


def test_security_is_explained() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for heading in ("## Report a vulnerability", "## Guarantees", "## Limits of these guarantees"):
        assert heading in text
