"""Which module is the block around an attention: the innermost repeated unit, judged by how it repeats."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from collapse_monitor.capture.discovery.graph import Frame, Graph
from collapse_monitor.capture.discovery.semantics import ADDITIONS, PERMUTES, RESHAPES
from collapse_monitor.capture.discovery.sites import FoundSite
from collapse_monitor.capture.discovery.tree import ModuleTree, parent_of, prefixes

UNIFORM, REPEATED, MEMBER, STAGE, NUMBERED, BARE, LOOPED, PARENT = range(1, 9)
"""How a candidate repeats, best first. UNIFORM: all running members of a container hold attention and are of one class.
REPEATED: two of them do. MEMBER: one does. STAGE: as UNIFORM or REPEATED, but most of them return another shape than they were given.
NUMBERED: attributes alike but for digits. BARE: a member that is itself the attention, and adds no residual of its own. LOOPED: one module
called again and again.
PARENT: nothing repeats, the caller of the attention."""

_VIEWS = RESHAPES | PERMUTES | frozenset("__getitem__ narrow select split chunk unbind contiguous clone".split())


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    tier: int


class Runs:
    """Which operations ran below each dotted name, and what they depended on."""

    def __init__(self, graph: Graph, sites: list[FoundSite]) -> None:
        self.graph = graph
        self.frames: dict[str, list[Frame]] = defaultdict(list)
        self._ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for frame in graph.frames[1:]:
            self.frames[frame.name].append(frame)
            for name in prefixes(frame.name):
                self._ranges[name].append((frame.first, frame.last))
        self.bearing = {name for site in sites for name in prefixes(site.frame.name)}

    def ran(self, name: str) -> bool:
        return name in self._ranges

    def start(self, name: str) -> int:
        return self._ranges[name][0][0]

    def operations(self, name: str) -> int:
        """Bit set of all operations that ran below the name."""
        mask = 0
        for first, last in self._ranges[name]:
            if last >= first:
                mask |= ((1 << (last - first + 1)) - 1) << first
        return mask

    def depends(self, later: str, earlier: str) -> bool:
        """Whether something below `later` used what ran below `earlier`."""
        mask = self.operations(earlier)
        mine = self.operations(later)
        for first, last in self._ranges[later]:
            for operation in self.graph.operations[first : last + 1]:
                if operation.ancestry & mask & ~mine:
                    return True
        return False

    def keeps_shape(self, name: str) -> bool:
        """Whether every call of the module returned something shaped like what it was given."""
        for frame in self.frames[name]:
            given = {value.shape for value in frame.inputs if not value.static and len(value.shape) >= 2}
            if not any(value.shape in given for _, value in frame.outputs):
                return False
        return bool(self.frames[name])

    def in_series(self, members: list[str]) -> bool:
        """Whether some member works on what an earlier one made."""
        ordered = sorted((name for name in members if self.ran(name)), key=self.start)
        return len(ordered) < 2 or any(self.depends(later, earlier) for earlier, later in zip(ordered, ordered[1:], strict=False))


def candidates(site: FoundSite, tree: ModuleTree, runs: Runs) -> list[Candidate]:
    """Every module that could be the block around this site, innermost first."""
    found: list[Candidate] = []
    own = site.frame.name
    bare = not _adds_residual(own, runs, site)  # attention written out in the forward of the block itself is no bare attention
    for name in prefixes(own):
        parent = parent_of(name)
        if tree.is_container(parent):
            tier = _membership(name, parent, tree, runs)
            if tier is not None:
                found.append(Candidate(name, BARE if name == own and bare else tier))
        elif _numbered_siblings(name, parent, tree, runs):
            found.append(Candidate(name, BARE if name == own and bare else NUMBERED))
        if name != own and len(runs.frames[name]) > 1 and _looped(runs.frames[name], runs.graph):
            found.append(Candidate(name, LOOPED))
    found.append(Candidate(parent_of(own), PARENT))
    return found


def _membership(name: str, parent: str, tree: ModuleTree, runs: Runs) -> int | None:
    members = [child for child in tree.children(parent) if runs.ran(child)]
    bearing = [child for child in members if child in runs.bearing]
    if not runs.in_series(bearing) and not all(_adds_residual(child, runs) for child in bearing):
        return None
    alike = [child for child in bearing if tree.class_of(child) is tree.class_of(name)]
    if len(alike) < 2 and len(members) > 1:
        return MEMBER
    called = [child for child in alike if runs.frames[child]]
    if 2 * sum(runs.keeps_shape(child) for child in called) < len(called):
        return STAGE
    return UNIFORM if len(alike) == len(members) else REPEATED


def _adds_residual(name: str, runs: Runs, site: FoundSite | None = None) -> bool:
    """Whether the member adds its own input, or some tokens of it, to something inside its forward: to the site's result, if given."""
    made = None if site is None else (site.first.consumer or site.first.operation)
    for frame in runs.frames[name]:
        given = {value.index for value in frame.inputs if made is not None or not value.static}
        for operation in runs.graph.operations[frame.first : frame.last + 1]:
            if operation.name in ADDITIONS and any(value.index in given for value in operation.inputs):
                if made is None or any(value.index not in given and value.stems_from(made) for value in operation.inputs):
                    return True
            if operation.name in _VIEWS and operation.inputs[0].index in given:
                given |= {value.index for value in operation.outputs}
    return False


def joins_a_stream(site: FoundSite, runs: Runs) -> bool:
    """Whether the site's result is added to data that does not stem from it."""
    made = site.first.consumer or site.first.operation
    for operation in runs.graph.operations[made.index + 1 :]:
        operands = [value for value in operation.inputs if not value.static]
        if operation.name in ADDITIONS and len(operands) > 1 and [value.stems_from(made) for value in operands].count(True) == 1:
            return True
    return False


def _numbered_siblings(name: str, parent: str, tree: ModuleTree, runs: Runs) -> bool:
    pattern = _without_digits(name)
    if pattern == name:
        return False
    siblings = [child for child in tree.children(parent) if child in runs.bearing and _without_digits(child) == pattern]
    return len(siblings) > 1 and runs.in_series(siblings)


def _without_digits(name: str) -> str:
    head, _, last = name.rpartition(".")
    return f"{head}." + re.sub(r"\d+", "#", last)


def _looped(frames: list[Frame], graph: Graph) -> bool:
    first, second = frames[0], frames[1]
    made = sum(1 << index for index in range(first.first, first.last + 1))
    return any(operation.ancestry & made for operation in graph.operations[second.first : second.last + 1])
