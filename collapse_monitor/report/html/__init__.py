"""The report: one file that opens anywhere, without a network, with what there is to say on top and every reading below."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from collapse_monitor.report.html.page import compose
from collapse_monitor.report.reader import Run, read_runs

__all__ = ["write_report"]


def write_report(logs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    """Write one HTML file about all runs in `logs`: TensorBoard folders, event files or JSONL files.

    Raises:
        FileNotFoundError: there is nothing at one of the paths, or nothing of ours in it.
        ValueError: no path is given, or a log was written by a newer version of the package.

    >>> write_report([], "report.html")
    Traceback (most recent call last):
    ValueError: a report needs at least one log: a TensorBoard folder, an event file or a JSONL file
    """
    if isinstance(logs, str | os.PathLike):
        logs = [logs]
    if not logs:
        raise ValueError("a report needs at least one log: a TensorBoard folder, an event file or a JSONL file")
    runs = [(path, run) for path in map(Path, logs) for run in read_runs(path)]
    text = compose(_name(runs))
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(text, encoding="utf-8")


def _name(runs: Sequence[tuple[Path, Run]]) -> dict[str, Run]:
    """Runs by the shortest name that tells them apart: below the path given, as in TensorBoard, else with that path in front."""
    short = [
        run.path.relative_to(path).as_posix() if run.path != path and run.path.is_relative_to(path) else run.path.name for path, run in runs
    ]
    names = [name if short.count(name) == 1 else run.path.as_posix() for name, (_, run) in zip(short, runs, strict=True)]
    names = [name.encode("utf-8", "backslashreplace").decode() for name in names]  # a file's name may hold bytes that are no text
    return dict(zip(names, (run for _, run in runs), strict=True))
