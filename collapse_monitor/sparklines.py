"""A row of readings as a curve one line high, in plain characters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

LEVELS = "▁▂▃▄▅▆▇█"

_DECADES_FOR_LOGARITHM = 3.0
"""Where values of one sign span more than this, equal heights are equal factors."""


def sparklines(rows: Sequence[Sequence[float]]) -> list[str]:
    """One curve per row, all on one scale, so that equal heights are equal values. nan is a blank, infinities are the ends of the scale.

    Values that never change are drawn at the lowest level. What spans more than three powers of ten, all above zero, is drawn on a
    logarithmic scale.

    >>> sparklines([[0.0, 0.5, 1.0], [1.0, float("nan"), 0.25]])
    ['▁▅█', '█ ▃']
    """
    known = [value for row in rows for value in row if math.isfinite(value)]
    if known and min(known) > 0 and math.log10(max(known) / min(known)) > _DECADES_FOR_LOGARITHM:
        rows = [[math.log10(value) if value > 0 else value for value in row] for row in rows]
        known = [math.log10(value) for value in known]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return ["".join(_levels(row, low, high)) for row in rows]


def _levels(row: Sequence[float], low: float, high: float) -> Iterable[str]:
    top = len(LEVELS) - 1
    for value in row:
        if math.isnan(value):
            yield " "
        elif math.isinf(value):
            yield LEVELS[top] if value > 0 else LEVELS[0]
        else:
            yield LEVELS[round(top * (value - low) / (high - low)) if high > low else 0]
