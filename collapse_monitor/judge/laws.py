"""How readings fall over layers at one step, and how they move over steps: laws that fit, and silence where none does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import Literal

import numpy as np

from collapse_monitor.judge.baseline import to_scale
from collapse_monitor.judge.history import History
from collapse_monitor.judge.readings import Values
from collapse_monitor.judge.thresholds import SCALES, bound
from collapse_monitor.judge.wording import number, ranges
from collapse_monitor.records import Snapshot

Kind = Literal["none", "exponential", "doubly exponential", "unknown"]

FLOOR = 3e-6
"""Relative residual below which single precision holds rounding noise: its floor is near 1e-7 (measured: 3e-8 to 5e-7)."""

SMALLEST_FALL = 0.7
"""Logarithm of the fall over all layers below which there is no law to speak of: a factor of two."""

POOREST_FIT = 0.8
"""Share of the variance that a fit must explain."""

STRAIGHT = 0.9
"""The same for a course that is drawn on into the future."""

DEPARTED = log(1.3)
"""Distance from the own baseline, in the scale of the reading, from which a course is one: a factor of 1.3."""

FEWEST_POINTS = 6
"""Checks from which a slope over time is told."""

FURTHEST = 4.0
"""A forecast reaches this many times as far as what it was fitted on, and no further."""


@dataclass(frozen=True, slots=True)
class DepthLaw:
    """How the relative residual of tokens falls over the layers of one step.

    Attributes:
        kind: `exponential` (the same factor in each layer), `doubly exponential` (the logarithm triples in each layer, as in attention
            without positions, masks or residual connections), `none`, or `unknown` when fewer than three layers are known.
        rate: factor per layer, of the exponential law; 1 where there is none.
        floor: first layer at the rounding floor, None if no layer is.
    """

    kind: Kind
    rate: float
    floor: int | None

    @property
    def sentence(self) -> str:
        """One sentence.

        >>> DepthLaw("exponential", 0.42, None).sentence
        'the relative residual falls exponentially with depth, to 0.42 of itself in each layer'
        """
        said = {
            "none": "the relative residual follows no law of depth",
            "unknown": "the relative residual is known in too few layers for a law of depth",
            "exponential": f"the relative residual falls exponentially with depth, to {self.rate:.2g} of itself in each layer",
            "doubly exponential": "the relative residual falls doubly exponentially with depth: its logarithm triples in each layer",
        }[self.kind]
        return said if self.floor is None else f"{said}; from layer {self.floor} on it is at the floor of rounding"


def depth_law(snapshot: Snapshot) -> DepthLaw:
    """The law of the relative residual over the layers of a snapshot (Dong et al. 2021; base 3 without residuals and masks).

    >>> from collapse_monitor.records import Site
    >>> sites = tuple(Site(f"blocks.{i}", "block", i) for i in range(5))
    >>> depth_law(Snapshot(0, sites, {"relative_residual": (0.8, 0.4, 0.2, 0.1, 0.05)}, {}))
    DepthLaw(kind='exponential', rate=0.5, floor=None)
    """
    residual = _course(snapshot, "relative_residual")
    at_floor = np.flatnonzero(residual <= FLOOR)
    floor = int(at_floor[0]) if len(at_floor) else None
    known = np.flatnonzero((residual > FLOOR)[: floor if floor is not None else len(residual)])
    logs = np.log(residual[known])
    contraction = _course(snapshot, "contraction")
    if len(known) and known[0] == 0 and len(contraction) and contraction[0] > 0:
        # What the first block was given is a point as well.
        known, logs = np.append(-1, known), np.append(logs[0] - log(contraction[0]), logs)
    if len(known) < 3:
        return DepthLaw("unknown", 1.0, floor)
    if logs[0] - logs[-1] < SMALLEST_FALL:
        return DepthLaw("none", 1.0, floor)
    steps = (known - known[0]).astype(np.float64)
    straight, slope = _fit(steps, logs)
    # Beyond some twenty layers 3^l says the same as "all at once".
    tripled, growth = _fit(3.0 ** np.minimum(steps, 20), logs)
    if max(straight, tripled) < POOREST_FIT or max(slope, growth) >= 0:
        return DepthLaw("none", 1.0, floor)
    if tripled > straight and len(known) <= 6:
        return DepthLaw("doubly exponential", 1.0, floor)
    return DepthLaw("exponential", round(exp(slope), 4), floor)


def _course(snapshot: Snapshot, metric: str) -> Values:
    return np.array(snapshot.series(metric) if metric in snapshot.metrics else [], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Forecast:
    """A reading on its way to a bound.

    Attributes:
        metric: the reading.
        layers: those whose course fits a straight line in the scale of the reading.
        bound: where it is going.
        steps: until the first of them is there, at this slope.
        fit: share of the variance that the line explains, the worst of the layers.
    """

    metric: str
    layers: tuple[int, ...]
    bound: float
    steps: int
    fit: float

    @property
    def sentence(self) -> str:
        """One sentence.

        >>> Forecast("token_similarity", (9, 10, 11), 0.9, 1234, 0.93).sentence
        'token_similarity of layers 9-11 reaches 0.9 in about 1 200 steps at this slope'
        """
        place = f"{'layer' if len(self.layers) == 1 else 'layers'} {ranges(self.layers)}"
        return f"{self.metric} of {place} reaches {number(self.bound)} in about {_rounded(self.steps)} steps at this slope"


def slope(points: Sequence[tuple[int, float]], metric: str) -> tuple[float, float]:
    """Slope per step of a reading in its scale, and the share of the variance that the line explains; nan for fewer than six points."""
    known = [(step, value) for step, value in points if isfinite(value)]
    if len(known) < FEWEST_POINTS:
        return np.nan, np.nan
    steps = np.array([step for step, _ in known], dtype=np.float64)
    scaled = to_scale(np.array([value for _, value in known]), SCALES.get(metric, "linear"))
    if not np.isfinite(scaled).all() or steps[-1] == steps[0]:
        return np.nan, np.nan
    fit, per_step = _fit(steps, scaled)
    return per_step, fit


def forecast(history: History, metric: str, limit: float) -> Forecast | None:
    """When this reading reaches `limit`, by its last 16 checks.

    None where it is near its baseline, the fit of a straight line is poor, it moves away from the limit, or that is too far off.
    """
    recent = history.recent(metric)
    normal, scale = history.baseline(metric), SCALES.get(metric, "linear")
    if len(recent) < FEWEST_POINTS or any(values.shape != recent[-1][1].shape for _, values in recent):
        return None
    here, there = to_scale(recent[-1][1], scale), float(to_scale(np.array([limit]), scale)[0])
    way = np.where(there > here, 1.0, -1.0)
    departed = np.flatnonzero(normal.shift(recent[-1][1]) * way >= DEPARTED)
    if not len(departed):
        return None
    steps = np.array([step for step, _ in recent], dtype=np.float64)
    courses = to_scale(np.array([values[departed] for _, values in recent]), scale)
    span = steps[-1] - steps[0]
    layers: dict[int, tuple[float, float]] = {}
    for layer, course in zip(departed, courses.T, strict=True):
        known = np.isfinite(course)
        if known.sum() < FEWEST_POINTS or not known[-1]:
            continue
        fit, per_step = _fit(steps[known], course[known])
        left = (there - here[layer]) / per_step if per_step else np.inf
        if fit >= STRAIGHT and 0 < left <= FURTHEST * span:
            layers[int(layer)] = (float(left), fit)
    if not layers:
        return None
    return Forecast(
        metric, tuple(layers), limit, int(min(left for left, _ in layers.values())), round(min(fit for _, fit in layers.values()), 3)
    )


HEADINGS: Mapping[str, tuple[str, ...]] = {
    "token_similarity": ("oversmoothing.similarity", "rank_collapse.similarity"),
    "relative_residual": ("rank_collapse.complete_residual",),
    "branch_ratio": ("bypassed_attention.ratio",),
    "pooled_rank": ("dimensional_collapse.rank",),
}
"""Readings that a collapse moves step by step, and the bounds on their way."""


def heading(history: History, metric: str) -> Forecast | None:
    """The next bound that this reading reaches, and when; None where no forecast is worth telling."""
    told = (forecast(history, metric, bound(name, "fire")) for name in HEADINGS.get(metric, ()))
    return next((one for one in told if one is not None), None)


def forecasts(history: History) -> list[Forecast]:
    """Where the readings that rules watch are heading: silent unless a line fits and the bound is within reach."""
    return [one for metric in HEADINGS if (one := heading(history, metric)) is not None]


def _fit(x: Values, y: Values) -> tuple[float, float]:
    """Share of the variance explained by a straight line, and its slope."""
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    total = float(y @ y)
    return (1 - float(((y - slope * x) ** 2).sum()) / total if total > 0 else 0.0), slope


def _rounded(steps: int) -> str:
    """Two digits, thousands apart.

    >>> _rounded(1234), _rounded(87), _rounded(45678)
    ('1 200', '87', '46 000')
    """
    size = 10 ** max(0, len(str(steps)) - 2)
    return f"{round(steps / size) * size:,}".replace(",", " ")
