"""All sinks as one: what one of them does wrong stays with it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from collapse_monitor.records import Alert, Snapshot

_log = logging.getLogger("collapse_monitor")


class Sink(Protocol):
    """Where snapshots and alerts go."""

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        """Take one snapshot and the alerts that are new with it."""

    def close(self) -> None:
        """Nothing comes after this."""


class Sinks:
    """Writes to every sink. One that raises is switched off, once, and listed in `faults`; the run and the other sinks go on.

    Raises:
        ValueError: something has no `write` or no `close`; the message says what a sink is.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        if not isinstance(sinks, Sequence):
            raise ValueError(f"sinks: expected a list, got {type(sinks).__name__}")
        for sink in sinks:
            if isinstance(sink, type):
                raise ValueError(f"sinks: {sink.__name__} is a class; give an instance, such as {sink.__name__}(...)")
            if not callable(getattr(sink, "write", None)) or not callable(getattr(sink, "close", None)):
                raise ValueError(f"sinks: a sink is an object with write(snapshot, alerts) and close(), got {_name(sink)}")
        self._open = list(sinks)
        self._off: list[Sink] = []
        self.faults: list[tuple[str, BaseException]] = []

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        """Hand a snapshot to every sink that still works. Whoever owns this reports `faults`."""
        for sink in list(self._open):
            try:
                sink.write(snapshot, alerts)
            except Exception as error:
                self.faults.append((_name(sink), error))
                self._open.remove(sink)
                self._off.append(sink)

    def close(self) -> None:
        """Close every sink, also those that were switched off. Idempotent."""
        sinks, broken = self._open, self._off
        self._open, self._off = [], []
        for sink in [*sinks, *broken]:
            try:
                sink.close()
            except Exception as error:
                # Nobody looks at `faults` any more. One that failed before has been reported already.
                self.faults.append((_name(sink), error))
                if sink in sinks:
                    _log.warning("closing %s: %s: %s", _name(sink), type(error).__name__, error)


def _name(sink: object) -> str:
    return type(sink).__name__
