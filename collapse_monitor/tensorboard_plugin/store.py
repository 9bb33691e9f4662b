"""The readings that TensorBoard keeps, as the tab asks for them: by run and metric, the worst of each column, extremes put back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard.data.provider import RunTagFilter

from collapse_monitor.report import naming
from collapse_monitor.report.columns import Columns, bin_worst, drop_overtaken, fold_extremes
from collapse_monitor.report.content import read_about, read_alerts
from collapse_monitor.report.envelope import RANGE

EVERYTHING = 1_000_000_000
"""More readings than any tag has: 0 would ask for none."""


class Store:
    """Reads through TensorBoard's data provider, which is the same for its fast and its slow loader.

    Args:
        provider: TensorBoard's.
        limit: how many readings of a tag TensorBoard keeps; 0 for all of them, None where unknown.
    """

    def __init__(self, provider: Any, limit: int | None = None) -> None:
        self._provider, self._limit = provider, limit

    def index(self, context: Any, experiment: str) -> dict[str, Any]:
        """All runs with data of ours: layers, metrics with unit, range and the end that means collapse, and whether heads were logged."""
        listed = self._list(context, experiment, naming.PLUGIN)
        alerting = self._list(context, experiment, naming.ALERT_PLUGIN)
        runs = [_describe(name, listed.get(name, {})) for name in sorted({*listed, *alerting})]
        return {"version": naming.FORMAT_VERSION, "limit": self._limit, "runs": runs}

    def series(self, context: Any, experiment: str, run: str, metric: str, start: float | None, end: float | None, columns: int) -> Columns:
        """`[column, layer]` of a metric between two steps.

        Raises:
            LookupError: the run has no such metric.
        """
        tags = {naming.dense_tag(metric), naming.range_tag(metric)}
        content, data = self._read(context, experiment, naming.PLUGIN, run, tags, naming.dense_tag(metric))
        collapse = content.get("collapse")
        steps, rows = _rows(data.get(naming.dense_tag(metric), []), start, end, dims=1)
        found = bin_worst(steps, _stack(rows, 1), collapse, columns)
        extremes = zip(*_rows(data.get(naming.range_tag(metric), []), start, None, dims=2), strict=True)
        inside = [(int(step), window) for step, window in extremes if _covers(found, window)]
        return fold_extremes(found, inside, collapse)

    def heads(self, context: Any, experiment: str, run: str, metric: str, layer: int) -> tuple[Columns, list[str]]:
        """`[column, head]` of a metric in the attentions of one layer, and the name of each row.

        Raises:
            LookupError: the run has no heads of this metric.
        """
        tag = naming.head_tag(metric)
        content, data = self._read(context, experiment, naming.PLUGIN, run, {tag}, tag)
        steps, rows = _rows(data.get(tag, []), None, None, dims=2)
        values, sites = _stack(rows, 2), content.get("sites", ())
        chosen = [index for index, owner in enumerate(content.get("site_layers", ())) if owner == layer and index < values.shape[1]]
        labels: list[str] = []
        parts: list[NDArray[Any]] = [np.zeros((len(steps), 0), dtype=np.float32)]
        for index in chosen:
            used = np.flatnonzero(~np.isnan(values[:, index]).all(axis=0))
            heads = values[:, index, : used[-1] + 1 if used.size else 0]
            labels.extend(f"{sites[index] if index < len(sites) else f'site {index}'} head {head}" for head in range(heads.shape[1]))
            parts.append(heads)
        return bin_worst(steps, np.concatenate(parts, axis=1), content.get("collapse")), labels

    def alerts(self, context: Any, experiment: str, run: str) -> list[dict[str, Any]]:
        """All alerts of a run, oldest first.

        Raises:
            LookupError: the run has neither alerts nor readings.
        """
        _, data = self._read(context, experiment, naming.ALERT_PLUGIN, run, {naming.ALERTS})
        if not data and run not in self._list(context, experiment, naming.PLUGIN):
            raise LookupError(f"there is no run {run!r} with data of collapse_monitor")
        events = data.get(naming.ALERTS, [])
        kept = drop_overtaken([event.step for event in events])
        return [alert for index in kept for alert in _alerts(events[index].numpy)]

    def _list(self, context: Any, experiment: str, plugin: str) -> Any:
        return self._provider.list_tensors(context, experiment_id=experiment, plugin_name=plugin)

    def _read(
        self, context: Any, experiment: str, plugin: str, run: str, tags: set[str], needed: str | None = None
    ) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """What the log says about the tag `needed`, and the readings of all `tags`."""
        chosen = RunTagFilter(runs=[run], tags=sorted(tags))
        where = {"experiment_id": experiment, "plugin_name": plugin, "run_tag_filter": chosen}
        listed = self._provider.list_tensors(context, **where).get(run, {})
        if needed is not None and needed not in listed:
            raise LookupError(f"run {run!r} has no readings under {needed!r}")
        content = read_about(listed[needed].plugin_content) if needed is not None else {}
        return content, self._provider.read_tensors(context, downsample=EVERYTHING, **where).get(run, {})


def _describe(name: str, tags: Any) -> dict[str, Any]:
    metrics: dict[str, dict[str, Any]] = {}
    layers: list[str] = []
    newest = naming.FORMAT_VERSION
    for series in tags.values():
        content = read_about(series.plugin_content)
        newest = max(newest, content.get("v", 0))
        if "metric" not in content or content.get("kind") == RANGE:
            continue
        about = metrics.setdefault(content["metric"], {"heads": False, "layers": False})
        about.update({key: content.get(key) for key in ("meaning", "unit", "range", "collapse")})
        about["heads"] |= "sites" in content
        about["layers"] |= "layers" in content
        layers = content.get("layers") or layers
    run: dict[str, Any] = {"name": name, "layers": layers, "metrics": metrics}
    return {**run, "newer": newest} if newest > naming.FORMAT_VERSION else run


def _rows(events: Any, start: float | None, end: float | None, dims: int) -> tuple[NDArray[np.int64], list[NDArray[Any]]]:
    """Steps and readings between two steps, the last reading of each step, overtaken ones left out."""
    kept = [events[index] for index in drop_overtaken([event.step for event in events])]
    chosen = [event for event in kept if (start is None or event.step >= start) and (end is None or event.step <= end)]
    arrays = [np.asarray(event.numpy) for event in chosen]
    fitting = [(event.step, array) for event, array in zip(chosen, arrays, strict=True) if array.ndim == dims and array.dtype.kind in "fiu"]
    return np.array([step for step, _ in fitting], dtype=np.int64), [array for _, array in fitting]


def _stack(rows: list[NDArray[Any]], dims: int) -> NDArray[np.float32]:
    """Rows of one shape as they are; the number of layers or heads may change within a log, then nan fills the gaps."""
    shapes = {row.shape for row in rows}
    if len(shapes) == 1:
        return np.stack(rows).astype(np.float32, copy=False)
    shape = tuple(max((shape[dim] for shape in shapes), default=0) for dim in range(dims))
    stacked = np.full((len(rows), *shape), np.nan, dtype=np.float32)
    for index, row in enumerate(rows):
        stacked[index][tuple(slice(size) for size in row.shape)] = row
    return stacked


def _covers(found: Columns, window: NDArray[Any]) -> bool:
    return window.shape == (4, found.values.shape[1])


def _alerts(data: Any) -> list[dict[str, Any]]:
    """The alerts of one step; none where somebody else wrote under our name."""
    values = np.asarray(data).ravel().tolist()
    return [alert for text in values if isinstance(text, str | bytes) for alert in read_alerts(text)]
