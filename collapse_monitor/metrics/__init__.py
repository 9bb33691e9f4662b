"""Pure functions of tensors that measure collapse, and the catalogue that describes them.

Conventions of all functions: a mask is True at valid tokens and visible keys; masked values may be NaN and never enter a number or a
gradient, so a mask equals deletion. Undefined cases (fewer than two valid tokens, a zero matrix, no row with two visible keys, NaN or Inf
among the valid values) are nan, never an error. Maths runs in float64 with autocast off; the result is float32, or float64 for float64.
"""

from __future__ import annotations

from collapse_monitor.metrics.attention import (
    attention_uniformity,
    dobrushin,
    dominant_column,
    effective_keys,
    head_similarity,
    input_dependence,
    layer_similarity,
    sink_mass,
)
from collapse_monitor.metrics.catalogue import DEFAULT_METRICS, GRADIENT_READINGS, select, validate
from collapse_monitor.metrics.gradients import gradient_norm, parameter_gradient_norm, qk_to_v_gradient, qk_to_v_weight_gradient
from collapse_monitor.metrics.logits import logit_std, max_logit
from collapse_monitor.metrics.metric import Metric, Reads
from collapse_monitor.metrics.ranks import effective_rank, participation_ratio, pooled_rank, stable_rank
from collapse_monitor.metrics.tokens import (
    composite_residual,
    dead_tokens,
    find_outliers,
    massive_activation,
    nonfinite,
    outlier_tokens,
    relative_residual,
    residual_norm,
    token_similarity,
)
from collapse_monitor.metrics.transitions import block_influence, branch_ratio, contraction
from collapse_monitor.metrics.weights import qk_spectral_norm, value_condition

__all__ = [
    "DEFAULT_METRICS",
    "GRADIENT_READINGS",
    "Metric",
    "Reads",
    "attention_uniformity",
    "block_influence",
    "branch_ratio",
    "composite_residual",
    "contraction",
    "dead_tokens",
    "dobrushin",
    "dominant_column",
    "effective_keys",
    "effective_rank",
    "find_outliers",
    "gradient_norm",
    "head_similarity",
    "input_dependence",
    "layer_similarity",
    "logit_std",
    "massive_activation",
    "max_logit",
    "nonfinite",
    "outlier_tokens",
    "parameter_gradient_norm",
    "participation_ratio",
    "pooled_rank",
    "qk_spectral_norm",
    "qk_to_v_gradient",
    "qk_to_v_weight_gradient",
    "relative_residual",
    "residual_norm",
    "select",
    "sink_mass",
    "stable_rank",
    "token_similarity",
    "validate",
    "value_condition",
]
