"""The only file that registers hooks. Everything it registers is removed when its context ends, whatever happens.

A model may be copied or saved while hooks are on it (moving averages, checkpoints). What the copy holds then is `_INERT`: a callable of
the standard library that takes anything and returns None, so that a copy feeds no monitor and a file needs no package to be loaded.
Code that is being compiled or exported passes through hooks as if they were not there. What listeners do is hidden from function modes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

Enter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
Leave = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]

_INERT = (getattr, (nullcontext(), "__exit__"))


class _ModuleHook:
    """Passes the calls of certain modules, made by the thread that made this, on to a listener."""

    __slots__ = ("_hear", "_modules", "_thread")

    def __init__(self, modules: frozenset[int], hear: Callable[..., None]) -> None:
        self._modules, self._hear, self._thread = modules, hear, threading.get_ident()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return
        if id(module) in self._modules and threading.get_ident() == self._thread:
            with torch._C.DisableTorchFunction():
                self._hear(module, args, *rest)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return _INERT


@contextmanager
def module_hooks(modules: Iterable[nn.Module], enter: Enter, leave: Leave) -> Iterator[None]:
    """Call `enter` before and `leave` after every forward of these modules made by this thread.

    `leave` also runs when the forward raises, with None for the output. Neither can change arguments or result.
    """

    def left(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = None) -> None:
        leave(module, args, kwargs if isinstance(kwargs, dict) else {}, output)

    modules = list(modules)
    known = frozenset(map(id, modules))
    before, after = _ModuleHook(known, enter), _ModuleHook(known, left)
    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def noted_calls(module: nn.Module, note: Enter) -> Iterator[None]:
    """Call `note` before every call of this module, outside whatever is compiled.

    Hooks of a module that was compiled in place run inside its graph, where they are lost: there its compiled call is stood in for.
    """
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        with module_hooks([module], note, lambda *_: None):
            yield
        return
    noting = _ModuleHook(frozenset({id(module)}), note)

    def call(*args: Any, **kwargs: Any) -> Any:
        noting(module, args, kwargs)
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call
    try:
        yield
    finally:
        if module._compiled_call_impl is call:
            module._compiled_call_impl = compiled


class GradientHooks:
    """Hooks on tensors of one window's graph; they go with the graph, or at `remove`, whichever comes first.

    Attributes:
        heard: whether backward reached one of them.
    """

    def __init__(self) -> None:
        self.heard = False
        self._handles: list[Any] = []

    def watch(self, tensor: Tensor, receive: Callable[[Tensor], None]) -> bool:
        """Call `receive` with dL/d(tensor) when backward reaches it. False: the tensor is not in a graph."""
        if not tensor.requires_grad:
            return False

        def hook(gradient: Tensor | None) -> None:
            self.heard = True
            if gradient is not None:  # backward came by, and had nothing to give
                with torch._C.DisableTorchFunction():
                    receive(gradient)

        self._handles.append(tensor.register_hook(hook))
        return True

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
