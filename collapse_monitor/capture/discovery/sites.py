"""From events to attention sites: which normalisations are token attention, and which of them belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from collapse_monitor.capture.discovery.axes import is_feature, joined_positions, same_axis
from collapse_monitor.capture.discovery.consumers import attach_consumer
from collapse_monitor.capture.discovery.events import FUSED, WALK, Event, Scores, kernel_event
from collapse_monitor.capture.discovery.graph import Frame, Graph, Operation, Product, Value, common_frame
from collapse_monitor.capture.discovery.semantics import JOINS


@dataclass(slots=True, eq=False)
class FoundSite:
    """One execution of an attention: the call it happens in and the events that are its maps (heads run apart, chunks, mixtures)."""

    frame: Frame
    events: list[Event]
    parallel_heads: bool = False

    @property
    def first(self) -> Event:
        return self.events[0]

    @property
    def start(self) -> int:
        return self.first.operation.index


def find_attention(graph: Graph, events: Iterable[Event]) -> tuple[list[FoundSite], dict[str, str]]:
    """The attention sites in order of execution, and why other normalisations are none (place -> reason)."""
    accepted: list[Event] = []
    rejected: dict[str, str] = {}
    unsure: list[Event] = []
    events = list(events)
    routed = {id(event.product) for event in events if event.scores == "router"}
    for event in events:
        consumed = attach_consumer(event)
        reason = _objection(event.scores, consumed)
        if event.scores == "query" and id(event.product) in routed:
            reason = "the same scores are also normalised over weights: a soft router"
        if reason is None:
            accepted.append(event)
        elif consumed and (event.scores == "constant" or (event.scores == "router" and event.inverted)):
            unsure.append(event)
        else:
            rejected[event.operation.frame.name or "model"] = reason
    accepted += [event for event in unsure if _resembles(event, accepted)]
    accepted.sort(key=lambda event: event.operation.index)
    return _joined_heads(graph, _grouped(graph, accepted)), rejected


def _resembles(event: Event, accepted: list[Event]) -> bool:
    """Whether an attention like this one works on data: in the first layer queries, or all of it, may come from weights alone."""
    if event.inverted:
        return any(other.inverted and _place(other) is _place(event) for other in accepted)
    return _place(event).name.split(".")[-1] in {_place(other).name.split(".")[-1] for other in accepted}


def find_mixers(graph: Graph, events: Iterable[Event], sites: list[FoundSite]) -> list[FoundSite]:
    """Places that are no attention but tell where the blocks are: channel attention, and without any site products of data with data."""
    channel = [event for event in events if event.scores == "channel" and attach_consumer(event)]
    mixers = [FoundSite(_place(event), [event]) for event in channel]
    if sites or mixers:
        return mixers
    found: dict[int, FoundSite] = {}
    for operation in graph.operations:
        product = operation.product
        if product is None or product.left.static or product.right.static:
            continue
        frame = operation.frame
        while frame.parent is not None and not frame.has_parameters:
            frame = frame.parent
        if frame.index not in found:
            found[frame.index] = FoundSite(frame, [kernel_event(operation)])
    return list(found.values())


def _objection(scores: Scores, consumed: bool) -> str | None:
    if scores == "router":
        return "its keys are weights: a router, gate or codebook"
    if scores == "pool":
        return "its scores come from one linear layer: a pooling gate without keys"
    if scores == "channel":
        return "it weighs features, not tokens: channel attention"
    if not consumed:
        return "nothing is averaged with it: a loss, a classifier or a similarity"
    if scores == "constant":
        return "its scores do not depend on the data"
    return None


def _place(event: Event) -> Frame:
    """The innermost call around the event that does more than a softmax."""
    frame = event.operation.frame
    while frame.parent is not None and not frame.has_parameters and (event.product is None or not event.product.frame.within(frame)):
        if event.weights is None and event.query.producer is not None and event.query.producer.frame.within(frame):
            break
        frame = frame.parent
    return frame


def _grouped(graph: Graph, events: list[Event]) -> list[FoundSite]:
    """Events of one call are one site, unless the scores of a later one were made from what an earlier one attended to."""
    sites: list[FoundSite] = []
    open_sites: dict[int, FoundSite] = {}
    for event in events:
        frame = _place(event)
        site = open_sites.get(frame.index)
        if site is None or any(_feeds(earlier, event) for earlier in site.events):
            site = open_sites[frame.index] = FoundSite(frame, [])
            sites.append(site)
        site.events.append(event)
    return sites


def _feeds(earlier: Event, later: Event) -> bool:
    source = earlier.consumer or earlier.operation
    return bool(later.operation.ancestry >> source.index & 1)


def _joined_heads(graph: Graph, sites: list[FoundSite]) -> list[FoundSite]:
    """Single-head calls beside each other (`heads.0`, `heads.1`) that do not depend on each other are the heads of one site."""
    result: list[FoundSite] = []
    families: dict[tuple[str, int], FoundSite] = {}
    for site in sites:
        family = _family(site)
        if family is None:
            result.append(site)
            continue
        joined = families.get(family)
        if joined is not None and not any(_feeds(event, site.first) for event in joined.events):
            joined.events += site.events
            joined.parallel_heads = True
            joined.frame = common_frame(joined.frame, site.frame)
        else:
            families[family] = site
            result.append(site)
    return result


def _family(site: FoundSite) -> tuple[str, int] | None:
    numbered = re.fullmatch(r"(?:(.*)\.)?(\d+)", site.frame.name)
    if numbered is None or len(site.events) != 1 or site.first.heads != 1 or site.frame.parent is None:
        return None
    return (numbered.group(1) or "", site.frame.parent.index)


def is_cross(graph: Graph, site: FoundSite) -> bool:
    """Whether queries and keys come from different sequences, in all of its maps (a few global tokens may look at all others)."""
    return all(_crosses(graph, event) for event in site.events)


def _crosses(graph: Graph, event: Event) -> bool:
    """Whether what queries and keys depend on before their projections differs.

    Keys that are mostly the queries' own tokens, with a memory or a prefix joined to them, do not make it cross attention.
    """
    query, key = event.query, event.key
    if query.static != key.static or event.inverted:
        return True
    made_inside = [_made_inside(value, event) for value in (query, key)]
    if made_inside.count(True) == 1:
        return not same_axis(event.query_label, event.key_label) or (made_inside[1] and _asked_from_afar(event))
    if 2 * joined_positions(event.key_label, event.query_label) >= event.key_length > 1:
        return False
    start = _projection_start(event)
    mine = _older_sources(graph, query, start)
    others = _joined_to_own(event)
    if others:
        return any(_older_sources(graph, value, start) != mine for value in others)
    return mine != _older_sources(graph, key, start)


def _joined_to_own(event: Event) -> list[Value]:
    """What was joined to the queries' own tokens to make the keys; nothing where the keys were not joined so."""
    value, seen = event.key, 0
    while value.producer is not None and seen < WALK:
        operation, seen = value.producer, seen + 1
        if operation.name in JOINS and joined_positions(event.key_label, event.query_label):
            own = [part for part in operation.inputs if any(same_axis(label, event.query_label) for label in part.labels)]
            return [part for part in operation.inputs if not any(part is one for one in own)] if own else []
        carriers = [part for part in operation.inputs if not part.static]
        if not carriers or (operation.product is not None and len(carriers) > 1):
            return []
        value = carriers[0]
    return []


