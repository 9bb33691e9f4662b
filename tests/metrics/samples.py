"""Deterministic tensors of the kind each metric reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from collapse_monitor import metrics

TOKENS = [metric for metric in metrics.DEFAULT_METRICS if metric.reads == "hidden"]
TRANSITIONS = [metric for metric in metrics.DEFAULT_METRICS if metric.reads == "transition"]
ROWS = [metric for metric in metrics.DEFAULT_METRICS if metric.reads in ("attention", "logits")]
SHARES = ("nonfinite", "dead_tokens", "outlier_tokens")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hidden_states(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape[:-2], 1, shape[-1], seed=seed) + normal(*shape, seed=seed + 1)


def maps(*shape: int, seed: int = 0) -> Tensor:
    return (2 * normal(*shape, seed=seed)).softmax(-1)


def arguments(metric: metrics.Metric, seed: int = 0) -> list[Tensor]:
    """Float32 tensors of the kind a metric reads, without a mask."""
    build: dict[str, Callable[[], list[Tensor]]] = {
        "hidden": lambda: [hidden_states(2, 6, 4, seed=seed)],
        "transition": lambda: [hidden_states(2, 6, 4, seed=seed), hidden_states(2, 6, 4, seed=seed + 9)],
        "branch": lambda: [normal(2, 6, 4, seed=seed), normal(2, 6, 4, seed=seed + 9)],
        "attention": lambda: [maps(2, 3, 4, 5, seed=seed)],
        "logits": lambda: [normal(2, 3, 4, 5, seed=seed)],
        "attention_pair": lambda: [maps(2, 3, 4, 5, seed=seed), maps(2, 3, 4, 5, seed=seed + 9)],
        "attention_batch": lambda: [maps(3, 2, 4, 5, seed=seed)],
        "gradient": lambda: [normal(2, 6, 4, seed=seed)],
        "qv_gradient": lambda: [normal(2, 6, 4, seed=seed), normal(2, 6, 4, seed=seed + 9)],
        "parameter_gradients": lambda: [normal(6, 4, seed=seed), normal(4, seed=seed + 9)],
        "qv_weight_gradient": lambda: [normal(6, 4, seed=seed), normal(6, 4, seed=seed + 9)],
        "features": lambda: [hidden_states(7, 4, seed=seed)],
        "qk_weights": lambda: [normal(2, 3, 5, seed=seed), normal(2, 3, 5, seed=seed + 9)],
        "value_weights": lambda: [normal(2, 3, 5, seed=seed)],
    }
    return [tensor.float() for tensor in build[metric.reads]()]
