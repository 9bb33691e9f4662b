"""One observed forward: hooks and function mode go in, samples come out, and nothing stays behind."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from collapse_monitor.capture.discovery.watch import Discovery
from collapse_monitor.capture.hooks import GradientHooks, module_hooks
from collapse_monitor.capture.interception import Hear, intercepted
from collapse_monitor.capture.listen import Listening
from collapse_monitor.capture.plan import BlockPlan, Plan
from collapse_monitor.capture.rows.external import present
from collapse_monitor.capture.rows.kernel import KernelCall
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.capture.selection import Selection
from collapse_monitor.capture.tensors import is_plain, leaves
from collapse_monitor.capture.weights import Unreadable, read_weights, reasons_against, row_gradients
from collapse_monitor.observation import Key, Receiver, WeightObservation
from collapse_monitor.records import Site


class Observed:
    """A context in which the first forward of the model is heard; backward may follow inside.

    The forward ends when the model's own call returns, when a top-level part that attends is called a second time, when backward
    begins, or when the context is left. From then on only the gradient hooks on this forward's tensors are alive; they go when
    the context is left. With `redirected` the first call of the model is no forward: a host sends its training step through it.

    Attributes:
        plan: what to listen to; found by a first window, given to later ones.
        sites: keys of this window's observations -> sites, in order of entry.
        missing: site -> why it was not read.
        heard_forward: whether the model ran.
        broken: whether its forward raised: what was heard of it is nothing to learn from.
        seconds: host time spent here while the user's code ran.
    """

    source: Literal["train", "probe"] = "train"

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None,
        sampler: Sampler,
        receiver: Receiver,
        fault: Callable[[str, BaseException], None],
        selection: Selection,
        redirected: bool = False,
    ) -> None:
        self.plan = plan
        self.sites: dict[Key, Site] = {}
        self.heard_forward = self.broken = self._backward_called = False
        self._seconds = 0.0
        self._model, self._fault, self._selection, self._sampler = model, fault, selection, sampler
        self._gradients = GradientHooks()
        sampler.begin()
        if plan is None:
            self._reader: Discovery | Listening = Discovery(model, sampler, receiver, self._gradients, fault)
        else:
            self._reader = Listening(model, plan, sampler, receiver, self._gradients, fault)
        self._reader.at_backward = self._backward_begins
        self._listening = ExitStack()
        self._unreadable: dict[Key, str] = {}
        self._late: dict[Key, Site] = {}
        self._finished = False
        self._top: set[int] = set()
        self._redirected = redirected
        self._no_mask: BaseException | None = None
        self._masked = False
        self._handling: BaseException | None = None  # what was being handled when the outermost call began
        self.at_first_return: Callable[[], None] = lambda: None

    @property
    def seconds(self) -> float:
        return self._seconds + self._reader.seconds

    @property
    def missing(self) -> Mapping[str, str]:
        if self.plan is None:
            return {}
        late = {site.name: "named by sites=, read from the next sampled step on" for site in self._late.values()}
        heard = {plan.site.name for plan in self._heard_after_all}
        reasons = {name: reason for name, reason in self.plan.missing.items() if name not in heard}
        return {**reasons, **late, **self._reader.missing}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a snapshot should say about what is read."""
        return self.plan.notes if self.plan is not None else ()

    @property
    def outgrown(self) -> bool:
        """Whether something ran that did not in the forward the plan was made from."""
        return bool(self._heard_after_all) or (isinstance(self._reader, Listening) and self._reader.unforeseen)

    @property
    def _heard_after_all(self) -> list[BlockPlan]:
        if self.plan is None or not isinstance(self._reader, Listening):
            return []
        return [plan for plan in self.plan.blocks if plan.missing and plan.key in self._reader.heard]

    def __enter__(self) -> Observed:
        wanted = None if self.plan is None else self.plan.frames
        modules = [module for name, module in self._model.named_modules() if wanted is None or name in wanted]
        modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]  # these take no hooks
        if self._selection.source == "train" and "torch._dynamo" in sys.modules:
            # asked for: what is compiled is heard where it runs eagerly, and not compiled anew because of the mode below
            self._listening.enter_context(torch.compiler.set_stance("eager_on_recompile"))
        self._listening.enter_context(intercepted({function: self._hearing(describe) for function, describe in present().items()}))
        self._listening.enter_context(module_hooks(modules, self._enter, self._leave))
        self._reader.mode.__enter__()
        return self

    def _hearing(self, describe: Callable[[Mapping[str, Any], Sampler], KernelCall]) -> Hear:
        """What is done with the calls of a function of another package."""

        def hear(given: Mapping[str, Any], run: Callable[[], Any]) -> Any:
            return run() if self._finished else self._reader.external(lambda: describe(given, self._sampler), run)

        return hear

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.broken |= kind is not None and not self._finished and self._reader.depth > 0
        leave_mode(self._reader.mode)
        self.end_forward()
        self._gradients.remove()
        self._sampler.begin()

    @property
    def finished(self) -> bool:
        """Whether the forward is over."""
        return self._finished

    @property
    def backward_seen(self) -> bool:
        """Whether backward began inside the context."""
        return self._backward_called or self._gradients.heard

    def _backward_begins(self) -> None:
        self._backward_called = True
        self.end_forward()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._finished:
            return
        if self._reader.depth == 0:
            if self._redirected and module is self._model and not self._top:
                self._redirected = False
                return
            if id(module) in self._top and module is not self._model and self._reader.attended:
                self.end_forward()
                return
            self._mask_tokens(module, args, kwargs)
            self._top.add(id(module))
            self._handling = sys.exception()
        self.heard_forward = True
        self._reader.enter(module, args, kwargs)

    def _mask_tokens(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ask each outermost call for the user's mask until one has it."""
        if self._masked:
            return
        try:
            with torch.no_grad():
                mask = self._selection.token_mask(module, args, kwargs)
            self._masked = True
            self._sampler.masks.chosen = mask
        except Exception as error:
            self._no_mask = error

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._finished:
            return
        if self._reader.depth > 0:
            self._reader.leave(module, args, kwargs, output)
        if self._reader.depth == 0:
            # torch calls a hook of a forward that raised while it handles the exception
            self.broken |= output is None and sys.exception() is not self._handling
            self._listen_for_backward(output)
        if module is self._model:
            self.end_forward()
        if self._finished or (self._reader.depth == 0 and self._reader.attended):
            self.at_first_return()

    def _listen_for_backward(self, output: Any) -> None:
        """So that backward is noticed also where no block has a gradient to listen for, as under reentrant checkpointing."""
        for _, tensor in leaves(output):
            if is_plain(tensor) and tensor.grad_fn is not None and not torch.is_inference_mode_enabled():
                self._gradients.watch(tensor, lambda gradient: None)

    def end_forward(self) -> None:
        """The forward is over: stop listening, work out what was heard. Idempotent."""
        if self._finished:
            return
        self._finished = True
        started = time.perf_counter()
        self._listening.close()
        leave_mode(self._reader.mode)  # what follows, such as a compiled loss, runs as without us
        masks = self._sampler.masks
        if self._no_mask is not None and not self._masked:
            self._fault("token_mask", self._no_mask)
        elif masks.chosen is not None and not masks.fitted and self._reader.attended:
            self._fault("token_mask", ValueError(f"its shape {list(masks.chosen.shape)} is not [sequences, tokens] of any hidden state"))
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                plan, self.sites = self._reader.finish()
            if self.plan is None and self.heard_forward and not self.broken:
                self.plan = self._selection.apply(plan, self._model)
                if self.plan is not plan:  # layers are counted anew among the chosen
                    chosen = {(site.kind, site.name): site for site in self.plan.sites.values()}
                    known = ((key, chosen.get((site.kind, site.name))) for key, site in self.sites.items())
                    self.sites = {key: site for key, site in known if site is not None}
                    self._late = {key: site for key, site in self.plan.sites.items() if site not in self.sites.values()}
                    self.sites.update(self._late)
        except Exception as error:
            self._fault("reading the forward", error)
        self._seconds += time.perf_counter() - started

    def parameter_gradients(
        self, gradient: Callable[[nn.Parameter], Tensor | None]
    ) -> tuple[dict[Key, list[Tensor]], dict[Key, tuple[list[Tensor], list[Tensor]]]]:
        """The gradients of every block's parameters, and of the weights that made q and v of every attention where known."""
        if self.plan is None:
            return {}, {}
        keys = {site: key for key, site in self.sites.items()}
        of_blocks: dict[Key, list[Tensor]] = {}
        for block in self.plan.blocks:
            if block.site in keys and block.module and self._reader.ran(block):
                found = map(gradient, self._model.get_submodule(block.module).parameters())
                of_blocks[keys[block.site]] = [g for g in found if g is not None]
        of_weights: dict[Key, tuple[list[Tensor], list[Tensor]]] = {}
        for attention in self.plan.attentions:
            if attention.site in keys and attention.projections.query and attention.projections.value:
                sides = (attention.projections.query, attention.projections.value)
                try:
                    query, value = (row_gradients(self._model, side, gradient) for side in sides)
                except Unreadable as reason:
                    self._unreadable[keys[attention.site]] = str(reason)
                else:
                    of_weights[keys[attention.site]] = (query, value)
                    if not query or not value:
                        side = "values" if query else "queries"
                        self._unreadable[keys[attention.site]] = f"the weights that made its {side} have no gradient"
        return of_blocks, of_weights

    def weights(self) -> Iterator[tuple[Key, WeightObservation]]:
        """The weights that made q, k and v of every attention of this window, one attention after the other."""
        keys = {site: key for key, site in self.sites.items()}
        for attention in self.plan.attentions if self.plan is not None else ():
            if attention.site in keys:
                yield keys[attention.site], read_weights(self._model, attention.projections)

    @property
    def unknown_weights(self) -> dict[Key, str]:
        """Attentions for which it is not known which weights made q and v, or cannot be read, and why."""
        keys = {site: key for key, site in self.sites.items()}
        plans = [plan for plan in (self.plan.attentions if self.plan is not None else ()) if plan.site in keys]
        reasons = {keys[plan.site]: reasons_against(plan.projections).get("qv_weight_gradient") for plan in plans}
        return {**{key: reason for key, reason in reasons.items() if reason is not None}, **self._unreadable}


def leave_mode(mode: TorchFunctionMode) -> None:
    """Take a function mode off torch's stack, also from below modes of the user's that were entered later and are still open."""
    if not any(other is mode for other in torch.overrides._get_current_function_mode_stack()):
        return
    above = []
    while (top := torch.overrides._pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        torch.overrides._push_mode(other)
