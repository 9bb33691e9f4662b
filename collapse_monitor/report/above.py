"""Lines of the program's log above what is drawn in place: a handler that writes to the terminal by itself would write into the frame."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


class LinesTo:
    """A stream for log handlers: hands whole lines to a function."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._begun = show, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._show(line)
        return len(text)

    def flush(self) -> None:
        """A line that is not finished waits for its end."""


def redirect_logs(show: Callable[[str], None]) -> Callable[[], None]:
    """From now on log handlers that write to the terminal give their lines to `show`; returns the way back.

    >>> lines = []
    >>> back = redirect_logs(lines.append)
    >>> logging.getLogger("collapse_monitor.nobody").warning("above")
    >>> back()
    """
    stream: Any = LinesTo(show)
    moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
    for handler in _handlers():
        if handler.stream in (sys.__stdout__, sys.__stderr__):
            moved.append((handler, handler.stream))
            handler.setStream(stream)
    last = logging.lastResort
    if last is not None:
        # What is logged where nothing is configured, as Python does it.
        logging.lastResort = logging.StreamHandler(stream)
        logging.lastResort.setLevel(last.level)

    def back() -> None:
        logging.lastResort = last
        for handler, before in moved:
            handler.setStream(before)

    return back


def _handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    """All handlers of all loggers that write to a stream, each once."""
    known = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    found = {id(handler): handler for logger in known if isinstance(logger, logging.Logger) for handler in logger.handlers}
    yield from (handler for handler in found.values() if isinstance(handler, logging.StreamHandler))
