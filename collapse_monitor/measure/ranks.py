"""Readings of several processes as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collapse_monitor.records import Snapshot


def average_over_ranks(snapshot: Snapshot) -> Snapshot:
    """The mean of every reading over all processes, nan left out: one collective of a length that sites and metrics fix.

    Does nothing without a process group of two or more. All processes must call it at the same step.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return snapshot
    widths = [site.heads or 1 for site in snapshot.attention_sites]
    values = [
        *(value for series in snapshot.blocks.values() for value in series),
        *snapshot.tokens,
        *(
            value
            for sites in snapshot.attention.values()
            for heads, width in zip(sites, widths, strict=True)
            for value in _padded(heads, width)
        ),
    ]
    means = iter(_mean_over_ranks(values))
    blocks = {name: tuple(_take(means, len(series))) for name, series in snapshot.blocks.items()}
    tokens = tuple(_take(means, len(snapshot.tokens)))
    attention = {
        name: tuple(tuple(_take(means, width))[: len(heads)] for heads, width in zip(sites, widths, strict=True))
        for name, sites in snapshot.attention.items()
    }
    return replace(snapshot, blocks=blocks, tokens=tokens, attention=attention)


def read_scalars(context: Mapping[str, Any]) -> dict[str, float]:
    """Numbers and one-element tensors as floats; nan for what is neither."""
    return {name: _float(value) for name, value in context.items()}


def _float(value: Any) -> float:
    if isinstance(value, Tensor):
        return float(value.detach().item()) if value.numel() == 1 else math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _padded(heads: tuple[float, ...], width: int) -> Iterable[float]:
    return (*heads[:width], *(math.nan,) * (width - len(heads)))


def _take(values: Iterator[float], number: int) -> list[float]:
    return [next(values) for _ in range(number)]


def _mean_over_ranks(values: list[float]) -> list[float]:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    local = torch.tensor(values, dtype=torch.float64, device="cpu")
    known = ~local.isnan()
    both = torch.stack([torch.where(known, local, 0.0), known.double()]).to(device)
    dist.all_reduce(both)
    total, number = both.cpu()
    return torch.where(number > 0, total / number.clamp(min=1), math.nan).tolist()
