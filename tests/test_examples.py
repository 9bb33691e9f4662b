"""The examples run as a reader would run them, warnings as errors, and leave behind what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Two warnings of Lightning's own; the same as in pyproject.toml.
QUIET = [
    *("-W", "error"),
    *("-W", "ignore:`isinstance(treespec, LeafSpec)` is deprecated"),
    *("-W", "ignore:The 'train_dataloader' does not have many workers"),
    *("-W", "ignore:The 'val_dataloader' does not have many workers"),
]


def _run(script: str, *options: object) -> str:
    command = [sys.executable, *QUIET, script, *map(str, options)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=170, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["on", "off"])
def test_vit_lightning(residual: str, tmp_path: Path) -> None:
    said = _run("examples/vit_lightning.py", "--short", "--residual", residual, "--logdir", tmp_path)
    assert all(f"blocks.{layer}" in said for layer in range(6))
    assert said.endswith(f"tensorboard --logdir {tmp_path}\n")
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.slow
def test_gpt_loop(tmp_path: Path) -> None:
    said = _run("examples/gpt_loop.py", "--short", "--logdir", tmp_path)
    assert all(f"blocks.{layer}" in said for layer in range(6))
    assert f"2 snapshots in {tmp_path / 'collapse.jsonl'}" in said
    assert list(tmp_path.glob("events.out.tfevents.*"))


@pytest.mark.slow
def test_overhead_benchmark(tmp_path: Path) -> None:
    said = _run("benchmarks/overhead.py", "--short")
    assert all(row in said for row in ("ViT", "GPT", "every=1 ", "every=10", "every=50", "naive", "weights requested"))


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    said = _run("-m", "collapse_monitor.cli", "demo", "--epochs", 4, "--logdir", tmp_path)
    healthy, faulty = said.split("no residual connections")[-2:]
    assert "Alerts: none" in healthy
    assert "collapse" in faulty
    assert said.rstrip().endswith(f"--logdir {tmp_path}")
