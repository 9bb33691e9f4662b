"""From sites to block executions: the repeated units that carry the residual stream, in order of entry."""

from __future__ import annotations

from dataclasses import dataclass, field

from collapse_monitor.capture.discovery.candidates import BARE, NUMBERED, REPEATED, UNIFORM, Runs, candidates, joins_a_stream
from collapse_monitor.capture.discovery.graph import Frame, Graph
from collapse_monitor.capture.discovery.sites import FoundSite
from collapse_monitor.capture.discovery.tree import ModuleTree, parent_of, prefixes

_HYBRID_SHARE = 0.05
"""A member without attention counts as a block when it weighs at least this share of the mean member with attention beside it."""
_PURE_SHARE = 0.85
"""Unless attention makes up more than this share of the members that have one: then the list is attention, feed-forward, attention ..."""
_PARTNERS = 2
"""... as long as no more than so many members without attention come to one with it."""
_DESCEND_SHARE = 0.5


@dataclass(slots=True, eq=False)
class FoundBlock:
    """One execution of a block. `frame` is its call; None for a unit that is never called itself (then `calls` are its parts)."""

    name: str
    start: int
    end: int
    frame: Frame | None = None
    calls: list[Frame] = field(default_factory=list)
    sites: list[FoundSite] = field(default_factory=list)
    ran: bool = True


def find_blocks(graph: Graph, sites: list[FoundSite], mixers: list[FoundSite], tree: ModuleTree) -> list[FoundBlock]:
    """Block executions in order of entry; sites outside all of them (pooling heads) belong to none.

    `mixers` mix tokens or channels of data with data without being attention sites; they help to find blocks only.
    """
    carriers = sorted((*sites, *mixers), key=lambda site: site.start)
    runs = Runs(graph, carriers)
    names = _chosen(carriers, tree, runs, alone=not sites) if carriers else set()
    if names:
        names |= _hybrid_members(names, carriers, tree, runs)
        names |= _stages_alike(names, tree, runs)
    elif not sites:
        names = _without_attention(tree, runs)
    blocks = [block for name in names for block in _executions(name, graph, carriers, runs)]
    blocks += [FoundBlock(name, _gap(name, tree, runs), -1, ran=False) for name in sorted(_skipped(names, tree, runs))]
    blocks.sort(key=lambda block: block.start)
    if not blocks and (len(sites) > 1 or any(joins_a_stream(site, runs) for site in sites)):
        return _inline(graph, sites)
    for block in blocks:
        if block.ran:
            block.sites = [site for site in sites if block.start <= site.start <= block.end and _holds(block, site)]
    return blocks


def _chosen(sites: list[FoundSite], tree: ModuleTree, runs: Runs, alone: bool) -> set[str]:
    options = {id(site): candidates(site, tree, runs) for site in sites}
    best = {key: min(found, key=lambda c: c.tier) for key, found in options.items()}  # ties: the first, innermost
    proper = {key: choice for key, choice in best.items() if choice.tier < BARE}
    if not proper and alone:
        return set()
    if not proper:
        return {choice.name for choice in best.values() if choice.name or _is_root_block(sites, runs)}
    classes = {tree.class_of(choice.name) for choice in proper.values() if choice.tier in (UNIFORM, REPEATED, NUMBERED)} - {None}
    names: set[str] = set()
    for site in sites:
        known = next(
            (
                name
                for name in prefixes(site.frame.name)
                if name != site.frame.name and tree.class_of(name) in classes and not tree.is_container(name)
            ),
            None,
        )
        if known is not None:
            names.add(known)
        elif id(site) in proper:
            names.add(proper[id(site)].name)
    return {name for name in names if not any(other.startswith(name + ".") for other in names)}


def _is_root_block(sites: list[FoundSite], runs: Runs) -> bool:
    """The model itself is a block when every attention is in a module of its own, and is added to what was there before."""
    return all(site.frame.name for site in sites) and any(joins_a_stream(site, runs) for site in sites)


def _hybrid_members(names: set[str], sites: list[FoundSite], tree: ModuleTree, runs: Runs) -> set[str]:
    """Members without attention beside members with it: state-space or convolution layers of a hybrid."""
    added: set[str] = set()
    for parent in {parent_of(name) for name in names if tree.is_container(parent_of(name))}:
        members = [child for child in tree.children(parent) if runs.ran(child)]
        bearing = [child for child in members if child in names]
        others = [child for child in members if child not in runs.bearing]
        if not bearing or not others:
            continue
        held = [site.frame.name for site in sites if any(child in prefixes(site.frame.name) for child in bearing)]
        attention = sum(tree.weight(name) for name in held)
        weight = sum(tree.weight(child) for child in bearing)
        units = {child for child in others if runs.keeps_shape(child) and tree.children(child)}
        inline = {tree.class_of(name) for name in held if name in bearing}  # what such a class does else is up to a flag
        added |= {child for child in units if tree.class_of(child) in inline}
        pure = attention > _PURE_SHARE * max(1, weight)
        if not pure or len(units) > _PARTNERS * len(bearing):
            added |= {child for child in units if tree.weight(child) * len(bearing) >= _HYBRID_SHARE * weight}
    return added


