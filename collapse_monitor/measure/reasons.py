"""Why readings are not there: what the caller said, then what is known about the site, then about the metric."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from collapse_monitor.measure.demand import GRADIENT_READS, WEIGHT_READS
from collapse_monitor.measure.faults import Faults
from collapse_monitor.metrics import Metric, Reads
from collapse_monitor.observation import Key
from collapse_monitor.records import Site

NOT_CALLED = "not called in this forward"

NO_GRADIENT = "no gradient came while the window was open"

ABSENT: Mapping[Reads, str] = {
    "transition": "the input of the block was not seen, or has other tokens than its output",
    "branch": "no addition of the attention's result to the stream was seen",
    "logits": "what enters the softmax was not seen",
    "attention_pair": "no self-attention before it with the same heads, queries and keys",
    "attention_batch": "fewer than two sequences were seen",
    "features": "fewer sequences seen so far than a rank can be read from",
    "gradient": NO_GRADIENT,
    "qv_gradient": NO_GRADIENT,
    "parameter_gradients": NO_GRADIENT,
    "qv_weight_gradient": NO_GRADIENT,
    "qk_weights": "weights are not read on this step",
    "value_weights": "weights are not read on this step",
}
"""Why a site that was heard has no reading, by what the metric reads."""

UNDEFINED: Mapping[str, str] = {
    "head_similarity": "fewer than two heads with a row that sees two keys",
    "layer_similarity": "the attention before it has another mask",
    "input_dependence": "no row sees the same two or more keys in every sequence",
    "contraction": "the input has no residual left, or another number of sequences",
    "dobrushin": "fewer than two rows see half of the keys",
}
"""Why a metric can be nan although its site was heard, by name; then by what it reads."""

UNDEFINED_READS: Mapping[Reads, str] = {
    "hidden": "undefined for these tokens",
    "transition": "undefined for these tokens",
    "attention": "no row sees two keys, or the weights hold NaN, Inf or negative values",
    "attention_pair": "no row sees two keys, or the weights hold NaN, Inf or negative values",
    "attention_batch": "no row sees two keys, or the weights hold NaN, Inf or negative values",
    "logits": "no row sees two keys, or the logits hold NaN or Inf",
    "branch": "the stream is zero, or the values hold NaN or Inf",
    "gradient": "the gradient holds NaN or Inf",
    "parameter_gradients": "a gradient holds NaN or Inf",
    "qv_gradient": "the gradient of v is zero, or one of both holds NaN or Inf",
    "qv_weight_gradient": "the gradient of v is zero, or one of both holds NaN or Inf",
    "features": "the sequence means are all zero, or too few of them finite",
    "qk_weights": "the weights hold NaN or Inf",
    "value_weights": "the weights are all zero, or hold NaN or Inf",
}


class Reasons:
    """Collects `Snapshot.missing`. Keys are names of sites, names of metrics, or `site/metric`."""

    def __init__(self, sites: Mapping[Key, Site], missing: Mapping[str, str], faults: Faults) -> None:
        self._sites, self._faults = sites, faults
        self.missing = dict(missing)

    def explain_sites(self, heard: Collection[Key], refused: Mapping[Key, str]) -> None:
        """Sites that were not observed at all."""
        for key, site in self._sites.items():
            if key not in heard:
                self.missing.setdefault(site.name, refused.get(key, NOT_CALLED))

    def explain(self, metric: Metric, keys: Sequence[Key], found: Mapping[Key, object], known: Mapping[Key, str]) -> None:
        """One reason for the metric if all sites lack it for the same one, else one for each that was heard.

        Args:
            metric: what was to be read.
            keys: all sites it is read at.
            found: its readings.
            known: reasons by site that fit this metric.
        """
        fault = self._faults.reason(metric.name)
        if fault is not None:
            self.missing.setdefault(metric.name, fault)
        if metric.name in self.missing:
            return
        names = {key: self._sites[key].name for key in keys}
        heard = [key for key in keys if not {names[key], f"{names[key]}/{metric.name}"} & self.missing.keys()]
        reasons = {key: self._reason(metric, key, found, known) for key in heard if _is_nan(found.get(key, math.nan))}
        if all(_is_nan(reading) for reading in found.values()) and len(reasons) == len(heard) and len(set(reasons.values())) == 1:
            reason = next(iter(reasons.values()))
            if reason is not None:
                self.missing[metric.name] = reason
            return
        for key, reason in reasons.items():
            if reason is not None:
                self.missing[f"{names[key]}/{metric.name}"] = reason

    def _reason(self, metric: Metric, key: Key, found: Mapping[Key, object], known: Mapping[Key, str]) -> str | None:
        if key in known:
            return known[key]
        if key in found:
            return UNDEFINED.get(metric.name) or UNDEFINED_READS.get(metric.reads)
        groups: tuple[str, ...] = ("block readings", "attention readings")
        if metric.reads in GRADIENT_READS:
            groups = ("gradient readings", "parameter gradient readings")
        elif metric.reads in WEIGHT_READS:
            groups = ("weight readings",)
        fault = next((reason for reason in map(self._faults.reason, groups) if reason is not None), None)
        return fault or ABSENT.get(metric.reads) or UNDEFINED.get(metric.name)


def _is_nan(reading: object) -> bool:
    return all(math.isnan(value) for value in (reading if isinstance(reading, tuple) else (reading,)))
