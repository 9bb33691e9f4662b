"""What a Lightning Trainer says of itself, in the monitor's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAIN_LOSS = ("train_loss", "train/loss", "loss")
VAL_LOSS = ("val_loss", "val/loss", "valid_loss", "valid/loss", "validation_loss", "loss/val", "val_loss/dataloader_idx_0")
"""Names under which losses are usually logged; the first one found is taken."""


def logged_step(trainer: Any) -> int:
    """The x value of what `self.log` writes: batches after which an optimiser stepped, however many optimisers there are."""
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))


def scaler_of(trainer: Any) -> Any:
    """The GradScaler of mixed precision, if there is one."""
    return getattr(trainer.precision_plugin, "scaler", None)


def normalisation(trainer: Any, pl_module: Any) -> float:
    """What Lightning multiplies the user's loss with when it accumulates gradients."""
    return 1.0 / trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1.0


def loss_scale(trainer: Any, pl_module: Any) -> float:
    """What the user's loss is multiplied with before backward. Waits for the device where a GradScaler is in use."""
    scaler = scaler_of(trainer)
    return float(scaler.get_scale() if scaler is not None else 1.0) * normalisation(trainer, pl_module)


def loss_in(metrics: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first of these names that was logged; None for none."""
    return next((metrics[name] for name in names if name in metrics), None)


def postponed(trainer: Any) -> str:
    """Why a stop will not take effect yet; nothing if it will."""
    if trainer.global_step < (trainer.min_steps or 0) or trainer.current_epoch + 1 < (trainer.min_epochs or 0):
        return f"; Lightning goes on until min_steps={trainer.min_steps} and min_epochs={trainer.min_epochs} are reached"
    return ""
