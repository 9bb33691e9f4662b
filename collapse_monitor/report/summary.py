"""A snapshot in few numbers: aggregates over layers for charts, and headlines to steer a run by."""

from __future__ import annotations

import numpy as np

from collapse_monitor.judge.readings import Readings, Values
from collapse_monitor.records import Snapshot
from collapse_monitor.report.naming import NONFINITE_LAYERS, STATISTICS, has_scalars, summary_tag


def summarise(snapshot: Snapshot, readings: Readings | None = None) -> dict[str, float]:
    """Smallest, median and largest value over layers of each metric that has scalars, and the number of layers with NaN or infinity.

    Always the same keys for the same metrics; nan where no layer has a finite value.

    >>> from collapse_monitor.records import Site
    >>> sites = tuple(Site(f"block{i}", "block", i) for i in range(3))
    >>> summarise(Snapshot(0, sites, {"effective_rank": (8.0, 4.0, float("nan"))}, {}))["collapse_summary/effective_rank_median"]
    6.0
    """
    readings = readings or Readings(snapshot)
    metrics = [metric for metric in snapshot.metrics if has_scalars(metric)]
    found: dict[str, float] = {}
    if metrics and readings.blocks:
        statistics = _over_layers(np.stack([readings.layer(metric) for metric in metrics]))
        for metric, row in zip(metrics, statistics, strict=True):
            found.update(zip((summary_tag(metric, statistic) for statistic in STATISTICS), map(float, row), strict=True))
    if "nonfinite" in snapshot.metrics:
        found[NONFINITE_LAYERS] = float((readings.layer("nonfinite") > 0).sum())
    return found


def finite(values: dict[str, float]) -> dict[str, float]:
    """Those that a logger can draw.

    >>> finite({"a": 1.0, "b": float("nan")})
    {'a': 1.0}
    """
    return {name: value for name, value in values.items() if np.isfinite(value)}


HEADLINES = ("min_rank", "max_similarity", "max_logit")
"""The names that `headlines` gives values to."""


def headlines(snapshot: Snapshot) -> dict[str, float]:
    """Up to three numbers for early stopping and checkpoints: the lowest rank, the highest similarity, the largest logit.

    >>> from collapse_monitor.records import Site
    >>> headlines(Snapshot(0, (Site("block", "block", 0),), {"effective_rank": (8.0,)}, {}))
    {'min_rank': 8.0}
    """
    chosen = {"min_rank": ("effective_rank", np.min), "max_similarity": ("token_similarity", np.max), "max_logit": ("max_logit", np.max)}
    readings = Readings(snapshot)
    found = {}
    for name, (metric, extreme) in chosen.items():
        values = readings.heads(metric) if metric in snapshot.attention else readings.layer(metric)
        values = values[np.isfinite(values)]
        if values.size:
            found[name] = float(extreme(values))
    return found


def _over_layers(values: Values) -> Values:
    """`[metric, layer]` to `[metric, statistic]`, leaving out what is not finite."""
    ordered = np.sort(np.where(np.isfinite(values), values, np.nan), axis=1)  # nan sorts last
    count = np.isfinite(ordered).sum(axis=1)
    row, last = np.arange(len(values)), np.maximum(count - 1, 0)
    median = (ordered[row, last // 2] + ordered[row, (last + 1) // 2]) / 2
    return np.stack([ordered[:, 0], median, ordered[row, last]], axis=1)
