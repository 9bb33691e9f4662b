"""Where the elements of q, k and v of an attention lie, head by head: the start of the search for their projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int

from collapse_monitor.capture.discovery.axes import related
from collapse_monitor.capture.discovery.events import Event
from collapse_monitor.capture.discovery.graph import Operation, Product, Value
from collapse_monitor.capture.discovery.movement import MOVEMENTS, Coordinates, Points, Untraceable, sources, spread
from collapse_monitor.capture.rows.folding import Folding

Role = Literal["query", "key", "value"]
_FARTHEST = 60


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """Elements of q, k or v at three tokens. The element with mark m belongs to the feature `owner[m]` = head * dim + feature."""

    value: Value
    points: Points
    owner: Int[np.ndarray, " mark"]
    heads: int
    dim: int


def operand_of(event: Event, role: Role) -> Operand:
    """The operand of one normalisation that plays this role.

    Raises:
        Untraceable: its heads cannot be told.
    """
    if event.weights is None:
        return _of_kernel(event.operation, event.folding, role)
    if role == "value":
        return _of_consumer(event)
    return _of_scores(event, role)


def _of_kernel(operation: Operation, folding: Folding, role: Role) -> Operand:
    """q, k and v are [*leading, token, dim]; a leading axis of k and v may broadcast or hold fewer heads than that of q."""
    query, value = operation.inputs[0], operation.inputs[("query", "key", "value").index(role)]
    places = head_positions(folding, query.shape[:-2])
    lead = value.shape[:-2]
    own = places[..., places.shape[-1] - len(lead) :]
    if len(lead) > places.shape[-1]:
        raise Untraceable("it has more axes than the queries")
    ratio = np.asarray(query.shape[len(query.shape) - 2 - len(lead) : -2], dtype=np.int64) // np.asarray(lead, dtype=np.int64)
    if any(size * times != whole for size, times, whole in zip(lead, ratio, query.shape[-2 - len(lead) : -2], strict=True)):
        raise Untraceable("its heads do not match those of the queries")
    spots = [(axis, own[..., axis] // ratio[axis]) for axis in range(len(lead))]
    return _operand(value, places.shape[:2], spots, len(lead), (len(lead) + 1,))


def head_positions(folding: Folding, leading: Sequence[int]) -> Int[np.ndarray, "sequence head axis"]:
    """For every sequence and head its coordinates on the leading axes."""
    count = int(np.prod(leading, dtype=np.int64))
    flat = np.asarray(folding.fold(torch.arange(count, device="cpu").reshape(*leading, 1, 1)))[..., 0, 0]
    return np.stack(np.unravel_index(flat, tuple(leading)), axis=-1) if leading else np.zeros((*flat.shape, 0), dtype=np.int64)


def _operand(
    value: Value,
    grid: tuple[int, ...],
    places: list[tuple[int, Int[np.ndarray, "sequence head"]]],
    token: int,
    features: tuple[int, ...],
) -> Operand:
    """All features of every head at the first, the middle and the last of its tokens, each in another sequence."""
    sequences, heads = grid
    dim = int(np.prod([value.shape[axis] for axis in features], dtype=np.int64))
    at = np.zeros((3, heads, dim, len(value.shape)), dtype=np.int64)
    for sample, (sequence, position) in enumerate(zip(_spots(sequences), _spots(value.shape[token]), strict=True)):
        for axis, where in places:
            at[sample, ..., axis] = where[sequence][:, None]
        at[sample, ..., token] = position
    for axis, where in zip(features, np.unravel_index(np.arange(dim), [value.shape[axis] for axis in features]), strict=True):
        at[..., axis] = where
    marks = np.arange(3 * heads * dim)
    points = Points(at.reshape(len(marks), -1), marks, marks // (heads * dim))
    return Operand(value, points, marks % (heads * dim), heads, dim)


def _spots(count: int) -> tuple[int, int, int]:
    return 0, count // 2, count - 1


def _of_scores(event: Event, role: Role) -> Operand:
    """From the map back to the product that made the scores: which of its axes are the heads."""
    weights, axes, product = event.weights, event.axes, event.product
    if weights is None or axes is None or product is None or product.product is None or not product.product.origins:
        raise Untraceable("how its scores were made is not known")
    contraction = product.product
    rest = [axis for axis in range(len(weights.shape)) if axis not in (axes.key, axes.query)]
    places = head_positions(axes.folding, [weights.shape[axis] for axis in rest])
    sequences, heads = places.shape[:2]
    at = np.zeros((3, heads, len(weights.shape)), dtype=np.int64)
    queries = _spots(event.query_length)
    keys = [axes.sinks[0] + spot for spot in _spots(event.key_length)]
    for sample, sequence in enumerate(_spots(sequences)):
        at[sample][:, rest] = places[sequence]
        at[sample, :, axes.key] = keys[sample]
        if axes.query is not None:
            at[sample, :, axes.query] = queries[sample]
    marks = np.arange(3 * heads)
    points = Points(at.reshape(len(marks), -1), marks, marks // heads)
    side = _side_of(contraction, event.query)
    return _contracted(contraction, side if role == "query" else 1 - side, _back_to(weights, points, product.outputs[0]), heads)


def _side_of(contraction: Product, value: Value) -> int:
    return 0 if contraction.left is value else 1


def _contracted(contraction: Product, side: int, reached: Coordinates, heads: int) -> Operand:
    """All contracted features of one operand of a product, at the given places of its result [3 * head, axis]."""
    value = (contraction.left, contraction.right)[side]
    features = (contraction.left_contracted, contraction.right_contracted)[side]
    dim = int(np.prod([value.shape[axis] for axis in features], dtype=np.int64))
    at = np.zeros((len(reached), dim, len(value.shape)), dtype=np.int64)
    for axis, origin in enumerate(contraction.origins):
        own = origin[side]
        if own is not None and value.shape[own] > 1:
            at[..., own] = reached[:, axis, None]
    for axis, where in zip(features, np.unravel_index(np.arange(dim), [value.shape[axis] for axis in features]), strict=True):
        at[..., axis] = where
    marks = np.arange(len(reached) * dim)
    return Operand(value, Points(at.reshape(len(marks), -1), marks, marks // (heads * dim)), marks % (heads * dim), heads, dim)


def _of_consumer(event: Event) -> Operand:
    """v is the other operand of the product that weighs with the map; its axes shared with the map tell the heads."""
    weights, axes, consumer, value = event.weights, event.axes, event.consumer, event.value
    product = consumer.product if consumer is not None else None
    if weights is None or axes is None or value is None or product is None or not product.origins:
        raise Untraceable("how its values are weighed is not known")
    side = _side_of(product, value)
    other = (product.left, product.right)[1 - side]
    contracted = (product.left_contracted, product.right_contracted)
    if len(contracted[side]) != 1:
        raise Untraceable("its values are weighed over several axes at once")
    partner = {pair[1 - side]: pair[side] for pair in product.origins}
    leading = [
        axis
        for axis in range(len(other.shape))
        if axis not in contracted[1 - side] and (partner.get(axis) is not None or not related(other.labels[axis], event.query_label))
    ]
    sizes = tuple(other.shape[axis] for axis in leading)
    grid = np.stack(np.unravel_index(np.arange(int(np.prod(sizes))), sizes), axis=1) if sizes else np.zeros((1, 0), np.int64)
    at = np.zeros((len(grid), len(other.shape)), dtype=np.int64)
    at[:, leading] = grid
    marks = np.arange(len(grid))
    reached = _back_to(other, Points(at, marks, np.zeros_like(marks)), weights)
    rest = [axis for axis in range(len(weights.shape)) if axis not in (axes.key, axes.query)]
    shape = [weights.shape[axis] for axis in rest]
    places = head_positions(axes.folding, shape)
    sequences, heads = places.shape[:2]
    found, wanted = (_flat(where, shape) for where in (reached[:, rest], places.reshape(-1, len(rest))))
    if not np.array_equal(np.sort(found), np.sort(wanted)):
        raise Untraceable("the heads of its values are not those of the map")
    by_place = grid[np.argsort(found)][np.argsort(np.argsort(wanted))].reshape(sequences, heads, len(leading))
    spots = [
        (here, np.minimum(by_place[..., column], value.shape[here] - 1))
        for column, axis in enumerate(leading)
        if (here := partner.get(axis)) is not None
    ]
    features = (product.left_free, product.right_free)[side]
    return _operand(value, (sequences, heads), spots, contracted[side][0], features)


def _flat(places: Coordinates, shape: Sequence[int]) -> Int[np.ndarray, " place"]:
    return np.ravel_multi_index(tuple(places.T), tuple(shape)) if len(shape) else np.zeros(len(places), dtype=np.int64)


def _back_to(value: Value, points: Points, target: Value) -> Coordinates:
    """Coordinates in `target` of elements of `value`, which was made from it element by element, in the order of their marks.

    Raises:
        Untraceable: something between mixes elements.
    """
    for _ in range(_FARTHEST):
        if value is target:
            if not np.array_equal(np.sort(points.mark), np.arange(len(points.mark))):
                break
            return points.at[np.argsort(points.mark)]
        operation = value.producer
        if operation is None:
            break
        if operation.name in MOVEMENTS:
            parts = [(part, found) for part, found in sources(operation, value, points) if _stems_from(part, target)]
            if len(parts) != 1:
                break
            value, points = parts[0]
            continue
        carriers = [part for part in operation.inputs if _stems_from(part, target)]
        shape = value.shape
        whole = [part for part in carriers if part.shape == shape] or [part for part in carriers if _broadcasts(part.shape, shape)]
        if operation.product is not None or not whole:
            break
        value, points = whole[0], points.of(spread(points.at, whole[0].shape))
    raise Untraceable("its heads are mixed on the way to the map")


def _broadcasts(own: Sequence[int], shape: Sequence[int]) -> bool:
    return len(own) == len(shape) and all(a in (1, b) for a, b in zip(own, shape, strict=True))


def _stems_from(value: Value, target: Value) -> bool:
    made = target.producer
    return value is target or (made is not None and value.stems_from(made))
