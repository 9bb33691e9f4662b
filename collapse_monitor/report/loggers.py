"""Aggregates for experiment loggers: W&B, MLflow, CSV, and TensorBoard through Lightning's logger."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from collapse_monitor.records import Alert, Snapshot
from collapse_monitor.report.dense import DenseEvents
from collapse_monitor.report.summary import finite, summarise
from collapse_monitor.report.tensorboard import is_summary_writer

_log = logging.getLogger("collapse_monitor")

_TENSORBOARD_LOGGERS = ("lightning.fabric.loggers.tensorboard", "lightning_fabric.loggers.tensorboard")


class LoggerSink:
    """Calls `logger.log_metrics(values, step=step)` once per snapshot on every logger, with finite Python floats.

    Lightning's TensorBoardLogger gets the full tensors and the alerts instead, through its writer. A logger that raises is left out from
    then on, with one warning; the others go on.

    Args:
        loggers: objects with `log_metrics`, as in `trainer.loggers`. Others raise.

    Raises:
        ValueError: an object has no `log_metrics`.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        for logger in loggers:
            if not callable(getattr(logger, "log_metrics", None)):
                raise ValueError(f"LoggerSink: a logger has log_metrics(values, step=...), {type(logger).__name__} has not")
        self._loggers = list(loggers)
        self._dense: dict[int, DenseEvents] = {}
        self.faults: list[tuple[str, BaseException]] = []

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        values: dict[str, float] | None = None
        for logger in list(self._loggers):
            try:
                dense = self._dense_events(logger)
                if dense is not None:
                    dense.write(snapshot, alerts)
                    continue
                values = finite(summarise(snapshot)) if values is None else values
                if values:
                    logger.log_metrics(dict(values), step=snapshot.step)
            except Exception as error:
                self._loggers.remove(logger)
                self.faults.append((type(logger).__name__, error))
                _log.warning("%s gets no more readings: %s: %s", type(logger).__name__, type(error).__name__, error)

    def close(self) -> None:
        """The loggers belong to others and stay open."""
        for dense in self._dense.values():
            dense.close()
        self._dense.clear()

    def _dense_events(self, logger: Any) -> DenseEvents | None:
        """The way into a TensorBoardLogger. No other logger is asked for its `experiment`: that may start one."""
        classes = tuple(module.TensorBoardLogger for name in _TENSORBOARD_LOGGERS if (module := sys.modules.get(name)) is not None)
        if not isinstance(logger, classes):
            return None
        if id(logger) not in self._dense and is_summary_writer(writer := logger.experiment):
            self._dense[id(logger)] = DenseEvents(writer)
        return self._dense.get(id(logger))
