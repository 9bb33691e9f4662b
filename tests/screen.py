"""A terminal for tests: a program runs in it, and what a person would see can be read."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pyte

ROOT = Path(__file__).parents[1]


def seen(code: str, *, columns: int = 120, lines: int = 40, environment: dict[str, str] | None = None) -> tuple[list[str], str]:
    """Run Python code in a terminal of this size: the lines on the screen and above it at the end, and everything that was written."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    unwanted = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CI"}
    known = {name: value for name, value in os.environ.items() if name not in unwanted}
    known |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", **(environment or {})}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=child, stdout=child, stderr=child, env=known, cwd=ROOT)
    os.close(child)
    written = bytearray()
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # Linux says so when the last writer has gone
            break
        if not piece:
            break
        written += piece
    os.close(parent)
    text = written.decode()
    assert process.wait() == 0, text
    screen = pyte.HistoryScreen(columns, lines, history=10_000)
    pyte.Stream(screen).feed(text)
    above = ["".join(row[column].data for column in range(columns)) for row in screen.history.top]
    return [line.rstrip() for line in [*above, *screen.display] if line.strip()], text
