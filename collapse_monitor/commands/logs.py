"""What commands that read logs share: the argument, and all runs in the logs that were named."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collapse_monitor.report.reader import Run


def add_logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        nargs="+",
        type=Path,
        metavar="LOG",
        help="a TensorBoard folder with one run or many below it, an event file, or a JSONL file",
    )


def read_each(command: str, logs: Sequence[Path]) -> tuple[list[Run], int]:
    """The runs in all logs, in natural order, each once; what cannot be read is said on standard error and counted."""
    from collapse_monitor.report.content import printable
    from collapse_monitor.report.reader import read_runs

    runs: dict[Path, Run] = {}
    unreadable = 0
    for log in logs:
        try:
            runs.update({run.path.resolve(): run for run in read_runs(log)})
        except (OSError, ValueError) as error:
            unreadable += 1
            said = sentence(error)
            print(f"collapse-monitor {command}: {printable(said if str(log) in said else f'{log}: {said}')}", file=sys.stderr)
    return sorted(runs.values(), key=lambda run: natural(str(run.path))), unreadable


def sentence(error: Exception) -> str:
    """What an error says; those of the operating system without number and quotes.

    >>> sentence(PermissionError(13, "Permission denied", "logs"))
    'logs: permission denied'
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}" if error.filename else error.strerror
    return str(error)


def natural(text: str) -> list[tuple[bool, int, str]]:
    """A key to sort by: numbers by their size.

    >>> sorted(["run10", "run2", "run"], key=natural)
    ['run', 'run2', 'run10']
    """
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", text)]
