"""What is worked out on the device for the rows of attentions: few operations, shared by all row metrics.

At the site, before its tensors go, what needs them whole; when the window closes, for all sites of one shape at once, what needs only
column sums and masks. Means over rows are taken on the host (see `host_rows`): what leaves here is one value per row, head or pair of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from collapse_monitor.measure.precision import gram
from collapse_monitor.metrics.attention import SINK_KEYS
from collapse_monitor.observation import AttentionObservation

COLUMNS = frozenset({"dominant_column", "sink_mass", "dobrushin", "input_dependence"})
"""Quantities that need column sums, or how many keys are seen at all."""

LARGEST_PAIRS = 2**16
"""Distances between rows that leave one attention: with more sequences and heads (windows) fewer, evenly spaced rows are compared."""

MOST_COMPARED = 64
"""Rows of one head that are compared with each other."""


@dataclass(frozen=True, slots=True, eq=False)
class PreviousRows:
    """Rows of the self-attention before, kept until the next one."""

    weights: Float[Tensor, "sequence head query key"]
    same_rows: object
    index: int

    def compares(self, observation: AttentionObservation) -> bool:
        """Whether these rows are the same queries over the same keys. That the masks hold the same is checked on the host."""
        return (
            not observation.cross
            and self.same_rows == observation.same_rows
            and self.weights.shape == observation.weights.shape
            and self.weights.device == observation.weights.device
        )


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """What stays of one attention until the window closes: column sums, and which keys its rows see."""

    sums: Float[Tensor, "sequence head key"]
    visible: Bool[Tensor, "#sequence #head #query key"] | None
    queries: int

    @property
    def bytes(self) -> int:
        return 4 * self.sums.numel() + (0 if self.visible is None else self.visible.numel())

    @property
    def likeness(self) -> object:
        """Equal for attentions that can be stacked."""
        return self.sums.device, self.sums.shape, None if self.visible is None else self.visible.shape, self.queries


def row_moments(
    observation: AttentionObservation, wanted: frozenset[str], previous: PreviousRows | None
) -> tuple[dict[str, Tensor], Columns | None, Float[Tensor, "sequence head query key"]]:
    """Moments by name, what is left for later, and the rows with zeros at invisible keys.

    Rows are taken as the distribution they are: their sum over visible keys is one, or zero where they see nothing.
    """
    weights, visible = observation.weights.float(), observation.visible
    sequences, heads, queries, _ = weights.shape
    moments: dict[str, Tensor] = {}
    if visible is not None:
        zero = weights.new_zeros(())
        weights = torch.where(visible, weights, zero)
        moments["keys"] = visible.sum(-1, keepdim=True, dtype=torch.float32)
    moments["length"] = torch.linalg.vector_norm(weights, dim=-1)
    if wanted & {"attention_uniformity", "input_dependence"}:
        moments["entropy"] = torch.special.entr(weights).sum(-1)
    if "dobrushin" in wanted:
        some = compared_rows(sequences * heads, queries)
        rows = weights if len(some) == queries else weights[:, :, some.start : some.stop : some.step]
        distances = torch.cdist(rows, rows, p=1.0)
        moments["distances"] = distances.amax((-2, -1)) if visible is None else distances
    if "head_similarity" in wanted and heads > 1:
        moments["overlap"] = gram(weights.flatten(-2))
    if "layer_similarity" in wanted and previous is not None and previous.compares(observation):
        moments["with_previous"] = (weights * previous.weights).sum(-1)
    if "input_dependence" in wanted and sequences > 1:
        moments["entropy_of_mean"] = torch.special.entr(weights.mean(0)).sum(-1)
    if wanted & {"max_logit", "logit_std"} and observation.logits is not None:
        logits = observation.logits.float()
        if visible is not None:  # invisible keys stand at the row's mean, where they change neither deviation nor maximum
            mean = torch.where(visible, logits, zero).sum(-1, keepdim=True) / moments["keys"]
            logits = torch.where(visible, logits, mean)
        moments["logit_deviation"] = logits.std(-1, correction=0)
        moments["logit_peak"] = logits.amax(-1)
    return moments, Columns(weights.sum(-2), visible, queries) if wanted & COLUMNS else None, weights


def column_moments(
    sums: Float[Tensor, "site sequence head key"],
    visible: Bool[Tensor, "site ... key"] | None,
    queries: int,
    wanted: frozenset[str],
) -> dict[str, Tensor]:
    """Moments by name, of several attentions of one shape."""
    moments = {"largest_column": sums.amax(-1)}
    if visible is None:
        moments["sink_column"] = sums[..., :SINK_KEYS].amax(-1)
        return moments
    per_query = visible if visible.shape[-2] == queries else visible.expand(*visible.shape[:-2], queries, visible.shape[-1])
    viewers = per_query.sum(-2, dtype=torch.float32)
    # Counts the keys that any row sees. In integers: a floating cumsum raises on CUDA where the user asked for deterministic algorithms.
    order = (viewers > 0).cumsum(-1)
    moments["seen"] = order[..., -1]
    moments["sink"] = (sums * ((order <= SINK_KEYS) / viewers.clamp(min=1))).amax(-1)
    if "input_dependence" in wanted and visible.shape[1] > 1:
        moments["union"] = visible.any(1).sum(-1, dtype=torch.float32)
    return moments


def compared_rows(maps: int, queries: int) -> range:
    """Which of the rows `dobrushin` compares, of so many maps at once."""
    most = max(2, min(queries, MOST_COMPARED, math.isqrt(LARGEST_PAIRS // max(maps, 1))))
    step = -(-queries // most)
    return range((queries - 1) % step // 2, queries, step)
