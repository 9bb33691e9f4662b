"""From the graph of one forward to the plan for all later ones: sites, blocks, and the places where they are read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import zip_longest

from torch import nn

from collapse_monitor.capture.discovery.blocks import FoundBlock, find_blocks
from collapse_monitor.capture.discovery.chunks import chunks_of
from collapse_monitor.capture.discovery.events import FUSED, Event
from collapse_monitor.capture.discovery.graph import Frame, Graph, Operation, Value
from collapse_monitor.capture.discovery.products import PRODUCTS
from collapse_monitor.capture.discovery.projections import ProjectionFinder
from collapse_monitor.capture.discovery.semantics import ADDITIONS, SOFTMAXES
from collapse_monitor.capture.discovery.sites import FoundSite, find_attention, find_mixers, is_cross
from collapse_monitor.capture.discovery.streams import attention_of, input_value, joins, layout_of, output_value
from collapse_monitor.capture.discovery.tree import ModuleTree, canonical, parent_of
from collapse_monitor.capture.plan import AttentionPlan, BlockPlan, Kind, Place, Plan
from collapse_monitor.capture.sampling import default_layout
from collapse_monitor.observation import Key
from collapse_monitor.records import Site

KINDS: dict[str, Kind] = {
    **dict.fromkeys(FUSED, "fused"),
    **dict.fromkeys(SOFTMAXES, "softmax"),
    **dict.fromkeys(("exp", "exp2", "exp_"), "exp"),
    **dict.fromkeys(PRODUCTS, "product"),
    **dict.fromkeys(ADDITIONS, "add"),
}
"""The functions a lean step counts, by bare name."""


@dataclass(slots=True, eq=False)
class Made:
    """The plan, with what in this forward its places stand for: blocks with their output and input, attentions with the addition of their
    result and, where it is not the other operand, the stream."""

    plan: Plan
    blocks: list[tuple[BlockPlan, Value | None, Value | None]]
    attentions: list[tuple[AttentionPlan, FoundSite, Operation | None, Value | None]]


def make_plan(graph: Graph, events: list[Event], model: nn.Module, causal: dict[int, bool], masks: set[str]) -> Made:
    """Everything that can be known from one forward."""
    found, rejected = find_attention(graph, events)
    blocks = find_blocks(graph, found, find_mixers(graph, events, found), ModuleTree(model))
    places = Places(graph)
    streams = _streams(graph, blocks)
    for block, output, given in streams:
        places.want_output(block, output)
        places.want(given)
    attentions = [_joined(graph, site, next((s for s in streams if site in s[0].sites), None)) for site in found]
    for site, addition, _ in attentions:
        for operation in (*(event.operation for event in site.events), site.first.product, site.first.consumer, addition):
            if operation is not None:
                places.frames.add(operation.frame.name)
    places.frames |= {"", *masks}
    places.count()
    names = _names(blocks, found)
    block_plans = [
        (_block_plan(index, block, output, given, places, [site.first for site in found] or events, names), output, given)
        for index, (block, output, given) in enumerate(streams)
    ]
    block_plans = [(_like_its_siblings(plan, [p for p, _, _ in block_plans]), output, given) for plan, output, given in block_plans]
    places.frames |= {plan.module for plan, _, _ in block_plans if plan.missing and plan.output is not None}
    finder = ProjectionFinder(graph, (name for name, _ in model.named_parameters()), found)
    attention_plans = []
    for site, addition, to_stream in attentions:
        layer = next((index for index, (block, _, _) in enumerate(streams) if site in block.sites), None)
        attention = _attention_plan(graph, site, layer, addition, to_stream, places, causal, names)
        attention = replace(attention, projections=finder.of(site, streams[layer][0].start if layer is not None else 0))
        stream: Value | None = None
        if layer is not None:
            around = block_plans[layer][0]
            attention = replace(attention, block=around.key)
            if attention.branch is not None and not to_stream:
                # sampled alike they can be compared; else the other operand stands for the stream
                stream = streams[layer][2] if attention.branch[3] == around.layout else None
                attention = replace(attention, branch=(*attention.branch[:2], stream is None, attention.branch[3]))
        attention_plans.append((attention, site, addition, stream))
    plan = Plan(
        tuple(p for p, _, _ in block_plans),
        tuple(p for p, *_ in attention_plans),
        frozenset(places.frames),
        {canonical(name): reason for name, reason in rejected.items()},
        f"{len(graph.frames) - 1} modules and {len(graph.operations)} functions, {len(events)} of them a softmax or an attention kernel",
        any(event.how == "external" for event in events),
    )
    return Made(plan, block_plans, attention_plans)


class Places:
    """Turns values and operations of the graph into places that a lean step can find again."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.frames: set[str] = set()
        self._returned: dict[int, tuple[Frame, tuple[object, ...]]] = {}
        self._taken: dict[int, tuple[Frame, int]] = {}
        self._ordinals: dict[int, tuple[Frame, tuple[str, int] | None, int]] = {}
        self._totals: Counter[tuple[int, tuple[str, int] | None, Kind]] = Counter()
        for frame in graph.frames[1:]:
            for path, value in frame.outputs:
                self._returned.setdefault(value.index, (frame, path))
            for position, value in enumerate(frame.inputs):
                self._taken.setdefault(value.index, (frame, position))

    def want(self, value: Value | None) -> None:
        """Listen to the call that returns, makes or takes the value."""
        if value is None:
            return
        if value.index in self._returned:
            self.frames.add(self._returned[value.index][0].name)
        elif value.producer is not None and _is_sum(value):
            self.frames.add(value.producer.frame.name)
        elif value.index in self._taken:
            self.frames.add(self._taken[value.index][0].name)

    def want_output(self, block: FoundBlock, value: Value | None) -> None:
        """Listen to what `of_output` will name."""
        if block.frame is not None and _own_output(block, value) is not None:
            self.frames.add(block.frame.name)
        elif value is not None and value.producer is not None and _is_sum(value):
            self.frames.add(value.producer.frame.name)
        else:
            self.want(value)

    def count(self) -> None:
        """Number the operations of every kind within their innermost listened call. After the last `want`."""
        counters: Counter[tuple[int, tuple[str, int] | None, Kind]] = Counter()
        inside: dict[int, list[Frame]] = {}
        for frame in self.graph.frames[1:]:
            if frame.name in self.frames and frame.parent is not None:
                inside.setdefault(self._listened(frame.parent).index, []).append(frame)
        over: dict[int, Frame] = {}  # by a listened call, the last one inside it that has returned
        for operation in self.graph.operations:
            kind = KINDS.get(operation.name)
            if kind is None:
                continue
            frame = self._listened(operation.frame)
            waiting = inside.get(frame.index, [])
            while waiting and waiting[0].first <= operation.index and waiting[0].last < operation.index:
                over[frame.index] = waiting.pop(0)
            after = over[frame.index].key if frame.index in over else None
            self._ordinals[operation.index] = (frame, after, counters[frame.index, after, kind])
            counters[frame.index, after, kind] += 1
        self._totals = counters

    def _listened(self, frame: Frame) -> Frame:
        """The innermost listened call around a call, itself included."""
        return next((f for f in frame.ancestors() if f.name in self.frames), self.graph.frames[0])

    def of_value(self, value: Value | None) -> Place | None:
        if value is None:
            return None
        if value.index in self._returned:
            frame, path = self._returned[value.index]
            return Place(frame.name, frame.call, "output", path)
        if value.producer is not None and _is_sum(value):
            return self.of_operation(value.producer)
        if value.index in self._taken:
            frame, position = self._taken[value.index]
            return Place(frame.name, frame.call, "input", (position,))
        return None

    def of_output(self, block: FoundBlock, value: Value | None) -> Place | None:
        """What the block's own call returns, else the sum its caller makes: not what a call around it returns, which may be another's."""
        path = _own_output(block, value)
        if block.frame is not None and path is not None:
            return Place(block.frame.name, block.frame.call, "output", path)
        if value is not None and value.producer is not None and _is_sum(value):
            return self.of_operation(value.producer)
        return self.of_value(value)

    def of_input(self, block: FoundBlock, value: Value | None) -> Place | None:
        """Where the block's own call takes it, which is there also when the block before did not run; else where it comes from."""
        frame = block.frame
        if frame is not None and frame.name in self.frames:
            position = next((index for index, given in enumerate(frame.inputs) if given is value), None)
            if position is not None:
                return Place(frame.name, frame.call, "input", (position,))
        return self.of_value(value)

    def of_operation(self, operation: Operation) -> Place:
        frame, after, ordinal = self._ordinals[operation.index]
        kind = KINDS[operation.name]
        return Place(frame.name, frame.call, "operation", (), kind, ordinal, after, self._totals[frame.index, after, kind])


