"""Rules about the tokens of a block's output: have they become the same, are they becoming the same, are they numbers at all?"""

from __future__ import annotations

import numpy as np

from collapse_monitor.judge.history import History
from collapse_monitor.judge.readings import Mask, Values
from collapse_monitor.judge.rule import confirmed_after
from collapse_monitor.judge.threshold import Level
from collapse_monitor.judge.thresholds import GRADIENT_CHECKS, LEVELS, SAME_STREAM, SIGMAS, TRANSIENT_CHECKS, TRANSIENT_STEPS, bound
from collapse_monitor.records import Condition, Severity, Snapshot


def rank_collapse(snapshot: Snapshot, history: History) -> list[Condition]:
    """All tokens of a sequence have become the same, or span next to nothing.

    Alike tokens alone prove nothing: small models start with them, and every model passes through them while it first learns what all
    tokens share. They fire at once where one block erases what was left of the differences, or where the residual fell far below the
    own baseline; else only when they last. Low rank without alike tokens (all multiples of one direction) fires at once.
    """
    history.watch("relative_residual", "rank_share", "token_similarity")
    tokens = _Tokens(snapshot, history)
    hold = tokens.near("hold") | tokens.narrow("hold") | tokens.low("hold")
    near, narrow = tokens.near("fire"), tokens.narrow("fire")
    checks, steps = history.lasting("rank_collapse", (near | narrow) & tokens.lost(), snapshot.step)
    unread = np.isnan(tokens.gap) & np.isnan(tokens.rank)
    found = [_no_data(layer, "token_similarity", bound("rank_collapse.similarity", "fire")) for layer in _layers(unread)]
    if not hold.any():
        return found

    drop = history.baseline("relative_residual").beyond(tokens.residual, -np.log(bound("rank_collapse.residual_drop", "fire")), SIGMAS)
    fallen = _not_only_last(near & drop & tokens.settled)
    erased = near & np.logical_or.accumulate((near & tokens.erasing(near)) | tokens.culprit())
    multiples = narrow & (tokens.gap >= 1 - bound("rank_collapse.multiples", "fire"))
    sure = erased | fallen | multiples
    complete = tokens.residual <= bound("rank_collapse.complete_residual", "fire")
    lasting = (checks >= TRANSIENT_CHECKS) & (steps >= TRANSIENT_STEPS)
    lasting &= complete | _not_only_last(lasting)
    fire = sure | lasting | tokens.dropped("fire")
    hold = tokens.near("hold") | tokens.narrow("hold") | tokens.dropped("hold")
    critical = sure | (lasting & complete)
    for layer in _layers(fire | hold):
        level: Level = "fire" if fire[layer] else "hold"
        severity = Severity.CRITICAL if critical[layer] else Severity.WARNING
        if tokens.near(level)[layer]:
            found.append(_identical_tokens(layer, level, severity, tokens, history))
        else:
            found.append(_narrow_tokens(layer, level, severity, tokens, history))
    return found


def alike_tokens(snapshot: Snapshot, history: History) -> list[Condition]:
    """All tokens alike in one snapshot, though no block is the culprit: far more alike than at the network's input.

    `critical` where they are the same to three per mille, else a warning, since healthy models pass through this while they first learn.
    """
    tokens = _Tokens(snapshot, history)
    complete = tokens.residual <= bound("rank_collapse.complete_residual", "fire")
    alike = tokens.near("fire") & tokens.lost()
    return [
        _identical_tokens(layer, "fire", Severity.CRITICAL if complete[layer] else Severity.WARNING, tokens, history)
        for layer in _layers(alike if complete.any() else _not_only_last(alike))
    ]


