"""What a rule is: any callable from a snapshot and the history to the conditions it sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from collapse_monitor.judge.history import History
from collapse_monitor.judge.thresholds import FOR_CHECKS
from collapse_monitor.records import Condition, Snapshot

Rule: TypeAlias = Callable[[Snapshot, History], list[Condition]]
"""`rule(snapshot, history)` lists the layers that are not healthy; a layer without a condition is. The engine owns pending and firing.

Its name is `rule.name`, else `rule.__name__`; `rule.for_checks` says how many checks in a row confirm it (2 by default)."""

_R = TypeVar("_R", bound=Rule)


def confirmed_after(checks: int) -> Callable[[_R], _R]:
    """Decorate a rule whose condition fires after `checks` checks in a row instead of two.

    >>> @confirmed_after(1)
    ... def at_once(snapshot, history):
    ...     return []
    >>> checks_of(at_once)
    1
    """
    if checks < 1:
        raise ValueError(f"confirmed_after({checks}): a condition is seen in at least 1 check before it fires")

    def mark(rule: _R) -> _R:
        rule.for_checks = checks  # type: ignore[attr-defined]
        return rule

    return mark


def told_while_firing(rule: _R) -> _R:
    """Decorate a rule that tells of lost readings only where it fires: other rules tell when a block is not read at all."""
    rule.tells_loss = False  # type: ignore[attr-defined]
    return rule


def tells_loss(rule: Rule) -> bool:
    """Whether the rule tells of lost readings where it does not fire."""
    return bool(getattr(rule, "tells_loss", True))


def name_of(rule: Rule) -> str:
    """The name alerts carry: the rule's `name`, else its function name, else that of its class."""
    return str(getattr(rule, "name", None) or getattr(rule, "__name__", None) or type(rule).__name__)


def checks_of(rule: Rule) -> int:
    """How many checks in a row confirm the rule's condition."""
    return int(getattr(rule, "for_checks", FOR_CHECKS))
