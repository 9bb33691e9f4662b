"""Which parameters, and which rows of them for every head, made the q, k and v of an attention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from collapse_monitor.capture.discovery.graph import Frame, Graph, Operation, Product, Value
from collapse_monitor.capture.discovery.movement import MASKINGS, MOVEMENTS, Coordinates, Points, Untraceable, sources
from collapse_monitor.capture.discovery.operands import Operand, Role, operand_of
from collapse_monitor.capture.discovery.provenance import Ancestors, Leaf, Search, Summand, summands, weight_side
from collapse_monitor.capture.discovery.sites import FoundSite
from collapse_monitor.capture.plan import Projection, Projections, Strides, Term, WeightSlice

_FARTHEST = 30
_ROLES: tuple[Role, ...] = ("query", "key", "value")
_WORDS: dict[Role, str] = {"query": "queries", "key": "keys", "value": "values"}


class ProjectionFinder:
    """Finds the projections of every site of one graph.

    Args:
        graph: the watched forward.
        parameters: names of the model's parameters.
        sites: all its attentions.
    """

    def __init__(self, graph: Graph, parameters: Iterable[str], sites: Sequence[FoundSite]) -> None:
        self._ancestors = Ancestors(graph, parameters)
        self._frames = [site.frame for site in sites]

    def of(self, site: FoundSite, start: int = 0) -> Projections:
        """What is known about a site; a reason for each role that is not known.

        Args:
            site: one of the sites.
            start: number of the first operation of its block. A product before it made the stream itself, unless it is part of an
                attention, whose keys and values another one may use.
        """
        events = site.events if site.parallel_heads else [site.first]
        known: dict[Role, tuple[Projection, ...]] = {}
        reasons: dict[str, str] = {}
        for role in _ROLES:
            try:
                known[role] = tuple(self._projection(operand_of(event, role), site.frame, start) for event in events)
            except Untraceable as reason:
                reasons[role] = f"its {_WORDS[role]}: {reason}"
            except Exception as error:  # a form nobody thought of is not known; the forward was read all the same
                reasons[role] = f"its {_WORDS[role]} could not be followed ({type(error).__name__}: {error})"
        return Projections(known.get("query", ()), known.get("key", ()), known.get("value", ()), tuple(reasons.items()))

    def _projection(self, operand: Operand, frame: Frame, start: int) -> Projection:
        leaves = Search(self._ancestors, operand.heads, operand.dim).leaves(operand.value, operand.points)
        for made in (leaf.value.producer for leaf in leaves):
            if made is not None and made.index < start and not any(made.frame.within(inside) for inside in self._frames):
                raise Untraceable("no projection with a weight lies between the stream and it")
        whole = [leaf for leaf in leaves if len(np.unique(operand.owner[leaf.points.mark])) == operand.heads * operand.dim]
        if not leaves or len(whole) != len(leaves):
            raise Untraceable("its features are joined from several projections")
        found = {_from_leaf(leaf, operand, frame) for leaf in leaves}
        if len(found) > 1:
            raise Untraceable("tokens of different origin have projections of their own")
        return found.pop()


def _from_leaf(leaf: Leaf, operand: Operand, frame: Frame) -> Projection:
    parts = [_Part.of(summand) for summand in summands(leaf)]
    rows = np.stack([_flat(part.rows, part.weight.shape) for part in parts], axis=1)
    chosen = _assigned(operand.owner[leaf.points.mark], rows, operand)
    chains = _with_one_root([_chain(part, chosen, operand) for part in parts], frame)
    scale = chains[0].scale if len(chains) == 1 else 1.0
    return Projection(tuple(Term(chain.scale / scale, chain.factors) for chain in chains))


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One product with a weight: for every point the place of its row in the weight, and of its token in the data."""

    operation: Operation
    product: Product
    side: int
    rows: Coordinates
    tokens: Coordinates
    scale: float

    @classmethod
    def of(cls, summand: Summand) -> _Part:
        operation = summand.value.producer
        assert operation is not None
        product = operation.product
        assert product is not None
        side = weight_side(operation)
        placed = []
        for where, value in ((side, (product.left, product.right)[side]), (1 - side, (product.left, product.right)[1 - side])):
            at = np.zeros((len(summand.points.at), len(value.shape)), dtype=np.int64)
            for axis, origin in enumerate(product.origins):
                own = origin[where]
                if own is not None and value.shape[own] > 1:
                    at[:, own] = summand.points.at[:, axis]
            placed.append(at)
        return cls(operation, product, side, placed[0], placed[1], summand.scale)

    @property
    def weight(self) -> Value:
        return (self.product.left, self.product.right)[self.side]

    @property
    def data(self) -> Value:
        return (self.product.left, self.product.right)[1 - self.side]

    @property
    def columns(self) -> int:
        return math.prod(self.weight.shape[axis] for axis in self._contracted(self.side))

    def _contracted(self, side: int) -> tuple[int, ...]:
        return (self.product.left_contracted, self.product.right_contracted)[side]

    def along_columns(self, at: Int[np.ndarray, " axis"], of_weight: bool) -> Coordinates:
        """One place of the weight or of the data, repeated for every input feature, in the same order for both."""
        side = self.side if of_weight else 1 - self.side
        sizes = [self.weight.shape[axis] for axis in self._contracted(self.side)]
        repeated = np.repeat(at[None], self.columns, axis=0)
        for axis, where in zip(self._contracted(side), np.unravel_index(np.arange(self.columns), sizes), strict=True):
            repeated[:, axis] = where
        return repeated


