"""Where snapshots and alerts go, and how they come back. Importing this loads neither tensorboard nor torch."""

from __future__ import annotations

from collapse_monitor.report.console import ConsoleSink
from collapse_monitor.report.fanout import Sink, Sinks
from collapse_monitor.report.jsonl import JSONLSink
from collapse_monitor.report.loggers import LoggerSink
from collapse_monitor.report.reader import Run, read
from collapse_monitor.report.summary import HEADLINES, headlines, summarise
from collapse_monitor.report.tensorboard import TensorBoardSink
from collapse_monitor.report.webhook import WebhookSink

__all__ = [
    "HEADLINES",
    "ConsoleSink",
    "JSONLSink",
    "LoggerSink",
    "Run",
    "Sink",
    "Sinks",
    "TensorBoardSink",
    "WebhookSink",
    "headlines",
    "read",
    "summarise",
]
