"""The life of one rule on one layer: inactive, pending, firing, and back. Counted in checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from collapse_monitor.judge.baseline import from_json, to_json
from collapse_monitor.judge.thresholds import CLEAR_CHECKS, NO_DATA_CHECKS
from collapse_monitor.records import Condition, Severity

Layer = int | None


@dataclass(slots=True)
class Episode:
    """One rule on one layer, from the first check that sees the condition to the last one that waits for it to come back.

    Attributes:
        since: step at which the condition was first seen.
        run: per severity, checks in a row with a condition at least that severe.
        severity: the confirmed one; None while pending. It never falls within an episode, so that one that flickers is one event.
        clear: checks in a row without the condition, while firing.
        unread: checks in a row without a reading.
        last: the condition as last seen.
    """

    since: int
    last: Condition
    run: list[int] = field(default_factory=lambda: [0] * len(Severity))
    severity: Severity | None = None
    clear: int = 0
    unread: int = 0

    @property
    def firing(self) -> bool:
        return self.severity is not None

    def advance(self, condition: Condition | None, for_checks: int) -> bool:
        """Take in what this check says; False when the episode is over."""
        if condition is not None and condition.state == "no_data":
            # Neither confirmed nor cleared. What is pending does not wait for ever.
            self.unread += 1
            return self.firing or self.unread < NO_DATA_CHECKS
        self.unread = 0
        seen = condition is not None and condition.state == "fire"
        for severity in Severity:
            self.run[severity.rank] = (
                self.run[severity.rank] + 1 if seen and condition is not None and condition.severity.rank >= severity.rank else 0
            )
            if self.run[severity.rank] >= for_checks and (self.severity is None or severity.rank > self.severity.rank):
                self.severity = severity
        if condition is None:
            self.clear += 1
            return self.firing and self.clear < CLEAR_CHECKS
        self.clear = 0
        if not seen:
            # Between the two thresholds: keeps what fires, confirms nothing.
            return self.firing
        self.last = condition
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "since": self.since,
            "run": list(self.run),
            "severity": None if self.severity is None else self.severity.value,
            "clear": self.clear,
            "unread": self.unread,
            "last": _condition_state(self.last),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Episode:
        return cls(
            since=state["since"],
            last=_condition_from(state["last"]),
            run=list(state["run"]),
            severity=None if state["severity"] is None else Severity(state["severity"]),
            clear=state["clear"],
            unread=state["unread"],
        )


@dataclass(frozen=True, slots=True)
class Unread:
    """A layer without a reading: since which step, for how many checks."""

    since: int
    last: Condition
    checks: int


_NOTHING = Condition(None, "", math.nan, math.nan)


@dataclass(slots=True)
class RuleState:
    """All episodes of one rule, and what has been said about it so far.

    Attributes:
        episodes: layer -> episode; healthy layers have none.
        announced: severity of the alert that is out, None if none is.
        layers: the layers the alert named.
        since: step the alert named.
        said_at: check of the last alert or reminder.
        ended: the condition of the first layer the alert named, as last seen.
        unread: layers without a reading at the last check.
        never: layers that have not had a reading since the first check: nothing was lost there.
        checks: checks so far.
        lost: whether the loss of data has been told.
    """

    episodes: dict[Layer, Episode] = field(default_factory=dict)
    announced: Severity | None = None
    layers: tuple[int, ...] = ()
    since: int = 0
    said_at: int = 0
    ended: Condition = _NOTHING
    unread: dict[Layer, Unread] = field(default_factory=dict)
    never: set[Layer] = field(default_factory=set)
    checks: int = 0
    lost: bool = False

    def advance(self, step: int, conditions: Mapping[Layer, Condition], for_checks: int) -> None:
        """Take in what this check says about every layer."""
        for layer in [*self.episodes, *(layer for layer in conditions if layer not in self.episodes)]:
            condition = conditions.get(layer)
            episode = self.episodes.get(layer)
            if episode is None:
                if condition is None or condition.state != "fire":
                    continue
                episode = self.episodes[layer] = Episode(step, condition)
            if not episode.advance(condition, for_checks):
                del self.episodes[layer]
        if self.firing:
            self.ended = self.episodes[min(self.firing, key=lambda layer: -1 if layer is None else layer)].last
        self._advance_unread(step, {layer: condition for layer, condition in conditions.items() if condition.state == "no_data"})

    @property
    def blind(self) -> bool:
        """Whether some layer could not be read at the last check."""
        return bool(self.unread or self.never)

    @property
    def firing(self) -> dict[Layer, Episode]:
        return {layer: episode for layer, episode in self.episodes.items() if episode.firing}

    def _advance_unread(self, step: int, unread: Mapping[Layer, Condition]) -> None:
        self.never = set(unread) if self.checks == 0 else self.never & set(unread)
        self.checks += 1
        before = self.unread
        self.unread = {
            layer: Unread(before[layer].since, condition, before[layer].checks + 1) if layer in before else Unread(step, condition, 1)
            for layer, condition in unread.items()
            if layer not in self.never
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "episodes": [[layer, episode.state_dict()] for layer, episode in self.episodes.items()],
            "announced": None if self.announced is None else self.announced.value,
            "layers": list(self.layers),
            "since": self.since,
            "said_at": self.said_at,
            "ended": _condition_state(self.ended),
            "unread": [[layer, unread.since, _condition_state(unread.last), unread.checks] for layer, unread in self.unread.items()],
            "never": list(self.never),
            "checks": self.checks,
            "lost": self.lost,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RuleState:
        return cls(
            episodes={layer: Episode.from_state(episode) for layer, episode in state["episodes"]},
            announced=None if state["announced"] is None else Severity(state["announced"]),
            layers=tuple(state["layers"]),
            since=state["since"],
            said_at=state["said_at"],
            ended=_condition_from(state["ended"]),
            unread={layer: Unread(since, _condition_from(last), checks) for layer, since, last, checks in state["unread"]},
            never=set(state["never"]),
            checks=state["checks"],
            lost=state["lost"],
        )


def _condition_state(condition: Condition) -> dict[str, Any]:
    state = {name: getattr(condition, name) for name in Condition.__slots__}
    return {**state, **{name: to_json(state[name]) for name in ("value", "bound", "baseline")}, "severity": condition.severity.value}


def _condition_from(state: Mapping[str, Any]) -> Condition:
    return Condition(
        **{**state, **{name: from_json(state[name]) for name in ("value", "bound", "baseline")}, "severity": Severity(state["severity"])}
    )
