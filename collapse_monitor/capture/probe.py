"""A separate forward that the run cannot notice: for models whose own forward cannot be listened to, and for `probe()`."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from collapse_monitor.capture.hooks import module_hooks, noted_calls
from collapse_monitor.capture.plan import Plan
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.capture.selection import Selection
from collapse_monitor.capture.window import Observed
from collapse_monitor.observation import Key, Receiver, WeightObservation
from collapse_monitor.records import Site

Fault = Callable[[str, BaseException], None]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Random states, buffers and gradients after the context are what they were before; nothing is compiled inside."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type not in ("cpu", "meta")}
    python_state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in sorted({device.type for device in devices}):
            indices = [device.index for device in devices if device.type == kind and device.index is not None]
            stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_copied_buffers(model))
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None and numpy_state is not None:
                numpy.random.set_state(numpy_state)


@contextmanager
def _copied_buffers(model: nn.Module) -> Iterator[None]:
    """The model works on copies of its buffers. Writing the old values back instead would invalidate a graph that waits for backward."""
    copies: dict[int, Tensor] = {}
    originals: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    originals.append((module, name, buffer))
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield
    finally:
        for module, name, buffer in originals:
            module._buffers[name] = buffer


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call of the run, to be made again under the same autocast and default dtype."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[tuple[str, torch.dtype], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        autocast = tuple((device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device))
        return cls(module, args, kwargs, autocast, torch.get_default_dtype())

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        default = torch.get_default_dtype()
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            if default is not self.dtype:
                stack.callback(torch.set_default_dtype, default)
                torch.set_default_dtype(self.dtype)
            self.module(*args, **kwargs)


def _gradients_of(model: nn.Module) -> dict[int, tuple[int, int]]:
    """Which gradient tensors there are, and how often each was written to."""
    return {id(p): (id(p.grad), p.grad._version) for p in model.parameters() if p.grad is not None}


class _Enough(BaseException):
    """Leaves a training step that is run again, once the forward in it is over. No `except Exception` of the user's stops it."""


