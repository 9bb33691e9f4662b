"""What the callback says of a model before it has learnt anything, through a real Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from collapse_monitor.testing import PureAttention
from tests.integrations.lit import WORDS, loader, module, trainer, watch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


class Readout(nn.Module):
    """Attention layers without residual connections between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(WORDS, 16), PureAttention(16, depth=4, heads=2), nn.Linear(16, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(ids)))


def test_theory_and_diagnosis_of_a_healthy_model(capsys: pytest.CaptureFixture[str]) -> None:
    callback, sink = watch(preflight=True)
    trainer([callback]).fit(module(), loader())
    printed = capsys.readouterr().out
    assert printed.count("Preflight: the model as it is before training.") == 1
    first = sink.snapshots[0]
    similarity, ratio = first.series("token_similarity"), first.series("qk_to_v_gradient")
    assert f"mean cosine {similarity[0]:.3g} behind the first block, {similarity[-1]:.3g} behind the last" in printed
    assert f"Gradients of queries over those of values: {ratio[0]:.3g} in the first block, {ratio[-1]:.3g} in the last" in printed
    assert "No layer starts out collapsed." in printed


def test_a_model_that_starts_out_collapsed_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    callback, _ = watch(preflight=True)
    lit = module()
    lit.net = Readout()
    trainer([callback]).fit(lit, loader())
    printed = capsys.readouterr().out
    assert "Collapsed from the start: layers 1, 2, 3. Training cannot be expected to undo it." in printed
    assert "falls doubly exponentially with depth" in printed
    assert "rank_collapse (critical) in layers 1, 2, 3: All tokens of a sequence have become nearly the same" in printed


def test_a_resumed_run_is_not_described_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback, _ = watch(preflight=True)
    run = trainer([callback], max_epochs=1)
    run.fit(module(), loader())
    run.save_checkpoint(tmp_path / "last.ckpt")
    capsys.readouterr()
    again, sink = watch(preflight=True)
    trainer([again], max_epochs=2).fit(module(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert sink.snapshots
    assert "Preflight" not in capsys.readouterr().out
