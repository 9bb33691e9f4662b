"""Signs that one snapshot shows by itself. Without a baseline most of them are notes: what is true, not what has gone wrong."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from collapse_monitor.judge.history import History
from collapse_monitor.judge.map_rules import selective
from collapse_monitor.judge.readings import Indices, Mask, Values
from collapse_monitor.judge.sample_rules import width_collapse
from collapse_monitor.judge.thresholds import bound
from collapse_monitor.judge.token_rules import alike_tokens
from collapse_monitor.records import Condition, Severity, Snapshot


def signs(snapshot: Snapshot, history: History) -> Mapping[str, list[Condition]]:
    """Phenomenon -> the layers that show it, on absolute grounds."""
    now = history.read(snapshot)
    selects = selective(now, "fire")
    parked = now.layer("sink_mass") >= bound("map.sink_mass", "fire")
    at_least = _Signs(now.layer, np.greater_equal)
    at_most = _Signs(now.layer, np.less_equal)
    uniform = now.layer("selectivity") <= bound("uniform_attention.absolute", "fire")
    fixed = (now.layer("dependent_share") <= bound("input_independent_attention.share", "fire")) & ~parked
    return {
        "rank_collapse": alike_tokens(snapshot, history),
        "dead_tokens": at_least.note("dead_tokens", "dead_tokens.share"),
        "width_collapse": [condition for condition in width_collapse(snapshot, history) if condition.state == "fire"],
        "attention_sink": _sinks(now.heads("sink_mass"), now.heads("attention_uniformity"), now.self_attention_layers),
        "massive_activation": at_least.note("massive_activation", "massive_activation.ratio"),
        "uniform_attention": at_least.note("attention_uniformity", None, uniform & ~(fixed & ~np.isnan(now.layer("dependent_share")))),
        "single_column_attention": at_least.note("dominant_column", "single_column_attention.mass", selects),
        "head_redundancy": at_least.note("head_similarity", "head_redundancy.similarity", selects),
        "attention_stagnation": at_least.note("layer_similarity", "attention_stagnation.similarity", selects),
        "input_independent_attention": at_most.note("input_dependence", None, fixed),
        "bypassed_attention": at_most.note("branch_ratio", "bypassed_attention.absolute"),
        "dimensional_collapse": at_most.note("pooled_rank", "dimensional_collapse.absolute"),
    }


class _Signs:
    """Notes on every layer where a reading is beyond a bound."""

    def __init__(self, read: object, beyond: np.ufunc) -> None:
        assert callable(read)
        self._read, self._beyond = read, beyond

    def note(self, metric: str, threshold: str | None, where: Mask | None = None) -> list[Condition]:
        values: Values = self._read(metric)
        limit = np.nan if threshold is None else bound(threshold, "fire")
        found: Mask = np.ones(len(values), dtype=bool) if threshold is None else self._beyond(values, limit)
        if where is not None:
            found = found & where
        return [
            Condition(int(i), metric, float(values[i]), limit, severity=Severity.INFO) for i in np.flatnonzero(found & ~np.isnan(values))
        ]


def _sinks(mass: Values, uniformity: Values, layers: Indices) -> list[Condition]:
    limit = bound("attention_sink.mass", "fire")
    found = (mass >= limit) & ~(uniformity > bound("attention_sink.uniformity", "fire")) & (layers >= 0)[:, None]
    return [
        Condition(int(layers[site]), "sink_mass", float(mass[site, head]), limit, severity=Severity.INFO, head=int(head))
        for site, head in np.argwhere(found)
    ]
