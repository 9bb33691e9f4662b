"""Sequences of different lengths that lie behind each other on one axis, and where each of them begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where the sequences of a packed axis begin, how many tokens each has, and the number of the longest."""

    starts: Int[Tensor, " sequence"]
    lengths: Int[Tensor, " sequence"]
    longest: int

    @classmethod
    def between(cls, offsets: Int[Tensor, " boundary"], longest: Any = None) -> Packing:
        """Sequences that lie between these boundaries, the first of which is 0."""
        offsets = offsets.long()
        lengths = offsets.diff()
        return cls(offsets[:-1], lengths, int(lengths.max()) if longest is None else int(longest))


def is_jagged(tensor: Tensor) -> bool:
    """Whether it is a nested tensor in the jagged layout."""
    return tensor.is_nested and tensor.layout is torch.jagged


def ragged_axis(tensor: Tensor) -> int:
    """The axis of a jagged tensor that has another size in every sequence."""
    return next(axis for axis, size in enumerate(tensor.shape) if not isinstance(size, int))
