"""What both ways of listening share: guarded calls, and hooks on gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from collapse_monitor.capture.hooks import GradientHooks
from collapse_monitor.capture.packing import is_jagged
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.capture.tensors import is_plain, is_sampled
from collapse_monitor.observation import Receiver, reason_against

Fault = Callable[[str, BaseException], None]

BACKWARD = frozenset({"backward", "grad"})
"""Functions that end the forward: what checkpointing recomputes in backward must not be heard again."""


@contextmanager
def exact() -> Iterator[None]:
    """Autocast off, where it is on."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def unsaved() -> Iterator[None]:
    """Selective checkpointing keeps the results of operations in the order they run; ours must not be among them."""
    modes = _get_current_dispatch_mode_stack()
    if not any(type(mode).__module__ == torch.utils.checkpoint.__name__ for mode in modes):
        yield
        return
    with _disable_current_modes():
        yield


class Reader:
    """Makes observations and hands them to the receiver. Nothing that fails in here reaches the model's forward or backward.

    What it computes is hidden from function modes: its own, another monitor's, the user's.
    """

    def __init__(self, sampler: Sampler, receiver: Receiver, gradients: GradientHooks, fault: Fault) -> None:
        self.sampler, self.receiver, self._gradients, self._fault = sampler, receiver, gradients, fault
        self.seconds = 0.0  # of the host, spent in here
        self.at_backward: Callable[[], None] = lambda: None
        self.missing: dict[str, str] = {}  # site -> why this forward did not give it
        self.refused: dict[object, str] = {}  # place -> why its tensor could not be read

    def readable(self, tensor: Tensor, place: object, nested: bool = False) -> bool:
        """Whether this tensor can be read (`nested`: also as a nested one); if not, the reason is kept under its place."""
        reason = None if nested and is_sampled(tensor) else reason_against(tensor)
        if reason is not None:
            self.refused.setdefault(place, reason)
        return reason is None

    def guarded(self, what: str, read: Callable[..., None], *args: Any) -> None:
        """Run `read` without gradients and autocast; report what it raises."""
        started = time.perf_counter()
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad(), exact(), unsaved():
                read(*args)
        except Exception as error:
            self._fault(what, error)
        finally:
            self.seconds += time.perf_counter() - started

    def watch(self, tensor: Tensor, receive: Callable[[Tensor], None]) -> None:
        """Hand dL/d(tensor) to `receive` in backward, guarded like everything else."""

        def take(gradient: Tensor) -> None:
            values = gradient.values() if is_jagged(gradient) else gradient
            if is_plain(values):
                receive(values)

        def hear(gradient: Tensor) -> None:
            self.guarded("gradient", take, gradient)

        if (is_plain(tensor) or is_jagged(tensor)) and not torch.is_inference_mode_enabled():
            self._gradients.watch(tensor, hear)
