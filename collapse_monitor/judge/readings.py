"""One snapshot as arrays: per layer, per site and head. Each reading is converted once, however many rules ask for it."""

from __future__ import annotations

from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from collapse_monitor.judge.thresholds import bound
from collapse_monitor.records import Snapshot

Values: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Indices: TypeAlias = NDArray[np.int64]


class Readings:
    """The readings of one snapshot as float arrays, nan where missing.

    Attributes:
        step: of the snapshot.
        names: of all sites in order of entry.
        blocks: how many blocks there are.
        attainable: per block the largest rank that could have been read, nan where unknown.
        attention_layers: per attention site the block it runs in; -1 outside all blocks.
        self_attention_layers: the same, with -1 for cross attention too.

    >>> from collapse_monitor.records import Site
    >>> sites = (Site("block", "block", 0), Site("attention", "attention", 0, heads=2))
    >>> readings = Readings(Snapshot(0, sites, {}, {"attention_uniformity": ((0.5, 0.7),)}))
    >>> readings.layer("attention_uniformity").round(2), readings.heads("max_logit")
    (array([0.6]), array([[nan, nan]]))
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._layer: dict[str, Values] = {}
        self._heads: dict[str, Values] = {}
        attention = snapshot.attention_sites
        self.step = snapshot.step
        self.names = tuple(site.name for site in snapshot.sites)
        self.blocks = len(self.names) - len(attention)
        layers = [-1 if site.layer is None or site.layer >= self.blocks else site.layer for site in attention]
        self.attention_layers: Indices = np.array(layers, dtype=np.int64)
        self.self_attention_layers: Indices = np.where([bool(site.cross) for site in attention], -1, self.attention_layers)
        # The usual model: one self-attention in each block.
        self._one_each = layers == list(range(self.blocks)) and not any(site.cross for site in attention)
        self._width = max((site.heads or 0 for site in attention), default=0)
        known = len(snapshot.attainable_rank) == self.blocks
        ranks = np.array(snapshot.attainable_rank if known else (0,) * self.blocks, dtype=np.float64)
        self.attainable: Values = np.where(ranks > 0, ranks, np.nan)

    def layer(self, metric: str) -> Values:
        """`[layer]`; an attention metric is the mean over the heads of the block's self-attention.

        Four are derived: `rank_share` is rank over attainable, `selectivity` 1 - attention_uniformity,
        `dependent_share` input_dependence over that, and `gradient_gain` the norm of
        the gradient before a block (nan for the first) over that behind it.
        """
        if metric not in self._layer:
            self._layer[metric] = self._read_layer(metric)
        return self._layer[metric]

    def heads(self, metric: str) -> Values:
        """`[site, head]` in order of entry, padded with nan where a site has fewer heads than another."""
        if metric not in self._heads:
            self._heads[metric] = self._read_heads(metric)
        return self._heads[metric]

    def count(self, mask: Mask) -> Values:
        """How many entries of a `[site, head]` mask are true in the self-attention of each block."""
        return self._per_layer(mask.sum(axis=1))

    def _read_layer(self, metric: str) -> Values:
        if metric == "rank_share":
            return self.layer("effective_rank") / self.attainable
        if metric == "selectivity":
            return np.maximum(1 - self.layer("attention_uniformity"), 0)
        if metric == "dependent_share":
            selectivity = self.layer("selectivity")
            known = selectivity >= bound("map.least_selectivity", "fire")
            return np.divide(self.layer("input_dependence"), selectivity, out=np.full(self.blocks, np.nan), where=known)
        if metric == "gradient_gain":
            norm = self.layer("gradient_norm")
            with np.errstate(divide="ignore", invalid="ignore"):
                gain: Values = np.append(np.nan, norm[:-1])[: len(norm)] / norm
            return np.where(np.isfinite(gain) & np.isfinite(norm), gain, np.nan)
        if metric in self._snapshot.blocks:
            return np.array(self._snapshot.blocks[metric], dtype=np.float64)
        if metric not in self._snapshot.attention:
            return np.full(self.blocks, np.nan)
        heads = self.heads(metric)
        if self._one_each and self._width:
            mean: Values = np.add.reduce(heads, axis=1) / heads.shape[1]
            if not np.isnan(mean).any():
                return mean
        known = ~np.isnan(heads)
        total, count = self._per_layer(np.where(known, heads, 0).sum(axis=1)), self.count(known)
        return np.divide(total, count, out=np.full(self.blocks, np.nan), where=count > 0)

    def _read_heads(self, metric: str) -> Values:
        sites = len(self.attention_layers)
        rows = self._snapshot.attention.get(metric, ())
        lengths = set(map(len, rows))
        width = max(self._width, *lengths, 0)
        if lengths == {width}:
            return np.fromiter(chain.from_iterable(rows), np.float64, sites * width).reshape(sites, width)
        padded = np.full((sites, width), np.nan)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = row
        return padded

    def _per_layer(self, per_site: Values) -> Values:
        inside = self.self_attention_layers >= 0
        sums = np.bincount(self.self_attention_layers[inside], weights=per_site[inside], minlength=self.blocks)
        return sums.astype(np.float64)
