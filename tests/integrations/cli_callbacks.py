"""What a configuration file names by import path."""

from __future__ import annotations

from typing import Any

from collapse_monitor.records import Condition, Snapshot


def sampled(step: int) -> bool:
    return step % 3 == 1


def never(snapshot: Snapshot, history: Any) -> list[Condition]:
    return []
