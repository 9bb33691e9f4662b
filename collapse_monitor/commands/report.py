"""What happened in a run, for a reader in a hurry: verdict, when, where, why, what to do.

Without an option the text is printed.
Exit status: 0, or 2 where a log cannot be read.

  collapse-monitor report logs/run7
  collapse-monitor report logs/run7 -o report.html
  collapse-monitor report logs/sweep --summary
"""

from __future__ import annotations

import argparse
from pathlib import Path

from collapse_monitor.commands.logs import add_logs, read_each

SUMMARY = "what happened in a run: one HTML file, text, or one line per run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_logs(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("-o", "--output", type=Path, metavar="FILE", help="write one HTML file that opens without a network")
    form.add_argument("--text", action="store_true", help="print it (the default)")
    form.add_argument("--summary", action="store_true", help="print one line per run: verdict, worst layer, first alert, last step, path")


def run(options: argparse.Namespace) -> int:
    if options.output is not None:
        from collapse_monitor.report.html import write_report

        write_report(options.logs, options.output)
        print(f"{options.output} ({options.output.stat().st_size / 1e6:.1f} MB)")
        return 0
    from collapse_monitor.report.html.story import tell
    from collapse_monitor.report.plain import summary_table, tell_plainly

    runs, unreadable = read_each("report", options.logs)
    stories = [tell(run) for run in runs]
    if stories:
        print("\n".join(summary_table(stories)) if options.summary else "\n\n".join(map(tell_plainly, stories)))
    return 2 if unreadable else 0
