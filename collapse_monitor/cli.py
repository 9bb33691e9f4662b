"""The command line. Each command has a file of its own in `commands`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from collapse_monitor import __version__
from collapse_monitor.commands import Command, check, demo, doctor, probe, read, report
from collapse_monitor.commands.logs import sentence
from collapse_monitor.report.content import printable

COMMANDS: dict[str, Command] = {"report": report, "check": check, "read": read, "doctor": doctor, "probe": probe, "demo": demo}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. What a user can mend is said in one sentence, with status 2."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the encoding of a terminal lacks is spelled out instead of being an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = COMMANDS[options.command].run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError, ImportError) as error:
        print(f"collapse-monitor {options.command}: {printable(sentence(error))}", file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="collapse-monitor",
        description="Which layers of a Transformer have stopped doing work.",
        epilog="collapse-monitor COMMAND --help says more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"collapse-monitor {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        one = commands.add_parser(
            name, help=command.SUMMARY, description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(one)
    return parser


if __name__ == "__main__":
    sys.exit(main())