def _asked_from_afar(event: Event) -> bool:
    """Whether the queries were made before the block began that makes the keys: they belong to something else than its tokens."""
    place, projection = _place(event), _last_projection(event.query)
    around = place.parent if place.parent is not None else place
    return projection is not None and around.parent is not None and not projection.frame.within(around)


def _made_inside(value: Value, event: Event) -> bool:
    projection = _last_projection(value)
    return projection is not None and projection.frame.within(_place(event))


def _projection_start(event: Event) -> int:
    """Index of the first operation of the call that holds the projections of query and key."""
    frame = _place(event)
    for value in (event.query, event.key):
        projection = _last_projection(value)
        if projection is not None:
            frame = common_frame(frame, projection.frame)
            if frame.parent is None:
                return min(p.index for p in map(_last_projection, (event.query, event.key)) if p is not None)
    return frame.first


def _last_projection(value: Value) -> Operation | None:
    todo, seen = [value], set[int]()
    while todo and len(seen) < 100:
        operation = todo.pop(0).producer
        if operation is None or operation.index in seen:
            continue
        seen.add(operation.index)
        if operation.product is not None and _makes_features(operation.product):
            return operation
        todo.extend(value for value in operation.inputs if not value.static)
    return None


def _makes_features(product: Product) -> bool:
    """Whether it is a product of data with a weight that takes features to features, not tokens to tokens."""
    if product.left.static == product.right.static:
        return False
    data, contracted = (product.right, product.right_contracted) if product.left.static else (product.left, product.left_contracted)
    over_features = any(is_feature(data.labels[axis]) for axis in contracted)
    return over_features or not any(is_feature(label) for label in data.labels)


def _older_sources(graph: Graph, value: Value, start: int) -> frozenset[int]:
    """Module calls finished before `start`, and inputs from outside, that the value depends on; norms and the like count for nothing."""
    sources: set[int] = set()
    todo, seen = [value], set[int]()
    while todo:
        current = todo.pop()
        if current.index in seen or current.static:
            continue
        seen.add(current.index)
        operation = current.producer
        if operation is None:
            sources.add(-current.index - 1)
            continue
        if operation.index < start:
            for frame in operation.frame.ancestors():
                if frame.parent is not None and 0 <= frame.last < start and _makes_states(graph, frame):
                    sources.add(frame.index)
                    break
        todo.extend(operation.inputs)
    return frozenset(sources)


def _makes_states(graph: Graph, frame: Frame) -> bool:
    """Whether the call does more than scale or shift what it is given."""
    inside = graph.operations[frame.first : frame.last + 1]
    return any(operation.product is not None or operation.name in ("embedding", *FUSED) for operation in inside)
