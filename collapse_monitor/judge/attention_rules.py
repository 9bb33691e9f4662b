"""Rules about a block's attention: has it become one-hot, have its logits left the range that softmax and bf16 can carry?"""

from __future__ import annotations

import numpy as np

from collapse_monitor.judge.baseline import Baseline
from collapse_monitor.judge.history import History
from collapse_monitor.judge.readings import Mask, Values
from collapse_monitor.judge.threshold import Level
from collapse_monitor.judge.thresholds import LEVELS, SIGMAS, bound
from collapse_monitor.records import Condition, Severity, Snapshot


def attention_entropy_collapse(snapshot: Snapshot, history: History) -> list[Condition]:
    """Half of a block's heads or more have become one-hot, driven by large logits.

    A single sharp head is how healthy models point, and a head that parks on the first tokens is a sink: neither counts.
    Cross attention is left out, since it learns alignments.
    """
    history.watch_heads("attention_uniformity")
    now = history.read(snapshot)
    uniformity, layers = now.heads("attention_uniformity"), now.self_attention_layers
    known = ~np.isnan(uniformity) & (layers >= 0)[:, None]
    heads = now.count(known)
    attending = sorted({int(layer) for layer in layers if layer >= 0})
    limit = bound("attention_entropy_collapse.uniformity", "fire")
    found = [_no_data(layer, "attention_uniformity", limit) for layer in attending if not heads[layer]]
    if not (known & (uniformity <= bound("attention_entropy_collapse.uniformity", "hold"))).any():
        return found

    spread, sink = now.heads("logit_std"), now.heads("sink_mass")
    normal = history.head_baseline("attention_uniformity")

    def sharp(level: Level) -> tuple[Mask, Mask]:
        parked = sink >= bound("attention_entropy_collapse.sink_mass", level)
        driven = known & np.where(np.isnan(spread), ~parked, spread >= bound("attention_entropy_collapse.logit_std", level))
        one_hot = driven & (uniformity <= bound("attention_entropy_collapse.one_hot", level))
        fallen = normal.beyond(uniformity, -np.log(bound("attention_entropy_collapse.uniformity_drop", level)), SIGMAS)
        low = driven & fallen & (uniformity <= bound("attention_entropy_collapse.uniformity", level))
        return one_hot, one_hot | low

    levels = {level: sharp(level) for level in LEVELS}
    needed = {level: np.maximum(bound("attention_entropy_collapse.share_of_heads", level) * heads, 1) for level in LEVELS}
    states = {level: now.count(levels[level][1]) >= needed[level] for level in LEVELS}
    for layer in attending:
        if states["fire"][layer] or states["hold"][layer]:
            level: Level = "fire" if states["fire"][layer] else "hold"
            here = (layers == layer)[:, None]
            one_hot, affected = (mask & here for mask in levels[level])
            found.append(_sharp_heads(layer, level, uniformity, normal, one_hot, affected, int(heads[layer])))
    return found


def logit_explosion(snapshot: Snapshot, history: History) -> list[Condition]:
    """Attention logits have left the range in which softmax selects: large and risen far above the own baseline, or beyond all bounds."""
    history.watch_heads("max_logit")
    now = history.read(snapshot)
    logits, layers = now.heads("max_logit"), now.attention_layers
    unread = np.isnan(logits).all(axis=1)
    blind = sorted(set(layers[unread]) - set(layers[~unread]) - {-1})
    found = [_no_data(int(layer), "max_logit", bound("logit_explosion.max_logit", "fire")) for layer in blind]
    if not (logits >= bound("logit_explosion.max_logit", "hold")).any():
        return found

    spread, normal = now.heads("logit_std"), history.head_baseline("max_logit")

    def exploded(level: Level) -> tuple[Mask, Mask, Mask]:
        risen = normal.beyond(logits, np.log(bound("logit_explosion.rise", level)), SIGMAS)
        varied = ~(spread < bound("logit_explosion.logit_std", level))
        large, huge = (logits >= bound(f"logit_explosion.{name}", level) for name in ("critical", "diverged"))
        critical = (risen & large) | (varied & huge)
        return critical, risen, critical | (risen & (logits >= bound("logit_explosion.max_logit", level))) | (varied & large)

    levels = {level: exploded(level) for level in LEVELS}
    # Attention outside all blocks has no layer (-1 here).
    states = {level: set(layers[levels[level][2].any(axis=1)]) for level in LEVELS}
    for layer in sorted(states["fire"] | states["hold"]):
        level: Level = "fire" if layer in states["fire"] else "hold"
        critical, risen, affected = levels[level]
        worst = np.argmax(np.where(affected & (layers == layer)[:, None], logits, -np.inf))
        site, head = (int(index) for index in np.unravel_index(worst, logits.shape))
        name = "logit_explosion.max_logit" if risen[site, head] else "logit_explosion.critical"
        found.append(
            Condition(
                layer=int(layer) if layer >= 0 else None,
                metric="max_logit",
                value=float(logits[site, head]),
                bound=bound(name, level),
                baseline=normal.at(site, head),
                state=level,
                severity=Severity.CRITICAL if critical[site, head] else Severity.WARNING,
                head=head,
            )
        )
    return found


def _sharp_heads(layer: int, level: Level, uniformity: Values, normal: Baseline, one_hot: Mask, affected: Mask, heads: int) -> Condition:
    """One condition for the affected heads of a layer: their mean value and baseline, and the head if there is only one."""
    extreme = int(one_hot.sum())
    critical = extreme > 1 and extreme >= bound("attention_entropy_collapse.critical_share", level) * heads
    baselines = normal.value[affected] if normal.mean.shape == affected.shape else np.array([np.nan])
    name = "one_hot" if extreme == affected.sum() else "uniformity"
    return Condition(
        layer=layer,
        metric="attention_uniformity",
        value=float(uniformity[affected].mean()),
        bound=bound(f"attention_entropy_collapse.{name}", level),
        baseline=None if np.isnan(baselines).all() else float(baselines[~np.isnan(baselines)].mean()),
        state=level,
        severity=Severity.CRITICAL if critical else Severity.WARNING,
        head=int(np.argwhere(affected)[0, 1]) if affected.sum() == 1 else None,
    )


def _no_data(layer: int, metric: str, limit: float) -> Condition:
    return Condition(layer, metric, np.nan, limit, state="no_data")
