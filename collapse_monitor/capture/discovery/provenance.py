"""From q, k or v back to the products with weights that made them, through everything that keeps a head's features together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from collapse_monitor.capture.discovery.graph import Graph, Operation, Value
from collapse_monitor.capture.discovery.movement import MOVEMENTS, Points, Untraceable, merged, sources, spread
from collapse_monitor.capture.discovery.semantics import DIFFERENCES, NEGATIONS, QUOTIENTS, SCALINGS, SUMS

NORMS = frozenset("layer_norm rms_norm normalize".split())
_FARTHEST = 200
_JOINS = frozenset("cat concat concatenate".split())
_Found = dict[int, tuple[Value, list[Points]]]
"""Leaves by the number of their value: the value, and the points that lead there."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """Where a search ended: a product with a weight, or a sum of several, and the elements of its result that were found."""

    value: Value
    points: Points


@dataclass(frozen=True, slots=True, eq=False)
class Summand:
    """One product with a weight in a sum, how it is scaled there, and the elements of its result, in the order of their marks."""

    value: Value
    points: Points
    scale: float


class Ancestors:
    """Answers about what a value depends on."""

    def __init__(self, graph: Graph, parameters: Iterable[str]) -> None:
        self._parameters = frozenset(parameters)
        self._learned = 0
        self._outside: list[tuple[int, Value]] = []
        for operation in graph.operations:
            for value in operation.inputs:
                if self._is_parameter(value):
                    self._learned |= 1 << operation.index
                elif value.outside and value.producer is None:
                    self._outside.append((operation.index, value))

    def _is_parameter(self, value: Value) -> bool:
        return value.parameter in self._parameters

    def learned(self, value: Value) -> bool:
        """Whether a parameter went into it."""
        return self._is_parameter(value) or (value.producer is not None and bool(value.producer.ancestry & self._learned))

    def outside(self, value: Value) -> frozenset[int]:
        """The floating tensors from outside that went into it."""
        if value.producer is None:
            return frozenset({value.index} if value.outside else ())
        return frozenset(given.index for index, given in self._outside if value.producer.ancestry >> index & 1)


class Search:
    """Follows the elements of one operand to the leaves they were made by.

    Passed through: views, joins, copies, dropout, norms over features with their gains, biases, and factors that no hidden state went
    into (rotary tables, masks, a scale for a whole head). Everything else ends the search with a reason.
    """

    def __init__(self, ancestors: Ancestors, heads: int, dim: int) -> None:
        self._ancestors, self._heads, self._dim = ancestors, heads, dim
        self._asides: list[Value] = []
        self._steps = 0
        self._normed = self._gained = False

    def leaves(self, value: Value, points: Points) -> list[Leaf]:
        """The distinct leaves.

        Raises:
            Untraceable: says what stands between.
        """
        found = [Leaf(leaf, merged(parts)) for leaf, parts in self._walk(value, points).values()]
        if any(self._ancestors.outside(aside) & self._raw_inputs(leaf.value) for leaf in found for aside in self._asides):
            raise Untraceable("it is combined with another function of the data")
        if self._gained and not self._normed:
            raise Untraceable("a parameter scales each of its features")
        return found

    def _raw_inputs(self, leaf: Value) -> frozenset[int]:
        """The tensors from outside a projection reads before any weight: a function of them is no constant for it."""
        product = leaf.producer.product if leaf.producer is not None else None
        operands = [product.left, product.right] if product is not None else []
        return frozenset().union(*(self._ancestors.outside(operand) for operand in operands if not self._ancestors.learned(operand)))

    def _walk(self, value: Value, points: Points) -> _Found:
        operation = value.producer
        self._steps += 1
        if operation is None:
            raise Untraceable("it is a parameter" if value.static else "no projection with a weight was seen before it")
        if self._steps > _FARTHEST:
            raise Untraceable("no projection with a weight was seen close before it")
        if not any(value is output for output in operation.outputs):
            raise Untraceable(f"it is changed in place through a view ({operation.name})")
        name = operation.name
        if operation.product is not None:
            weight_side(operation)
            return {value.index: (value, [points])}
        if name in SUMS or name in DIFFERENCES:
            return self._sum(operation, value, points)
        if name in SCALINGS or name in QUOTIENTS:
            return self._scaled(operation, points)
        if name in _JOINS and (shared := self._joined_tokens(operation, points)) is not None:
            return _together(self._walk(part, at) for part, at in shared)
        if name in MOVEMENTS:
            parts = sources(operation, value, points)
            return _together(self._walk(part, at) for part, at in [part for part in parts if not part[0].static] or parts)
        if name in NORMS or name in NEGATIONS:
            self._normed |= name in NORMS
            return self._into(operation.inputs[0], points)
        raise Untraceable(f"{name} stands between it and a projection")

    def _into(self, operand: Value, points: Points) -> _Found:
        return self._walk(operand, points.of(spread(points.at, operand.shape)))

    def _joined_tokens(self, operation: Operation, points: Points) -> list[tuple[Value, Points]] | None:
        """Tokens of several origins, each with a projection of its own: all parts count, not only those some point lies in."""
        given, ndim = operation.given, points.at.shape[1]
        parts = given.argument(0, "tensors") if given is not None else ()
        axis = given.argument(1, "dim", given.kwargs.get("axis", 0)) % ndim if given is not None else 0
        if not points.one_place(axis) or all(len(part.shape) == ndim and part.shape[axis] == 1 for part in parts):
            return None
        data = [part for part in parts if not part.static and len(part.shape) == ndim] or parts
        return [(part, points.of(np.where(np.arange(ndim) == axis, 0, points.at))) for part in data]

    def _scaled(self, operation: Operation, points: Points) -> _Found:
        if operation.name in QUOTIENTS:
            above = operation.given.argument(0, "input") if operation.given is not None else None
            if not isinstance(above, Value):
                raise Untraceable("something is divided by it")
            below = self._data([part for part in operation.inputs if part is not above])
            carriers, statistics = [above], [part for part in self._flat([above, *below], points) if part is not above]
            if len(statistics) != len(below):
                raise Untraceable("it is divided by another function of the data")
        else:
            carriers, statistics = self._carriers(operation.inputs, points)
        if len(carriers) != 1:
            raise Untraceable("it is multiplied by another function of the data")
        self._normed |= bool(statistics)
        gains = [part for part in operation.inputs if part.static and part is not carriers[0] and self._ancestors.learned(part)]
        self._gained |= any(part not in self._flat([part, carriers[0]], points) and not _by_token(part, points) for part in gains)
        found = self._into(carriers[0], points)
        _check_statistics(statistics, found)
        return found

    def _sum(self, operation: Operation, value: Value, points: Points) -> _Found:
        operands = list(operation.inputs)
        if operation.name == "addcmul":
            operands = [operands[0], *(self._data(operands[1:]) or operands[1:2])]
        carriers, statistics = self._carriers(operands, points)
        if not carriers:
            raise Untraceable("it is not made by a projection")
        ways = [self._into(part, points) for part in carriers]
        for way in ways:
            _check_statistics(statistics, way)
        return _together(ways) if all(way.keys() == ways[0].keys() for way in ways) else {value.index: (value, [points])}

    def _carriers(self, operands: Sequence[Value], points: Points) -> tuple[list[Value], list[Value]]:
        """The operands that carry the projection, and those that only carry a statistic of it, such as a norm over features."""
        data = self._data(operands)
        if not data:  # queries made from learned tokens: everything is static, what holds a product is meant
            data = [part for part in operands if part.producer is not None and len(part.shape) >= 2]
        statistics = self._flat(data, points) if len(data) > 1 else []
        return [part for part in data if not any(part is other for other in statistics)], statistics

    def _data(self, operands: Sequence[Value]) -> list[Value]:
        """The operands a hidden state may have gone into. The others are constants, unless they share its origin: checked at the end."""
        data = [part for part in operands if not part.static and self._ancestors.learned(part)]
        self._asides += [part for part in operands if not part.static and not any(part is other for other in data)]
        return data

    def _flat(self, operands: Sequence[Value], points: Points) -> list[Value]:
        """The operands that are one number for all features of a head."""
        head = points.mark % (self._heads * self._dim) // self._dim
        one = points.at[(points.sample == points.sample[0]) & (head == head[0])]
        axes = [axis - one.shape[1] for axis in range(one.shape[1]) if np.ptp(one[:, axis]) > 0]
        if not axes:  # a single feature has come this way: its axis is where another operand is longer
            longest = max(operands, key=lambda part: math.prod(part.shape))
            return [part for part in operands if part.shape != longest.shape and _is_broadcast(part.shape, longest.shape)]
        return [part for part in operands if all(-axis > len(part.shape) or part.shape[axis] == 1 for axis in axes)]


def _by_token(factor: Value, points: Points) -> bool:
    """Whether it has values of its own for every token, as rotary tables have."""
    ndim = points.at.shape[1]
    own = range(ndim - min(len(factor.shape), ndim), ndim)
    return any(factor.shape[axis - ndim] > 1 and points.one_place(axis) and np.ptp(points.at[:, axis]) > 0 for axis in own)


def _is_broadcast(shape: Sequence[int], whole: Sequence[int]) -> bool:
    return len(shape) <= len(whole) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(whole), strict=False))


def _together(ways: Iterable[_Found]) -> _Found:
    found: _Found = {}
    for way in ways:
        for index, (value, parts) in way.items():
            found.setdefault(index, (value, []))[1].extend(parts)
    return found


def _check_statistics(statistics: Sequence[Value], found: _Found) -> None:
    """A scale that is one number per head or token may be the projection's own norm; nothing else."""
    for statistic in statistics:
        made = statistic.producer
        if made is None or not any(leaf.producer is not None and made.ancestry >> leaf.producer.index & 1 for leaf, _ in found.values()):
            raise Untraceable("it is scaled by another function of the data")


