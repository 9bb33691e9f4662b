"""From conditions to events: confirmation, hysteresis, grouping over layers, silenced echoes, reminders, and a state to save."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from collapse_monitor.judge.episode import Episode, Layer, RuleState
from collapse_monitor.judge.findings import compose_finding
from collapse_monitor.judge.history import RECENT_CHECKS, History
from collapse_monitor.judge.laws import Forecast, forecasts, heading
from collapse_monitor.judge.mute import Mute, resolve_mute
from collapse_monitor.judge.rule import Rule, checks_of, name_of, tells_loss
from collapse_monitor.judge.rules import SILENCES, SILENCES_DOWNSTREAM, resolve_rules
from collapse_monitor.judge.thresholds import NO_DATA_CHECKS, REMIND_CHECKS
from collapse_monitor.judge.wording import firing_message, no_data_message, reminder_message, resolved_message
from collapse_monitor.records import Alert, Condition, Finding, Severity, Snapshot

Status = Literal["inactive", "pending", "firing", "no_data", "off"]

MOST_ALERTS = 1000
"""Alerts kept in memory; sinks have them all."""

LOOK_AHEAD_CHECKS = 4
"""Checks between two looks ahead: they read the last 16."""

Firing = Mapping[str, Mapping[Layer, Episode]]

_STATE_VERSION = 1
_log = logging.getLogger("collapse_monitor")


class Judge:
    """Runs the rules on each snapshot and keeps account of what they say.

    A condition fires when it has been seen in `for_checks` checks in a row (2, unless the rule says otherwise), keeps firing until it has
    been absent for 3, and is one alert for all layers of its rule; only a higher severity makes another. A rule that raises is switched
    off, once, and listed in `faults`.

    Args:
        rules: callables `rule(snapshot, history) -> list[Condition]`, names of built-in rules, or import paths.
        mute: rules to leave out: `"oversmoothing"`, `"oversmoothing:0,3-5"` or `("oversmoothing", [0, 3])`.

    Raises:
        ValueError: an unknown rule or an unreadable `mute`; the message lists what is allowed.

    >>> judge = Judge(["rank_collapse"])
    >>> judge.status
    {'rank_collapse': 'inactive'}
    """

    def __init__(self, rules: Sequence[Rule | str], mute: Sequence[Mute] = ()) -> None:
        self._rules = {name_of(rule): rule for rule in resolve_rules(rules)}
        self._muted = resolve_mute(mute, tuple(self._rules))
        self._states = {name: RuleState() for name in self._rules}
        self._off: set[str] = set()
        self._alerts: deque[Alert] = deque(maxlen=MOST_ALERTS)
        self._findings: list[Finding] = []
        self._outlook: list[Forecast] = []
        self._foretold: dict[str, int] = {}
        self.history = History()
        self.faults: list[tuple[str, BaseException]] = []

    @property
    def alerts(self) -> list[Alert]:
        """The last 1000 alerts, newest last."""
        return list(self._alerts)

    @property
    def findings(self) -> list[Finding]:
        """What is true now: one finding for each rule that fires and is no echo of another."""
        return list(self._findings)

    @property
    def status(self) -> dict[str, Status]:
        """Where each rule stands. `no_data` is not health: some layer could not be read at the last check."""
        return {name: "off" if name in self._off else _status(state) for name, state in self._states.items()}

    def check(self, snapshot: Snapshot) -> list[Alert]:
        """Judge one snapshot; returns what is new: alerts that began to fire, got worse, were resolved or lost their data."""
        for name, rule in self._rules.items():
            if name not in self._off:
                self._states[name].advance(snapshot.step, self._conditions(name, rule, snapshot), checks_of(rule))
        firing = self._firing()
        audible = without_echoes(firing)
        events: list[Alert] = []
        self._findings = []
        for name, state in self._states.items():
            heard = audible.get(name)
            if heard:
                events.extend(self._tell_firing(name, state, heard, snapshot))
                self._findings.append(self._finding(name, heard, snapshot))
            elif state.announced is not None and not state.firing:
                events.append(self._tell_resolved(name, state, snapshot))
            events.extend(self._tell_lost(name, state, firing, snapshot))
        self.history.record(snapshot, self._abnormal_layers())
        self._alerts.extend(events)
        self._look_ahead(snapshot.step)
        return events

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. A resumed run neither warms up again nor fires again."""
        return {
            "version": _STATE_VERSION,
            "history": self.history.state_dict(),
            "rules": {name: state.state_dict() for name, state in self._states.items()},
            "off": sorted(self._off),
            "alerts": [alert.to_dict() for alert in self._alerts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`. Rules that were not there then start afresh.

        Raises:
            ValueError: the state was written by a newer version.
        """
        version = state.get("version", _STATE_VERSION)
        if version > _STATE_VERSION:
            raise ValueError(
                f"the judge's state has version {version}, this collapse_monitor reads {_STATE_VERSION}: upgrade collapse_monitor to resume"
            )
        self.history.load_state_dict(state["history"])
        self._states = {name: RuleState.from_state(state["rules"][name]) if name in state["rules"] else RuleState() for name in self._rules}
        self._off = {name for name in state["off"] if name in self._rules}
        self._alerts = deque((Alert.from_dict(alert) for alert in state["alerts"]), maxlen=MOST_ALERTS)
        self._findings = [self._finding(name, heard, None) for name, heard in without_echoes(self._firing()).items()]

    @property
    def firing(self) -> Firing:
        """Per rule the episodes of the layers it fires on, echoes included."""
        return self._firing()

    @property
    def outlook(self) -> list[Forecast]:
        """Where readings are heading by their last 16 checks; silent unless a line fits and a bound is within reach."""
        return list(self._outlook)

    def _look_ahead(self, step: int) -> None:
        """Tell of a forecast when there is one, and again only when there was none for a while. An alert tells its own."""
        if self.history.checks % LOOK_AHEAD_CHECKS:
            return
        self._outlook = forecasts(self.history)
        quiet = not any(self._firing().values())
        for one in self._outlook:
            if quiet and self.history.checks - self._foretold.get(one.metric, -RECENT_CHECKS) >= RECENT_CHECKS:
                _log.info("step %d, nothing fires yet: %s", step, one.sentence)
            self._foretold[one.metric] = self.history.checks

    def _firing(self) -> Firing:
        return {name: state.firing for name, state in self._states.items() if state.episodes}

    def _conditions(self, name: str, rule: Rule, snapshot: Snapshot) -> dict[Layer, Condition]:
        """What a rule says, the worst per layer, without what is muted. Nothing, and off with it, when it raises."""
        try:
            conditions = rule(snapshot, self.history)
            if not self._states[name].episodes and not tells_loss(rule):
                conditions = _one_unread(conditions)
            found = _worst_per_layer(conditions)
        except Exception as error:
            self.faults.append((name, error))
            self._off.add(name)
            self._states[name] = RuleState()
            return {}
        muted = self._muted.get(name, frozenset())
        if muted is None:
            return {}
        return {layer: condition for layer, condition in found.items() if layer not in muted}

    def _abnormal_layers(self) -> set[int]:
        """Layers that must not teach the baselines: something is pending or firing there."""
        return {
            layer
            for state in self._states.values()
            for layer, episode in state.episodes.items()
            if layer is not None and episode.last.severity is not Severity.INFO
        }

    def _tell_firing(self, name: str, state: RuleState, heard: Mapping[Layer, Episode], snapshot: Snapshot) -> Iterable[Alert]:
        severity = max((_confirmed(episode) for episode in heard.values()), key=lambda found: found.rank)
        layers = _numbered(heard)
        origin = heard[layers[0]] if layers else heard[None]
        state.layers = tuple(sorted({*state.layers, *layers})) if state.announced else layers
        worse = state.announced is not None and severity.rank > state.announced.rank
        if state.announced is None or worse:
            state.since = state.since if worse else min(episode.since for episode in heard.values())
            state.announced, state.said_at = severity, self.history.checks
            ahead = heading(self.history, origin.last.metric)
            outlook = ahead.sentence if ahead is not None and {*ahead.layers} & {*layers} else ""
            message = firing_message(name, severity, layers, state.since, origin.last, snapshot, worse=worse, outlook=outlook)
            yield _alert(
                name, "firing", severity, snapshot.step, state.since, layers, origin.last, message, self._finding(name, heard, snapshot)
            )
        elif self.history.checks - state.said_at >= REMIND_CHECKS:
            state.said_at = self.history.checks
            _log.info(reminder_message(name, severity, layers, state.since, origin.last, snapshot))

    def _tell_resolved(self, name: str, state: RuleState, snapshot: Snapshot) -> Alert:
        since, layers, last = state.since, state.layers, state.ended
        now = float("nan")
        if last.layer is not None and last.layer < len(snapshot.block_sites) and last.metric in snapshot.metrics:
            now = snapshot.series(last.metric)[last.layer]
        state.announced, state.layers = None, ()
        message = resolved_message(name, layers, since, snapshot.step, last, now, snapshot)
        return Alert(name, "resolved", Severity.INFO, snapshot.step, since, layers, last.metric, now, last.baseline, last.bound, message)

    def _tell_lost(self, name: str, state: RuleState, firing: Firing, snapshot: Snapshot) -> Iterable[Alert]:
        known_cause = set(firing.get("non_finite", {}))
        lost = [layer for layer, unread in state.unread.items() if unread.checks >= NO_DATA_CHECKS and layer not in known_cause]
        if not lost:
            state.lost = state.lost and bool(state.unread)
        elif not state.lost:
            state.lost = True
            layers = _numbered(lost)
            unread = state.unread[lost[0]]
            fires = any(layer in state.firing for layer in lost)
            if not fires and not tells_loss(self._rules[name]):
                return
            severity = Severity.WARNING if fires else Severity.INFO
            message = no_data_message(name, layers, unread.since, unread.last.metric, fires, snapshot)
            yield _alert(name, "no_data", severity, snapshot.step, unread.since, layers, unread.last, message, None)

    def _finding(self, name: str, heard: Mapping[Layer, Episode], snapshot: Snapshot | None) -> Finding:
        return compose_finding(name, heard, snapshot, self.history)


def _status(state: RuleState) -> Status:
    if state.firing:
        return "firing"
    if state.episodes:
        return "pending"
    return "no_data" if state.blind else "inactive"


def _worst_per_layer(conditions: Iterable[Condition]) -> dict[Layer, Condition]:
    order = {"no_data": 0, "hold": 1, "fire": 2}
    worst: dict[Layer, Condition] = {}
    for condition in conditions:
        if not isinstance(condition, Condition):
            raise TypeError(f"a rule returns a list of Condition, this one returned a {type(condition).__name__} in it")
        before = worst.get(condition.layer)
        if before is None or (order[condition.state], condition.severity.rank) > (order[before.state], before.severity.rank):
            worst[condition.layer] = condition
    return worst


def _one_unread(conditions: Iterable[Condition]) -> list[Condition]:
    """One layer without a reading stands for all of them, where nobody is told which."""
    kept: list[Condition] = []
    unread = None
    for condition in conditions:
        if getattr(condition, "state", None) != "no_data":
            kept.append(condition)
        elif unread is None:
            unread = condition
    return kept if unread is None else [*kept, unread]


def without_echoes(firing: Firing) -> Firing:
    """What is to be told: without echoes of other rules, and without warnings where something critical is told."""
    told = {
        name: {
            layer: episode for layer, episode in episodes.items() if not any(_echoes(name, layer, other, firing[other]) for other in firing)
        }
        for name, episodes in firing.items()
    }
    critical = {
        (name, layer) for name, episodes in told.items() for layer, episode in episodes.items() if episode.severity is Severity.CRITICAL
    }
    drowned = {layer for _, layer in critical}
    loud = {
        name: {layer: episode for layer, episode in episodes.items() if layer not in drowned or (name, layer) in critical}
        for name, episodes in told.items()
    }
    return {name: episodes for name, episodes in loud.items() if episodes}


def _echoes(name: str, layer: Layer, other: str, episodes: Mapping[Layer, Episode]) -> bool:
    """Whether what `name` says of `layer` follows from what `other` fires on."""
    if name in SILENCES.get(other, ()) and layer in episodes:
        return True
    upstream = _numbered(episodes)
    return name in SILENCES_DOWNSTREAM.get(other, ()) and layer is not None and bool(upstream) and layer > upstream[0]


def _confirmed(episode: Episode) -> Severity:
    return episode.severity or Severity.INFO


def _numbered(layers: Iterable[Layer]) -> tuple[int, ...]:
    return tuple(sorted(int(layer) for layer in layers if layer is not None))


def _alert(
    name: str,
    state: Literal["firing", "no_data"],
    severity: Severity,
    step: int,
    since: int,
    layers: tuple[int, ...],
    condition: Condition,
    message: str,
    finding: Finding | None,
) -> Alert:
    return Alert(
        name, state, severity, step, since, layers, condition.metric, condition.value, condition.baseline, condition.bound, message, finding
    )
