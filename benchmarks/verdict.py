"""What the verdict is worth: faults planted into small real trainings, and healthy runs that must stay silent.

    python benchmarks/verdict.py                       # seeds 2 and 3, about ten minutes on one core
    python benchmarks/verdict.py --seeds 2 --keep runs # keeps the snapshots, and judges kept ones again with the present thresholds
    python benchmarks/verdict.py --short               # one model, two faults, one healthy run: shows that it runs

Default settings, a check every 5 steps, no tuning per model. The thresholds were chosen on seeds 0 and 1 of both models (a ViT on
digits, a byte GPT); the figures to quote are those of seeds from 2 on. Faults are planted in one block, in their cause, either at step
220 of a healthy run or in the first step.

    named     the phenomenon that fires first (the most severe one, where several do) is one that names the fault rightly
    located   the first layer named is the faulty block or next to it
    alert     steps from the fault to the alert
    lead      steps from the alert to the first loss more than 4 deviations above its mean over the 50 steps before the fault: negative
              where the loss was first, as it is when the model computes something else from one step to the next
    silent    runs whose loss never shows the fault in the 80 steps after it
    unseen    faults that move neither the block's output nor its gradients by 5 %: nobody can see them, they are not counted
"""

from __future__ import annotations

import argparse
import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean, median, stdev

import torch
from faults import FAULTS, Fault
from runs import FUTURE, PAST, Watched, from_start, healthy_past, with_fault
from trainings import Training, decay, nulls

import collapse_monitor as cm
from collapse_monitor.judge import Judge

KINDS = ("gpt", "vit")
START_STEPS = 140
LATE_STEPS = 230
"""A gate that starts closed is told after 200 steps."""


def runs(seeds: Iterable[int], keep: Path | None, kinds: Iterable[str] = KINDS, faults: Iterable[Fault] = FAULTS) -> list[Watched]:
    """Every fault and every healthy run, for each seed and model."""
    done: list[Watched] = []
    faults = tuple(faults)

    def add(key: str, make: Callable[[], Watched]) -> None:
        path = None if keep is None else keep / f"{key.replace('/', 'div')}.pkl"
        if path is not None and path.exists():
            done.append(judged_again(pickle.loads(path.read_bytes())))
            return
        done.append(made := make())
        print(".", end="", flush=True)
        if path is not None:
            # Functions cannot be kept; judging needs the snapshots only.
            path.write_bytes(pickle.dumps(replace(made, training=replace(made.training, schedule=decay, data=None))))

    for seed in seeds:
        for kind in kinds:
            plain = Training("plain", kind, seed)
            past = cache(lambda: healthy_past(plain))  # noqa: B023 (called within this round)
            for number, fault in enumerate(faults):
                block = 1 + (number + seed) % 2
                add(f"mid-{fault.name}-{kind}-{seed}", lambda: with_fault(past(), fault, block))  # noqa: B023 (called at once)
                if fault.from_start:
                    steps = LATE_STEPS if "bypassed_attention" in fault.named else START_STEPS
                    add(f"start-{fault.name}-{kind}-{seed}", lambda: from_start(plain, fault, block, steps))  # noqa: B023
            add(f"null-resumed-{kind}-{seed}", lambda: with_fault(past(), None, 0))  # noqa: B023
            for training in nulls(kind, seed):
                add(f"null-{training.name}-{kind}-{seed}", lambda: from_start(training, None, 0))  # noqa: B023
            add(f"overfit-{kind}-{seed}", lambda: from_start(Training("overfit", kind, seed, samples=32), None, 0))  # noqa: B023
    return done


def judged_again(run: Watched) -> Watched:
    """The same readings under the present rules."""
    judge = Judge(cm.DEFAULT_RULES)
    for snapshot in run.snapshots:
        judge.check(snapshot)
    start = run.planted or 0
    return replace(run, alerts=[alert for alert in judge.alerts if alert.step >= start])


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


