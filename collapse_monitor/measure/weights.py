"""The projections of the attention sites: read now and then, reduced on the device, finished on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from collapse_monitor.measure.demand import WEIGHTS, Demand
from collapse_monitor.measure.faults import Faults
from collapse_monitor.measure.host import Array
from collapse_monitor.measure.pack import Pack, Parcel, Slot
from collapse_monitor.measure.precision import gram, gram_in_parts, product
from collapse_monitor.measure.stack import LARGEST_STACK
from collapse_monitor.metrics import Reads
from collapse_monitor.observation import Key, WeightObservation, reason_against

SQUARINGS = 14
"""Power iteration begins with the power 2**14 of a small matrix: singular values closer than about 1e-4 are not told apart."""

ROUNDS = 3
"""Rounds of power iteration on the factors themselves after that; they take out what squaring the weights cost in digits."""

SINGULAR = 2e-9
"""Squared singular values below this share of the largest are rounding noise: the condition number is beyond 2e4, and reads inf."""

_Batch = list[tuple[Key, tuple[Tensor, ...]]]


@dataclass(frozen=True, slots=True)
class _Stacked:
    """Where the numbers of several sites of one shape lie."""

    keys: tuple[Key, ...]
    norms: Slot | None
    grams: tuple[Slot, Slot] | None
    own: dict[str, Slot]


@dataclass(slots=True)
class WeightReadings:
    """By metric, one number per head for every attention that has them."""

    values: dict[str, dict[Key, tuple[float, ...]]] = field(default_factory=dict)


class WeightEvaluation:
    """Works out what is asked of projections, in stacks of equal shape. Keeps no weight once `observe` has returned."""

    def __init__(self, demand: Demand, faults: Faults, pack: Pack) -> None:
        self._demand, self._faults, self._pack = demand, faults, pack
        self._wanted = demand.quantities(WEIGHTS)
        self._stacks: list[_Stacked] = []
        self._unknown: dict[Key, dict[Reads, str]] = {}

    def observe(self, found: Iterable[tuple[Key, WeightObservation]]) -> None:
        """Read the weights of these attentions; as few of them as possible are held at once."""
        batches: dict[object, _Batch] = {}
        for key, observation in found:
            self._unknown[key] = dict(observation.unknown)
            for reads, weights in _readable(observation, self._unknown[key]).items():
                if not self._demand.asks(reads):
                    continue
                likeness = (reads, *((weight.shape, weight.dtype, weight.device) for weight in weights))
                batch = batches.setdefault(likeness, [])
                batch.append((key, weights))
                if (len(batch) + 1) * sum(weight.numel() for weight in weights) > LARGEST_STACK:
                    self._reduce(reads, batches.pop(likeness))
        for (reads, *_), batch in batches.items():  # type: ignore[misc]
            self._reduce(reads, batch)

    def _reduce(self, reads: Reads, batch: _Batch) -> None:
        keys = tuple(key for key, _ in batch)
        weights = [side[0][None] if len(batch) == 1 else torch.stack(side) for side in zip(*(sides for _, sides in batch), strict=True)]
        own = {}
        for metric in self._demand.reading(reads):
            value = self._faults.attempt_metric(metric, tuple(weights[0].shape[:2]), *weights)
            if value is not None:
                own[metric.name] = self._pack.add(value)
        norms = grams = None
        wide = [_heads(weight) for weight in weights]
        if reads == "qk_weights" and "qk_spectral_norm" in self._wanted:
            norms = self._pack.add(rearrange(largest_logit(*wide), "(site head) -> site head", site=len(keys)))
        if reads == "value_weights" and "value_condition" in self._wanted:
            rows = wide[0] if wide[0].shape[1] <= wide[0].shape[2] else wide[0].mT
            coarse, fine = (self._pack.add(rearrange(part, "(s h) i j -> s h i j", s=len(keys))) for part in gram_in_parts(rows))
            grams = (coarse, fine)
        self._stacks.append(_Stacked(keys, norms, grams, own))

    def unknown(self, reads: Reads) -> dict[Key, str]:
        """By attention, why it has no reading of this kind."""
        return {key: reasons[reads] for key, reasons in self._unknown.items() if reads in reasons}

    def read(self, parcel: Parcel) -> WeightReadings:
        """The numbers, once they have arrived."""
        readings = WeightReadings()
        for stack in self._stacks:
            quantities: dict[str, Array] = {}
            if stack.norms is not None:
                quantities["qk_spectral_norm"] = parcel.read(stack.norms)
            if stack.grams is not None:
                coarse, fine = (parcel.read(slot).astype(np.float64) for slot in stack.grams)
                quantities["value_condition"] = condition(coarse + fine)
            values = self._demand.of_quantities(quantities) | {name: parcel.read(slot) for name, slot in stack.own.items()}
            for name, array in values.items():
                for key, per_head in zip(stack.keys, array.astype(np.float64).tolist(), strict=True):
                    readings.values.setdefault(name, {})[key] = tuple(per_head)
        return readings


def _readable(observation: WeightObservation, unknown: dict[Reads, str]) -> Mapping[Reads, tuple[Tensor, ...]]:
    """The weights each kind of metric is given; a reason for those that cannot be measured."""
    groups: dict[Reads, tuple[Tensor | None, ...]] = {
        "qk_weights": (observation.query, observation.key),
        "value_weights": (observation.value,),
    }
    readable: dict[Reads, tuple[Tensor, ...]] = {}
    for reads, group in groups.items():
        weights = tuple(weight for weight in group if weight is not None)
        if len(weights) < len(group):
            continue
        reason = next((reason for weight in weights if (reason := reason_against(weight, axes=3)) is not None), None)
        if reason is None and len({weight.shape[:2] for weight in weights}) > 1:
            reason = f"{[list(weight.shape) for weight in weights]}, of different heads"
        if reason is not None:
            unknown[reads] = f"its weights are {reason}"
        else:
            readable[reads] = weights
    return readable


def _heads(weight: Float[Tensor, "site head row column"]) -> Float[Tensor, "batch row column"]:
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return rearrange(wide, "site head row column -> (site head) row column")


def largest_logit(query: Float[Tensor, "batch head_dim dim"], key: Float[Tensor, "batch head_dim dim_k"]) -> Float[Tensor, " batch"]:
    """`qk_spectral_norm` in the precision of its arguments: powers of a head_dim x head_dim matrix, then rounds on the factors."""
    power = product(_unit(gram(query)), _unit(gram(key)))  # its eigenvalues go as the squared singular values
    for _ in range(SQUARINGS):
        power = _unit(power)
        power = product(power, power)
    longest = power.square().sum(-2).argmax(-1)
    right = _unit(product(key.mT, power.gather(-1, longest[:, None, None].expand(-1, power.shape[1], 1))))
    for _ in range(ROUNDS):
        left = _unit(product(query.mT, product(key, right)))
        right = _unit(product(key.mT, product(query, left)))
    return (product(query, left) * product(key, right)).sum((-2, -1)) * query.shape[1] ** -0.5


def _unit(matrix: Float[Tensor, "batch row column"]) -> Float[Tensor, "batch row column"]:
    norm = torch.linalg.matrix_norm(matrix, keepdim=True)
    return matrix / torch.where(norm == 0, torch.ones_like(norm), norm)


def condition(grams: Float[Array, "*head row row"]) -> Float[Array, "*head"]:
    """Largest over smallest singular value of matrices with these Gram matrices; inf beyond what they resolve, nan for zero and NaN."""
    finite = np.asarray(np.isfinite(grams).all((-2, -1)))
    spectrum = np.linalg.eigvalsh(np.where(finite[..., None, None], grams, 0))
    largest, smallest = spectrum[..., -1], spectrum[..., 0]
    readable = finite & (largest > 0)
    resolved = readable & (smallest > SINGULAR * largest)
    ratio = np.sqrt(np.divide(largest, smallest, out=np.full(largest.shape, math.inf), where=resolved))
    return np.where(readable, ratio, math.nan)
