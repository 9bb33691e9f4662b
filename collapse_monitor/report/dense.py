"""A snapshot as TensorBoard events: one tensor per metric instead of one scalar per layer. Needs `tensorboard`, loaded when first used."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapse_monitor.judge.readings import Readings
from collapse_monitor.records import Alert, Severity, Snapshot
from collapse_monitor.report import naming
from collapse_monitor.report.envelope import RANGE, Envelope
from collapse_monitor.report.summary import finite, summarise

_log = logging.getLogger("collapse_monitor")

HEADS_EVERY = 20
"""Snapshots between two that carry every head: they are ten times as large."""


class DenseEvents:
    """Writes snapshots through a `torch.utils.tensorboard.SummaryWriter`, everything of one step in one `Summary`.

    Per metric a float32 tensor `[layer]`, every 20th time a float16 tensor `[site, head]`, now and then the extremes since the last time
    (`Envelope`), the aggregates as scalars, and the alerts of the step as one string tensor. Steps rise strictly per tag, because
    TensorBoard drops what comes later with an earlier step: a snapshot whose step does not rise is left out, its alerts go with the next
    one.
    """

    def __init__(self, writer: Any, heads_every: int = HEADS_EVERY) -> None:
        self._writer = writer
        self._heads_every = heads_every
        self._file: Any = None
        self._described: set[str] = set()
        self._last: int | None = None
        self._written = 0
        self._waiting: list[Alert] = []
        self._envelope = Envelope()
        self._layers: list[str] = []

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._waiting.extend(alerts)
        if self._last is not None and snapshot.step <= self._last:
            return
        self._last = snapshot.step
        file = self._writer._get_file_writer()  # the one way to write a Summary of one's own
        if file is not self._file:
            # TensorBoard reads what a tag means from its first event in each file.
            self._file, self._described = file, set()
        readings = Readings(snapshot)
        summary = Summary()
        self._layers = [site.name for site in snapshot.block_sites]
        self._add_layers(summary, snapshot, readings)
        self._widen(snapshot, readings)
        if self._envelope.due:
            self._add_range(summary, snapshot.step)
        if self._written % self._heads_every == 0:
            self._add_heads(summary, snapshot, readings)
        for tag, value in finite(summarise(snapshot, readings)).items():
            summary.value.add(tag=tag, simple_value=value)
        if self._waiting:
            self._add_alerts(summary)
        if self._written == 0:
            _log.info(
                "TensorBoard has a tab Collapse. Where it is missing, see the most telling curves: %s", naming.pinned_url(snapshot.metrics)
            )
        file.add_summary(summary, snapshot.step)
        self._written += 1
        self._tell(snapshot.step)

    def close(self) -> None:
        """Write the extremes of the window that has begun. The writer stays open; where its owner has closed it, they are lost."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        is_open = self._file is not None and self._writer.file_writer is self._file
        if self._last is not None and is_open and self._envelope.unfinished:
            summary = Summary()
            self._add_range(summary, self._last)
            self._file.add_summary(summary, self._last)

    def _widen(self, snapshot: Snapshot, readings: Readings) -> None:
        if snapshot.metrics and readings.blocks:
            values = np.stack([readings.layer(metric) for metric in snapshot.metrics])
            self._envelope.add(snapshot.step, snapshot.metrics, values)

    def _add_range(self, summary: Any, step: int) -> None:
        for metric, rows in self._envelope.take(step).items():
            tag = naming.range_tag(metric)
            content = None if tag in self._described else {**describe(metric), "kind": RANGE, "layers": self._layers}
            self._add(summary, tag, rows, naming.PLUGIN, content)

    def _add_layers(self, summary: Any, snapshot: Snapshot, readings: Readings) -> None:
        for metric in snapshot.metrics:
            tag = naming.dense_tag(metric)
            content = None
            if tag not in self._described:
                content = {**describe(metric), "layers": self._layers}
            with np.errstate(over="ignore"):  # beyond single precision is infinite
                layers = readings.layer(metric).astype(np.float32)
            self._add(summary, tag, layers, naming.PLUGIN, content)

    def _add_heads(self, summary: Any, snapshot: Snapshot, readings: Readings) -> None:
        for metric in snapshot.attention:
            tag = naming.head_tag(metric)
            content = None
            if tag not in self._described:
                sites = snapshot.attention_sites
                content = {**describe(metric), "sites": [site.name for site in sites], "site_layers": [site.layer for site in sites]}
            with np.errstate(over="ignore"):  # a logit above 65504 is infinite in half precision, which is what it means
                heads = readings.heads(metric).astype(np.float16)
            self._add(summary, tag, heads, naming.PLUGIN, content)

    def _add_alerts(self, summary: Any) -> None:
        text = json.dumps([{"version": naming.FORMAT_VERSION, **alert.to_dict()} for alert in self._waiting], allow_nan=False)
        self._add(summary, naming.ALERTS, text, naming.ALERT_PLUGIN, None if naming.ALERTS in self._described else {})

    def _add(self, summary: Any, tag: str, data: NDArray[Any] | str, plugin: str, content: Mapping[str, Any] | None) -> None:
        """One tensor; `content` goes with the first one of a tag."""
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR
        from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_HALF, DT_STRING

        value = summary.value.add(tag=tag)
        if isinstance(data, str):
            value.tensor.dtype = DT_STRING
            value.tensor.string_val.append(data.encode())
        else:
            value.tensor.dtype = DT_HALF if data.dtype == np.float16 else DT_FLOAT
            value.tensor.tensor_content = data.tobytes()
        for size in getattr(data, "shape", ()):
            value.tensor.tensor_shape.dim.add(size=size)
        if content is not None:
            self._described.add(tag)
            value.metadata.data_class = DATA_CLASS_TENSOR
            value.metadata.plugin_data.plugin_name = plugin
            value.metadata.plugin_data.content = json.dumps({"v": naming.FORMAT_VERSION, **content}, separators=(",", ":")).encode()

    def _tell(self, step: int) -> None:
        """The alerts for people, and to disk at once when one is critical."""
        alerts, self._waiting = self._waiting, []
        for text in alert_texts(alerts):
            self._writer.add_text(naming.ALERT_TEXT, text, step)
        if any(alert.severity is Severity.CRITICAL for alert in alerts):
            self._writer.flush()


