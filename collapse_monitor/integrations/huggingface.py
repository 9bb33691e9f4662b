"""The callback for `transformers.Trainer`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from torch import nn

from collapse_monitor.integrations.guard import harmless
from collapse_monitor.integrations.named import resolve_sinks
from collapse_monitor.integrations.steering import Processes, Steering
from collapse_monitor.measure import any_process
from collapse_monitor.monitor import Monitor
from collapse_monitor.report import ConsoleSink, TensorBoardSink
from collapse_monitor.tables import text_table

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("CollapseCallback for Hugging Face needs transformers: pip install 'collapse-monitor[hf]'") from error

logger = logging.getLogger("collapse_monitor")

STATE_FILE = "collapse_monitor.json"
"""The monitor's state in each of the Trainer's checkpoint folders."""


class CollapseCallback(TrainerCallback):
    """Watches the training of a `transformers.Trainer`.

    Readings lie on the x axis of the Trainer's own logs, one point per sampled optimiser step, of its first micro batch. Gradients of
    parameters are read as the optimiser gets them, that is after clipping. During evaluation `eval_collapse/min_rank`,
    `eval_collapse/max_similarity` and `eval_collapse/max_logit` join the metrics, for `metric_for_best_model`. The Trainer tells no
    callback of an exception: what a forward that raised has left is taken away at the next `train`, or by `close`.

    Args:
        logging_dir: folder for TensorBoard files of the monitor's own; `auto`: beside the Trainer's. None: no such files.
        every: optimiser steps between samples, or a function `step -> bool`.
        sinks: sinks beside TensorBoard and the console.
        stop_on: severity (`info`, `warning`, `critical`) of an alert that ends training; all processes decide together.
        checkpoint_on: severity of an alert that saves a checkpoint.
        preflight: print the table of the first snapshot, which shows the model at initialisation.
        budget, source, sites, metrics, rules, mute, token_mask, max_sequences, max_tokens, max_queries, ranks, on_error: as of `Monitor`.

    Raises:
        ValueError: an argument is not allowed; the message says what is.
    """

    def __init__(
        self,
        *,
        logging_dir: str | os.PathLike[str] | None = "auto",
        every: int | Callable[[int], bool] = 50,
        sinks: list[Any] | None = None,
        stop_on: Literal["info", "warning", "critical"] | None = None,
        checkpoint_on: Literal["info", "warning", "critical"] | None = None,
        preflight: bool = False,
        **options: Any,
    ) -> None:
        self._options = {"every": every, **options}
        self._own_sinks = resolve_sinks(sinks or ())
        checked = {name: value for name, value in self._options.items() if name != "sites"}
        Monitor(nn.Identity(), sinks=self._own_sinks, **checked)  # every mistake shows here
        self._steering = Steering(stop_on, checkpoint_on, every, self._options.get("ranks") == "all")
        self._logging_dir, self._preflight = logging_dir, preflight
        self._monitor: Monitor | None = None
        self._window: AbstractContextManager[None] | None = None
        self._said: set[str] = set()
        self._step = 0
        self._sampled = False

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of the running or last training; None before."""
        return self._monitor

    @property
    def strict(self) -> bool:
        """Whether faults of the monitor are raised."""
        return self._options.get("on_error") == "raise"

    def close(self) -> None:
        """Take away what a training that raised has left, and close the sinks."""
        self._close_window()
        if self._monitor is not None:
            self._monitor.close()

    # -- events of the Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.close()
        sinks = [ConsoleSink(), *self._tensorboard(args, state), *self._own_sinks]
        self._monitor = Monitor(model, sinks=sinks, **self._options)
        if state.global_step > 0:
            self._restore(args, state)
        self._steering.begin(self._monitor)
        self._preflight_due = self._preflight and state.global_step == 0

    @harmless
    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._close_window()
        if self._monitor is None:
            return
        self._step = state.global_step + 1  # what the Trainer's logs call this step once it is done
        window = self._monitor.observe(self._step, lambda: _loss_scale(args, optimizer))
        window.__enter__()
        self._sampled = self._monitor.observing
        self._window = window if self._sampled else None

    @harmless
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self._window is not None and self._monitor is not None and _is_unscaled(optimizer):
            self._monitor.unscaled(_parameters(optimizer), 1.0 / args.gradient_accumulation_steps)
        self._close_window()

    @harmless
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close_window()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close_window()
        if self._monitor is None:
            return
        processes = Processes(args.process_index, args.world_size, any_process)
        decision = self._steering.decide(self._monitor, self._step, processes, first=True, sampled=self._sampled)
        self._show_first(state)
        control.should_save = control.should_save or decision.save
        if decision.stop and not control.should_training_stop:
            control.should_training_stop = True
            if state.is_world_process_zero:
                logger.warning("training is stopped at step %d: an alert reached %s (stop_on)", self._step, self._steering.stop_on)

    @harmless
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close_window()

    @harmless
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._monitor is not None and "loss" in (logs or {}):
            self._monitor.log(state.global_step, train_loss=(logs or {})["loss"])

    @harmless
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._close_window()
        if self._monitor is None or metrics is None or state.global_step == 0:
            return
        if "eval_loss" in metrics:
            self._monitor.log(state.global_step, val_loss=metrics["eval_loss"])
        if self._monitor.latest is not None:
            metrics.update({f"eval_collapse/{name}": value for name, value in self._monitor.headlines().items()})

    @harmless
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = _checkpoint(args, state)
        if self._monitor is not None and state.is_world_process_zero and folder.is_dir():
            (folder / STATE_FILE).write_text(json.dumps(self._monitor.state_dict()))

    @harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close_window()
        if self._monitor is not None:
            self._monitor.settle()
            self._monitor.close()

    # -- translation

    def _tensorboard(self, args: Any, state: Any) -> list[TensorBoardSink]:
        if self._logging_dir is None or not state.is_world_process_zero:
            return []
        if self._logging_dir != "auto":
            return [TensorBoardSink(self._logging_dir)]
        base = getattr(args, "logging_dir", None) or os.environ.get("TENSORBOARD_LOGGING_DIR") or os.path.join(args.output_dir, "runs")
        return [TensorBoardSink(os.path.join(base, "collapse_monitor"))]

    @harmless
    def _restore(self, args: Any, state: Any) -> None:
        """A checkpoint without our file is resumed like a new run."""
        folders = [Path(folder) for folder in (args.resume_from_checkpoint, _checkpoint(args, state)) if isinstance(folder, str | Path)]
        found = next((folder / STATE_FILE for folder in folders if (folder / STATE_FILE).is_file()), None)
        if found is not None and self._monitor is not None:
            self._monitor.load_state_dict(json.loads(found.read_text()))

    @harmless
    def _show_first(self, state: Any) -> None:
        if self._preflight_due and self._sampled and self._monitor is not None:
            self._preflight_due = False
            self._monitor.settle()
            latest = self._monitor.latest
            if latest is not None and state.is_world_process_zero:
                logger.warning("at initialisation:\n%s", text_table(latest))

    @harmless
    def _close_window(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.__exit__(None, None, None)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _scaler(optimizer: Any) -> Any:
    """Accelerate's optimiser knows the GradScaler of mixed precision."""
    return getattr(optimizer, "scaler", None)


def _loss_scale(args: Any, optimizer: Any) -> float:
    """The Trainer spreads the loss over the micro batches, by their number or by their tokens."""
    scaler = _scaler(optimizer)
    return float(scaler.get_scale() if scaler is not None else 1.0) / args.gradient_accumulation_steps


def _is_unscaled(optimizer: Any) -> bool:
    """Whether clipping has taken the loss scale off already."""
    scaler = _scaler(optimizer)
    if scaler is None:
        return False
    stages = getattr(scaler, "_per_optimizer_states", {})
    stage = stages.get(id(getattr(optimizer, "optimizer", optimizer)), {}).get("stage")
    return getattr(stage, "name", "") == "UNSCALED"


def _parameters(optimizer: Any) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
