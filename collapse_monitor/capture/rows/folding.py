"""Bringing attention tensors of any layout to [sequence, head, query, key or dim]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Factor = tuple[Literal["sequence", "head"], int]
"""What part of a leading axis means; a size of -1 stands for whatever is left of that axis."""


@dataclass(frozen=True, slots=True)
class Folding:
    """For every leading axis (all but the last two) what it is made of, outermost part first."""

    leading: tuple[tuple[Factor, ...], ...]

    @property
    def heads(self) -> int | None:
        """How many heads the leading axes hold; None if one head axis has no fixed size."""
        sizes = [size for axis in self.leading for role, size in axis if role == "head"]
        return None if -1 in sizes else math.prod(sizes)

    def fold(self, tensor: Tensor) -> Tensor:
        """Reshape [*leading, row, column] to [sequence, head, row, column]; leading axes of size 1 stay 1 (broadcast).

        Raises:
            ValueError: the tensor does not have these leading axes.
        """
        if self.leading == ((("sequence", -1),), (("head", tensor.shape[1] if tensor.ndim == 4 else -1),)) and tensor.ndim == 4:
            return tensor
        missing = len(self.leading) - (tensor.ndim - 2)
        if missing < 0:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} does not have {len(self.leading)} leading axes")
        shape = (1,) * missing + tuple(tensor.shape)
        roles: list[str] = []
        sizes: list[int] = []
        for size, factors in zip(shape[:-2], self.leading, strict=True):
            roles += [role for role, _ in factors]
            sizes += _factor_sizes(size, factors)
        order = [axis for axis, role in enumerate(roles) if role == "sequence"] + [
            axis for axis, role in enumerate(roles) if role == "head"
        ]
        sequences = math.prod(size for size, role in zip(sizes, roles, strict=True) if role == "sequence")
        heads = math.prod(size for size, role in zip(sizes, roles, strict=True) if role == "head")
        n = len(sizes)
        return tensor.reshape(*sizes, *shape[-2:]).permute(*order, n, n + 1).reshape(sequences, heads, *shape[-2:])


def _factor_sizes(size: int, factors: tuple[Factor, ...]) -> list[int]:
    if size == 1:
        return [1] * len(factors)
    known = math.prod(part for _, part in factors if part != -1)
    sizes = [size // known if part == -1 else part for _, part in factors]
    if math.prod(sizes) != size:
        raise ValueError(f"a leading axis of size {size} does not split into {factors}")
    return sizes


def default_folding(leading: int) -> Folding:
    """Without other knowledge: the last of several leading axes is the heads, a single one the sequences."""
    if leading <= 1:
        return Folding(((("sequence", -1),),) * leading)
    return Folding(((("sequence", -1),),) * (leading - 1) + ((("head", -1),),))
