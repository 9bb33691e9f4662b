"""The first page in data: for each run the verdict and, of its gravest findings, when, where, why and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collapse_monitor.judge.catalogue import CATALOGUE
from collapse_monitor.judge.wording import ranges
from collapse_monitor.records import Alert, Evidence, Severity
from collapse_monitor.report.reader import Run

MOST = 3
"""Findings of a run that are told in full; the others are in the list of alerts."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """One rule that fired.

    Attributes:
        alert: the gravest alert of the rule, the first one of these.
        over: the step at which it was resolved, None while it fires.
    """

    alert: Alert
    over: int | None

    @property
    def title(self) -> str:
        return self.alert.rule.replace("_", " ")

    @property
    def when(self) -> str:
        alert = self.alert
        end = "still so at the end of the log" if self.over is None else f"over at step {self.over}"
        return f"since step {alert.since}, confirmed at step {alert.step}, {end}"

    def where(self, layers: Sequence[str]) -> str:
        found = self.alert.layers
        if not found:
            return "the run as a whole"
        name = f", {layers[found[0]]}{' first' if len(found) > 1 else ''}" if found[0] < len(layers) else ""
        heads = self.alert.finding.heads if self.alert.finding else ()
        return f"{'layers' if len(found) > 1 else 'layer'} {ranges(found)}{name}{f', heads {ranges(heads)}' if heads else ''}"

    @property
    def why(self) -> str:
        phenomenon = CATALOGUE.get(self.alert.rule)
        return phenomenon.summary if phenomenon else self.alert.message

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        return self.alert.finding.evidence if self.alert.finding else ()

    @property
    def causes(self) -> tuple[str, ...]:
        return self.alert.finding.causes if self.alert.finding else ()

    @property
    def actions(self) -> tuple[str, ...]:
        phenomenon = CATALOGUE.get(self.alert.rule)
        remedies = self.alert.finding.remedies if self.alert.finding else ()
        return (*((f"First: {phenomenon.next_step}.",) if phenomenon else ()), *remedies)


@dataclass(frozen=True, slots=True)
class Story:
    """One run in brief."""

    run: Run
    chapters: tuple[Chapter, ...]

    @property
    def severity(self) -> Severity | None:
        """Of the gravest finding that is more than a note."""
        grave = [chapter.alert.severity for chapter in self.chapters if chapter.alert.severity is not Severity.INFO]
        return max(grave, key=lambda severity: severity.rank) if grave else None

    @property
    def blank(self) -> bool:
        """Whether nothing fired and nothing was read: that is not health."""
        return self.severity is None and not any(np.isfinite(self.run.series(metric)).any() for metric in self.run.metrics)

    @property
    def verdict(self) -> str:
        read = _span(self.run.steps.tolist())
        if self.blank:
            return f"No verdict: no layer could be read in {read}. A snapshot's `missing` says why."
        if self.severity is None:
            return f"Healthy: nothing was found in {read}."
        found = [chapter for chapter in self.chapters if chapter.alert.severity is not Severity.INFO]
        names = ", ".join(dict.fromkeys(f"{chapter.title}{' (over)' if chapter.over is not None else ''}" for chapter in found))
        return f"{'Critical' if self.severity is Severity.CRITICAL else 'Worth a look'}: {names}. {read.capitalize()}."


def _span(steps: Sequence[int]) -> str:
    """How much was read.

    >>> _span([0, 50]), _span([50])
    ('2 readings from step 0 to 50', '1 reading, of step 50')
    """
    if len(steps) < 2:
        return f"1 reading, of step {steps[0]}" if steps else "no readings"
    return f"{len(steps)} readings from step {steps[0]} to {steps[-1]}"


def tell(run: Run) -> Story:
    """The rules that fired in a run, the gravest and earliest first."""
    by_rule: dict[str, list[Alert]] = {}
    for alert in run.alerts:
        by_rule.setdefault(alert.rule, []).append(alert)
    chapters = []
    for alerts in by_rule.values():
        firing = [alert for alert in alerts if alert.state == "firing"]
        if firing:
            gravest = max(firing, key=lambda alert: (alert.severity.rank, -alert.step))
            chapters.append(Chapter(gravest, alerts[-1].step if alerts[-1].state == "resolved" else None))
    return Story(run, tuple(sorted(chapters, key=lambda chapter: (-chapter.alert.severity.rank, chapter.alert.since))))