def _own_output(block: FoundBlock, value: Value | None) -> tuple[object, ...] | None:
    """Where the value is in what the block's own call returns."""
    return next((path for path, returned in block.frame.outputs if returned is value), None) if block.frame is not None else None


def _is_sum(value: Value) -> bool:
    return value.producer is not None and value.producer.name in ADDITIONS


def _streams(graph: Graph, blocks: list[FoundBlock]) -> list[tuple[FoundBlock, Value | None, Value | None]]:
    streams: list[tuple[FoundBlock, Value | None, Value | None]] = []
    previous: Value | None = None
    for block, following in zip_longest(blocks, blocks[1:]):
        output = output_value(graph, block, following) if block.ran else None
        streams.append((block, output, input_value(block, output, previous)))
        previous = output
    return streams


def _joined(
    graph: Graph, site: FoundSite, stream: tuple[FoundBlock, Value | None, Value | None] | None
) -> tuple[FoundSite, Operation | None, bool]:
    """The addition at which the site's result joins, and whether its other operand is the stream itself."""
    first = site.first.consumer or site.first.operation
    for operation in graph.operations[first.index :]:
        side = joins(operation, site.first)
        if side is None:
            continue
        other = operation.inputs[1 - side]
        block = stream[0] if stream is not None else None
        made_inside = block is not None and other.producer is not None and other.producer.index >= block.start
        is_sum = other.producer is not None and other.producer.name in ADDITIONS
        return site, operation, not made_inside or is_sum or _later_stream(other, site, block)
    return site, None, True