def alert_texts(alerts: Sequence[Alert]) -> Iterator[str]:
    """The alerts of a step as one Markdown text; none without alerts. Module names are other people's text: nothing in them is markup."""
    if alerts:
        yield "\n\n".join(f"**{_plain(alert.rule)}** {alert.state} ({alert.severity}): {_plain(alert.message)}" for alert in alerts)


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_\[\]#|~])", r"\\\1", " ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def describe(metric: str) -> dict[str, Any]:
    """Meaning, unit, range and the end that means collapse, as they go into the log; of metrics that are not built in the name.

    >>> describe("stable_rank")["meaning"], describe("stable_rank")["range"], describe("stable_rank")["collapse"]
    ('Squared Frobenius norm over squared spectral norm', [1, None], 'low')
    """
    from collapse_monitor.metrics import DEFAULT_METRICS

    for known in DEFAULT_METRICS:
        if known.name == metric:
            bounds = [bound if math.isfinite(bound) else None for bound in known.range]
            meaning = _meaning(known.compute.__doc__ or "")
            return {"metric": metric, "meaning": meaning, "unit": known.unit, "range": bounds, "collapse": known.collapse}
    return {"metric": metric, "meaning": "", "unit": "", "range": [None, None], "collapse": None}


def _meaning(docstring: str) -> str:
    """The words of the first line in front of its formula."""
    words = docstring.partition("\n")[0].partition(":")[0].rstrip(".").replace("`", "")
    return "" if "$" in words else words
