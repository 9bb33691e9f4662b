"""Recording one forward: a function mode sees every torch function, module hooks see every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from collapse_monitor.capture.discovery.axes import Splits, fresh_axes
from collapse_monitor.capture.discovery.graph import Frame, Given, Graph, Operation, Value
from collapse_monitor.capture.discovery.movement import MOVEMENTS
from collapse_monitor.capture.discovery.semantics import DIFFERENCES, NEGATIONS, QUOTIENTS, SCALINGS, SUMS, Call, bare_name, describe
from collapse_monitor.capture.reading import BACKWARD
from collapse_monitor.capture.rows.kernel import KernelCall, external_attention
from collapse_monitor.capture.rows.mha import transparent_multi_head_attention
from collapse_monitor.capture.tensors import leaves


class Listener(Protocol):
    """Is told of every operation while its tensors are alive."""

    at_backward: Callable[[], None]

    def guarded(self, what: str, read: Callable[..., None], *args: Any) -> None: ...

    def operation(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None: ...

    def entered(self, frame: Frame, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def left(self, frame: Frame, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None: ...


class Trace(TorchFunctionMode):
    """Builds the graph of a forward while it runs. The user's call is made first and its result returned untouched."""

    def __init__(self, model: nn.Module, listener: Listener, fault: Callable[[BaseException], None]) -> None:
        super().__init__()
        self.graph = Graph()
        self.recording = True
        self._begun = False  # what happens before the model or a part of it is called is no forward
        self._listener, self._fault = listener, fault
        self._names = {id(module): name for name, module in model.named_modules()}
        # with the tensors: weights that come and go, as those of an offloaded model, must not meet an old address
        self._static = {id(tensor): (name, tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._values: Any = WeakTensorKeyDictionary()
        self._count = 0
        self._splits = Splits()
        self._calls: Counter[str] = Counter()
        self.root = Frame(0, "", -1, None, 0)
        self._stack = [self.root]
        self.graph.frames.append(self.root)

    # -- torch functions

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._begun or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return func(*args, **kwargs)
        if bare_name(func) in BACKWARD:
            self._listener.at_backward()
        if not self.recording:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return transparent_multi_head_attention()(*args, **kwargs)
        before = self._known(args, kwargs)
        result = func(*args, **kwargs)
        if self.recording:
            try:
                self._record(func, args, kwargs, result, before)
            except Exception as error:
                self._fault(error)
        return result

    def external(self, describe: Callable[[], KernelCall], run: Callable[[], Any]) -> Any:
        """A call that no function mode sees: recorded as one function of what `describe` says; nothing inside it is."""
        if not self._begun or not self.recording or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return run()
        first = len(self.graph.operations)
        try:
            with torch.no_grad():
                args = (describe(),)
            for operation in self.graph.operations[first:]:  # views of its operands belong to where these were made
                made = operation.inputs[0].producer if operation.inputs else None
                operation.frame = made.frame if made is not None else self.root
            before = self._known(args, {})
        except Exception as error:
            self._fault(error)
            return run()
        self.recording = False
        try:
            result = run()
        finally:
            self.recording = True
        try:
            self._record(external_attention, args, {}, result, before)
        except Exception as error:
            self._fault(error)
        return result

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value]:
        """The values of all tensor arguments, looked up before an in-place function can change them."""
        try:
            return [self.value(tensor) for _, tensor in leaves((args, tuple(kwargs.values())))]
        except Exception as error:
            self._fault(error)
            return []

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, inputs: list[Value]) -> None:
        outputs = [tensor for _, tensor in leaves(result)]
        name = bare_name(func)
        changed = _changed_in_place(name, args, kwargs)
        if changed is not None and not any(tensor is changed for tensor in outputs):
            outputs.append(changed)
        if not outputs:
            return
        held = {id(tensor): value for (_, tensor), value in zip(leaves((args, tuple(kwargs.values()))), inputs, strict=False)}
        call = Call(name, args, kwargs, lambda t: held[id(t)], [_shape(t) for t in outputs], self._splits)
        try:
            labels, product, axes = describe(call, inputs)
        except Exception as error:
            self._fault(error)
            labels, product, axes = [fresh_axes(shape) for shape in call.shapes], None, ()
        operation = Operation(len(self.graph.operations), name, self._stack[-1], tuple(inputs), product=product, axes=axes)
        if name in _REPEATABLE:
            operation.given = Given(func, *(_with_values(part, held) for part in (args, kwargs)))
        operation.ancestry = 1 << operation.index
        sources = inputs[:1] if name in _LIKE_ANOTHER else inputs
        for value in inputs:
            value.consumers.append(operation)
        for value in sources:
            if value.producer is not None:
                operation.ancestry |= value.producer.ancestry
        static = all(value.static for value in sources)
        made = []
        for tensor, axis_labels in zip(outputs, labels, strict=True):
            value = self._new(tensor, axis_labels, static)
            value.producer = operation
            made.append(value)
            base = tensor._base
            if changed is not None and base is not None:
                self._new(base, self.value(base).labels, static and self.value(base).static).producer = operation
        operation.outputs = tuple(made)
        self.graph.operations.append(operation)
        self._listener.operation(operation, args, kwargs, result)

    def value(self, tensor: Tensor) -> Value:
        """The value a tensor holds now; one never seen is a weight or comes from outside."""
        value = self._values.get(tensor)
        if value is None:
            name, _ = self._static.get(id(tensor), (None, None))
            static = name is not None or isinstance(tensor, nn.Parameter)
            value = self._new(tensor, fresh_axes(_shape(tensor)), static)
            value.parameter = name
            value.outside = not static and (tensor.is_floating_point() or tensor.is_complex())
        return value

    def _new(self, tensor: Tensor, labels: Any, static: bool) -> Value:
        value = Value(self._count, _shape(tensor), labels, static)
        self._count += 1
        self._values[tensor] = value
        return value

    # -- modules

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook."""
        if not self.recording:
            return
        self._begun = True
        try:
            name = self._names[id(module)]
            frame = Frame(
                len(self.graph.frames),
                name,
                self._calls[name],
                self._stack[-1],
                len(self.graph.operations),
                leaf=next(module.children(), None) is None,
                has_parameters=next(module.parameters(), None) is not None,
            )
            frame.inputs = tuple(self.value(tensor) for _, tensor in leaves((args, kwargs)))
            self._calls[name] += 1
            self.graph.frames.append(frame)
            self._stack.append(frame)
            self._listen(self._listener.entered, frame, module, args, kwargs)
        except Exception as error:
            self._fault(error)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook; also called when the forward raised."""
        if not self.recording:
            return
        try:
            name = self._names[id(module)]
            while len(self._stack) > 1:
                frame = self._stack.pop()
                frame.last = len(self.graph.operations) - 1
                if frame.name == name:
                    break
            else:
                return
            frame.outputs = tuple((path, self.value(tensor)) for path, tensor in leaves(output))
            self._listen(self._listener.left, frame, module, args, kwargs, output)
        except Exception as error:
            self._fault(error)

    def _listen(self, listener: Callable[..., None], *args: Any) -> None:
        """Our own torch calls must not be recorded."""
        self.recording = False
        try:
            self._listener.guarded("discovery", listener, *args)
        finally:
            self.recording = True

    @property
    def depth(self) -> int:
        """How many module calls are open."""
        return len(self._stack) - 1