def weight_side(operation: Operation) -> int:
    """Which operand of a product is the weight: 0 or 1.

    Raises:
        Untraceable: neither is, or which axes meet is not known.
    """
    product = operation.product
    assert product is not None
    if not product.origins or operation.name == "cdist":
        raise Untraceable(f"it is made by {operation.name}, which is no product with one weight matrix per token")
    if not product.left.static and not product.right.static:
        raise Untraceable("a product of data with data stands between it and a projection")
    if product.left.static and product.right.static:
        if operation.name not in ("linear", "addmm", "conv1d", "conv2d", "conv3d"):
            raise Untraceable("it is made by weights alone")
        return 1
    return 0 if product.left.static else 1


def summands(leaf: Leaf) -> list[Summand]:
    """The products with weights that a leaf is the sum of; one of scale 1 for a leaf that is a product.

    Raises:
        Untraceable: the sum holds something else.
    """
    points = Points(leaf.points.at, np.arange(len(leaf.points.at)), leaf.points.sample)
    if leaf.value.producer is not None and leaf.value.producer.product is not None:
        return [Summand(leaf.value, points, 1.0)]
    found: dict[int, list[Summand]] = {}
    for summand in _expanded(leaf.value, points, 1.0, 0):
        found.setdefault(summand.value.index, []).append(summand)
    if not found:
        raise Untraceable("it is made by weights alone")
    return [_ordered(parts, len(points.at)) for parts in found.values()]


