"""The commands of the command line, one file each. Nothing heavy is loaded before a command runs."""

from __future__ import annotations

import argparse
from typing import Protocol


class Command(Protocol):
    """A module that is a command. Its docstring is its help."""

    __doc__: str | None
    SUMMARY: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Say what may follow the command's name."""

    def run(self, options: argparse.Namespace, /) -> int:
        """Do it; returns the exit status."""
