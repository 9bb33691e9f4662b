"""Snapshots and alerts in TensorBoard, beside the user's own curves."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from collapse_monitor.records import Alert, Snapshot
from collapse_monitor.report import naming
from collapse_monitor.report.dense import HEADS_EVERY, DenseEvents, alert_texts
from collapse_monitor.report.summary import finite, summarise


class TensorBoardSink:
    """Writes each snapshot as one tensor per metric and a few dozen scalars, and alerts as text and data.

    Give it the writer your training uses: TensorBoard reads one file per folder well, two badly. It is not closed. With a folder instead, a
    writer of its own is made with the first snapshot; let the folder be one that nobody else writes to, such as `runs/mine/collapse`.
    Writers of other kinds (tensorboardX) get the scalars only; None and loggers' dummies are accepted and get nothing.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, a folder, any object with `add_scalar(tag, value, step)`, or None.
        heads_every: snapshots between two that carry every head.

    Raises:
        ImportError: a folder is given and `tensorboard` is not installed.
        ValueError: `writer` is none of these.
    """

    def __init__(self, writer: Any, heads_every: int = HEADS_EVERY) -> None:
        if isinstance(heads_every, bool) or not isinstance(heads_every, int) or heads_every < 1:
            raise ValueError(f"TensorBoardSink: heads_every={heads_every!r}, expected a whole number from 1 on")
        self._folder = os.fspath(writer) if isinstance(writer, str | os.PathLike) else None
        if self._folder is not None and importlib.util.find_spec("tensorboard") is None:
            raise ImportError(f"TensorBoardSink({self._folder!r}) needs tensorboard, which is not installed: pip install tensorboard")
        if writer is not None and self._folder is None and not callable(getattr(writer, "add_scalar", None)):
            raise ValueError(f"TensorBoardSink: expected a SummaryWriter or the path of a folder, got {type(writer).__name__}")
        self._heads_every = heads_every
        self._writer: Any = None if self._folder is not None else writer
        self._dense = DenseEvents(writer, heads_every) if is_summary_writer(writer) else None
        self._last: int | None = None

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        if self._folder is not None and self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Blocking when ten events wait, as torch does by default, would make training wait for the disk.
            self._writer = SummaryWriter(self._folder, max_queue=1000, flush_secs=30)
            self._dense = DenseEvents(self._writer, self._heads_every)
        if self._dense is not None:
            self._dense.write(snapshot, alerts)
        elif self._writer is not None:
            self._write_scalars(snapshot, alerts)

    def close(self) -> None:
        """Close the writer that was made here; a writer that was given is flushed and stays open."""
        if self._dense is not None:
            self._dense.close()
        if self._folder is None:
            if self._dense is not None:
                self._writer.flush()
        elif self._writer is not None:
            self._writer.close()
            self._writer, self._dense = None, None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a sink with a folder makes a writer of its own.
        return {**self.__dict__, "_writer": None, "_dense": None} if self._folder is not None else self.__dict__

    def _write_scalars(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        if self._last is None or snapshot.step > self._last:
            self._last = snapshot.step
            for tag, value in finite(summarise(snapshot)).items():
                self._writer.add_scalar(tag, value, snapshot.step)
        if callable(getattr(self._writer, "add_text", None)):
            for text in alert_texts(alerts):
                self._writer.add_text(naming.ALERT_TEXT, text, snapshot.step)


def is_summary_writer(writer: object) -> bool:
    """Whether this is torch's own SummaryWriter. If torch's module was never loaded, it is not."""
    module = sys.modules.get("torch.utils.tensorboard.writer")
    return module is not None and isinstance(writer, module.SummaryWriter)
