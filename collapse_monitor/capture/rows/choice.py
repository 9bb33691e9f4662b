"""Which sequences and query rows of a folded attention tensor are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor

from collapse_monitor.capture.sampling import Itself, Sampler

INVISIBLE = -9999.0
"""Additive mask values and masked scores at or below this count as invisible: models mask with -1e4, -1e9, finfo.min or -inf."""


@dataclass(frozen=True, slots=True, eq=False)
class RowChoice:
    """Sequences to read, and their query rows: one list for all of them, or one per sequence where a token mask says so.

    Made once for all attentions of a window that have the same shape: on an accelerator every operation counts.
    """

    sequences: Int[Tensor, " sequence"]
    rows: Int[Tensor, " query"] | Int[Tensor, "sequence query"]
    valid: Bool[Tensor, "sequence query"] | None
    whole_batch: bool
    picks: tuple[Tensor, Tensor, Tensor]  # sequences, heads and rows as broadcasting indices
    first: Tensor  # the index of an axis of size 1
    shown: Bool[Tensor, "sequence 1 query 1"] | None = None  # `valid`, beside a map

    @classmethod
    def of(cls, sampler: Sampler, sequences: int, heads: int, queries: int, device: torch.device) -> RowChoice:
        valid = sampler.valid_rows(sequences, queries)
        key = ("rows", sampler.chunk, sequences, heads, queries, device, None if valid is None else id(valid[0]))
        return sampler.kept(key, lambda: cls._made(sampler, sequences, heads, queries, device, valid), for_window=valid is not None)

    @classmethod
    def _made(
        cls, sampler: Sampler, sequences: int, heads: int, queries: int, device: torch.device, valid: tuple[Tensor, Tensor] | None
    ) -> RowChoice:
        chosen = sampler.sequences(sequences, device)
        rows, mask = (sampler.rows(queries, device), None) if valid is None else valid
        picks = (
            rearrange(chosen, "sequence -> sequence 1 1"),
            rearrange(torch.arange(heads, device=device), "head -> 1 head 1"),
            rearrange(rows, "query -> 1 1 query") if rows.ndim == 1 else rearrange(rows, "sequence query -> sequence 1 query"),
        )
        shown = None if mask is None else rearrange(mask, "sequence query -> sequence 1 query 1")
        return cls(chosen, rows, mask, len(chosen) == sequences, picks, torch.zeros(1, 1, 1, dtype=torch.long, device=device), shown)

    def take(self, folded: Tensor) -> Tensor:
        """[sequence, head, row, column] -> the chosen sequences and rows, a copy; axes of size 1 are broadcast and stay."""
        index = tuple(self.first if size == 1 else pick for size, pick in zip(folded.shape, self.picks, strict=False))
        return folded[index]

    def take_sequences(self, folded: Tensor) -> Tensor:
        return folded if folded.shape[0] == 1 or self.whole_batch else folded.index_select(0, self.sequences)

    def hide_invalid(self, visible: Tensor | None, keys: int) -> Tensor | None:
        """Rows that belong to no valid query see no key."""
        if self.shown is None:
            return visible
        return self.shown.expand(-1, -1, -1, keys) if visible is None else visible & self.shown

    def earlier(self, sampler: Sampler, keys: int) -> tuple[Tensor, Tensor]:
        """Which keys a causal call shows to these rows, and which it hides; aligned at the first key."""

        def made() -> tuple[Tensor, Tensor]:
            positions = torch.arange(keys, device=self.rows.device)
            visible = positions <= self.picks[2][..., None]
            return visible, ~visible

        return sampler.kept(("earlier", Itself(self), keys), made, for_window=True)