def _later_stream(other: Value, site: FoundSite, block: FoundBlock | None) -> bool:
    """After an earlier attention of the same block the stream is whatever descends from it."""
    earlier = [s for s in (block.sites if block is not None else []) if s.start < site.start]
    return any(other.producer is not None and other.producer.ancestry >> s.start & 1 for s in earlier)


def _names(blocks: list[FoundBlock], sites: list[FoundSite]) -> dict[int, str]:
    """A name for every execution: the canonical module path, later executions numbered."""
    names: dict[int, str] = {}
    for group in (blocks, sites):
        seen: Counter[str] = Counter()
        for item in group:
            plain = canonical(item.name if isinstance(item, FoundBlock) else item.frame.name) or "model"
            names[id(item)] = plain if not seen[plain] else f"{plain}@{seen[plain]}"
            seen[plain] += 1
    return names


def _block_plan(
    index: int, block: FoundBlock, output: Value | None, given: Value | None, places: Places, events: list[Event], names: dict[int, str]
) -> BlockPlan:
    key: Key = ("block", max(block.start, 0), index)
    site = Site(names[id(block)], "block", index)
    place = places.of_output(block, output)
    layout = layout_of(output, attention_of(block, events)) if output is not None else default_layout(3)
    missing = ""
    if not block.ran:
        missing = "did not run in the watched forward (layer drop or a skipped branch)"
    elif place is None:
        missing = "its hidden state is not returned by a module or made by an addition; pass sites= to name another module"
    return BlockPlan(key, site, block.name, place, places.of_input(block, given), layout, missing)


def _like_its_siblings(plan: BlockPlan, others: list[BlockPlan]) -> BlockPlan:
    """A block that did not run is read where blocks beside it are, once it does."""
    if not plan.missing or plan.output is not None:
        return plan
    beside = [other for other in others if parent_of(other.module) == parent_of(plan.module) and other.output is not None]
    for other in beside:
        place = other.output
        if place is not None and place.role == "output" and place.frame == other.module:
            return replace(plan, output=replace(place, frame=plan.module, call=0), layout=other.layout)
    return plan


def _attention_plan(
    graph: Graph,
    site: FoundSite,
    layer: int | None,
    addition: Operation | None,
    to_stream: bool,
    places: Places,
    causal: dict[int, bool],
    names: dict[int, str],
) -> AttentionPlan:
    event = site.first
    heads = len(site.events) if site.parallel_heads else event.heads
    record = Site(
        names[id(site)],
        "attention",
        layer,
        heads,
        event.query_length,
        event.key_length,
        causal.get(event.operation.index, False),
        is_cross(graph, site),
        event.how,
    )
    chunks = () if site.parallel_heads else chunks_of(site.events)
    maps = [e.operation for e in site.events] if site.parallel_heads or chunks else [event.operation]
    query = value = branch = None
    if event.weights is not None:
        query = _operand(event.product, event.query, places)
        value = _operand(event.consumer, event.value, places)
    if addition is not None:
        side = joins(addition, event) or 0
        branch = (places.of_operation(addition), side, to_stream, layout_of(addition.inputs[side], event))
    return AttentionPlan(
        ("attention", event.operation.index),
        record,
        event.how,
        tuple(places.of_operation(operation) for operation in maps),
        event.folding,
        event.axes,
        query,
        value,
        branch,
        chunks=chunks,
        unread=len(site.events) - len(maps),
    )


def _operand(operation: Operation | None, value: Value | None, places: Places) -> tuple[Place, int] | None:
    product = operation.product if operation is not None else None
    if operation is None or product is None or value is None or operation.name not in KINDS:
        return None
    return places.of_operation(operation), 0 if product.left is value else 1
