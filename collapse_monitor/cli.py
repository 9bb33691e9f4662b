"""The command line: `collapse-monitor demo | probe`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="collapse-monitor", description="Which layers of a Transformer have stopped doing work.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", add_help=False, help="train a healthy and a collapsing Vision Transformer on handwritten digits")
    probing = commands.add_parser("probe", help="read and diagnose a model at initialisation")
    probing.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a function without arguments that returns (model, inputs): inputs is a tensor, a tuple of arguments or a dict of keywords",
    )
    options, rest = parser.parse_known_args(arguments)
    if options.command == "probe":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return _probe(options.factory)
    try:
        from collapse_monitor import demo
    except ImportError as error:
        print(f"collapse-monitor {options.command}: {error}", file=sys.stderr)
        return 1
    return demo.main(rest)


def _probe(path: str) -> int:
    """Print the table and the diagnosis; the exit status is 1 where something is critical and 2 where the factory cannot be used."""
    from collapse_monitor.judge import diagnose, preflight
    from collapse_monitor.once import probe
    from collapse_monitor.records import Severity

    try:
        model, inputs = _made(path)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
        snapshot = probe(model, *args, **kwargs)
    except (ValueError, ImportError) as error:
        print(f"collapse-monitor probe: {error}", file=sys.stderr)
        return 2
    print(snapshot.table(), preflight(snapshot), sep="\n\n")
    return int(any(finding.severity is Severity.CRITICAL for finding in diagnose(snapshot)))


def _made(path: str) -> tuple[Any, Any]:
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"{path!r} is not of the form MODULE:FACTORY, as in my_package.models:tiny")
    if os.getcwd() not in sys.path:
        # As `python -m` has it: modules of the folder one stands in.
        sys.path.insert(0, os.getcwd())
    factory = getattr(importlib.import_module(module), name, None)
    if not callable(factory):
        raise ValueError(f"{module} has no function {name!r}")
    made = factory()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"{path} returned a {type(made).__name__}: return (model, inputs)")
    return made


if __name__ == "__main__":
    sys.exit(main())
