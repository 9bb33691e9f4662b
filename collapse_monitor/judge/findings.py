"""From an alert's episodes to a finding: the phenomenon with its evidence, what was not read, causes and remedies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from collapse_monitor.judge.catalogue import CATALOGUE
from collapse_monitor.judge.episode import Episode, Layer
from collapse_monitor.judge.history import History
from collapse_monitor.judge.laws import depth_law
from collapse_monitor.records import Evidence, Finding, Severity, Snapshot


def compose_finding(rule: str, episodes: Mapping[Layer, Episode], snapshot: Snapshot | None, history: History) -> Finding:
    """The finding for a rule that fires on the layers of `episodes`.

    Evidence is first what fired, per metric the value of the first layer; then, of the origin, the other readings that belong to the
    phenomenon. Readings that were not taken are named in `against`.
    """
    phenomenon = CATALOGUE.get(rule)
    layers = tuple(sorted(layer for layer in episodes if layer is not None))
    ordered = [episodes[layer] for layer in layers] or list(episodes.values())
    evidence: dict[str, Evidence] = {}
    for episode in ordered:
        last = episode.last
        seen = evidence.get(last.metric)
        named = () if last.layer is None else (last.layer,)
        if seen is None:
            evidence[last.metric] = Evidence(last.metric, last.value, last.bound, last.baseline, named)
        else:
            evidence[last.metric] = Evidence(seen.metric, seen.value, seen.bound, seen.baseline, seen.layers + named)
    against: tuple[str, ...] = ()
    if phenomenon and snapshot is not None and layers:
        beside = {metric: _beside(metric, layers[0], snapshot, history) for metric in phenomenon.readings if metric not in evidence}
        evidence.update({metric: found for metric, found in beside.items() if found is not None})
        unread = [metric for metric, found in beside.items() if found is None]
        against = (*((phenomenon.against,) if phenomenon.against else ()), *((f"not read: {', '.join(unread)}",) if unread else ()))
    return Finding(
        phenomenon=rule,
        severity=max((episode.severity or Severity.INFO for episode in ordered), key=lambda severity: severity.rank),
        layers=layers,
        heads=tuple(sorted({episode.last.head for episode in ordered if episode.last.head is not None})),
        since=min(episode.since for episode in ordered),
        evidence=tuple(evidence.values()),
        against=against,
        causes=phenomenon.causes if phenomenon else (),
        remedies=phenomenon.remedies if phenomenon else (),
        anchor=phenomenon.anchor if phenomenon else "",
        notes=(depth_law(snapshot).sentence,) if snapshot is not None and rule in OF_DEPTH else (),
    )


OF_DEPTH = ("rank_collapse", "oversmoothing")
"""Phenomena that build up over layers."""


def _beside(metric: str, layer: int, snapshot: Snapshot, history: History) -> Evidence | None:
    now = history.read(snapshot)
    if layer >= now.blocks or np.isnan(value := now.layer(metric)[layer]):
        return None
    return Evidence(metric, float(value), None, history.known_baseline(metric, layer), (layer,))
