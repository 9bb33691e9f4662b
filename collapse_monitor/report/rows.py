"""Readings of runs as lines of a table, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from collapse_monitor.report.content import printable
from collapse_monitor.report.reader import Run

LONG = ("run", "step", "metric", "unit", "layer", "name", "head", "value")
WIDE = ("run", "step", "layer", "name", "head")


def write_rows(runs: Sequence[Run], file: TextIO, *, heads: bool = False, wide: bool = False) -> int:
    """Write all readings of layers, or of heads, as comma separated values; returns the number of lines below the heading.

    Long: one line per reading that is there. Wide: one line per run, step, layer and head, one column per metric.
    """
    lines = csv.writer(file, lineterminator="\n")
    count = 0
    if wide:
        metrics = list(dict.fromkeys(metric for run in runs for metric in _metrics(run, heads)))
        lines.writerow((*(WIDE if heads else WIDE[:-1]), *metrics))
        rows: Iterator[Sequence[Any]] = (row for run in runs for row in _wide(run, metrics, heads))
    else:
        lines.writerow(LONG)
        rows = (row for run in runs for row in _long(run, heads))
    for row in rows:
        lines.writerow(row)
        count += 1
    return count


def describe_run(run: Run) -> str:
    """What is in a run: steps, layers, and each metric with its unit and how it was logged."""
    metrics = [(printable(metric), run.unit(metric), "heads" if metric in run.head_metrics else "") for metric in run.metrics]
    widths = [max((len(row[index]) for row in metrics), default=0) for index in range(2)]
    return "\n".join(
        [
            printable(str(run.path)),
            f"{_count(len(run.steps), 'step')} from {run.steps[0]} to {run.steps[-1]}, {_count(len(run.layers), 'layer')}, "
            f"{_count(len(run.alerts), 'alert')}",
            *(f"  {metric:{widths[0]}}  {unit:{widths[1]}}  {kind}".rstrip() for metric, unit, kind in metrics),
        ]
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _metrics(run: Run, heads: bool) -> tuple[str, ...]:
    return run.head_metrics if heads else run.metrics


def _long(run: Run, heads: bool) -> Iterator[Sequence[Any]]:
    for metric in _metrics(run, heads):
        unit = run.unit(metric)
        for step, layer, name, head, value in _readings(run, metric, heads):
            if not math.isnan(value):
                yield run.path, step, metric, unit, layer, name, head, _shortest(value)


def _wide(run: Run, metrics: Sequence[str], heads: bool) -> Iterator[Sequence[Any]]:
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for metric in _metrics(run, heads):
        for *key, value in _readings(run, metric, heads):
            cells = found.setdefault(tuple(key), {})
            if not math.isnan(value):
                cells[metric] = _shortest(value)
    for (step, layer, name, head), cells in sorted(found.items(), key=lambda item: item[0][0]):
        if cells:
            yield run.path, step, layer, name, *((head,) if heads else ()), *(cells.get(metric, "") for metric in metrics)


def _readings(run: Run, metric: str, heads: bool) -> Iterator[tuple[int, Any, str, Any, float]]:
    """Step, layer, name, head and value; no head where readings are of layers, no layer for attention outside all blocks."""
    if not heads:
        for step, row in zip(run.steps.tolist(), run.series(metric).tolist(), strict=True):
            for block, value in enumerate(row):
                yield step, block, run.layers[block] if block < len(run.layers) else "", "", value
        return
    steps, values = run.logged_heads(metric)
    for step, sites in zip(steps.tolist(), values.tolist(), strict=True):
        for site, row in enumerate(sites):
            layer = run.site_layers[site] if site < len(run.site_layers) else None
            name = run.sites[site] if site < len(run.sites) else ""
            for head, value in enumerate(row):
                yield step, "" if layer is None else layer, name, head, value


def _shortest(value: float) -> str:
    """Seven digits, what single precision has.

    >>> _shortest(0.30000001192092896), _shortest(float("inf"))
    ('0.3', 'inf')
    """
    return f"{value:.7g}"