_REPEATABLE = MOVEMENTS | SUMS | DIFFERENCES | SCALINGS | QUOTIENTS | NEGATIONS | {"addmm", "baddbmm"}
"""Functions whose call is kept, to follow single elements back through them."""

_LIKE_ANOTHER = frozenset("to type_as expand_as view_as reshape_as".split())
"""Functions that take no more than dtype, device or shape from their second tensor."""

_RAGGED = 1_000_003
"""Stands for the size of a ragged axis: a prime, so that views cannot split it."""


def _shape(tensor: Tensor) -> tuple[int, ...]:
    sizes = []
    for size in tensor.shape:
        try:
            sizes.append(int(size))
        except Exception:
            sizes.append(_RAGGED)
    return tuple(sizes)


def _with_values(structure: Any, held: Mapping[int, Value]) -> Any:
    """The structure with every tensor replaced by its value: a record must not keep tensors alive."""
    if isinstance(structure, Tensor):
        return held.get(id(structure))
    if isinstance(structure, tuple | list):
        items = [_with_values(item, held) for item in structure]
        return items if isinstance(structure, list) else tuple(items)
    return {key: _with_values(item, held) for key, item in structure.items()} if isinstance(structure, dict) else structure


def _changed_in_place(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    in_place = (
        (name.endswith("_") and not name.endswith("__"))
        or name == "__setitem__"
        or (name.startswith("__i") and name != "__invert__" and name != "__index__")
    )
    return args[0] if in_place and args and isinstance(args[0], Tensor) else None