class Probed:
    """Like `Observed`, but the model's own forward is left alone: only its arguments are noted, and run again when it is over.

    Where a training step calls parts of the model and never the model itself, the calls of these parts are. The first `max_sequences`
    sequences are run, once an earlier window has shown which axis of the arguments is the batch.

    Args:
        redirected: the first call of the model is no forward: a host sends its training step through it.
        rerun: a training step that is compiled as a whole, without its compilation: no call in it can be noted, so it is run again up to
            the end of its first forward.
    """

    source: Literal["train", "probe"] = "probe"

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None,
        sampler: Sampler,
        receiver: Receiver,
        fault: Fault,
        selection: Selection,
        redirected: bool = False,
        rerun: Callable[[], object] | None = None,
    ) -> None:
        self.plan, self.sites = plan, dict[Key, Site]()
        self.notes: tuple[str, ...] = ()
        self.heard_forward = False
        self._gradients_before: dict[int, tuple[int, int]] = {}
        self.seconds = 0.0
        self._parts = (model, sampler, receiver, fault, selection)
        self._redirected, self._rerun = redirected, rerun
        self._calls: list[_Call] = []
        self._depth = 0
        self._listening = ExitStack()
        self._inner: Observed | None = None

    @property
    def broken(self) -> bool:
        """Whether the separate forward raised."""
        return self._inner is not None and self._inner.broken

    @property
    def outgrown(self) -> bool:
        """Whether something ran that did not in the forward the plan was made from."""
        return self._inner is not None and self._inner.outgrown

    @property
    def missing(self) -> Mapping[str, str]:
        reason = "read from a separate forward without gradients (source='probe')"
        return {**(self.plan.missing if self.plan is not None else {}), "gradient_norm": reason, "qk_to_v_gradient": reason}

    @property
    def backward_seen(self) -> bool:
        """Whether the parameters' gradients have changed since the window opened: else they are an earlier step's."""
        return _gradients_of(self._parts[0]) != self._gradients_before

    def __enter__(self) -> Probed:
        model, *_, selection = self._parts
        self._gradients_before = _gradients_of(model)
        if self._rerun is not None:
            return self
        eager, compiled = selection.parts(model)
        if eager or compiled:
            self._listening.enter_context(module_hooks([model, *eager], self._enter, self._leave))
        for module in compiled if eager or compiled else selection.callers(model):
            self._listening.enter_context(noted_calls(module, self._note))
        return self

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self._redirected and module is self._parts[0]):
            self._note(module, args, kwargs)
            self._depth += 1
        self._redirected = self._redirected and module is not self._parts[0]

    def _leave(self, *_: Any) -> None:
        self._depth = max(self._depth - 1, 0)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep outermost calls, up to the first of the model itself."""
        model = self._parts[0]
        if self._depth > 0 or (self._calls and self._calls[-1].module is model):
            return
        if any(module is caller for caller in self._parts[4].callers(model)):
            self._calls.append(_Call.of(model, args, kwargs))
        elif not _keeps_count(module):
            self._calls.append(_Call.of(module, args, kwargs))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listening.close()
        if kind is None:
            self._read()
        self._calls.clear()

    def end_forward(self) -> None:
        """Run the noted calls again, unnoticed, and hear them. Idempotent."""
        started = time.perf_counter()
        self._read()
        self.seconds += time.perf_counter() - started

    def _read(self) -> None:
        if self._inner is not None or not (self._calls or self._rerun):
            return
        self._listening.close()
        model, sampler, receiver, fault, selection = self._parts
        self.heard_forward = True
        self._inner = Observed(model, self.plan, sampler, receiver, fault, selection)
        try:
            with undisturbed(model), self._inner:
                self._repeat(self._inner)
        except Exception as error:
            fault("the separate forward", error)
        self._calls.clear()
        self.plan, self.sites = self._inner.plan, self._inner.sites
        self.notes = (*self.notes, *self._inner.notes)

    def _repeat(self, inner: Observed) -> None:
        if self._rerun is not None:
            self.notes = ("the whole training step was run again, up to the end of its first forward",)
            inner.at_first_return = _stop
            try:
                self._rerun()
            except _Enough:
                pass
            return
        names = {id(module): name for name, module in self._parts[0].named_modules()}
        for call in self._calls:
            name = names.get(id(call.module), "")
            if self.plan is not None and not _holds(name, self.plan):
                continue
            sliced = first_sequences(call.args, call.kwargs, self._parts[1].max_sequences, self.plan)
            if sliced is None and self.plan is not None:
                self.notes = ("the whole batch was run again: which axis of the arguments is the batch is not certain",)
            call.again(*(sliced or (call.args, call.kwargs)))
            if inner.finished:
                return

    def parameter_gradients(
        self, gradient: Callable[[nn.Parameter], Tensor | None]
    ) -> tuple[dict[Key, list[Tensor]], dict[Key, tuple[list[Tensor], list[Tensor]]]]:
        return self._inner.parameter_gradients(gradient) if self._inner is not None else ({}, {})

    def weights(self) -> Iterator[tuple[Key, WeightObservation]]:
        return self._inner.weights() if self._inner is not None else iter(())

    @property
    def unknown_weights(self) -> dict[Key, str]:
        return self._inner.unknown_weights if self._inner is not None else {}


def _stop() -> None:
    raise _Enough


def _keeps_count(module: nn.Module) -> bool:
    """Whether a call changes more than its result: torchmetrics' metrics accumulate. What has no parameters cannot attend either."""
    return (hasattr(module, "update") and hasattr(module, "compute")) or next(module.parameters(), None) is None


def _holds(name: str, plan: Plan) -> bool:
    """Whether the plan listens to something in this module."""
    return name == "" or any(frame == name or frame.startswith(f"{name}.") for frame in plan.frames)


def first_sequences(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int | None, plan: Plan | None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The call on its first sequences, where the plan shows the batch on axis 0 and no argument leaves a doubt; else None."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
    layouts = {block.layout.batch for block in plan.blocks} if plan is not None else set()
    if count is None or not tensors or layouts != {(0,)}:
        return None
    batch = tensors[0].shape[0]
    if batch <= count:
        return args, kwargs
    if any(tensor.shape[0] != batch for tensor in tensors) or any(batch in tensor.shape[1:] and tensor.ndim == 2 for tensor in tensors):
        return None
    cut = tree_map(lambda leaf: leaf[:count] if isinstance(leaf, Tensor) and leaf.ndim else leaf, (args, kwargs))
    return cut[0], cut[1]


def heard_once(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], receiver: Receiver, fault: Fault) -> Observed:
    """A forward of the model on these arguments that leaves it as it was, and what was heard of it; it may raise what the model raises."""
    with undisturbed(model):
        observed = Observed(model, None, Sampler(), receiver, fault, Selection(model, None, None, "train"))
        with observed:
            model(*args, **kwargs)
    return observed
