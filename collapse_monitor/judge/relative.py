"""What rules about one reading per layer share: from masks to conditions, and what is known of layers that could not be read."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from collapse_monitor.judge.baseline import Baseline
from collapse_monitor.judge.history import History
from collapse_monitor.judge.readings import Mask, Values
from collapse_monitor.judge.threshold import Level
from collapse_monitor.judge.thresholds import TRANSIENT_CHECKS
from collapse_monitor.records import Condition, Severity, Snapshot


def conditions(
    metric: str,
    values: Values,
    near: Mask,
    found: Callable[[Level], Mask],
    limit: Callable[[Level], float],
    normal: Callable[[int], float | None],
    severity: Severity = Severity.WARNING,
    message: str = "",
) -> list[Condition]:
    """One condition for each layer that is beyond the firing or the clearing bound, and `no_data` for those without a reading.

    Args:
        metric: the reading named.
        values: `[layer]`, of that metric.
        near: `[layer]`, a cheap bound that holds wherever `found` does; without any such layer `found` is not asked.
        found: level -> which layers are beyond its bounds.
        limit: level -> the bound named.
        normal: layer -> its baseline, None while there is none.
        severity: of the conditions.
        message: in place of the summary of the phenomenon.
    """
    unread = np.isnan(values)
    if unread.all():
        return list(_no_data_at_all(len(values), metric, limit("fire")))
    listed = [_no_data(int(layer), metric, limit("fire")) for layer in unread.nonzero()[0]]
    if not near.any():
        return listed
    fire, hold = found("fire"), found("hold")
    for layer in (fire | hold).nonzero()[0]:
        index = int(layer)
        level: Level = "fire" if fire[index] else "hold"
        listed.append(Condition(index, metric, float(values[index]), limit(level), normal(index), level, severity, message=message))
    return listed


def always(
    rule: str,
    metric: str,
    values: Values,
    so: Mask,
    found: Callable[[Level], Mask],
    limit: Callable[[Level], float],
    snapshot: Snapshot,
    history: History,
    fewest_steps: int = 0,
) -> list[Condition]:
    """Notes on layers that have been `so` long enough to be told, and that `found` does not speak of: there it was so from the start.

    Args:
        rule: its name, under which the checks are counted.
        metric: the reading named.
        values: `[layer]`, of that metric.
        so: `[layer]`, what is noted when it lasts.
        found: level -> which layers are beyond the bounds beside their own past.
        limit: level -> the bound named.
        snapshot: of this check.
        history: what counts.
        fewest_steps: that it must last, beside the checks.
    """
    checks, steps = history.lasting(rule, so, snapshot.step)
    if not so.any():
        return []
    lasting = (checks >= TRANSIENT_CHECKS) & (steps >= fewest_steps)
    if not lasting.any():
        return []
    noted = lasting & ~found("hold")
    usual = history.baseline(metric)
    return [
        Condition(int(layer), metric, float(values[layer]), limit("fire"), usual.at(int(layer)), severity=Severity.INFO)
        for layer in noted.nonzero()[0]
    ]


@lru_cache(4096)
def _no_data_at_all(layers: int, metric: str, limit: float) -> tuple[Condition, ...]:
    return tuple(_no_data(layer, metric, limit) for layer in range(layers))


@lru_cache(4096)
def _no_data(layer: int, metric: str, limit: float) -> Condition:
    return Condition(layer, metric, np.nan, limit, state="no_data")


def own(baseline: Baseline) -> Callable[[int], float | None]:
    """A baseline as a function of the layer."""
    return lambda layer: baseline.at(layer)
