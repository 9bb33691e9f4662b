"""The diagnosis: every phenomenon that a snapshot or a history shows, told apart from what looks like it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from collapse_monitor.judge.catalogue import CATALOGUE
from collapse_monitor.judge.engine import Judge, without_echoes
from collapse_monitor.judge.episode import Episode, Layer
from collapse_monitor.judge.findings import compose_finding
from collapse_monitor.judge.history import History
from collapse_monitor.judge.rule import name_of
from collapse_monitor.judge.rules import DEFAULT_RULES
from collapse_monitor.judge.signs import signs
from collapse_monitor.records import Finding, Severity, Snapshot

ORDER = (
    "non_finite",
    "dead_tokens",
    "attention_sink",
    "massive_activation",
    "logit_explosion",
    "attention_entropy_collapse",
    "rank_collapse",
    "oversmoothing",
    "width_collapse",
    "uniform_attention",
    "single_column_attention",
    "head_redundancy",
    "attention_stagnation",
    "input_independent_attention",
    "dimensional_collapse",
    "bypassed_attention",
    "vanishing_gradient",
    "exploding_gradient",
    "overfitting",
)
"""First what spoils readings, then what explains others: numbers and masks, sinks and massive channels, logits and entropy, tokens, maps,
samples, and gradients last."""

ALONE = "one snapshot has no past to compare with: a note, no alarm"


def diagnose(source: Snapshot | History | Iterable[Snapshot]) -> list[Finding]:
    """What is wrong, or remarkable, in the last snapshot of `source`, the cause before its echoes.

    One snapshot is judged on absolute grounds alone: what needs a past to be wrong is then a note (`info`). Snapshots in order, or a
    history, are judged against the run's own past as well.

    Args:
        source: a snapshot (as `probe` returns it), the snapshots of a run in order, or the history of a judge.

    Returns:
        Findings in order of evaluation; empty when nothing is remarkable. Readings that a finding would have used and that were not
        taken are named in its `against`. `undecided` lists the phenomena that could not be looked for at all.

    Raises:
        ValueError: `source` is none of these.

    >>> diagnose([])
    []
    """
    if isinstance(source, Snapshot):
        return _found(source, History(), {}, alone=True)
    if isinstance(source, History):
        return [] if source.latest is None else _found(source.latest, source, {}, alone=False)
    if not isinstance(source, Iterable):
        raise ValueError(f"diagnose takes a snapshot, snapshots in order or a history, got a {type(source).__name__}")
    judge, last = Judge(DEFAULT_RULES), None
    for last in source:
        judge.check(last)
    return [] if last is None else _found(last, judge.history, judge.firing, alone=judge.history.checks == 1)


def undecided(snapshot: Snapshot) -> dict[str, str]:
    """Phenomenon -> why it could not be looked for: none of the readings that show it was taken.

    >>> undecided(Snapshot(0, (), {"token_similarity": (0.5,)}, {}))["vanishing_gradient"]
    'gradient_norm was not read'
    """
    told = {}
    for name, metric in _SHOWN_BY.items():
        values = snapshot.blocks.get(metric) or [head for heads in snapshot.attention.get(metric, ()) for head in heads]
        if all(math.isnan(value) for value in values):
            reason = snapshot.missing.get(metric)
            told[name] = f"{metric} was not read" + (f": {reason}" if reason else "")
    return told


def explain(findings: Iterable[Finding]) -> str:
    """Findings as text, a paragraph each."""
    return "\n\n".join(_paragraph(finding) for finding in findings) or "Nothing remarkable."


_SHOWN_BY = {
    "non_finite": "nonfinite",
    "dead_tokens": "dead_tokens",
    "attention_sink": "sink_mass",
    "massive_activation": "massive_activation",
    "logit_explosion": "max_logit",
    "attention_entropy_collapse": "attention_uniformity",
    "rank_collapse": "token_similarity",
    "oversmoothing": "token_similarity",
    "width_collapse": "stable_rank",
    "uniform_attention": "attention_uniformity",
    "single_column_attention": "dominant_column",
    "head_redundancy": "head_similarity",
    "attention_stagnation": "layer_similarity",
    "input_independent_attention": "input_dependence",
    "dimensional_collapse": "pooled_rank",
    "bypassed_attention": "branch_ratio",
    "vanishing_gradient": "gradient_norm",
    "exploding_gradient": "gradient_norm",
}


def _found(snapshot: Snapshot, history: History, known: Mapping[str, Mapping[Layer, Episode]], *, alone: bool) -> list[Finding]:
    """Rules first, `known` being what a judge has confirmed of them; signs add what a single snapshot shows."""
    episodes: dict[str, dict[Layer, Episode]] = {name: dict(firing) for name, firing in known.items()}
    if not known:
        for rule in DEFAULT_RULES:
            for condition in rule(snapshot, history):
                if condition.state == "fire":
                    _add(episodes, name_of(rule), Episode(snapshot.step, condition, severity=condition.severity))
    noted: set[tuple[str, Layer]] = set()
    for name, conditions in signs(snapshot, history).items():
        for condition in conditions:
            if condition.layer not in episodes.get(name, {}):
                noted.add((name, condition.layer))
            _add(episodes, name, Episode(snapshot.step, condition, severity=condition.severity))
    heard = without_echoes({name: episodes[name] for name in ORDER if name in episodes})
    findings = []
    for name in (*ORDER, *(other for other in heard if other not in ORDER)):
        if name not in heard:
            continue
        finding = compose_finding(name, heard[name], snapshot, history)
        heads = {condition.head for condition in signs(snapshot, history).get(name, []) if condition.head is not None}
        finding = replace(finding, heads=tuple(sorted({*finding.heads, *heads})), since=None if alone else finding.since)
        if alone and finding.severity is Severity.INFO and name in _NEED_A_PAST:
            finding = replace(finding, against=(ALONE, *finding.against))
        findings.append(finding)
    return findings


_NEED_A_PAST = (
    "uniform_attention",
    "single_column_attention",
    "head_redundancy",
    "attention_stagnation",
    "input_independent_attention",
    "bypassed_attention",
    "dimensional_collapse",
    "dead_tokens",
)


def _add(episodes: dict[str, dict[Layer, Episode]], name: str, episode: Episode) -> None:
    known = episodes.setdefault(name, {}).get(episode.last.layer)
    if known is None or (known.severity or Severity.INFO).rank < episode.last.severity.rank:
        episodes[name][episode.last.layer] = episode


def _paragraph(finding: Finding) -> str:
    where = f" in layers {', '.join(map(str, finding.layers))}" if finding.layers else ""
    since = "" if finding.since is None else f", since step {finding.since}"
    evidence = "; ".join(
        f"{one.metric} {one.value:.4g}"
        + ("" if one.baseline is None else f" (baseline {one.baseline:.4g})")
        + ("" if one.bound is None or math.isnan(one.bound) else f" (bound {one.bound:.4g})")
        for one in finding.evidence
    )
    phenomenon = CATALOGUE[finding.phenomenon]
    lines = [f"{finding.phenomenon} ({finding.severity}){where}{since}: {phenomenon.summary}", f"  Evidence: {evidence}."]
    lines += [f"  Note: {note}." for note in finding.notes]
    lines += [f"  Against it: {reason}." for reason in finding.against]
    lines += [f"  Next: {phenomenon.next_step}.", f"  Remedy: {finding.remedies[0]}. See {finding.anchor}"]
    return "\n".join(lines)
