"""Rows of `flex_attention`: the call's own score and mask functions, applied to sampled rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from collapse_monitor.capture.rows.choice import RowChoice
from collapse_monitor.capture.rows.distribution import observation_of, wide
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.observation import AttentionObservation


@dataclass(frozen=True, slots=True)
class FlexCall:
    """The arguments of one call of the operator behind `flex_attention`: q and k are [sequence, head, token, dim]."""

    query: Tensor
    key: Tensor
    value: Tensor
    score: Callable[..., Tensor] | None
    mask: Callable[..., Tensor] | None
    scale: float

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlexCall:
        names = ("query", "key", "value", "score_mod", "block_mask", "scale")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        block_mask = given.get("block_mask")
        mask = block_mask[-1] if isinstance(block_mask, tuple) and block_mask else getattr(block_mask, "mask_mod", None)
        return cls(given["query"], given["key"], given["value"], given.get("score_mod"), mask, float(given["scale"]))


def flex_rows(call: FlexCall, sampler: Sampler) -> AttentionObservation:
    """softmax over the keys the mask function allows of score(q k^T scale), in fp32 or better. Called without gradients."""
    query, key = call.query, call.key
    batch, heads, queries, _ = query.shape
    choice = RowChoice.of(sampler, batch, heads, queries, query.device)
    if key.shape[1] != heads:
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
    if key.shape[0] != batch:
        key = key.expand(batch, -1, -1, -1)
    dtype = wide(query.dtype)
    logits = torch.matmul(choice.take(query).to(dtype), choice.take_sequences(key).to(dtype).mT) * call.scale
    index = _indices(choice, heads, key.shape[2])
    if call.score is not None:
        logits = _apply(call.score, (logits, *index), logits.shape).to(dtype)
    visible = None
    if call.mask is not None:
        visible = _apply(call.mask, index, logits.shape).bool()
    return observation_of(logits, visible, choice, queries)


def _indices(choice: RowChoice, heads: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = choice.sequences.device
    rows = choice.rows if choice.rows.ndim == 2 else choice.rows[None]
    return (
        rearrange(choice.sequences, "sequence -> sequence 1 1 1"),
        rearrange(torch.arange(heads, device=device), "head -> 1 head 1 1"),
        rearrange(rows, "sequence query -> sequence 1 query 1"),
        torch.arange(keys, device=device),
    )


def _apply(function: Callable[..., Tensor], arguments: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """These functions are written for single elements; most broadcast, the others are mapped element by element."""
    try:
        return function(*arguments).expand(shape)
    except Exception:
        spread = [argument.expand(shape) for argument in arguments]
        mapped = function
        for _ in range(len(shape)):
            mapped = torch.vmap(mapped)
        return mapped(*spread)
