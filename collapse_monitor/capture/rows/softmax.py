"""Rows of a written-out softmax: its own output, whatever the order of its axes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from collapse_monitor.capture.rows.choice import INVISIBLE, RowChoice
from collapse_monitor.capture.rows.distribution import wide
from collapse_monitor.capture.rows.folding import Folding
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.observation import AttentionObservation


@dataclass(frozen=True, slots=True)
class MapAxes:
    """Which axis of a materialised map runs over keys and which over queries (None: one query); the rest fold."""

    key: int
    query: int | None
    ndim: int
    folding: Folding
    sinks: tuple[int, int] = (0, 0)  # columns before and after the keys that are attention sinks

    def folded(self, tensor: Tensor) -> Tensor:
        """The map as [sequence, head, query, key]."""
        if tensor.ndim != self.ndim:
            raise ValueError(f"an attention map of {tensor.ndim} axes, {self.ndim} expected")
        if self.key == self.ndim - 1 and self.query == self.ndim - 2:
            return self.folding.fold(tensor)
        rest = [axis for axis in range(tensor.ndim) if axis not in (self.key, self.query)]
        if self.query is None:
            return self.folding.fold(tensor.permute(*rest, self.key).unsqueeze(-2))
        return self.folding.fold(tensor.permute(*rest, self.query, self.key))


def softmax_rows(scores: Tensor, weights: Tensor, axes: MapAxes, sampler: Sampler) -> AttentionObservation:
    """The rows of `weights`, divided by their sum: `weights` may be exp(scores), or lack a column that was cut off after the softmax.

    `scores` are what entered the softmax. Sink columns are taken out before. Called without gradients.
    """
    folded = axes.folded(weights)
    sequences, heads, queries, keys = folded.shape
    choice = RowChoice.of(sampler, sequences, heads, queries, weights.device)
    dtype = wide(weights.dtype)
    logits = choice.take(axes.folded(scores)).to(dtype)
    rows = choice.take(folded).to(dtype)
    before, after = axes.sinks
    sink = None
    if before or after:
        keys -= before + after
        sink = rows[..., :before].sum(-1) + rows[..., before + keys :].sum(-1)
        rows, logits = rows[..., before : before + keys], logits[..., before : before + keys]
    visible = logits > INVISIBLE
    rows = torch.where(visible, rows, 0)
    return AttentionObservation(
        weights=rows / rows.sum(-1, keepdim=True),
        visible=choice.hide_invalid(visible, keys),
        logits=logits,
        sink=sink,
        query_index=choice.rows,
        same_rows=(queries, keys, choice.rows.ndim),
    )
