"""One observation of what a model works out in several calls: heads that run apart, queries that come in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from collapse_monitor.capture.sampling import Chunk, Sampler
from collapse_monitor.observation import AttentionObservation


class Pieces:
    """What the calls of one attention have given so far: heads that run apart, or chunks of its queries."""

    def __init__(self, calls: int, chunks: Sequence[Chunk], sampler: Sampler) -> None:
        read = [chunk for chunk in chunks if sampler.of_chunk(chunk).rows_of_chunk(chunk.length)]
        self._expected = len(read) if chunks else calls
        self._heads: list[AttentionObservation] = []
        self._chunks: list[tuple[Chunk, AttentionObservation]] = []

    def add(self, chunk: Chunk | None, observation: AttentionObservation) -> AttentionObservation | None:
        """Take one in; all of them joined, if this was the last."""
        if chunk is None:
            self._heads.append(observation)
            return join_heads(self._heads) if len(self._heads) == self._expected else None
        if observation.weights.shape[2]:
            self._chunks.append((chunk, observation))
        return self.rest() if len(self._chunks) == self._expected else None

    def rest(self) -> AttentionObservation | None:
        """The chunks so far: a shorter sequence has fewer of them."""
        chunks, self._chunks = self._chunks, []
        return join_chunks(chunks) if chunks else None


def join_heads(parts: list[AttentionObservation]) -> AttentionObservation:
    """Heads that ran as separate calls, side by side."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    visible = None if first.visible is None else torch.cat([p.visible.expand_as(p.weights) for p in parts if p.visible is not None], dim=1)
    logits = None if first.logits is None else torch.cat([p.logits for p in parts if p.logits is not None], dim=1)
    return AttentionObservation(
        torch.cat([p.weights for p in parts], dim=1), visible, logits, None, first.query_index, first.same_rows, first.cross
    )


def join_chunks(parts: Sequence[tuple[Chunk, AttentionObservation]]) -> AttentionObservation:
    """The rows of chunks of queries under each other. A chunk that was given fewer keys than another does not see the later ones."""
    keys = max(max(chunk.keys, part.weights.shape[-1]) for chunk, part in parts)
    shown = [_shown(part, keys) for _, part in parts]
    visible: Tensor | None = None
    if any(mask is not None for mask in shown):
        full = [part.weights.new_ones(*part.weights.shape[:-1], keys, dtype=torch.bool) for _, part in parts]
        visible = torch.cat([own if mask is None else mask.expand_as(own) for own, mask in zip(full, shown, strict=True)], dim=2)
    logits = [_widened(part.logits, keys) for _, part in parts if part.logits is not None]
    sinks = [part.sink for _, part in parts if part.sink is not None]
    index = [part.query_index + chunk.start for chunk, part in parts if part.query_index is not None]
    return AttentionObservation(
        weights=torch.cat([_widened(part.weights, keys) for _, part in parts], dim=2),
        visible=visible,
        logits=torch.cat(logits, dim=2) if logits else None,
        sink=torch.cat(sinks, dim=2) if sinks else None,
        query_index=torch.cat(index, dim=-1),
        same_rows=(parts[0][0].total, keys, index[0].ndim),
        cross=parts[0][1].cross,
    )


def _widened(tensor: Tensor, keys: int) -> Tensor:
    return tensor if tensor.shape[-1] == keys else pad(tensor, (0, keys - tensor.shape[-1]))


def _shown(part: AttentionObservation, keys: int) -> Tensor | None:
    own = part.weights.shape[-1]
    if own == keys:
        return part.visible
    mask = part.weights.new_ones(1, 1, 1, own, dtype=torch.bool) if part.visible is None else part.visible
    return _widened(mask.expand(*mask.shape[:-1], own), keys)
