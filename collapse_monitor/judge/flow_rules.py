"""Rules about what passes through a block: does its attention contribute, and do gradients come through in their size?"""

from __future__ import annotations

from collections.abc import Callable
from math import log

import numpy as np

from collapse_monitor.judge.history import History
from collapse_monitor.judge.readings import Mask, Values
from collapse_monitor.judge.relative import conditions, own
from collapse_monitor.judge.rule import told_while_firing
from collapse_monitor.judge.threshold import Level
from collapse_monitor.judge.thresholds import SIGMAS, TRANSIENT_CHECKS, TRANSIENT_STEPS, bound
from collapse_monitor.records import Condition, Severity, Snapshot


@told_while_firing
def bypassed_attention(snapshot: Snapshot, history: History) -> list[Condition]:
    """What attention adds to the stream has become nothing beside it. A note where that was so from the first step on."""
    now, normal = history.read(snapshot), history.baseline("branch_ratio")
    ratio = now.layer("branch_ratio")
    checks, steps = history.lasting("bypassed_attention", ratio <= bound("bypassed_attention.absolute", "fire"), snapshot.step)
    always = (checks >= TRANSIENT_CHECKS) & (steps >= TRANSIENT_STEPS)
    settled = history.steps(snapshot) >= TRANSIENT_STEPS

    def fallen(level: Level) -> Mask:
        drop = normal.beyond(ratio, -log(bound("bypassed_attention.drop", level)), SIGMAS)
        return drop & (ratio <= bound("bypassed_attention.ratio", level)) & settled

    def from_start(level: Level) -> Mask:
        return always & ~fallen(level)

    def limit(level: Level) -> float:
        return bound("bypassed_attention.ratio", level)

    def smallest(level: Level) -> float:
        return bound("bypassed_attention.absolute", level)

    near, usual = ratio <= limit("hold"), own(normal)
    return [
        *conditions("branch_ratio", ratio, near, fallen, limit, usual),
        *conditions("branch_ratio", ratio, always, from_start, smallest, usual, Severity.INFO),
    ]


@told_while_firing
def vanishing_gradient(snapshot: Snapshot, history: History) -> list[Condition]:
    """Gradients are lost on their way back: in one block, which is named, or a little in each.

    One block is named without a past, too, where it loses next to everything, and more than all others together.
    """
    history.watch("qk_to_v_gradient")
    now, normal = history.read(snapshot), history.baseline("gradient_gain")
    gain, share = now.layer("gradient_gain"), gradient_share(now.layer("gradient_norm"))
    near = (gain <= bound("vanishing_gradient.gain", "hold")) | (share <= bound("vanishing_gradient.cumulative", "hold"))
    collapsed = collapse_upstream(snapshot, history)
    gain_logs, share_logs = _logs(gain), _logs(share)

    def lost(level: Level) -> Mask:
        fallen = normal.beyond(gain, -log(bound("vanishing_gradient.drop", level)), SIGMAS)
        alone = (gain <= bound("vanishing_gradient.single", level)) & _most(-gain_logs, -share_logs)
        return ((fallen & (gain <= bound("vanishing_gradient.gain", level))) | alone) & ~collapsed

    def faded(level: Level) -> Mask:
        return ~lost(level).any() & (share <= bound("vanishing_gradient.cumulative", level)) & ~collapsed

    return _gradients(snapshot, history, "vanishing_gradient", near, lost, faded, gain)


@told_while_firing
def exploding_gradient(snapshot: Snapshot, history: History) -> list[Condition]:
    """Gradients grow on their way back: in one block, which is named, or a little in each."""
    now, normal = history.read(snapshot), history.baseline("gradient_gain")
    gain, share = now.layer("gradient_gain"), gradient_share(now.layer("gradient_norm"))

    near = (gain >= bound("exploding_gradient.gain", "hold")) | (share >= bound("exploding_gradient.cumulative", "hold"))
    gain_logs, share_logs = _logs(gain), _logs(share)

    def gained(level: Level) -> Mask:
        alone = (gain >= bound("exploding_gradient.single", level)) & _most(gain_logs, share_logs)
        risen = normal.beyond(gain, log(bound("exploding_gradient.rise", level)), SIGMAS)
        return (risen & (gain >= bound("exploding_gradient.gain", level))) | alone

    def grown(level: Level) -> Mask:
        return ~gained(level).any() & (share >= bound("exploding_gradient.cumulative", level))

    return _gradients(snapshot, history, "exploding_gradient", near, gained, grown, gain)


def gradient_share(norm: Values) -> Values:
    """Gradient norm of each layer over that of the last one."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share: Values = norm / norm[-1:]
    return np.where(np.isfinite(share), share, np.nan)


def _logs(values: Values) -> Values:
    with np.errstate(divide="ignore"):
        return np.log(values)


def _most(change: Values, total: Values) -> Mask:
    """Blocks that change the gradient by more, in the logarithm, than all blocks that change it the same way would have to share."""
    known = total[np.isfinite(total)]
    found: Mask = change > max(known.max(initial=0.0), 0.0) / 2
    return found


def collapse_upstream(snapshot: Snapshot, history: History) -> Mask:
    """Layers whose queries and keys alone have lost their gradient: their input is collapsed, their gradients do not vanish as such."""
    ratio = history.read(snapshot).layer("qk_to_v_gradient")
    normal = history.baseline("qk_to_v_gradient")
    fallen = normal.beyond(ratio, -log(bound("vanishing_gradient.qk_drop", "fire")), SIGMAS)
    low: Mask = fallen | (ratio <= bound("vanishing_gradient.qk_collapsed", "fire"))
    return low


def _gradients(
    snapshot: Snapshot,
    history: History,
    rule: str,
    near: Mask,
    in_one: Callable[[Level], Mask],
    in_all: Callable[[Level], Mask],
    gain: Values,
) -> list[Condition]:
    """Conditions on the gain of single blocks, and on the norm of layers that all blocks together have brought far off."""
    norm = history.read(snapshot).layer("gradient_norm")
    # The first block has no gain, but it is read.
    known = np.where(np.isnan(norm), np.nan, np.where(np.isnan(gain), 1, gain))
    usual, last = own(history.baseline("gradient_gain")), float(norm[-1]) if len(norm) else np.nan

    def limit(level: Level) -> float:
        return bound(f"{rule}.gain", level)

    found = conditions("gradient_gain", known, near, in_one, limit, usual, message=_IN_ONE[rule])
    if not near.any():
        return found
    gradual = conditions("gradient_norm", norm, near, in_all, lambda level: bound(f"{rule}.cumulative", level) * last, lambda _: None)
    return [*found, *(condition for condition in gradual if condition.state != "no_data")]


_IN_ONE = {
    "vanishing_gradient": "The gradient that this block passes back has lost its size: the layers before it stop learning",
    "exploding_gradient": "This block passes back a gradient many times larger than it is given: the layers before it are thrown about",
}
