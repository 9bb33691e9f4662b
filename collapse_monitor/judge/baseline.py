"""The normal range of a reading: a running mean and deviation, in the scale in which equal steps are equally remarkable."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from collapse_monitor.judge.readings import Mask, Values
from collapse_monitor.judge.threshold import Scale
from collapse_monitor.judge.thresholds import ANCHOR_EVERY, ANCHOR_MEMORY, OUTLIER_SIGMAS, SMALLEST_DEVIATION, WARMUP_CHECKS, WINDOW_CHECKS


def to_scale(values: Values, scale: Scale) -> Values:
    """Readings in the scale in which equal steps are equally remarkable; nan where it is not defined.

    >>> to_scale(np.array([0.9, 0.99]), "gap").round(2)
    array([-2.3 , -4.61])
    """
    if scale == "linear":
        return values
    if scale == "log1p":
        return np.log1p(np.maximum(values, 0))
    if scale == "gap":
        # Below 1e-7 a single-precision cosine has no digits left.
        return np.log(np.maximum(1 - values, 1e-7))
    return np.where(values >= 0, np.log(np.maximum(values, 1e-12)), np.nan)


def from_scale(values: Values, scale: Scale) -> Values:
    """The inverse of `to_scale`."""
    if scale == "linear":
        return values
    with np.errstate(over="ignore"):
        grown: Values = np.exp(values)
    if scale == "log1p":
        return grown - 1
    return 1 - grown if scale == "gap" else grown


@dataclass(frozen=True, slots=True)
class Baseline:
    """The normal range of one metric, an entry per layer or per site and head. Entries still in warm-up are nan.

    Attributes:
        scale: of the other numbers.
        mean: the middle.
        deviation: about it.
        anchor: the middle of ten times as many checks, which a slow drift does not take along; None where that is not kept.
    """

    scale: Scale
    mean: Values
    deviation: Values
    anchor: Values | None = None

    @property
    def value(self) -> Values:
        """The middle, in the metric's own unit."""
        return from_scale(self.mean, self.scale)

    def at(self, *index: int) -> float | None:
        """The middle at one layer (or site and head), None while in warm-up.

        >>> Baseline("log", np.log([2.0, np.nan]), np.ones(2)).at(0), Baseline("log", np.log([2.0, np.nan]), np.ones(2)).at(1)
        (2.0, None)
        """
        try:
            middle = float(self.value[index])
        except IndexError:
            return None
        return None if np.isnan(middle) else middle

    def shift(self, values: Values) -> Values:
        """Distance from the middle in the metric's scale: for a `log` scale the log of the factor. nan while in warm-up."""
        # Readings of another shape than the baseline's are of another model.
        mean = self.mean if self.mean.shape == values.shape else np.full(values.shape, np.nan)
        return to_scale(values, self.scale) - mean

    def beyond(self, values: Values, shift: float, sigmas: float) -> Mask:
        """Where `values` lie at least `shift` (signed, in the scale) and `sigmas` deviations off the middle. Never while in warm-up.

        Also where they have drifted so far from the anchor, and have taken the middle along by half of it: a drift widens the
        deviation as fast as it moves the middle, so that no number of deviations would ever tell.
        """
        if self.deviation.shape != values.shape:
            return np.zeros(values.shape, dtype=bool)
        way = 1 if shift > 0 else -1
        scaled = to_scale(values, self.scale)
        found: Mask = way * (scaled - self.mean) >= np.maximum(abs(shift), sigmas * self.deviation)
        if self.anchor is not None:
            found |= (way * (scaled - self.anchor) >= abs(shift)) & (way * (self.mean - self.anchor) >= abs(shift) / 2)
        return found


_KEPT = ("count", "mean", "variance", "anchor", "anchored")


