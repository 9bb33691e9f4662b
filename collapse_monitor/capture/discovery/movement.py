"""Following single elements backwards through functions that only move them: views, joins, copies, padding, rolls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from collapse_monitor.capture.discovery.graph import Given, Operation, Value
from collapse_monitor.capture.discovery.semantics import PERMUTES, RESHAPES

VIEWS = (
    RESHAPES
    | PERMUTES
    | frozenset(
        "select unbind chunk split split_with_sizes tensor_split unsafe_split unsafe_chunk hsplit vsplit dsplit narrow __getitem__ "
        "expand expand_as broadcast_to unfold squeeze_ unsqueeze_".split()
    )
)
COPIES = frozenset("contiguous clone to type float half double bfloat16 detach get_data type_as alias requires_grad_ cuda cpu".split())
"""Functions whose every element is the element of the first argument at the same place."""
MASKINGS = frozenset("dropout dropout_ feature_dropout masked_fill masked_fill_".split())
"""The same, but some elements are replaced by a constant."""
_JOINS = frozenset("cat concat concatenate stack complex".split())
_OTHERS = frozenset("roll flip repeat tile repeat_interleave pad index_select view_as_complex view_as_real __setitem__".split())
MOVEMENTS = VIEWS | COPIES | MASKINGS | _JOINS | _OTHERS

Coordinates = Int[np.ndarray, "point axis"]


class Untraceable(Exception):
    """Why elements cannot be followed further."""


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Elements of one value. `mark` says which element of the start each descends to; `sample` numbers the token looked at."""

    at: Coordinates
    mark: Int[np.ndarray, " point"]
    sample: Int[np.ndarray, " point"]

    def of(self, at: Coordinates) -> Points:
        """The same points at other coordinates."""
        return Points(at, self.mark, self.sample)

    def kept(self, chosen: np.ndarray) -> Points:
        return Points(self.at[chosen], self.mark[chosen], self.sample[chosen])

    def one_place(self, axis: int) -> bool:
        """Whether the points of one token lie at one place of the axis: it runs over tokens or sequences, not over features."""
        return all(np.ptp(self.at[self.sample == sample, axis]) == 0 for sample in np.unique(self.sample))


def merged(parts: Iterable[Points]) -> Points:
    """Points of one value, found on several ways."""
    listed = list(parts)
    fields = ([getattr(part, name) for part in listed] for name in ("at", "mark", "sample"))
    return Points(*(np.concatenate(field) for field in fields))


def spread(at: Coordinates, shape: Sequence[int]) -> Coordinates:
    """Coordinates in an operand of this shape, for elements of a result it was broadcast to."""
    own = at[:, at.shape[1] - len(shape) :]
    return np.where(np.asarray(shape, dtype=np.int64) == 1, 0, own).reshape(len(at), len(shape))


def sources(operation: Operation, value: Value, points: Points) -> list[tuple[Value, Points]]:
    """Where the elements of `value`, an output of a movement, were before; elements made from nothing are left out.

    Raises:
        Untraceable: the function was called in a way that is not followed.
    """
    name, given = operation.name, operation.given
    source = operation.inputs[0]
    if not any(value is output for output in operation.outputs):
        raise Untraceable(f"it is changed in place through a view ({name})")
    if given is None:
        raise Untraceable(f"how {name} was called is not known")
    if name in COPIES or name in MASKINGS:
        return [(source, points.of(spread(points.at, source.shape)))]
    if name in VIEWS:
        if name == "__getitem__" and _index_values(given):
            return [(source, _gathered(points, source, given.args[1]))]
        if name == "__getitem__" and (picked := _listed(given.args[1], len(source.shape))) is not None:
            axis, places = picked
            at = points.at.copy()
            at[:, axis] = np.asarray(places, dtype=np.int64)[at[:, axis]] % source.shape[axis]
            return [(source, points.of(at))]
        return [(source, points.of(_through_view(operation, value, points.at)))]
    if name in _JOINS:
        return _joined(name, given, points, len(value.shape))
    if name == "__setitem__":
        return _overwritten(given, points)
    if name == "view_as_complex":
        halves = [points.of(np.insert(points.at, points.at.shape[1], half, axis=1)) for half in (0, 1)]
        return [(source, merged(halves))]
    return [(source, _moved(name, given, source, value, points))]


