"""Short ways to hand observations to a window and to read what comes back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from collapse_monitor.measure import Pending, PooledFeatures, Window
from collapse_monitor.metrics import DEFAULT_METRICS, Metric
from collapse_monitor.observation import AttentionObservation, BlockObservation, Key, TokenSample
from collapse_monitor.records import Site, Snapshot

MEASURED = tuple(metric for metric in DEFAULT_METRICS if metric.reads not in ("qk_weights", "value_weights"))
OF_TOKENS = tuple(metric for metric in MEASURED if metric.reads == "hidden")
OF_ROWS = tuple(metric for metric in MEASURED if metric.reads in ("attention", "attention_batch", "attention_pair", "logits"))


class Dispatched(TorchDispatchMode):
    """The names of all operations that are dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.names.append(func.__name__)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.dtypes.add(result.dtype)
        return result


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")


def block_key(index: int) -> Key:
    return ("block", index)


def attention_key(index: int) -> Key:
    return ("attention", index)


def sites_of(blocks: int = 0, attentions: int = 0, heads: int | None = None) -> dict[Key, Site]:
    """Attention 0, block 0, attention 1, ... as in a plain Transformer."""
    sites: dict[Key, Site] = {}
    for index in range(max(blocks, attentions)):
        if index < attentions:
            sites[attention_key(index)] = Site(f"layer.{index}.attention", "attention", index, heads)
        if index < blocks:
            sites[block_key(index)] = Site(f"layer.{index}", "block", index)
    return sites


def see_chain(window: Window, samples: Sequence[TokenSample]) -> None:
    """One block from each sample to the next."""
    for index, (before, after) in enumerate(pairwise(samples)):
        window.block(block_key(index), BlockObservation(after, before))


def launched(
    metrics: Iterable[Metric] = MEASURED,
    blocks: Sequence[BlockObservation] = (),
    attentions: Sequence[AttentionObservation] = (),
    history: PooledFeatures | None = None,
) -> tuple[Window, Pending]:
    window = Window(tuple(metrics), history)
    for index, observation in enumerate(attentions):
        window.attention(attention_key(index), observation)
    for index, block in enumerate(blocks):
        window.block(block_key(index), block)
    heads = attentions[0].weights.shape[1] if attentions else None
    return window, window.launch(7, sites_of(len(blocks), len(attentions), heads), {})


def snapshot_of(**observed: Any) -> Snapshot:
    """The snapshot of a window that met no fault."""
    window, pending = launched(**observed)
    snapshot = pending.snapshot()
    assert window.faults == []
    return snapshot


def block_readings(hidden: Tensor, mask: Tensor | None = None) -> dict[str, float]:
    snapshot = snapshot_of(metrics=OF_TOKENS, blocks=[BlockObservation(TokenSample(hidden, mask))])
    return {name: values[0] for name, values in snapshot.blocks.items()}


def same(got: float, expected: float, rel: float, abs_: float = 0.0) -> bool:
    """Equal up to a tolerance; nan equals nan."""
    return (math.isnan(got) and math.isnan(expected)) or math.isclose(got, expected, rel_tol=rel, abs_tol=abs_)
