"""`lazyscope inspect` works on five kinds of models, and refuses others with a one-line message."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.command import Command, command_in

ROOT = Path(__file__).parents[2]
FAST = ("--steps", "3", "--seconds", "0.5", "--alpha", "10", "--device", "cpu")


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `lazyscope inspect …` in the root folder, which contains `examples`."""
    return partial(command_in(ROOT, monkeypatch, capsys), "inspect")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("cnn", ("--data", "digits", "--points", "12")),
        pytest.param("vit", ("--data", "digits", "--points", "8"), marks=pytest.mark.slow),
        ("gpt", ("--points", "3")),
        ("autoencoder", ("--points", "6")),
        pytest.param("pinn", ("--points", "20"), marks=pytest.mark.slow),
    ],
)
def test_real_models_go_through(inspected: Command, name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = inspected(f"examples.models:{name}", *more, *FAST, "--out", str(path))
    assert done.code == 0, done.err
    assert f"report: {path}" in done.out
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["verdict"]["word"] in done.out
    assert 0 < found["scale"]["kappa"] < 100
    assert found["training"][1]["loss"][-1] < found["training"][1]["loss"][0]  # α = 10; at α = 1 it may grow
    assert found["provenance"]["command"].startswith("lazyscope inspect examples.models:")
    assert found["about"]["n"] == int(more[-1])


@pytest.mark.parametrize("name", ["torchvision_resnet", "timm_resnet"])
def test_models_of_libraries_go_through_or_name_the_remedy(inspected: Command, name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((2, 3, 32, 32)), y=np.arange(2))
    out = tmp_path / "report.json"
    done = inspected(f"examples.models:{name}", "--data", str(tmp_path / "data.npz"), *FAST, "--out", str(out))
    if done.code == 0:
        assert json.loads(out.read_text())["about"]["parameters"] > 10**7
    else:
        assert done.code == 2
        assert "install a version of" in done.err


def test_files_are_data_and_evaluation_mode_can_be_asked_for(inspected: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def make():\n    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)\n"
        "    return nn.Sequential(*layers).double()\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        rng = np.random.default_rng(0)
        np.savez(tmp_path / "data.npz", x=rng.standard_normal((9, 3)).astype("f4"), y=np.arange(9) % 2)
        common = ("mine:make", "--data", str(tmp_path / "data.npz"), *FAST, "--out", str(tmp_path / "a" / "r.html"))
        refused = inspected(*common)
        assert refused.code == 2
        assert "net.eval()" in refused.err
        done = inspected(*common, "--eval", "--loss", "square")
        assert done.code == 0, done.err
        assert "Square" in done.out
        assert "float64" in (tmp_path / "a" / "r.html").read_text(encoding="utf-8")
        assert "note: " in done.err
    finally:
        sys.path.remove(str(tmp_path))


def test_refusals_are_one_sentence(inspected: Command, tmp_path: Path) -> None:
    (tmp_path / "evil.npz").write_bytes(b"not a zip file")
    np.savez(tmp_path / "other.npz", inputs=np.ones(3))
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object), y=np.ones(1))
    (tmp_path / "odd.py").write_text(
        "def raises():\n    raise KeyError('oh')\ndef number():\n    return 3\nVALUE = 4\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        for arguments, words in [
            (("nonsense",), "package.module:factory"),
            (("no.such.module:f",), "cannot be loaded"),
            (("odd:nothing",), "cannot be loaded"),
            (("odd:raises",), "call it in Python"),
            (("odd:number",), "(module, x, y)"),
            (("odd:VALUE",), "not a factory"),
            (("examples.models:mlp",), "--data digits"),
            (("examples.models:mlp", "--data", "mnist"), "digits, cifar10"),
            (("examples.models:mlp", "--data", str(tmp_path / "none.npz")), "no file"),
            (("examples.models:mlp", "--data", str(tmp_path / "evil.npz")), "numpy.savez"),
            (("examples.models:mlp", "--data", str(tmp_path / "other.npz")), "numpy.savez"),
            (("examples.models:mlp", "--data", str(tmp_path / "objects.npz")), "plain arrays"),
            (("examples.models:mlp", "--data", "digits", "--seconds", "0"), "above 0"),
            (("examples.models:mlp", "--data", "digits", "--memory", "much"), 'memory="2GB"'),
            (("examples.models:mlp", "--data", "digits", "--memory", "-1"), "not an amount of memory"),
            (("examples.models:mlp", "--data", "digits", "--memory", "3MB"), "16 MiB"),
            (("examples.models:vgg", "--data", "digits", "--seconds", "1"), "check the shape"),
        ]:
            done = inspected(*arguments, "--device", "cpu", "--out", str(tmp_path / "r.html"))
            assert done.code == 2, (arguments, done)
            assert words in done.err
            assert len(done.err.strip().splitlines()) == 1
            assert "Traceback" not in done.err
        assert not (tmp_path / "r.html").exists()
    finally:
        sys.path.remove(str(tmp_path))