def _through_view(operation: Operation, value: Value, at: Coordinates) -> Coordinates:
    """Run the very function on a meta tensor: strides and offset of its result say where every element lies in the source."""
    given, source = operation.given, operation.inputs[0]
    assert given is not None
    with torch.inference_mode(False):
        stand_in = torch.empty(source.shape, device="meta")
        if operation.name in ("view_as", "reshape_as"):
            results: Any = stand_in.reshape(value.shape)
        elif operation.name == "expand_as":
            results = stand_in.expand(value.shape)
        else:
            args, kwargs = (_replaced(part, source, stand_in) for part in (given.args, dict(given.kwargs)))
            results = given.function(*args, **kwargs)
    place = next(index for index, output in enumerate(operation.outputs) if output is value)
    result = results[place] if isinstance(results, tuple | list) else results
    view = isinstance(result, torch.Tensor) and (result is stand_in or result._base is stand_in) and result.dtype is stand_in.dtype
    if not view or tuple(result.shape) != value.shape:
        raise Untraceable(f"{operation.name} made a copy in an order that is not followed")
    flat = result.storage_offset() + at @ np.asarray(result.stride(), dtype=np.int64).reshape(-1)
    return np.stack(np.unravel_index(flat, source.shape), axis=1) if source.shape else np.zeros((len(at), 0), dtype=np.int64)


def _replaced(structure: Any, source: Value, stand_in: torch.Tensor) -> Any:
    if structure is source:
        return stand_in
    if isinstance(structure, Value):
        raise Untraceable("it depends on the values of another tensor")
    if isinstance(structure, tuple | list):
        items = [_replaced(item, source, stand_in) for item in structure]
        return items if isinstance(structure, list) else tuple(items)
    return {key: _replaced(item, source, stand_in) for key, item in structure.items()} if isinstance(structure, dict) else structure


def _index_values(given: Given) -> list[Value]:
    index = given.args[1] if len(given.args) > 1 else None
    return [item for item in (index if isinstance(index, tuple | list) else (index,)) if isinstance(item, Value)]


def _listed(index: Any, ndim: int) -> tuple[int, list[int]] | None:
    """`x[..., [0, 2]]`: the axis and the list; None for any other index."""
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in items:
        place = items.index(Ellipsis)
        items[place : place + 1] = [slice(None)] * (ndim - len(items) + 1)
    lists = [axis for axis, item in enumerate(items) if isinstance(item, list) and all(type(entry) is int for entry in item)]
    whole = all(isinstance(item, list) or (isinstance(item, slice) and item == slice(None)) for item in items)
    return (lists[0], items[lists[0]]) if len(lists) == 1 and whole else None


def _gathered(points: Points, source: Value, index: Any) -> Points:
    """Picked by one index tensor along token or sequence axes: which element it was is not known there, and does not matter."""
    items = index if isinstance(index, tuple) else (index,)
    place = next(i for i, item in enumerate(items) if isinstance(item, Value))
    chosen, rest = items[place], (*items[:place], *items[place + 1 :])
    if any(not (isinstance(item, slice) and item == slice(None)) and not (item is Ellipsis and i > place) for i, item in enumerate(rest)):
        raise Untraceable("it is picked by an index tensor and other indices at once")
    made = len(chosen.shape)
    used = 1
    if points.at.shape[1] == len(source.shape) - made + 1 and made > 1:
        made, used = 1, made  # a boolean mask: its axes became one
    if points.at.shape[1] != len(source.shape) - used + made or not all(points.one_place(place + axis) for axis in range(made)):
        raise Untraceable("its features are picked by an index tensor")
    unknown = np.zeros((len(points.at), used), dtype=np.int64)
    return points.of(np.concatenate([points.at[:, :place], unknown, points.at[:, place + made :]], axis=1))


