"""For your own tests: tensors of known rank, models that collapse on purpose, a sink that remembers, and `assert_healthy`.

Everything here is seeded and leaves the global random state alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from collapse_monitor.judge import DEFAULT_RULES, Judge
from collapse_monitor.judge.rule import checks_of
from collapse_monitor.once import probe
from collapse_monitor.records import Alert, Snapshot
from collapse_monitor.tables import text_table

__all__ = ["MemorySink", "PureAttention", "assert_healthy", "collapsed_tokens", "tiny_gpt", "tiny_vit", "tokens_of_rank"]


def tokens_of_rank(
    rank: int, *, tokens: int = 64, dim: int = 64, batch: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Float[Tensor, "batch token dim"]:
    """Hidden states with `rank` equal singular values and no others, entries of unit mean square.

    Effective rank, stable rank and participation ratio of each sequence are therefore `rank`, up to rounding in `dtype`.

    Raises:
        ValueError: `rank` is not between 1 and min(tokens, dim).

    >>> torch.linalg.matrix_rank(tokens_of_rank(5))
    tensor([5])
    """
    if not 1 <= rank <= min(tokens, dim):
        raise ValueError(f"rank={rank} is out of reach for {tokens} tokens of width {dim}: choose 1 to {min(tokens, dim)}")
    left, right = (_orthonormal(batch, size, rank, seed + i) for i, size in enumerate((tokens, dim)))
    return ((tokens * dim / rank) ** 0.5 * left @ rearrange(right, "batch dim rank -> batch rank dim")).to(dtype)


def collapsed_tokens(
    residual: float, *, tokens: int = 64, dim: int = 64, batch: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Float[Tensor, "batch token dim"]:
    """Hidden states that share one direction: relative residual ||X - mean||_F / ||X||_F is `residual`, entries of unit mean square.

    0 gives identical tokens, 1 tokens whose mean is zero.

    Raises:
        ValueError: `residual` is not between 0 and 1, or there are fewer than two tokens.

    >>> hidden = collapsed_tokens(0.01, dtype=torch.float64)
    >>> (hidden - hidden.mean(1, keepdim=True)).norm() / hidden.norm()
    tensor(0.0100, dtype=torch.float64)
    """
    if not 0 <= residual <= 1:
        raise ValueError(f"residual={residual}: a relative residual lies between 0 (identical tokens) and 1 (tokens with mean zero)")
    if tokens < 2:
        raise ValueError(f"tokens={tokens}: one token has nothing to differ from, use at least 2")
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, tokens, dim, generator=generator, dtype=torch.float64)
    noise = noise - noise.mean(1, keepdim=True)
    mean = repeat(torch.randn(batch, dim, generator=generator, dtype=torch.float64), "batch dim -> batch token dim", token=tokens)
    # The mean part and the centred part are orthogonal: their squared norms add up to that of the whole.
    unit_noise, unit_mean = (part / part.norm(dim=(1, 2), keepdim=True) for part in (noise, mean))
    return ((tokens * dim) ** 0.5 * (residual * unit_noise + (1 - residual**2) ** 0.5 * unit_mean)).to(dtype)


class SelfAttention(nn.Module):
    """Multi-head self-attention through `scaled_dot_product_attention`."""

    def __init__(self, dim: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, hidden: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        packed = rearrange(self.qkv(hidden), "batch token (three head dim) -> three batch head token dim", three=3, head=self.heads)
        query, key, value = packed
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(rearrange(mixed, "batch head token dim -> batch token (head dim)"))


class PreNormBlock(nn.Module):
    """A pre-norm Transformer block. With `residual=False` nothing is added back: each branch replaces the stream."""

    def __init__(self, dim: int, heads: int, *, causal: bool = False, residual: bool = True) -> None:
        super().__init__()
        self.residual = residual
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, hidden: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        attended = self.attention(self.attention_norm(hidden))
        hidden = hidden + attended if self.residual else attended
        mixed = self.mlp(self.mlp_norm(hidden))
        return hidden + mixed if self.residual else mixed


class PureAttention(nn.Module):
    """Attention layers on top of each other and nothing else: no MLP, no norm, and no residual unless asked for.

    Without `residual` its tokens become equal doubly exponentially with depth (Dong et al. 2021, arXiv 2103.03404).
    """

    def __init__(
        self, dim: int = 64, depth: int = 4, heads: int = 4, *, residual: bool = False, causal: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        self.residual = residual
        with _seeded(seed):
            self.layers = nn.ModuleList(SelfAttention(dim, heads, causal=causal) for _ in range(depth))

    def forward(self, hidden: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        for layer in self.layers:
            hidden = hidden + layer(hidden) if self.residual else layer(hidden)
        return hidden


class TinyViT(nn.Module):
    """A small Vision Transformer over square single-channel images: one token per patch and a class token in front."""

    def __init__(self, *, image: int, patch: int, classes: int, dim: int, depth: int, heads: int, residual: bool) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, dim, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(0.5 * torch.randn(dim))
        self.position = nn.Parameter(0.5 * torch.randn((image // patch) ** 2, dim))
        self.blocks = nn.ModuleList(PreNormBlock(dim, heads, residual=residual) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Float[Tensor, "batch 1 height width"]) -> Float[Tensor, "batch label"]:
        patches = rearrange(self.embed(images), "batch dim row column -> batch (row column) dim") + self.position
        hidden = torch.cat([repeat(self.class_token, "dim -> batch 1 dim", batch=len(images)), patches], dim=1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden[:, 0]))


class TinyGPT(nn.Module):
    """A small causal language model over token ids."""

    def __init__(self, *, vocabulary: int, context: int, dim: int, depth: int, heads: int, residual: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(PreNormBlock(dim, heads, causal=True, residual=residual) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, ids: Int[Tensor, "batch token"]) -> Float[Tensor, "batch token vocabulary"]:
        hidden = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def tiny_vit(
    *,
    image: int = 8,
    patch: int = 1,
    classes: int = 10,
    dim: int = 32,
    depth: int = 4,
    heads: int = 4,
    residual: bool = True,
    seed: int = 0,
) -> TinyViT:
    """A Vision Transformer small enough for a test. `residual=False` makes it collapse.

    >>> tiny_vit()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    with _seeded(seed):
        return TinyViT(image=image, patch=patch, classes=classes, dim=dim, depth=depth, heads=heads, residual=residual)


