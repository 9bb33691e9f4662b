"""How an alert reads: what, how bad, where, since when, against what, and what to do next. One line each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from collapse_monitor.judge.catalogue import CATALOGUE
from collapse_monitor.records import Condition, Severity, Snapshot


def firing_message(
    rule: str,
    severity: Severity,
    layers: Sequence[int],
    since: int,
    condition: Condition,
    snapshot: Snapshot,
    *,
    worse: bool = False,
    outlook: str = "",
) -> str:
    """The line for an alert that begins to fire, or gets `worse`. `condition` is that of the first layer; `outlook` a forecast."""
    phenomenon = CATALOGUE.get(rule)
    what = condition.message or (phenomenon.summary if phenomenon else "")
    parts = [
        f"{rule}{' got worse' if worse else ''} ({severity}) in {_where(layers, condition, snapshot)}, since step {since}:",
        f"{reading(condition, snapshot)}.",
    ]
    if outlook:
        parts.append(f"{outlook}.")
    if what:
        parts.append(what if what.endswith((".", "!", "?")) else f"{what}.")
    if phenomenon:
        parts.append(f"Next: {phenomenon.next_step}. Remedy: {phenomenon.remedies[0]}. See {phenomenon.anchor}")
    return " ".join(parts)


def resolved_message(rule: str, layers: Sequence[int], since: int, step: int, condition: Condition, now: float, snapshot: Snapshot) -> str:
    """The line for an alert that is over. `now` is what the first layer reads by now."""
    owner = "" if _of_the_run(condition) else f" of {_layer(condition.layer)}"
    value = f"{condition.metric}{owner} is back at {number(now)}" if not math.isnan(now) else "it is healthy again"
    where = _where(layers, condition, snapshot)
    return f"{rule} resolved at step {step} in {where}, after {step - since} steps: {value} (bound {number(condition.bound)})."


def no_data_message(rule: str, layers: Sequence[int], since: int, metric: str, firing: bool, snapshot: Snapshot) -> str:
    """The line for readings that were there and are no longer."""
    reason = _reason(layers, metric, snapshot)
    state = "it was firing and cannot be followed" if firing else "whether it is healthy is not known"
    return f"{rule} has no data in {spell_layers(layers, snapshot)}, since step {since}: {metric} was not read{reason}; {state}."


def reminder_message(rule: str, severity: Severity, layers: Sequence[int], since: int, condition: Condition, snapshot: Snapshot) -> str:
    """The line for an alert that still fires."""
    return (
        f"{rule} ({severity}) still fires at step {snapshot.step} in {_where(layers, condition, snapshot)}, since step {since}: "
        f"{reading(condition, snapshot)}."
    )


def reading(condition: Condition, snapshot: Snapshot) -> str:
    """What was read, of which layer, against what.

    >>> reading(Condition(3, "token_similarity", 0.99961, 0.99, 0.31), Snapshot(0, (), {}, {}))
    'token_similarity of layer 3 is 0.9996 (baseline 0.31, bound 0.99)'
    """
    of = ""
    if condition.metric == "effective_rank" and condition.layer is not None and condition.layer < len(snapshot.attainable_rank):
        of = f" of {snapshot.attainable_rank[condition.layer]} attainable"
    head = "" if condition.head is None else f" head {condition.head}"
    baseline = "none yet" if condition.baseline is None else number(condition.baseline)
    value, bound = number(condition.value), number(condition.bound)
    owner = "" if _of_the_run(condition) else f" of {_layer(condition.layer)}{head}"
    return f"{condition.metric}{owner} is {value}{of} (baseline {baseline}, bound {bound})"


def spell_layers(layers: Sequence[int], snapshot: Snapshot) -> str:
    """Layers as ranges, with the module name of the first.

    >>> spell_layers([2, 3, 4, 7], Snapshot(0, (), {}, {}))
    'layers 2-4, 7'
    """
    if not layers:
        return "attention outside all blocks"
    blocks = snapshot.block_sites
    first = layers[0]
    name = f" ('{blocks[first].name}'{' first' if len(layers) > 1 else ''})" if first < len(blocks) else ""
    return f"{'layer' if len(layers) == 1 else 'layers'} {ranges(layers)}{name}"


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers with runs shortened.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def number(value: float) -> str:
    """Four digits, and more where a value next to 1 would read as 1.

    >>> number(0.123456), number(1234567.0), number(0.999998), number(1.0)
    ('0.1235', '1.235e+06', '0.999998', '1')
    """
    text = f"{value:.4g}"
    return f"{value:.7g}" if text == "1" else text


def _where(layers: Sequence[int], condition: Condition, snapshot: Snapshot) -> str:
    return "the run as a whole" if not layers and _of_the_run(condition) else spell_layers(layers, snapshot)


def _of_the_run(condition: Condition) -> bool:
    """Losses belong to no layer and to no attention."""
    return condition.layer is None and condition.metric.endswith("loss")


def _layer(layer: int | None) -> str:
    return "an attention outside all blocks" if layer is None else f"layer {layer}"


def _reason(layers: Sequence[int], metric: str, snapshot: Snapshot) -> str:
    blocks = snapshot.block_sites
    names = [site.name for site in snapshot.sites if site.layer in layers] or [
        blocks[layer].name for layer in layers if layer < len(blocks)
    ]
    for key in (*(f"{name}/{metric}" for name in names), metric, *names):
        if key in snapshot.missing:
            return f" ({snapshot.missing[key]})"
    return ""
