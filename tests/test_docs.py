"""Every Python block of the README and the docs runs as printed, page by page, on a small model."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from benchmarks.claims import FIGURES
from collapse_monitor.judge.catalogue import CATALOGUE
from collapse_monitor.metrics import DEFAULT_METRICS
from collapse_monitor.testing import tiny_vit

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass
class Batch:
    x: Tensor
    y: Tensor


class Classifier(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_vit()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _surroundings(folder: Path) -> dict[str, Any]:
    """What the reader of a page has already: a model, data, a trainer."""
    generator = torch.Generator().manual_seed(0)
    batches = [Batch(torch.randn(4, 1, 8, 8, generator=generator), torch.arange(4)) for _ in range(3)]
    model = tiny_vit()
    trainer = partial(
        pytorch_lightning.Trainer,
        accelerator="cpu",
        logger=TensorBoardLogger(folder / "lightning"),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    return {
        "Trainer": trainer,
        "module": Classifier(),
        "data": DataLoader(
            TensorDataset(torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches])), batch_size=4
        ),
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": batches,
        "batch": batches[0],
        "folder": folder,
        "writer": SummaryWriter(folder / "tensorboard"),
    }


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = _surroundings(tmp_path)
    for block in BLOCK.finditer(page.read_text()):
        line = page.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * line + textwrap.dedent(block[1]), str(page), "exec"), names)
    names["writer"].close()


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_every_phenomenon_has_its_section_word_for_word() -> None:
    page = (ROOT / "docs" / "phenomena.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))  # "By symptom" is no name
    assert list(sections) == list(CATALOGUE)
    for name, phenomenon in CATALOGUE.items():
        said = sections[name].lower()
        for sentence in (phenomenon.summary, phenomenon.next_step, *phenomenon.causes, *phenomenon.remedies):
            assert sentence.lower() in said
        assert all(f"(metrics.md#{reading})" in sections[name] for reading in phenomenon.readings)


def test_anchors_lead_to_sections() -> None:
    anchors = {page.name: set(re.findall(r"^#+ (\w+)$", page.read_text(), re.MULTILINE)) for page in PAGES}
    links = [(page.name, file or page.name, name) for page in PAGES for file, name in re.findall(r"\]\(([\w.]*)#(\w+)\)", page.read_text())]
    assert len(links) > 100
    assert [link for link in links if link[2] not in anchors[link[1]]] == []


def test_claims_are_what_the_benchmark_measures() -> None:
    told = dict(re.findall(r"^\| ([^|]+?) \| (-?[\d.]+) \|$", (ROOT / "docs" / "claims.md").read_text(), re.MULTILINE))
    assert set(told) == set(FIGURES)
    for name, figure in FIGURES.items():
        assert figure() == pytest.approx(float(told[name]), rel=0.02, abs=0.006), name


def test_every_default_metric_has_its_section() -> None:
    headings = set(re.findall(r"^#+ (\w+)$", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    assert {metric.name for metric in DEFAULT_METRICS} <= headings