def tiny_gpt(
    *, vocabulary: int = 64, context: int = 64, dim: int = 32, depth: int = 4, heads: int = 4, residual: bool = True, seed: int = 0
) -> TinyGPT:
    """A causal language model small enough for a test. `residual=False` makes it collapse.

    >>> tiny_gpt()(torch.zeros(2, 16, dtype=torch.long)).shape
    torch.Size([2, 16, 64])
    """
    with _seeded(seed):
        return TinyGPT(vocabulary=vocabulary, context=context, dim=dim, depth=depth, heads=heads, residual=residual)


class MemorySink:
    """A sink that keeps what it was given: `snapshots`, `alerts`, and whether it was `closed`."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.alerts: list[Alert] = []
        self.closed = False

    @property
    def steps(self) -> list[int]:
        """The steps written, in order."""
        return [snapshot.step for snapshot in self.snapshots]

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        self.snapshots.append(snapshot)
        self.alerts.extend(alerts)

    def close(self) -> None:
        self.closed = True


def assert_healthy(model: nn.Module, *args: Any, **kwargs: Any) -> Snapshot:
    """Probe the model once and hold the readings against the default rules' absolute bounds; returns the snapshot.

    One forward has no history, so only what is wrong on any scale is found: identical tokens, one-hot attention, exploded
    logits, values that are not finite.

    Raises:
        AssertionError: a rule fired; the message says which, where and by how much, and shows the table of all layers.

    >>> snapshot = assert_healthy(tiny_vit(), torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    """
    snapshot = probe(model, *args, **kwargs)
    judge = Judge(DEFAULT_RULES)
    for check in range(max(map(checks_of, DEFAULT_RULES))):  # a rule asks to see a condition more than once
        judge.check(replace(snapshot, step=check))
    if judge.alerts:
        messages = "\n".join(f"  {alert.message}" for alert in judge.alerts)
        raise AssertionError(f"{type(model).__name__} is not healthy:\n{messages}\n{text_table(snapshot)}")
    return snapshot


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Initialise on the CPU from `seed`, then give the global generator its state back. CUDA's generators are not touched."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def _orthonormal(batch: int, size: int, rank: int, seed: int) -> Float[Tensor, "batch size rank"]:
    generator = torch.Generator().manual_seed(seed)
    basis: Tensor = torch.linalg.qr(torch.randn(batch, size, rank, generator=generator, dtype=torch.float64))[0]
    return basis
