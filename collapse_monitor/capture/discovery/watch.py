"""The discovery pass: watch one forward of the user's run, take samples on the way, and work out the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collapse_monitor.capture.discovery.chunks import chunk_of
from collapse_monitor.capture.discovery.events import Event, recognise
from collapse_monitor.capture.discovery.graph import Frame, Operation, Value
from collapse_monitor.capture.discovery.planning import make_plan
from collapse_monitor.capture.discovery.products import CONVOLUTIONS
from collapse_monitor.capture.discovery.semantics import ADDITIONS
from collapse_monitor.capture.discovery.streams import is_hidden, joins, layout_of
from collapse_monitor.capture.discovery.trace import Trace
from collapse_monitor.capture.hooks import GradientHooks
from collapse_monitor.capture.masks import token_masks
from collapse_monitor.capture.plan import BlockPlan, Plan
from collapse_monitor.capture.reading import Reader
from collapse_monitor.capture.rows.fused import HIDDEN, FusedCall, fused_call
from collapse_monitor.capture.rows.joining import join_chunks, join_heads
from collapse_monitor.capture.rows.kernel import KernelCall, Source
from collapse_monitor.capture.rows.softmax import softmax_rows
from collapse_monitor.capture.sampling import Chunk, Layout, Sampler, as_added
from collapse_monitor.capture.tensors import is_sampled, leaves
from collapse_monitor.observation import AttentionObservation, BlockObservation, Key, Receiver, TokenSample
from collapse_monitor.records import Site

_PROJECTIONS = CONVOLUTIONS | {"linear", "addmm"}
_MOST_JOINED = 8
"""Additions remembered for an attention: the first ones may still be part of how it makes its weights."""
_LATER = "only the rest of this first forward told how to read it: read from the next sampled step on"
_SCORED = ("data", "query", "constant", "unknown")


class Discovery(Reader):
    """Hears one forward without knowing the model. `finish` delivers the snapshot's observations and returns the plan."""

    def __init__(
        self, model: nn.Module, sampler: Sampler, receiver: Receiver, gradients: GradientHooks, fault: Callable[[str, BaseException], None]
    ) -> None:
        super().__init__(sampler, receiver, gradients, fault)
        self.model = model
        self.mode = Trace(model, self, lambda error: fault("discovery", error))
        self.events: list[Event] = []
        self.mask_frames: set[str] = set()
        self._samples: dict[int, dict[Layout, TokenSample]] = {}
        self._inputs: dict[int, list[tuple[Value, Tensor, int]]] = {}
        self._waiting: dict[int, AttentionObservation] = {}
        self._branches: dict[int, list[tuple[Operation, TokenSample, TokenSample]]] = {}
        self._causal: dict[int, Tensor] = {}
        self._watched: set[int] = set()
        self._gradient_keys: dict[int, Key] = {}
        self._operand_roles: dict[tuple[int, int], tuple[Key, str]] = {}
        self._in_call: dict[int, list[Event]] = {}  # by a call, its events so far that may be chunks of one attention
        self._chunks: dict[int, AttentionObservation | None] = {}
        self._call: FusedCall | None = None  # the kernel call that is being looked at

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.mode.enter(module, args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.mode.leave(module, args, kwargs, output)

    def external(self, describe: Callable[[], KernelCall], run: Callable[[], Any]) -> Any:
        """Make a call that no function mode sees, and hear it."""
        return self.mode.external(describe, run)

    @property
    def depth(self) -> int:
        return self.mode.depth

    def ran(self, block: BlockPlan) -> bool:
        """Whether the block ran: its parameters may hold gradients of an earlier step."""
        return not block.missing or block.output is not None

    @property
    def attended(self) -> bool:
        """Whether an attention has been heard."""
        return bool(self.events)

    # -- what the trace tells

    def operation(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        event = recognise(operation) if operation.frame.parent is not None else None  # outside all calls it is another model's
        if event is not None:
            self._call = None
            self.guarded("the arguments of a kernel", self._describe, event, args, kwargs)
            self.events.append(event)
            chunk = self._chunk_of(event)
            if event.scores in _SCORED:
                self.guarded("attention rows", self._rows, event, chunk, args, kwargs, result)
        elif operation.product is not None:
            self.guarded("gradients of q and v", self._watch_operands, operation, args, kwargs)
        elif operation.name in ADDITIONS:
            self.guarded("residual additions", self._addition, operation, args, kwargs, result)

    def entered(self, frame: Frame, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        masks = token_masks(module, args, kwargs)
        self.sampler.masks.enter(self.depth, list(masks.values()))
        if masks:
            self.mask_frames.add(frame.name)
        if not frame.leaf:
            tensors = [tensor for _, tensor in leaves((args, kwargs))]
            self._inputs[frame.index] = [
                (value, tensor.clone(), -1) if tensor.is_inference() else (value, tensor, tensor._version)
                for value, tensor in zip(frame.inputs, tensors, strict=True)
                if is_hidden(value) and is_sampled(tensor)
            ]

    def left(self, frame: Frame, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._read_call(frame, result)
        self.sampler.masks.leave(self.depth + 1)

    def _read_call(self, frame: Frame, result: Any) -> None:
        given = self._inputs.pop(frame.index, [])
        inside = [event for event in self.events if event.operation.index >= frame.first]
        if frame.leaf or result is None:
            return
        # what attends to nothing may turn out to be a block too; the label of a later attention is not known yet
        attentions: list[Event | None] = [*inside] or [*self.events[:1]] or [None]
        shapes = {value.shape for value, _, _ in given}
        for (_, value), (_, tensor) in zip(frame.outputs, leaves(result), strict=True):
            if is_hidden(value) and (value.shape in shapes or len(value.shape) <= 3) and self.readable(tensor, value.index, nested=True):
                self._sample(value, tensor, attentions)
                self._watch_gradient(value, tensor)
        for value, tensor, version in given:
            if version == -1 or tensor._version == version:
                self._sample(value, tensor, attentions)

    # -- samples

    def _describe(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the arguments of a kernel say better than the axes of its operands."""
        if event.how in HIDDEN:
            self._call = fused_call(event.how, args, kwargs, self.sampler)
            event.query_length, event.key_length = self._call.lengths or (event.query_length, event.key_length)
            event.folding, event.packed = self._call.folding or event.folding, self._call.sequences

    def _chunk_of(self, event: Event) -> Chunk | None:
        """Which part of the queries this may be, if they come in several calls: all of them together are looked at in the end."""
        earlier = self._in_call.setdefault(event.operation.frame.index, [])
        chunk = chunk_of(event, earlier)
        if chunk is None:
            earlier.clear()
        else:
            earlier.append(event)
        return chunk

    def _rows(self, event: Event, chunk: Chunk | None, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        index = event.operation.index
        if chunk is not None:
            sampler = self.sampler.of_chunk(chunk)
            self._chunks[index] = self._observed(event, sampler, args, result) if sampler.rows_of_chunk(event.query_length) else None
            if chunk.start > 0:
                return
        for side, source in enumerate(self._call.sources if self._call is not None else ()):
            self._watch_operand(index, side, source)
        observation = self._observed(event, self.sampler, args, result)
        if observation is None:
            return
        self._causal[index] = _looks_causal(observation)
        if event.heads == 1 and event.operation.frame.name.rpartition(".")[2].isdigit():
            self._waiting[index] = observation
        else:
            self.receiver.attention(("event", index), observation)

    def _observed(self, event: Event, sampler: Sampler, args: tuple[Any, ...], result: Any) -> AttentionObservation | None:
        """The rows of an event, None where they cannot be read."""
        call, source = self._call, args[0] if args else None
        if call is not None:
            if call.unreadable:
                self.refused[event] = call.unreadable
            readable = not call.unreadable and self.readable(call.query, event)
            return call.rows(event.folding, sampler) if readable else None
        if event.axes is None or not isinstance(source, Tensor) or not self.readable(source, event) or not self.readable(result, event):
            return None
        return softmax_rows(source, result, event.axes, sampler)

    def _addition(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
        heard = [event for event in self.events if event.scores in _SCORED]
        if (
            not heard
            or len(tensors) < 2
            or not isinstance(result, Tensor)
            or not is_hidden(operation.outputs[0])
            or not self.readable(result, operation.outputs[0].index, nested=True)
        ):
            return
        if operation.inputs[0].shape == operation.inputs[1].shape and operation.outputs[0].producer is operation:
            if any(operation.ancestry >> event.operation.index & 1 for event in heard[-1:]):
                self._sample(operation.outputs[0], result, [heard[-1]])
                self._watch_gradient(operation.outputs[0], result)
        for event in reversed(heard):
            joined = self._branches.setdefault(event.operation.index, [])
            known = bool(joined)
            side = joins(operation, event) if len(joined) < _MOST_JOINED else None
            if side is not None:
                layout = layout_of(operation.inputs[side], event)
                samples = [self.sampler.tokens(tensor, layout) for tensor in (tensors[side], tensors[1 - side])]
                pair = as_added(samples[0], samples[1], kwargs.get("alpha", 1), side, tensors[1 - side] is result)
                joined.append((operation, *pair))
            if known:
                break

    def _sample(self, value: Value, tensor: Tensor, attentions: Sequence[Event | None]) -> None:
        """Sample the value as every layout reads it that the queries of these attentions suggest."""
        samples = self._samples.setdefault(value.index, {})
        for attention in attentions:
            layout = layout_of(value, attention)
            if layout not in samples:
                samples[layout] = self.sampler.tokens(tensor, layout)

    def _sampled(self, value: Value | None, layout: Layout | None) -> TokenSample | None:
        """The sample of a value that was read by this layout; None takes any."""
        samples = self._samples.get(value.index, {}) if value is not None else {}
        return next(iter(samples.values()), None) if layout is None else samples.get(layout)

    # -- gradients

    def _watch_gradient(self, value: Value, tensor: Tensor) -> None:
        if value.index in self._watched:
            return
        self._watched.add(value.index)

        def receive(gradient: Tensor) -> None:
            key = self._gradient_keys.get(value.index)
            if key is not None:
                self.receiver.gradient(key, gradient)

        self.watch(tensor, receive)

    def _watch_operands(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        product = operation.product
        assert product is not None
        if product.left.static or product.right.static:
            if operation.name in _PROJECTIONS or (product.left.static and product.right.static):
                return  # only a learned query is multiplied with data as it is
        tensors = dict(
            zip((value.index for value in operation.inputs), (t for _, t in leaves((args, tuple(kwargs.values())))), strict=False)
        )
        for side, value in enumerate((product.left, product.right)):
            if value.index in tensors:
                self._watch_operand(operation.index, side, Source(tensors[value.index]))

    def _watch_operand(self, operation: int, side: int, source: Source) -> None:
        def receive(gradient: Tensor) -> None:
            known = self._operand_roles.get((operation, side))
            if known is not None:
                self.receiver.qv_gradient(known[0], known[1], source.part_of(gradient))

        self.watch(source.tensor, receive)

    # -- the end of the forward

    def finish(self) -> tuple[Plan, dict[Key, Site]]:
        """Work out the plan; hand over what this forward already gave. Keys of this window's observations -> sites."""
        self.mode.recording = False
        self._inputs.clear()
        causal = {index: bool(flag) for index, flag in self._causal.items()}
        made = make_plan(self.mode.graph, self.events, self.model, causal, self.mask_frames)
        for block, output, given in made.blocks:
            self._gradient_keys[output.index if output is not None else -1] = block.key
            sample = self._sampled(output, block.layout)
            if sample is None and not block.missing:
                self.missing[block.site.name] = self.refused.get(output.index if output is not None else None, _LATER)
            if sample is not None:
                self.receiver.block(block.key, BlockObservation(sample, self._sampled(given, block.layout)))
        sites: dict[Key, Site] = {block.key: block.site for block, _, _ in made.blocks}
        for attention, found, addition, stream in made.attentions:
            # the rows of an inverted map were read along the wrong axis: they come with the next window
            key: Key = ("inverted" if found.first.inverted else "event", found.first.operation.index)
            if attention.chunks and all(event.operation.index in self._chunks for event in found.events):
                key = ("chunks", found.first.operation.index)
                rows = [self._chunks[event.operation.index] for event in found.events]
                parts = [(chunk, part) for chunk, part in zip(attention.chunks, rows, strict=True) if part is not None]
                if parts:  # none where the rows could not be read: the batch is empty, say
                    self.receiver.attention(key, join_chunks(parts))
            sites[key] = attention.site
            if found.first in self.refused:
                self.missing[attention.site.name] = self.refused[found.first]
            self._deliver_waiting(
                key, [event.operation.index for event in found.events if found.parallel_heads] or [found.first.operation.index]
            )
            for index, role, side in _operands(found.first):
                self._operand_roles[(index, side)] = (key, role)
            for operation, branch, other in self._branches.get(found.first.operation.index, ()):
                if operation is addition and attention.branch is not None:
                    along = self._sampled(stream, attention.branch[3]) or other
                    self.receiver.branch(key, self.sampler.counted(branch), self.sampler.counted(along))
        self._samples.clear()
        self._branches.clear()
        self._waiting.clear()
        self._chunks.clear()
        order = list(made.plan.sites.values())
        return made.plan, dict(sorted(sites.items(), key=lambda item: order.index(item[1])))

    def _deliver_waiting(self, key: Key, indices: list[int]) -> None:
        waiting = [self._waiting[index] for index in indices if index in self._waiting]
        if waiting:
            self.receiver.attention(key, join_heads(waiting))


def _operands(event: Event) -> list[tuple[int, str, int]]:
    """(operation, role, operand) of q and v."""
    if event.weights is None:
        return [(event.operation.index, "q", 0), (event.operation.index, "v", 1)]
    found = []
    for operation, role, value in ((event.product, "q", event.query), (event.consumer, "v", event.value)):
        product = operation.product if operation is not None else None
        if operation is not None and product is not None and value is not None:
            found.append((operation.index, role, 0 if product.left is value else 1))
    return found


def _looks_causal(observation: AttentionObservation) -> Tensor:
    """No query looks past its own position, though some could; the sequences are aligned at their ends."""
    weights, rows = observation.weights, observation.query_index
    keys = weights.shape[-1]
    queries = observation.same_rows[0] if isinstance(observation.same_rows, tuple) else keys
    assert rows is not None
    shift = max(0, keys - int(queries))
    position = torch.arange(keys, device=weights.device)
    later = position > (rows[..., None] + shift)
    later = later if rows.ndim == 1 else later[:, None]
    return later.any() & ((weights > 0) & later).any().logical_not() & torch.tensor(int(queries) > 1, device=weights.device)
