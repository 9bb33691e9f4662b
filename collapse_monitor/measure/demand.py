"""Which metrics are asked for: those computed together from shared intermediates, and those that go through their own function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from collapse_monitor import metrics as catalogue
from collapse_monitor.metrics import Metric, Reads

RANKS = frozenset({"effective_rank", "stable_rank", "participation_ratio"})
TOKENS = RANKS | {
    "token_similarity",
    "relative_residual",
    "composite_residual",
    "residual_norm",
    "massive_activation",
    "nonfinite",
    "dead_tokens",
    "outlier_tokens",
}
TRANSITIONS = frozenset({"contraction", "block_influence"})
ROWS = frozenset(
    {
        "attention_uniformity",
        "effective_keys",
        "dominant_column",
        "sink_mass",
        "dobrushin",
        "head_similarity",
        "layer_similarity",
        "input_dependence",
        "max_logit",
        "logit_std",
    }
)
WEIGHTS = frozenset({"qk_spectral_norm", "value_condition"})
RATIOS = frozenset({"branch_ratio", "qk_to_v_gradient", "qk_to_v_weight_gradient"})
NORMS = frozenset({"gradient_norm", "parameter_gradient_norm"})

TOGETHER: Mapping[int, str] = {
    id(getattr(catalogue, name)): name for name in TOKENS | TRANSITIONS | ROWS | RATIOS | NORMS | WEIGHTS | {"pooled_rank"}
}
"""Identity of a metric function -> its name, for those that this package computes from shared intermediates."""

BLOCK_READS: frozenset[Reads] = frozenset({"hidden", "transition", "gradient", "parameter_gradients", "features"})
"""What is read at blocks; everything else is read at attention sites."""

PER_SITE_READS: frozenset[Reads] = frozenset({"branch", "qv_gradient", "qv_weight_gradient"})
"""What gives one number per attention site in place of one per head."""

WEIGHT_READS: frozenset[Reads] = frozenset({"qk_weights", "value_weights"})
"""What is read at attention sites, but only now and then."""

GRADIENT_READS: frozenset[Reads] = frozenset({"gradient", "parameter_gradients", "qv_gradient", "qv_weight_gradient"})
"""What only backward gives."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The metrics of one window, sorted by how they are computed."""

    metrics: tuple[Metric, ...]
    together: Mapping[str, str]  # metric name -> quantity: the name of the function it stands for
    apart: tuple[Metric, ...]

    @classmethod
    def of(cls, metrics: Iterable[Metric]) -> Demand:
        chosen = tuple(metrics)
        together = {metric.name: TOGETHER[id(metric.compute)] for metric in chosen if id(metric.compute) in TOGETHER}
        return cls(chosen, together, tuple(metric for metric in chosen if metric.name not in together))

    def quantities(self, among: frozenset[str]) -> frozenset[str]:
        """The shared quantities asked for, out of `among`."""
        return among & frozenset(self.together.values())

    def reading(self, reads: Reads) -> tuple[Metric, ...]:
        """The metrics with a function of their own that read this."""
        return tuple(metric for metric in self.apart if metric.reads == reads)

    def asks(self, *reads: Reads) -> bool:
        """Whether any metric, of either kind, reads one of these."""
        return any(metric.reads in reads for metric in self.metrics)

    def of_quantities(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by quantity -> values by metric name."""
        return {name: values[quantity] for name, quantity in self.together.items() if quantity in values}
