"""Alerts as lines of the program's own log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from collapse_monitor.records import Alert, Severity, Snapshot

LEVELS = {Severity.INFO: logging.INFO, Severity.WARNING: logging.WARNING, Severity.CRITICAL: logging.CRITICAL}


class ConsoleSink:
    """Logs each alert with the level of its severity, to the logger `collapse_monitor` unless another is given.

    No handler is installed: without any configuration Python prints warnings and worse to stderr; how more is shown is up to the program.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("collapse_monitor")

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            self._logger.log(LEVELS[alert.severity], "step %d: %s", alert.step, alert.message)

    def close(self) -> None:
        """Nothing is held."""
