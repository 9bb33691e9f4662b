"""A small Vision Transformer on handwritten digits, trained with Lightning and watched by `CollapseCallback`.

    python examples/vit_lightning.py                   # a healthy model
    python examples/vit_lightning.py --residual off    # the same model, nothing added back: its tokens become equal
    tensorboard --logdir logs/vit                      # both, side by side

Only two lines concern the monitor: the import and the callback. The rest is an ordinary training script.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from einops import rearrange
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from collapse_monitor import CollapseCallback


class Block(nn.Module):
    """Pre-norm attention and MLP. `residual=False` is the fault: each branch replaces the stream instead of joining it."""

    def __init__(self, dim: int, heads: int, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        branch, _ = self.attention(normed, normed, normed, need_weights=False)
        x = x + branch if self.residual else branch
        branch = self.mlp(self.norm2(x))
        return x + branch if self.residual else branch


class DigitViT(LightningModule):
    """8 x 8 images as 16 patches of 2 x 2 pixels and a class token, 10 classes."""

    def __init__(self, *, dim: int = 64, depth: int = 6, heads: int = 4, residual: bool = True, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.embed = nn.Linear(4, dim)
        self.class_token = nn.Parameter(0.5 * torch.randn(dim))
        self.position = nn.Parameter(0.5 * torch.randn(16, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, residual) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = rearrange(images, "batch (row p1) (column p2) -> batch (row column) (p1 p2)", p1=2, p2=2)
        x = torch.cat([self.class_token.expand(len(images), 1, -1), self.embed(patches) + self.position], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        images, labels = batch
        self.log("val_accuracy", (self(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def digits() -> tuple[DataLoader, DataLoader]:
    """The 1797 digits that ship with scikit-learn, standardised; the last 300 are for validation."""
    pixels, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = rearrange(pixels.float(), "image (row column) -> image row column", row=8)
    images = (images - images.mean()) / images.std()
    train, validation = TensorDataset(images[:-300], labels[:-300]), TensorDataset(images[-300:], labels[-300:])
    return DataLoader(train, batch_size=64, shuffle=True, drop_last=True), DataLoader(validation, batch_size=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--residual", choices=["on", "off"], default="on", help="off removes the residual connections")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--every", type=int, default=5, help="sample each so many steps")
    parser.add_argument("--logdir", type=Path, default=Path("logs/vit"))
    parser.add_argument("--short", action="store_true", help="two epochs: enough to see that it runs")
    options = parser.parse_args()

    seed_everything(0, verbose=False)
    train, validation = digits()
    # Steps of a few milliseconds cannot pay for a reading out of 1 % of their time: this toy switches the budget off.
    watch = CollapseCallback(every=options.every, budget=None)
    trainer = Trainer(
        max_epochs=2 if options.short else options.epochs,
        callbacks=[watch],
        logger=TensorBoardLogger(options.logdir, name=f"residual_{options.residual}"),
        accelerator="cpu",
        log_every_n_steps=5,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(DigitViT(residual=options.residual == "on"), train, validation)

    print(watch.monitor.latest.table())
    for alert in watch.monitor.alerts:
        print(f"step {alert.step}: {alert.message}")
    print(f"tensorboard --logdir {options.logdir}")


if __name__ == "__main__":
    main()
