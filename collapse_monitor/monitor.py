"""The monitor: when to look, and who passes what to whom. No maths, no files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from collapse_monitor.capture.plan import Plan
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.capture.selection import Selection
from collapse_monitor.capture.probe import Probed, undisturbed
from collapse_monitor.capture.window import Observed
from collapse_monitor.judge import DEFAULT_RULES, Judge
from collapse_monitor.measure import Pending, PooledFeatures, Window, read_scalars
from collapse_monitor.metrics import DEFAULT_METRICS, Metric, select, validate
from collapse_monitor.records import Alert, Finding, Site, Snapshot
from collapse_monitor.report import Sinks, headlines
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
        _check_choice("source", source, ("auto", "train", "probe"))
        _check_choice("ranks", ranks, ("local", "all"))
        _check_choice("on_error", on_error, ("warn", "raise"))
        if not isinstance(model, nn.Module):
            raise ValueError(f"Monitor(model, ...) needs an nn.Module, got {type(model).__name__}")
        self.model = model
        self.schedule = Schedule(every, budget)
        self._selection = Selection(model, sites, token_mask, source)
        self._metrics = select(metrics)
        for metric in self._metrics:
            validate(metric)
        self._judge = Judge(rules, mute)
        self._sinks = Sinks(sinks)
        self._sampler = Sampler(max_sequences, max_tokens, max_queries)
        self._ranks, self._on_error = ranks, on_error
        self._plan: Plan | None = None
        self._features = PooledFeatures()
        self._pending: Pending | None = None
        self._latest: Snapshot | None = None
        self._context: dict[str, Any] = {}
        self._written: int | None = None
        self._said: set[str] = set()
        self._open = self._closed = False
        self._observed: Observed | Probed | None = None

    # -- watching

    def observe(self, step: int, loss_scale: float = 1.0) -> AbstractContextManager[None]:
        """A context around forward and, for gradient readings, backward. Hooks exist only in here, only on sampled steps.

        Args:
            step: the number under which the readings are logged; use the one your loss is logged with.
            loss_scale: the factor the loss is multiplied with before backward (mixed precision); divided out of gradients.
        """
        if self._closed or self._open:
            return _UNSAMPLED
        if self._pending is not None and (self._ranks == "all" or self._pending.ready()):
            self._settle()
        return self._window(step, loss_scale) if self.schedule.wants(step) else _UNSAMPLED

    @contextmanager
    def _window(self, step: int, loss_scale: float) -> Iterator[None]:
        started = time.perf_counter()
        faults: list[BaseException] = []

        def fault(what: str, error: BaseException) -> None:
            faults.append(error)
            self._say(f"{what}: {type(error).__name__}: {error}")

        discovering = self._plan is None
        self._settle()
        receiver = Window(self._metrics, self._features, loss_scale)
        listens = Probed if self._selection.probes(self.model) else Observed
        observed = listens(self.model, self._plan, self._sampler, receiver, fault, self._selection)
        self._open, self._observed = True, observed
        raised = True
        try:
            with observed:
                own = time.perf_counter() - started
                yield
                raised = False
                ended = time.perf_counter()
        finally:
            self._open, self._observed = False, None
            if raised:
                ended = time.perf_counter()
            self._after(step, observed, receiver, raised, faults)
            own += time.perf_counter() - ended + observed.seconds
            sentence = self.schedule.charge(own, once=discovering)
            if sentence is not None:
                logger.info(sentence)
        if faults and self._on_error == "raise":
            raise faults[0]

    def end_forward(self) -> None:
        """Say that the forward of the open window is over, for hosts that know before backward begins. Does nothing elsewhere."""
        if self._observed is not None:
            self._observed.end_forward()

    def _after(self, step: int, observed: Observed | Probed, receiver: Window, raised: bool, faults: list[BaseException]) -> None:
        """The window has closed: start the evaluation and its one copy to the host."""
        try:
            if raised and not observed.heard_forward:
                return
            problem = self._learn(observed)
            if problem is not None:
                self._say(problem)
                if self._on_error == "raise":
                    faults.append(ValueError(problem))
                return
            missing = dict(observed.missing)
            if observed.backward_seen:
                receiver.parameters(*observed.parameter_gradients())
            else:
                missing.update(dict.fromkeys(_GRADIENT_READINGS, "backward did not run inside the observed window"))
            self._pending = receiver.launch(step, observed.sites, missing, notes=observed.notes, source=observed.source)
            for what, error in receiver.faults:
                self._say(f"metric {what}: {type(error).__name__}: {error}")
                faults.append(error)
            if raised or self._on_error == "raise":
                self._settle()
        except Exception as error:
            faults.append(error)
            self._say(f"evaluating step {step}: {type(error).__name__}: {error}")

    def _learn(self, observed: Observed | Probed) -> str | None:
        """Keep the plan of a first window; a sentence when there is nothing to watch."""
        if not observed.heard_forward:
            return "the model was not called inside the observed window: put its forward into `with monitor.observe(step):`"
        if self._plan is None and observed.plan is not None:
            problem = observed.plan.problem()
            if problem is not None:
                return problem
            self._plan = observed.plan
        return None

    def _settle(self) -> None:
        """Turn the pending evaluation into a snapshot; judge it and write it down."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            snapshot = pending.snapshot(self._ranks == "all").with_context(read_scalars(self._context))
            self._context = {}
            self._latest = snapshot
            if self._written is not None and snapshot.step <= self._written:
                self._say(f"step {snapshot.step} is not above the last written step {self._written}: measured, not written", kind="order")
                return
            self._written = snapshot.step
            alerts = self._judge.check(snapshot)
            if not torch.distributed.is_available() or not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                self._sinks.write(snapshot, alerts)
        except Exception as error:
            self._say(f"settling a step: {type(error).__name__}: {error}")
            if self._on_error == "raise":
                raise
        faults = [*self._judge.faults, *self._sinks.faults]
        self._judge.faults.clear()
        self._sinks.faults.clear()
        for what, error in faults:
            self._say(f"{what} was switched off: {type(error).__name__}: {error}")
        if faults and self._on_error == "raise":
            raise faults[0][1]

    def _say(self, sentence: str, kind: str | None = None) -> None:
        """One warning for each kind of trouble, however often it comes."""
        if (kind or sentence) not in self._said:
            self._said.add(kind or sentence)
            logger.warning(sentence)

    # -- what the user hands in and takes out

    def log(self, step: int, **context: float | Tensor) -> None:
        """Numbers of your own beside the readings, such as `train_loss` and `val_loss`; tensors are copied with the next snapshot."""
        self._context.update({name: value.detach() if isinstance(value, Tensor) else value for name, value in context.items()})

    @property
    def every(self) -> int | None:
        """Steps between samples now in force; None when your own function decides."""
        return self.schedule.every

    @property
    def latest(self) -> Snapshot | None:
        """The last snapshot; waits for its copy from the device."""
        self._settle()
        return self._latest

    @property
    def alerts(self) -> list[Alert]:
        """All alert events so far, newest last."""
        self._settle()
        return list(self._judge.alerts)

    @property
    def findings(self) -> list[Finding]:
        """What is true now."""
        self._settle()
        return list(self._judge.findings)

    def headlines(self) -> dict[str, float]:
        """The few numbers a run can be steered by, of the last snapshot: nan-free, empty before the first."""
        return headlines(self._latest) if self._latest is not None else {}

    @property
    def sites(self) -> tuple[Site, ...]:
        """What is listened to, in order of entry; empty before the first sampled step."""
        return tuple(self._plan.sites.values()) if self._plan is not None else ()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, JSON-able, so that a resumed run neither warms up nor fires again."""
        self._settle()
        return {"judge": self._judge.state_dict(), "schedule": self.schedule.state_dict(), "written": self._written}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; missing parts are left as they are."""
        if "judge" in state:
            self._judge.load_state_dict(state["judge"])
        if "schedule" in state:
            self.schedule.load_state_dict(state["schedule"])
        self._written = state.get("written", self._written)

    def close(self) -> None:
        """Settle what is pending and close the sinks. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._settle()
        finally:
            self._sinks.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def probe(model: nn.Module, *args: Any, **kwargs: Any) -> Snapshot:
    """One forward of the model on these arguments, in the mode it is in, and every reading that needs no gradient.

    The model is left as it was: random states, buffers and gradients do not change.

    Raises:
        ValueError: the model has neither blocks nor attention; the message says what was seen and how to name `sites`.
    """
    receiver = Window(DEFAULT_METRICS)
    observed = _watch(model, args, kwargs, receiver)
    assert observed.plan is not None
    problem = observed.plan.problem()
    if problem is not None:
        raise ValueError(problem)
    missing = {**observed.missing, **dict.fromkeys(_GRADIENT_READINGS, "probe runs no backward")}
    return receiver.launch(0, observed.sites, missing, source="probe").snapshot()


def find_sites(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Site, ...]:
    """Every block and attention execution of one forward on these arguments, in order of entry. The model is left as it was."""
    observed = _watch(model, args, kwargs, Window(()))
    return tuple(observed.plan.sites.values()) if observed.plan is not None else ()


def _watch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], receiver: Window) -> Observed:
    faults: list[tuple[str, BaseException]] = []
    with undisturbed(model):
        selection = Selection(model, None, None, "train")
        observed = Observed(model, None, Sampler(), receiver, lambda what, error: faults.append((what, error)), selection)
        with observed:
            model(*args, **kwargs)
    for what, error in faults:
        logger.warning("%s: %s: %s", what, type(error).__name__, error)
    return observed


_GRADIENT_READINGS = ("gradient_norm", "qk_to_v_gradient", "parameter_gradient_norm", "qk_to_v_weight_gradient")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
