"""Rows of attention kernels that know more than a mask: bands, caps, distances, sinks, and sequences packed into one axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from collapse_monitor.capture.packing import Packing, ragged_axis
from collapse_monitor.capture.rows.choice import RowChoice
from collapse_monitor.capture.rows.distribution import observation_of, wide
from collapse_monitor.capture.rows.folding import Folding
from collapse_monitor.capture.rows.sdpa import SdpaCall, fold_keys, masked, products
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.observation import AttentionObservation


@dataclass(frozen=True, slots=True)
class Band:
    """A query sees keys up to `before` positions before its own and up to `after` behind it; None: any number.

    `at_end`: the last query stands at the last key, else the first one at the first.
    """

    before: int | None = None
    after: int | None = None
    at_end: bool = True


class Source:
    """The tensor an operand was handed over in, and, where it holds several, which of them along which axis."""

    __slots__ = ("_axis", "_index", "tensor")

    def __init__(self, tensor: Tensor, axis: int | None = None, index: int = 0) -> None:
        self.tensor, self._axis, self._index = tensor, axis, index

    def part_of(self, gradient: Tensor) -> Tensor:
        return gradient if self._axis is None else gradient.select(self._axis, self._index)

    def part(self) -> Tensor:
        return self.tensor if self._axis is None else self.tensor.unbind(self._axis)[self._index]


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """One call of a kernel. q, k and v are [*leading, token, dim]; with a `packing`, of queries and of keys, [head, token, dim].

    Attributes:
        cap: scores are bent to cap tanh(score / cap); 0: they are not.
        slopes: [head] or [sequence, head], how much a score falls with every position between query and key.
        sink: [head], the score of a column that takes mass and belongs to no key.
        token_axis: which axis of the kernel's result runs over queries; the features are last, the others in the order of q.
        sources: what q and v were handed over in.
        unreadable: why the distribution cannot be worked out.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    sources: tuple[Source, Source]
    mask: Tensor | None = None
    band: Band | None = None
    cap: float = 0.0
    slopes: Tensor | None = None
    sink: Tensor | None = None
    packing: tuple[Packing, Packing] | None = None
    token_axis: int = 1
    unreadable: str = ""

    @classmethod
    def of_jagged(cls, call: SdpaCall, sampler: Sampler) -> KernelCall:
        """A call on nested tensors [sequence, (head), ragged token, dim]."""
        tensors = (call.query, call.key, call.value)
        reason = ""
        if call.mask is not None:
            reason = "nested tensors with a mask"
        if any(ragged_axis(tensor) != tensor.ndim - 2 for tensor in tensors):
            reason = "nested tensors that are not ragged along the tokens"
        values = [tensor.values() for tensor in tensors]
        query, key, value = (tensor if tensor.ndim == 3 else tensor[None] for tensor in values)
        return cls(
            query,
            key,
            value,
            call.scale,
            (Source(call.query), Source(call.value)),
            band=Band(after=0, at_end=False) if call.causal else None,
            packing=(sampler.packing_of(call.query), sampler.packing_of(call.key)),
            unreadable=reason,
        )

    @property
    def query_length(self) -> int:
        return self.query.shape[-2] if self.packing is None else self.packing[0].longest

    @property
    def key_length(self) -> int:
        return self.key.shape[-2] if self.packing is None else self.packing[1].longest

    @property
    def folding(self) -> Folding | None:
        """What the leading axes are; None where there is but one, which may hold sequences and heads."""
        heads = self.query.shape[:-2] if self.packing is not None else self.query.shape[1:-2]
        sequences: Any = () if self.packing is not None else ((("sequence", -1),),)
        return Folding((*sequences, *((("head", size),) for size in heads))) if heads else None

    @property
    def result_axes(self) -> tuple[int, ...]:
        """For every axis of the result, which axis of q it is."""
        leading = list(range(self.query.ndim - 2))
        leading.insert(self.token_axis, self.query.ndim - 2)
        return (*leading, self.query.ndim - 1)


def external_attention(call: KernelCall) -> Tensor:
    """Stands for any kernel of another package in the record of a forward; never called."""
    raise NotImplementedError


