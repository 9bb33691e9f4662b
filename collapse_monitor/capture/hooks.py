"""The only file that registers hooks. Everything it registers is removed when its context ends, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Enter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
Leave = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


@contextmanager
def module_hooks(modules: Iterable[nn.Module], enter: Enter, leave: Leave) -> Iterator[None]:
    """Call `enter` before and `leave` after every forward of these modules made by this thread.

    `leave` also runs when the forward raises, with None for the output. Neither can change arguments or result.
    """
    thread = threading.get_ident()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            enter(module, args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = None) -> None:
        if threading.get_ident() == thread:
            leave(module, args, kwargs if isinstance(kwargs, dict) else {}, output)

    handles = []
    try:
        for module in modules:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


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

        def hook(gradient: Tensor) -> None:
            self.heard = True
            receive(gradient)

        self._handles.append(tensor.register_hook(hook))
        return True

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
