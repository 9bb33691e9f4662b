"""Rules about samples and single tokens: do samples still differ, are tokens wasted, does the model learn by heart?"""

from __future__ import annotations

from math import isfinite, log

import numpy as np

from collapse_monitor.judge.history import History
from collapse_monitor.judge.readings import Mask
from collapse_monitor.judge.relative import always, conditions, own
from collapse_monitor.judge.rule import told_while_firing
from collapse_monitor.judge.threshold import Level
from collapse_monitor.judge.thresholds import OVERFIT_STEPS, SIGMAS, TRANSIENT_CHECKS, TRANSIENT_STEPS, bound
from collapse_monitor.records import Condition, Severity, Snapshot


@told_while_firing
def dimensional_collapse(snapshot: Snapshot, history: History) -> list[Condition]:
    """The sequence means of different samples have come to lie in a few directions. A note where they lie in one from the start."""
    normal = history.baseline("pooled_rank")
    rank = history.read(snapshot).layer("pooled_rank")
    settled = history.steps(snapshot) >= TRANSIENT_STEPS

    def found(level: Level) -> Mask:
        drop = normal.beyond(rank, -log(bound("dimensional_collapse.drop", level)), SIGMAS)
        return drop & (rank <= bound("dimensional_collapse.rank", level)) & settled

    def limit(level: Level) -> float:
        return bound("dimensional_collapse.rank", level)

    def one(level: Level) -> float:
        return bound("dimensional_collapse.absolute", level)

    return [
        *conditions("pooled_rank", rank, rank <= limit("hold"), found, limit, own(normal)),
        *always("dimensional_collapse", "pooled_rank", rank, rank <= one("fire"), found, one, snapshot, history, TRANSIENT_STEPS),
    ]


@told_while_firing
def dead_tokens(snapshot: Snapshot, history: History) -> list[Condition]:
    """A large share of the tokens has become zero or equal to another one. A note where that was so from the first step on."""
    normal = history.baseline("dead_tokens")
    share = history.read(snapshot).layer("dead_tokens")
    checks, steps = history.lasting("dead_tokens", share >= bound("dead_tokens.share", "fire"), snapshot.step)
    always = (checks >= TRANSIENT_CHECKS) & (steps >= min(TRANSIENT_CHECKS, TRANSIENT_STEPS))

    def risen(level: Level) -> Mask:
        return normal.beyond(share, bound("dead_tokens.rise", level), SIGMAS) & (share >= bound("dead_tokens.share", level))

    def from_start(level: Level) -> Mask:
        return always & ~risen(level)

    def limit(level: Level) -> float:
        return bound("dead_tokens.share", level)

    return [
        *conditions("dead_tokens", share, share >= limit("hold"), risen, limit, own(normal)),
        *conditions("dead_tokens", share, always, from_start, limit, own(normal), Severity.INFO),
    ]


def width_collapse(snapshot: Snapshot, history: History) -> list[Condition]:
    """One block of near-uniform attention has put next to all energy into one direction.

    No default rule, because models with small embeddings pass through it in their first steps: the diagnosis notes it.
    """
    now = history.read(snapshot)
    rank = now.layer("stable_rank")

    def found(level: Level) -> Mask:
        erased = now.layer("contraction") <= bound("width_collapse.contraction", level)
        uniform = now.layer("attention_uniformity") >= bound("width_collapse.uniformity", level)
        narrow: Mask = rank <= bound("width_collapse.stable_rank", level)
        return narrow & erased & uniform

    def limit(level: Level) -> float:
        return bound("width_collapse.stable_rank", level)

    usual = own(history.baseline("stable_rank"))
    return conditions("stable_rank", rank, rank <= limit("hold"), found, limit, usual, Severity.INFO)


@told_while_firing
def overfitting(snapshot: Snapshot, history: History) -> list[Condition]:
    """The validation loss rises while the training loss stays far below it. A note, and no collapse."""
    train, held_out = (history.logged(name, snapshot) for name in ("train_loss", "val_loss"))
    lowest = history.lowest("val_loss")
    if not isfinite(held_out) or not isfinite(train) or lowest is None or held_out <= 0:
        return []

    def apart(level: Level) -> bool:
        far = (held_out - train) / held_out >= bound("overfitting.gap", level)
        return far and held_out >= bound("overfitting.rise", level) * lowest

    # Validation on few samples jumps: it must stay up.
    checks, steps = history.lasting("overfitting", np.array([apart("hold")]), snapshot.step)
    lasting = bool(checks[0] >= TRANSIENT_CHECKS and steps[0] >= OVERFIT_STEPS)
    if not apart("hold") or not lasting:
        return []
    level: Level = "fire" if apart("fire") else "hold"
    return [Condition(None, "val_loss", held_out, bound("overfitting.rise", level) * lowest, lowest, level, Severity.INFO)]