def kernel_rows(call: KernelCall, folding: Folding, sampler: Sampler) -> AttentionObservation:
    """The softmax over visible keys of what the kernel made of q k^T, on sampled rows, in fp32 or better. Called without gradients."""
    if call.packing is not None:
        return _packed_rows(call, call.packing, sampler)
    query = folding.fold(call.query)
    sequences, heads, queries, _ = query.shape
    choice = RowChoice.of(sampler, sequences, heads, queries, query.device)
    key = choice.take_sequences(fold_keys(call.query, call.key, folding, heads))
    dtype = wide(query.dtype)
    logits = products(choice.take(query).to(dtype), key.to(dtype)) * call.scale
    keys = key.shape[2]
    shift = keys - queries if call.band is None or call.band.at_end else 0
    distance = torch.arange(keys, device=query.device) - (choice.picks[2][..., None] + shift)
    slopes = call.slopes
    if slopes is not None and slopes.ndim == 2:
        slopes = choice.take_sequences(slopes)
    logits, visible = _bent(call, logits, distance, slopes)
    if call.mask is not None:
        logits, shown = masked(call.mask, logits, folding, call.query, choice, sequences)
        visible = shown if visible is None else visible & shown
    observation = observation_of(logits, visible, choice, queries)
    observation.sink = _sink(call, logits, observation.visible)
    return observation


def _packed_rows(call: KernelCall, packing: tuple[Packing, Packing], sampler: Sampler) -> AttentionObservation:
    """Every packed sequence is a sequence of its own; rows and keys beyond its end are invisible."""
    at, rows, there = sampler.packed(packing[0], sampler.max_queries)
    key_at, nth, known = sampler.packed(packing[1], None)
    query, key = (tensor[0] if tensor.ndim == 4 else tensor for tensor in (call.query, call.key))
    dtype = wide(query.dtype)
    chosen = _taken(query, at).to(dtype)
    seen = _taken(key, key_at).to(dtype)
    if seen.shape[1] != chosen.shape[1]:
        seen = seen.repeat_interleave(chosen.shape[1] // seen.shape[1], dim=1)
    logits = torch.matmul(chosen, seen.mT) * call.scale
    shift: Tensor | int = 0
    if call.band is None or call.band.at_end:
        shift = (known.sum(-1) - _lengths(packing[0], sampler))[:, None, None, None]
    distance = nth[:, None, None, :] - (rows[:, None, :, None] + shift)
    slopes = call.slopes
    if slopes is not None and slopes.ndim == 2:
        slopes = slopes[sampler.sequences(len(slopes), slopes.device)]
    logits, band = _bent(call, logits, distance, slopes)
    visible = known[:, None, None, :] & there[:, None, :, None]
    visible = visible if band is None else visible & band
    return AttentionObservation(
        weights=logits.masked_fill(~visible, -math.inf).softmax(-1),
        visible=visible,
        logits=logits,
        sink=_sink(call, logits, visible),
        query_index=rows,
        same_rows=(packing[0].longest, packing[1].longest, 2),
    )


def _taken(packed: Float[Tensor, "head token dim"], at: Int[Tensor, "sequence row"]) -> Float[Tensor, "sequence head row dim"]:
    return packed[:, at.clamp(max=packed.shape[1] - 1)].transpose(0, 1)


def _lengths(packing: Packing, sampler: Sampler) -> Int[Tensor, " sequence"]:
    return packing.lengths[sampler.sequences(len(packing.lengths), packing.lengths.device)]


def _bent(
    call: KernelCall,
    logits: Float[Tensor, "sequence head query key"],
    distance: Int[Tensor, "#sequence 1 query key"],
    slopes: Float[Tensor, "*sequence head"] | None,
) -> tuple[Float[Tensor, "sequence head query key"], Bool[Tensor, "#sequence 1 query key"] | None]:
    """The scores after cap and slopes, and which keys the band shows."""
    if call.cap:
        logits = call.cap * torch.tanh(logits / call.cap)
    if slopes is not None:
        logits = logits - slopes[..., None, None].to(logits.dtype) * distance.abs()
    band = call.band
    if band is None or (band.before is None and band.after is None):
        return logits, None
    visible = distance <= band.after if band.after is not None else torch.ones_like(distance, dtype=torch.bool)
    return logits, visible if band.before is None else visible & (distance >= -band.before)


def _sink(
    call: KernelCall, logits: Float[Tensor, "sequence head query key"], visible: Bool[Tensor, "#sequence #head #query key"] | None
) -> Float[Tensor, "sequence head query"] | None:
    """How much of each row the sink takes."""
    if call.sink is None:
        return None
    shown = logits if visible is None else logits.masked_fill(~visible, -math.inf)
    return torch.sigmoid(call.sink.to(logits.dtype)[:, None] - shown.logsumexp(-1))
