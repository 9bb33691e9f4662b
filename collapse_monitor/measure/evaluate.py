"""The blocks of one window: stacked and worked out when it closes, read when the numbers have reached the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float

from collapse_monitor.measure.demand import TOKENS, TRANSITIONS, Demand
from collapse_monitor.measure.faults import Faults
from collapse_monitor.measure.host import Array, Residuals, Shape, centred_rank, token_readings
from collapse_monitor.measure.host_rows import over_sequences
from collapse_monitor.measure.moments import Centred, centre_tokens, common_moments, output_moments, turning
from collapse_monitor.measure.pack import Pack, Parcel, Slot
from collapse_monitor.measure.pooled import PooledFeatures, valid_features
from collapse_monitor.measure.stack import PairStack, TokenStack, stack_pairs, stack_samples
from collapse_monitor.observation import BlockObservation, Key

Slots = dict[str, Slot]
_Place = tuple[int, int]  # number of the stack, place of the sample in it


@dataclass(frozen=True, slots=True)
class _Stacked:
    """Where the numbers of one stack lie."""

    shape: Shape
    sequences: int
    inputs: int
    common: Slots
    outputs: Slots
    own: Slots


@dataclass(frozen=True, slots=True)
class _Paired:
    """Where the numbers of one stack of inputs and outputs lie."""

    keys: tuple[Key, ...]
    sequences: int
    turning: Slot | None
    own: Slots


@dataclass(frozen=True, slots=True)
class _Pooled:
    """Where the numbers of one queue of features lie."""

    keys: tuple[Key, ...]
    shape: Shape
    moments: Slots
    own: dict[str, list[Slot | None]]


@dataclass(slots=True)
class BlockReadings:
    """By metric, one number per block that has one; how many tokens and directions each was read from; why some read nan."""

    values: dict[str, dict[Key, float]] = field(default_factory=dict)
    tokens: dict[Key, float] = field(default_factory=dict)
    attainable: dict[Key, int] = field(default_factory=dict)
    undefined: dict[Key, str] = field(default_factory=dict)


class BlockEvaluation:
    """Works out everything that is asked of blocks. Holds no sample once `launch` has returned."""

    def __init__(self, demand: Demand, faults: Faults, history: PooledFeatures | None) -> None:
        self._demand, self._faults = demand, faults
        self._history = history if demand.asks("features") else None
        self._stacks: list[_Stacked] = []
        self._pairs: list[_Paired] = []
        self._pooled: list[_Pooled] = []
        self._places: dict[int, _Place] = {}
        self._sides: dict[Key, tuple[int, int | None]] = {}
        self._sizes: dict[Key, tuple[int, int]] = {}

    def launch(self, blocks: Mapping[Key, BlockObservation], pack: Pack) -> None:
        """Start the work; a stack that fails is a fault named `block readings`, and its blocks have no values."""
        if self._history is not None:
            self._history.begin()
        with_inputs = self._demand.asks("transition")
        self._sides = {key: (id(block.output), None if block.input is None else id(block.input)) for key, block in blocks.items()}
        self._sizes = {key: (block.output.hidden.shape[1], block.output.hidden.shape[2]) for key, block in blocks.items()}
        if self._demand.asks("hidden", "transition", "features"):
            for stack in stack_samples(blocks, with_inputs):
                self._faults.attempt("block readings", partial(self._launch_stack, stack, blocks, pack))
        if with_inputs:
            for pair in stack_pairs(blocks):
                self._faults.attempt("block readings", partial(self._launch_pair, pair, pack))

    def _launch_stack(self, stack: TokenStack, blocks: Mapping[Key, BlockObservation], pack: Pack) -> None:
        centred = centre_tokens(stack.hidden(), stack.mask())
        common = {name: pack.add(tensor) for name, tensor in common_moments(centred).items()}
        outputs: Slots = {}
        own: Slots = {}
        first = stack.inputs * stack.sequences
        if stack.inputs < len(stack.samples):
            part = centred.part(first)
            outputs = {name: pack.add(tensor) for name, tensor in output_moments(part, self._demand.quantities(TOKENS)).items()}
            apart = self._demand.reading("hidden")
            hidden = stack.hidden()[first:] if apart else None
            for metric in apart:
                value = self._faults.attempt_metric(metric, (len(part.rows),), hidden, part.counted)
                if value is not None:
                    own[metric.name] = pack.add(value)
            if self._history is not None:
                self._launch_pooled(stack, part, blocks, pack)
        shape = Shape(stack.tokens, stack.dim, torch.finfo(stack.dtype).eps)
        for place, sample in enumerate(stack.samples):
            self._places[id(sample)] = (len(self._stacks), place)
        self._stacks.append(_Stacked(shape, stack.sequences, stack.inputs, common, outputs, own))

    def _launch_pair(self, pair: PairStack, pack: Pack) -> None:
        slot = pack.add(turning(*pair.hidden())) if "block_influence" in self._demand.quantities(TRANSITIONS) else None
        own: Slots = {}
        apart = self._demand.reading("transition")
        if apart:
            before, after = (centre_tokens(side, mask).counted for side, mask in zip(pair.hidden(), pair.masks(), strict=True))
            counted = before & after
            for metric in apart:
                value = self._faults.attempt_metric(metric, (len(counted),), *pair.hidden(), counted)
                if value is not None:
                    own[metric.name] = pack.add(value)
        self._pairs.append(_Paired(pair.keys, pair.inputs[0].hidden.shape[0], slot, own))

    def _launch_pooled(self, stack: TokenStack, centred: Centred, blocks: Mapping[Key, BlockObservation], pack: Pack) -> None:
        assert self._history is not None
        first_key = {id(block.output): key for key, block in reversed(list(blocks.items()))}
        keys = tuple(first_key[id(sample)] for sample in stack.samples[stack.inputs :])
        features = rearrange(centred.mean / centred.scale[:, None], "(block sequence) dim -> block sequence dim", sequence=stack.sequences)
        queue = self._history.push(keys, features)
        if queue.shape[1] < self._history.fewest:
            return
        moments: Slots = {}
        if "pooled_rank" in self._demand.together.values():
            kept, valid = valid_features(queue)
            rows = centre_tokens(kept, valid, keep_outliers=True)  # `kept` is a copy
            spectrum = output_moments(rows, frozenset({"effective_rank"}))
            moments = {name: pack.add(tensor) for name, tensor in (common_moments(rows) | {"gram": spectrum["gram"]}).items()}
        own: dict[str, list[Slot | None]] = {}
        for metric in self._demand.reading("features"):
            values = [self._faults.attempt_metric(metric, (), samples) for samples in queue]
            own[metric.name] = [None if value is None else pack.add(value) for value in values]
        self._pooled.append(_Pooled(keys, Shape(queue.shape[1], queue.shape[2], torch.finfo(stack.dtype).eps), moments, own))

    def read(self, parcel: Parcel) -> BlockReadings:
        """The numbers, once they have arrived."""
        readings = BlockReadings()
        bases, tokens = zip(*(self._read_stack(stack, parcel) for stack in self._stacks), strict=True) if self._stacks else ((), ())
        for key, (output, before) in self._sides.items():
            if output not in self._places:
                readings.tokens[key], readings.attainable[key] = self._sizes[key][0], min(self._sizes[key])
                continue
            number, place = self._places[output]
            stack, base = self._stacks[number], _sequences_of(bases[number], place, self._stacks[number].sequences)
            for name, means in tokens[number].items():
                readings.values.setdefault(name, {})[key] = float(means[place - stack.inputs])
            counts = np.where(base.finite, base.count, stack.shape.tokens)
            readings.tokens[key] = float(counts.mean())
            readings.attainable[key] = round(float(np.minimum(counts, stack.shape.dim).mean()))
            if not base.readable.any():
                readings.undefined[key] = _undefined(base)
            if "contraction" in self._demand.together.values() and before in self._places:
                number, place = self._places[before]
                into = _sequences_of(bases[number], place, self._stacks[number].sequences)
                for name, values in self._demand.of_quantities({"contraction": _contraction(into, base)}).items():
                    readings.values.setdefault(name, {})[key] = _average(values)
        for pair in self._pairs:
            self._read_pair(pair, bases, parcel, readings)
        for pooled in self._pooled:
            self._read_pooled(pooled, parcel, readings)
        return readings

    def _read_stack(self, stack: _Stacked, parcel: Parcel) -> tuple[Residuals, dict[str, Array]]:
        base = Residuals.of({name: parcel.read(slot) for name, slot in stack.common.items()})
        first = stack.inputs * stack.sequences
        if first == len(base.count):
            return base, {}
        moments = {name: parcel.read(slot) for name, slot in stack.outputs.items()}
        moments["peak"] = parcel.read(stack.common["peak"])[first:]
        quantities = token_readings(moments, base.part(first), stack.shape)
        values = self._demand.of_quantities(quantities) | {name: parcel.read(slot).astype(np.float64) for name, slot in stack.own.items()}
        return base, {name: over_sequences(array.reshape(-1, stack.sequences).T) for name, array in values.items()}

    def _read_pair(self, pair: _Paired, bases: Sequence[Residuals], parcel: Parcel, readings: BlockReadings) -> None:
        for place, key in enumerate(pair.keys):
            rows = slice(place * pair.sequences, (place + 1) * pair.sequences)
            for name, slot in pair.own.items():
                readings.values.setdefault(name, {})[key] = _average(parcel.read(slot)[rows])
            output, before = self._sides[key]
            if pair.turning is None or output not in self._places or before not in self._places:
                continue
            sides = [_sequences_of(bases[number], place, pair.sequences) for number, place in (self._places[before], self._places[output])]
            values = _influence(parcel.read(pair.turning)[rows].astype(np.float64), *sides)
            for name in self._demand.of_quantities({"block_influence": None}):
                readings.values.setdefault(name, {})[key] = _average(values)

    def _read_pooled(self, pooled: _Pooled, parcel: Parcel, readings: BlockReadings) -> None:
        per_sample: dict[str, Array] = {}
        if pooled.moments:
            ranks = centred_rank({name: parcel.read(slot) for name, slot in pooled.moments.items()}, pooled.shape)
            per_sample = self._demand.of_quantities({"pooled_rank": ranks})
        for name, slots in pooled.own.items():
            per_sample[name] = np.array([np.nan if slot is None else parcel.read(slot).item() for slot in slots])
        place = {self._sides[key][0]: index for index, key in enumerate(pooled.keys)}
        for key, (output, _) in self._sides.items():
            if output in place:
                for name, values in per_sample.items():
                    readings.values.setdefault(name, {})[key] = float(values[place[output]])


def _sequences_of(base: Residuals, place: int, sequences: int) -> Residuals:
    rows = slice(place * sequences, (place + 1) * sequences)
    return Residuals(*(getattr(base, name)[rows] for name in Residuals.__slots__))


def _undefined(base: Residuals) -> str:
    """Why no sequence of a block can be read."""
    if not base.finite.any():
        return "NaN or Inf in every sampled sequence"
    return "fewer than two tokens" if base.count.max() < 2 else "all values are zero"


def _average(values: Float[Array, " sequence"]) -> float:
    return float(over_sequences(values.astype(np.float64)))


def _contraction(before: Residuals, after: Residuals) -> Float[Array, " sequence"]:
    """nan where the input has nothing left to shrink."""
    if len(before.count) != len(after.count):
        return np.full(len(after.count), np.nan)
    left = before.relative
    return np.where(left > 0, after.relative / np.where(left > 0, left, 1.0), np.nan)


def _influence(turned: Float[Array, "sequence token"], before: Residuals, after: Residuals) -> Float[Array, " sequence"]:
    """Half the squared distance of directions, over tokens that count on both sides and are zero on neither."""
    compared = before.counted & after.counted & np.isfinite(turned)
    number = compared.sum(-1)
    mean = (np.where(compared, turned, 0.0) ** 2).sum(-1) / 2 / np.maximum(number, 1)
    return np.where(before.readable & after.readable & (number > 0), mean, np.nan)
