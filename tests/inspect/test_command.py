"""`lazyscope inspect` works on five kinds of models, and refuses others with a one-line message."""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.command import Command, command_in
from torch import Tensor, nn

from lazyscope.errors import InputError, ModelError
from lazyscope.inspect.door import bring

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


class Plain(nn.Module):
    """A tiny image classifier with batch normalisation, which accepts images of any size."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(3, 2, 3, stride=2), nn.BatchNorm2d(2), nn.Linear(2, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.first(x)).relu().mean((2, 3)))
        return out


class Patches(nn.Module):
    """A tiny image classifier that accepts images of 48 × 48 pixels only, as vision transformers do."""

    default_cfg: ClassVar[dict[str, Any]] = {"input_size": (3, 48, 48)}

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 1, 16, 16), nn.Linear(9, classes)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == 48, "Input height doesn't match model (48)."
        out: Tensor = self.head(self.patches(x).flatten(1).tanh())
        return out


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for timm and torchvision, which are not installed here, with the functions of their documentation."""
    kinds = {"resnet18": Plain, "vit": Patches}

    def create_model(model_name: str, pretrained: bool = False, *, num_classes: int) -> nn.Module:
        if model_name not in kinds:
            raise RuntimeError(f"Unknown model ({model_name})")
        return kinds[model_name](num_classes)

    def get_model(name: str, *, weights: None, num_classes: int) -> nn.Module:
        return create_model(name, num_classes=num_classes)

    timm, torchvision, models = (ModuleType(name) for name in ("timm", "torchvision", "torchvision.models"))
    vars(timm)["create_model"], vars(models)["get_model"] = create_model, get_model
    for module in (timm, torchvision, models):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("libraries")
def test_models_of_libraries_are_adapted_to_the_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((9, 3, 32, 32)).astype("f4"), y=np.arange(9) % 4)
    cpu = torch.device("cpu")
    for address in ("timm:resnet18", "torchvision:resnet18"):
        found = bring(address, str(tmp_path / "data.npz"), cpu, evaluation=False, seed=0)
        assert isinstance(found.net, Plain)
        assert not found.net.training
        assert found.x.shape == (9, 3, 32, 32)
        assert found.net.head.out_features == 4
        with torch.no_grad():
            inside = found.net.first(found.x)
        mean = found.net.norm.running_mean
        assert mean is not None
        assert torch.allclose(mean, inside.mean((0, 2, 3)), atol=1e-6)
        assert "batch-norm" in found.notes[0]
    found = bring("timm:vit", str(tmp_path / "data.npz"), cpu, evaluation=False, seed=0)
    assert found.x.shape == (9, 3, 48, 48)
    assert "32 × 32 pixels, so they are enlarged to 48 × 48" in found.notes[0]
    grey = bring("timm:resnet18", "digits", cpu, evaluation=False, seed=0)
    assert grey.x.shape[1:] == (3, 8, 8)
    for address, words in (("timm:resnet19", "cannot create 'resnet19'"), ("timm:vit", "classifies images")):
        np.savez(tmp_path / "rows.npz", x=np.ones((3, 2)), y=np.arange(3))
        data = "digits" if "19" in address else str(tmp_path / "rows.npz")
        with pytest.raises((ModelError, InputError), match=words):
            bring(address, data, cpu, evaluation=False, seed=0)


@pytest.mark.usefixtures("libraries")
def test_a_name_is_inspected_and_its_notes_are_in_the_report(inspected: Command, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = inspected("timm:resnet18", "--data", "digits", "--points", "8", *FAST, "--out", str(out))
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    assert found["about"]["outputs"] == 10
    assert any("batch-norm" in note for note in found["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_model_of_the_library_itself_is_inspected(inspected: Command, package: str, tmp_path: Path) -> None:
    """Where the library is installed, in a version for this torch."""
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # the latter for a version for another torch
        pytest.skip(f"{package} cannot be imported: {error}")
    out = tmp_path / "report.json"
    done = inspected(f"{package}:resnet18", "--data", "digits", "--points", "4", *FAST, "--out", str(out))
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    assert found["about"]["parameters"] == 11_181_642  # 11 689 512 with 1000 classes
    assert any("20 batch-norm" in note for note in found["notes"])


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_missing_libraries_are_named_with_the_remedy(
    inspected: Command, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    done = inspected(f"{package}:resnet18", "--data", "digits")
    assert done.code == 2
    assert f"run: pip install {package}" in done.err
    assert len(done.err.strip().splitlines()) == 1
    without = inspected(f"{package}:resnet18")
    assert "--data cifar10" in without.err


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
