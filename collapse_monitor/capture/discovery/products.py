"""Contractions of two operands: which axes meet, which stay, and where each axis of the result comes from."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import Tensor

from collapse_monitor.capture.discovery.axes import Label, Labels, broadcast, derived, fitted, fresh, is_feature, renewed
from collapse_monitor.capture.discovery.graph import Product, Value

if TYPE_CHECKING:
    from collapse_monitor.capture.discovery.semantics import Call

PRODUCTS = frozenset(
    "matmul __matmul__ __rmatmul__ mm bmm linear addmm baddbmm einsum cdist tensordot mv "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d inner".split()
)
CONVOLUTIONS = frozenset(name for name in PRODUCTS if name.startswith("conv"))


def product_of(call: Call) -> tuple[Product | None, Labels | None]:
    """The contraction one call is, and the labels of its result, as far as they are known."""
    name = call.name
    if name == "einsum":
        return _einsum(call)
    if name in CONVOLUTIONS:
        return _convolution(call)
    if name == "linear":
        return _linear(call)
    tensors = [item for item in call.args if isinstance(item, Tensor)]
    if name in ("addmm", "baddbmm"):
        tensors = tensors[1:]
    if name == "__rmatmul__":
        tensors = tensors[::-1]
    if len(tensors) < 2:
        tensors = [item for item in (*tensors, *call.kwargs.values()) if isinstance(item, Tensor)][-2:]
    if len(tensors) < 2:
        return None, None
    left, right = call.value(tensors[0]), call.value(tensors[1])
    if not left.shape or not right.shape:
        return None, None
    return _matrix_product(name, left, right, call.shapes[0])


PAIRINGS = frozenset("add __add__ __radd__ sub __sub__ __rsub__ mul __mul__ __rmul__".split())


def pairing_of(call: Call) -> tuple[Product, Labels] | None:
    """An element-wise function that meets every token of one operand with every token of the other: additive scores are made so."""
    operands = [item for item in call.args[:2] if isinstance(item, Tensor) and item.is_floating_point()]
    if call.name not in PAIRINGS or len(operands) < 2:
        return None
    left, right = (call.value(item) for item in operands)
    shape = call.shapes[0]
    if left.static or right.static or len(shape) < 3:
        return None
    shifts = [len(shape) - len(value.shape) for value in (left, right)]
    sizes = [(1,) * shift + value.shape for shift, value in zip(shifts, (left, right), strict=True)]
    alone = [
        [axis for axis in range(len(shape)) if mine[axis] > 1 and other[axis] == 1]
        for mine, other in (tuple(sizes), tuple(reversed(sizes)))
    ]
    if [len(axes) for axes in alone] != [1, 1]:
        return None
    free = [axes[0] - shift for axes, shift in zip(alone, shifts, strict=True)]
    if is_feature(left.labels[free[0]]) or is_feature(right.labels[free[1]]):
        return None
    labels = list(broadcast([(value.shape, value.labels) for value in (left, right)], shape))
    for axes, value, own in zip(alone, (left, right), free, strict=True):
        labels[axes[0]] = renewed(value.labels[own])
    made = [(labels[axes[0]],) for axes in alone]
    return Product(left, right, (), (), (free[0],), (free[1],), made[0], made[1]), tuple(labels)


def summed_product(source: Value, axes: tuple[int, ...], labels: Labels) -> Product | None:
    """A sum over features of an element-wise product: every query with a few keys of its own, as in windows that slide."""
    made = source.producer
    if (
        len(axes) != 1
        or made is None
        or made.product is not None
        or made.name not in ("mul", "__mul__", "__rmul__")
        or len(made.inputs) < 2
    ):
        return None
    (axis,), (left, right), ndim = axes, made.inputs[:2], len(source.shape)
    if left.static or right.static or len(left.shape) != ndim or len(right.shape) != ndim or not is_feature(source.labels[axis]):
        return None
    if left.shape[axis] != right.shape[axis]:
        return None
    place = lambda position: position if len(labels) == ndim or position < axis else position - 1  # noqa: E731
    free = [
        tuple(a for a in range(ndim) if a != axis and mine.shape[a] > 1 and other.shape[a] == 1)
        for mine, other in ((left, right), (right, left))
    ]
    if [bool(own) for own in free].count(True) != 1:
        return None
    named = [tuple(labels[place(a)] for a in own) for own in free]
    return Product(left, right, (axis,), (axis,), free[0], free[1], named[0], named[1])


def _convolution(call: Call) -> tuple[Product, Labels]:
    left, right = call.value(call.argument(0, "input")), call.value(call.argument(1, "weight"))
    channel = len(left.shape) - (len(right.shape) - 1)
    axes = tuple(axis for axis in range(len(left.shape)) if axis != channel)
    labels = tuple(
        fresh(size, feature=True) if axis == channel else derived(left.labels[axis], size) for axis, size in enumerate(call.shapes[0])
    )
    origins: tuple[tuple[int | None, int | None], ...] = ()
    pointwise = "transpose" not in call.name and set(right.shape[2:]) == {1} and right.shape[1] == left.shape[channel]
    if pointwise and all(left.shape[axis] == call.shapes[0][axis] for axis in axes):
        origins = tuple((None, 0) if axis == channel else (axis, None) for axis in range(len(left.shape)))
    return Product(left, right, (channel,), (1,), axes, (0,), tuple(labels[axis] for axis in axes), (labels[channel],), origins), labels


def _linear(call: Call) -> tuple[Product, Labels]:
    left, right = call.value(call.argument(0, "input")), call.value(call.argument(1, "weight"))
    last = len(left.shape) - 1
    made = fresh(call.shapes[0][-1], feature=True) if right.static else renewed(right.labels[0])
    labels = (*left.labels[:-1], made)
    origins = (*((axis, None) for axis in range(last)), (None, 0)) if len(right.shape) == 2 else ()
    return Product(left, right, (last,), (len(right.shape) - 1,), tuple(range(last)), (0,), left.labels[:-1], (made,), origins), labels


def _matrix_product(name: str, left: Value, right: Value, shape: tuple[int, ...]) -> tuple[Product, Labels | None]:
    rows, cols = len(left.shape), len(right.shape)
    both = not left.static and not right.static
    if name in ("tensordot", "inner"):
        return Product(left, right, (rows - 1,), (0,), tuple(range(rows - 1)), tuple(range(1, cols))), None
    if cols == 1:
        kept = left.labels[:-1]
        return Product(left, right, (rows - 1,), (0,), (rows - 2,) if rows > 1 else (), (), kept[-1:], ()), kept
    column = cols - 2 if name == "cdist" else cols - 1
    contracted = cols - 1 if name == "cdist" else cols - 2
    if rows == 1:
        made = right.labels[column]
        return Product(left, right, (0,), (contracted,), (), (column,), (), (made,)), (*right.labels[:-2], made)
    row = renewed(left.labels[-2]) if both else left.labels[-2]
    if both:
        made = renewed(right.labels[column])
    else:
        made = fresh(shape[-1], feature=True) if right.static and cols == 2 and not left.static else right.labels[column]
    lead = [(value.shape[:-2], value.labels[:-2]) for value in sorted((left, right), key=lambda value: value.static)]
    labels = (*broadcast(lead, shape[:-2]), row, made)
    origins = (*_aligned_axes(len(shape) - 2, rows - 2, cols - 2), (rows - 2, None), (None, column))
    return Product(left, right, (rows - 1,), (contracted,), (rows - 2,), (column,), (row,), (made,), origins), labels


def _aligned_axes(count: int, left: int, right: int) -> list[tuple[int | None, int | None]]:
    """For each of `count` broadcast axes the axis of two operands with so many; None where an operand has none."""
    shifts = (count - left, count - right)
    pairs = [tuple(axis - shift if axis >= shift else None for shift in shifts) for axis in range(count)]
    return [(one, two) for one, two in pairs]


def _einsum(call: Call) -> tuple[Product | None, Labels | None]:
    equation = call.args[0]
    operands = [
        item for part in call.args[1:] for item in (part if isinstance(part, tuple | list) else (part,)) if isinstance(item, Tensor)
    ]
    if not isinstance(equation, str) or len(operands) < 2:
        return None, None
    values = [call.value(item) for item in operands]
    left_side, arrow, right_side = equation.replace(" ", "").partition("->")
    terms = [_letters(term, len(value.shape)) for term, value in zip(left_side.split(","), values, strict=False)]
    if len(terms) != len(values) or not arrow:
        return None, None
    result = _letters(right_side, len(call.shapes[0]))
    data = [index for index, value in enumerate(values) if not value.static]
    first, second = data[:2] if len(data) > 1 else (0, len(values) - 1)  # of more than two operands those that carry data
    left, right, one, two = values[first], values[second], terms[first], terms[second]
    both = not left.static and not right.static
    known: dict[str, Label] = {}
    for term, value in sorted(zip(terms, values, strict=True), key=lambda pair: pair[1].static):
        for letter, label in zip(term, value.labels, strict=True):
            free = letter not in one or letter not in two
            if letter in known or (not label and free is False):
                continue
            if free and letter in result:
                size = call.shapes[0][result.index(letter)]
                channel = value.static and not (left.static and right.static)
                known[letter] = fresh(size, feature=True) if channel else (renewed(label) if both else label)
            else:
                known[letter] = label
    labels = fitted(tuple(known.get(letter, ()) for letter in result), call.shapes[0])
    made = dict(zip(result, labels, strict=True))
    contracted = {letter for letter in (*one, *two) if letter not in result}
    partners = [letter for letter in one if letter in contracted and letter in two]
    origins: tuple[tuple[int | None, int | None], ...] = ()
    if len(values) == 2 and all(len(set(term)) == len(term) for term in terms) and len(partners) == len(contracted):
        origins = tuple((one.index(x) if x in one else None, two.index(x) if x in two else None) for x in result)
    left_free = [letter for letter in one if letter in result and letter not in two]
    right_free = [letter for letter in two if letter in result and letter not in one]
    product = Product(
        left,
        right,
        tuple(one.index(letter) for letter in partners) + tuple(a for a, x in enumerate(one) if x in contracted and x not in partners),
        tuple(two.index(letter) for letter in partners) + tuple(a for a, x in enumerate(two) if x in contracted and x not in partners),
        tuple(one.index(letter) for letter in left_free),
        tuple(two.index(letter) for letter in right_free),
        tuple(made[letter] for letter in left_free),
        tuple(made[letter] for letter in right_free),
        origins,
    )
    return product, labels


def _letters(term: str, ndim: int) -> list[str]:
    """One symbol per axis; the ellipsis stands for as many as are left, counted from the right."""
    named = len(re.sub(r"\.\.\.", "", term))
    rest = [f".{ndim - named - back}" for back in range(ndim - named)] if "..." in term else []
    head, _, tail = term.partition("...")
    return [*head, *rest, *tail]