def _ordered(parts: list[Summand], count: int) -> Summand:
    points = merged(part.points for part in parts)
    if len({part.scale for part in parts}) > 1 or not np.array_equal(np.sort(points.mark), np.arange(count)):
        raise Untraceable("it is a sum of which only a part of the features comes from each projection")
    return Summand(parts[0].value, points.kept(np.argsort(points.mark)), parts[0].scale)


def _expanded(value: Value, points: Points, scale: float, depth: int) -> list[Summand]:
    operation = value.producer
    if operation is None or depth > _FARTHEST or not any(value is output for output in operation.outputs):
        raise Untraceable("something that is no projection is added to it")
    name = operation.name
    if operation.product is not None:
        weight_side(operation)
        if operation.given is not None and any(key in operation.given.kwargs for key in ("alpha", "beta")):
            raise Untraceable("a scaled product is added to it")
        return [Summand(value, points, scale)]
    if name in MOVEMENTS:
        return [s for part, at in sources(operation, value, points) for s in _expanded(part, at, scale, depth + 1)]
    given = operation.given
    if given is None or name == "addcmul":
        raise Untraceable(f"{name} is applied to one of the projections it is a sum of")
    operands = [given.argument(0, "input"), given.argument(1, "other")]
    signs = [1.0, 1.0]
    if name in SUMS or name in DIFFERENCES:
        if name in DIFFERENCES:
            signs = [-1.0, 1.0] if name in ("rsub", "__rsub__") else [1.0, -1.0]
        signs[1] *= float(given.argument(2, "alpha", 1.0))
    elif name in SCALINGS or (name in QUOTIENTS and isinstance(operands[0], Value)):
        number = next((part for part in operands if isinstance(part, int | float)), None)
        if number is None or number == 0:
            raise Untraceable("one of the projections it is a sum of is multiplied by another tensor")
        signs = [1 / number if name in QUOTIENTS else float(number)] * 2
    elif name in NEGATIONS:
        operands, signs = operands[:1], [-1.0]
    else:
        raise Untraceable(f"{name} is applied to one of the projections it is a sum of")
    return [
        summand
        for part, sign in zip(operands, signs, strict=True)
        if isinstance(part, Value) and not part.static
        for summand in _expanded(part, points.of(spread(points.at, part.shape)), scale * sign, depth + 1)
    ]
