"""The snapshots of a run, in order: what a window sent off becomes a snapshot when it has arrived, is judged and written down."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from collapse_monitor.judge import Judge
from collapse_monitor.measure import Exchange, Pending, apart, read_scalars
from collapse_monitor.records import Alert, Finding, Snapshot
from collapse_monitor.report import Sinks, headlines
from collapse_monitor.schedule import Schedule

logger = logging.getLogger("collapse_monitor")


class Ledger:
    """Keeps what is pending, the latest snapshot, the verdict on it, and who is told.

    With `across_ranks` the processes of a run exchange their readings when `settle` is called: at the same points everywhere, and
    nowhere else. Looking at `latest` or `alerts`, saving and closing never wait for another process.

    Args:
        judge: says what is wrong.
        sinks: where snapshots and alerts go; only the first process writes.
        schedule: told how often the processes together want to sample.
        across_ranks: average over processes.
        strict: raise faults instead of warning.
    """

    def __init__(self, judge: Judge, sinks: Sinks, schedule: Schedule, across_ranks: bool, strict: bool) -> None:
        self._judge, self._sinks, self._schedule, self._strict = judge, sinks, schedule, strict
        self._exchange = Exchange() if across_ranks else None
        self._due = False
        self._pending: Pending | None = None
        self._context: dict[str, Any] = {}
        self._latest: Snapshot | None = None
        self._written: int | None = None
        self._said: set[str] = set()
        self.settled = 0

    def expect(self) -> None:
        """A window opens, in every process that shares this schedule."""
        self._due = self._exchange is not None and self._exchange.active

    def enter(self, pending: Pending) -> None:
        """A window has closed and sent this off."""
        self._pending = pending

    def log(self, context: Mapping[str, float | Tensor]) -> None:
        """Numbers for the next snapshot; tensors are fetched with it."""
        self._context.update({name: value.detach() if isinstance(value, Tensor) else value for name, value in context.items()})

    @property
    def ripe(self) -> bool:
        """Whether `settle` has something to do and need not wait for the device."""
        return self._due or (self._pending is not None and self._pending.ready())

    def settle(self, alone: bool = False) -> None:
        """Turn what is pending into a snapshot, judge it and write it down; exchange it first if that is due, unless `alone`."""
        pending, self._pending = self._pending, None
        due, self._due = self._due, False
        faults: list[BaseException] = []
        snapshot = None
        try:
            if pending is not None:
                snapshot = pending.snapshot().with_context(read_scalars(self._context))
                self._context = {}
        except Exception as error:
            self._fault("settling a step", error, faults)
        if due and alone:
            snapshot = apart(snapshot)
        elif due and self._exchange is not None:
            # Also where the above has failed: the others are waiting.
            snapshot, interval = self._exchange.average(snapshot, self._schedule.interval)
            self._schedule.agree(interval)
        if snapshot is not None:
            try:
                self._record(snapshot)
            except Exception as error:
                self._fault(f"recording step {snapshot.step}", error, faults)
            self._report_switched_off(faults)
        if faults and self._strict:
            raise faults[0]

    def settle_own(self) -> None:
        """The same, unless other processes would have to take part."""
        if not self._due:
            self.settle()

    def _record(self, snapshot: Snapshot) -> None:
        self._latest = snapshot
        self.settled += 1
        if self._written is not None and snapshot.step <= self._written:
            self.say(f"step {snapshot.step} is not above the last written step {self._written}: measured, not written", kind="order")
            return
        self._written = snapshot.step
        alerts = self._judge.check(snapshot)
        outlook = tuple(forecast.sentence for forecast in self._judge.outlook)
        if outlook:
            self._latest = snapshot = replace(snapshot, notes=(*snapshot.notes, *outlook))
        if not torch.distributed.is_available() or not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            self._sinks.write(snapshot, alerts)

    def _report_switched_off(self, faults: list[BaseException]) -> None:
        for what, error in (*self._judge.faults, *self._sinks.faults):
            self.say(f"{what} was switched off: {type(error).__name__}: {error}")
            faults.append(error)
        self._judge.faults.clear()
        self._sinks.faults.clear()

    def _fault(self, what: str, error: BaseException, faults: list[BaseException]) -> None:
        self.say(f"{what}: {type(error).__name__}: {error}")
        faults.append(error)

    def say(self, sentence: str, kind: str | None = None) -> None:
        """One warning for each kind of trouble, however often it comes."""
        if (kind or sentence) not in self._said:
            self._said.add(kind or sentence)
            logger.warning(sentence)

    # -- what is known

    @property
    def latest(self) -> Snapshot | None:
        self.settle_own()
        return self._latest

    @property
    def alerts(self) -> list[Alert]:
        self.settle_own()
        return list(self._judge.alerts)

    @property
    def findings(self) -> list[Finding]:
        self.settle_own()
        return list(self._judge.findings)

    def headlines(self) -> dict[str, float]:
        """Of the last snapshot that has been settled; nothing is waited for."""
        return headlines(self._latest) if self._latest is not None else {}

    def state_dict(self) -> dict[str, Any]:
        self.settle_own()
        return {"judge": self._judge.state_dict(), "schedule": self._schedule.state_dict(), "written": self._written}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "judge" in state:
            self._judge.load_state_dict(state["judge"])
        if "schedule" in state:
            self._schedule.load_state_dict(state["schedule"])
        self._written = state.get("written", self._written)

    def close(self) -> None:
        """Settle what is pending with the readings of this process, and close the sinks."""
        try:
            self.settle(alone=True)
        finally:
            self._sinks.close()
