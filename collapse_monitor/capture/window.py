"""One observed forward: hooks and function mode go in, samples come out, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from collapse_monitor.capture.discovery.watch import Discovery
from collapse_monitor.capture.hooks import GradientHooks, module_hooks
from collapse_monitor.capture.listen import Listening
from collapse_monitor.capture.plan import Plan
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.observation import Key, Receiver
from collapse_monitor.records import Site

class Observed:
    """A context in which the first forward of the model is heard; backward may follow inside.

    The forward ends when the model's own call returns, when a top-level part that attends is called a second time, when backward
    begins, or when the context is left. From then on only the gradient hooks on this forward's tensors are alive; they go when
    the context is left.
    """

    def __init__(self, model: nn.Module, plan: Plan | None, sampler: Sampler, receiver: Receiver, fault: Callable[[str, BaseException], None]) -> None:
        self.plan = plan
        self.sites: dict[Key, Site] = {}
        self.heard_forward = False
        self._model, self._fault = model, fault
        self._gradients = GradientHooks()
        sampler.begin()
        if plan is None:
            self._reader: Discovery | Listening = Discovery(model, sampler, receiver, self._gradients, fault)
        else:
            self._reader = Listening(model, plan, sampler, receiver, self._gradients, fault)
        self._reader.at_backward = self.end_forward
        self._listening = ExitStack()
        self._finished = False
        self._top: set[int] = set()

    def __enter__(self) -> Observed:
        modules = dict.fromkeys(self._model.modules())
        if self.plan is not None:
            wanted = self.plan.frames
            modules = dict.fromkeys(module for name, module in self._model.named_modules() if name in wanted)
        self._modes = ExitStack()
        self._modes.enter_context(self._reader.mode)
        try:
            self._listening.enter_context(module_hooks(modules, self._enter, self._leave))
        except BaseException:
            self._modes.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._modes.close()
        finally:
            self.end_forward()
            self._gradients.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._finished:
            return
        if self._reader.depth == 0:
            if id(module) in self._top and module is not self._model and self._attended:
                self.end_forward()
                return
            self._top.add(id(module))
        self.heard_forward = True
        self._reader.enter(module, args, kwargs)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._finished:
            return
        self._reader.leave(module, args, kwargs, output)
        if module is self._model:
            self.end_forward()

    @property
    def _attended(self) -> bool:
        return bool(self._reader.events) if isinstance(self._reader, Discovery) else bool(self._reader.heard)

    def end_forward(self) -> None:
        """The forward is over: stop listening, work out what was heard. Idempotent."""
        if self._finished:
            return
        self._finished = True
        self._listening.close()
        try:
            with torch.no_grad():
                self.plan, self.sites = self._reader.finish()
        except Exception as error:
            self._fault("reading the forward", error)

