"""The means of recent sequences, block by block: what `pooled_rank` is read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from collapse_monitor.measure.precision import only_where
from collapse_monitor.observation import Key

_Group = tuple[tuple[Key, ...], int, torch.device]


@dataclass(slots=True)
class PooledFeatures:
    """A bounded queue of sequence means on the device, one per block; it starts anew when the blocks or their width change.

    Attributes:
        capacity: sequences kept.
        fewest: sequences from which a rank is read; with fewer it says more about their number than about the model.
    """

    capacity: int = 64
    fewest: int = 16
    _queues: dict[_Group, Float[Tensor, "block sample dim"]] = field(default_factory=dict, repr=False)
    _touched: set[_Group] = field(default_factory=set, repr=False)

    def begin(self) -> None:
        """A new step: queues that the last one did not feed are dropped."""
        self._queues = {group: queue for group, queue in self._queues.items() if group in self._touched}
        self._touched = set()

    def push(self, keys: Sequence[Key], features: Float[Tensor, "block sample dim"]) -> Float[Tensor, "block kept dim"]:
        """Append the means of this step's sequences; returns all that are kept, newest last."""
        group = (tuple(keys), features.shape[-1], features.device)
        queue = self._queues.get(group)
        joined = features if queue is None else torch.cat([queue, features], 1)
        if joined.shape[1] > self.capacity:
            joined = joined[:, -self.capacity :].contiguous()
        self._queues[group] = joined
        self._touched.add(group)
        return joined

    def clear(self) -> None:
        """Forget everything."""
        self._queues.clear()
        self._touched.clear()


def valid_features(queue: Float[Tensor, "block kept dim"]) -> tuple[Float[Tensor, "block kept dim"], Bool[Tensor, "block kept"]]:
    """Features with zeros where a sequence had no finite mean, and which had one."""
    valid = queue.isfinite().all(-1)
    return only_where(rearrange(valid, "block kept -> block kept 1"), queue, 0.0), valid
