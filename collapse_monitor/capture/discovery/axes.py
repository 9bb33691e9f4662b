"""Axis labels: where each axis of a tensor came from.

A label is a tuple of atoms, outermost first, whose sizes multiply to the size of the axis (an axis of size 1 has none). Views
split and merge atoms, slices derive new ones, products pass the free axes of their operands on. That is enough to tell, at a
softmax, which axis runs over queries, keys, heads and sequences, whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Atom:
    """An indivisible axis. `feature`: made by a weight (a channel), not by the data (a batch entry, a token)."""

    size: int
    feature: bool = False
    parents: tuple[Atom, ...] = ()

    def descends_from(self, other: Atom) -> bool:
        todo, seen = [self], set[int]()
        while todo:
            atom = todo.pop()
            if atom is other:
                return True
            if id(atom) not in seen:
                seen.add(id(atom))
                todo.extend(atom.parents)
        return False


Label = tuple[Atom, ...]
Labels = tuple[Label, ...]


def fresh(size: int, feature: bool = False) -> Label:
    """A new axis, related to nothing."""
    return (Atom(size, feature),) if size != 1 else ()


def fresh_axes(shape: Iterable[int], feature: bool = False) -> Labels:
    return tuple(fresh(size, feature) for size in shape)


def derived(label: Label, size: int) -> Label:
    """An axis of another size made from this one (slice, pad, pool, repeat)."""
    if size_of(label) == size:
        return label
    return (Atom(size, any(atom.feature for atom in label), label),) if size != 1 else ()


def size_of(label: Label) -> int:
    """How many positions the axis has."""
    return math.prod(atom.size for atom in label)


def fitted(labels: Labels, shape: tuple[int, ...]) -> Labels:
    """Make labels agree with the shape seen: a wrong size means an axis whose origin is not known."""
    if len(labels) != len(shape):
        return fresh_axes(shape)
    return tuple(label if size_of(label) == size else derived(label, size) for label, size in zip(labels, shape, strict=True))


def renewed(label: Label) -> Label:
    """The same axis under a name of its own."""
    return tuple(Atom(atom.size, atom.feature, (atom,)) for atom in label)


def related(one: Label, other: Label) -> bool:
    """Whether the two axes share an atom, or one holds an ancestor of the other's."""
    return any(a.descends_from(b) or b.descends_from(a) for a in one for b in other)


def same_axis(one: Label, other: Label) -> bool:
    """Whether both run over the very same positions: they lead back to a common atom without a change of size."""
    return bool(_unchanged(one) & _unchanged(other))


def slides(window: Label, along: Label) -> bool:
    """Whether `window` runs over the neighbours of every position of `along`: both were cut from one axis, which `along` covers."""
    mine, theirs = _ancestors(window), _ancestors(along)
    common = {key: atom for key, atom in theirs.items() if key in mine and atom.size > 1}
    nearest = {key for key, atom in common.items() if not any(other.descends_from(atom) for other in common.values() if other is not atom)}
    covered = math.prod(common[key].size for key in nearest)
    return bool(nearest) and not same_axis(window, along) and 2 * size_of(along) > covered


def _ancestors(label: Label) -> dict[int, Atom]:
    """All atoms that lead to a label, itself included."""
    todo, seen = list(label), dict[int, Atom]()
    while todo:
        atom = todo.pop()
        if id(atom) not in seen:
            seen[id(atom)] = atom
            todo.extend(atom.parents)
    return seen


def joined_positions(whole: Label, part: Label) -> int:
    """How many positions of an axis are those of another one that was joined to something else to make it."""
    if len(whole) != 1 or same_axis(whole, part):
        return 0
    return _shared(whole[0], _unchanged(part))


def _shared(atom: Atom, own: set[int]) -> int:
    if _unchanged((atom,)) & own:
        return atom.size
    factors = len(atom.parents) > 1 and math.prod(parent.size for parent in atom.parents) == atom.size
    if factors and all(_unchanged((parent,)) & own for parent in atom.parents):
        return atom.size
    joined = len(atom.parents) > 1 and sum(parent.size for parent in atom.parents) == atom.size
    renamed = len(atom.parents) == 1 and atom.parents[0].size == atom.size
    return sum(_shared(parent, own) for parent in atom.parents) if joined or renamed else 0


def _unchanged(label: Label) -> set[int]:
    todo, seen = list(label), set[int]()
    while todo:
        atom = todo.pop()
        if id(atom) not in seen:
            seen.add(id(atom))
            todo.extend(parent for parent in atom.parents if parent.size == atom.size)
    return seen


def is_feature(label: Label) -> bool:
    """Whether the axis consists of channels only."""
    return bool(label) and all(atom.feature for atom in label)


class Splits:
    """Remembers how atoms were split, so that splitting one atom twice gives the same halves."""

    def __init__(self) -> None:
        self._halves: dict[tuple[Atom, int], tuple[Atom, Atom]] = {}

    def split(self, atom: Atom, outer: int) -> tuple[Atom, Atom]:
        key = (atom, outer)
        if key not in self._halves:
            self._halves[key] = (Atom(outer, atom.feature, (atom,)), Atom(atom.size // outer, atom.feature, (atom,)))
        return self._halves[key]

    def reshape(self, labels: Labels, shape: Sequence[int]) -> Labels:
        """Labels after a view to `shape`: atoms are handed out in order, split where an axis ends inside one."""
        queue = [atom for label in labels for atom in label][::-1]
        if any(atom.size == 0 for atom in queue):
            return fresh_axes(shape)
        result: list[Label] = []
        for size in shape:
            label: list[Atom] = []
            need = size
            while need > 1 and queue:
                atom = queue.pop()
                if need % atom.size == 0:
                    label.append(atom)
                    need //= atom.size
                elif atom.size % need == 0:
                    outer, inner = self.split(atom, need)
                    label.append(outer)
                    queue.append(inner)
                    need = 1
                else:
                    return (*result, *fresh_axes(shape[len(result) :]))
            result.append(tuple(label) if need == 1 else fresh(size))
        return tuple(result)


def broadcast(operands: Sequence[tuple[Sequence[int], Labels]], shape: Sequence[int]) -> Labels:
    """Labels of an element-wise result: per axis those of an operand that is not broadcast there, one that knows it for channels first."""
    result: list[Label] = []
    for axis in range(-len(shape), 0):
        size = shape[axis]
        candidates = [labels[axis] for dims, labels in operands if len(dims) >= -axis and dims[axis] == size and labels[axis]]
        result.append(prefer_feature(candidates) if candidates else fresh(size))
    return tuple(result)


def prefer_feature(candidates: Sequence[Label]) -> Label:
    """The first label; but one of a tensor from outside says nothing about its channels, so there another's channel label wins."""
    first = candidates[0]
    if is_feature(first) or any(atom.parents for atom in first):
        return first
    return next((label for label in candidates if is_feature(label)), first)
