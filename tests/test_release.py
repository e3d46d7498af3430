"""The release: a wheel and a source archive that can be uploaded, and that work with only their declared requirements.

Downloading an environment with torch takes minutes. Instead, each test creates an environment outside the checkout,
installs the wheel with pip, and links exactly those installed packages that the metadata of the wheel requires.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
EXTRAS = ("inspect", "data", "lab", "scattering", "cluster", "explore", "all")
pytestmark = [pytest.mark.xdist_group("release"), pytest.mark.timeout(900)]

CORE = """
import sys, torch, lazyscope as ls
net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
x, y = torch.randn(6, 3), torch.randn(6, 1)
assert ls.tangent_kernel(net, x).shape == (6, 6, 1, 1)
assert torch.equal(ls.Scaled(net, alpha=10.0, centred=True)(x), torch.zeros(6, 1))
assert ls.gradient_flow(net, ls.loss.Square(), x, y, times=[0.0, 1.0]).loss.shape == (2,)
report = ls.inspect(net, x, y, seconds=1)
assert report.to_dict()["verdict"]
heavy = {"matplotlib", "jinja2", "pyarrow", "sklearn", "uvicorn", "typer"} & {*sys.modules}
assert not heavy, heavy
"""

PROGRAMS = {
    "": CORE
    + """
from lazyscope.data.digits import digits
from lazyscope.errors import MissingExtraError
for extra, use in {"inspect": lambda: report.save("report.html"), "data": digits,
                   "cluster": lambda: ls.tangent_kernel_to_zarr(net, x, "K.zarr")}.items():
    try:
        use()
    except MissingExtraError as error:
        assert f"pip install 'lazyscope[{extra}]'" in str(error) and len(str(error).splitlines()) == 1, error
    else:
        raise AssertionError(extra)
""",
    "inspect": CORE + "assert '<svg' in report.save('report.html').read_text() or 'data:image' in report.to_html()\n",
    "data": "from lazyscope.data.digits import digits\nassert len(digits()[0]) == 1797\nimport pyarrow.parquet, PIL\n",
    "lab": "import lazyscope.experiments as e\nassert len(e.experiments()) >= 22\nimport ot\n",
    "scattering": "from lazyscope.model.scattering import Scattering\nassert Scattering((8, 8))\n",
    "cluster": CORE + "ls.tangent_kernel_to_zarr(net, x, 'K.zarr')\nimport distributed, cryptography\n",
    "explore": "import lazyscope.app.shelf, lazyscope.app.serve, uvicorn\n",
    "all": CORE + "report.save('report.html')\n",
}


def run(*command: object, cwd: Path, code: int = 0) -> str:
    """Run a command, check its exit code, and return its output."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the source archive."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=source)
    return folder / "dist"


def wheel(built: Path) -> Path:
    """The wheel."""
    (found,) = built.glob("*.whl")
    return found


def needed(requirements: list[str], extras: frozenset[str], found: dict[str, Distribution]) -> None:
    """Add the installed distributions of some requirements, and of their requirements."""
    for text in requirements:
        requirement = Requirement(text)
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in (extras or {""})
        )
        key = f"{requirement.name.lower()}[{','.join(sorted(requirement.extras))}]"
        if applies and key not in found:
            found[key] = distribution(requirement.name)
            needed(found[key].requires or [], frozenset(requirement.extras), found)


def environment(folder: Path, built: Path, extra: str) -> Path:
    """Create an environment with the wheel and its declared requirements, and return its `bin` folder."""
    venv.create(folder / "env", with_pip=False)
    python = folder / "env/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"]
    run(*pip, wheel(built), cwd=folder)
    (site,) = (folder / "env/lib").glob("python*/site-packages")
    metadata = Distribution.at(next(site.glob("lazyscope-*.dist-info")))
    found: dict[str, Distribution] = {}
    wanted = metadata.requires or []
    extras = {extra}
    while True:  # extras that contain others: lazyscope[lab] requires lazyscope[inspect,data]
        inner = {
            each
            for text in wanted
            if (own := Requirement(text)).name == "lazyscope"
            and any(own.marker is None or own.marker.evaluate({"extra": name}) for name in extras)
            for each in own.extras
        }
        if inner <= extras:
            break
        extras |= inner
    needed([text for text in wanted if Requirement(text).name != "lazyscope"], frozenset(extras), found)
    for each in found.values():
        for top in {file.parts[0] for file in each.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            origin = Path(str(each.locate_file(top)))
            if origin.exists() and not (site / top).exists():
                (site / top).symlink_to(origin)
    return folder / "env/bin"


def test_the_files_can_be_uploaded(built: Path) -> None:
    assert len(list(built.iterdir())) == 2
    assert run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built).count("PASSED") == 2


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_an_environment_with_what_is_declared(extra: str, built: Path, tmp_path: Path) -> None:
    folder = environment(tmp_path, built, extra)
    run(folder / "python", "-c", PROGRAMS[extra], cwd=tmp_path)
    if extra == "":
        version = run(folder / "lazyscope", "--version", cwd=tmp_path)
        assert re.fullmatch(r"lazyscope \d+\.\d+\.\d+\n", version)
        said = run(folder / "lazyscope", "list", cwd=tmp_path, code=2)
        assert said.count("\n") == 1
        assert "pip install 'lazyscope[inspect]'" in said
    if extra == "inspect":
        assert "relative-scale" in run(folder / "lazyscope", "list", cwd=tmp_path)