def print_faults(done: list[Watched]) -> tuple[int, int, int]:
    """A line per fault; returns how many were named, located and planted."""
    total = [0, 0, 0]
    print(f"\n{'fault':34} {'runs':>4} {'named':>6} {'located':>8} {'alert':>6} {'lead':>6} {'silent':>7} {'unseen':>7}")
    for when in ("mid-run", "start"):
        for fault in FAULTS:
            here = [run for run in done if run.fault == fault.name and (run.planted != 0) == (when == "mid-run")]
            seen = [run for run in here if run.visible]
            if not here:
                continue
            told = [(run, first_alert(run)) for run in seen]
            named = [(run, alert) for run, alert in told if alert is not None and alert.rule in fault.named]
            located = [alert for run, alert in named if alert.layers and abs(alert.layers[0] - (run.block or 0)) <= 1]
            waits = [alert.step - (run.planted or 0) for run, alert in named]
            leads = [shown - alert.step for run, alert in named if (shown := loss_shows_it(run)) is not None]
            silent = sum(loss_shows_it(run) is None for run in seen) if when == "mid-run" else "-"
            total = [total[0] + len(named), total[1] + len(located), total[2] + len(seen)]
            wait, lead = (f"{median(values):.0f}" if values else "-" for values in (waits, leads))
            title = f"{fault.name} ({when})"
            print(f"{title:34} {len(seen):4} {len(named):6} {len(located):8} {wait:>6} {lead:>6} {silent:>7} {len(here) - len(seen):7}")
    return total[0], total[1], total[2]


def print_confusion(done: list[Watched]) -> None:
    """What was said first, for each fault."""
    print("\nconfusion: fault -> what was said first")
    for fault in FAULTS:
        said = Counter(
            alert.rule if (alert := first_alert(run)) is not None else "nothing" for run in done if run.fault == fault.name and run.visible
        )
        if said:
            print(f"  {fault.name:28} {', '.join(f'{name} {count}' for name, count in said.most_common())}")


def print_nulls(done: list[Watched]) -> tuple[int, int]:
    """A line for each kind of healthy run; returns warnings or worse, and checks."""
    healthy = [run for run in done if run.fault is None and run.training.name != "overfit"]
    print(f"\n{'healthy run':28} {'runs':>4} {'checks':>7} {'warnings per 1000':>18} {'notes per 1000':>15}")
    loud = checks = 0
    for name in dict.fromkeys(run.training.name for run in healthy):
        here = [run for run in healthy if run.training.name == name]
        looked = sum(len(run.snapshots) for run in here)
        firing = [alert for run in here for alert in run.alerts if alert.state == "firing"]
        bad = sum(alert.severity is not cm.Severity.INFO for alert in firing)
        loud, checks = loud + bad, checks + looked
        print(f"{name:28} {len(here):4} {looked:7} {1000 * bad / looked:18.2f} {1000 * (len(firing) - bad) / looked:15.2f}")
    fitted = [run for run in done if run.training.name == "overfit"]
    noticed = sum(any(alert.rule == "overfitting" for alert in run.alerts) for run in fitted)
    wrong = sum(alert.severity is not cm.Severity.INFO for run in fitted for alert in run.alerts if alert.state == "firing")
    print(f"\n32 samples: overfitting noted in {noticed} of {len(fitted)} runs, {wrong} warnings of a collapse")
    return loud, checks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", default="2,3", help="comma-separated (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder of kept runs")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.short:
        past = healthy_past(Training("plain", "gpt", seeds[0]))
        chosen = [fault for fault in FAULTS if fault.name in ("tokens to their mean", "gradient cut")]
        done = [with_fault(past, None, 0), *(with_fault(past, fault, 2) for fault in chosen)]
    else:
        done = runs(seeds, options.keep)
    print(f"\nseeds {', '.join(map(str, seeds))}; faults at step {PAST}, followed for {FUTURE} steps")
    named, located, planted = print_faults(done)
    print_confusion(done)
    loud, checks = print_nulls(done)
    print(f"\nnamed {named} of {planted}, located {located}; {loud} warnings in {checks} checks of healthy runs")


if __name__ == "__main__":
    main()
