"""Whether a model's forward runs through torch.compile: then it cannot be listened to without changing what runs."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

_DEPTH = 3
_ENTRIES = ("forward", "training_step")
"""Where code of a module's own begins; the second is Lightning's."""


class CompileCheck:
    """Asks `is_compiled` again only when something was wrapped since the last time."""

    def __init__(self) -> None:
        self._known: tuple[int, bool] | None = None
        self._wrappers: list[weakref.ref[nn.Module]] = []

    @property
    def wrappers(self) -> list[nn.Module]:
        """The modules that `torch.compile(model)` returned: what the run calls in place of the model."""
        return [module for module in (known() for known in self._wrappers) if module is not None]

    def __call__(self, model: nn.Module) -> bool:
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        wrapped = -1 if dynamo is None else len(getattr(dynamo, "cached_backends", ()))
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
            return True
        if self._known is None or self._known[0] != wrapped:
            self._wrappers = [weakref.ref(module) for module in wrappers_of(model)]
            self._known = (wrapped, bool(self._wrappers) or is_compiled(model))
        return self._known[1]


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, a part of it, or a function its forwards call by name was wrapped by torch.compile."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return True
    if not any(backend is not None for backend in getattr(dynamo, "cached_backends", {0: 0}).values()):
        return False  # nothing in this process was ever wrapped
    if wrappers_of(model):
        return True  # the monitor was given the inner module, the run calls the wrapper
    seen: set[int] = set()
    kinds = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.nn")}
    return (
        any(_is_wrapped(item) for module in model.modules() for item in vars(module).values())
        or any(_reaches_wrapped(kind, getattr(kind, entry, None), seen, _DEPTH) for kind in kinds for entry in _ENTRIES)
        or _lives_somewhere()
    )


def _lives_somewhere() -> bool:
    """Whether any wrapped function is alive: what calls the model, or what it reaches through other modules, may be compiled."""
    for collected in (False, True):
        if collected:
            gc.collect()  # what was found may be garbage
        if not any(type(item) is types.FunctionType and _is_wrapped(item) for item in gc.get_objects()):
            return False
    return True


def wrappers_of(model: nn.Module) -> list[nn.Module]:
    """Every module in this process that `torch.compile` made of the model."""
    wrapper = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if wrapper is None or not any(type(item) is dict and item.get("_orig_mod") is model for item in gc.get_referrers(model)):
        return []  # asked in C, ten times faster than going through all objects here
    return [item for item in gc.get_objects() if type(item) is wrapper and item._modules.get("_orig_mod") is model]


def outside_graphs(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules below the model that run eagerly, and those whose call enters a compiled graph; what runs inside a graph is neither."""
    eager: list[nn.Module] = []
    compiled: list[nn.Module] = []
    kinds: dict[type, bool] = {}
    waiting = [] if _enters_graph(model, kinds) else list(model.children())
    seen: set[int] = set()
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            inside = _enters_graph(module, kinds)
            (compiled if inside else eager).append(module)
            waiting.extend(() if inside else module.children())
    return eager, compiled


def _enters_graph(module: nn.Module, kinds: dict[type, bool]) -> bool:
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    kind = type(module)
    if kind not in kinds:
        kinds[kind] = any(_reaches_wrapped(kind, getattr(kind, entry, None), set(), _DEPTH) for entry in _ENTRIES)
    return kinds[kind] or any(_is_wrapped(item) for item in vars(module).values())


def _is_wrapped(item: Any) -> bool:
    if not callable(item) or isinstance(item, nn.Module) or not hasattr(item, "_torchdynamo_orig_callable"):
        return False
    return not getattr(item, "_torchdynamo_disable", False)  # what is kept out of compilation is wrapped too


def _reaches_wrapped(kind: type, function: Any, seen: set[int], depth: int) -> bool:
    """Follow the names a function uses: globals, closures, and attributes of its class."""
    if _is_wrapped(function):
        return True
    if not isinstance(function, types.FunctionType) or id(function) in seen or depth == 0:
        return False
    if (function.__module__ or "").startswith("torch."):
        return False
    seen.add(id(function))
    return any(_reaches_wrapped(kind, item, seen, depth - 1) for item in _used(kind, function))


def _used(kind: type, function: types.FunctionType) -> Iterator[Any]:
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield function.__globals__[name]
        found = getattr(kind, name, None)
        if found is not None:
            yield found
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
