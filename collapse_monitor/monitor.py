"""The monitor: when to look, and who passes what to whom. No maths, no files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from collapse_monitor.arguments import check_choice, check_model, whole_step
from collapse_monitor.capture.learning import Learning
from collapse_monitor.capture.probe import Probed
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.capture.selection import Selection
from collapse_monitor.capture.window import Observed
from collapse_monitor.judge import DEFAULT_RULES, Judge
from collapse_monitor.ledger import Ledger
from collapse_monitor.measure import PooledFeatures, Window
from collapse_monitor.metrics import DEFAULT_METRICS, GRADIENT_READINGS, Metric, select, validate
from collapse_monitor.records import Alert, Finding, Site, Snapshot
from collapse_monitor.report import Sinks
from collapse_monitor.schedule import Schedule

logger = logging.getLogger("collapse_monitor")

_UNSAMPLED: AbstractContextManager[None] = nullcontext()


class Monitor:
    """Watches a model while it trains, on some steps, and says what has collapsed.

    Args:
        model: any `nn.Module`; nothing is attached to it outside sampled steps.
        every: steps between samples, or a function `step -> bool`. With a number a step is sampled when `step // every` has
            changed since the last one.
        budget: share of training time the monitor may take; it measures its own cost and stretches `every` to keep it. None: no limit.
        source: `train` listens to the training forward, `probe` runs a separate forward without gradients, `auto` listens unless
            the model is compiled.
        sites: names of modules, or Sites, to which to restrict (or, for modules that discovery does not find, extend) the reading.
        metrics: Metric records, or names of built-in ones.
        rules: callables `(snapshot, history) -> list[Condition]`, or names of built-in ones.
        sinks: objects with `write(snapshot, alerts)` and `close()`.
        mute: rules that stay silent: `"oversmoothing"`, or with layers `"oversmoothing:0,3-5"` or `("oversmoothing", (0, 3))`.
        token_mask: name of the keyword of the model call that is True (non-zero) at real tokens, or a function
            `(args, kwargs) -> Bool[batch token]`. None: the usual names are recognised.
        max_sequences: how many sequences of a batch are read; None reads all.
        max_tokens: how many tokens of a sequence are read; None reads all. A rank cannot exceed this number.
        max_queries: how many query rows of an attention map are read; None reads all.
        ranks: `local` measures each process by itself and reports on rank 0; `all` averages over processes.
        on_error: `warn` never lets a fault of the monitor reach the run; `raise` raises it.

    Raises:
        ValueError: an argument is not allowed; the message says what is.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int | Callable[[int], bool] = 50,
        budget: float | None = 0.01,
        source: Literal["auto", "train", "probe"] = "auto",
        sites: Sequence[str | Site] | None = None,
        metrics: Sequence[Metric | str] = DEFAULT_METRICS,
        rules: Sequence[Any] = DEFAULT_RULES,
        sinks: Sequence[Any] = (),
        mute: Sequence[str | tuple[str, Sequence[int]]] = (),
        token_mask: str | Callable[[tuple[Any, ...], dict[str, Any]], Tensor] | None = None,
        max_sequences: int | None = 4,
        max_tokens: int | None = 64,
        max_queries: int | None = 16,
        ranks: Literal["local", "all"] = "local",
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        check_choice("source", source, ("auto", "train", "probe"))
        check_choice("ranks", ranks, ("local", "all"))
        check_choice("on_error", on_error, ("warn", "raise"))
        check_model("Monitor", model)
        self.model = model
        self.schedule = Schedule(every, budget)
        self._selection = Selection(model, sites, token_mask, source)
        self._metrics = select(metrics)
        for metric in self._metrics:
            validate(metric)
        self._strict = on_error == "raise"
        self._ledger = Ledger(Judge(rules, mute), Sinks(sinks), self.schedule, ranks == "all", self._strict)
        self._sampler = Sampler(max_sequences, max_tokens, max_queries)
        self._learning = Learning()
        self._features = PooledFeatures()
        self._open = self._closed = False
        self._observed: Observed | Probed | None = None
        self._scale_left: dict[int, float] = {}

    # -- watching

    def observe(
        self,
        step: int,
        loss_scale: float | Callable[[], float] = 1.0,
        *,
        redirected: bool = False,
        rerun: Callable[[], object] | None = None,
    ) -> AbstractContextManager[None]:
        """A context around forward and, for gradient readings, backward. Hooks exist only in here, only on sampled steps.

        Args:
            step: the number under which the readings are logged; use the one your loss is logged with.
            loss_scale: the factor the loss is multiplied with before backward (mixed precision); divided out of gradients. A function, such
                as `scaler.get_scale`, is asked on sampled steps only.
            redirected: for hosts that send a training step through the model's own call: the first call is that step, not a forward.
            rerun: for hosts whose whole training step is compiled: that step, uncompiled, to be probed up to the end of the forward.
        """
        step = whole_step(step)
        if self._closed or self._open:
            return _UNSAMPLED
        if self._ledger.ripe:
            started = time.perf_counter()
            with torch._C.DisableTorchFunction():
                self._ledger.settle()
            self.schedule.charge_late(time.perf_counter() - started)
        return self._window(step, loss_scale, redirected, rerun) if self._wants(step) else _UNSAMPLED

    def _wants(self, step: int) -> bool:
        try:
            return self.schedule.wants(step)
        except Exception as error:
            if self._strict:
                raise
            self._ledger.say(f"every: {type(error).__name__}: {error}", kind="every")
            return False

    @contextmanager
    def _window(
        self, step: int, loss_scale: float | Callable[[], float], redirected: bool, rerun: Callable[[], object] | None
    ) -> Iterator[None]:
        started = time.perf_counter()
        faults: list[BaseException] = []

        def fault(what: str, error: BaseException) -> None:
            faults.append(error)
            self._ledger.say(f"{what}: {type(error).__name__}: {error}", kind=f"{what}: {type(error).__name__}")

        plan = self._learning.plan_for(self.model)
        discovering = plan is None
        self._ledger.settle()
        self._ledger.expect()
        self._open, self._scale_left = True, {}
        observed: Observed | Probed | None = None
        raised: BaseException | None = None
        scale, own = 1.0, 0.0
        try:
            try:
                scale = loss_scale() if callable(loss_scale) else loss_scale
                receiver = Window(self._metrics, self._features, scale)
                parts = (self.model, plan, self._sampler, receiver, fault, self._selection, redirected)
                observed = Probed(*parts, rerun) if self._selection.probes(self.model) else Observed(*parts)
                observed.__enter__()
            except Exception as error:
                fault("opening the window", error)
                if observed is not None:
                    observed.__exit__(type(error), error, None)
                    observed = None
            self._observed = observed
            own = time.perf_counter() - started
            yield
        except BaseException as error:
            raised = error
            raise
        finally:
            ended = time.perf_counter()
            self._open, self._observed = False, None
            if observed is not None:
                try:
                    observed.__exit__(type(raised) if raised is not None else None, raised, None)
                    with torch._C.DisableTorchFunction():
                        self._evaluate(step, observed, receiver, scale, raised is not None, fault)
                except Exception as error:
                    fault(f"evaluating step {step}", error)
                sentence = self.schedule.charge(own + time.perf_counter() - ended + observed.seconds, once=discovering)
                if sentence is not None:
                    logger.info(sentence)
            raised = None  # its traceback holds this frame
        if faults and self._strict:
            raise faults[0]

    def end_forward(self) -> None:
        """Say that the forward of the open window is over, for hosts that know before backward begins. Does nothing elsewhere."""
        if self._observed is not None:
            self._observed.end_forward()

    def unscaled(self, parameters: Iterable[nn.Parameter], loss_scale: float = 1.0) -> None:
        """Say that the loss scale has been taken off the gradients of these parameters inside the open window, as `scaler.unscale_` does.

        Args:
            parameters: those of the optimiser that was unscaled.
            loss_scale: the factor that is left in their gradients.
        """
        if self._open:
            self._scale_left.update((id(parameter), loss_scale) for parameter in parameters)

    @property
    def observing(self) -> bool:
        """Whether a sampled step's window is open."""
        return self._open

    def _evaluate(
        self, step: int, observed: Observed | Probed, receiver: Window, scale: float, raised: bool, fault: Callable[..., None]
    ) -> None:
        """The window has closed: start the evaluation and its one copy to the host."""
        if observed.broken or (raised and not observed.heard_forward):
            self.schedule.retract()
            if not raised:
                self._ledger.say("the model's forward raised inside the observed window: that step was not read")
            return
        problem = self._learning.learn(observed)
        if problem is not None:
            if self._strict:
                raise ValueError(problem)
            self._ledger.say(problem)
            return
        missing = dict(observed.missing)
        unread = [site.name for site in observed.sites.values() if site.name in missing]
        if unread and len(unread) == len(observed.sites):
            self._ledger.say(f"no layer could be read, first {unread[0]}: {missing[unread[0]]}", kind="no layer could be read")
        if observed.backward_seen:
            receiver.parameters(*self._parameter_gradients(observed, scale), unknown=observed.unknown_weights)
        else:
            missing.update(dict.fromkeys(GRADIENT_READINGS, "backward did not run inside the observed window"))
        if self.schedule.weights_due():
            self.schedule.spread(receiver.weights(observed.weights()))
        self._ledger.enter(receiver.launch(step, observed.sites, missing, notes=observed.notes, source=observed.source))
        for what, error in receiver.faults:
            fault(f"metric {what}", error)
        if raised or self._strict:
            self._ledger.settle_own()

    def _parameter_gradients(self, observed: Observed | Probed, scale: float) -> tuple[Any, Any, float]:
        """The gradients of parameters, and the loss scale that is in them."""
        left = self._scale_left
        scales = {left.get(id(p), scale) for p in self.model.parameters() if p.grad is not None} if left else {scale}
        if len(scales) == 1:
            return (*observed.parameter_gradients(lambda parameter: parameter.grad), scales.pop())

        def unscaled(parameter: nn.Parameter) -> Tensor | None:
            return None if parameter.grad is None else parameter.grad.detach() / left.get(id(parameter), scale)

        return (*observed.parameter_gradients(unscaled), 1.0)

    # -- what the user hands in and takes out

    def log(self, step: int, **context: float | Tensor) -> None:
        """Numbers of your own beside the readings, such as `train_loss` and `val_loss`; tensors are copied with the next snapshot."""
        self._ledger.log(context)

    def settle(self) -> None:
        """Wait for the readings of the last sampled step now. With `ranks="all"` every process must call this at the same point."""
        self._ledger.settle()

    @property
    def settled(self) -> int:
        """How many snapshots there have been."""
        return self._ledger.settled

    @property
    def every(self) -> int | None:
        """Steps between samples now in force; None when your own function decides."""
        return self.schedule.every

    @property
    def latest(self) -> Snapshot | None:
        """The last snapshot; waits for its copy from the device."""
        return self._ledger.latest

    @property
    def alerts(self) -> list[Alert]:
        """All alert events so far, newest last."""
        return self._ledger.alerts

    @property
    def findings(self) -> list[Finding]:
        """What is true now."""
        return self._ledger.findings

    def headlines(self) -> dict[str, float]:
        """The few numbers a run can be steered by, of the last snapshot: nan-free, empty before the first."""
        return self._ledger.headlines()

    @property
    def sites(self) -> tuple[Site, ...]:
        """What is listened to, in order of entry; empty before the first sampled step."""
        plan = self._learning.plan
        return tuple(plan.sites.values()) if plan is not None else ()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, JSON-able, so that a resumed run neither warms up nor fires again."""
        return self._ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; missing parts are left as they are."""
        self._ledger.load_state_dict(state)

    def close(self) -> None:
        """Settle what is pending and close the sinks. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._ledger.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