def _flat(at: Coordinates, shape: Sequence[int]) -> Int[np.ndarray, " point"]:
    return np.ravel_multi_index(tuple(at.T), tuple(shape))


def _assigned(owner: Int[np.ndarray, " point"], rows: Int[np.ndarray, "point term"], operand: Operand) -> Int[np.ndarray, " feature"]:
    """For every feature of every head the point whose row stands for it.

    A rotation makes each of its features from the same two rows (a norm written out, from one): features made from the same rows get
    them in order, so that q and k, which are rotated alike, keep theirs in pairs.
    """
    row = rows[:, 0]
    for other in rows.T[1:]:
        _, row = np.unique(row * (int(other.max()) + 1) + other, return_inverse=True)
    count = int(row.max()) + 1
    pairs, first = np.unique(owner * count + row, return_index=True)
    owners, made_from = pairs // count, pairs % count
    number = np.bincount(owners, minlength=operand.heads * operand.dim)
    chosen = np.zeros(len(number), dtype=np.int64)
    for many in np.unique(number):
        mine = np.flatnonzero(number == many)
        sets = made_from[number[owners] == many].reshape(len(mine), many)
        points = first[number[owners] == many].reshape(len(mine), many)
        if many == 1:
            chosen[mine] = points[:, 0]
            continue
        _, group = np.unique(np.concatenate([mine[:, None] // operand.dim, sets], axis=1), axis=0, return_inverse=True)
        group = group.reshape(-1)
        if np.any(np.bincount(group) != many):
            raise Untraceable("the features of a head are mixed after its projection")
        order = np.argsort(group, kind="stable")
        place = np.empty(len(mine), dtype=np.int64)
        place[order] = np.arange(len(mine)) % many
        chosen[mine] = points[np.arange(len(mine)), place]
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class _Chain:
    """A weight, perhaps after a second one that feeds it. `path`: where its input features were on the way, by the number of the value."""

    scale: float
    factors: tuple[WeightSlice, ...]
    path: dict[int, Coordinates]
    inner: _Part | None
    inner_columns: int
    part: _Part


def _chain(part: _Part, chosen: Int[np.ndarray, " feature"], operand: Operand) -> _Chain:
    outer = _slice(part, part.rows[chosen].reshape(operand.heads, operand.dim, -1))
    path, inner = _input_path(part, part.tokens[chosen[0]])
    return _Chain(part.scale, (outer,), path, inner, part.columns, part)


def _input_path(part: _Part, token: Int[np.ndarray, " axis"]) -> tuple[dict[int, Coordinates], _Part | None]:
    """Where the input features of one token came from, as far as they are only moved, and the product with a weight that made them."""
    value = part.data
    at = part.along_columns(token, of_weight=False)
    points = Points(at, np.arange(len(at)), np.zeros(len(at), dtype=np.int64))
    path: dict[int, Coordinates] = {}
    for _ in range(_FARTHEST):
        path[value.index] = points.at[np.argsort(points.mark)]
        operation = value.producer
        if operation is None or not any(value is output for output in operation.outputs):
            break
        if operation.product is not None:
            try:
                return path, _Part.of(Summand(value, points.kept(np.argsort(points.mark)), 1.0))
            except Untraceable:
                break
        if operation.name not in MOVEMENTS:
            break
        try:
            parts = sources(operation, value, points)
        except Untraceable:
            break
        if len(parts) != 1 or len(parts[0][1].mark) != len(at):
            break
        value, points = parts[0]
    return path, None


def _extended(chain: _Chain) -> _Chain | None:
    """The chain with the weight that feeds it."""
    inner = chain.inner
    if inner is None or np.any(np.ptp(inner.tokens, axis=0)):
        return None
    factor = _slice(inner, inner.rows[None])
    path, further = _input_path(inner, inner.tokens[0])
    return _Chain(chain.scale, (*chain.factors, factor), path, further, inner.columns, inner)


def _with_one_root(chains: list[_Chain], frame: Frame) -> list[_Chain]:
    """All terms of a sum must read the same features: those of an adapter through its first weight."""
    if len(chains) == 1:
        return [_through_bottleneck(chains[0], frame)]
    stages = [[chain, *([longer] if (longer := _extended(chain)) is not None else [])] for chain in chains]
    for base in stages[0]:
        chosen = [next((stage for stage in family if _same_input(base, stage)), None) for family in stages[1:]]
        if all(stage is not None for stage in chosen):
            return [base, *(stage for stage in chosen if stage is not None)]
    raise Untraceable("it is a sum of projections of different tensors")


def _same_input(one: _Chain, other: _Chain) -> bool:
    return any(index in other.path and np.array_equal(at, other.path[index]) for index, at in one.path.items())


def _through_bottleneck(chain: _Chain, frame: Frame) -> _Chain:
    """Inside the attention's own call a narrow latent is half of a projection of low rank."""
    latent = _latent(chain.part, frame)
    if latent is None:
        return chain
    if chain.inner is None or chain.inner.operation is not latent:
        raise Untraceable("a normalised latent stands between the stream and its projection")
    longer = _extended(chain)
    if longer is None:
        raise Untraceable("a latent of several tokens stands between the stream and its projection")
    return longer


def _latent(part: _Part, frame: Frame) -> Operation | None:
    """The product inside this call that narrows the stream to the input of the projection."""
    value = part.data
    for _ in range(_FARTHEST):
        operation = value.producer
        if operation is None or frame.parent is None or not operation.frame.within(frame):
            return None
        product = operation.product
        if product is not None:
            if not product.left.static and not product.right.static:
                return None
            weight = product.right if product.right.static else product.left
            axes = product.right_contracted if product.right.static else product.left_contracted
            return operation if part.columns < math.prod(weight.shape[axis] for axis in axes) else None
        carried = [given for given in operation.inputs if not given.static]
        same = [given for given in carried if given.shape == value.shape] or carried
        if not same:
            return None
        value = same[0]
    return None


def _slice(part: _Part, rows: Int[np.ndarray, "head feature axis"]) -> WeightSlice:
    """The rows of a weight as strides into the parameter that it is, or is a view of."""
    heads, dim = rows.shape[:2]
    features = rows.reshape(heads * dim, -1)
    columns = part.along_columns(features[0], of_weight=True)
    corners = [(h, d, c) for h in (0, heads // 2, heads - 1) for d in (0, dim // 2, dim - 1) for c in (part.columns // 2, part.columns - 1)]
    along = columns - features[0]
    probes = np.stack([rows[h, d] + along[c] for h, d, c in corners])
    name, shape, flat = _in_parameter(part.weight, np.concatenate([features, columns, probes]))
    of_rows, of_columns, of_probes = np.split(flat, [len(features), len(features) + len(columns)])
    of_rows = of_rows.reshape(heads, dim)
    start = of_rows[0, 0]
    head, row, column = of_rows[:, 0] - start, of_rows[0] - start, of_columns - start
    expected = [start + head[h] + row[d] + column[c] for h, d, c in corners]
    if np.any(of_rows != start + head[:, None] + row) or np.any(of_probes != expected):
        raise Untraceable("the rows of its heads follow no regular pattern in the weight")
    if len(np.unique(row)) < dim or len(np.unique(column)) < part.columns:
        raise Untraceable("the features of a head are mixed after its projection")
    return WeightSlice(name, shape, int(start), _strides(head), _strides(row), _strides(column))


def _in_parameter(weight: Value, at: Coordinates) -> tuple[str, tuple[int, ...], Int[np.ndarray, " place"]]:
    """The parameter a weight is a view of, and the place of every element in it."""
    points = Points(at, np.arange(len(at)), np.zeros(len(at), dtype=np.int64))
    for _ in range(_FARTHEST):
        if weight.parameter is not None:
            return weight.parameter, weight.shape, _flat(points.at[np.argsort(points.mark)], weight.shape)
        operation = weight.producer
        if operation is None:
            raise Untraceable("its weight is no parameter of the model")
        if operation.name not in MOVEMENTS or operation.name in MASKINGS:
            raise Untraceable(f"its weight is computed by {operation.name}")
        parts = sources(operation, weight, points)
        if len(parts) != 1 or len(parts[0][1].mark) != len(at):
            raise Untraceable("its weight is joined from several parameters")
        weight, points = parts[0]
    raise Untraceable("its weight is a long way from a parameter")


def _strides(offsets: Int[np.ndarray, " place"]) -> Strides:
    """(size, stride) of nested loops that visit these offsets, outermost first."""
    count = len(offsets)
    if count == 1:
        return ()
    step = int(offsets[1])
    runs = [run for run in range(count, 1, -1) if count % run == 0 and np.array_equal(offsets[:run], step * np.arange(run))]
    run = next((run for run in runs if np.array_equal(offsets.reshape(-1, run), offsets[::run, None] + step * np.arange(run))), None)
    if run is None or step < 0:
        raise Untraceable("the rows of its heads follow no regular pattern in the weight")
    return (*_strides(offsets[::run]), (run, step))
