"""What one watched forward did, as plain records: values, operations, module calls. No tensors live here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from collapse_monitor.capture.discovery.axes import Labels


@dataclass(slots=True, eq=False)
class Value:
    """One tensor the forward touched. `static`: made from weights and constants only. `producer`: the operation that made it.

    `parameter` names a parameter or buffer. `outside`: floating point and never made by an operation that was seen.
    """

    index: int
    shape: tuple[int, ...]
    labels: Labels
    static: bool
    producer: Operation | None = None
    consumers: list[Operation] = field(default_factory=list)
    parameter: str | None = None
    outside: bool = False

    def stems_from(self, operation: Operation) -> bool:
        """Whether this operation went into it, directly or through others."""
        return self.producer is not None and bool(self.producer.ancestry >> operation.index & 1)


@dataclass(slots=True, eq=False)
class Product:
    """A contraction of two operands. Axes are positions in the operand; `left_made`/`right_made` label the free axes in the result.

    Where both operands carry data these labels are new, so that in self-attention the query axis and the key axis, which come
    from the same tokens, can be told apart. Contracted axes stand in pairs. `origins` says for every axis of the result which axis of
    the left and which of the right operand it is (an operand may broadcast there); empty where that is not known.
    """

    left: Value
    right: Value
    left_contracted: tuple[int, ...]
    right_contracted: tuple[int, ...]
    left_free: tuple[int, ...]
    right_free: tuple[int, ...]
    left_made: Labels = ()
    right_made: Labels = ()
    origins: tuple[tuple[int | None, int | None], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """How a function was called, every tensor replaced by its value."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def argument(self, position: int, keyword: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(keyword, default)


@dataclass(slots=True, eq=False)
class Operation:
    """One call of a torch function. `name` is the bare function name (`softmax`, `matmul`, `__add__`, ...).

    `given` is kept for functions that only move or scale what they are given.
    """

    index: int
    name: str
    frame: Frame
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()
    product: Product | None = None
    axes: tuple[int, ...] = ()  # the axes a reduction or a softmax runs over
    sliced: bool = False
    ancestry: int = 0  # bit set of the operations this one depends on, itself included
    given: Given | None = None


@dataclass(slots=True, eq=False)
class Frame:
    """One call of a module. `name` is its attribute path in the model, `call` counts its calls within the forward."""

    index: int
    name: str
    call: int
    parent: Frame | None
    first: int  # index of the first operation inside
    leaf: bool = False
    has_parameters: bool = True
    last: int = -1  # index of the last operation inside, known on return
    inputs: tuple[Value, ...] = ()
    outputs: tuple[tuple[tuple[object, ...], Value], ...] = ()  # (path in the returned structure, value)

    def ancestors(self) -> Iterator[Frame]:
        """This frame, its caller, and so on up to the model."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def within(self, other: Frame) -> bool:
        return any(frame is other for frame in self.ancestors())

    @property
    def key(self) -> tuple[str, int]:
        return (self.name, self.call)


@dataclass(slots=True, eq=False)
class Graph:
    """The whole forward: operations and frames in order of entry."""

    operations: list[Operation] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)

    def depends(self, operation: Operation, on: Operation) -> bool:
        return bool(operation.ancestry >> on.index & 1)


def common_frame(one: Frame, other: Frame) -> Frame:
    """The innermost call that encloses both."""
    enclosing = set(map(id, one.ancestors()))
    return next(frame for frame in other.ancestors() if id(frame) in enclosing)
