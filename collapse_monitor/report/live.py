"""A view that is redrawn in place while training runs. Needs a terminal; elsewhere alerts become a few plain lines."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from collapse_monitor.records import Alert, Severity, Snapshot
from collapse_monitor.report.screens import Screen, choose_screen
from collapse_monitor.tables import COLUMNS, TREND
from collapse_monitor.terminal import STYLES, coloured_table, worst_by_layer

FASTEST = 2.0
"""Frames per second. One takes some 10 ms, of the training's own time."""

_PLAIN_LINES = 5


class LiveSink:
    """The latest readings of the worst layers with their course, and what is wrong, at the bottom of the terminal.

    It is drawn from the step that is being logged, by no thread of its own, at most `per_second` times a second, and shares the terminal
    with progress bars of `rich` (Lightning's `RichProgressBar`, your own on rich's global console) and `tqdm`. What the program prints
    appears above. The last frame stays when the sink is closed.

    Where the output is no terminal (a file, a pipe, a notebook) nothing is drawn: each step with alerts prints at most five plain lines.

    Args:
        layers: blocks to show; the worst ones, where the model has more.
        per_second: frames per second, up to 2.
        console: the `rich` console to draw on; None: rich's global one, which Lightning's progress bar uses as well.

    Raises:
        ValueError: `layers` is below 1, or `per_second` is not above 0 and at most 2.

    >>> sink = LiveSink()
    >>> sink.close()
    """

    def __init__(self, layers: int = 16, *, per_second: float = 1.0, console: Console | None = None) -> None:
        if layers < 1:
            raise ValueError(f"LiveSink: layers={layers}, expected a whole number from 1 on")
        if not 0 < per_second <= FASTEST:
            raise ValueError(f"LiveSink: per_second={per_second}, expected more than 0 and at most {FASTEST:g}")
        self._layers, self._pause, self._console = layers, 1 / per_second, console
        self._recent: deque[Snapshot] = deque(maxlen=TREND)
        self._firing: dict[str, Alert] = {}
        self._screen: Screen | None = None
        self._drawn = -math.inf

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        self._recent.append(_small(snapshot))
        for alert in alerts:
            if alert.state == "firing":
                self._firing[alert.rule] = alert
            elif alert.state == "resolved":
                self._firing.pop(alert.rule, None)
        self._screen = choose_screen(self._screen, self._console)
        if not self._screen.draws:
            if alerts:
                self._screen.show(Text("\n".join(plain_lines(snapshot, alerts))))
        elif alerts or time.monotonic() - self._drawn >= self._pause:
            self._drawn = time.monotonic()
            self._screen.show(self._frame(*self._screen.size))

    def close(self) -> None:
        """Leave the last frame where it is and give the terminal back. Idempotent."""
        screen, self._screen = self._screen, None
        if screen is not None:
            screen.close(self._frame(*screen.size) if screen.draws and self._recent else None)
        self._recent.clear()
        self._firing.clear()

    def __getstate__(self) -> dict[str, Any]:
        # A copy, also one in another process, has a view of its own.
        return {**self.__dict__, "_screen": None, "_console": None}

    def _frame(self, width: int, height: int) -> Text:
        """As much as fits: the worst layers, then the alerts that fire, a line each."""
        latest = self._recent[-1]
        firing = sorted(self._firing.values(), key=lambda alert: (-alert.severity.rank, alert.since))
        told = [_cut(Text(f"{alert.severity.upper()} {alert.message}", style=STYLES[alert.severity]), width) for alert in firing[:3]]
        if len(firing) > len(told):
            told.append(Text(f"and {len(firing) - len(told)} more", style="dim"))
        room = min(self._layers, max(1, height - len(told) - 5))
        shown = worst_layers(latest, firing, room)
        frame = coloured_table(replace(latest, tokens=(), notes=()), list(self._recent)[:-1], firing, width=width, layers=shown)
        lines = [_cut(line, width) for line in frame.split("\n")]
        if len(shown) < len(latest.block_sites):
            lines.append(Text(f"the worst {len(shown)} of {len(latest.block_sites)} layers", style="dim"))
        return Text("\n", no_wrap=True).join([*lines, *told])


def worst_layers(snapshot: Snapshot, alerts: Iterable[Alert], most: int) -> list[int]:
    """Up to `most` blocks in order of entry: those that alerts name, the gravest first, then those whose tokens are most alike.

    >>> from collapse_monitor.records import Site
    >>> sites = tuple(Site(f"b{i}", "block", i) for i in range(4))
    >>> worst_layers(Snapshot(0, sites, {"token_similarity": (0.1, 0.9, float("nan"), 0.5)}, {}), [], 2)
    [1, 3]
    """
    severities = worst_by_layer(alerts)
    alike = snapshot.series("token_similarity") if "token_similarity" in snapshot.metrics else [0.0] * len(snapshot.block_sites)

    def badness(layer: int) -> tuple[int, float]:
        severity = severities.get(layer)
        return (-1 if severity is None else severity.rank, -math.inf if math.isnan(alike[layer]) else alike[layer])

    return sorted(sorted(range(len(alike)), key=badness, reverse=True)[:most])


def plain_lines(snapshot: Snapshot, alerts: Sequence[Alert]) -> list[str]:
    """What there is to say about a step where nothing can be drawn: the step, and the gravest alerts, one line each."""
    gravest = sorted(alerts, key=lambda alert: -alert.severity.rank)
    count = f"{len(alerts)} alert{'s' if len(alerts) > 1 else ''}"
    told = [f"  {_word(alert)} {alert.message}" for alert in gravest]
    if len(told) > _PLAIN_LINES - 1:
        told = [*told[: _PLAIN_LINES - 2], f"  and {len(alerts) - _PLAIN_LINES + 2} more"]
    return [f"collapse_monitor, step {snapshot.step}: {count}", *told]


def _word(alert: Alert) -> str:
    return alert.severity.upper() if alert.state == "firing" and alert.severity is not Severity.INFO else "note"


def _small(snapshot: Snapshot) -> Snapshot:
    """The columns that are shown, and no more."""
    blocks = {name: values for name, values in snapshot.blocks.items() if name in COLUMNS}
    attention = {name: values for name, values in snapshot.attention.items() if name in COLUMNS}
    return replace(snapshot, blocks=blocks, attention=attention, missing={})


def _cut(line: Text, width: int) -> Text:
    line = line.copy()
    line.truncate(width, overflow="ellipsis")
    return line
