"""A separate forward that the run cannot notice: for models whose own forward cannot be listened to, and for `probe()`."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from collapse_monitor.capture.hooks import noted_calls
from collapse_monitor.capture.plan import Plan
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.capture.selection import Selection
from collapse_monitor.capture.window import Observed
from collapse_monitor.observation import Key, Receiver
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


class Probed:
    """Like `Observed`, but the model's own forward is left alone: only its arguments are noted, and run again when it is over.

    The first `max_sequences` sequences are run, once an earlier window has shown which axis of the arguments is the batch.
    """

    source = "probe"

    def __init__(self, model: nn.Module, plan: Plan | None, sampler: Sampler, receiver: Receiver, fault: Fault, selection: Selection) -> None:
        self.plan, self.sites = plan, dict[Key, Site]()
        self.notes: tuple[str, ...] = ()
        self.heard_forward = False
        self.backward_seen = True  # gradients are read from the parameters, wherever backward ran
        self._parts = (model, sampler, receiver, fault, selection)
        self._call: tuple[tuple[Any, ...], dict[str, Any], list[tuple[str, torch.dtype]]] | None = None
        self._listening = ExitStack()
        self._inner: Observed | None = None

    @property
    def seconds(self) -> float:
        return 0.0

    @property
    def missing(self) -> Mapping[str, str]:
        reason = "read from a separate forward without gradients (source='probe')"
        return {**(self.plan.missing if self.plan is not None else {}), "gradient_norm": reason, "qk_to_v_gradient": reason}

    def __enter__(self) -> Probed:
        model, *_, selection = self._parts
        for module in selection.callers(model):
            self._listening.enter_context(noted_calls(module, self._note))
        return self

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._call is None:
            autocast = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
            self._call = (args, kwargs, autocast)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listening.close()
        if self._call is not None and kind is None:
            self.end_forward()
        self._call = None

    def end_forward(self) -> None:
        """Run the noted call again, unnoticed, and hear it. Idempotent."""
        call, self._call = self._call, None
        if call is None or self._inner is not None:
            return
        self._listening.close()
        model, sampler, receiver, fault, selection = self._parts
        args, kwargs, autocast = call
        sliced = first_sequences(args, kwargs, sampler.max_sequences, self.plan)
        if sliced is None and self.plan is not None:
            self.notes = ("the whole batch was run again: which axis of the arguments is the batch is not certain",)
        args, kwargs = sliced or (args, kwargs)
        self.heard_forward = True
        self._inner = Observed(model, self.plan, sampler, receiver, fault, selection)
        try:
            with undisturbed(model), self._inner, ExitStack() as stack:
                for device, dtype in autocast:
                    stack.enter_context(torch.autocast(device, dtype=dtype))
                model(*args, **kwargs)
        except Exception as error:
            fault("the separate forward", error)
        self.plan, self.sites = self._inner.plan, self._inner.sites

    def parameter_gradients(self) -> tuple[dict[Key, list[Tensor]], dict[Key, tuple[list[Tensor], list[Tensor]]]]:
        return self._inner.parameter_gradients() if self._inner is not None else ({}, {})


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

