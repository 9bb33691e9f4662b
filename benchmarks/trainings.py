"""Small real trainings for the verdict benchmark: digits with a ViT, bytes with a GPT, and what healthy runs go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from collapse_monitor.testing import tiny_gpt, tiny_vit

CONTEXT = 32


def decay(step: int, steps: int) -> float:
    """Warm-up, then down to a tenth in a straight line."""
    return min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)


@dataclass(frozen=True)
class Training:
    """One way to train.

    Attributes:
        name: how the tables call it.
        kind: `vit` or `gpt`.
        seed: of weights and batches.
        steps: optimiser steps.
        lr: peak learning rate.
        schedule: factor on the rate at a step of so many.
        batch: sequences in a batch.
        data: changes a batch at a step.
        dropout: probability in the MLPs.
        samples: how many different samples there are; None: all.
        autocast: bf16 autocast.
        accumulate: micro-batches per step.
        depth: blocks.
    """

    name: str
    kind: str
    seed: int
    steps: int = 300
    lr: float = 2e-3
    schedule: Callable[[int, int], float] = decay
    batch: int = 16
    data: Callable[[int, Tensor], Tensor] | None = None
    dropout: float = 0.0
    samples: int | None = None
    autocast: bool = False
    accumulate: int = 1
    depth: int = 4

    def model(self) -> Any:
        if self.kind == "vit":
            model: Any = tiny_vit(patch=2, dim=32, depth=self.depth, seed=self.seed)
        else:
            model = tiny_gpt(vocabulary=256, context=CONTEXT, dim=32, depth=self.depth, seed=self.seed)
        for block in model.blocks if self.dropout else ():
            block.mlp.append(nn.Dropout(self.dropout))
        return model

    def batches(self, *, held_out: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets, for ever; the held-out part shares no sample with the other."""
        inputs, targets = _digits() if self.kind == "vit" else _bytes()
        cut = len(inputs) * 4 // 5
        inputs, targets = (inputs[cut:], targets[cut:]) if held_out else (inputs[:cut][: self.samples], targets[:cut][: self.samples])
        generator = torch.Generator().manual_seed(1000 + self.seed)
        step = 0
        while True:
            chosen = torch.randint(0, len(inputs), (self.batch,), generator=generator)
            batch = inputs[chosen]
            yield (batch if self.data is None else self.data(step, batch)), targets[chosen]
            step += 1

    def loss(self, model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = model(inputs)
        return F.cross_entropy(logits.float().flatten(0, -2), targets[:, : inputs.shape[1]].flatten() if targets.ndim > 1 else targets)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).unflatten(1, (1, 8, 8))
    return (images - images.mean()) / images.std(), torch.as_tensor(labels)


def _bytes() -> tuple[Tensor, Tensor]:
    text = torch.tensor(list("".join(topics.topics.values()).encode()[:200_000]))
    windows = text.unfold(0, CONTEXT + 1, 16)
    return windows[:, :-1], windows[:, 1:]


def restarts(step: int, _steps: int) -> float:
    """The rate falls to a tenth and jumps back, every 100 steps."""
    return min(1.0, (step + 1) / 20) * (1 - 0.9 * (step % 100) / 100)


def shifted(step: int, batch: Tensor) -> Tensor:
    """Other data from step 200 on: negative images, or bytes in reverse order."""
    if step < 200:
        return batch
    return -batch if batch.is_floating_point() else batch.flip(1)


def short_now_and_then(step: int, batch: Tensor) -> Tensor:
    """Every seventh sequence of bytes is a third as long; images stay as they are."""
    return batch[:, : CONTEXT // 3] if step % 7 == 6 and not batch.is_floating_point() else batch


def nulls(kind: str, seed: int) -> tuple[Training, ...]:
    """Healthy runs."""
    plain = Training("warm-up and decay", kind, seed, schedule=decay)
    changes: dict[str, dict[str, Any]] = {
        "learning-rate restarts": {"schedule": restarts},
        "rate x 2, no warm-up": {"lr": 4e-3, "schedule": lambda *_: 1.0},
        "data shift": {"data": shifted, "schedule": restarts},
        "mixed lengths": {"data": short_now_and_then},
        "dropout .5": {"dropout": 0.5},
        "bf16": {"autocast": True},
        "accumulation": {"accumulate": 2, "batch": 8},
    }
    return (plain, *(replace(plain, name=name, **change) for name, change in changes.items()))
