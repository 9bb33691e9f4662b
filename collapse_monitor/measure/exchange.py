"""One snapshot out of those of all processes, with a fixed number of collectives, whatever happened in each of them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import torch
import torch.distributed as dist

from collapse_monitor.measure.ranks import exchange_device, flatten, mean_over_ranks, rebuild
from collapse_monitor.records import Snapshot

ALONE = "readings of this process only: at this step they could not be averaged over all processes"

_CONTEXT = ("train_loss", "val_loss")
"""The user's numbers that are averaged too; others stay those of the process."""


class Exchange:
    """Averages snapshots over processes: one collective per snapshot, and one before it until all have agreed on a layout.

    Every process calls `average` after the same steps, also one that could not measure: it takes part with nothing, so that nobody
    waits for it in vain. What is decided here is decided from exchanged numbers only, hence alike everywhere.
    """

    def __init__(self) -> None:
        self._agreed: str | None = None
        self._length = 0

    @property
    def active(self) -> bool:
        """Whether there are other processes to exchange with."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def average(self, snapshot: Snapshot | None, interval: int) -> tuple[Snapshot | None, int]:
        """The mean of every reading over all processes, nan left out, and the interval between samples they agree on.

        Args:
            snapshot: what this process has read; None if it could not.
            interval: steps until the next sample that this process would choose; the largest or the mean of all is chosen.

        Returns:
            The averaged snapshot. Where this process has none, None; where the processes hear different sites, its own, with a note.
        """
        own = _layout(snapshot) if snapshot is not None else ""
        if self._agreed is None:
            alike, interval = _compare(own, interval)
            if not alike or snapshot is None:
                return apart(snapshot), interval
            self._agreed, self._length = own, len(flatten(snapshot))
        readings = flatten(snapshot) if snapshot is not None and own == self._agreed else [math.nan] * self._length
        context = snapshot.context if snapshot is not None else {}
        mean, *rest = mean_over_ranks([float(interval), *(context.get(name, math.nan) for name in _CONTEXT), *readings])
        interval = max(1, math.ceil(mean - 1e-6))
        if snapshot is None or own != self._agreed:
            return apart(snapshot), interval
        averaged = rebuild(snapshot, rest[len(_CONTEXT) :])
        known = {name: value for name, value in zip(_CONTEXT, rest, strict=False) if not math.isnan(value)}
        return averaged.with_context(known), interval


def _layout(snapshot: Snapshot) -> str:
    """Equal for snapshots whose readings may be averaged."""
    sites = [(site.name, site.kind, site.layer, site.heads) for site in snapshot.sites]
    return repr((sites, list(snapshot.blocks), list(snapshot.attention)))


def _compare(layout: str, interval: int) -> tuple[bool, int]:
    """Whether all processes have the same layout, none of them an empty one, and the largest interval."""
    mark = int.from_bytes(hashlib.blake2b(layout.encode(), digest_size=7).digest(), "big") if layout else 0
    given = torch.tensor([mark, -mark, -bool(layout), interval], dtype=torch.int64, device=exchange_device())
    dist.all_reduce(given, op=dist.ReduceOp.MAX)
    largest, smallest, some_without, interval = given.tolist()
    return largest == -smallest and some_without == -1, interval


def apart(snapshot: Snapshot | None) -> Snapshot | None:
    """The same with the remark that it was not averaged."""
    return None if snapshot is None else replace(snapshot, notes=(*snapshot.notes, ALONE))