def _joined(name: str, given: Given, points: Points, ndim: int) -> list[tuple[Value, Points]]:
    """The part of a join every element comes from. Parts along a token axis that no point falls into are still among the sources."""
    if name == "complex":
        return [(part, points) for part in given.args]
    parts = given.argument(0, "tensors")
    if not isinstance(parts, tuple | list) or not all(isinstance(part, Value) for part in parts):
        raise Untraceable(f"the parts of {name} are not known")
    axis = given.argument(1, "dim", given.kwargs.get("axis", 0)) % ndim
    found = []
    start = 0
    for part in parts:
        size = 1 if name == "stack" else part.shape[axis] if len(part.shape) == ndim else 0
        inside = (points.at[:, axis] >= start) & (points.at[:, axis] < start + size)
        if inside.any():
            at = points.at[inside]
            own = np.delete(at, axis, axis=1) if name == "stack" else at - start * (np.arange(ndim) == axis)
            found.append((part, points.kept(inside).of(own)))
        start += size
    return found


def _overwritten(given: Given, points: Points) -> list[tuple[Value, Points]]:
    """`base[index] = patch`: elements inside the index come from the patch, the others from what was there before."""
    base, index, patch = given.args
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (isinstance(item, slice | int) or item is Ellipsis) or isinstance(item, bool) for item in items):
        raise Untraceable("it is written into by an index tensor")
    if Ellipsis in items:
        place = items.index(Ellipsis)
        items[place : place + 1] = [slice(None)] * (len(base.shape) - len(items) + 1)
    inside = np.ones(len(points.at), dtype=bool)
    own = []
    for axis, item in enumerate(items):
        at = points.at[:, axis]
        if isinstance(item, int):
            inside &= at == item % base.shape[axis]
            continue
        start, stop, step = item.indices(base.shape[axis])
        inside &= (at >= start) & (at < stop) & ((at - start) % step == 0)
        own.append((at - start) // step)
    within = np.stack([*own, *points.at[:, len(items) :].T], axis=1)
    found = [(base, points.kept(~inside))] if not inside.all() else []
    if inside.any() and isinstance(patch, Value):
        found.append((patch, points.kept(inside).of(spread(within[inside], patch.shape))))
    return found


def _moved(name: str, given: Given, source: Value, value: Value, points: Points) -> Points:
    at, ndim = points.at.copy(), len(source.shape)
    sizes = np.asarray(source.shape, dtype=np.int64)
    if name == "view_as_real":
        return points.of(at[:, :-1])
    if name in ("repeat", "tile"):
        return points.of(at[:, at.shape[1] - ndim :] % sizes)
    if name == "pad":
        widths = given.argument(1, "pad")
        if given.argument(2, "mode", "constant") != "constant":
            raise Untraceable("it is padded with its own values")
        for back in range(len(widths) // 2):
            at[:, ndim - 1 - back] -= widths[2 * back]
        return points.of(at).kept(np.asarray(((at >= 0) & (at < sizes)).all(axis=1)))
    if name == "repeat_interleave":
        repeats, axis = given.argument(1, "repeats"), given.argument(2, "dim")
        if not isinstance(repeats, int) or axis is None or value.shape[axis] != source.shape[axis] * repeats:
            raise Untraceable("it is repeated in a pattern that is not followed")
        at[:, axis % ndim] //= repeats
        return points.of(at)
    if name == "index_select":
        axis = given.argument(1, "dim") % ndim
        if not points.one_place(axis):
            raise Untraceable("its features are picked by an index tensor")
        at[:, axis] = 0
        return points.of(at)
    axes = given.argument(2, "dims") if name == "roll" else given.args[1:] or given.kwargs["dims"]
    if axes is None:
        raise Untraceable(f"{name} runs over all axes at once")
    listed = [axis % ndim for entry in (axes if isinstance(axes, tuple | list) else (axes,)) for axis in np.atleast_1d(entry)]
    shifts = np.atleast_1d(given.argument(1, "shifts")) if name == "roll" else [0] * len(listed)
    for axis, shift in zip(listed, shifts, strict=True):
        at[:, axis] = (at[:, axis] - shift) % sizes[axis] if name == "roll" else sizes[axis] - 1 - at[:, axis]
    return points.of(at)
