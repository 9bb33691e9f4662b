"""A lean step: the plan is known, so only the places it names are looked at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from collapse_monitor.capture.course import Address, Call, Course, address
from collapse_monitor.capture.discovery.planning import KINDS
from collapse_monitor.capture.discovery.semantics import bare_name
from collapse_monitor.capture.hooks import GradientHooks
from collapse_monitor.capture.masks import token_masks
from collapse_monitor.capture.plan import AttentionPlan, BlockPlan, Kind, Place, Plan
from collapse_monitor.capture.reading import BACKWARD, Fault, Reader
from collapse_monitor.capture.rows.fused import HIDDEN, fused_call
from collapse_monitor.capture.rows.joining import Pieces
from collapse_monitor.capture.rows.kernel import KernelCall, Source, external_attention
from collapse_monitor.capture.rows.mha import transparent_multi_head_attention
from collapse_monitor.capture.rows.softmax import softmax_rows
from collapse_monitor.capture.sampling import Chunk, Layout, Sampler, as_added
from collapse_monitor.capture.tensors import at_path, is_sampled, leaves
from collapse_monitor.observation import ROW_READS, AttentionObservation, BlockObservation, Key, Receiver, TokenSample
from collapse_monitor.records import Site

Action = Callable[[tuple[Any, ...], dict[str, Any], Any], None]


class Listening(Reader, TorchFunctionMode):
    """Takes the samples a plan names while the forward runs. `finish` hands the blocks over."""

    def __init__(self, model: nn.Module, plan: Plan, sampler: Sampler, receiver: Receiver, gradients: GradientHooks, fault: Fault) -> None:
        Reader.__init__(self, sampler, receiver, gradients, fault)
        TorchFunctionMode.__init__(self)
        self.recording = True
        self.unforeseen = False  # whether attention was called of which the plan knows nothing
        self._begun = False  # what happens before the model or a part of it is called is no forward
        self._plan = plan
        self._names = {id(module): name for name, module in model.named_modules() if name in plan.frames}
        self._course = Course()
        self._operations: dict[Address, list[Action]] = defaultdict(list)
        self._outputs: dict[Call, list[tuple[Place, Layout, Key | None]]] = defaultdict(list)
        self._inputs: dict[Call, list[tuple[Place, Layout, Key | None]]] = defaultdict(list)
        self._samples: dict[Place, TokenSample] = {}
        self._latest: tuple[Tensor, int, Layout, TokenSample] | None = None
        self._pieces: dict[Key, Pieces] = {}
        self._branches: dict[Key, tuple[TokenSample, TokenSample]] = {}
        self.heard: set[Key] = set()
        for block in plan.blocks:
            self._listen_block(block)
        for attention in plan.attentions:
            self._listen_attention(attention)

    @property
    def mode(self) -> TorchFunctionMode:
        return self

    # -- wiring

    def _listen_block(self, block: BlockPlan) -> None:
        for place, key in ((block.input, None), (block.output, block.key)):
            if place is None:
                continue
            if place.role == "operation":
                self._operations[address(place)].append(self._summed(place, block.layout, key))
            else:
                self._outputs_or_inputs(place).append((place, block.layout, key))

    def _outputs_or_inputs(self, place: Place) -> list[tuple[Place, Layout, Key | None]]:
        return (self._outputs if place.role == "output" else self._inputs)[place.frame, place.call]

    def _listen_attention(self, plan: AttentionPlan) -> None:
        if len(plan.maps) > 1:
            self._pieces[plan.key] = Pieces(len(plan.maps), plan.chunks, self.sampler)
        for number, place in enumerate(plan.maps):
            self._operations[address(place)].append(self._mapped(plan, plan.chunks[number] if plan.chunks else None))
        for operand, role in ((plan.query, "q"), (plan.value, "v")):
            if operand is not None:
                place, side = operand
                self._operations[address(place)].append(self._operand(plan.key, role, place, side))
        if plan.branch is not None and self.receiver.asks("branch"):
            place, side, _, layout = plan.branch
            self._operations[address(place)].append(self._joined(plan.key, side, layout))

    # -- torch functions

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._begun or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return func(*args, **kwargs)
        function = bare_name(func)
        if function in BACKWARD:
            self.at_backward()
        if not self.recording:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return transparent_multi_head_attention()(*args, **kwargs)
        result = func(*args, **kwargs)
        kind = KINDS.get(function)
        if kind is not None and self.recording:
            for what, action in self._next(kind):
                self.guarded(what, action, args, kwargs, result)
        return result

    def external(self, describe: Callable[[], KernelCall], run: Callable[[], Any]) -> Any:
        """Make a call that no function mode sees, and hear it."""
        if not self._begun or not self.recording or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return run()
        self.recording = False
        try:
            result = run()
        finally:
            self.recording = True
        self.unforeseen |= not self._plan.external
        for what, action in self._next(KINDS[external_attention.__name__]):
            self.guarded(what, lambda action=action: action((describe(),), {}, result))
        return result

    def _next(self, kind: Kind) -> list[tuple[str, Action]]:
        """Count an operation of this kind; what is to be done at it, and its name."""
        here = self._course.next(kind)
        actions = self._operations.get(here)
        return [(f"{kind} {here[3]} in {here[0][0] or 'the model'}", action) for action in actions] if actions else _NOTHING

    # -- modules

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook."""
        if not self.recording:
            return
        self._begun = True
        name = self._names[id(module)]
        call = self._course.enter(name)
        self._quietly(f"the arguments of {name or 'the model'}", self._taken, call, module, args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook; also called when the forward raised."""
        if not self.recording:
            return
        name = self._names[id(module)]
        call = self._course.leave(name)
        if call is not None:
            self._quietly(f"the output of {name or 'the model'}", self._returned, call, output)
            self.sampler.masks.leave(self.depth + 1)

    @property
    def depth(self) -> int:
        """How many listened calls are open."""
        return self._course.depth

    def ran(self, block: BlockPlan) -> bool:
        """Whether the block ran, as far as is known: its parameters may hold gradients of an earlier step."""
        return block.output is None or block.key in self.heard

    @property
    def attended(self) -> bool:
        """Whether an attention has been heard."""
        return bool(self.heard)

    def _quietly(self, what: str, read: Callable[..., None], *args: Any) -> None:
        """Our own torch calls must not be counted."""
        self.recording = False
        try:
            self.guarded(what, read, *args)
        finally:
            self.recording = True

    def _taken(self, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.sampler.masks.enter(self.depth, list(token_masks(module, args, kwargs).values()))
        if call in self._inputs:
            tensors = [tensor for _, tensor in leaves((args, kwargs))]
            for place, layout, key in self._inputs[call]:
                position = int(str(place.path[0]))
                if position < len(tensors):
                    self._take(place, tensors[position], layout, key)

    def _returned(self, call: Call, output: Any) -> None:
        for place, layout, key in self._outputs.get(call, ()):
            tensor = at_path(output, place.path)
            if tensor is not None:
                self._take(place, tensor, layout, key)

    # -- what is done at a place

    def _take(self, place: Place, tensor: Tensor, layout: Layout, key: Key | None) -> None:
        if place in self._samples or not self.readable(tensor, key, nested=True):
            if key is not None and place in self._samples:
                self._listen_gradient(key, tensor)
            return
        self._samples[place] = self._known(tensor, layout) or self.sampler.tokens(tensor, layout)
        self._latest = (tensor, _version(tensor), layout, self._samples[place])
        if key is not None:
            self._listen_gradient(key, tensor)

    def _known(self, tensor: Tensor, layout: Layout) -> TokenSample | None:
        """The sample taken last, if it is of this very tensor as it is now, read the same way."""
        latest = self._latest
        known = latest is not None and latest[0] is tensor and latest[1:3] == (_version(tensor), layout)
        return latest[3] if latest is not None and known else None

    def _listen_gradient(self, key: Key, tensor: Tensor) -> None:
        self.watch(tensor, lambda gradient: self.receiver.gradient(key, gradient))

    def _summed(self, place: Place, layout: Layout, key: Key | None) -> Action:
        def action(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            if isinstance(result, Tensor):
                self._take(place, result, layout, key)

        return action

    def _mapped(self, plan: AttentionPlan, chunk: Chunk | None) -> Action:
        sampler = self.sampler if chunk is None else self.sampler.of_chunk(chunk)
        watched = chunk is None or chunk.start == 0
        asked = self.receiver.asks(*ROW_READS)
        read = chunk is None or bool(sampler.rows_of_chunk(chunk.length))

        def action(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            call = fused_call(plan.how, args, kwargs, self.sampler) if plan.how in HIDDEN else None
            if call is not None and watched:
                for role, source in zip("qv", call.sources, strict=True):
                    self._operand_of(plan.key, role, source, plan.maps[0])
            if not asked:
                self.heard.add(plan.key)
                return
            if call is not None:
                if call.unreadable:
                    self.refused[plan.key] = call.unreadable
                if call.unreadable or not read or not self.readable(call.query, plan.key):
                    return
                observation = call.rows(plan.folding, sampler)
            elif read and plan.axes is not None and isinstance(result, Tensor) and self.readable(result, plan.key):
                observation = softmax_rows(args[0], result, plan.axes, sampler)
            else:
                return
            observation.cross = bool(plan.site.cross)
            pieces = self._pieces.get(plan.key)
            self._hear(plan, observation if pieces is None else pieces.add(chunk, observation))

        return action

    def _hear(self, plan: AttentionPlan, observation: AttentionObservation | None) -> None:
        if observation is not None:
            self.heard.add(plan.key)
            self.receiver.attention(plan.key, observation)

    def _operand(self, key: Key, role: str, place: Place, side: int) -> Action:
        def action(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            tensors = [tensor for _, tensor in leaves((args, tuple(kwargs.values())))]
            self._operand_of(key, role, Source(tensors[-2:][side]), place)

        return action

    def _operand_of(self, key: Key, role: str, source: Source, place: Place) -> None:
        def receive(gradient: Tensor) -> None:
            if not self._course.strayed(place):
                self.receiver.qv_gradient(key, role, source.part_of(gradient))

        self.watch(source.tensor, receive)

    def _joined(self, key: Key, side: int, layout: Layout) -> Action:
        def action(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
            branch, stream = tensors[side], tensors[1 - side]
            if not is_sampled(branch) or not is_sampled(stream):
                return
            samples = (self.sampler.tokens(branch, layout), self._known(stream, layout) or self.sampler.tokens(stream, layout))
            self._branches[key] = as_added(*samples, kwargs.get("alpha", 1), side, stream is result)

        return action

    # -- the end of the forward

    def finish(self) -> tuple[Plan, dict[Key, Site]]:
        """Hand over the blocks; the plan is the one given. Sites that ran a course of their own are left unread."""
        self.recording = False
        self._latest = None
        inputs = {}
        sites = dict(self._plan.sites)
        for block in self._plan.blocks:
            sample = self._samples.get(block.output) if block.output is not None else None
            given = self._samples.get(block.input) if block.input is not None else None
            inputs[block.key] = given
            if sample is not None and block.output is not None and not self._course.strayed(block.output):
                self.heard.add(block.key)
                self.receiver.block(block.key, BlockObservation(sample, given))
            elif sample is not None:
                self.missing[block.site.name] = _STRAYED
            elif block.key in self.refused:
                self.missing[block.site.name] = self.refused[block.key]
        for attention in self._plan.attentions:
            if attention.key in self.refused and attention.key not in self.heard:
                self.missing[attention.site.name] = self.refused[attention.key]
            if attention.chunks and attention.key not in self.heard:
                self._hear(attention, self._pieces[attention.key].rest())
            if not _alone(attention) and any(place.ordinal and self._course.strayed(place) for place in attention.maps):
                self.missing[attention.site.name] = _STRAYED
                sites = {("strayed", *key) if key == attention.key else key: site for key, site in sites.items()}
                continue
            joined = self._branches.get(attention.key)
            if joined is None or attention.branch is None:
                continue
            if self._course.strayed(attention.branch[0]):
                self.missing[f"{attention.site.name}/branch_ratio"] = _STRAYED
                continue
            stream = None if attention.branch[2] else inputs.get(attention.block or ())
            self.receiver.branch(attention.key, self.sampler.counted(joined[0]), self.sampler.counted(stream or joined[1]))
        self._samples.clear()
        self._branches.clear()
        self._pieces.clear()
        return self._plan, sites


_NOTHING: list[tuple[str, Action]] = []

_STRAYED = "the model ran a different course in this step than in the one it was learnt from"


def _alone(plan: AttentionPlan) -> bool:
    """Whether the chunks of an attention are all there is of their kind at their place: then any number of them is understood."""
    return bool(plan.chunks) and all(place.total == len(plan.chunks) for place in plan.maps)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
