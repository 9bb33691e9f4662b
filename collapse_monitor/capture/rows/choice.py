"""Which sequences and query rows of a folded attention tensor are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor

from collapse_monitor.capture.sampling import Sampler

INVISIBLE = -9999.0
"""Additive mask values and masked scores at or below this count as invisible: models mask with -1e4, -1e9, finfo.min or -inf."""


@dataclass(frozen=True, slots=True, eq=False)
class RowChoice:
    """Sequences to read, and their query rows: one list for all of them, or one per sequence where a token mask says so."""

    sequences: Int[Tensor, " sequence"]
    rows: Int[Tensor, " query"] | Int[Tensor, "sequence query"]
    valid: Bool[Tensor, "sequence query"] | None = None

    @classmethod
    def of(cls, sampler: Sampler, sequences: int, queries: int, device: torch.device) -> RowChoice:
        picked = sampler.sequences(sequences, device)
        valid = sampler.valid_rows(sequences, queries)
        if valid is None:
            return cls(picked, sampler.rows(queries, device))
        return cls(picked, valid[0], valid[1])

    def take(self, folded: Tensor) -> Tensor:
        """[sequence, head, row, column] -> the chosen sequences and rows; axes of size 1 are broadcast and stay."""
        if folded.shape[0] > 1:
            folded = folded.index_select(0, self.sequences)
        if folded.shape[2] == 1:
            return folded
        if self.rows.ndim == 1:
            return folded.index_select(2, self.rows)
        sequence = self.rows.shape[0]
        folded = folded.expand(sequence, -1, -1, -1)
        index = rearrange(self.rows, "sequence query -> sequence 1 query 1").expand(-1, folded.shape[1], -1, folded.shape[3])
        return folded.gather(2, index)

    def take_sequences(self, folded: Tensor) -> Tensor:
        return folded.index_select(0, self.sequences) if folded.shape[0] > 1 else folded

    def hide_invalid(self, visible: Tensor | None, keys: int) -> Tensor | None:
        """Rows that belong to no valid query see no key."""
        if self.valid is None:
            return visible
        valid = rearrange(self.valid, "sequence query -> sequence 1 query 1")
        return valid.expand(-1, -1, -1, keys) if visible is None else visible & valid
