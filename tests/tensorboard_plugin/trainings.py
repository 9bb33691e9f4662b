"""Real trainings with real logs: a healthy one, one that collapses on the way, and one whose names are hostile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

from collapse_monitor.monitor import Monitor
from collapse_monitor.report import TensorBoardSink
from collapse_monitor.testing import TinyViT, tiny_vit
from tests.synthetic import make_alert, make_snapshot

STEPS = 60
BREAKS_AT = 40
HOSTILE_RUN = "<img src=x onerror=window.top.hacked=1>"
HOSTILE_LAYER = "<svg onload=eval(atob('d2luZG93LnRvcC5oYWNrZWQ9Mg'))>"  # window.top.hacked=2, because modules bear no dots
BIG = "big"


def train(folder: Path, *, breaks_at: int | None = None, steps: int = STEPS, start: int = 0, model: nn.Module | None = None) -> nn.Module:
    """Random images, a few labels; from `breaks_at` on the blocks behind the first have no residual connections."""
    model = model or tiny_vit(patch=2)
    generator = torch.Generator().manual_seed(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    writer = SummaryWriter(folder)
    with Monitor(model, every=1, budget=None, sinks=[TensorBoardSink(writer, heads_every=5)]) as monitor:
        for step in range(start, start + steps):
            if step == breaks_at:
                assert isinstance(model, TinyViT)
                for block in list(model.blocks)[1:]:
                    block.residual = False
            images = torch.randn(8, 1, 8, 8, generator=generator)
            with monitor.observe(step):
                loss = F.cross_entropy(model(images), (images.mean((1, 2, 3)) > 0).long())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            writer.add_scalar("loss", loss.detach(), step)
    writer.close()
    return model


class Named(nn.Module):
    """A healthy model whose first block bears a name that is markup."""

    def __init__(self) -> None:
        super().__init__()
        inner = tiny_vit(patch=2)
        self.embed, self.norm, self.head = inner.embed, inner.norm, inner.head
        for index, block in enumerate(inner.blocks):
            self.add_module(HOSTILE_LAYER if index == 0 else f"block_{index}", block)
        self.names = [HOSTILE_LAYER, *(f"block_{index}" for index in range(1, len(inner.blocks)))]

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.embed(images).flatten(2).transpose(1, 2)
        for name in self.names:
            hidden = self.get_submodule(name)(hidden)
        return self.head(self.norm(hidden[:, 0]))


def write_big(folder: Path, steps: int, layers: int = 48, spike: tuple[int, int] | None = None) -> None:
    """A made-up log of one metric and one aggregate."""
    metrics = [name for name in make_snapshot().metrics if name != "token_similarity"]
    random = np.random.default_rng(0).normal(0.3, 0.01, (steps, layers))
    writer = SummaryWriter(folder, max_queue=1000)
    sink = TensorBoardSink(writer)
    for step in range(steps):
        if spike is not None and step == spike[0]:
            random[step, spike[1]] = 0.99
        alerts = [make_alert(step=step)] if step % (steps // 50) == steps // 100 else []
        sink.write(make_snapshot(step, layers, similarity=random[step], without=metrics), alerts)
    sink.close()
    writer.close()
