"""A snapshot as a table, one row per block: plain text for terminals, HTML for notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from collapse_monitor.records import Snapshot
from collapse_monitor.sparklines import sparklines

COLUMNS = (
    "effective_rank",
    "token_similarity",
    "relative_residual",
    "attention_uniformity",
    "max_logit",
    "branch_ratio",
    "gradient_norm",
    "qk_to_v_gradient",
)
"""What to look at first, in reading order. Metrics that the snapshot does not have get no column."""

_LONGEST_NAME = 32


TREND = 8
"""Checks in a curve, the last one at its right end."""


def text_table(snapshot: Snapshot, history: Sequence[Snapshot] = ()) -> str:
    """Aligned columns, then what was sampled and what is missing. With snapshots from before, each number has its course beside it.

    >>> from collapse_monitor.records import Site
    >>> sites = (Site("blocks.0", "block", 0), Site("blocks.1", "block", 1))
    >>> print(text_table(Snapshot(7, sites, {"token_similarity": (0.25, 0.9996)}, {}, attainable_rank=(64, 64), tokens=(64.0, 64.0))))
    step 7
                     token
      block     similarity
    0 blocks.0      0.2500
    1 blocks.1      0.9996
    64 tokens of each sequence were measured: a rank read from 64 tokens cannot exceed 64.
    """
    if not snapshot.block_sites:
        return "\n".join([title(snapshot), "no blocks", *footer(snapshot)])
    heading, rows = aligned_cells(snapshot, history)
    return "\n".join([title(snapshot), *map(_line, [*heading, *rows]), *footer(snapshot)])


def aligned_cells(snapshot: Snapshot, history: Sequence[Snapshot] = ()) -> tuple[list[list[str]], list[list[str]]]:
    """The lines of the heading and one row per block, as cells of equal width in each column: number, name, then the metrics."""
    names = columns(snapshot)
    heading = [[""], ["block"], *(name.rsplit("_", 1) for name in names)]
    trends = [_trend(snapshot, history, name) for name in names]
    cells = [
        [f"{value} {curve}" if curve else value for value, curve in zip(_column(snapshot, name), trend, strict=True)]
        for name, trend in zip(names, trends, strict=True)
    ]
    rows = [[str(index), _short(site.name), *(column[index] for column in cells)] for index, site in enumerate(snapshot.block_sites)]
    # A heading stands over the numbers, not over their courses.
    width = [max((len(curve) + 1 for curve in trend if curve), default=0) for trend in trends]
    heading = [*heading[:2], *([f"{word}{' ' * beside}" for word in words] for words, beside in zip(heading[2:], width, strict=True))]
    return _aligned(heading, rows)


def html_table(snapshot: Snapshot) -> str:
    """The same as HTML. Names of modules and metrics are escaped."""
    heading = "".join(f"<th>{_escaped(' '.join(name.split('_')))}</th>" for name in ("", "block", *columns(snapshot)))
    rows = "".join(f"<tr>{''.join(f'<td>{_escaped(cell.strip())}</td>' for cell in row)}</tr>" for row in aligned_cells(snapshot)[1])
    below = "".join(f"<div>{_escaped(line)}</div>" for line in footer(snapshot))
    caption = f"<caption>{_escaped(title(snapshot))}</caption>"
    return f"<div><table>{caption}<thead><tr>{heading}</tr></thead><tbody>{rows}</tbody></table>{below}</div>"


def compare_text(left: Snapshot, right: Snapshot, titles: tuple[str, str] = ("left", "right")) -> str:
    """Two runs of one model beside each other: per metric the column of the left one, then that of the right one."""
    names = [name for name in COLUMNS if name in left.metrics and name in right.metrics]
    if len(left.block_sites) != len(right.block_sites):
        return f"{titles[0]}\n{text_table(left)}\n\n{titles[1]}\n{text_table(right)}"
    heading = [[""], ["block"], *([*name.rsplit("_", 1), title] for name in names for title in titles)]
    pairs = [(_column(left, name), _column(right, name)) for name in names]
    rows = [
        [str(index), _short(site.name), *(side[index] for pair in pairs for side in pair)] for index, site in enumerate(left.block_sites)
    ]
    lines, body = _aligned(heading, rows)
    return "\n".join([f"{titles[0]}: {title(left)}, {titles[1]}: {title(right)}", *map(_line, [*lines, *body])])


def title(snapshot: Snapshot) -> str:
    """The step, and the numbers that the user has logged beside it."""
    context = "".join(f", {name} {_number(value)}" for name, value in snapshot.context.items())
    return f"step {snapshot.step}{' (separate forward)' if snapshot.source == 'probe' else ''}{context}"


def columns(snapshot: Snapshot) -> list[str]:
    """Those of `COLUMNS` that the snapshot has."""
    return [name for name in COLUMNS if name in snapshot.metrics]


def _trend(snapshot: Snapshot, history: Sequence[Snapshot], metric: str) -> list[str]:
    """One curve per block; nothing where nothing came before. Snapshots of another model, or without the metric, are left out."""
    blocks = len(snapshot.block_sites)
    before = [known for known in history if metric in known.metrics and len(known.block_sites) == blocks and known.step < snapshot.step]
    if not before:
        return [""] * blocks
    recent = [known.series(metric) for known in [*before[-TREND + 1 :], snapshot]]
    return [curve.rjust(TREND) for curve in sparklines(list(zip(*recent, strict=True)))]


def _column(snapshot: Snapshot, metric: str) -> list[str]:
    values = snapshot.series(metric)
    if metric == "effective_rank" and len(snapshot.attainable_rank) == len(values):
        return [
            f"{value:.1f}/{most}" if math.isfinite(value) else _number(value)
            for value, most in zip(values, snapshot.attainable_rank, strict=True)
        ]
    return [_number(value) for value in values]


def _aligned(heading: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Text to the left, numbers to the right; headings of several lines."""
    height = max(map(len, heading))
    # A short heading stands on the last line, next to the numbers.
    lines = [list(line) for line in zip(*([""] * (height - len(column)) + list(column) for column in heading), strict=True)]
    widths = [max(len(row[index]) for row in [*lines, *rows]) for index in range(len(heading))]

    def padded(row: Sequence[str]) -> list[str]:
        numbers = (cell.rjust(width + 1) for cell, width in zip(row[2:], widths[2:], strict=True))
        return [row[0].rjust(widths[0]), row[1].ljust(widths[1]), *numbers]

    return [padded(line) for line in lines], [padded(row) for row in rows]


