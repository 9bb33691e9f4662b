"""The names of all series, in one place: lower case, digits, `_` and one `/`, which groups them in TensorBoard and W&B."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection
from urllib.parse import quote

from collapse_monitor.records import FORMAT_VERSION

PLUGIN = "collapse_monitor"
"""TensorBoard plugin that owns the dense `[layer]` and `[site, head]` tensors: TensorBoard may thin them out."""

ALERT_PLUGIN = "collapse_monitor_alerts"
"""TensorBoard plugin that owns the alerts: a name of its own, so that all of them can be kept."""

ALERTS = "collapse_alerts/events"
"""One JSON list of alerts per step."""

ALERT_TEXT = "collapse_alerts/text"
"""The same for people, in TensorBoard's Text tab."""

STATISTICS = ("min", "median", "max")
"""Over the layers of one step."""

NONFINITE_LAYERS = "collapse_summary/nonfinite_layers"
"""How many layers hold NaN or infinity; logged instead of them."""

DENSE_ONLY = frozenset(
    {
        "composite_residual",
        "dead_tokens",
        "dobrushin",
        "dominant_column",
        "effective_keys",
        "input_dependence",
        "layer_similarity",
        "nonfinite",
        "outlier_tokens",
        "participation_ratio",
        "pooled_rank",
        "qk_spectral_norm",
        "qk_to_v_weight_gradient",
        "residual_norm",
        "stable_rank",
        "value_condition",
    }
)
"""Built-in metrics without scalars of their own: hundreds of charts hide the ones that matter. Metrics of your own get scalars."""


def dense_tag(metric: str) -> str:
    """One `[layer]` tensor per step.

    >>> dense_tag("effective_rank")
    'collapse/effective_rank'
    """
    return f"collapse/{_clean(metric)}"


def head_tag(metric: str) -> str:
    """One `[site, head]` tensor now and then.

    >>> head_tag("max_logit")
    'collapse_heads/max_logit'
    """
    return f"collapse_heads/{_clean(metric)}"


def range_tag(metric: str) -> str:
    """One `[4, layer]` tensor per window of steps: the extremes, and when they were.

    >>> range_tag("effective_rank")
    'collapse_range/effective_rank'
    """
    return f"collapse_range/{_clean(metric)}"


@functools.cache
def summary_tag(metric: str, statistic: str) -> str:
    """One scalar per step: a statistic over the layers.

    >>> summary_tag("token_similarity", "max")
    'collapse_summary/token_similarity_max'
    """
    return f"collapse_summary/{_clean(metric)}_{statistic}"


def has_scalars(metric: str) -> bool:
    """Whether the aggregates of a metric are logged as scalars.

    >>> has_scalars("effective_rank"), has_scalars("stable_rank"), has_scalars("my_metric")
    (True, False, True)
    """
    return metric not in DENSE_ONLY


TELLING = (
    "collapse_summary/token_similarity_max",
    "collapse_summary/effective_rank_min",
    "collapse_summary/relative_residual_min",
    "collapse_summary/attention_uniformity_max",
    "collapse_summary/attention_uniformity_min",
    "collapse_summary/max_logit_max",
    "collapse_summary/qk_to_v_gradient_min",
    "collapse_summary/gradient_norm_min",
    "collapse_summary/branch_ratio_min",
    NONFINITE_LAYERS,
)
"""The ten curves to look at first: TensorBoard pins ten cards at most."""


def pinned_url(metrics: Collection[str], host: str = "http://localhost:6006/") -> str:
    """TensorBoard's Time Series tab with the most telling curves pinned on top, of the metrics that are logged.

    >>> pinned_url(["effective_rank"])
    'http://localhost:6006/?pinnedCards=%5B%7B%22plugin%22%3A%22scalars%22%2C%22tag%22%3A%22collapse_summary%2Feffective_rank_min%22%7D%5D&smoothing=0#timeseries'
    """
    logged = {summary_tag(metric, statistic) for metric in metrics if has_scalars(metric) for statistic in STATISTICS}
    if "nonfinite" in metrics:
        logged.add(NONFINITE_LAYERS)
    cards = [{"plugin": "scalars", "tag": tag} for tag in TELLING if tag in logged]
    return f"{host}?pinnedCards={quote(json.dumps(cards, separators=(',', ':')), safe='')}&smoothing=0#timeseries"


@functools.cache
def _clean(metric: str) -> str:
    return re.sub(r"[^a-z0-9_]", "_", metric.lower())


__all__ = [
    "ALERTS",
    "ALERT_PLUGIN",
    "ALERT_TEXT",
    "DENSE_ONLY",
    "FORMAT_VERSION",
    "NONFINITE_LAYERS",
    "PLUGIN",
    "STATISTICS",
    "TELLING",
    "dense_tag",
    "has_scalars",
    "head_tag",
    "pinned_url",
    "range_tag",
    "summary_tag",
]
