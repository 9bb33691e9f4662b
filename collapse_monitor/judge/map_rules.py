"""Rules about what a block's attention maps have become beside the own past: uniform, alike, the same for every input, one column.

Uniform maps are alike in every respect, and so are heads that park on the first keys. Only the first rule speaks of the former; the latter
are sinks, which healthy models have. A block that never selected has not ceased to: nothing here warns without a baseline. Maps that select
and have been alike, or the same for every input, from the first step on may be so on purpose: they are noted when that lasts.
"""

from __future__ import annotations

from math import log

import numpy as np

from collapse_monitor.judge.history import History
from collapse_monitor.judge.readings import Mask, Readings
from collapse_monitor.judge.relative import always, conditions, own
from collapse_monitor.judge.rule import told_while_firing
from collapse_monitor.judge.threshold import Level
from collapse_monitor.judge.thresholds import SIGMAS, TRANSIENT_STEPS, bound
from collapse_monitor.records import Condition, Snapshot


@told_while_firing
def uniform_attention(snapshot: Snapshot, history: History) -> list[Condition]:
    """A block that used to select attends to all keys alike."""
    now, normal = history.read(snapshot), history.baseline("selectivity")
    selectivity = now.layer("selectivity")

    def found(level: Level) -> Mask:
        fallen = normal.beyond(selectivity, -log(bound("uniform_attention.drop", level)), SIGMAS)
        return fallen & (selectivity <= bound("uniform_attention.selectivity", level)) & _settled(snapshot, history)

    def uniformity(layer: int) -> float | None:
        usual = normal.at(layer)
        return None if usual is None else 1 - usual

    values = now.layer("attention_uniformity")
    near = selectivity <= bound("uniform_attention.selectivity", "hold")

    def limit(level: Level) -> float:
        return 1 - bound("uniform_attention.selectivity", level)

    return conditions("attention_uniformity", values, near, found, limit, uniformity)


@told_while_firing
def head_redundancy(snapshot: Snapshot, history: History) -> list[Condition]:
    """The heads of a block have come to look at the same keys."""
    return _alike("head_redundancy", "head_similarity", snapshot, history)


@told_while_firing
def attention_stagnation(snapshot: Snapshot, history: History) -> list[Condition]:
    """A block has come to look where the block before it looks."""
    return _alike("attention_stagnation", "layer_similarity", snapshot, history)


@told_while_firing
def input_independent_attention(snapshot: Snapshot, history: History) -> list[Condition]:
    """A block has come to look at the same positions whatever the input is."""
    history.watch("input_dependence")
    now, normal = history.read(snapshot), history.baseline("dependent_share")
    share, parked = now.layer("dependent_share"), now.layer("sink_mass") >= bound("map.sink_mass", "fire")

    def found(level: Level) -> Mask:
        fallen = normal.beyond(share, -log(bound("input_independent_attention.drop", level)), SIGMAS)
        low = share <= bound("input_independent_attention.share", level)
        return fallen & low & ~parked & _settled(snapshot, history)

    def limit(level: Level) -> float:
        return bound("input_independent_attention.share", level)

    usual, near, values = own(history.baseline("input_dependence")), share <= limit("hold"), now.layer("input_dependence")
    fixed = (share <= limit("fire")) & selective(now, "hold")
    return [
        *conditions("input_dependence", values, near, found, limit, usual),
        *always("input_independent_attention", "input_dependence", values, fixed, found, limit, snapshot, history),
    ]


@told_while_firing
def single_column_attention(snapshot: Snapshot, history: History) -> list[Condition]:
    """Every query of a block has come to look at one and the same key, which is none of the first ones."""
    now, normal = history.read(snapshot), history.baseline("dominant_column")
    mass = now.layer("dominant_column")

    def found(level: Level) -> Mask:
        risen = normal.beyond(mass, log(bound("single_column_attention.rise", level)), SIGMAS)
        return risen & (mass >= bound("single_column_attention.mass", level)) & selective(now, level) & _settled(snapshot, history)

    def limit(level: Level) -> float:
        return bound("single_column_attention.mass", level)

    one = (mass >= limit("fire")) & selective(now, "hold")
    return [
        *conditions("dominant_column", mass, mass >= limit("hold"), found, limit, own(normal)),
        *always("single_column_attention", "dominant_column", mass, one, found, limit, snapshot, history),
    ]


def selective(now: Readings, level: Level) -> Mask:
    """Blocks that select at all, and not by parking on the first keys. True where that is not known."""
    parked = now.layer("sink_mass") >= bound("map.sink_mass", level)
    return ~(now.layer("selectivity") < bound("map.selectivity", level)) & ~parked


def _alike(rule: str, metric: str, snapshot: Snapshot, history: History) -> list[Condition]:
    now, normal = history.read(snapshot), history.baseline(metric)
    similarity = now.layer(metric)

    def found(level: Level) -> Mask:
        risen = normal.beyond(similarity, -log(bound(f"{rule}.gap_drop", level)), SIGMAS)
        return risen & (similarity >= bound(f"{rule}.similarity", level)) & selective(now, level) & _settled(snapshot, history)

    def limit(level: Level) -> float:
        return bound(f"{rule}.similarity", level)

    alike = (similarity >= limit("fire")) & selective(now, "hold")
    return [
        *conditions(metric, similarity, similarity >= limit("hold"), found, limit, own(normal)),
        *always(rule, metric, similarity, alike, found, limit, snapshot, history),
    ]


def _settled(snapshot: Snapshot, history: History) -> np.bool_:
    return np.bool_(history.steps(snapshot) >= TRANSIENT_STEPS)
