"""Snapshots made up for tests: readings of a healthy model, with whatever a test wants to be otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from collapse_monitor.records import Alert, Evidence, Finding, Severity, Site, Snapshot

Per = float | Sequence[float]
"""One number for all layers, or one per layer."""

TOKENS = 64


def make_sites(layers: int = 4, heads: int = 2, cross: bool = False) -> tuple[Site, ...]:
    sites: list[Site] = []
    for layer in range(layers):
        sites.append(Site(f"blocks.{layer}", "block", layer))
        sites.append(Site(f"blocks.{layer}.attention", "attention", layer, heads, TOKENS, TOKENS, False, False, "sdpa"))
        if cross:
            sites.append(Site(f"blocks.{layer}.cross", "attention", layer, heads, TOKENS, TOKENS, False, True, "sdpa"))
    return tuple(sites)


def make_snapshot(
    step: int = 0,
    layers: int = 4,
    heads: int = 2,
    *,
    similarity: Per = 0.3,
    rank: Per = 30.0,
    contraction: Per = 0.9,
    nonfinite: Per = 0.0,
    uniformity: Per = 0.8,
    max_logit: Per = 5.0,
    logit_std: Per = 1.5,
    sink_mass: Per = 0.1,
    attainable: int = TOKENS,
    blocks: Mapping[str, Per] | None = None,
    attention: Mapping[str, Sequence[Sequence[float]]] | None = None,
    without: Iterable[str] = (),
    missing: Mapping[str, str] | None = None,
    cross: bool = False,
    context: Mapping[str, float] | None = None,
) -> Snapshot:
    """The residual follows from the similarity as for tokens of equal norm: res^2 = (1 - s)(n - 1)/n, exactly."""
    alike = _spread(similarity, layers)
    per_block: dict[str, Per] = {
        "token_similarity": alike,
        "relative_residual": [math.sqrt((1 - value) * (TOKENS - 1) / TOKENS) if value <= 1 else math.nan for value in alike],
        "effective_rank": rank,
        "contraction": contraction,
        "nonfinite": nonfinite,
        **(blocks or {}),
    }
    per_head = {"attention_uniformity": uniformity, "max_logit": max_logit, "logit_std": logit_std, "sink_mass": sink_mass}
    sites = make_sites(layers, heads, cross)
    kinds = [(site.layer, site.cross) for site in sites if site.kind == "attention"]
    maps = {name: [[_spread(values, layers)[layer]] * heads for layer, _ in kinds] for name, values in per_head.items()}
    maps.update({name: [list(row) for row in rows] for name, rows in (attention or {}).items()})
    left_out = set(without)
    return Snapshot(
        step=step,
        sites=sites,
        blocks={name: tuple(_spread(values, layers)) for name, values in per_block.items() if name not in left_out},
        attention={name: tuple(map(tuple, rows)) for name, rows in maps.items() if name not in left_out},
        missing=dict(missing or {}),
        attainable_rank=(attainable,) * layers,
        tokens=(float(TOKENS),) * layers,
        context=dict(context or {}),
    )


def make_alert(
    rule: str = "rank_collapse", step: int = 10, severity: Severity = Severity.CRITICAL, message: str = "tokens are alike"
) -> Alert:
    finding = Finding(
        phenomenon=rule,
        severity=severity,
        layers=(1, 2),
        since=step - 5,
        evidence=(Evidence("token_similarity", 0.999, 0.99, 0.3, (1, 2)),),
        causes=("a cause",),
        remedies=("a remedy", "another"),
        anchor=f"phenomena.md#{rule}",
    )
    return Alert(rule, "firing", severity, step, step - 5, (1, 2), "token_similarity", 0.999, 0.3, 0.99, message, finding)


def _spread(values: Per, layers: int) -> list[float]:
    return [float(values)] * layers if isinstance(values, int | float) else [float(value) for value in values]