def oversmoothing(snapshot: Snapshot, history: History) -> list[Condition]:
    """Tokens are becoming alike: a high similarity alone is no ground.

    Either it has risen far above the run's own baseline, or one block smooths far more than it used to, or one block behind others erases
    next to all differences that it is given.
    """
    history.watch("token_similarity", "contraction")
    now = history.read(snapshot)
    similarity, contraction = now.layer("token_similarity"), now.layer("contraction")
    found = [_no_data(layer, "token_similarity", bound("oversmoothing.similarity", "fire")) for layer in _layers(np.isnan(similarity))]
    if not (similarity >= bound("oversmoothing.partial_similarity", "hold")).any():
        return found
    limit = bound("oversmoothing.similarity", "fire")
    erased = np.zeros(len(similarity), dtype=bool)
    if ((similarity >= limit) & (contraction <= bound("rank_collapse.erased_before", "fire"))).any():
        erased = _Tokens(snapshot, history).culprit()
    found += [Condition(layer, "token_similarity", float(similarity[layer]), limit) for layer in _layers(erased)]
    if history.steps(snapshot) < TRANSIENT_STEPS:
        return found

    normal, before = history.baseline("token_similarity"), history.baseline("contraction")

    def risen(level: Level) -> Mask:
        change = normal.beyond(similarity, -np.log(bound("oversmoothing.gap_drop", level)), SIGMAS)
        return _not_only_last(change & (similarity >= bound("oversmoothing.similarity", level)))

    def smoothing(level: Level) -> Mask:
        if level == "fire" and not _above(similarity, history.least_recent("token_similarity")).any():
            return np.zeros(len(similarity), dtype=bool)
        # What fires is a jump against the last checks, and it holds for as long as it stands off the baseline.
        usual = (history.jump_from("token_similarity"), history.jump_from("contraction")) if level == "fire" else (normal, before)
        sigmas = bound("oversmoothing.sigmas", level)
        change = usual[0].beyond(similarity, -np.log(bound("oversmoothing.partial_drop", level)), sigmas)
        stronger = usual[1].beyond(contraction, -np.log(bound("oversmoothing.contraction_drop", level)), sigmas)
        if level == "fire":
            stronger &= _by_itself(-usual[1].shift(contraction))
        return _not_only_last(change & stronger & (similarity >= bound("oversmoothing.partial_similarity", level)))

    fire, hold = (risen(level) | smoothing(level) for level in LEVELS)
    high = similarity >= bound("oversmoothing.similarity", "hold")
    for layer in _layers((fire | hold) & ~erased):
        level: Level = "fire" if fire[layer] else "hold"
        limit = bound("oversmoothing.similarity" if high[layer] else "oversmoothing.partial_similarity", level)
        found.append(Condition(layer, "token_similarity", float(similarity[layer]), limit, normal.at(layer), level))
    return found


@confirmed_after(1)
def non_finite(snapshot: Snapshot, history: History) -> list[Condition]:
    """NaN or infinity in a block's output, at once; infinite gradients only when they stay, since gradient scalers provoke them."""
    now = history.read(snapshot)
    share = now.layer("nonfinite")
    limit = bound("non_finite.share", "fire")
    found = {
        layer: Condition(layer, "nonfinite", float(share[layer]), limit, severity=Severity.CRITICAL) for layer in _layers(share > limit)
    }
    for metric in ("gradient_norm", "parameter_gradient_norm"):
        recent = history.recent(metric)  # asked in any case: that starts keeping it
        if not np.isinf(now.layer(metric)).any():
            continue
        checks = [*(values for _, values in recent[1 - GRADIENT_CHECKS :]), now.layer(metric)]
        if len(checks) == GRADIENT_CHECKS and all(values.shape == share.shape for values in checks):
            for layer in _layers(np.asarray(np.isinf(checks).all(axis=0))):
                found.setdefault(layer, Condition(layer, metric, np.inf, np.inf))
    for layer in _layers(np.isnan(share)):
        found.setdefault(layer, _no_data(layer, "nonfinite", limit))
    return list(found.values())


