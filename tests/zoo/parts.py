"""The pieces that hand-written models of the zoo are made of."""

from __future__ import annotations

from collections.abc import Callable

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.registry import DIM, HEADS

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k and v [batch, head, token, dim] -> what the heads return."""


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def fused_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


class Attention(nn.Module):
    """Projections around a way of mixing tokens; with a memory, keys and values come from there."""

    def __init__(self, mix: Mix | nn.Module = fused, dim: int = DIM, heads: int = HEADS, memory: int | None = None) -> None:
        super().__init__()
        self.heads, self.mix = heads, mix
        self.query = nn.Linear(dim, dim)
        self.keyval = nn.Linear(memory or dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        k, v = rearrange(self.keyval(x if memory is None else memory), "b n (two h d) -> two b h n d", two=2, h=self.heads)
        q = rearrange(self.query(x), "b n (h d) -> b h n d", h=self.heads)
        return self.out(rearrange(self.mix(q, k, v), "b h n d -> b n (h d)"))


class Mlp(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.wide, self.narrow, self.drop = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.narrow(F.gelu(self.wide(x))))


class Block(nn.Module):
    """The common block: attention and MLP, each after a norm, each added to the stream."""

    def __init__(
        self, mix: Mix | nn.Module = fused, dim: int = DIM, heads: int = HEADS, memory: int | None = None, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(mix, dim, heads, memory)
        self.mlp = mlp or Mlp(dim)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.before(x), memory)
        return x + self.mlp(self.between(x))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *more)
        return x
