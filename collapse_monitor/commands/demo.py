"""Train a small Vision Transformer on handwritten digits, then the same one without residual connections, both watched.

Needs the extra `demo`: pip install 'collapse-monitor[demo]'. It takes half a minute on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "train a healthy and a collapsing Vision Transformer on handwritten digits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, default=12, help="for each of the two runs (default: %(default)s)")
    parser.add_argument("--logdir", type=Path, default=Path("logs/demo"), help="where TensorBoard's files go (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    from collapse_monitor.demo import show

    return show(options.epochs, options.logdir)