class Track:
    """One running mean and deviation per entry of an array, in a scale, and the last few arrays as they came."""

    def __init__(self, scale: Scale, shape: tuple[int, ...], recent: int) -> None:
        self.scale: Scale = scale
        self.count = np.zeros(shape)
        self.mean = np.zeros(shape)
        self.variance = np.zeros(shape)
        self.anchor = np.full(shape, np.nan)
        self.anchored = np.zeros(shape)
        self.checks = 0
        self.recent: deque[tuple[int, Values]] = deque(maxlen=recent)
        # Once every entry has been read this often; counts never fall.
        self._fewest = 0.0
        self._deviation = np.full(shape, SMALLEST_DEVIATION[scale])

    def update(self, step: int, values: Values, frozen: Mask) -> None:
        if self.recent.maxlen:
            self.recent.append((step, values))
        scaled = to_scale(values, self.scale)
        known = np.isfinite(scaled)
        known &= ~frozen
        change = scaled - self.mean
        weight: Values | float = 1 / WINDOW_CHECKS
        if self._fewest < WINDOW_CHECKS:
            self.count += known
            weight = 1 / np.minimum(np.maximum(self.count, 1), WINDOW_CHECKS)
            self._fewest = float(self.count.min(initial=np.inf))
        # What is far off teaches little: a fall within a few checks must not widen the range until it lies inside.
        most = OUTLIER_SIGMAS * self._deviation
        if self._fewest < WARMUP_CHECKS:
            most = np.where(self.count >= WARMUP_CHECKS, most, np.inf)
        change = np.minimum(np.maximum(change, -most), most)
        if not known.all():
            weight, change = np.where(known, weight, 0), np.where(known, change, 0)
        # New arrays, for baselines hold the old ones.
        part = weight * change
        self.mean = self.mean + part
        self.variance = (1 - weight) * (self.variance + part * change)
        self._deviation = np.maximum(np.sqrt(self.variance), SMALLEST_DEVIATION[self.scale])
        self.checks += 1
        if self.checks % ANCHOR_EVERY == 0:
            self._move_anchor(~frozen & (self.count >= WARMUP_CHECKS))

    def _move_anchor(self, ready: Mask) -> None:
        self.anchored = np.minimum(self.anchored + ready, ANCHOR_MEMORY)
        moved = self.anchor + (self.mean - self.anchor) / np.maximum(self.anchored, 1)
        self.anchor = np.where(ready, np.where(np.isnan(self.anchor), self.mean, moved), self.anchor)

    def baseline(self, warmup: int) -> Baseline:
        if self._fewest >= warmup:
            return Baseline(self.scale, self.mean, self._deviation, self.anchor)
        ready = self.count >= warmup
        return Baseline(self.scale, np.where(ready, self.mean, np.nan), np.where(ready, self._deviation, np.nan), self.anchor)

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "shape": list(self.mean.shape),
            "checks": self.checks,
            **{name: listed(getattr(self, name)) for name in _KEPT},
            "recent": [[step, listed(values)] for step, values in self.recent],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], recent: int) -> Track:
        shape = tuple(state["shape"])
        track = cls(state["scale"], shape, recent)
        track.checks = int(state.get("checks", 0))
        for name in _KEPT:
            if name in state:
                setattr(track, name, array_of(state[name], shape))
        track._deviation = np.maximum(np.sqrt(track.variance), SMALLEST_DEVIATION[track.scale])
        track._fewest = float(track.count.min(initial=np.inf))
        track.recent.extend((step, array_of(values, shape)) for step, values in state["recent"])
        return track


def to_json(value: float | None) -> float | str | None:
    """A number as strict JSON has it: text where it is not finite.

    >>> to_json(1.5), to_json(float("nan")), to_json(None)
    (1.5, 'nan', None)
    """
    return value if value is None or math.isfinite(value) else str(value)


def from_json(value: float | str | None) -> float | None:
    """The inverse of `to_json`."""
    return None if value is None else float(value)


def listed(values: Values) -> list[float | str | None]:
    return [to_json(float(value)) for value in values.ravel()]


def array_of(values: list[float | str], shape: tuple[int, ...]) -> Values:
    return np.array([float(value) for value in values], dtype=np.float64).reshape(shape)


UNKNOWN = Baseline("linear", np.array(np.nan), np.array(np.nan))
"""Before anything is known."""
