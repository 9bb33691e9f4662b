"""Which tokens, sequences and query rows are read: stride midpoints, never random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from collapse_monitor.capture.masks import TokenMasks
from collapse_monitor.capture.packing import Packing, is_jagged, ragged_axis
from collapse_monitor.observation import TokenSample

T = TypeVar("T")

_MOST_KEPT = 512
"""Indices are small, but a run may see a new length on every step."""


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
        if (self.batch, self.token, self.feature) == ((0,), (1,), (2,)):
            return hidden
        shape = [math.prod(hidden.shape[axis] for axis in axes) for axes in (self.batch, self.token, self.feature)]
        return hidden.permute(*self.batch, *self.token, *self.feature).reshape(shape)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A call that works out `length` of `total` queries, from number `start` on.

    `keys`: how many there are, where some calls are given the first of them only.
    """

    start: int
    length: int
    total: int
    keys: int = 0


def default_layout(ndim: int) -> Layout:
    """Batch first, features last, tokens between; two axes are the tokens of one sequence."""
    if ndim == 2:
        return Layout((), (0,), (1,))
    return Layout((0,), tuple(range(1, ndim - 1)), (ndim - 1,))


def as_added(branch: TokenSample, stream: TokenSample, alpha: float, side: int, in_place: bool) -> tuple[TokenSample, TokenSample]:
    """The operands as an addition used them: its second one times `alpha`, and the first before it was overwritten."""
    if alpha != 1:
        scaled, kept = (branch, stream) if side == 1 else (stream, branch)
        scaled = TokenSample(scaled.hidden * alpha, scaled.mask)
        branch, stream = (scaled, kept) if side == 1 else (kept, scaled)
    if in_place:
        stream = TokenSample(stream.hidden - branch.hidden, stream.mask)
    return branch, stream


def _spread(count: Int[Tensor, "sequence 1"], taken: int) -> tuple[Int[Tensor, "sequence row"], Bool[Tensor, "sequence row"]]:
    """At most `taken` stride midpoints of so many positions, for every sequence, and which of them exist."""
    step = torch.arange(taken, device=count.device)
    fewer = count.clamp(min=1, max=taken)
    nth = ((2 * step + 1) * count).div(2 * fewer, rounding_mode="floor").minimum((count - 1).clamp(min=0))
    return nth, step < count


