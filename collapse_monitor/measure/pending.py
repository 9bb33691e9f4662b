"""Numbers on their way to the host, and the snapshot they become."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from collapse_monitor.measure.demand import BLOCK_READS, GRADIENT_READS, PER_SITE_READS, WEIGHT_READS, Demand
from collapse_monitor.measure.evaluate import BlockEvaluation, BlockReadings
from collapse_monitor.measure.faults import Faults
from collapse_monitor.measure.heads import AttentionEvaluation, HeadReadings
from collapse_monitor.measure.pack import Parcel
from collapse_monitor.measure.ranks import average_over_ranks
from collapse_monitor.measure.reasons import Reasons
from collapse_monitor.measure.scalars import ScalarEvaluation, ScalarReadings
from collapse_monitor.measure.weights import WeightEvaluation, WeightReadings
from collapse_monitor.observation import Key
from collapse_monitor.records import Site, Snapshot


@dataclass(frozen=True, slots=True)
class Outline:
    """What a snapshot says beside its readings. `heard` are the keys of blocks and attentions that were observed."""

    step: int
    sites: Mapping[Key, Site]
    missing: Mapping[str, str]
    notes: tuple[str, ...]
    source: Literal["train", "probe"]
    context: Mapping[str, float]
    heard: frozenset[Key]
    refused: Mapping[Key, str]


_Evaluations = tuple[BlockEvaluation, AttentionEvaluation, ScalarEvaluation, WeightEvaluation]


class Pending:
    """The readings of one step while they travel.

    Attributes:
        bytes: size of what is copied to the host.
        copies: to the host in this step: one per device that took part.
    """

    def __init__(
        self,
        outline: Outline,
        demand: Demand,
        faults: Faults,
        parcel: Parcel,
        blocks: BlockEvaluation,
        attention: AttentionEvaluation,
        scalars: ScalarEvaluation,
        weights: WeightEvaluation,
    ) -> None:
        self._outline, self._demand, self._faults = outline, demand, faults
        self._parcel: Parcel | None = parcel
        self._evaluations: _Evaluations | None = (blocks, attention, scalars, weights)
        self._snapshot: Snapshot | None = None
        self.bytes, self.copies = parcel.bytes, parcel.copies

    @property
    def faults(self) -> list[tuple[str, BaseException]]:
        """What was raised while measuring, on the device or on the host: the first exception under each name."""
        return self._faults.raised

    def ready(self) -> bool:
        """Whether `snapshot` would not wait for the device."""
        return self._parcel is None or self._parcel.ready()

    def snapshot(self, across_ranks: bool = False) -> Snapshot:
        """The readings: waits for the copy, takes eigenvalues in fp64 on the host and averages. Worked out once.

        Args:
            across_ranks: average over all processes, one collective; all of them must ask for it at the same step.
        """
        if self._snapshot is None:
            snapshot = self._assemble()
            self._snapshot = average_over_ranks(snapshot) if across_ranks else snapshot
            self._parcel = self._evaluations = None
        return self._snapshot

    def _assemble(self) -> Snapshot:
        outline, parcel = self._outline, self._parcel
        assert parcel is not None
        assert self._evaluations is not None
        for_blocks, for_attention, for_scalars, for_weights = self._evaluations
        blocks = self._faults.attempt("block readings", lambda: for_blocks.read(parcel)) or BlockReadings()
        heads = self._faults.attempt("attention readings", lambda: for_attention.read(parcel)) or HeadReadings()
        scalars = self._faults.attempt("gradient readings", lambda: for_scalars.read(parcel)) or ScalarReadings()
        weights = self._faults.attempt("weight readings", lambda: for_weights.read(parcel)) or WeightReadings()
        per_block: dict[str, tuple[float, ...]] = {}
        per_head: dict[str, tuple[tuple[float, ...], ...]] = {}
        reasons = Reasons(outline.sites, outline.missing, self._faults)
        reasons.explain_sites(outline.heard, outline.refused)
        keys = {kind: [key for key, site in outline.sites.items() if site.kind == kind] for kind in ("block", "attention")}
        for metric in self._demand.metrics:
            if metric.reads in BLOCK_READS:
                found = blocks.values.get(metric.name, {}) | scalars.values.get(metric.name, {})
                per_block[metric.name] = tuple(found.get(key, math.nan) for key in keys["block"])
                reasons.explain(metric, keys["block"], found, scalars.refused if metric.reads in GRADIENT_READS else blocks.undefined)
            elif metric.reads in PER_SITE_READS:
                found = scalars.values.get(metric.name, {})
                per_head[metric.name] = tuple((found.get(key, math.nan),) for key in keys["attention"])
                unknown = for_scalars.unknown if metric.reads == "qv_weight_gradient" else {}
                reasons.explain(metric, keys["attention"], found, {**scalars.refused, **unknown})
            else:
                several = (weights if metric.reads in WEIGHT_READS else heads).values.get(metric.name, {})
                empty = {key: (math.nan,) * (heads.heads.get(key) or outline.sites[key].heads or 1) for key in keys["attention"]}
                per_head[metric.name] = tuple(several.get(key, empty[key]) for key in keys["attention"])
                reasons.explain(metric, keys["attention"], several, for_weights.unknown(metric.reads))
        return Snapshot(
            step=outline.step,
            sites=tuple(outline.sites.values()),
            blocks=per_block,
            attention=per_head,
            missing=reasons.missing,
            attainable_rank=tuple(blocks.attainable.get(key, 0) for key in keys["block"]),
            tokens=tuple(blocks.tokens.get(key, math.nan) for key in keys["block"]),
            context=dict(outline.context),
            notes=outline.notes,
            source=outline.source,
        )
