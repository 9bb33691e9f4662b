"""The demonstration: a small Vision Transformer learns scikit-learn's digits, then the same model without residual connections.

    collapse-monitor demo

Needs the extra `demo`. Both runs are watched by `CollapseCallback`; in the second every token becomes the same, which the loss
alone would only show as "does not learn".
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from collapse_monitor.integrations.lightning import CollapseCallback
from collapse_monitor.monitor import Monitor
from collapse_monitor.testing import tiny_vit

try:
    from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
    from pytorch_lightning.loggers import TensorBoardLogger
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise ImportError(f"the demonstration needs {error.name}, which is not installed: pip install 'collapse-monitor[demo]'") from error

RUNS = {"healthy": True, "no residual connections": False}
HELD_OUT = 297


class Digits(LightningModule):
    """A six-block Vision Transformer over 16 patches of 2 x 2 pixels, with or without its residual connections."""

    def __init__(self, *, residual: bool) -> None:
        super().__init__()
        self.vit = tiny_vit(patch=2, dim=64, depth=6, residual=residual)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.vit(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        images, labels = batch
        self.log("val_accuracy", (self.vit(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ProgressBar(Callback):
    """One bar per run, in the progress display given."""

    def __init__(self, progress: Progress, title: str) -> None:
        self.progress, self.title = progress, title

    def on_train_start(self, trainer: Trainer, _: LightningModule) -> None:
        self.task = self.progress.add_task(self.title, total=trainer.estimated_stepping_batches, accuracy="")

    def on_train_batch_end(self, *_: Any) -> None:
        self.progress.advance(self.task)

    def on_validation_end(self, trainer: Trainer, _: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.progress.update(self.task, accuracy=f"accuracy {trainer.callback_metrics['val_accuracy']:.0%}")


def digits() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The 1797 handwritten digits that ship with scikit-learn, standardised: for training and held out."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).unflatten(1, (1, 8, 8))
    images, labels = (images - images.mean()) / images.std(), torch.as_tensor(labels)
    train, held_out = (TensorDataset(images[part], labels[part]) for part in (slice(HELD_OUT, None), slice(HELD_OUT)))
    return DataLoader(train, batch_size=60, shuffle=True), DataLoader(held_out, batch_size=HELD_OUT)


def train(title: str, *, residual: bool, epochs: int, logdir: Path, progress: Progress) -> Monitor:
    """One run; returns the monitor, which remembers what it saw."""
    seed_everything(0, verbose=False)
    # Steps of a few milliseconds cannot pay for a reading out of 1 % of their time, so a demonstration goes without a budget.
    callback = CollapseCallback(every=5, budget=None)
    trainer = Trainer(
        max_epochs=epochs,
        callbacks=[callback, ProgressBar(progress, title)],
        logger=TensorBoardLogger(logdir, name=title.replace(" ", "_"), version=""),
        accelerator="cpu",
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Digits(residual=residual), *digits())
    assert callback.monitor is not None, "it was made when the run began"
    return callback.monitor


def tensorboard_command(logdir: Path) -> str:
    """The line to type next: `tensorboard` by its name if that finds the one installed beside this Python, else by its path."""
    beside = Path(sys.executable).parent / "tensorboard"
    found = shutil.which("tensorboard")
    name = os.path.relpath(beside) if beside.exists() and (found is None or Path(found) != beside) else "tensorboard"
    return shlex.join([name, "--logdir", str(logdir)])


def show(epochs: int = 12, logdir: Path = Path("logs/demo")) -> int:
    """Both runs, then their tables, their alerts, and what to type next."""
    torch.set_num_threads(1)  # matrices this small: more threads only wait for each other
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")  # Lightning's own use of torch
    warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
    print("Two small Vision Transformers learn handwritten digits. The second has the same weights and no residual connections.\n")
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[accuracy]}"),
    )
    with Progress(*columns) as progress:
        monitors = {
            title: train(title, residual=residual, epochs=epochs, logdir=logdir, progress=progress) for title, residual in RUNS.items()
        }

    for title, monitor in monitors.items():
        assert monitor.latest is not None, "a run of several steps is sampled at least once"
        print(f"\n{title}, step {monitor.latest.step}\n{monitor.latest.table(alerts=monitor.findings)}")
        print(
            "Alerts:" if monitor.alerts else "Alerts: none",
            *(f"  step {alert.step}: {alert.message}" for alert in monitor.alerts),
            sep="\n",
        )
    print(f"\nSee both runs over time:\n  {tensorboard_command(logdir)}")
    return 0
