"""Whether runs were healthy, as an exit status for scripts and continuous integration.

Exit status: 0 if no alert of the severity given, or of a graver one, has fired in any run; 1 if one has, also if it was
resolved later: it is printed; 2 if a log cannot be read or holds no reading, whatever was found in the others.

  collapse-monitor check logs/run7 --fail-on warning
"""

from __future__ import annotations

import argparse

from collapse_monitor.commands.logs import add_logs, read_each

SUMMARY = "exit status 1 if an alert has fired in a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_logs(parser)
    parser.add_argument(
        "--fail-on",
        choices=("info", "warning", "critical"),
        default="critical",
        help="the mildest severity that counts (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    from collapse_monitor.records import Severity
    from collapse_monitor.report.content import printable
    from collapse_monitor.report.html.story import tell

    runs, unreadable = read_each("check", options.logs)
    bound = Severity(options.fail_on)
    failed = blank = False
    for story in map(tell, runs):
        if story.blank:
            blank = True
            print(f"no data  {printable(str(story.run.path))}: no layer could be read; a snapshot's `missing` says why")
            continue
        grave = [chapter for chapter in story.chapters if chapter.alert.severity.rank >= bound.rank]
        mild = [f"{chapter.alert.rule} ({chapter.alert.severity})" for chapter in story.chapters if chapter not in grave]
        failed |= bool(grave)
        for chapter in grave:
            over = "" if chapter.over is None else f" (over at step {chapter.over})"
            said = printable(f"{story.run.path}, step {chapter.alert.step}: {' '.join(chapter.alert.message.split())}{over}")
            print(f"{chapter.alert.severity.upper()}  {said}")
        if not grave:
            milder = f"; milder than {bound}: {', '.join(mild)}" if mild else ""
            print(f"healthy  {printable(str(story.run.path))}, steps {story.run.steps[0]} to {story.run.steps[-1]}{printable(milder)}")
    return 2 if unreadable or blank else int(failed)
