"""The callback for Lightning, for `lightning` and for `pytorch_lightning`, whichever the Trainer comes from."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from collapse_monitor.integrations.guard import harmless, say_once
from collapse_monitor.integrations.named import resolve_sinks
from collapse_monitor.integrations.packages import callback_classes
from collapse_monitor.integrations.rerun import repeatable, uncompiled_step
from collapse_monitor.integrations.steering import Processes, Steering
from collapse_monitor.integrations.trainer import (
    TRAIN_LOSS,
    VAL_LOSS,
    logged_step,
    loss_in,
    loss_scale,
    normalisation,
    postponed,
    scaler_of,
)
from collapse_monitor.judge import preflight as describe_start
from collapse_monitor.monitor import Monitor
from collapse_monitor.report import HEADLINES, ConsoleSink, LoggerSink

logger = logging.getLogger("collapse_monitor")


if TYPE_CHECKING:
    from pytorch_lightning import Callback as _Callback
else:
    _Callback = type("_Callback", callback_classes(), {})


class _NotTrained(Exception):
    """Closes a window in which no training step ran."""


class CollapseCallback(_Callback):
    """Watches the training of a LightningModule and logs to every logger of the Trainer.

    The arguments are those of `Monitor`, so that LightningCLI can build the callback from YAML: metrics and rules may be names, sinks
    import paths or `class_path` with `init_args`. Readings are logged on the x axis of `self.log`, one point per sampled optimiser step,
    of its first micro batch. `collapse/min_rank`, `collapse/max_similarity` and `collapse/max_logit` can be the `monitor` of EarlyStopping
    and ModelCheckpoint.

    Args:
        every: optimiser steps between samples, or a function `step -> bool`.
        budget: share of training time the monitor may take; None: no limit.
        source: `auto`, `train` or `probe`.
        sites: names of modules to restrict the reading to.
        metrics: Metric records or names; None: all built-in ones.
        rules: rules or names; None: all built-in ones.
        sinks: sinks beside the Trainer's loggers and the console. With `fast_dev_run` nothing is written.
        mute: rules that stay silent, such as `oversmoothing` or `oversmoothing:0,3-5`.
        token_mask: keyword of the model call that marks real tokens, or a function of the call.
        max_sequences: how many sequences of a batch are read; None: all.
        max_tokens: how many tokens of a sequence are read; None: all.
        max_queries: how many query rows of an attention map are read; None: all.
        ranks: `local` or `all`.
        on_error: `warn` or `raise`.
        stop_on: severity (`info`, `warning`, `critical`) of an alert that ends training; all processes decide together.
        checkpoint_on: severity of an alert that saves a checkpoint.
        preflight: print the table of the first snapshot, which shows the model at initialisation, and the diagnosis of it.

    Raises:
        ValueError: an argument is not allowed; the message says what is.
    """

    def __init__(
        self,
        every: int | Callable[[int], bool] = 50,
        budget: float | None = 0.01,
        source: Literal["auto", "train", "probe"] = "auto",
        sites: list[Any] | None = None,
        metrics: list[Any] | None = None,
        rules: list[Any] | None = None,
        sinks: list[Any] | None = None,
        mute: list[Any] | None = None,
        token_mask: str | Callable[..., Any] | None = None,
        max_sequences: int | None = 4,
        max_tokens: int | None = 64,
        max_queries: int | None = 16,
        ranks: Literal["local", "all"] = "local",
        on_error: Literal["warn", "raise"] = "warn",
        stop_on: Literal["info", "warning", "critical"] | None = None,
        checkpoint_on: Literal["info", "warning", "critical"] | None = None,
        preflight: bool = False,
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = {
            "every": every,
            "budget": budget,
            "source": source,
            "mute": mute or (),
            "token_mask": token_mask,
            "max_sequences": max_sequences,
            "max_tokens": max_tokens,
            "max_queries": max_queries,
            "ranks": ranks,
            "on_error": on_error,
            **{name: chosen for name, chosen in (("metrics", metrics), ("rules", rules)) if chosen is not None},
        }
        self._own_sinks = resolve_sinks(sinks or ())
        Monitor(nn.Identity(), sinks=self._own_sinks, **self._options)  # every mistake shows here, not after hours of loading
        self._options["sites"] = sites
        self._steering = Steering(stop_on, checkpoint_on, every, ranks == "all")
        self._preflight = preflight
        self._monitor: Monitor | None = None
        self._window: AbstractContextManager[None] | None = None
        self._restored: dict[str, Any] | None = None
        self._carried: dict[str, Any] = {}
        self._said: set[str] = set()
        self._begin({})

    def _begin(self, state: Mapping[str, Any]) -> None:
        """Forget what belongs to an earlier fit."""
        self._step: int | None = None
        self._fresh = self._sampled = self._first_is_read = False
        self._headlines = dict(state.get("headlines", {}))
        self._untold = bool(self._headlines)
        self._settled = 0
        self._steering.begin(self._monitor)

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of the running or last fit; None before."""
        return self._monitor

    @property
    def strict(self) -> bool:
        """Whether faults of the monitor are raised."""
        return bool(self._options["on_error"] == "raise")

    @property
    def state_key(self) -> str:
        return "collapse_monitor.CollapseCallback"

    # -- the life of a fit

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._carried = self.state_dict()
        sinks = [] if trainer.fast_dev_run else [LoggerSink(trainer.loggers), *self._own_sinks]
        self._monitor = Monitor(pl_module, sinks=[ConsoleSink(), *sinks], **self._options)

    @harmless
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Some strategies restore callbacks after `on_fit_start`; here all have."""
        restored, self._restored = self._restored, None
        state = restored if restored is not None else self._carried if trainer.global_step > 0 else {}
        self._preflight_due = self._preflight and not state
        try:
            if self._monitor is not None:
                self._monitor.load_state_dict(state.get("monitor", {}))
        finally:
            self._begin(state)

    @harmless
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._close_window()
        step = logged_step(trainer)
        self._fresh, self._sampled = step != self._step, False
        if self._monitor is None or not self._fresh:
            return  # a later micro batch of the same optimiser step
        self._step = step
        rerun = repeatable(trainer, pl_module, batch, batch_idx)
        if rerun is None and uncompiled_step(pl_module) is not None:
            say_once(
                self._said,
                "training_step is compiled and optimises by hand: it cannot be read. Compile the network in place of the LightningModule",
            )
            return
        scale = functools.partial(loss_scale, trainer, pl_module)
        window = self._monitor.observe(step, scale, redirected=trainer.model is not pl_module, rerun=rerun)
        window.__enter__()
        if self._monitor.observing:
            self._window, self._sampled = window, True

    @harmless
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self._window is not None and self._monitor is not None:
            self._monitor.end_forward()

    @harmless
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._window is None or self._monitor is None:
            return
        # The precision plugin has just unscaled this optimiser's gradients, unless the optimiser does so itself (fused ones).
        if scaler_of(trainer) is not None and not getattr(optimizer, "_step_supports_amp_scaling", False):
            left = normalisation(trainer, pl_module)
            self._monitor.unscaled((p for group in optimizer.param_groups for p in group["params"]), left)
        self._close_window()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._close_window()
        if self._monitor is None:
            return
        if self._sampled:
            self._note_loss(trainer, pl_module, outputs)
        self._steer(trainer)
        self._tell(trainer, pl_module)
        self._fresh = self._sampled = False

    @harmless
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._close_window(_NotTrained())

    @harmless
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._close_window()

    @harmless
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._monitor is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            loss = loss_in(trainer.callback_metrics, VAL_LOSS)  # computed already, and on all processes alike
            if loss is not None:
                self._monitor.log(self._step or 0, val_loss=loss)

    @harmless
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close_window()
        if self._monitor is not None:
            self._monitor.settle()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._restored = None
        try:
            self._close_window(exception)
            if self._monitor is not None:
                self._monitor.close()
        except Exception as error:  # the user's own exception is the one to be seen
            say_once(self._said, f"closing after {type(exception).__name__}: {type(error).__name__}: {error}")

    @harmless
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._finish()

    @harmless
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._restored = None  # what `validate` or `test` has loaded is no state to train from
        self._finish()

    def state_dict(self) -> dict[str, Any]:
        if self._monitor is None:
            return dict(self._restored or {})
        return self._collect_state() or {}

    @harmless
    def _collect_state(self) -> dict[str, Any]:
        assert self._monitor is not None
        return {"monitor": self._monitor.state_dict(), "headlines": dict(self._headlines)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also one in another process, starts where this one is, with a monitor and windows of its own."""
        own = {
            name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")
        }  # Lightning binds the model to these
        return {**own, "_restored": self.state_dict() or None, "_monitor": None, "_window": None}

    # -- translation

    @harmless
    def _close_window(self, reason: BaseException | None = None) -> None:
        window, self._window = self._window, None
        if window is not None:
            self._step = None if isinstance(reason, _NotTrained) else self._step  # then the next batch is offered again
            window.__exit__(type(reason) if reason is not None else None, reason, None)

    def _finish(self) -> None:
        self._close_window()
        if self._monitor is not None:
            self._monitor.close()

    @harmless
    def _note_loss(self, trainer: Any, pl_module: Any, outputs: Any) -> None:
        """The loss of this micro batch as the user computed it. It stays on its device."""
        assert self._monitor is not None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            share = normalisation(trainer, pl_module)
            loss = loss.detach() if share == 1 else loss.detach() / share
        else:
            loss = loss_in(trainer.callback_metrics, TRAIN_LOSS)
        if loss is not None:
            self._monitor.log(self._step or 0, train_loss=loss)

    @harmless
    def _tell(self, trainer: Any, pl_module: Any) -> None:
        """One to three numbers for EarlyStopping and ModelCheckpoint, when there are new ones."""
        assert self._monitor is not None
        first, self._first_is_read = self._sampled and not self._first_is_read, self._first_is_read or self._sampled
        if first:
            self._monitor.settle()  # an epoch may end here, and whoever monitors a number expects it to exist
        if self._monitor.settled != self._settled:
            self._settled = self._monitor.settled
            self._headlines.update(self._monitor.headlines())
            self._untold = True
            if self._preflight_due and (latest := self._monitor.latest) is not None:
                self._preflight_due = False
                trainer.print(f"at initialisation:\n{latest.table()}\n{describe_start(latest)}")
        if (self._untold or first) and not trainer.barebones:
            self._untold = False
            # Processes must have the same names, or those that monitor one of them wait for each other in vain.
            names = HEADLINES if trainer.world_size > 1 else tuple(self._headlines)
            for name in names:
                value = self._headlines.get(name, math.nan)
                pl_module.log(f"collapse/{name}", value, on_step=True, on_epoch=False, logger=False, batch_size=1)

    def _steer(self, trainer: Any) -> None:
        """Stop or save, if all processes have decided so. Not guarded: half a checkpoint must not pass unnoticed."""
        if self._monitor is None or self._step is None:
            return
        processes = Processes(
            trainer.global_rank, trainer.world_size, functools.partial(trainer.strategy.reduce_boolean_decision, all=False)
        )
        decision = self._steering.decide(self._monitor, self._step, processes, first=self._fresh, sampled=self._sampled)
        if decision.save and not trainer.fast_dev_run:
            trainer.save_checkpoint(os.path.join(trainer.log_dir or trainer.default_root_dir, f"collapse-step{self._step}.ckpt"))
        if decision.stop and not trainer.should_stop:
            trainer.should_stop = True
            if trainer.is_global_zero:
                reason = f"an alert reached {self._steering.stop_on} (stop_on){postponed(trainer)}"
                logger.warning("training is stopped at step %d: %s", self._step, reason)
