"""Which tokens are real: the padding mask a model call was given."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from collapse_monitor.capture.tensors import is_plain

_KEEP = ("attention_mask", "token_mask", "decoder_attention_mask", "encoder_attention_mask", "input_mask")
"""Parameters whose true or non-zero entries are real tokens (an additive float mask has no positive entry)."""
_DROP = ("tgt_key_padding_mask", "src_key_padding_mask", "key_padding_mask", "padding_mask", "pad_mask", "memory_key_padding_mask")
"""Parameters whose true entries are padding."""


def token_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Bool[Tensor, "batch token"]]:
    """The [batch, token] masks among the arguments of a call, by parameter name, True at real tokens."""
    given = _named(module, args, kwargs)
    found = {}
    for name in (*_KEEP, *_DROP):
        mask = given.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2 and is_plain(mask):
            found[name] = read_mask(mask.detach(), padding=name in _DROP)
    positions = given.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[1] > 1 and is_plain(positions):
        document = longest_document(positions.detach())
        fitting = [name for name, mask in found.items() if mask.shape == document.shape]
        found.update({name: found[name] & document for name in fitting} or {"position_ids": document})
    return found


class TokenMasks:
    """The masks of the calls that are open: an inner call's mask counts before that of the calls around it, the user's before all."""

    def __init__(self) -> None:
        self.chosen: Bool[Tensor, "batch token"] | None = None
        self.fitted = False
        self._scopes: list[list[Bool[Tensor, "batch token"]]] = []

    def enter(self, depth: int, masks: list[Bool[Tensor, "batch token"]]) -> None:
        """A call at this depth (1 is outermost) was given these masks."""
        self.leave(depth)
        self._scopes.extend([] for _ in range(depth - 1 - len(self._scopes)))
        self._scopes.append(masks)

    def leave(self, depth: int) -> None:
        """The call at this depth has ended."""
        del self._scopes[depth - 1 :]

    def fitting(self, batch: int, length: int) -> Bool[Tensor, "batch token"] | None:
        """The mask for so many sequences and tokens, None where no call has one."""
        if self.chosen is not None and tuple(self.chosen.shape) == (batch, length):
            self.fitted = True
            return self.chosen
        return next((mask for scope in reversed(self._scopes) for mask in scope if tuple(mask.shape) == (batch, length)), None)


def longest_document(positions: Int[Tensor, "batch token"]) -> Bool[Tensor, "batch token"]:
    """Of several documents packed into a row, the longest: a new one begins where the position does not rise.

    A row in which it never rises (all positions zero) says nothing about documents: all of it is one.
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    falls = torch.nn.functional.pad(positions[:, 1:] <= positions[:, :-1], (1, 0))
    start = torch.where(falls, index, 0).cummax(1).values
    last = (index - start).argmax(1, keepdim=True)
    return (start == start.gather(1, last)) | falls[:, 1:].all(1, keepdim=True)


def argument(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor a call was given under this parameter name, by keyword or position."""
    value = _named(module, args, kwargs).get(name)
    return value if isinstance(value, Tensor) else None


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = _parameters(type(module))  # type: ignore[arg-type]  # a class is hashable
    return {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs


def read_mask(mask: Tensor, padding: bool) -> Bool[Tensor, "batch token"]:
    """True at real tokens, from a boolean, 0/1 or additive mask. Decided on the device, without a copy."""
    if mask.is_floating_point() and not padding:
        additive = ~(mask > 0).any()  # all zero: nothing is padding
        valid = torch.where(additive, mask == 0, mask != 0)
    else:
        valid = mask == 0 if padding else mask != 0
    if valid.shape[0] != valid.shape[1]:
        return valid
    # as many sequences as tokens: it may say which tokens see which
    return valid | (valid == torch.ones_like(valid).tril()).all()


@functools.cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()
