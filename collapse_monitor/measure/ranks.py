"""Readings of several processes as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collapse_monitor.records import Snapshot


def average_over_ranks(snapshot: Snapshot) -> Snapshot:
    """The mean of every reading over all processes, nan left out: one collective of a length that sites and metrics fix.

    Does nothing without a process group of two or more. All processes must call it at the same step. Of an attention whose site does
    not know its heads only the first is averaged: the others may not exist elsewhere.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return snapshot
    return rebuild(snapshot, mean_over_ranks(flatten(snapshot)))


def flatten(snapshot: Snapshot) -> list[float]:
    """Every reading of a snapshot in an order that sites and metrics fix."""
    widths = _widths(snapshot)
    return [
        *(value for series in snapshot.blocks.values() for value in series),
        *snapshot.tokens,
        *(
            value
            for sites in snapshot.attention.values()
            for heads, width in zip(sites, widths, strict=True)
            for value in _padded(heads, width)
        ),
    ]


def rebuild(snapshot: Snapshot, values: Iterable[float]) -> Snapshot:
    """The inverse of `flatten`: the snapshot with these readings in place of its own."""
    widths, rest = _widths(snapshot), iter(values)
    blocks = {name: tuple(_take(rest, len(series))) for name, series in snapshot.blocks.items()}
    tokens = tuple(_take(rest, len(snapshot.tokens)))
    attention = {
        name: tuple((*_take(rest, width)[: len(heads)], *heads[width:]) for heads, width in zip(sites, widths, strict=True))
        for name, sites in snapshot.attention.items()
    }
    return replace(snapshot, blocks=blocks, tokens=tokens, attention=attention)


def read_scalars(context: Mapping[str, Any]) -> dict[str, float]:
    """Numbers and one-element tensors as floats; nan for what is neither."""
    return {name: _float(value) for name, value in context.items()}


def _float(value: Any) -> float:
    try:
        if isinstance(value, Tensor):
            return float(value.detach().item()) if value.numel() == 1 else math.nan
        return float(value)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):  # text, complex numbers, tensors without values
        return math.nan


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """The mean of each value over all processes, nan left out, nan where all are. One collective; all must give equally many."""
    local = torch.tensor(values, dtype=torch.float64, device="cpu")
    known = ~local.isnan()
    both = torch.stack([torch.where(known, local, 0.0), known.double()]).to(exchange_device())
    dist.all_reduce(both)
    total, number = both.cpu()
    return torch.where(number > 0, total / number.clamp(min=1), math.nan).tolist()


def any_process(flag: bool) -> bool:
    """Whether any process of the run says yes; all must ask at the same point."""
    if not (dist.is_available() and dist.is_initialized()):
        return flag
    said = torch.tensor(int(flag), device=exchange_device())
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return bool(said.item())


def exchange_device() -> torch.device:
    """Where the process group takes tensors from."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")


def _widths(snapshot: Snapshot) -> list[int]:
    return [site.heads or 1 for site in snapshot.attention_sites]


def _padded(heads: tuple[float, ...], width: int) -> Iterable[float]:
    return (*heads[:width], *(math.nan,) * (width - len(heads)))


def _take(values: Iterator[float], number: int) -> list[float]:
    return [next(values) for _ in range(number)]
