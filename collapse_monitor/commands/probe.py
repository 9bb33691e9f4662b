"""Read and diagnose a model at initialisation: the table of its layers, and what is wrong already.

Exit status: 0, or 1 where something is critical, or 2 where the model cannot be made or read.

  collapse-monitor probe my_package.models:tiny
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

SUMMARY = "read and diagnose a model at initialisation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a function without arguments that returns (model, inputs): inputs is a tensor, a tuple of arguments or a dict of keywords",
    )


def run(options: argparse.Namespace) -> int:
    from collapse_monitor.judge import diagnose, preflight
    from collapse_monitor.once import probe
    from collapse_monitor.records import Severity

    model, inputs = _made(options.factory)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
    snapshot = probe(model, *args, **kwargs)
    findings = diagnose(snapshot)
    print(snapshot.table(alerts=findings), preflight(snapshot), sep="\n\n")
    return int(any(finding.severity is Severity.CRITICAL for finding in findings))


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
