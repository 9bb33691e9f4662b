"""Ways to keep a few lines in place on a terminal that others draw on too."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from rich import get_console
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

from collapse_monitor.report.above import redirect_logs
from collapse_monitor.terminal import escape_codes

_ERASE_BELOW = "\n\x1b[J\x1b[A"
"""All lines below the one the cursor is on."""


class Screen(Protocol):
    """Where a frame is shown."""

    draws: bool
    """Whether a frame replaces the one before; else it is printed below."""

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines that a frame may have."""

    def show(self, frame: Text) -> None:
        """Put the frame in place of the one before."""

    def close(self, frame: Text | None) -> None:
        """Leave the frame for good, if there is one, and give the terminal back."""


def choose_screen(current: Screen | None, console: Console | None) -> Screen:
    """The way that fits what is on the terminal now; another one than `current` takes its place."""
    chosen = console or get_console()
    own = current.bars if isinstance(current, BelowBars) else ()
    if not _is_seen(chosen):
        kind: type[Any] = Printed
    elif _bars(own):
        kind = BelowBars
    elif isinstance(sys.stdout, FileProxy) and not chosen._live_stack:
        kind = Printed  # somebody draws through a console that we do not know
    else:
        kind = Region
    if type(current) is kind and (kind is BelowBars or current.console is chosen):  # type: ignore[union-attr]
        assert current is not None
        return current
    if current is not None:
        current.close(None)
    return BelowBars() if kind is BelowBars else kind(chosen)


class Printed:
    """Lines one below the other."""

    draws = False

    def __init__(self, console: Console) -> None:
        self.console = console

    @property
    def size(self) -> tuple[int, int]:
        return self.console.width, self.console.height

    def show(self, frame: Text) -> None:
        # Through `sys.stdout`: whoever has replaced it knows where lines may go.
        sys.stdout.write(f"{frame.plain}\n")
        sys.stdout.flush()

    def close(self, frame: Text | None) -> None:
        """Nothing is held."""


class Region:
    """A live region of `rich`, which is part of the one that is there already, if there is one on the same console."""

    draws = True

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._live.start()
        # A program that ends without closing the sink has its cursor and its log back.
        self._end = weakref.finalize(self, _in_turn, redirect_logs(_printer(console)), self._live.stop)

    @property
    def size(self) -> tuple[int, int]:
        # The bars of others, and the line that the cursor is on.
        return self.console.width, self.console.height - 4

    def show(self, frame: Text) -> None:
        self._live.update(frame, refresh=True)

    def close(self, frame: Text | None) -> None:
        with _undisturbed(self.console):
            self._end()
            if frame is not None:
                self.console.print(frame, highlight=False)


class BelowBars:
    """Lines below the progress bars of `tqdm`, each a bar without a bar: so `tqdm` moves them with its own."""

    draws = True

    def __init__(self) -> None:
        self.bars: list[Any] = []
        self._file = _bars(())[0].fp
        self._end = weakref.finalize(
            self, _in_turn, redirect_logs(partial(_write_above, self._file)), partial(_close_bars, self.bars, self._file)
        )

    @property
    def size(self) -> tuple[int, int]:
        from shutil import get_terminal_size

        columns, lines = get_terminal_size()
        # A line that fills the terminal would break; tqdm hides what is below its last line.
        return columns - 1, lines - self._first - 3

    def show(self, frame: Text) -> None:
        from tqdm import tqdm

        lines = escape_codes(frame).split("\n")
        if self.bars:
            # Where lines were printed in between, or a bar has ended, ours have another place than they had.
            self._file.write(_ERASE_BELOW)
        while len(self.bars) < len(lines):
            at = self._first + len(self.bars) if not self.bars else abs(self.bars[-1].pos) + 1
            self.bars.append(tqdm(total=0, position=at, leave=False, bar_format="{desc}", file=self._file, dynamic_ncols=True))
        for bar, line in zip(self.bars, [*lines, *[""] * (len(self.bars) - len(lines))], strict=True):
            bar.set_description_str(line)

    def close(self, frame: Text | None) -> None:
        self._end()
        if frame is not None:
            _write_above(self._file, escape_codes(frame))

    @property
    def _first(self) -> int:
        """The line below those of others, and one more for a bar that comes and goes, such as validation's."""
        if self.bars:
            return abs(self.bars[0].pos)
        return max((abs(bar.pos) for bar in _bars(())), default=-1) + 2


def _bars(own: Iterable[Any]) -> list[Any]:
    """The bars that `tqdm` is drawing, but ours. If it was never loaded, there are none."""
    module = sys.modules.get("tqdm")
    if module is None:
        return []
    mine = set(map(id, own))
    return [bar for bar in list(getattr(module.tqdm, "_instances", ())) if id(bar) not in mine and not bar.disable and bar.fp is not None]


def _close_bars(bars: list[Any], file: Any) -> None:
    for bar in reversed(bars):
        bar.close()
    bars.clear()
    file.write("\r\x1b[J")
    for bar in _bars(()):
        bar.refresh()


def _write_above(file: Any, line: str) -> None:
    from tqdm import tqdm

    tqdm.write(line, file=file)


def _printer(console: Console) -> Callable[[str], None]:
    def show(line: str) -> None:
        with _undisturbed(console):
            console.print(line, highlight=False, markup=False)

    return show


def _undisturbed(console: Console) -> AbstractContextManager[Any]:
    """While this is open the thread that redraws a progress bar waits: what it drew in between would be in another place than it thinks."""
    stack = console._live_stack
    return stack[0]._lock if stack else nullcontext()


def _in_turn(*actions: Callable[[], None]) -> None:
    for action in actions:
        action()


def _is_seen(console: Console) -> bool:
    """Whether somebody looks at it. Colours may have been asked for where nobody does (`FORCE_COLOR`)."""
    isatty = getattr(console.file, "isatty", None)
    return console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter and callable(isatty) and bool(isatty())
