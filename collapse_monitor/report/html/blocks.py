"""Readings as the report carries them: worst of each column, 12 bits where there are many, compressed, as text."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from collapse_monitor.report.columns import Columns, bin_worst, pack, pack_columns
from collapse_monitor.report.dense import describe
from collapse_monitor.report.naming import FORMAT_VERSION
from collapse_monitor.report.reader import Run

COLUMNS = 1500
HEAD_COLUMNS = 300
EXACT = 300_000
"""Values of a report up to which they are kept in single precision."""

LEVELS = 4092
MISSING, PLUS, MINUS = 4095, 4094, 4093


@dataclass(frozen=True, eq=False)
class Block:
    """The readings of one metric of one run, per layer or per head."""

    run: str
    kind: Literal["series", "heads"]
    metric: str
    columns: Columns
    about: Mapping[str, Any]

    def key(self, runs: Sequence[str]) -> str:
        return f"{self.kind}/{runs.index(self.run)}/{self.metric}"


def gather(runs: Mapping[str, Run]) -> list[Block]:
    """All blocks with at least one reading."""
    return [block for name, run in runs.items() for block in (*_layers(name, run), *_heads(name, run))]


def describe_runs(runs: Mapping[str, Run], blocks: Sequence[Block]) -> dict[str, Any]:
    """What the view needs to know beforehand: runs, layers, metrics, alerts."""
    heads = {(block.run, block.metric) for block in blocks if block.kind == "heads"}
    described = []
    for name, run in runs.items():
        own = [block.metric for block in blocks if block.run == name and block.kind == "series"]
        metrics = {metric: {**_plain(about_metric(run, metric)), "layers": True, "heads": (name, metric) in heads} for metric in own}
        alerts = [alert.to_dict() for alert in run.alerts]
        described.append({"name": name, "layers": list(run.layers), "metrics": metrics, "alerts": alerts})
    return {"version": FORMAT_VERSION, "limit": None, "runs": described}


def encode(blocks: Sequence[Block], runs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Key and text of every block."""
    exact = sum(block.columns.values.size for block in blocks) <= EXACT
    for block in blocks:
        data = pack_columns(block.columns, **block.about) if exact else quantise(block.columns, **block.about)
        yield block.key(runs), base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()


def quantise(columns: Columns, **about: Any) -> bytes:
    """12 bits between the smallest and the largest finite value, logarithmic where they span orders of magnitude.

    Differences from column to column are stored, low and high bytes apart, because that compresses to half. The error is at most 1/8184
    of the range.
    """
    values = columns.values.astype(np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    logarithmic = low > 0 and high / low > 50
    if logarithmic:
        values, low, high = np.log(np.where(values > 0, values, np.nan)), float(np.log(low)), float(np.log(high))
    with np.errstate(invalid="ignore"):
        scaled = np.round((values - low) / ((high - low) or 1.0) * LEVELS)
    codes = np.where(np.isfinite(scaled), np.clip(np.nan_to_num(scaled), 0, LEVELS), MISSING).astype(np.int64)
    codes[np.isposinf(columns.values)], codes[np.isneginf(columns.values)] = PLUS, MINUS
    change = np.diff(codes, axis=0, prepend=np.zeros((1, codes.shape[1]), dtype=np.int64)) & 4095
    planes = np.concatenate([(change & 255).ravel(), (change >> 8).ravel()]).astype(np.uint8)
    shape = {"columns": codes.shape[0], "rows": codes.shape[1], "kept": columns.kept}
    header = {**about, **shape, "encoding": "q12", "low": low, "high": high, "logarithmic": bool(logarithmic)}
    return pack(header, columns.first, columns.last, planes)


def about_metric(run: Run, metric: str) -> Mapping[str, Any]:
    """Unit, range and the end that means collapse: from the log, or what is known of built-in metrics."""
    known = run.about.get(metric, {})
    return known if "collapse" in known else describe(metric)


def _layers(name: str, run: Run) -> Iterator[Block]:
    for metric in run.metrics:
        values = run.series(metric)
        known = ~np.isnan(values).all(axis=1)
        if known.any():
            columns = bin_worst(run.steps[known], values[known], about_metric(run, metric).get("collapse"), COLUMNS)
            yield Block(name, "series", metric, columns, {"metric": metric})


def _heads(name: str, run: Run) -> Iterator[Block]:
    for metric in run.head_metrics:
        steps, values = run.logged_heads(metric)
        used = [(site, head) for site, head in np.ndindex(*values.shape[1:]) if not np.isnan(values[:, site, head]).all()]
        if used:
            flat = np.stack([values[:, site, head] for site, head in used], axis=1)
            names = [f"{run.sites[site] if site < len(run.sites) else f'site {site}'} head {head}" for site, head in used]
            about = {"metric": metric, "labels": names, "layers": [_owner(run, site) for site, _ in used]}
            yield Block(name, "heads", metric, bin_worst(steps, flat, about_metric(run, metric).get("collapse"), HEAD_COLUMNS), about)


def _plain(about: Mapping[str, Any]) -> dict[str, Any]:
    return {key: about.get(key) for key in ("meaning", "unit", "range", "collapse")}


def _owner(run: Run, site: int) -> int:
    """The layer of an attention site; -1 outside all blocks."""
    layer = run.site_layers[site] if site < len(run.site_layers) else None
    return -1 if layer is None else layer
