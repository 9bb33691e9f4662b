"""Recognising attention while it happens: which operation normalises scores over keys, and what its axes mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from collapse_monitor.capture.discovery.axes import Label, is_feature, related, slides
from collapse_monitor.capture.discovery.graph import Operation, Product, Value
from collapse_monitor.capture.discovery.products import CONVOLUTIONS
from collapse_monitor.capture.discovery.semantics import SOFTMAXES, reduces
from collapse_monitor.capture.rows.folding import Factor, Folding
from collapse_monitor.capture.rows.softmax import MapAxes

Scores = Literal["data", "query", "pool", "router", "constant", "channel", "unknown"]
"""Where scores come from. `data`: both operands carry data. `query`: a learned query over data keys. `pool`: a linear layer scores
tokens. `router`: data against learned keys. `constant`: weights only. `channel`: features against features. `unknown`: unseen."""

FUSED = frozenset({"scaled_dot_product_attention", "flex_attention", "external_attention"})
_EXPONENTIALS = frozenset({"exp", "exp2", "exp_"})
_ENDS = SOFTMAXES | FUSED | {"embedding"}
WALK = 400
"""How many steps a search along the graph takes at most."""


@dataclass(slots=True, eq=False)
class Event:
    """One normalisation of scores. `weights` is the map a written-out softmax made (None for a fused kernel)."""

    operation: Operation
    how: str
    scores: Scores
    query: Value
    key: Value
    value: Value | None
    weights: Value | None
    axes: MapAxes | None
    folding: Folding
    query_label: Label
    key_label: Label
    query_length: int
    key_length: int
    product: Operation | None = None
    consumer: Operation | None = None
    sinks: tuple[int, int] = (0, 0)  # how many columns before and after the keys have scores made by weights alone
    packed: int | None = None  # how many sequences lie behind each other on the query axis, if they do
    inverted: bool = False  # normalised over the queries, then averaged over the keys: slots compete for tokens

    @property
    def heads(self) -> int | None:
        return self.folding.heads


def recognise(operation: Operation) -> Event | None:
    """The event this operation is, if it is one; written-out ones still have to be consumed to count."""
    if operation.name in FUSED and len(operation.inputs) >= 3:
        return _fused(operation)
    if (operation.name in SOFTMAXES and operation.axes) or operation.name in _EXPONENTIALS:
        return _written(operation)
    return None


def _fused(operation: Operation) -> Event | None:
    query, key, value = operation.inputs[:3]
    if len(query.shape) < 2 or len(key.shape) < 2:
        return None
    scores: Scores = "data"
    if is_feature(query.labels[-2]) and is_feature(key.labels[-2]) and not is_feature(query.labels[-1]) and query.labels[-1]:
        scores = "channel"
    how = {"flex_attention": "flex", "external_attention": "external"}.get(operation.name, "sdpa")
    return Event(
        operation,
        how,
        scores,
        query,
        key,
        value,
        None,
        None,
        folding_of(query.labels[:-2], is_feature(query.labels[-1])),
        query.labels[-2],
        key.labels[-2],
        query.shape[-2],
        key.shape[-2],
    )


def _written(operation: Operation) -> Event | None:
    source = operation.inputs[0]
    if len(source.shape) < 2 or not operation.outputs:
        return None
    exponential = operation.name in _EXPONENTIALS
    axes = range(len(source.shape) - 1, -1, -1) if exponential else operation.axes
    found = next((match for axis in axes for match in _matches(source, axis)), None)
    if found is None and not exponential and _unseen(source):
        return _untraced(operation)
    if found is None:
        return None
    product, key_side, axis, scores = found
    contraction = product.product
    assert contraction is not None
    if exponential and (scores != "data" or not contraction.left_contracted):
        return None  # a decay of distances, not scores
    left = key_side == "right"
    query, key = (contraction.left, contraction.right) if left else (contraction.right, contraction.left)
    weights = operation.outputs[0]
    sinks = _sink_columns(source, axis, product)
    query_axis = _query_axis(weights, axis, contraction.left_made if left else contraction.right_made)
    if query_axis is None or weights.shape[query_axis] == 1:
        query_axis = _sliding_axis(weights, axis, query_axis)
    rest = [label for position, label in enumerate(weights.labels) if position not in (axis, query_axis)]
    contracted = contraction.left_contracted if left else contraction.right_contracted
    other = contraction.right_contracted if left else contraction.left_contracted
    channels = [query.labels[position] for position in contracted] + [key.labels[position] for position in other]
    folding = folding_of(tuple(rest), any(is_feature(label) for label in channels))
    return Event(
        operation,
        "exp" if exponential else "softmax",
        scores,
        query,
        key,
        None,
        weights,
        MapAxes(axis, query_axis, len(weights.shape), folding, sinks),
        folding,
        weights.labels[query_axis] if query_axis is not None else (),
        weights.labels[axis],
        weights.shape[query_axis] if query_axis is not None else 1,
        weights.shape[axis] - sum(sinks),
        product=product,
        sinks=sinks,
    )


def _unseen(source: Value) -> bool:
    """Whether the scores were made where nothing could be watched, as in a scripted function."""
    todo, seen = [source], set[int]()
    while todo and len(seen) < 20:
        value = todo.pop()
        if value.index in seen:
            continue
        seen.add(value.index)
        if value.outside:
            return value.shape == source.shape and len(value.shape) >= 3
        if value.producer is not None and value.producer.product is None:
            todo.extend(value for value in value.producer.inputs if value.shape == source.shape)
    return False


def _untraced(operation: Operation) -> Event:
    """A softmax whose scores cannot be followed: queries are taken to be on the axis before the keys, heads before those."""
    weights = operation.outputs[0]
    axis = operation.axes[0]
    query_axis = axis - 1 if axis else axis + 1
    rest = tuple(label for position, label in enumerate(weights.labels) if position not in (axis, query_axis))
    folding = folding_of(rest, False)
    source = operation.inputs[0]
    axes = MapAxes(axis, query_axis, len(weights.shape), folding, (0, 0))
    labels = weights.labels[query_axis], weights.labels[axis]
    lengths = weights.shape[query_axis], weights.shape[axis]
    return Event(operation, "softmax", "unknown", source, source, None, weights, axes, folding, *labels, *lengths)


def _matches(source: Value, axis: int) -> Iterator[tuple[Operation, str, int, Scores]]:
    """Products upstream of the scores whose free axis is the normalised one; those of data with data first."""
    label, size = source.labels[axis], source.shape[axis]
    others: list[tuple[Operation, str, int, Scores]] = []
    untraced: Operation | None = None
    paired: tuple[Operation, str, int, Scores] | None = None
    for operation in products_above(source, label):
        product = operation.product
        assert product is not None
        side = _side(product, label, size)
        if side is None:
            if untraced is None and classify(operation.name, product, "right") == "data":
                untraced = operation
            continue
        scores = classify(operation.name, product, side)
        if not product.left_contracted:
            if paired is None and scores == "data" and _keeps_both_sides(product, source):
                paired = (operation, side, axis, scores)
        elif scores != "data":
            others.append((operation, side, axis, scores))
        elif not others or _keeps_both_sides(product, source):
            yield operation, side, axis, scores
            return
    if paired is not None:
        yield paired
        return
    if not others and untraced is not None:
        others.append((untraced, "right", axis, "data"))  # skewed or chunked scores, whose axes could not be followed
    yield from others[:1]


def _keeps_both_sides(product: Product, source: Value) -> bool:
    """Whether the scores still run over the free axes of both operands: what lies between only mixed heads."""
    return all(
        not side or any(related(axis, label) for axis in side for label in source.labels)
        for side in (product.left_made, product.right_made)
    )


def _side(product: Product, label: Label, size: int) -> str | None:
    """Which operand the normalised axis comes from."""
    for side, made in (("right", product.right_made), ("left", product.left_made)):
        if any(related(axis, label) for axis in made):
            return side
    for side, value, free in (("right", product.right, product.right_free), ("left", product.left, product.left_free)):
        if free and value.shape[free[-1]] == size:
            return side
    return None


def classify(name: str, product: Product, key_side: str) -> Scores:
    """The kind of scores a product makes when they are normalised over a free axis of its `key_side` operand."""
    query, key = (product.left, product.right) if key_side == "right" else (product.right, product.left)
    if query.static and key.static:
        return "constant"
    if key.static:
        return "router"
    if query.static:
        return "pool" if name in ("linear", "addmm") or name in CONVOLUTIONS else "query"
    contracted = [product.left.labels[axis] for axis in product.left_contracted]
    free = [product.left.labels[a] for a in product.left_free[-1:]] + [product.right.labels[a] for a in product.right_free[-1:]]
    if free and all(is_feature(label) for label in free) and contracted and not any(is_feature(label) for label in contracted):
        return "channel"
    return "data"


def products_above(source: Value, label: Label) -> Iterator[Operation]:
    """Nearest products the scores were made by; a product that only mixes other axes (heads) is passed through as well."""
    todo, seen, steps = [source], set[int](), 0
    while todo and steps < WALK:
        value = todo.pop(0)
        operation = value.producer
        steps += 1
        if operation is None or operation.index in seen:
            continue
        seen.add(operation.index)
        if operation.product is not None:
            yield operation
            data = next((v for v in (operation.product.left, operation.product.right) if not v.static), None)
            both = not operation.product.left.static and not operation.product.right.static
            if data is None or both or not any(related(axis, label) for axis in data.labels):
                continue
            todo.append(data)
        elif _sums_pairs(operation) or not (reduces(operation) or operation.name in _ENDS):
            todo.extend(operation.inputs)


def _sums_pairs(operation: Operation) -> bool:
    """A sum over the features of a product of every token with every token: a contraction in two steps."""
    made = operation.inputs[0].producer if operation.name == "sum" and operation.inputs else None
    return made is not None and made.product is not None and not made.product.left_contracted


def _sink_columns(source: Value, axis: int, product: Operation) -> tuple[int, int]:
    """Columns that were joined to the scores and are made by weights alone, or by a layer that sees no keys: attention sinks."""
    todo, seen = [source], set[int]()
    while todo and len(seen) < 20:
        operation = todo.pop(0).producer
        if operation is None or operation.index in seen or operation.product is not None or operation.name in SOFTMAXES:
            continue
        seen.add(operation.index)
        if operation.name in ("cat", "concat", "concatenate"):
            joined = [value for value in operation.inputs if len(value.shape) == len(source.shape)]
            whole = operation.outputs[0].shape
            if len(whole) == len(source.shape) and whole[axis] == source.shape[axis] and sum(v.shape[axis] for v in joined) == whole[axis]:
                before = next((i for i, v in enumerate(joined) if not _is_sink(v, axis, product)), 0)
                after = next((i for i, v in enumerate(reversed(joined)) if not _is_sink(v, axis, product)), 0)
                count = len(joined)
                return sum(v.shape[axis] for v in joined[:before]), sum(v.shape[axis] for v in joined[count - after :])
        elif not reduces(operation):
            todo.extend(value for value in operation.inputs if len(value.shape) == len(source.shape))
    return 0, 0


def _is_sink(column: Value, axis: int, product: Operation) -> bool:
    if column.static:
        return True
    if column.shape[axis] != 1 or column.stems_from(product):
        return False
    made = [operation.product for operation in products_above(column, ())]
    return bool(made) and all(part is not None and (part.left.static or part.right.static) for part in made)


def _query_axis(weights: Value, key_axis: int, labels: tuple[Label, ...]) -> int | None:
    candidates = [axis for axis in range(len(weights.shape) - 1, -1, -1) if axis != key_axis]
    known = next((axis for axis in candidates if any(related(weights.labels[axis], label) for label in labels)), None)
    if known is not None or not labels:
        return known
    if not any(labels):  # a single query for every sequence, whose axis may be gone
        return next((axis for axis in candidates if weights.shape[axis] == 1), None)
    adjacent = key_axis - 1
    tokens = [axis for axis in candidates if not is_feature(weights.labels[axis])]
    return adjacent if adjacent in tokens else (tokens[0] if tokens else None)


def _sliding_axis(weights: Value, key_axis: int, otherwise: int | None) -> int | None:
    """The axis of the tokens that have a window of keys each, where the product saw them as so many separate calls."""
    label = weights.labels[key_axis]
    tokens = [axis for axis in range(len(weights.shape)) if axis != key_axis and not is_feature(weights.labels[axis])]
    return next((axis for axis in reversed(tokens) if slides(label, weights.labels[axis])), otherwise)


def folding_of(labels: tuple[Label, ...], channels_known: bool) -> Folding:
    """Leading axes made by weights are heads, those made by data are sequences.

    Where not even the channels of the operand could be followed, the last of several leading axes is taken for the heads.
    """
    leading: list[tuple[Factor, ...]] = []
    for label in labels:
        factors: list[list[object]] = []
        for atom in label:
            role = "head" if atom.feature else "sequence"
            if factors and factors[-1][0] == role:
                factors[-1][1] = int(str(factors[-1][1])) * atom.size
            else:
                factors.append([role, atom.size])
        sequences = [factor for factor in factors if factor[0] == "sequence"]
        if sequences:
            sequences[0][1] = -1
        leading.append(tuple((str(role), int(str(size))) for role, size in factors) or (("sequence", -1),))  # type: ignore[misc]
    if len(leading) >= 2 and {role for role, _ in leading[-1]} == {"head", "sequence"}:
        leading[-1] = (("head", math.prod(atom.size for atom in labels[-1])),)
    if not channels_known and len(leading) >= 2 and not any(role == "head" for axis in leading for role, _ in axis):
        leading[-1] = (("head", math.prod(atom.size for atom in labels[-1])),)
    return Folding(tuple(leading))


def kernel_event(operation: Operation) -> Event:
    """A product of data with data that is never normalised (linear or sigmoid attention): a place, not a distribution."""
    product = operation.product
    assert product is not None
    nothing = Folding(())
    label = product.left.labels[product.left_free[-1]] if product.left_free else ()
    return Event(operation, "product", "unknown", product.left, product.right, None, None, None, nothing, label, (), 0, 0)
