"""What this run has read so far, in bounded memory: baselines, the last few checks, and how long something has lasted. No tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from collapse_monitor.judge.baseline import UNKNOWN, Baseline, Track, array_of, listed, to_scale
from collapse_monitor.judge.readings import Mask, Readings, Values
from collapse_monitor.judge.thresholds import SCALES, SMALLEST_DEVIATION, WARMUP_CHECKS
from collapse_monitor.records import Snapshot

RECENT_CHECKS = 16
"""Checks whose readings are kept as they were, for rules that look at the last few."""


@dataclass(slots=True)
class _Streak:
    """How long something has been so: checks in a row, the step it began, the step last looked at, whether it is so anywhere."""

    checks: Values
    since: Values
    step: int | None = None
    running: bool = True


class History:
    """Readings of the checks so far, reduced to what rules need. Memory does not grow with the number of checks.

    A baseline is kept for every metric that a rule has asked for once; it counts after `warmup` checks and follows the readings with
    a memory of 40 checks. Layers on which an alert is pending or firing are left out, so that a collapse never becomes the new normal.
    Besides the metrics of the snapshot there are the derived ones of `Readings.layer`.

    >>> from collapse_monitor.records import Site, Snapshot
    >>> history = History(warmup=2)
    >>> for step in range(4):
    ...     snapshot = Snapshot(step, (Site("block", "block", 0),), {"token_similarity": (0.5,)}, {})
    ...     normal = history.baseline("token_similarity").at(0)
    ...     history.record(snapshot)
    >>> normal
    0.5
    """

    def __init__(self, warmup: int = WARMUP_CHECKS) -> None:
        self.warmup = warmup
        self.checks = 0
        self._layers: dict[str, Track | None] = {}
        self._heads: dict[str, Track | None] = {}
        self._streaks: dict[str, _Streak] = {}
        self._first: int | None = None
        self._names: tuple[str, ...] = ()
        self._now: tuple[Snapshot, Readings] | None = None
        self._lowest: dict[str, float] = {}
        self._logged: dict[str, float] = {}
        self.latest: Snapshot | None = None

    def read(self, snapshot: Snapshot) -> Readings:
        """The readings of a snapshot as arrays."""
        if self._now is None or self._now[0] is not snapshot:
            readings = Readings(snapshot)
            if readings.names != self._names:
                # Another model, or one that has grown: what was normal was said of another layer 3.
                self._names = readings.names
                self._layers, self._heads = dict.fromkeys(self._layers), dict.fromkeys(self._heads)
            self._now = (snapshot, readings)
        return self._now[1]

    def watch(self, *metrics: str) -> None:
        """Start keeping baselines of these metrics per layer, for rules that look at them in some checks only."""
        for metric in metrics:
            self._layers.setdefault(metric, None)

    def watch_heads(self, *metrics: str) -> None:
        """Start keeping baselines of these attention metrics per site and head."""
        for metric in metrics:
            self._heads.setdefault(metric, None)

    def baseline(self, metric: str) -> Baseline:
        """The normal range of a metric per layer. Asking for one starts keeping it."""
        track = self._layers.setdefault(metric, None)
        return UNKNOWN if track is None else track.baseline(self.warmup)

    def known_baseline(self, metric: str, layer: int) -> float | None:
        """The middle of a metric's normal range at a layer, if some rule keeps it; asking does not start it."""
        track = self._layers.get(metric)
        return None if track is None else track.baseline(self.warmup).at(layer)

    def head_baseline(self, metric: str) -> Baseline:
        """The normal range of an attention metric per site and head. Asking for one starts keeping it."""
        track = self._heads.setdefault(metric, None)
        return UNKNOWN if track is None else track.baseline(self.warmup)

    def recent(self, metric: str) -> list[tuple[int, Values]]:
        """Step and values per layer of the last 16 checks, oldest first, without the current one. Asking for a metric starts keeping it."""
        track = self._layers.setdefault(metric, None)
        return [] if track is None else list(track.recent)

    def least_recent(self, metric: str) -> Values | None:
        """The least value per layer of the last 16 checks, nan where there is none; None before the first."""
        recent = [values for _, values in self.recent(metric)]
        if not recent or any(values.shape != recent[-1].shape for values in recent):
            return None
        least: Values = np.fmin.reduce(np.array(recent))
        return least

    def jump_from(self, metric: str) -> Baseline:
        """Median and deviation of the last 16 checks, half of them at least: what a sudden change is measured from.

        Unlike a baseline it follows whatever happens, so that slow drift does not widen it.
        """
        recent = [values for _, values in self.recent(metric)]
        if len(recent) < RECENT_CHECKS // 2 or any(values.shape != recent[-1].shape for values in recent):
            return UNKNOWN
        scale = SCALES.get(metric, "linear")
        scaled = to_scale(np.array(recent), scale)
        middle = np.median(scaled, axis=0)
        # 1.4826: the median distance of a normal distribution is 0.6745 deviations.
        deviation = 1.4826 * np.median(np.abs(scaled - middle), axis=0)
        return Baseline(scale, middle, np.maximum(deviation, SMALLEST_DEVIATION[scale]))

    def lowest(self, name: str) -> float | None:
        """The lowest value that was logged under this name, such as `val_loss`."""
        return self._lowest.get(name)

    def logged(self, name: str, snapshot: Snapshot) -> float:
        """What was logged under this name, with this snapshot or last before it; nan if nothing was."""
        return snapshot.context.get(name, self._logged.get(name, math.nan))

    def steps(self, snapshot: Snapshot) -> int:
        """Training steps between the first check and this one."""
        return 0 if self._first is None else snapshot.step - self._first

    def lasting(self, name: str, mask: Mask, step: int) -> tuple[Values, Values]:
        """For how many checks in a row, this one included, and over how many steps each entry of `mask` has been true under this `name`."""
        streak = self._streaks.get(name)
        if streak is None or streak.checks.shape != mask.shape:
            streak = self._streaks[name] = _Streak(np.zeros(mask.shape), np.full(mask.shape, float(step)))
        if streak.step != step:
            streak.step = step
            if not streak.running and not mask.any():
                return streak.checks, streak.checks
            streak.since = np.where(mask & (streak.checks > 0), streak.since, step)
            streak.checks = np.where(mask, streak.checks + 1, 0)
            streak.running = bool(mask.any())
        return streak.checks, np.where(mask, step - streak.since, 0)

    def record(self, snapshot: Snapshot, frozen: Collection[int] = ()) -> None:
        """Take a snapshot in, after the rules have seen it; the baselines of `frozen` layers stay as they are."""
        now = self.read(snapshot)
        still = np.zeros(now.blocks + 1, dtype=bool)
        still[[layer for layer in frozen if layer < now.blocks]] = True
        for metric, track in self._layers.items():
            self._layers[metric] = _updated(track, metric, snapshot.step, now.layer(metric), still[:-1], RECENT_CHECKS)
        for metric, track in self._heads.items():
            self._heads[metric] = _updated(track, metric, snapshot.step, now.heads(metric), still[now.attention_layers][:, None], 0)
        for name, value in snapshot.context.items():
            if math.isfinite(value):
                self._logged[name] = value
                self._lowest[name] = min(value, self._lowest.get(name, value))
        self.checks += 1
        self.latest = snapshot
        self._first = snapshot.step if self._first is None else self._first
        self._now = None

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "checks": self.checks,
            "first": self._first,
            "streaks": {name: [streak.step, listed(streak.checks), listed(streak.since)] for name, streak in self._streaks.items()},
            "names": list(self._names),
            "lowest": dict(self._lowest),
            "logged": dict(self._logged),
            "layers": {metric: None if track is None else track.state_dict() for metric, track in self._layers.items()},
            "heads": {metric: None if track is None else track.state_dict() for metric, track in self._heads.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.checks = int(state["checks"])
        self._first = state["first"]
        self._streaks = {
            name: _Streak(array_of(checks, (len(checks),)), array_of(since, (len(since),)), step)
            for name, (step, checks, since) in state["streaks"].items()
        }
        self._names = tuple(state["names"])
        self._lowest, self._logged = dict(state.get("lowest", {})), dict(state.get("logged", {}))
        self._layers = {
            metric: None if track is None else Track.from_state(track, RECENT_CHECKS) for metric, track in state["layers"].items()
        }
        self._heads = {metric: None if track is None else Track.from_state(track, 0) for metric, track in state["heads"].items()}


def _updated(track: Track | None, metric: str, step: int, values: Values, frozen: Mask, recent: int) -> Track | None:
    if track is None or track.mean.shape != values.shape:
        if not np.isfinite(values).any():
            return track
        track = Track(SCALES.get(metric, "linear"), values.shape, recent)
    track.update(step, values, frozen)
    return track
