"""The projections of an attention as tensors: views of the model's own parameters wherever one weight is all there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from collapse_monitor.capture.plan import Projection, Projections, Strides, WeightSlice
from collapse_monitor.capture.tensors import is_readable
from collapse_monitor.metrics import Reads
from collapse_monitor.observation import WeightObservation

NEEDED: dict[Reads, tuple[str, ...]] = {
    "qk_weights": ("query", "key"),
    "value_weights": ("value",),
    "qv_weight_gradient": ("query", "value"),
}
"""The projections a metric needs, by what it reads."""


Gradient = Callable[[nn.Parameter], Tensor | None]


class Unreadable(Exception):
    """Why the weights of a known projection cannot be read now."""


def reasons_against(projections: Projections) -> dict[Reads, str]:
    """By what a metric reads, why it cannot be read here."""
    known = dict(projections.reasons)
    return {reads: known[roles[0] if roles[0] in known else roles[-1]] for reads, roles in NEEDED.items() if known.keys() & set(roles)}


def read_weights(model: nn.Module, projections: Projections) -> WeightObservation:
    """The weights that make q, k and v now; detached, and not to be changed."""
    known = dict(projections.reasons)
    tensors: dict[str, Tensor] = {}
    for role, parts in (("query", projections.query), ("key", projections.key), ("value", projections.value)):
        if role in known:
            continue
        try:
            tensors[role] = _joined([_weight(model, part) for part in parts])
        except Unreadable as reason:
            known[role] = str(reason)
    reasons = reasons_against(Projections(reasons=tuple(known.items())))
    return WeightObservation(tensors.get("query"), tensors.get("key"), tensors.get("value"), reasons)


def row_gradients(model: nn.Module, parts: Iterable[Projection], gradient_of: Gradient) -> list[Tensor]:
    """The gradients of the rows nearest to the attention, each row once; empty where none of them has a gradient.

    Raises:
        Unreadable: they are not held as plain tensors here.
    """
    found = []
    for part in parts:
        for term in part.terms:
            rows = term.factors[0]
            gradient = gradient_of(_parameter(model, rows.name))
            if gradient is not None:
                found.append(_part_of(gradient, rows, distinct=True))
    return found


def _weight(model: nn.Module, projection: Projection) -> Float[Tensor, "head row column"]:
    terms = []
    for term in projection.terms:
        factors = [_part_of(_parameter(model, factor.name), factor) for factor in term.factors]
        if len(factors) > 1 or term.scale != 1 or len(projection.terms) > 1:
            wide = torch.promote_types(factors[0].dtype, torch.float32)
            factors = [factor.to(wide) for factor in factors]
        product = reduce(torch.matmul, factors)
        terms.append(product if term.scale == 1 else product * term.scale)
    return terms[0] if len(terms) == 1 else sum(terms[1:], start=terms[0])


def _joined(parts: list[Tensor]) -> Float[Tensor, "head row column"]:
    if len(parts) > 1 and len({part.shape[1:] for part in parts}) > 1:
        raise Unreadable("its heads are of different size")
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _parameter(model: nn.Module, name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    try:
        tensor = getattr(model.get_submodule(owner), leaf)
    except AttributeError:
        raise Unreadable(f"the model has no {name} any more") from None
    if not isinstance(tensor, Tensor):
        raise Unreadable(f"{name} is no tensor any more")
    return tensor


def _part_of(whole: Tensor, part: WeightSlice, distinct: bool = False) -> Float[Tensor, "head row column"]:
    """A view of the part, of a gradient like of its parameter; `distinct` shows heads that share rows once, in any arrangement."""
    if not is_readable(whole) or tuple(whole.shape) != part.shape:
        raise Unreadable(f"{part.name} is sharded, quantised or of another shape than in the watched forward")
    axes = [tuple(step for step in axis if step[1] or not distinct) for axis in (part.head, part.row, part.column)]
    steps = [step for axis in axes for step in axis]
    if distinct and _count(tuple(steps)) == whole.numel():
        return whole  # each value once, in whatever order
    flat = whole.detach().reshape(-1)
    view = flat.as_strided([size for size, _ in steps], [stride for _, stride in steps], flat.storage_offset() + part.start)
    return view.reshape([_count(axis) for axis in axes])


def _count(axis: Strides) -> int:
    return math.prod(size for size, _ in axis)
