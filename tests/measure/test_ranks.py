"""Readings averaged over processes."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collapse_monitor.measure.ranks import average_over_ranks, read_scalars
from collapse_monitor.records import Site, Snapshot

SITES = (Site("attention", "attention", 0, 3), Site("block", "block", 0), Site("other", "attention", None, None))


def reading(rank: int) -> Snapshot:
    """The second process has heard less."""
    heads = ((1.0 + rank, 2.0, math.nan), (4.0 + rank, 5.0)) if rank == 0 else ((1.0 + rank, math.nan, math.nan), (6.0, 5.0))
    return Snapshot(3, SITES, {"effective_rank": (2.0 + 2 * rank,)}, {"max_logit": heads}, {}, (4,), (8.0,))


def test_alone_nothing_changes() -> None:
    snapshot = reading(0)
    assert average_over_ranks(snapshot) is snapshot


def test_read_scalars() -> None:
    given = {
        "loss": torch.tensor([0.5], requires_grad=True),
        "step": 3,
        "many": torch.ones(2),
        "text": "no",
        "half": torch.tensor(2.0).bfloat16(),
    }
    assert read_scalars(given) == pytest.approx({"loss": 0.5, "step": 3.0, "many": math.nan, "text": math.nan, "half": 2.0}, nan_ok=True)


def _process(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    snapshot = average_over_ranks(reading(rank))
    assert snapshot.blocks == {"effective_rank": (3.0,)}
    first, second = snapshot.attention["max_logit"]
    assert first[:2] == (1.5, 2.0)
    assert math.isnan(first[2])
    # The site's own record says nothing of its heads, so their number is not known to be the same everywhere: the first is averaged.
    assert second == (5.0, 5.0)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_process, args=(str(tmp_path / "store"),), nprocs=2)
