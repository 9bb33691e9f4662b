"""Readings out of a log, as a table of comma separated values; without --csv, what there is in it.

The long form has one line per reading: run, step, metric, unit, layer, name, head, value. `layer` is the index of the block
in order of entry, `name` that of its module; `head` is empty but for the readings of single heads. The wide form has one
line per run, step and layer (with --heads: and attention and head), and one column per metric. Readings that are missing
have no line, or an empty cell.

  collapse-monitor read logs/run7 --csv run7.csv
  collapse-monitor read logs/run7 --csv - --wide | head
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from collapse_monitor.commands.logs import add_logs, read_each

SUMMARY = "readings as comma separated values"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_logs(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="where to; - is standard output")
    parser.add_argument("--wide", action="store_true", help="one column per metric instead of one line per reading")
    parser.add_argument(
        "--heads", action="store_true", help="the readings of single heads, of the steps that carry them, instead of layers"
    )


def run(options: argparse.Namespace) -> int:
    from collapse_monitor.report.rows import describe_run, write_rows

    runs, unreadable = read_each("read", options.logs)
    if not runs:
        return 2
    if options.csv is None:
        print("\n\n".join(map(describe_run, runs)))
    elif str(options.csv) == "-":
        write_rows(runs, sys.stdout, heads=options.heads, wide=options.wide)
    else:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with options.csv.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            lines = write_rows(runs, file, heads=options.heads, wide=options.wide)
        print(f"{options.csv}: {lines} lines")
    return 2 if unreadable else 0
