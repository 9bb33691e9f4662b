"""Recognising an attention whose queries come in chunks: one call after the other, each for the next part of the token axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from collapse_monitor.capture.discovery.axes import Label, same_axis, size_of
from collapse_monitor.capture.discovery.events import Event
from collapse_monitor.capture.sampling import Chunk


def chunks_of(events: Sequence[Event]) -> tuple[Chunk, ...]:
    """The chunks these events are, in order; none where they are something else."""
    chunks = [chunk_of(event, events[:number]) for number, event in enumerate(events)]
    known = tuple(chunk for chunk in chunks if chunk is not None)
    if not len(known) == len(events) > 1 or known[-1].start + known[-1].length < known[-1].total:
        return ()
    if len({event.key_length for event in events}) == 1:
        return tuple(replace(chunk, keys=0) for chunk in known)
    return known


def chunk_of(event: Event, earlier: Sequence[Event]) -> Chunk | None:
    """The part of a longer query axis that this event stands for, if the earlier ones stand for the parts before it.

    The keys are the same for all of them, or those up to the last query of each.
    """
    whole = _whole(event.query_label)
    start = sum(other.query_length for other in earlier)
    if whole is None and event.query_length == 1 and earlier:
        whole = _whole(earlier[0].query_label)  # an axis of one query has no label: it may be the last one, if one is left over
        whole = whole if whole is not None and start + 1 == size_of(whole) else None
    if whole is None or event.inverted or event.packed is not None:
        return None
    if start + event.query_length > size_of(whole) or not all(_belongs(event, other, whole) for other in earlier):
        return None
    same = all(same_axis(event.key_label, other.key_label) for other in earlier)
    total, end = size_of(whole), start + event.query_length
    if event.key_length == end < total or (event.key_length == total == end and not same):
        return Chunk(start, event.query_length, total, total)
    return Chunk(start, event.query_length, total) if same else None


def _belongs(event: Event, other: Event, whole: Label) -> bool:
    own = _whole(other.query_label)
    return (
        own is not None
        and list(map(id, own)) == list(map(id, whole))
        and not same_axis(event.query_label, other.query_label)
        and (event.how, event.heads) == (other.how, other.heads)
    )


def _whole(label: Label) -> Label | None:
    """The longer axis that one was cut from."""
    size = size_of(label)
    while len(label) == 1 and label[0].parents:
        label = label[0].parents
        if size_of(label) > size:
            return label if not any(atom.feature for atom in label) else None
    return None