def _line(cells: Sequence[str]) -> str:
    return " ".join(cells).rstrip()


def footer(snapshot: Snapshot) -> list[str]:
    """What was sampled, remarks, and what is missing."""
    return [*_sampling(snapshot), *snapshot.notes, *_missing(snapshot)]


def _sampling(snapshot: Snapshot) -> list[str]:
    known = [count for count in snapshot.tokens if math.isfinite(count)]
    if not known:
        return []
    fewest, most = (f"{count:.4g}" for count in (min(known), max(known)))
    span = fewest if fewest == most else f"{fewest} to {most}"
    return [f"{span} tokens of each sequence were measured: a rank read from {most} tokens cannot exceed {most}."]


def _missing(snapshot: Snapshot) -> list[str]:
    """One line per reason, with the first names it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in snapshot.missing.items():
        by_reason.setdefault(reason, []).append(name)
    return [
        f"not measured: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''} ({reason})"
        for reason, names in by_reason.items()
    ]


def _number(value: float) -> str:
    """Four digits that keep their places in a column; small and large values in powers of ten.

    >>> [_number(value) for value in (0.5, 12.345, 0.00012, 123456.0, 0.99997, float("nan"))]
    ['0.5000', '12.35', '1.2e-04', '1.2e+05', '0.99997', '-']
    """
    if math.isnan(value):
        return "-"
    size = abs(value)
    if math.isinf(value) or size == 0:
        return f"{value:g}"
    if size < 1e-3 or size >= 1e5:
        return f"{value:.1e}"
    if 0.9995 <= size < 1:
        return f"{value:.7g}"
    return f"{value:.4f}" if size < 1 else f"{value:.{max(0, 3 - int(math.log10(size)))}f}"


def _short(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    half = (_LONGEST_NAME - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)
