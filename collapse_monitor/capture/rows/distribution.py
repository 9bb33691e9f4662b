"""From logits to the observation: the softmax over visible keys, in fp32 or better."""

from __future__ import annotations

import math

from jaxtyping import Bool, Float
from torch import Tensor

from collapse_monitor.capture.rows.choice import RowChoice
from collapse_monitor.observation import AttentionObservation


def observation_of(
    logits: Float[Tensor, "sequence head query key"],
    visible: Bool[Tensor, "#sequence #head #query key"] | None,
    choice: RowChoice,
    queries: int,
) -> AttentionObservation:
    """The distribution of sampled rows from what enters the softmax; a row that sees no key is nan and marked invisible."""
    masked = logits if visible is None else logits.masked_fill(~visible, -math.inf)
    keys = logits.shape[-1]
    return AttentionObservation(
        weights=masked.softmax(-1),
        visible=choice.hide_invalid(visible, keys),
        logits=logits,
        query_index=choice.rows,
        same_rows=(queries, keys, choice.rows.ndim),
    )
