"""Hearing the calls of plain Python functions, whoever holds them, while a window is open.

A caller may hold a function in its globals, on a module, in a closure or a `partial`: none of these places is touched. What is exchanged is
the function's code, which all of them share; it is put back when the last listener leaves. Other threads, and code that is being compiled,
get the function's own code all the time.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

Hear = Callable[[Mapping[str, Any], Callable[[], Any]], Any]
"""Is given the arguments of a call by name, defaults included, and a function that makes the call; returns what that returned."""

_lock = threading.Lock()
_standing: dict[int, _StandIn] = {}  # by identity of the function


@contextmanager
def intercepted(heard: Mapping[types.FunctionType, Hear]) -> Iterator[None]:
    """Hand the calls of these functions that this thread makes to their listeners. Functions with a closure cannot be heard."""
    with ExitStack() as stack:
        for function, hear in heard.items():
            if function.__closure__ is None:
                stack.enter_context(_heard(function, hear))
        yield


@contextmanager
def _heard(function: types.FunctionType, hear: Hear) -> Iterator[None]:
    listener = (threading.get_ident(), hear)
    with _lock:
        standing = _standing.get(id(function)) or _StandIn(function)
        standing.listeners = (*standing.listeners, listener)
        _standing[id(function)] = standing
        standing.take_place()
    try:
        yield
    finally:
        with _lock:
            standing.listeners = tuple(other for other in standing.listeners if other is not listener)
            if not standing.listeners:
                standing.give_back()
                _standing.pop(id(function), None)


class _StandIn:
    """Stands in for one function as long as anyone listens. A call passes all listeners of its thread, the latest first."""

    def __init__(self, function: types.FunctionType) -> None:
        self.listeners: tuple[tuple[int, Hear], ...] = ()
        self._function, self._code = function, function.__code__
        self._signature = inspect.signature(function)
        self._keeps_signature = "__signature__" in function.__dict__
        self._original = types.FunctionType(self._code, function.__globals__, function.__name__, function.__defaults__)
        self._original.__kwdefaults__ = function.__kwdefaults__
        self._own = _call.__code__.replace(
            co_consts=tuple(self if constant == _PLACE else constant for constant in _call.__code__.co_consts),
            co_name=function.__name__,
        )

    def take_place(self) -> None:
        if not self._keeps_signature:
            self._function.__signature__ = self._signature  # type: ignore[attr-defined]
        self._function.__code__ = self._own

    def give_back(self) -> None:
        self._function.__code__ = self._code
        if not self._keeps_signature:
            self._function.__dict__.pop("__signature__", None)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return self._original(*args, **kwargs)
        thread = threading.get_ident()
        return self._pass([hear for owner, hear in self.listeners if owner == thread], args, kwargs)

    def _pass(self, listeners: list[Hear], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not listeners:
            return self._original(*args, **kwargs)
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return self._original(*args, **kwargs)  # which says better what is wrong
        bound.apply_defaults()
        return listeners[-1](bound.arguments, lambda: self._pass(listeners[:-1], args, kwargs))


_PLACE = "the stand-in"


def _call(*args: Any, **kwargs: Any) -> Any:
    """What runs in a function's place: in its code, the constant stands for the object that is called."""
    standing: Any = "the stand-in"
    return standing(args, kwargs)
