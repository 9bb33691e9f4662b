"""Which tokens are real: the padding mask a model call was given."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from collapse_monitor.capture.tensors import is_plain

_KEEP = ("attention_mask", "token_mask", "decoder_attention_mask", "encoder_attention_mask", "input_mask")
"""Parameters whose true or non-zero entries are real tokens (an additive float mask is recognised by its negative entries)."""
_DROP = ("src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask", "key_padding_mask", "padding_mask", "pad_mask")
"""Parameters whose true entries are padding."""


def token_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Bool[Tensor, "batch token"]]:
    """The [batch, token] masks among the arguments of a call, by parameter name, True at real tokens."""
    given = _named(module, args, kwargs)
    found = {}
    for name in (*_KEEP, *_DROP):
        mask = given.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2 and is_plain(mask):
            found[name] = read_mask(mask.detach(), padding=name in _DROP)
    return found


def argument(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor a call was given under this parameter name, by keyword or position."""
    value = _named(module, args, kwargs).get(name)
    return value if isinstance(value, Tensor) else None


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = _parameters(type(module))  # type: ignore[arg-type]  # a class is hashable
    return {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs


def read_mask(mask: Tensor, padding: bool) -> Bool[Tensor, "batch token"]:
    """True at real tokens, from a boolean, 0/1 or additive mask. Decided on the device, without a copy."""
    if mask.is_floating_point():
        additive = (mask < 0).any()
        return torch.where(additive | padding, mask == 0, mask != 0)
    return mask == 0 if padding else mask != 0


@functools.cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()
