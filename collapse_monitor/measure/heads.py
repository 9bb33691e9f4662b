"""The attention sites of one window: reduced where they are heard, read when the numbers have reached the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collapse_monitor.measure.demand import ROWS, Demand
from collapse_monitor.measure.faults import Faults
from collapse_monitor.measure.host import Array
from collapse_monitor.measure.host_rows import Rows, over_sequences, row_readings
from collapse_monitor.measure.pack import Pack, Parcel, Slot
from collapse_monitor.measure.rows import Columns, PreviousRows, column_moments, row_moments
from collapse_monitor.metrics import Metric
from collapse_monitor.observation import AttentionObservation, Key


@dataclass(frozen=True, slots=True)
class _Site:
    """Where the numbers of one attention lie."""

    key: Key
    heads: int
    key_count: int
    previous: int | None
    moments: dict[str, Slot]
    own: dict[str, Slot]


LARGEST_KEPT = 2**24
"""Bytes of column sums and masks that may wait for the window to close; with more they are reduced at once."""


@dataclass(slots=True)
class HeadReadings:
    """By metric, one number per head for every attention that has them; and how many heads each attention has."""

    values: dict[str, dict[Key, tuple[float, ...]]] = field(default_factory=dict)
    heads: dict[Key, int] = field(default_factory=dict)


class AttentionEvaluation:
    """Keeps numbers only, and the rows of the last self-attention for the comparison with the next."""

    def __init__(self, demand: Demand, faults: Faults, pack: Pack) -> None:
        self._demand, self._faults, self._pack = demand, faults, pack
        self._wanted = demand.quantities(ROWS)
        self._compares = demand.asks("attention_pair")
        self._sites: list[_Site] = []
        self._previous: PreviousRows | None = None
        self._columns: dict[int, Columns] = {}
        self._joint: dict[int, tuple[int, dict[str, Slot]]] = {}

    def observe(self, key: Key, observation: AttentionObservation) -> None:
        """Reduce one attention."""
        _, heads, _, key_count = observation.weights.shape
        previous = self._previous if self._compares and self._previous is not None and self._previous.compares(observation) else None
        moments: dict[str, Slot] = {}
        rows = observation.weights
        if self._wanted:
            tensors, columns, rows = row_moments(observation, self._wanted, previous)
            moments = {name: self._pack.add(tensor) for name, tensor in tensors.items()}
            if columns is not None:
                self._columns[len(self._sites)] = columns
        own = {}
        for metric in self._demand.apart:
            value = self._apart(metric, observation, previous)
            if value is not None:
                own[metric.name] = self._pack.add(value)
        if self._compares and not observation.cross:
            self._previous = PreviousRows(rows, observation.same_rows, len(self._sites))
        self._sites.append(_Site(key, heads, key_count, None if previous is None else previous.index, moments, own))
        if sum(columns.bytes for columns in self._columns.values()) > LARGEST_KEPT:
            self._reduce_columns()

    def _apart(self, metric: Metric, observation: AttentionObservation, previous: PreviousRows | None) -> Tensor | None:
        """What a metric's own function says of one attention; None where there is nothing for it to read."""
        weights, visible = observation.weights, observation.visible
        sequences, heads = weights.shape[:2]
        given: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {"attention": ((sequences, heads), (weights, visible))}
        given["attention_batch"] = ((heads,), (weights, visible))
        if observation.logits is not None:
            given["logits"] = ((sequences, heads), (observation.logits, visible))
        if previous is not None:
            given["attention_pair"] = ((sequences, heads), (weights, previous.weights, visible))
        if metric.reads not in given:
            return None
        shape, arguments = given[metric.reads]
        return self._faults.attempt_metric(metric, shape, *arguments)

    def close(self) -> None:
        """Reduce what is left, and let go of the rows that were kept."""
        self._previous = None
        self._faults.attempt("attention readings", self._reduce_columns)

    def _reduce_columns(self) -> None:
        """Column sums and masks of all attentions of one shape together."""
        groups: dict[object, list[int]] = {}
        for index, columns in self._columns.items():
            groups.setdefault(columns.likeness, []).append(index)
        kept, self._columns = self._columns, {}
        for members in groups.values():
            first = kept[members[0]]
            masks = [columns.visible for columns in (kept[index] for index in members) if columns.visible is not None]
            sums = torch.stack([kept[index].sums for index in members])
            moments = column_moments(sums, torch.stack(masks) if masks else None, first.queries, self._wanted)
            slots = {name: self._pack.add(tensor) for name, tensor in moments.items()}
            self._joint |= {index: (place, slots) for place, index in enumerate(members)}

    def read(self, parcel: Parcel) -> HeadReadings:
        """The numbers, once they have arrived."""
        readings = HeadReadings()
        known: list[Rows | None] = []
        for index, site in enumerate(self._sites):
            moments = {name: parcel.read(slot) for name, slot in site.moments.items()}
            if index in self._joint:
                place, slots = self._joint[index]
                moments |= {name: parcel.read(slot)[place] for name, slot in slots.items()}
            rows = Rows.of(moments, site.key_count) if moments else None
            known.append(rows)
            values: dict[str, Array] = {name: parcel.read(slot).astype(np.float64) for name, slot in site.own.items()}
            if rows is not None:
                before = None if site.previous is None else known[site.previous]
                values |= self._demand.of_quantities(row_readings(moments, rows, before, self._wanted))
            readings.heads[site.key] = site.heads
            per_sequence = [name for name, array in values.items() if array.ndim == 2]
            if per_sequence:
                means = over_sequences(np.stack([values[name] for name in per_sequence], 1))
                values |= dict(zip(per_sequence, means, strict=True))
            for name, array in values.items():
                readings.values.setdefault(name, {})[site.key] = tuple(array.tolist())
        return readings
