"""Many steps in few columns: what is drawn, by the tab and by the report. The worst reading of a column stands for it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = 4096
"""More than a screen has pixels."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Readings by column. A column stands for all steps from `first` to `last`.

    Attributes:
        first: `[column]`, the first step of each.
        last: `[column]`, the last step of each.
        values: `[column, row]`, the worst reading in the column; nan where there is none.
        kept: how many steps there were before they were put into columns.
    """

    first: NDArray[np.float64]
    last: NDArray[np.float64]
    values: NDArray[np.float32]
    kept: int


def bin_worst(steps: NDArray[Any], values: NDArray[Any], collapse: str | None, columns: int = COLUMNS) -> Columns:
    """`[step, row]` in at most `columns` columns of nearly equal numbers of steps, by the worst value of each row.

    The worst is the one nearest to collapse. Where neither end means collapse (or both do) it is the one farthest from the row's median.
    An infinite value is worse than any other; nan is left out.

    >>> bin_worst(np.arange(4), np.array([[1.0], [9.0], [2.0], [3.0]]), "high", 2).values.tolist()
    [[9.0], [3.0]]
    """
    with np.errstate(over="ignore"):  # beyond single precision is infinite
        steps, values = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float32)
    count = len(steps)
    if count <= columns:
        return Columns(steps, steps, values, count)
    starts = np.arange(columns) * count // columns
    first, last = steps[starts], steps[np.append(starts[1:], count) - 1]
    return Columns(first, last, _worst(values, starts, collapse), count)


def fold_extremes(columns: Columns, found: Sequence[tuple[int, NDArray[Any]]], collapse: str | None) -> Columns:
    """Columns of a log that was thinned out, with the extremes of its windows put back.

    `found` holds pairs of a step and the `[4, row]` that `Envelope.take` gave for it. Each extreme goes into the column that stands for
    its step, which is the one before; that column then reaches up to it.
    """
    if not found or not len(columns.first):
        return columns
    values, last = columns.values.copy(), columns.last.copy()
    middle = _median(values)
    rows = np.arange(values.shape[1])
    for step, window in found:
        low, high, low_ago, high_ago = np.asarray(window, dtype=np.float64)
        if low.shape != rows.shape:
            continue  # of another model
        if collapse is None:
            low_is_worse = np.abs(low - middle) >= np.abs(high - middle)
        else:
            low_is_worse = np.full(rows.shape, collapse == "low")
        worst, ago = np.where(low_is_worse, low, high), np.where(low_is_worse, low_ago, high_ago)
        at = np.clip(np.searchsorted(columns.first, step - ago, side="right") - 1, 0, len(columns.first) - 1)
        there = values[at, rows]
        badness = _badness(worst, middle, collapse) > _badness(there, middle, collapse)
        worse = ~np.isnan(worst) & (np.isnan(there) | badness)
        values[at[worse], rows[worse]] = worst[worse]
        np.maximum.at(last, at[worse], (step - ago)[worse])
    return Columns(columns.first, last, values, columns.kept)


def drop_overtaken(steps: Sequence[int]) -> list[int]:
    """Indices that remain of steps in the order written: where a run was resumed, what came after that step before is overtaken.

    >>> drop_overtaken([0, 10, 20, 30, 20, 30])
    [0, 1, 4, 5]
    """
    kept: list[int] = []
    for index, step in enumerate(steps):
        while kept and steps[kept[-1]] >= step:
            kept.pop()
        kept.append(index)
    return kept


def pack(header: Mapping[str, Any], *blocks: NDArray[Any]) -> bytes:
    """Length of the header, the header as JSON, then the arrays, each from a multiple of eight bytes on."""
    text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)
    parts = [struct.pack("<I", len(text)), text]
    for block in blocks:
        data = np.ascontiguousarray(block).tobytes()
        parts.append(data + b"\0" * (-len(data) % 8))
    return b"".join(parts)


def pack_columns(columns: Columns, **about: Any) -> bytes:
    """Columns as the view reads them: the steps in double, the values in single precision."""
    shape = {"columns": columns.values.shape[0], "rows": columns.values.shape[1], "kept": columns.kept}
    return pack({**about, **shape, "encoding": "f32"}, columns.first, columns.last, columns.values)


def _worst(values: NDArray[np.float32], starts: NDArray[Any], collapse: str | None) -> NDArray[np.float32]:
    if collapse == "high":
        worst: NDArray[np.float32] = np.fmax.reduceat(values, starts, axis=0)
    elif collapse == "low":
        worst = np.fmin.reduceat(values, starts, axis=0)
    else:
        middle = _median(values)
        low, high = np.fmin.reduceat(values, starts, axis=0), np.fmax.reduceat(values, starts, axis=0)
        worst = np.where(_badness(low, middle, None) > _badness(high, middle, None), low, high)
    for sign in (np.inf, -np.inf):
        worst = np.where(np.maximum.reduceat(values == sign, starts, axis=0), np.float32(sign), worst)
    return worst


def _badness(values: NDArray[Any], middle: NDArray[Any], collapse: str | None) -> NDArray[Any]:
    if collapse is None:
        return np.abs(values - middle)
    return values if collapse == "high" else -values


def _median(values: NDArray[Any]) -> NDArray[Any]:
    """Per row over the finite values; 0 without any."""
    ordered = np.sort(np.where(np.isfinite(values), values, np.nan), axis=0)
    count = np.isfinite(ordered).sum(axis=0)
    if not len(ordered):
        return np.zeros(values.shape[1])
    middle = ordered[np.maximum(count - 1, 0) // 2, np.arange(values.shape[1])]
    return np.where(count > 0, middle, 0)
