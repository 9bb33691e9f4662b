"""From the moments of attention rows to readings: fp64 on the host, per sequence and head, nan where undefined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from collapse_monitor.measure.host import Array
from collapse_monitor.measure.rows import compared_rows


@dataclass(frozen=True, slots=True)
class Rows:
    """What is known of every row of one attention."""

    key_count: int
    length: Float[Array, "sequence head query"]  # norm; 0 for a dead row
    visible: Float[Array, "#sequence #head #query"]  # keys
    keys: Float[Array, "sequence head query"]  # visible ones; 0 for a dead row
    live: Bool[Array, "sequence head query"]
    finite: Bool[Array, "sequence head"]

    @classmethod
    def of(cls, moments: Mapping[str, Array], key_count: int) -> Rows:
        length = moments["length"].astype(np.float64)
        live = length > 0
        visible = moments["keys"][..., 0].astype(np.float64) if "keys" in moments else np.full((1, 1, 1), float(key_count))
        finite = np.asarray(np.isfinite(length).all(-1))
        if "entropy" in moments:  # a negative weight has entropy -inf
            finite = np.asarray(finite & np.isfinite(moments["entropy"]).all(-1))
        return cls(key_count, length, visible, np.where(live, visible, 0.0), live, finite)

    @property
    def readable(self) -> Bool[Array, "sequence head"]:
        return self.finite & (self.keys >= 2).any(-1)


def row_readings(
    moments: Mapping[str, Array], rows: Rows, previous: Rows | None, wanted: frozenset[str]
) -> dict[str, Float[Array, "sequence head"]]:
    """The wanted quantities, one value per sequence and head. Names are those of the functions in `collapse_monitor.metrics`."""
    with np.errstate(all="ignore"):
        values = {name: array.astype(np.float64) for name, array in moments.items()}
        sequences, heads, _ = rows.length.shape
        readings: dict[str, Array] = {}
        lively = np.maximum(rows.live.sum(-1), 1)
        readings["effective_keys"] = _mean(_divide(np.ones_like(rows.length), rows.length**2), rows.live)
        if "entropy" in values:
            choosing = rows.keys >= 2
            readings["attention_uniformity"] = _mean(values["entropy"] / np.log(np.maximum(rows.keys, 2)), choosing)
        if "largest_column" in values:
            readings["dominant_column"] = values["largest_column"] / lively
        if "sink" in values:
            readings["sink_mass"] = values["sink"]
        elif "sink_column" in values:
            readings["sink_mass"] = values["sink_column"] / lively
        if "distances" in values:
            readings["dobrushin"] = _dobrushin(values, rows)
        readings = {name: np.where(rows.readable, array, np.nan) for name, array in readings.items()}
        if "overlap" in values:
            readings["head_similarity"] = _head_similarity(values["overlap"], rows)
        if "with_previous" in values and previous is not None:
            readings["layer_similarity"] = _layer_similarity(values["with_previous"], rows, previous)
        if "entropy_of_mean" in values:
            readings["input_dependence"] = np.broadcast_to(_input_dependence(values, rows), (sequences, heads))
        if "logit_deviation" in values:
            readings |= _logits(values, rows)
        return {name: array for name, array in readings.items() if name in wanted}


def over_sequences(readings: Float[Array, sequence * rest]) -> Float[Array, "*rest"]:
    """The mean over sequences, nan left out; nan where all are."""
    known = ~np.isnan(readings)
    number = known.sum(0)
    return np.where(number > 0, np.where(known, readings, 0.0).sum(0) / np.maximum(number, 1), np.nan)


def _dobrushin(values: Mapping[str, Array], rows: Rows) -> Float[Array, "sequence head"]:
    """Half the largest distance between two rows that see at least half of the keys that any row sees."""
    sequences, heads, queries = rows.length.shape
    some = list(compared_rows(sequences * heads, queries))
    distances = values["distances"]
    if distances.ndim == 2:  # every live row sees every key, and a dead one would be invisible
        return np.where(rows.live[..., some].sum(-1) >= 2, distances / 2, np.nan)
    compared = (rows.live & (2 * rows.keys >= values["seen"][..., None]))[..., some]
    both = compared[..., :, None] & compared[..., None, :]
    return np.where(compared.sum(-1) >= 2, np.where(both, distances, 0.0).max((-2, -1)) / 2, np.nan)


def _head_similarity(overlap: Float[Array, "sequence head other"], rows: Rows) -> Float[Array, "sequence head"]:
    length = np.sqrt(np.diagonal(overlap, axis1=-2, axis2=-1))
    inverse = np.where(rows.readable & (length > 0), 1 / np.where(length > 0, length, 1.0), 0.0)
    cosines = overlap * inverse[..., :, None] * inverse[..., None, :]
    others = rows.readable.sum(-1, keepdims=True) - 1
    own = np.diagonal(cosines, axis1=-2, axis2=-1)
    readable = rows.readable & rows.finite.all(-1, keepdims=True) & (others >= 1)
    return np.where(readable, (cosines.sum(-1) - own) / np.maximum(others, 1), np.nan)


def _layer_similarity(products: Float[Array, "sequence head query"], rows: Rows, previous: Rows) -> Float[Array, "sequence head"]:
    """Where the masks of the two differ (a row sees another number of keys) layers cannot be compared."""
    both = rows.live & previous.live
    same_mask = (rows.visible == previous.visible).all()
    readable = rows.readable & previous.readable & both.any(-1) & same_mask
    return np.where(readable, _mean(_divide(products, rows.length * previous.length), both), np.nan)


def _input_dependence(values: Mapping[str, Array], rows: Rows) -> Float[Array, " head"]:
    """Entropy of the mean row less mean entropy, over rows whose visible keys are the same in all sequences."""
    sequences = len(rows.length)
    shared = np.asarray(rows.live.all(0))
    if "union" in values:  # a key set as large as the union of all is the union
        shared = np.asarray(shared & (rows.keys == values["union"]).all(0))
    divergence = np.maximum(values["entropy_of_mean"] - values["entropy"].mean(0), 0.0) / np.log(sequences)
    readable = rows.finite.all(0) & (shared & (rows.keys[0] >= 2)).any(-1)
    return np.where(readable, _mean(divergence, shared), np.nan)


def _logits(values: Mapping[str, Array], rows: Rows) -> dict[str, Float[Array, "sequence head"]]:
    peak, deviation = values["logit_peak"], values["logit_deviation"]
    keys = np.broadcast_to(rows.visible, peak.shape)
    # The deviation was taken over all keys, the invisible ones at the mean.
    deviation = deviation * np.sqrt(rows.key_count / np.maximum(keys, 1))
    seeing, choosing = keys >= 1, keys >= 2
    finite = (np.isfinite(peak) & np.isfinite(deviation) | ~seeing).all(-1)
    readable = finite & choosing.any(-1)
    largest = np.where(seeing, peak, -np.inf).max(-1)
    return {"max_logit": np.where(readable, largest, np.nan), "logit_std": np.where(readable, _mean(deviation, choosing), np.nan)}


def _mean(values: Float[Array, "*batch query"], counted: Bool[Array, "*batch query"]) -> Float[Array, "*batch"]:
    return np.where(counted, values, 0.0).sum(-1) / np.maximum(counted.sum(-1), 1)


def _divide(numerator: Array, denominator: Array) -> Array:
    return numerator / np.where(denominator == 0, 1.0, denominator)
