"""From logits to the observation: the softmax over visible keys, in fp32 or better."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from collapse_monitor.capture.rows.choice import RowChoice
from collapse_monitor.observation import AttentionObservation


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision in which a distribution over keys is worked out: fp32, or fp64 where the model uses that."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def observation_of(
    logits: Float[Tensor, "sequence head query key"],
    visible: Bool[Tensor, "#sequence #head #query key"] | None,
    choice: RowChoice,
    queries: int,
    hidden: Bool[Tensor, "#sequence #head #query key"] | None = None,
) -> AttentionObservation:
    """The distribution of sampled rows from what enters the softmax; a row that sees no key is nan and marked invisible.

    `hidden` is the opposite of `visible`, if it is at hand.
    """
    masked = logits if visible is None else logits.masked_fill(~visible if hidden is None else hidden, -math.inf)
    keys = logits.shape[-1]
    return AttentionObservation(
        weights=masked.softmax(-1),
        visible=choice.hide_invalid(visible, keys),
        logits=logits,
        query_index=choice.rows,
        same_rows=(queries, keys, choice.rows.ndim),
    )
