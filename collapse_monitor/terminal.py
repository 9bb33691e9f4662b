"""A snapshot in colour, for terminals. Needs `rich`, loaded by whoever imports this: nothing does, unless a terminal is there to see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from collapse_monitor.records import Alert, Finding, Severity, Snapshot
from collapse_monitor.tables import aligned_cells, columns, footer, title

STYLES: Mapping[Severity, str] = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}


def coloured_table(
    snapshot: Snapshot,
    history: Sequence[Snapshot] = (),
    alerts: Iterable[Alert | Finding] = (),
    *,
    width: int | None = None,
    layers: Sequence[int] | None = None,
) -> Text:
    """The lines of `text_table`. Layers that an alert or finding names have the colour of its severity.

    Args:
        snapshot: what is shown.
        history: snapshots before it, for the curves.
        alerts: what is wrong, as far as it is known.
        width: columns that would not fit are left out, and named.
        layers: the blocks to show; None: all.
    """
    severities = worst_by_layer(alerts)
    heading, rows = aligned_cells(snapshot, history)
    most = _fitting(heading[0], width)
    shown = range(len(rows)) if layers is None else layers
    lines = [Text(title(snapshot), style="bold"), *(Text(_line(cells[:most]), style="bold") for cells in heading)]
    for layer in shown:
        severity = severities.get(layer)
        lines.append(Text(_line(rows[layer][:most]), style=STYLES[severity] if severity else ""))
    left_out = columns(snapshot)[max(0, most - 2) :]
    if left_out:
        lines.append(Text(f"no room for {', '.join(left_out)}", style="dim"))
    lines.extend(Text(line, style="dim") for line in footer(snapshot))
    text = Text("\n").join(lines)
    text.no_wrap = width is not None
    return text


def worst_by_layer(alerts: Iterable[Alert | Finding]) -> dict[int, Severity]:
    """The gravest severity for each layer that is named."""
    found: dict[int, Severity] = {}
    for alert in alerts:
        for layer in alert.layers:
            found[layer] = max(found.get(layer, alert.severity), alert.severity, key=lambda severity: severity.rank)
    return found


def escape_codes(text: Text) -> str:
    """The text as a string that colours a terminal; without colours where `NO_COLOR` is set."""
    console = Console(width=10_000)  # it is the terminal that breaks lines
    with console.capture() as captured:
        console.print(text, end="", highlight=False, markup=False, soft_wrap=True)
    return captured.get()


def _line(cells: Sequence[str]) -> str:
    return " ".join(cells).rstrip()


def _fitting(cells: Sequence[str], width: int | None) -> int:
    """How many columns fit: number and name, at least one metric, and as many more as there is room for."""
    most = len(cells)
    while width is not None and most > 3 and sum(map(len, cells[:most])) + most - 1 > width:
        most -= 1
    return most
