"""What one torch function does to axes: the labels of its result, and the contraction it is, if it is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collapse_monitor.capture.discovery.axes import (
    Atom,
    Label,
    Labels,
    Splits,
    broadcast,
    derived,
    fitted,
    fresh,
    fresh_axes,
    is_feature,
    prefer_feature,
    size_of,
)
from collapse_monitor.capture.discovery.graph import Operation, Product, Value
from collapse_monitor.capture.discovery.products import PRODUCTS, pairing_of, product_of, summed_product

RESHAPES = frozenset("view reshape flatten unflatten view_as reshape_as squeeze unsqueeze ravel _unsafe_view".split())
PERMUTES = frozenset(
    "permute transpose swapaxes swapdims t movedim moveaxis get_T get_mT get_H get_mH adjoint transpose_ t_ swapaxes_".split()
)
JOINS = frozenset("cat concat concatenate hstack vstack".split())
REDUCTIONS = frozenset(
    (
        "sum mean amax amin max min logsumexp prod var std norm vector_norm nansum median all any argmax argmin var_mean std_mean nanmean"
    ).split()
)
SOFTMAXES = frozenset("softmax _safe_softmax _softmax gumbel_softmax softmax_".split())
ADDITIONS = frozenset("add __add__ __radd__ __iadd__ add_".split())
SUMS = ADDITIONS | {"addcmul"}
DIFFERENCES = frozenset("sub __sub__ __rsub__ __isub__ sub_ subtract rsub".split())
SCALINGS = frozenset("mul __mul__ __rmul__ __imul__ mul_ multiply".split())
QUOTIENTS = frozenset("div __truediv__ __itruediv__ div_ true_divide divide".split())
NEGATIONS = frozenset("neg negative neg_ __neg__".split())


def reduces(operation: Operation) -> bool:
    """Whether it takes axes away; `max` and `min` of two tensors are element-wise."""
    return operation.name in REDUCTIONS and bool(operation.axes)


def bare_name(function: Callable[..., Any]) -> str:
    """`softmax` for torch.softmax, F.softmax, Tensor.softmax and aten::softmax.int alike; `get_T` for the property."""
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        return "get_" + getattr(getattr(function, "__self__", None), "__name__", "")
    return str(name).split(".")[0]


@dataclass(slots=True)
class Call:
    """One torch function call on known values. `value` looks a tensor argument up."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Callable[[Tensor], Value]
    shapes: list[tuple[int, ...]]
    splits: Splits

    def argument(self, position: int, keyword: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(keyword, default)


def describe(call: Call, inputs: Sequence[Value]) -> tuple[list[Labels], Product | None, tuple[int, ...]]:
    """Labels of every output, the contraction, and the axes a reduction or softmax runs over."""
    if not inputs or not call.shapes:
        return [fresh_axes(shape) for shape in call.shapes], None, ()
    name, source = call.name, inputs[0]
    if name in PRODUCTS:
        product, labels = product_of(call)
        if labels is not None and len(labels) == len(call.shapes[0]):
            return [fitted(labels, call.shapes[0])], product, ()
        return [fresh_axes(shape) for shape in call.shapes], product, ()
    if name == "scaled_dot_product_attention":
        query, value = inputs[0], inputs[2]
        return [fitted((*query.labels[:-1], value.labels[-1]), call.shapes[0])], None, ()
    if name == "external_attention":
        query, value, kernel = inputs[0], inputs[2], call.args[0]
        labels = (*(query.labels[axis] for axis in kernel.result_axes[:-1]), value.labels[-1])
        return [fitted(labels, shape) if len(shape) == len(labels) else fresh_axes(shape) for shape in call.shapes], None, ()
    if name in SOFTMAXES or name == "log_softmax":
        return [source.labels], None, (_softmax_axis(call, len(source.shape)),)
    if name in RESHAPES:
        return [call.splits.reshape(source.labels, call.shapes[0])], None, ()
    if name in PERMUTES:
        return [_permuted(call, source)], None, ()
    if name in REDUCTIONS and not (name in ("max", "min") and isinstance(call.argument(1, "other"), Tensor)):
        axes = _reduced_axes(call, len(source.shape))
        reduced = [_without(source, axes, shape) for shape in call.shapes]
        return reduced, summed_product(source, axes, reduced[0]) if name == "sum" else None, axes
    if name == "embedding":
        ids = call.value(call.argument(0, "input"))
        return [fitted((*ids.labels, fresh(call.shapes[0][-1], feature=True)), call.shapes[0])], None, ()
    if name in JOINS or name == "stack":
        return [_joined(name, call, inputs)], None, ()
    if name in ("select", "unbind"):
        axis = _axis(call.argument(1, "dim", 0), len(source.shape))
        kept = source.labels[:axis] + source.labels[axis + 1 :]
        return [fitted(kept, shape) for shape in call.shapes], None, ()
    if name == "__getitem__":
        return [_indexed(call, source)], None, ()
    if name == "unfold":
        return [_unfolded(call, source)], None, ()
    if name in ("expand", "expand_as", "broadcast_to", "repeat", "tile"):
        return [_expanded(source, call.shapes[0])], None, ()
    paired = pairing_of(call)
    if paired is not None:
        return [paired[1]], paired[0], ()
    return [_elementwise(inputs, shape) for shape in call.shapes], None, ()


def _axis(axis: int, ndim: int) -> int:
    return int(axis) % max(ndim, 1)


def _softmax_axis(call: Call, ndim: int) -> int:
    position = 4 if call.name == "gumbel_softmax" else 1
    axis = call.argument(position, "dim", -1)
    return _axis(-1 if axis is None else axis, ndim)


def _permuted(call: Call, source: Value) -> Labels:
    """Run the very function on a meta tensor with distinct sizes and read the permutation off its result."""
    ndim = len(source.shape)
    sizes = [axis + 2 for axis in range(ndim)]
    stand_in = torch.empty(sizes, device="meta")
    if call.name.startswith("get_"):
        result = getattr(stand_in, call.name[4:])
    else:
        method = getattr(stand_in, call.name)
        result = method(*call.args[1:], **{key: item for key, item in call.kwargs.items() if not isinstance(item, Tensor)})
    return tuple(source.labels[size - 2] for size in result.shape)


def _reduced_axes(call: Call, ndim: int) -> tuple[int, ...]:
    position = 2 if call.name in ("norm", "vector_norm") else 1
    axes = call.argument(position, "dim", call.kwargs.get("axis"))
    if axes is None or isinstance(axes, Tensor | bool | torch.dtype):
        return tuple(range(ndim))
    return tuple(_axis(axis, ndim) for axis in (axes if isinstance(axes, tuple | list) else (axes,)))


def _without(source: Value, axes: tuple[int, ...], shape: tuple[int, ...]) -> Labels:
    if len(shape) == len(source.shape):
        return tuple(() if axis in axes else label for axis, label in enumerate(source.labels))
    return fitted(tuple(label for axis, label in enumerate(source.labels) if axis not in axes), shape)


def _joined(name: str, call: Call, inputs: Sequence[Value]) -> Labels:
    shape = call.shapes[0]
    if name == "stack":
        axis = _axis(call.argument(1, "dim", 0), len(shape))
        return fitted((*inputs[0].labels[:axis], fresh(shape[axis]), *inputs[0].labels[axis:]), shape)
    labels: list[Label] = []
    pieces = _are_pieces_of_features(inputs)
    for axis, size in enumerate(shape):
        members = [value.labels[axis] for value in inputs if len(value.labels) == len(shape)]
        if pieces and size == len(inputs) * inputs[0].shape[axis] != inputs[0].shape[axis]:
            labels.append((*fresh(len(inputs), feature=True), *members[0]))
            continue
        whole = [label for label in members if size_of(label) == size and label]
        if whole:
            labels.append(prefer_feature(whole))
        else:
            atoms = tuple(atom for label in members for atom in label)
            feature = bool(atoms) and all(atom.feature for atom in atoms)
            labels.append((Atom(size, feature, tuple(atom for label in members for atom in _as_one(label))),) if size != 1 else ())
    return tuple(labels)


def _as_one(label: Label) -> Label:
    """The axis as a single atom, so that the parts of a join can be told from the factors of one part."""
    return label if len(label) < 2 else (Atom(size_of(label), all(atom.feature for atom in label), label),)


def _are_pieces_of_features(inputs: Sequence[Value]) -> bool:
    """Whether these are the parts of one tensor split along its features, such as heads that are about to be put beside the batch."""
    made = inputs[0].producer
    if made is None or len(inputs) < 2 or len({value.shape for value in inputs}) > 1:
        return False
    if any(value.producer is not made for value in inputs) or len(made.outputs) != len(inputs) or not made.inputs:
        return False
    whole = made.inputs[0]
    split = [axis for axis, (size, part) in enumerate(zip(whole.shape, inputs[0].shape, strict=False)) if size != part]
    return len(whole.shape) == len(inputs[0].shape) and len(split) == 1 and is_feature(whole.labels[split[0]])


def _indexed(call: Call, source: Value) -> Labels:
    shape, index = call.shapes[0], call.args[1]
    index = index if isinstance(index, tuple) else (index,)
    consumed = sum(1 for item in index if item is not None and item is not Ellipsis and not isinstance(item, bool))
    picks = sum(isinstance(item, Tensor) for item in index)
    labels: list[Label] = []
    axis = 0
    for item in index:
        if item is Ellipsis:
            skip = len(source.shape) - consumed
            labels.extend(source.labels[axis : axis + skip])
            axis += skip
        elif item is None:
            labels.append(())
        elif isinstance(item, slice):
            labels.append(source.labels[axis])
            axis += 1
        elif isinstance(item, int):
            axis += 1
        elif isinstance(item, Tensor) and item.ndim and not item.dtype.is_floating_point and item.dtype != torch.bool and picks == 1:
            picked = source.labels[axis]
            labels.extend(derived(picked, size) if place == 0 else _cut(picked, size) for place, size in enumerate(item.shape))
            axis += 1
        elif isinstance(item, Tensor) and item is index[0] and picks == len(index) == 2 and _numbers_each(item, index[1]):
            places = index[1].shape[1:]  # a number for every sequence and, for each of them, the positions picked from it
            labels.extend((source.labels[0], derived(source.labels[1], places[0]), *(_cut(source.labels[1], size) for size in places[1:])))
            labels.extend(source.labels[2:])
            return fitted(tuple(labels), shape)
        else:
            return _aligned(source, shape)
    labels.extend(source.labels[axis:])
    return fitted(tuple(labels), shape)


def _numbers_each(first: Tensor, second: object) -> bool:
    """Whether two index tensors are a column of sequence numbers and positions within each of these sequences."""
    if (
        not isinstance(second, Tensor)
        or first.dtype == torch.bool
        or first.is_floating_point()
        or second.ndim != first.ndim
        or first.ndim < 2
    ):
        return False
    return first.shape[0] == second.shape[0] and all(size == 1 for size in first.shape[1:])


def _cut(label: Label, size: int) -> Label:
    """An axis of positions picked from another one, which are no longer that axis, even where there are as many."""
    return (Atom(size, any(atom.feature for atom in label), label),) if size != 1 else ()


def _unfolded(call: Call, source: Value) -> Labels:
    """Windows: of one axis, behind all others (the method); or of rows and columns, beside the channels (the function)."""
    shape = call.shapes[0]
    if len(shape) == len(source.shape) + 1:
        axis = _axis(call.argument(1, "dimension", 0), len(source.shape))
        kept = [derived(label, size) for label, size in zip(source.labels, shape, strict=False)]
        return (*kept, _cut(source.labels[axis], shape[-1]))
    if len(source.shape) != 4 or len(shape) != 3 or shape[1] % source.shape[1]:
        return _aligned(source, shape)
    batch, channel, rows, columns = source.labels
    inside = _cut((*rows, *columns), shape[1] // source.shape[1])
    return fitted((batch, (*channel, *inside), derived((*rows, *columns), shape[2])), shape)


def _aligned(source: Value, shape: tuple[int, ...]) -> Labels:
    """Best guess for gathers and strided views: axes keep their label while sizes agree, from the left and from the right."""
    labels, axis = [fresh(size) for size in shape], -1
    for axis, (mine, theirs) in enumerate(zip(source.shape, shape, strict=False)):
        if mine != theirs:
            break
        labels[axis] = source.labels[axis]
    for back, (mine, theirs) in enumerate(zip(reversed(source.shape), reversed(shape), strict=False), start=1):
        if mine != theirs or len(shape) - back <= axis:
            break
        labels[-back] = source.labels[-back]
    return tuple(labels)


def _expanded(source: Value, shape: tuple[int, ...]) -> Labels:
    labels: list[Label] = []
    for back in range(1, len(shape) + 1):
        size = shape[-back]
        if back > len(source.shape) or source.shape[-back] == 1:
            labels.append(fresh(size))
        else:
            labels.append(derived(source.labels[-back], size))
    return tuple(reversed(labels))


def _elementwise(inputs: Sequence[Value], shape: tuple[int, ...]) -> Labels:
    """Labels of an element-wise result, or of any function that keeps the number of axes (pad, roll, pool, split ...)."""
    operands = [value for value in inputs if not value.static] or list(inputs)
    fitting = [value for value in operands if _broadcasts(value.shape, shape)]
    if any(_covers(value.shape, shape) for value in fitting) or len(fitting) > 1:
        return broadcast([(value.shape, value.labels) for value in fitting], shape)
    alike = [value for value in operands if len(value.shape) == len(shape)]
    if alike:
        return tuple(derived(label, size) if label else fresh(size) for label, size in zip(alike[0].labels, shape, strict=True))
    return _aligned(operands[0], shape)


def _broadcasts(dims: Sequence[int], shape: Sequence[int]) -> bool:
    return len(dims) <= len(shape) and all(a in (1, b) for a, b in zip(reversed(dims), reversed(shape), strict=False))


def _covers(dims: Sequence[int], shape: Sequence[int]) -> bool:
    return tuple(dims) == tuple(shape)
