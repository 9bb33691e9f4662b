"""Logs of two real trainings, as the sinks write them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from collapse_monitor import JSONLSink, Monitor, TensorBoardSink
from collapse_monitor.testing import MemorySink, tiny_vit

STEPS = 12


@dataclass
class Logs:
    """`tensorboard` holds the runs `healthy` and `faulty`, `json` the same as files."""

    tensorboard: Path
    json: Path
    memory: dict[str, MemorySink]

    def path(self, kind: str, name: str) -> Path:
        return self.tensorboard / name if kind == "tensorboard" else self.json / f"{name}.jsonl"


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Logs:
    folder = tmp_path_factory.mktemp("logs")
    made = Logs(folder / "tensorboard", folder / "json", {})
    for name, residual in (("healthy", True), ("faulty", False)):
        model = tiny_vit(residual=residual, depth=3)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        generator = torch.Generator().manual_seed(0)
        memory = made.memory[name] = MemorySink()
        sinks = [TensorBoardSink(made.path("tensorboard", name), heads_every=4), JSONLSink(made.path("json", name)), memory]
        with Monitor(model, every=1, budget=None, on_error="raise", sinks=sinks) as monitor:
            for step in range(STEPS):
                with monitor.observe(step):
                    F.cross_entropy(model(torch.randn(8, 1, 8, 8, generator=generator)), torch.arange(8)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return made