class _Tokens:
    """The readings of one snapshot that bear on rank collapse, and what each bound says of them."""

    def __init__(self, snapshot: Snapshot, history: History) -> None:
        self._history = history
        now = history.read(snapshot)
        similarity, residual = now.layer("token_similarity"), now.layer("relative_residual")
        # Tokens of equal norm: 1 - similarity = relative_residual^2, up to n / (n - 1). One stands in for the other where it is missing.
        self.gap = np.where(np.isnan(similarity), residual**2, 1 - similarity)
        self.residual = np.where(np.isnan(residual), np.sqrt(np.maximum(self.gap, 0)), residual)
        self.similarity = similarity
        self.rank, self.share, self.attainable = now.layer("effective_rank"), now.layer("rank_share"), now.attainable
        self.ranked = self.attainable >= bound("rank_collapse.smallest_attainable_rank", "fire")
        self.settled = history.steps(snapshot) >= TRANSIENT_STEPS
        contraction = now.layer("contraction")
        with np.errstate(divide="ignore", invalid="ignore"):
            between = self.residual / np.append(np.nan, self.residual[:-1])[: len(self.residual)]
        self.contraction = np.where(np.isnan(contraction), between, contraction)

    def near(self, level: Level) -> Mask:
        """Alike in direction, and the spectrum agrees."""
        flat = self.ranked & (self.share > bound("rank_collapse.rank_share_of_similar", level))
        return ~flat & (self.gap <= 1 - bound("rank_collapse.similarity", level))

    def narrow(self, level: Level) -> Mask:
        """Fewer than two directions."""
        return self.ranked & (self.rank <= bound("rank_collapse.effective_rank", level))

    def low(self, level: Level) -> Mask:
        """A small share of the attainable rank."""
        return self.ranked & (self.share <= bound("rank_collapse.rank_share", level))

    def dropped(self, level: Level) -> Mask:
        """Rank low, and far below the own baseline."""
        drop = self._history.baseline("rank_share").beyond(self.share, -np.log(bound("rank_collapse.rank_drop", level)), SIGMAS)
        return _not_only_last(self.settled & self.low(level) & drop)

    def erasing(self, near: Mask) -> Mask:
        """Blocks that erase most of the differences between the tokens they are given."""
        strict = np.full(len(near), bound("rank_collapse.contraction", "fire"))
        edge = bound("rank_collapse.edge_contraction", "fire")
        strict[:1] = edge
        if not near[:-1].any():
            strict[-1:] = edge
        found = self.contraction <= strict
        # Nothing is known of the first block's input: alike outputs are put down to the block.
        found[:1] |= np.isnan(self.contraction[:1])
        return found

    def culprit(self) -> Mask:
        """Inner blocks that erase nearly all differences, though their own output is only nearly alike.

        The first block of a decoder is none: it is given other tokens than the block before it gave.
        """
        found = self.contraction <= bound("rank_collapse.erased_before", "fire")
        found &= self.gap <= 1 - bound("oversmoothing.similarity", "fire")
        found[:1] = False
        if found.any():
            with np.errstate(divide="ignore", invalid="ignore"):
                given = np.append(np.nan, (self.residual / self.contraction)[1:] / self.residual[:-1])
            # Nothing is left to divide where a block erases all: it is the culprit in any case.
            found &= np.isnan(given) | ((given > 1 / SAME_STREAM) & (given < SAME_STREAM))
        return found

    def lost(self) -> Mask:
        """Residual far below that of the first block's input, or of its output where the input is not known."""
        if not len(self.residual):
            return np.zeros(0, dtype=bool)
        first = self.contraction[0]
        entry = self.residual[0] / first if first > 0 else np.inf if first == 0 else self.residual[0]
        return self.residual <= bound("rank_collapse.lost_residual", "fire") * entry


def _identical_tokens(layer: int, level: Level, severity: Severity, tokens: _Tokens, history: History) -> Condition:
    limit = bound("rank_collapse.similarity", level)
    metric, value = "token_similarity", tokens.similarity[layer]
    if np.isnan(value):
        metric, value, limit = "relative_residual", tokens.residual[layer], (1 - limit) ** (1 / 2)
    return Condition(layer, metric, float(value), limit, history.baseline(metric).at(layer), level, severity)


def _narrow_tokens(layer: int, level: Level, severity: Severity, tokens: _Tokens, history: History) -> Condition:
    attainable = float(tokens.attainable[layer])
    share = history.baseline("rank_share").at(layer)
    baseline = None if share is None else share * attainable
    limit = bound("rank_collapse.effective_rank", level)
    if baseline is not None and not tokens.narrow(level)[layer]:
        limit = min(bound("rank_collapse.rank_share", level) * attainable, baseline / bound("rank_collapse.rank_drop", level))
    message = "The tokens of a sequence span next to no directions, though they are not all the same"
    return Condition(layer, "effective_rank", float(tokens.rank[layer]), limit, baseline, level, severity, message=message)


def _not_only_last(found: Mask) -> Mask:
    """Nothing, where the last block is the only one found."""
    return found if found[:-1].any() else np.zeros_like(found)


def _above(similarity: Values, least: Values | None) -> Mask:
    """Where one block may have begun to smooth: what stands this far off most of the last checks stands as far off the least of them."""
    if least is None or least.shape != similarity.shape:
        return np.zeros(similarity.shape, dtype=bool)
    found: Mask = (1 - similarity) * bound("oversmoothing.partial_drop", "fire") <= 1 - least
    return found


def _by_itself(change: Values) -> Mask:
    """Layers whose change is far larger than that of every layer before them: what comes with the data shows from the first layer on.

    Layers behind follow the one that changed, so they are no measure; the first one, with none before it, is held against all others.
    """
    known = np.maximum(np.nan_to_num(change), 0)
    if not len(known):
        return np.zeros(0, dtype=bool)
    before = np.append(known[1:].max(initial=0.0), np.maximum.accumulate(known)[:-1])
    found: Mask = (known > 0) & (known >= bound("oversmoothing.by_itself", "fire") * before)
    return found


def _no_data(layer: int, metric: str, limit: float) -> Condition:
    return Condition(layer, metric, np.nan, limit, state="no_data")


def _layers(mask: Mask) -> list[int]:
    return [int(layer) for layer in np.flatnonzero(mask)]
