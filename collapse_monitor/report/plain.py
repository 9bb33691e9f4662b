"""The story of a run as plain text: in full, or a line in a table of runs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import numpy as np

from collapse_monitor.judge.wording import number
from collapse_monitor.records import Evidence, Severity
from collapse_monitor.report.content import printable
from collapse_monitor.report.html.story import Chapter, Story

WIDTH = 100
"""Characters in a line."""


def tell_plainly(story: Story) -> str:
    """Verdict, then of each finding when, where, why and what to do."""
    lines = [printable(str(story.run.path)), *textwrap.wrap(printable(story.verdict), WIDTH)]
    for index, chapter in enumerate(story.chapters, start=1):
        lines += ["", f"{index}. {printable(chapter.title)} ({chapter.alert.severity})", *_told(chapter, story.run.layers)]
    return "\n".join(lines)


def summary_table(stories: Sequence[Story]) -> list[str]:
    """One aligned line per run under a heading."""
    heading = ("verdict", "worst layer", "first alert", "last step", "run")
    rows = [heading, *map(_summary, stories)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _told(chapter: Chapter, layers: Sequence[str]) -> Iterable[str]:
    yield from _paragraph("when", chapter.when)
    yield from _paragraph("where", chapter.where(layers))
    yield from _paragraph("why", chapter.why)
    for index, evidence in enumerate(chapter.evidence):
        yield from _paragraph("" if index else "read", f"- {_read(evidence)}")
    for index, cause in enumerate(chapter.causes):
        yield from _paragraph("" if index else "causes", f"- {cause}")
    for index, action in enumerate(chapter.actions):
        yield from _paragraph("" if index else "do", f"- {action}")


def _paragraph(word: str, text: str) -> list[str]:
    indent = " " * 10
    further = indent + ("  " if text.startswith("- ") else "")
    return textwrap.wrap(printable(" ".join(text.split())), WIDTH, initial_indent=f"   {word:7}", subsequent_indent=further)


def _read(evidence: Evidence) -> str:
    against = [
        f"{name} {number(value)}" for name, value in (("baseline", evidence.baseline), ("bound", evidence.bound)) if value is not None
    ]
    beside = f" ({', '.join(against)})" if against else ""
    return f"{evidence.metric} {number(evidence.value)}{beside}"


def _summary(story: Story) -> tuple[str, str, str, str, str]:
    run = story.run
    alerts = [alert for alert in run.alerts if alert.state == "firing" and alert.severity is not Severity.INFO]
    first = min(alerts, key=lambda alert: alert.step, default=None)
    return (
        "no data" if story.blank else "healthy" if story.severity is None else str(story.severity),
        _worst_layer(story),
        "-" if first is None else printable(f"{first.step} {first.rule}"),
        str(run.steps[-1]) if len(run.steps) else "-",
        printable(str(run.path)),
    )


def _worst_layer(story: Story) -> str:
    """The first layer of the gravest finding; of a healthy run the layer whose tokens are most alike at the end."""
    layers = story.run.layers
    named = next((chapter.alert.layers for chapter in story.chapters if chapter.alert.layers), ())
    if not named and "token_similarity" in story.run.metrics and len(story.run.steps):
        last = story.run.series("token_similarity")[-1]
        named = (int(np.nanargmax(last)),) if np.isfinite(last).any() else ()
    if not named:
        return "-"
    return printable(f"{named[0]} {layers[named[0]]}") if named[0] < len(layers) else str(named[0])
