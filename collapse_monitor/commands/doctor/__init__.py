"""Why there is no tab, or nothing in it: what is installed where, and what a log directory holds, each with what to do.

Looks at the Python that runs this, at the one that the command `tensorboard` on the PATH belongs to, and, if a directory is
given, at every event file and JSONL file below it.
Exit status: 0, or 1 where something is wrong.

  collapse-monitor doctor logs/run7
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from collapse_monitor.commands.doctor.findings import Found, State
from collapse_monitor.report.content import printable

SUMMARY = "why there is no tab in TensorBoard, or nothing in it"

_INDENT = " " * 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", nargs="?", type=Path, metavar="LOGDIR", help="what is given to `tensorboard --logdir`, or a JSONL file")


def run(options: argparse.Namespace) -> int:
    from collapse_monitor.commands.doctor.environment import examine_environment
    from collapse_monitor.commands.doctor.logs import examine_logs

    found, fast = examine_environment()
    if options.log is not None:
        found += examine_logs(options.log, fast)
    for one in found:
        print(_told(one))
    wrong = sum(one.state is State.WRONG for one in found)
    print(f"\n{wrong} thing{'s' if wrong > 1 else ''} to mend" if wrong else "\nnothing to mend")
    return int(wrong > 0)


def _told(one: Found) -> str:
    lines = textwrap.wrap(
        printable(one.what), 110, initial_indent=f"{one.state:7}", subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join([*lines, *(f"{_INDENT}next: {printable(step)}" for step in one.steps)])
