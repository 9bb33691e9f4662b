"""The callback for Lightning, for `lightning` and for `pytorch_lightning`, whichever the Trainer comes from."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collapse_monitor.monitor import Monitor
from collapse_monitor.records import Severity
from collapse_monitor.report import ConsoleSink, LoggerSink

logger = logging.getLogger("collapse_monitor")


def _callback_classes() -> tuple[type, ...]:
    """The Callback class of every installed package: an instance of all of them is accepted by each Trainer and each CLI."""
    found: list[type] = []
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found.append(importlib.import_module(package).Callback)
        except ImportError:
            continue
    if not found:
        raise ImportError("CollapseCallback needs Lightning: pip install pytorch-lightning (or lightning)")
    return tuple(dict.fromkeys(found))


if TYPE_CHECKING:
    from pytorch_lightning import Callback as _Callback
else:
    _Callback = type("_Callback", _callback_classes(), {})


class CollapseCallback(_Callback):
    """Watches the training of a LightningModule and logs to every logger of the Trainer.

    The arguments are those of `Monitor`; lists of metrics and rules may also hold names, and sinks import paths, so that
    LightningCLI can build the callback from YAML.

    Args:
        every: optimiser steps between samples, or a function `step -> bool`.
        budget: share of training time the monitor may take; None: no limit.
        source: `auto`, `train` or `probe`.
        sites: names of modules to restrict the reading to.
        metrics: Metric records or names; None: all built-in ones.
        rules: rules or names; None: all built-in ones.
        sinks: sinks beside the Trainer's loggers and the console.
        mute: rules that stay silent, such as `oversmoothing` or `oversmoothing:0,3-5`.
        token_mask: keyword of the model call that marks real tokens, or a function of the call.
        max_sequences: how many sequences of a batch are read; None: all.
        max_tokens: how many tokens of a sequence are read; None: all.
        max_queries: how many query rows of an attention map are read; None: all.
        ranks: `local` or `all`.
        on_error: `warn` or `raise`.
        stop_on: severity (`info`, `warning`, `critical`) of an alert that ends training; all processes decide together.
        checkpoint_on: severity of an alert that saves a checkpoint.
        preflight: log the table of the first snapshot, which shows the model at initialisation.
    """

    def __init__(
        self,
        every: int | Callable[[int], bool] = 50,
        budget: float | None = 0.01,
        source: str = "auto",
        sites: list[Any] | None = None,
        metrics: list[Any] | None = None,
        rules: list[Any] | None = None,
        sinks: list[Any] | None = None,
        mute: list[Any] | None = None,
        token_mask: str | Callable[..., Any] | None = None,
        max_sequences: int | None = 4,
        max_tokens: int | None = 64,
        max_queries: int | None = 16,
        ranks: str = "local",
        on_error: str = "warn",
        stop_on: str | None = None,
        checkpoint_on: str | None = None,
        preflight: bool = False,
    ) -> None:
        super().__init__()
        self._every = every
        self._options: dict[str, Any] = {
            "every": every,
            "budget": budget,
            "source": source,
            "sites": sites,
            "mute": mute or (),
            "token_mask": token_mask,
            "max_sequences": max_sequences,
            "max_tokens": max_tokens,
            "max_queries": max_queries,
            "ranks": ranks,
            "on_error": on_error,
        }
        for name, chosen in (("metrics", metrics), ("rules", rules)):
            if chosen is not None:
                self._options[name] = chosen
        self._own_sinks = [_imported(sink) for sink in sinks or ()]
        self._stop_on, self._checkpoint_on = _severity("stop_on", stop_on), _severity("checkpoint_on", checkpoint_on)
        self._preflight = preflight
        self._monitor: Monitor | None = None
        self._window: AbstractContextManager[None] | None = None
        self._state: dict[str, Any] = {}
        self._stepped = 0
        self._step_due = False
        self._acted = 0

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of the running fit; None before."""
        return self._monitor

    @property
    def state_key(self) -> str:
        return "collapse_monitor.CollapseCallback"

    # -- the life of a fit

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        sinks = [LoggerSink(trainer.loggers), ConsoleSink(), *self._own_sinks]
        self._monitor = Monitor(pl_module, sinks=sinks, **self._options)
        self._monitor.load_state_dict(self._state.get("monitor", {}))
        self._stepped = int(self._state.get("stepped", trainer.global_step))
        self._acted = len(self._monitor.alerts)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._monitor is None:
            return
        self._close_window()
        self._step_due = not pl_module.automatic_optimization
        self._window = self._monitor.observe(self._stepped, _loss_scale(trainer))
        self._window.__enter__()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self._monitor is not None:
            self._monitor.end_forward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._step_due = True
        self._close_window()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._close_window()
        if self._monitor is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._monitor.log(self._stepped, train_loss=loss)
        self._log_headlines(pl_module)
        self._act(trainer)
        if self._step_due:
            self._stepped += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._close_window()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._close_window()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._monitor is not None and not trainer.sanity_checking and "val_loss" in trainer.callback_metrics:
            self._monitor.log(self._stepped, val_loss=trainer.callback_metrics["val_loss"])

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._finish(exception)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._finish()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._finish()

    def state_dict(self) -> dict[str, Any]:
        if self._monitor is None:
            return dict(self._state)
        return {"monitor": self._monitor.state_dict(), "stepped": self._stepped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = dict(state_dict)

    # -- translation

    def _close_window(self, error: BaseException | None = None) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.__exit__(None, None, None)

    def _finish(self, error: BaseException | None = None) -> None:
        self._close_window(error)
        if self._monitor is not None:
            self._monitor.close()

    def _log_headlines(self, pl_module: Any) -> None:
        """One to three numbers for EarlyStopping and ModelCheckpoint."""
        assert self._monitor is not None
        values = self._monitor.headlines()
        if self._preflight and values:
            self._preflight = False
            latest = self._monitor.latest
            if latest is not None:
                logger.info("at initialisation:\n%s", latest.table())
        for name, value in values.items():
            pl_module.log(f"collapse/{name}", value, on_step=True, on_epoch=False, logger=False, batch_size=1)

    def _act(self, trainer: Any) -> None:
        """Stop and checkpoint are decided by all processes together, at steps that are the same on all of them."""
        if self._stop_on is None and self._checkpoint_on is None:
            return
        interval = self._every if isinstance(self._every, int) else 50
        if self._stepped % interval:
            return
        assert self._monitor is not None
        firing = [alert.severity.rank for alert in self._monitor.alerts[self._acted :] if alert.state == "firing"]
        self._acted = len(self._monitor.alerts)
        worst = max(firing, default=-1)
        save = self._decide(trainer, self._checkpoint_on, worst)
        stop = self._decide(trainer, self._stop_on, worst)
        if save or stop:
            folder = Path(trainer.log_dir or trainer.default_root_dir)
            trainer.save_checkpoint(folder / f"collapse-step{self._stepped}.ckpt")
        if stop:
            logger.warning("training is stopped at step %d: an alert reached %s (stop_on)", self._stepped, self._stop_on)
            trainer.should_stop = True

    @staticmethod
    def _decide(trainer: Any, threshold: Severity | None, worst: int) -> bool:
        if threshold is None:
            return False
        return bool(trainer.strategy.reduce_boolean_decision(worst >= threshold.rank, all=False))


def _loss_scale(trainer: Any) -> float:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def _severity(name: str, value: str | None) -> Severity | None:
    if value is None:
        return None
    try:
        return Severity(value)
    except ValueError:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(repr(str(s)) for s in Severity)} and None") from None


def _imported(sink: Any) -> Any:
    """A sink given as the import path of a class or function without required arguments."""
    if not isinstance(sink, str):
        return sink
    module, _, name = sink.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"sinks: {sink!r} is not the import path of a sink (package.module.name): {error}") from error
