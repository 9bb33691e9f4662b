"""Norms of gradients and of branches: one number each, worked out at once, so that no gradient is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from collapse_monitor.measure.demand import Demand
from collapse_monitor.measure.faults import Faults
from collapse_monitor.measure.pack import Pack, Parcel, Slot
from collapse_monitor.observation import Key, reason_against

_Norms = list[tuple[Slot, int]]
"""Norms to be joined: the slot of a tensor of norms and the place in it."""


@dataclass(slots=True)
class ScalarReadings:
    """By metric, one number per block or attention that has one; `refused` says why others have none."""

    values: dict[str, dict[Key, float]] = field(default_factory=dict)
    refused: dict[Key, str] = field(default_factory=dict)


class ScalarEvaluation:
    """Everything that is one number per site. Norms are formed in fp32; the loss scale is taken off on the host."""

    def __init__(self, demand: Demand, faults: Faults, pack: Pack, loss_scale: float) -> None:
        self._demand, self._faults, self._pack, self._loss_scale = demand, faults, pack, loss_scale
        self._norms: dict[str, dict[Key, tuple[_Norms, float]]] = {}
        self._ratios: dict[str, dict[Key, tuple[_Norms, _Norms]]] = {}
        self._own: dict[str, dict[Key, Slot]] = {}
        self._waiting: dict[Key, dict[str, tuple[Slot | None, Tensor | None]]] = {}
        self._refused: dict[Key, str] = {}
        self.unknown: dict[Key, str] = {}

    def branch(self, key: Key, branch: Tensor, stream: Tensor) -> None:
        """The operands of an addition."""
        if self._refuses(key, branch, stream):
            return
        if self._wants("branch_ratio"):
            self._ratios.setdefault("branch_ratio", {})[key] = (self._norm(branch), self._norm(stream))
        self._apart(key, "branch", branch, stream)

    def gradient(self, key: Key, gradient: Tensor) -> None:
        """The gradient at a block's output."""
        if self._refuses(key, gradient):
            return
        if self._wants("gradient_norm"):
            self._norms.setdefault("gradient_norm", {})[key] = (self._norm(gradient), self._loss_scale)
        self._apart(key, "gradient", gradient, scale=self._loss_scale)

    def qv_gradient(self, key: Key, role: str, gradient: Tensor) -> None:
        """The gradient at q or v; a ratio needs both."""
        if role not in ("q", "v") or self._refuses(key, gradient):
            return
        slot = self._norm(gradient)[0][0] if self._wants("qk_to_v_gradient") else None
        kept = gradient if self._demand.reading("qv_gradient") else None  # only a metric of the user's own needs the values
        sides = self._waiting.setdefault(key, {})
        sides[role] = (slot, kept)
        if len(sides) < 2:
            return
        (query, query_kept), (value, value_kept) = sides["q"], sides["v"]
        if query is not None and value is not None:
            self._ratios.setdefault("qk_to_v_gradient", {})[key] = ([(query, 0)], [(value, 0)])
        if query_kept is not None and value_kept is not None:
            self._apart(key, "qv_gradient", query_kept, value_kept, scale=self._loss_scale)
        self._waiting[key] = {name: (slot, None) for name, (slot, _) in sides.items()}

    def parameters(
        self, gradients: Mapping[Key, Sequence[Tensor]], qv: Mapping[Key, tuple[Sequence[Tensor], Sequence[Tensor]]], loss_scale: float
    ) -> None:
        """The gradients of parameters: those of blocks, and those of the weights that made q and v."""
        groups: dict[tuple[Key, str], Sequence[Tensor]] = {}
        if self._wants("parameter_gradient_norm"):
            groups |= {(key, "block"): tensors for key, tensors in gradients.items()}
        if self._wants("qk_to_v_weight_gradient"):
            groups |= {(key, role): tensors for key, pair in qv.items() for role, tensors in zip("qv", pair, strict=True)}
        places = self._norms_of(groups)
        self._norms["parameter_gradient_norm"] = {key: (found, loss_scale) for (key, role), found in places.items() if role == "block"}
        both = (key for key, role in places if role == "q" and (key, "v") in places)
        self._ratios["qk_to_v_weight_gradient"] = {key: (places[key, "q"], places[key, "v"]) for key in both}
        for key, tensors in gradients.items():
            self._apart(key, "parameter_gradients", list(tensors), scale=loss_scale)
        for key, (query, value) in qv.items():
            if self._demand.reading("qv_weight_gradient") and query and value:
                joined = (torch.cat([tensor.reshape(-1) for tensor in side]) for side in (query, value))
                self._apart(key, "qv_weight_gradient", *joined, scale=loss_scale)

    def close(self) -> None:
        """Let go of gradients whose other half never came."""
        self._waiting.clear()

    def read(self, parcel: Parcel) -> ScalarReadings:
        """The numbers, once they have arrived."""
        readings = ScalarReadings(refused=dict(self._refused))
        for quantity, norms in self._norms.items():
            values = {key: _joined(parcel, found) / scale for key, (found, scale) in norms.items()}
            for name in self._demand.of_quantities({quantity: None}):
                readings.values[name] = values
        for quantity, ratios in self._ratios.items():
            values = {key: _ratio(_joined(parcel, above), _joined(parcel, below)) for key, (above, below) in ratios.items()}
            for name in self._demand.of_quantities({quantity: None}):
                readings.values[name] = values
        for name, slots in self._own.items():
            readings.values[name] = {key: float(parcel.read(slot)) for key, slot in slots.items()}
        return readings

    def _wants(self, quantity: str) -> bool:
        return quantity in self._demand.together.values()

    def _refuses(self, key: Key, *tensors: Tensor) -> bool:
        reason = next((reason for reason in map(reason_against, tensors) if reason is not None), None)
        if reason is not None:
            self._refused.setdefault(key, reason)
        return reason is not None

    def _norm(self, tensor: Tensor) -> _Norms:
        return [(self._pack.add(torch.linalg.vector_norm(tensor, dtype=_sum_dtype(tensor.dtype))), 0)]

    def _norms_of(self, groups: Mapping[tuple[Key, str], Sequence[Tensor]]) -> dict[tuple[Key, str], _Norms]:
        """The norm of every tensor, by one fused call per device and dtype."""
        batches: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        owners: dict[tuple[Key, str], list[tuple[tuple[torch.device, torch.dtype], int]]] = {}
        for owner, tensors in groups.items():
            filled = [tensor for tensor in tensors if tensor.is_sparse or tensor.numel() > 0]
            if self._refuses(owner[0], *filled):
                continue
            for tensor in filled:
                batch = batches.setdefault((tensor.device, tensor.dtype), [])
                owners.setdefault(owner, []).append(((tensor.device, tensor.dtype), len(batch)))
                batch.append(tensor)
        slots = {
            kind: self._pack.add(torch.stack(torch._foreach_norm(batch, 2, dtype=_sum_dtype(kind[1])))) for kind, batch in batches.items()
        }
        return {owner: [(slots[kind], place) for kind, place in found] for owner, found in owners.items()}

    def _apart(self, key: Key, reads: str, *arguments: Tensor | list[Tensor], scale: float = 1.0) -> None:
        """Metrics with a function of their own; they are given gradients of the unscaled loss."""
        for metric in self._demand.apart:
            if metric.reads != reads:
                continue
            plain = [_unscaled(argument, scale) for argument in arguments]
            value = self._faults.attempt_metric(metric, (), *plain)
            if value is not None:
                self._own.setdefault(metric.name, {})[key] = self._pack.add(value)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """fp32 for half precisions; torch refuses to narrow fp64."""
    return None if dtype == torch.float64 else torch.float32


def _unscaled(tensors: Tensor | list[Tensor], scale: float) -> Tensor | list[Tensor]:
    if scale == 1.0:
        return tensors
    return [tensor / scale for tensor in tensors] if isinstance(tensors, list) else tensors / scale


def _joined(parcel: Parcel, norms: _Norms) -> float:
    """The norm of several tensors together; nan for NaN, Inf or none."""
    values = np.array([parcel.read(slot).reshape(-1)[place] for slot, place in norms], dtype=np.float64)
    joined = float(np.sqrt((values**2).sum()))
    return joined if len(values) and np.isfinite(joined) else np.nan


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else np.nan
