"""The command line: `collapse-monitor demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="collapse-monitor", description="Which layers of a Transformer have stopped doing work.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", add_help=False, help="train a healthy and a collapsing Vision Transformer on handwritten digits")
    options, rest = parser.parse_known_args(arguments)
    try:
        from collapse_monitor import demo
    except ImportError as error:
        print(f"collapse-monitor {options.command}: {error}", file=sys.stderr)
        return 1
    return demo.main(rest)


if __name__ == "__main__":
    sys.exit(main())
