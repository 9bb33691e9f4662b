"""What a threshold is: two bounds, the reason for them and its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scale = Literal["linear", "log", "log1p", "gap"]
Level = Literal["fire", "hold"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """One bound of one rule."""

    name: str
    fire: float
    hold: float
    reason: str
    source: str
