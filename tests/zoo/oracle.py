"""The maps a model really uses, caught where it computes them and worked out in plain double precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F


@contextmanager
def maps_of_forward() -> Iterator[list[Tensor]]:
    """Collects, in order, every [..., query, key] map of the calls inside: kernels worked out again, softmax and exp as they came out."""
    maps: list[Tensor] = []
    kernel, exp = F.scaled_dot_product_attention, torch.exp

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        maps.append(attention_map(*args, **kwargs))
        return kernel(*args, **kwargs)

    def softmax_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def normalise(source: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
            result = function(source, dim, *args, **kwargs)
            if result.ndim >= 2 and dim is not None:
                maps.append(result.detach().double().movedim(dim, -1))
            return result

        return normalise

    def exp_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def exponential(source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = function(source, *args, **kwargs)
            if result.ndim >= 3:
                maps.append(result.detach().double() / result.detach().double().sum(-1, keepdim=True))
            return result

        return exponential

    patches = (
        patch.object(F, "scaled_dot_product_attention", attend),
        patch.object(F, "softmax", softmax_of(F.softmax)),
        patch.object(torch, "softmax", softmax_of(torch.softmax)),
        patch.object(Tensor, "softmax", softmax_of(Tensor.softmax)),
        patch.object(torch, "exp", exp_of(exp)),
        patch.object(Tensor, "exp", exp_of(Tensor.exp)),
    )
    for one in patches:
        one.start()
    try:
        yield maps
    finally:
        for one in patches:
            one.stop()


def attention_map(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What `scaled_dot_product_attention` multiplies the values with, before dropout, as its documentation says, row by row."""
    query, key = query.detach().double(), key.detach().double()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = torch.einsum("...id,...jd->...ij", query, key) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.detach().double()
    if is_causal:
        for row in range(scores.shape[-2]):
            scores[..., row, row + 1 :] = -math.inf
    weights = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=-1e300))
    return weights / weights.sum(-1, keepdim=True)


def distance_of_rows(rows: Tensor, full: Tensor) -> float:
    """How far the farthest of some rows [row, key] is from the nearest row of a map that may have columns (sinks) beside these keys."""
    keys, columns = rows.shape[-1], full.shape[-1]
    if not len(rows) or columns < keys or columns > keys + 4:
        return math.inf
    nearest = []
    for start in range(columns - keys + 1):
        part = full[..., start : start + keys].reshape(-1, keys)
        part = part / part.sum(-1, keepdim=True)
        part = part[part.isfinite().all(-1)]
        if len(part):
            nearest.append(float(torch.cdist(rows.double(), part, p=math.inf).amin(-1).amax()))
    return min(nearest, default=math.inf)
