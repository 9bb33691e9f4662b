"""Which tokens, sequences and query rows are read: stride midpoints, never random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from collapse_monitor.capture.masks import TokenMasks
from collapse_monitor.observation import TokenSample


def midpoints(count: int, wanted: int | None) -> list[int]:
    """At most `wanted` of `count` positions: floor((i + 1/2) count / m), all of them for None.

    >>> midpoints(8, 4)
    [1, 3, 5, 7]
    """
    taken = count if wanted is None else min(count, wanted)
    return [(2 * i + 1) * count // (2 * taken) for i in range(taken)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which axes of a hidden state run over sequences, tokens and features, in this order of meaning."""

    batch: tuple[int, ...]
    token: tuple[int, ...]
    feature: tuple[int, ...]

    def arranged(self, hidden: Tensor) -> Tensor:
        """The tensor as [sequence, token, dim]; a view where the layout allows one."""
        if hidden.ndim != len(self.batch) + len(self.token) + len(self.feature):
            raise ValueError(f"a hidden state of {hidden.ndim} axes does not fit the layout {self}")
        shape = [math.prod(hidden.shape[axis] for axis in axes) for axes in (self.batch, self.token, self.feature)]
        return hidden.permute(*self.batch, *self.token, *self.feature).reshape(shape)


def default_layout(ndim: int) -> Layout:
    """Batch first, features last, tokens between; two axes are the tokens of one sequence."""
    if ndim == 2:
        return Layout((), (0,), (1,))
    return Layout((0,), tuple(range(1, ndim - 1)), (ndim - 1,))


def counted(sample: TokenSample) -> Float[Tensor, "sequence token dim"]:
    """The sample with zeros where it has no valid token, for norms."""
    return sample.hidden if sample.mask is None else sample.hidden.masked_fill(~sample.mask[..., None], 0)


def as_added(branch: TokenSample, stream: TokenSample, alpha: float, side: int, in_place: bool) -> tuple[TokenSample, TokenSample]:
    """The operands as an addition used them: its second one times `alpha`, and the first before it was overwritten."""
    if alpha != 1:
        scaled, kept = (branch, stream) if side == 1 else (stream, branch)
        scaled = TokenSample(scaled.hidden * alpha, scaled.mask)
        branch, stream = (scaled, kept) if side == 1 else (kept, scaled)
    if in_place:
        stream = TokenSample(stream.hidden - branch.hidden, stream.mask)
    return branch, stream


@dataclass(slots=True, eq=False)
class Sampler:
    """Picks samples for one window; index tensors are made once per shape. None means all.

    Raises:
        ValueError: a limit is not a positive whole number.
    """

    max_sequences: int | None = 4
    max_tokens: int | None = 64
    max_queries: int | None = 16
    masks: TokenMasks = field(default_factory=TokenMasks)
    _indices: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    _positions_of: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_tokens", "max_queries"):
            limit = getattr(self, name)
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
                raise ValueError(f"{name}={limit!r}: give a number of at least 1, or None to read all of them")

    def begin(self) -> None:
        """Forget the masks of the last window; indices per shape are kept."""
        self.masks = TokenMasks()
        self._positions_of.clear()

    def mask_for(self, batch: int, length: int) -> Bool[Tensor, "batch token"] | None:
        """The token mask of the model call that fits this many sequences and tokens."""
        return self.masks.fitting(batch, length)

    def sequences(self, count: int, device: torch.device) -> Int[Tensor, " sequence"]:
        return self._index(count, self.max_sequences, device)

    def rows(self, count: int, device: torch.device) -> Int[Tensor, " query"]:
        return self._index(count, self.max_queries, device)

    def tokens(self, hidden: Tensor, layout: Layout) -> TokenSample:
        """Sampled tokens of sampled sequences, copied: the model may overwrite its own tensor later."""
        arranged = layout.arranged(hidden.detach())
        batch, length, _ = arranged.shape
        chosen = self.sequences(batch, hidden.device)
        mask = self.mask_for(batch, length)
        if mask is None:
            return TokenSample(arranged.index_select(0, chosen).index_select(1, self._index(length, self.max_tokens, hidden.device)))
        positions, valid = self._positions(mask, length, self.max_tokens)
        picked = arranged.index_select(0, chosen)
        return TokenSample(picked.gather(1, positions[..., None].expand(-1, -1, picked.shape[-1])), valid)

    def valid_rows(self, batch: int, length: int) -> tuple[Int[Tensor, "sequence query"], Bool[Tensor, "sequence query"]] | None:
        """Query rows at valid tokens, per sampled sequence, where the call's token mask fits; else None."""
        mask = self.mask_for(batch, length)
        return None if mask is None else self._positions(mask, length, self.max_queries)

    def _positions(self, mask: Bool[Tensor, "batch token"], length: int, wanted: int | None) -> tuple[Tensor, Tensor]:
        """Stride midpoints over the valid positions of each sampled sequence, and which of them exist. No copy to the host."""
        key = (id(mask), wanted)
        if key not in self._positions_of:
            chosen = mask.index_select(0, self.sequences(mask.shape[0], mask.device))
            count = chosen.sum(1, keepdim=True)
            taken = length if wanted is None else min(length, wanted)
            step = torch.arange(taken, device=mask.device)
            fewer = count.clamp(min=1, max=taken)
            nth = ((2 * step + 1) * count).div(2 * fewer, rounding_mode="floor").minimum((count - 1).clamp(min=0))
            order = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
            self._positions_of[key] = order.gather(1, nth), step < count
        return self._positions_of[key]

    def _index(self, count: int, wanted: int | None, device: torch.device) -> Tensor:
        key = (count, wanted, device)
        if key not in self._indices:
            self._indices[key] = torch.tensor(midpoints(count, wanted), dtype=torch.long, device=device)
        return self._indices[key]