def _stages_alike(names: set[str], tree: ModuleTree, runs: Runs) -> set[str]:
    """Stages of the same class of blocks that mix tokens without attention, before or after those that use it."""
    classes = {tree.class_of(name) for name in names if not tree.is_container(name)}
    starts = [runs.start(name) for name in names if runs.ran(name)]
    added: set[str] = set()
    for parent in [name for name in tree.modules if tree.is_container(name)]:
        members = [child for child in tree.children(parent) if runs.ran(child)]
        if not members or any(child in runs.bearing or tree.class_of(child) not in classes for child in members):
            continue
        first, last = min(map(runs.start, members)), max(map(runs.start, members))
        if all(map(runs.keeps_shape, members)) and not any(first <= start <= last for start in starts):
            added |= set(members)
    return added


def _skipped(names: set[str], tree: ModuleTree, runs: Runs) -> set[str]:
    """Members of a chosen class that did not run this time: layer drop, stochastic depth."""
    skipped: set[str] = set()
    for parent in {parent_of(name) for name in names if tree.is_container(parent_of(name))}:
        classes = {tree.class_of(name) for name in names if parent_of(name) == parent}
        skipped |= {
            child for child in tree.children(parent) if not runs.ran(child) and tree.class_of(child) in classes and tree.children(child)
        }
    return skipped


def _gap(name: str, tree: ModuleTree, runs: Runs) -> int:
    """Where a skipped member would have run: after the last earlier sibling that did."""
    start = -1
    for child in tree.children(parent_of(name)):
        if child == name:
            break
        if runs.ran(child):
            start = max(start, runs.start(child))
    return start


def _executions(name: str, graph: Graph, sites: list[FoundSite], runs: Runs) -> list[FoundBlock]:
    if name == "":
        return [FoundBlock("", 0, len(graph.operations) - 1, graph.frames[0])]
    frames = [frame for frame in runs.frames[name] if not any(f.name == name for f in frame.ancestors() if f is not frame)]
    if frames:
        found = [FoundBlock(name, frame.first, frame.last, frame) for frame in frames]
        heard = [block for block in found if any(block.start <= site.start <= block.end for site in sites)]
        return heard if heard and name in runs.bearing else found
    return _virtual_executions(name, graph)


def _virtual_executions(name: str, graph: Graph) -> list[FoundBlock]:
    """A unit that is never called: its parts are, and the first part called again after another one begins the next execution."""
    parts = [
        frame
        for frame in graph.frames[1:]
        if frame.name.startswith(name + ".") and frame.parent is not None and not frame.parent.name.startswith(name + ".")
    ]
    blocks: list[FoundBlock] = []
    single = len({frame.name for frame in parts}) == 1
    for frame in parts:
        again = bool(blocks) and frame.name == blocks[-1].calls[0].name
        if not blocks or (again and (single or blocks[-1].calls[-1].name != frame.name)):
            blocks.append(FoundBlock(name, frame.first, frame.last))
        blocks[-1].calls.append(frame)
        blocks[-1].end = max(blocks[-1].end, frame.last)
    return blocks


def _inline(graph: Graph, sites: list[FoundSite]) -> list[FoundBlock]:
    """No module repeats: each attention written out in one long forward is a block of its own."""
    ends = [site.start - 1 for site in sites[1:]] + [len(graph.operations) - 1]
    starts = [0, *[(site.first.product or site.first.operation).index for site in sites[1:]]]
    return [FoundBlock(site.frame.name, start, end, sites=[site]) for site, start, end in zip(sites, starts, ends, strict=True)]


def _holds(block: FoundBlock, site: FoundSite) -> bool:
    name = site.frame.name
    return block.name == "" or name == block.name or name.startswith(block.name + ".")


def _without_attention(tree: ModuleTree, runs: Runs) -> set[str]:
    """Without attention: the members of homogeneous lists in series that keep the shape, as deep as the weights are."""
    found: set[str] = set()
    alone: set[str] = set()
    reshaping: set[type | None] = set()
    for parent in [name for name in tree.modules if tree.is_container(name)]:
        running = [child for child in tree.children(parent) if runs.ran(child)]
        for kind in {tree.class_of(child) for child in running}:
            members = [child for child in running if tree.class_of(child) is kind]
            if not runs.in_series(members) or not all(map(tree.children, members)):
                continue
            if len(members) == 1:
                alone |= {child for child in members if runs.keeps_shape(child) and not tree.is_container(child)}
            elif all(map(runs.keeps_shape, members)):
                found |= set(members)
            else:
                reshaping.add(kind)
    found = {name for name in found if tree.class_of(name) not in reshaping}
    known = {tree.class_of(name) for name in found}
    found |= {name for name in alone if tree.class_of(name) in known}
    return _as_deep_as_the_weights(found, tree)


def _as_deep_as_the_weights(found: set[str], tree: ModuleTree) -> set[str]:
    """Of nested units those that hold most of the weights of what is around them."""
    chosen: set[str] = set()
    level = _outermost(found)
    while level:
        outer = level.pop()
        inner = _outermost({name for name in found if name.startswith(outer + ".")})
        if inner and sum(tree.weight(name) for name in inner) >= _DESCEND_SHARE * tree.weight(outer):
            level |= inner
        else:
            chosen.add(outer)
    return chosen


def _outermost(names: set[str]) -> set[str]:
    return {name for name in names if not any(name.startswith(other + ".") for other in names)}
