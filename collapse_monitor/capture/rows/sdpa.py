"""Rows of `scaled_dot_product_attention`, from the arguments the call got."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
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
    grouped: bool

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
            bool(given.get("enable_gqa", False)),
        )


def sdpa_rows(call: SdpaCall, folding: Folding, sampler: Sampler) -> AttentionObservation:
    """softmax(q k^T scale + mask) on sampled rows, in fp32 or better. Called without gradients."""
    query = folding.fold(call.query)
    sequences, heads, queries, _ = query.shape
    choice = RowChoice.of(sampler, sequences, heads, queries, query.device)
    key = choice.take_sequences(_fold_keys(call, folding, heads))
    dtype = wide(query.dtype)
    logits = _products(choice.take(query).to(dtype), key.to(dtype)) * call.scale
    visible: Tensor | None = None
    hidden: Tensor | None = None
    if call.mask is not None:
        mask = choice.take(_fold_mask(call.mask, folding, call.query, sequences))
        if mask.dtype is torch.bool:
            visible = mask
        else:
            visible = mask > INVISIBLE
            logits = logits + torch.where(visible, mask, 0).to(dtype)
    if call.causal:
        earlier, later = choice.earlier(sampler, call.key.shape[-2])
        visible, hidden = (earlier, later) if visible is None else (visible & earlier, None)
    return observation_of(logits, visible, choice, queries, hidden)


def _products(
    query: Float[Tensor, "sequence head query dim"], key: Float[Tensor, "sequence head key dim"]
) -> Float[Tensor, "sequence head query key"]:
    """Like `query @ key.mT` in fewer operations."""
    return torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT).view(*query.shape[:3], key.shape[2])


def _fold_keys(call: SdpaCall, folding: Folding, heads: int) -> Tensor:
    key = call.key
    if call.grouped and key.shape[-3] != call.query.shape[-3]:
        key = key.repeat_interleave(call.query.shape[-3] // key.shape[-3], dim=-3)
    if key.shape[:-2] != call.query.shape[:-2]:
        key = key.expand(*call.query.shape[:-2], *key.shape[-2:])
    folded = folding.fold(key)
    return folded if folded.shape[1] == heads else folded.expand(-1, heads, -1, -1)


def _fold_mask(mask: Tensor, folding: Folding, query: Tensor, sequences: int) -> Tensor:
    """The mask folded like the scores; only where its leading axes broadcast partly is it spread over all of them first."""
    folded = folding.fold(mask) if mask.ndim >= 2 else mask.expand(1, 1, 1, -1)
    if folded.shape[0] not in (1, sequences):
        folded = folding.fold(mask.expand(*query.shape[:-2], *mask.shape[-2:]))
    return folded
