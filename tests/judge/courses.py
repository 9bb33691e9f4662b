"""Runs made of phases, played through the default rules."""

from __future__ import annotations

from typing import Any

from collapse_monitor.judge import DEFAULT_RULES, Judge
from collapse_monitor.records import Alert
from tests.synthetic import make_snapshot

EVERY = 25


def phase(checks: int, **readings: Any) -> list[dict[str, Any]]:
    return [readings] * checks


def verdict(*phases: list[dict[str, Any]], every: int = EVERY, judge: Judge | None = None, start: int = 0) -> list[Alert]:
    """All events of a run; a check every `every` steps."""
    judge = judge or Judge(DEFAULT_RULES)
    readings = [reading for phase in phases for reading in phase]
    events = [event for check, reading in enumerate(readings) for event in judge.check(make_snapshot(start + check * every, **reading))]
    assert judge.faults == []
    return events


def names(events: list[Alert]) -> list[tuple[str, str, str, tuple[int, ...]]]:
    return [(event.rule, event.state, event.severity.value, event.layers) for event in events]


HEALTHY = phase(20)
"""Long enough for every baseline: 20 checks, 500 steps."""
