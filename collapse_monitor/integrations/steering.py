"""Alerts that stop a run or save it: decided by all processes together, at steps that are the same on all of them."""

from __future__ import annotations

import logging
import os
from typing import Any

from collapse_monitor.monitor import Monitor
from collapse_monitor.records import Alert, Severity

logger = logging.getLogger("collapse_monitor")

DECIDE_EVERY = 50
"""Steps between decisions of several processes when the user's own function chooses the samples."""


class Steering:
    """Stops a Lightning Trainer, or saves a checkpoint, when an alert is severe enough.

    Args:
        stop_on: severity from which training ends; None: never.
        checkpoint_on: severity from which a checkpoint is saved; None: only before a stop.

    Raises:
        ValueError: no such severity.
    """

    def __init__(self, stop_on: str | None, checkpoint_on: str | None) -> None:
        self._stop_on, self._checkpoint_on = _severity("stop_on", stop_on), _severity("checkpoint_on", checkpoint_on)
        self.begin(None)

    def begin(self, monitor: Monitor | None) -> None:
        """A new fit; what has been alerted before is not acted on again."""
        self._judged = max((alert.step for alert in monitor.alerts), default=-1) if monitor is not None else -1
        self._decided: int | None = None

    def act(self, trainer: Any, monitor: Monitor, step: int, every: object, *, fresh: bool, sampled: bool, exchanged: bool) -> None:
        """Decide, where this is a step to decide at. Every process must call this at every step.

        Args:
            trainer: to be stopped.
            monitor: whose alerts count.
            step: the current optimiser step.
            every: what the user asked for.
            fresh: whether this is the first batch of the optimiser step.
            sampled: whether this process has read this step.
            exchanged: whether all processes sample the same steps.
        """
        if self._stop_on is None and self._checkpoint_on is None:
            return
        alone = trainer.world_size == 1
        if not (sampled if alone or exchanged else fresh and self._is_turn(step, every)):
            return
        alert = self._worst(monitor)
        worst = alert.severity.rank if alert is not None else -1
        save = self._together(trainer, self._checkpoint_on, worst)
        stop = self._together(trainer, self._stop_on, worst)
        if (save or stop) and alert is not None and not trainer.is_global_zero and not exchanged:
            logger.warning("process %d, step %d: %s", trainer.global_rank, alert.step, alert.message)  # the first one cannot know of it
        if (save or stop) and not trainer.fast_dev_run:
            trainer.save_checkpoint(os.path.join(trainer.log_dir or trainer.default_root_dir, f"collapse-step{step}.ckpt"))
        if stop and not trainer.should_stop:
            trainer.should_stop = True
            if trainer.is_global_zero:
                logger.warning("training is stopped at step %d: an alert reached %s (stop_on)%s", step, self._stop_on, _postponed(trainer))

    def _is_turn(self, step: int, every: object) -> bool:
        """Processes that sample by themselves cannot know when another has: they meet at steps counted alike."""
        turn = step // (every if isinstance(every, int) else DECIDE_EVERY)
        before, self._decided = self._decided, turn
        return turn != before

    def _worst(self, monitor: Monitor) -> Alert | None:
        """The most urgent alert since the last decision. Raises nothing: the other processes are waiting."""
        try:
            monitor.settle()
            new = [alert for alert in monitor.alerts if alert.step > self._judged]
        except Exception as error:
            logger.warning("alerts cannot be read: %s: %s", type(error).__name__, error)
            return None
        self._judged = max((alert.step for alert in new), default=self._judged)
        return max((alert for alert in new if alert.state == "firing"), key=lambda alert: alert.severity.rank, default=None)

    @staticmethod
    def _together(trainer: Any, threshold: Severity | None, worst: int) -> bool:
        return threshold is not None and bool(trainer.strategy.reduce_boolean_decision(worst >= threshold.rank, all=False))


def _postponed(trainer: Any) -> str:
    steps, epochs = trainer.min_steps or 0, trainer.min_epochs or 0
    if trainer.global_step < steps or trainer.current_epoch + 1 < epochs:
        return f"; Lightning goes on until min_steps={trainer.min_steps} and min_epochs={trainer.min_epochs} are reached"
    return ""


def _severity(name: str, value: str | None) -> Severity | None:
    if value is None:
        return None
    try:
        return Severity(value)
    except ValueError:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(repr(str(s)) for s in Severity)} and None") from None
