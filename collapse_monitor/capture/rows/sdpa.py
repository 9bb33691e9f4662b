"""Rows of `scaled_dot_product_attention`, from the arguments the call got."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from collapse_monitor.capture.rows.choice import INVISIBLE, RowChoice
from collapse_monitor.capture.rows.distribution import observation_of, wide
from collapse_monitor.capture.rows.folding import Folding
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.observation import AttentionObservation


@dataclass(frozen=True, slots=True)
class SdpaCall:
    """The arguments of one call, by name."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SdpaCall:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        scale = given.get("scale")
        return cls(
            given["query"],
            given["key"],
            given["value"],
            given.get("attn_mask"),
            bool(given.get("is_causal", False)),
            1 / math.sqrt(given["query"].shape[-1]) if scale is None else float(scale),
        )


def sdpa_rows(call: SdpaCall, folding: Folding, sampler: Sampler) -> AttentionObservation:
    """softmax(q k^T scale + mask) on sampled rows, in fp32 or better. Called without gradients."""
    query = folding.fold(call.query)
    sequences, heads, queries, _ = query.shape
    choice = RowChoice.of(sampler, sequences, heads, queries, query.device)
    key = choice.take_sequences(fold_keys(call.query, call.key, folding, heads))
    dtype = wide(query.dtype)
    logits = products(choice.take(query).to(dtype), key.to(dtype)) * call.scale
    visible: Tensor | None = None
    hidden: Tensor | None = None
    if call.mask is not None:
        logits, visible = masked(call.mask, logits, folding, call.query, choice, sequences)
    if call.causal:
        earlier, later = choice.earlier(sampler, call.key.shape[-2])
        visible, hidden = (earlier, later) if visible is None else (visible & earlier, None)
    return observation_of(logits, visible, choice, queries, hidden)


def products(
    query: Float[Tensor, "sequence head query dim"], key: Float[Tensor, "sequence head key dim"]
) -> Float[Tensor, "sequence head query key"]:
    """Like `query @ key.mT` in fewer operations."""
    return torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT).view(*query.shape[:3], key.shape[2])


def masked(
    mask: Tensor,
    logits: Float[Tensor, "sequence head query key"],
    folding: Folding,
    query: Tensor,
    choice: RowChoice,
    sequences: int,
) -> tuple[Float[Tensor, "sequence head query key"], Bool[Tensor, "#sequence #head #query #key"]]:
    """The scores with an additive mask added, and which keys the mask shows."""
    rows = choice.take(_fold_mask(mask, folding, query, sequences))
    if rows.dtype is torch.bool:
        return logits, rows
    visible = rows > INVISIBLE
    return logits + torch.where(visible, rows, 0).to(logits.dtype), visible


def fold_keys(query: Tensor, key: Tensor, folding: Folding, heads: int) -> Float[Tensor, "sequence head key dim"]:
    """Keys folded like the queries; grouped ones stand once for each of their queries."""
    if key.ndim > 2 and query.ndim > 2 and query.shape[-3] != key.shape[-3] > 1:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    if key.shape[:-2] != query.shape[:-2]:
        key = key.expand(*query.shape[:-2], *key.shape[-2:])
    folded = folding.fold(key)
    return folded if folded.shape[1] == heads else folded.expand(-1, heads, -1, -1)


def _fold_mask(mask: Tensor, folding: Folding, query: Tensor, sequences: int) -> Tensor:
    """The mask folded like the scores; only where its leading axes broadcast partly is it spread over all of them first."""
    folded = folding.fold(mask) if mask.ndim >= 2 else mask.expand(1, 1, 1, -1)
    if folded.shape[0] not in (1, sequences):
        folded = folding.fold(mask.expand(*query.shape[:-2], *mask.shape[-2:]))
    return folded
