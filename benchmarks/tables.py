"""The tables of the verdict benchmark."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import mean, median, stdev

from faults import FAULTS, Fault
from runs import Watched

import collapse_monitor as cm

OVERFIT = "overfit"


@dataclass
class Told:
    """How many faults could be seen, were named, have a place, and were located."""

    planted: int = 0
    named: int = 0
    placed: int = 0
    located: int = 0


def first_alert(run: Watched) -> cm.Alert | None:
    """The first thing said of the fault: the most severe at the first step that has any; overfitting is not about a fault."""
    firing = [alert for alert in run.alerts if alert.state == "firing" and alert.rule != "overfitting"]
    loud = [alert for alert in firing if alert.severity is not cm.Severity.INFO] or firing
    return max((alert for alert in loud if alert.step == loud[0].step), key=lambda alert: alert.severity.rank, default=None)


def loss_shows_it(run: Watched) -> int | None:
    """First step at which the loss leaves the range it had before the fault."""
    assert run.planted is not None
    before = run.losses[max(run.planted - 50, 0) : run.planted]
    if len(before) < 2:
        return None
    limit = mean(before) + 4 * stdev(before)
    return next((step for step in range(run.planted, len(run.losses)) if not run.losses[step] <= limit), None)


def is_located(run: Watched, alert: cm.Alert) -> bool:
    return bool(alert.layers) and run.block is not None and abs(alert.layers[0] - run.block) <= 1


def print_faults(done: list[Watched]) -> Told:
    """A line per fault; returns the sums."""
    total = Told()
    print(f"\n{'fault':36} {'runs':>4} {'named':>6} {'located':>8} {'alert':>6} {'lead':>6} {'silent':>7} {'unseen':>7}")
    for when in ("mid-run", "start"):
        for fault in FAULTS:
            here = [run for run in done if run.fault == fault.name and (run.planted != 0) == (when == "mid-run")]
            if here:
                _print_fault(fault, when, here, total)
    return total


def _print_fault(fault: Fault, when: str, here: list[Watched], total: Told) -> None:
    seen = [run for run in here if run.visible]
    told = [(run, first_alert(run)) for run in seen]
    named = [(run, alert) for run, alert in told if alert is not None and alert.rule in fault.named]
    located = sum(is_located(run, alert) for run, alert in named)
    waits = [alert.step - (run.planted or 0) for run, alert in named]
    leads = [shown - alert.step for run, alert in named if when == "mid-run" and (shown := loss_shows_it(run)) is not None]
    silent = sum(loss_shows_it(run) is None for run in seen) if when == "mid-run" else "-"
    total.planted += len(seen)
    total.named += len(named)
    if not fault.everywhere:
        total.placed += len(seen)
        total.located += located
    wait, lead = (f"{median(values):.0f}" if values else "-" for values in (waits, leads))
    place = "-" if fault.everywhere else located
    title = f"{fault.name} ({when})"
    print(f"{title:36} {len(seen):4} {len(named):6} {place:>8} {wait:>6} {lead:>6} {silent:>7} {len(here) - len(seen):7}")
    for run, alert in told:
        if alert is None or alert.rule not in fault.named or not (fault.everywhere or is_located(run, alert)):
            said = "nothing" if alert is None else f"{alert.rule} ({alert.severity}) in layers {alert.layers} at step {alert.step}"
            print(f"    missed: {run.training.kind}, seed {run.training.seed}, block {run.block}: {said}")
    for run in here:
        if not run.visible and (alert := first_alert(run)) is not None and alert.rule not in fault.named:
            print(f"    unseen, and called otherwise: {run.training.kind}, seed {run.training.seed}: {alert.rule} ({alert.severity})")


def print_confusion(done: list[Watched]) -> None:
    """The confusion matrix: a row per fault, a column per phenomenon that was said first."""
    rows: dict[str, Counter[str]] = {}
    for fault in FAULTS:
        seen = [run for run in done if run.fault == fault.name and run.visible]
        if seen:
            rows[fault.name] = Counter(alert.rule if (alert := first_alert(run)) is not None else "nothing" for run in seen)
    order = list(dict.fromkeys(name for fault in FAULTS for name in sorted(fault.named)))
    columns = [name for name in (*order, "nothing") if any(name in row for row in rows.values())]
    columns = [*columns, *sorted({name for row in rows.values() for name in row} - set(columns))]
    print("\nconfusion matrix: rows are faults, columns what was said first; [n] is a right name")
    for number, name in enumerate(columns, 1):
        print(f"  {number:2} {name}")
    print(f"{'':28}" + "".join(f"{number:>6}" for number in range(1, len(columns) + 1)))
    for fault in FAULTS:
        if fault.name in rows:
            cells = (_cell(rows[fault.name][name], name in fault.named) for name in columns)
            print(f"{fault.name:28}" + "".join(f"{cell:>6}" for cell in cells))


def _cell(count: int, right: bool) -> str:
    return "." if not count else f"[{count}]" if right else str(count)


def print_nulls(done: list[Watched]) -> tuple[int, int]:
    """A line for each kind of healthy run; returns warnings or worse, and checks."""
    healthy = [run for run in done if run.fault is None and run.training.name != OVERFIT]
    print(f"\n{'healthy run':28} {'runs':>4} {'checks':>7} {'warnings per 1000':>18} {'notes per 1000':>15}")
    loud = checks = 0
    for name in dict.fromkeys(run.training.name for run in healthy):
        here = [run for run in healthy if run.training.name == name]
        looked = sum(snapshot.step >= (run.planted or 0) for run in here for snapshot in run.snapshots)
        firing = [(run, alert) for run in here for alert in run.alerts if alert.state == "firing"]
        bad = [(run, alert) for run, alert in firing if alert.severity is not cm.Severity.INFO]
        loud, checks = loud + len(bad), checks + looked
        title = "resumed" if name == "plain" else name
        print(f"{title:28} {len(here):4} {looked:7} {1000 * len(bad) / looked:18.2f} {1000 * (len(firing) - len(bad)) / looked:15.2f}")
        for run, alert in firing:
            kind = "false" if alert.severity is not cm.Severity.INFO else "note"
            print(f"    {kind}: {run.training.kind}, seed {run.training.seed}: {alert.rule} in layers {alert.layers} at step {alert.step}")
    fitted = [run for run in done if run.training.name == OVERFIT]
    noticed = [next((alert.step for alert in run.alerts if alert.rule == "overfitting"), None) for run in fitted]
    wrong = sum(alert.severity is not cm.Severity.INFO for run in fitted for alert in run.alerts if alert.state == "firing")
    if fitted:
        steps = ", ".join(
            f"{run.training.kind} {run.training.seed}: {'never' if step is None else f'step {step}'}"
            for run, step in zip(fitted, noticed, strict=True)
        )
        told = sum(step is not None for step in noticed)
        print(f"\n32 samples: overfitting noted in {told} of {len(fitted)} runs ({steps}), {wrong} warnings of a collapse")
    return loud, checks
