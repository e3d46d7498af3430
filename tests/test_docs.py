"""The README and the site: their Python code runs, their links are valid, the site builds."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
import zlib
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from playwright.sync_api import Page
from tests.app.visitor import CHROMIUM, chromium, complaints_of, serious

import lazyscope
from lazyscope import data, diagnose, flow, lab, linalg, problem, solve, tangent, theory
from lazyscope.model import particles
from lazyscope.theory import margin

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

VIEWS: list[tuple[int, Literal["light", "dark"]]] = [(1280, "light"), (390, "dark")]

ROOMS = [
    *(lazyscope, sys.modules["lazyscope.inspect"], sys.modules["lazyscope.certify"], theory, margin, particles),
    *(problem, solve, diagnose, lab, flow, tangent, linalg, data),
]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):  # all code of a page shares one namespace
        exec(compile(block, str(page), "exec"), names)


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)|src=\"([^\"]+)\"", (ROOT / "README.md").read_text(encoding="utf-8"))
    local = [link for pair in links for link in pair if link and "://" not in link]
    assert [link for link in local if not (ROOT / link).exists()] == []


@pytest.fixture(scope="module")  # the tests that use the site form one group, so that it is built once
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, which runs every tutorial and fails if one of them fails."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    told = {**os.environ, "PYTHONWARNINGS": "error::UserWarning:__main__", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=told)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_site_builds_without_a_warning_and_has_every_tutorial(site: Path) -> None:
    assert (site / "index.html").exists()
    for tutorial in (ROOT / "tutorials").glob("*.py"):
        page = site / "tutorials" / tutorial.stem / "index.html"
        assert "run when the site was built" in page.read_text(encoding="utf-8"), tutorial.name


def test_notebooks_have_the_cells_of_the_scripts() -> None:
    """The site runs the scripts cell by cell, so the notebooks run too."""
    from docs.tutorials import TUTORIALS, cells, notebook

    for path in TUTORIALS.glob("*.py"):
        made = json.loads(json.dumps(notebook(path)))
        assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
        first, *rest = made["cells"]
        assert first["source"][0].startswith("%pip install")
        assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
        for cell, (_, kind, source) in zip(rest, cells(path.read_text(encoding="utf-8")), strict=True):
            assert cell["cell_type"] == kind
            if kind == "code":
                assert "".join(cell["source"]) == source.strip()
            else:
                assert not any(line.startswith("# %%") for line in cell["source"])


CODE = ".md-content pre > code"


def overflows(page: Page, address: str) -> bool:
    """Whether a page scrolls sideways or, on a laptop, code that was written for it runs past its column."""
    page.goto(address)
    wide = page.evaluate("innerWidth")
    if page.evaluate("document.documentElement.scrollWidth") > wide:
        return True
    cut = f"[...document.querySelectorAll('{CODE}')].some((code) => code.scrollWidth > code.clientWidth + 1)"
    return wide >= 1280 and "/api/" not in address and bool(page.evaluate(cut))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed: apt install chromium")
@pytest.mark.xdist_group("site")
def test_the_site_is_accessible_and_asks_no_other_host(site: Path) -> None:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}/"
        pages = [
            f"{path.parent.relative_to(site)}/" for path in sorted(site.rglob("index.html")) if "play" not in str(path)
        ]
        for width, scheme in VIEWS:
            page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
            complaints = complaints_of(page)
            for place in ("", "concepts/", "figures/", "api/models/"):
                page.goto(here + place)
                assert serious(page) == [], place
                assert page.evaluate("document.documentElement.scrollWidth") <= width, place
            assert [place for place in pages if overflows(page, here + place)] == [], width
            page.close()
            assert [said for said in complaints if not said.startswith(here)] == []
        server.shutdown()


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_the_first_steps_come_down_at_every_scale(site: Path) -> None:
    page = (site / "tutorials" / "1_first_steps" / "index.html").read_text(encoding="utf-8")
    losses = [float(number) for number in re.findall(r"α = +\S+: loss (\S+),", page)]
    assert len(losses) == 4
    assert max(losses) < 0.05


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_every_public_name_is_documented(site: Path) -> None:
    """Every public name is in the inventory of the API, under its public path or the path of its definition."""
    lines = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split()[0] for line in zlib.decompress(lines).decode().splitlines()}

    def documented(room: ModuleType, name: str) -> bool:
        thing = getattr(room, name)
        if isinstance(thing, ModuleType):
            return any(entry.startswith(f"{thing.__name__}.") for entry in known)
        home = getattr(thing, "__module__", "")  # a type alias has no module, so any path in its package counts
        room_of = re.compile(rf"{re.escape(room.__name__)}\.(\w+\.)*{name}")
        return f"{home}.{name}" in known or any(room_of.fullmatch(entry) for entry in known)

    public = [(room, name) for room in ROOMS for name in room.__all__ if name != "__version__"]
    assert [f"{room.__name__}.{name}" for room, name in public if not documented(room, name)] == []
