"""Logs back as arrays: one way in for TensorBoard folders and JSONL files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapse_monitor.records import Alert, Snapshot, check_version
from collapse_monitor.report.content import parse_json, read_alerts
from collapse_monitor.report.envelope import RANGE
from collapse_monitor.report.events import read_events
from collapse_monitor.report.files import find_files

Rows = Mapping[int, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Run:
    """One run read back.

    Attributes:
        path: where it was read from.
        steps: the steps that were written, rising.
        layers: names of the blocks in order of entry.
        sites: names of the attention sites in order of entry.
        alerts: all alerts, oldest first.
        about: per metric its meaning, unit, range and the end that means collapse, where the log says so.
        site_layers: per attention site the layer it runs in; None outside all blocks.
    """

    path: Path
    steps: NDArray[np.int64]
    layers: tuple[str, ...]
    sites: tuple[str, ...] = ()
    alerts: tuple[Alert, ...] = ()
    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    site_layers: tuple[int | None, ...] = ()
    _layers: Mapping[str, Rows] = field(default_factory=dict, repr=False)
    _heads: Mapping[str, Rows] = field(default_factory=dict, repr=False)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names `series` answers to."""
        return tuple(self._layers)

    @property
    def head_metrics(self) -> tuple[str, ...]:
        """The names `heads` answers to."""
        return tuple(self._heads)

    def series(self, metric: str) -> NDArray[np.float64]:
        """`[step, layer]`, nan where missing.

        Raises:
            KeyError: the run has no such metric; the message lists those it has.
        """
        return self._stacked(metric, self._layers, 1)

    def heads(self, metric: str) -> NDArray[np.float64]:
        """`[step, site, head]`; nan at the steps that carry no heads, and where a site has fewer heads than another.

        Raises:
            KeyError: the run has no such metric per head; the message lists those it has.
        """
        return self._stacked(metric, self._heads, 2)

    def logged_heads(self, metric: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The steps that carry heads, and their `[step, site, head]`: long logs have few of them.

        Raises:
            KeyError: the run has no such metric per head; the message lists those it has.
        """
        known = set(map(int, self.steps)) & self._heads.get(metric, {}).keys()
        steps = np.array(sorted(known), dtype=np.int64)
        return steps, replace(self, steps=steps).heads(metric)

    def unit(self, metric: str) -> str:
        """The unit of a metric; empty for pure numbers and for metrics of your own.

        >>> Run(Path("log"), np.arange(1), ("block",)).unit("effective_rank")
        'directions'
        """
        if metric not in self.about:
            # A log of JSON lines does not say it.
            from collapse_monitor.report.dense import describe

            return str(describe(metric)["unit"])
        return str(self.about[metric].get("unit", ""))

    def _stacked(self, metric: str, rows: Mapping[str, Rows], dims: int) -> NDArray[np.float64]:
        if metric not in rows:
            raise KeyError(f"{self.path} has no {'heads' if dims == 2 else 'readings'} of {metric!r}; it has {', '.join(rows) or 'none'}")
        found = rows[metric]
        shape = tuple(max((row.shape[dim] for row in found.values()), default=0) for dim in range(dims))
        if len(found) == len(self.steps) and all(row.shape == shape for row in found.values()):
            return np.array([found[int(step)] for step in self.steps], dtype=np.float64).reshape(len(self.steps), *shape)
        stacked = np.full((len(self.steps), *shape), np.nan)
        for index, step in enumerate(self.steps):
            row = found.get(int(step))
            if row is not None:
                stacked[index][tuple(slice(size) for size in row.shape)] = row
        return stacked


def read(path: str | os.PathLike[str]) -> Run:
    """Read a TensorBoard folder, or a JSONL file, that a sink has written.

    A tail torn by a kill and data of others are skipped. Where a run was resumed at an earlier step, what came after that step before is
    left out, as in TensorBoard. Of a folder with several runs in it, name one.

    Raises:
        FileNotFoundError: there is nothing at `path`, or nothing of ours in it.
        ValueError: several runs, or a log written by a newer version of the package.

    >>> read("no/such/folder")
    Traceback (most recent call last):
    FileNotFoundError: no/such/folder: no such file or folder
    """
    path = Path(path)
    found = read_runs(path)
    if len(found) > 1:
        raise ValueError(f"{path} holds {len(found)} runs, read one of them: {', '.join(str(run.path) for run in found)}")
    return found[0]


def read_runs(path: str | os.PathLike[str]) -> tuple[Run, ...]:
    """All runs below a folder, or the one in a file, as `read` reads them; sorted by path.

    Raises:
        FileNotFoundError: there is nothing at `path`, or nothing of ours in it.
        ValueError: a log was written by a newer version of the package.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_file() and "tfevents" not in path.name:
        return (_read_jsonl(path),)
    runs: dict[Path, list[Path]] = {}
    for file in [path] if path.is_file() else find_files(path, "*tfevents*"):
        runs.setdefault(file.parent, []).append(file)
    found = [run for folder, files in sorted(runs.items()) if (run := _read_folder(folder, files)) is not None]
    if path.is_dir():
        # JSON lines in the folder of a run, or below it, say the same once more.
        folders = {run.path for run in found}
        lines = [file for file in find_files(path, "*.jsonl") if folders.isdisjoint(file.parents) and _is_ours(file)]
        found = sorted([*found, *map(_read_jsonl, lines)], key=lambda run: run.path)
    if not found:
        raise FileNotFoundError(f"{path}: nothing written by collapse_monitor in it")
    return tuple(found)


def _read_folder(folder: Path, files: Sequence[Path]) -> Run | None:
    """All event files of one folder, in the order they were begun. None if none holds anything of ours."""
    collected = _Collected()
    for file in files:
        for step, tensors, alerts in read_events(file):
            collected.begin(step)
            for tensor in tensors:
                _check(file, {"version": tensor.about["v"]})
                if tensor.about.get("kind") == RANGE:
                    continue  # extremes of what is all here
                collected.put(step, tensor.metric, tensor.values, tensor.about)
            collected.put_alerts(file, step, alerts)
    return collected.run(folder) if collected.steps else None


def _read_jsonl(path: Path) -> Run:
    collected = _Collected()
    for record in _records(path):
        _check(path, record)
        try:
            snapshot = Snapshot.from_dict(record)
            layers = {metric: np.array(snapshot.series(metric), dtype=np.float64) for metric in snapshot.metrics}
            heads = {metric: _padded(snapshot.heads(metric)) for metric in snapshot.attention}
            np.int64(snapshot.step)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue  # looks like ours and is not, or was damaged
        collected.begin(snapshot.step)
        attention = snapshot.attention_sites
        owners = {"sites": [site.name for site in attention], "site_layers": [site.layer for site in attention]}
        names = {"layers": [site.name for site in snapshot.block_sites]}
        for metric, row in layers.items():
            collected.put(snapshot.step, metric, row, names)
        for metric, rows in heads.items():
            collected.put(snapshot.step, metric, rows, owners)
        collected.put_alerts(path, snapshot.step, read_alerts(json.dumps(record.get("alerts", []))))
    if not collected.steps:
        raise FileNotFoundError(f"{path}: nothing written by collapse_monitor in it")
    return collected.run(path)


class _Collected:
    """What has been read so far, by step; what a resumed run overtakes is dropped."""

    def __init__(self) -> None:
        self.steps: dict[int, Any] = {}
        self.alerts: list[tuple[int, Alert]] = []
        self._last = -1
        self._layers: dict[str, dict[int, NDArray[Any]]] = {}
        self._heads: dict[str, dict[int, NDArray[Any]]] = {}
        self._about: dict[str, dict[str, Any]] = {}
        self._names: dict[str, tuple[Any, ...]] = {"layers": (), "sites": (), "site_layers": ()}

    def begin(self, step: int) -> None:
        if self.steps and step < self._last:
            stale = [known for known in self.steps if known >= step]
            everything: list[dict[int, Any]] = [self.steps, *self._layers.values(), *self._heads.values()]
            for rows in everything:
                for overtaken in stale:
                    rows.pop(overtaken, None)
            self.alerts = [(known, alert) for known, alert in self.alerts if known < step]
        self._last = step
        self.steps[step] = None

    def put(self, step: int, metric: str, values: NDArray[Any], about: Mapping[str, Any]) -> None:
        rows = self._heads if values.ndim == 2 else self._layers
        rows.setdefault(metric, {})[step] = values
        for kind in self._names:
            if about.get(kind):
                self._names[kind] = tuple(about[kind])
        self._about.setdefault(metric, {}).update(
            {key: value for key, value in about.items() if key in ("meaning", "unit", "range", "collapse")}
        )

    def put_alerts(self, file: Path, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            _check(file, record)
            self.alerts.append((step, Alert.from_dict(record)))

    def run(self, path: Path) -> Run:
        return Run(
            path=path,
            steps=np.array(sorted(self.steps), dtype=np.int64),
            layers=self._names["layers"],
            sites=self._names["sites"],
            site_layers=self._names["site_layers"],
            alerts=tuple(alert for _, alert in self.alerts),
            about={metric: about for metric, about in self._about.items() if about},
            _layers=self._layers,
            _heads=self._heads,
        )


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Lines that are snapshots; torn and foreign ones are passed over."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            record = parse_json(line)
            if isinstance(record, dict) and {"version", "step", "sites", "blocks"} <= record.keys() and isinstance(record["version"], int):
                yield record


def _is_ours(path: Path) -> bool:
    return next(_records(path), None) is not None


def _check(file: Path, record: Mapping[str, Any]) -> None:
    try:
        check_version(record)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _padded(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    padded = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