class Itself:
    """Part of a key that means this very object, and keeps it: no other one can come to its address."""

    __slots__ = ("_object",)

    def __init__(self, thing: object) -> None:
        self._object = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other._object is self._object

    def __hash__(self) -> int:
        return id(self._object)


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
    chunk: Chunk | None = None  # rows are chosen among the queries of all chunks, and read where this one holds them
    _kept: dict[tuple[object, ...], Any] = field(default_factory=dict)
    _kept_in_window: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_sequences", "max_tokens", "max_queries"):
            limit = getattr(self, name)
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
                raise ValueError(f"{name}={limit!r}: give a number of at least 1, or None to read all of them")

    def begin(self) -> None:
        """Forget the masks of the last window and what was made of them; indices per shape are kept."""
        self.masks = TokenMasks()
        self._kept_in_window.clear()
        if len(self._kept) > _MOST_KEPT:
            self._kept.clear()

    def kept(self, key: tuple[object, ...], make: Callable[[], T], for_window: bool = False) -> T:
        """What `make` gives, made once for a key: as long as shapes repeat, or for one window."""
        kept = self._kept_in_window if for_window else self._kept
        if key not in kept:
            kept[key] = make()
        return kept[key]

    def mask_for(self, batch: int, length: int) -> Bool[Tensor, "batch token"] | None:
        """The token mask of the model call that fits this many sequences and tokens."""
        return self.masks.fitting(batch, length)

    def sequences(self, count: int, device: torch.device) -> Int[Tensor, " sequence"]:
        return self._index(count, self.max_sequences, device)

    def rows(self, count: int, device: torch.device) -> Int[Tensor, " query"]:
        if self.chunk is None:
            return self._index(count, self.max_queries, device)
        key = ("rows of a chunk", self.chunk, count, self.max_queries, device)
        return self.kept(key, lambda: torch.tensor(self.rows_of_chunk(count), dtype=torch.long, device=device))

    def of_chunk(self, chunk: Chunk) -> Sampler:
        """The same choice, for one of several calls that share the queries."""
        return replace(self, chunk=chunk)

    def rows_of_chunk(self, count: int) -> list[int]:
        """Of the rows chosen among the queries of all chunks those that are among the `count` queries of this one."""
        chunk = self.chunk or Chunk(0, count, count)
        return [row - chunk.start for row in midpoints(chunk.total, self.max_queries) if chunk.start <= row < chunk.start + count]

    def tokens(self, hidden: Tensor, layout: Layout) -> TokenSample:
        """Sampled tokens of sampled sequences, copied: the model may overwrite its own tensor later."""
        if hidden.is_nested:
            return self._tokens_of_jagged(hidden.detach())
        arranged = layout.arranged(hidden.detach() if torch.is_grad_enabled() else hidden)
        batch, length, _ = arranged.shape
        mask = self.mask_for(batch, length)
        sequences = self.kept(("column", batch, hidden.device), lambda: self.sequences(batch, hidden.device)[:, None])
        if mask is None:
            return TokenSample(arranged[sequences, self._index(length, self.max_tokens, hidden.device)])
        positions, valid = self._positions(mask, length, self.max_tokens)
        return TokenSample(arranged[sequences, positions], valid)

    def _tokens_of_jagged(self, hidden: Tensor) -> TokenSample:
        if not is_jagged(hidden) or hidden.ndim != 3 or ragged_axis(hidden) != 1:
            raise ValueError("a nested tensor that is not [sequence, ragged token, dim]")
        values: Tensor = hidden.values()
        positions, _, valid = self.packed(self.packing_of(hidden), self.max_tokens)
        return TokenSample(values[positions.clamp(max=len(values) - 1)], valid)

    def packing_of(self, tensor: Tensor) -> Packing:
        """How the sequences of a jagged tensor lie on its values' ragged axis."""
        jagged: Any = tensor
        offsets, lengths = jagged.offsets(), jagged.lengths()

        def made() -> Packing:
            packing = Packing.between(offsets, getattr(jagged, "_maybe_max_seqlen", None))
            return packing if lengths is None else Packing(packing.starts, lengths.long(), packing.longest)

        return self.kept(("jagged", Itself(offsets), Itself(lengths)), made, for_window=True)

    def packing_between(self, offsets: Tensor, longest: object) -> Packing:
        """Sequences that lie between these boundaries, the longest of which has so many tokens (None: to be found out)."""
        return self.kept(("offsets", Itself(offsets)), lambda: Packing.between(offsets, longest), for_window=True)

    def packed(
        self, packing: Packing, wanted: int | None
    ) -> tuple[Int[Tensor, "sequence row"], Int[Tensor, "sequence row"], Bool[Tensor, "sequence row"]]:
        """Stride midpoints of sampled packed sequences: on the packed axis, within the sequence, and which of them exist."""

        def made() -> tuple[Tensor, Tensor, Tensor]:
            chosen = self.sequences(len(packing.starts), packing.starts.device)
            count = packing.lengths[chosen][:, None]
            nth, valid = _spread(count, packing.longest if wanted is None else min(packing.longest, wanted))
            return packing.starts[chosen][:, None] + nth, nth, valid

        return self.kept(("packed", Itself(packing), wanted), made, for_window=True)

    def counted(self, sample: TokenSample) -> Float[Tensor, "sequence token dim"]:
        """The sample with zeros where it has no valid token, for norms."""
        mask = sample.mask
        if mask is None:
            return sample.hidden
        padding = self.kept(("padding", Itself(mask)), lambda: ~mask[..., None], for_window=True)
        return sample.hidden.masked_fill(padding, 0)

    def valid_rows(self, batch: int, length: int) -> tuple[Int[Tensor, "sequence query"], Bool[Tensor, "sequence query"]] | None:
        """Query rows at valid tokens, per sampled sequence, where the call's token mask fits; else None."""
        chunk = self.chunk
        mask = self.mask_for(batch, length if chunk is None else chunk.total)
        if mask is None or chunk is None:
            return None if mask is None else self._positions(mask, length, self.max_queries)
        rows, sequences = self.rows(length, mask.device), self.sequences(batch, mask.device)

        def made() -> tuple[Tensor, Tensor]:
            return rows.expand(len(sequences), -1), mask[sequences[:, None], rows + chunk.start]

        return self.kept(("rows of a chunk", Itself(mask), chunk, length), made, for_window=True)

    def _positions(self, mask: Bool[Tensor, "batch token"], length: int, wanted: int | None) -> tuple[Tensor, Tensor]:
        """Stride midpoints over the valid positions of each sampled sequence, and which of them exist. No copy to the host."""

        def made() -> tuple[Tensor, Tensor]:
            chosen = mask.index_select(0, self.sequences(mask.shape[0], mask.device))
            count = chosen.sum(1, keepdim=True)
            nth, valid = _spread(count, length if wanted is None else min(length, wanted))
            order = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
            return order.gather(1, nth), valid

        return self.kept(("positions", Itself(mask), wanted), made, for_window=True)

    def _index(self, count: int, wanted: int | None, device: torch.device) -> Tensor:
        key = ("midpoints", count, wanted, device)
        return self.kept(key, lambda: torch.tensor(midpoints(count, wanted), dtype=torch.long, device=device))
