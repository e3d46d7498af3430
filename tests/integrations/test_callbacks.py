"""Callbacks for trainers: they give the records of a plain loop, count steps of the optimiser, and survive a resume."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lazyscope.diagnose import Monitor, Record

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
STEPS, EVERY, SUM = 6, 2, 2  # two batches are accumulated for each step


@pytest.fixture(autouse=True)
def outside_of_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the Trainer, which takes a process that has imported marimo for a notebook, and then needs IPython."""
    monkeypatch.delitem(sys.modules, "marimo", raising=False)
    assert transformers.Trainer


class Net(nn.Module):
    """A module that returns a loss and logits, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        found = {"logits": logits}
        return found if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **found}


@pytest.fixture(autouse=True)
def tolerant() -> Iterator[None]:
    with warnings.catch_warnings():  # those of the trainers are not ours
        warnings.simplefilter("ignore")
        yield


def options() -> dict[str, Any]:
    return {"loss": nn.functional.cross_entropy, "every": EVERY}


def plain() -> list[Record]:
    net = Net()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    monitor = Monitor(net, {"x": X}, Y, output="logits", optimiser=optimiser, **options())
    for _ in range(STEPS):
        optimiser.zero_grad()
        for part in range(SUM):
            rows = slice(8 * part, 8 * part + 8)
            (net(X[rows], Y[rows])["loss"] / SUM).backward()
        optimiser.step()
        monitor()
    return monitor.records


def trainer(folder: Path, callback: Any, steps: int = STEPS) -> Any:
    net = Net()
    settings = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, gradient_accumulation_steps=SUM,
        save_steps=3, logging_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, max_grad_norm=0.0,
        lr_scheduler_type="constant", train_sampling_strategy="sequential",
    )  # fmt: skip
    rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    return transformers.Trainer(net, settings, train_dataset=rows, optimizers=(optimiser, None), callbacks=[callback])


def close(found: list[Record], known: list[Record]) -> None:
    assert [record.step for record in found] == [record.step for record in known]
    for one, two in zip(found, known, strict=True):
        assert one.numbers() == pytest.approx(two.numbers(), rel=1e-4, abs=1e-6, nan_ok=True)
        assert one.layers.keys() == two.layers.keys()


def test_the_trainer_gives_the_records_of_a_plain_loop_and_resumes(tmp_path: Path) -> None:
    from lazyscope.integrations.huggingface import MonitorCallback

    known = plain()
    callback = MonitorCallback({"x": X}, Y, report=tmp_path / "run.html", **options())
    trainer(tmp_path, callback).train()
    assert callback.monitor is not None
    close(callback.monitor.records, known)
    assert (tmp_path / "run.html").exists()
    again = MonitorCallback({"x": X}, Y, **options())
    trainer(tmp_path, again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.monitor is not None
    close(again.monitor.records, known)
    assert again.monitor.run == callback.monitor.run


def test_lightning_gives_the_records_of_a_plain_loop_and_resumes(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lazyscope.integrations.lightning import MonitorCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.net(*batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def watched(start: Path | None = None) -> Any:
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
        callback = MonitorCallback({"x": X}, Y, net="net", output="logits", **options())
        saving = lightning.callbacks.ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1, save_on_train_epoch_end=False
        )
        fit = lightning.Trainer(
            max_steps=STEPS, accumulate_grad_batches=SUM, callbacks=[callback, saving], accelerator="cpu", logger=False,
            enable_progress_bar=False, default_root_dir=tmp_path, enable_model_summary=False,
        )  # fmt: skip
        fit.fit(Module(), data, ckpt_path=start)
        assert callback.monitor is not None
        return callback.monitor

    known, whole = plain(), watched()
    close(whole.records, known)
    again = watched(tmp_path / "step=3.ckpt")
    close(again.records, known)
    assert again.run == whole.run


def test_without_lightning_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins
    import importlib
    import sys

    from lazyscope.errors import MissingExtraError

    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("lightning", "pytorch_lightning")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "lazyscope.integrations.lightning", raising=False)
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtraError, match="pip install lightning"):
        importlib.import_module("lazyscope.integrations.lightning")
