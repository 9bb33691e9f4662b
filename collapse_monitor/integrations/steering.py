"""Alerts that stop a run or save it: decided by all processes together, at steps that are the same on all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from collapse_monitor.monitor import Monitor
from collapse_monitor.records import Alert, Severity

logger = logging.getLogger("collapse_monitor")

DECIDE_EVERY = 50
"""Steps between decisions of several processes when the user's own function chooses the samples."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a run: this one's number, how many there are, and a way to ask whether anyone says yes."""

    rank: int
    number: int
    anyone: Callable[[bool], bool]


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done now, in all processes alike."""

    save: bool = False
    stop: bool = False


class Steering:
    """Decides whether an alert is severe enough to stop a run, or to save a checkpoint.

    Args:
        stop_on: severity from which training ends; None: never.
        checkpoint_on: severity from which a checkpoint is saved; None: only before a stop.
        every: what the user asked for, a number of steps or a function.
        exchanged: whether all processes sample the same steps.

    Raises:
        ValueError: no such severity.
    """

    def __init__(self, stop_on: str | None, checkpoint_on: str | None, every: object, exchanged: bool) -> None:
        self.stop_on, self._checkpoint_on = _severity("stop_on", stop_on), _severity("checkpoint_on", checkpoint_on)
        self._every = every if isinstance(every, int) else DECIDE_EVERY
        self._exchanged = exchanged
        self.begin(None)

    def begin(self, monitor: Monitor | None) -> None:
        """A new fit; what has been alerted before is not acted on again."""
        self._judged = max((alert.step for alert in monitor.alerts), default=-1) if monitor is not None else -1
        self._turn: int | None = None

    def decide(self, monitor: Monitor, step: int, processes: Processes, *, first: bool, sampled: bool) -> Decision:
        """Decide, where this is a step to decide at. Every process must call this at every step.

        Args:
            monitor: whose alerts count.
            step: the current optimiser step.
            processes: who decides.
            first: whether this is the first batch of the optimiser step.
            sampled: whether this process has read this step.
        """
        if self.stop_on is None and self._checkpoint_on is None:
            return Decision()
        alone = processes.number == 1
        if not (sampled if alone or self._exchanged else first and self._is_turn(step)):
            return Decision()
        alert = self._worst(monitor)
        save, stop = (self._reached(alert, threshold, processes) for threshold in (self._checkpoint_on, self.stop_on))
        if (save or stop) and alert is not None and processes.rank > 0 and not self._exchanged:
            logger.warning("process %d, step %d: %s", processes.rank, alert.step, alert.message)  # the first one cannot know of it
        return Decision(save or stop, stop)

    def _is_turn(self, step: int) -> bool:
        """Processes that sample by themselves cannot know when another has: they meet at steps counted alike."""
        before, self._turn = self._turn, step // self._every
        return self._turn != before

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
    def _reached(alert: Alert | None, threshold: Severity | None, processes: Processes) -> bool:
        if threshold is None:
            return False
        reached = alert is not None and alert.severity.rank >= threshold.rank
        return processes.anyone(reached) if processes.number > 1 else reached


def _severity(name: str, value: str | None) -> Severity | None:
    if value is None:
        return None
    try:
        return Severity(value)
    except ValueError:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(repr(str(s)) for s in Severity)} and None") from None
