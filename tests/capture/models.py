"""Small real Transformers, and for each of them what there is to find: written by hand from the model's own source.

All are in train mode with dropout on. Libraries are imported when a model is built; a test that needs an absent one skips and says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from collapse_monitor.testing import PureAttention

os.environ.setdefault("HF_HUB_OFFLINE", "1")

DIM, HEADS, BATCH, TOKENS, MEMORY, WORDS = 32, 4, 3, 10, 7, 41
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Attends:
    """One attention: its name, the index of its block, heads, and how many queries and keys it has."""

    name: str
    layer: int | None
    heads: int
    queries: int
    keys: int
    causal: bool = False
    cross: bool = False
    how: str = "sdpa"


@dataclass(frozen=True)
class Case:
    """A model and the truth about it. `call(step)` are the arguments of the step's forward."""

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[int], Call]
    blocks: tuple[str, ...]
    attentions: tuple[Attends, ...]
    library: str = ""
    batch_first: bool = True

    def model(self, seed: int = 0) -> nn.Module:
        """The model in train mode, its weights from the seed; skips the test if the library is absent."""
        if self.library:
            pytest.importorskip(self.library, reason=f"{self.library} is not installed: {self.name} is not tested")
        torch.manual_seed(seed)
        return self.build().train()


def loss_of(output: Any) -> Tensor:
    """A loss with a gradient everywhere: the mean square of what the model returns first, weighted so that norms do not hide tokens."""
    first = output if isinstance(output, Tensor) else output[0]
    weight = torch.linspace(0.5, 1.5, first.numel(), dtype=torch.float32).reshape(first.shape)
    return (first.float() * weight).square().mean()


def hidden(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def words(step: int, batch: int = BATCH, tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, WORDS, (batch, tokens), generator=torch.Generator().manual_seed(step))


# -- written here


class WrittenAttention(nn.Module):
    """Causal self-attention, its softmax written out or fused."""

    def __init__(self, dim: int, heads: int, fused: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.fused, self.dropout = heads, fused, dropout
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.rows: Tensor | None = None  # what the softmax gave, for tests to compare with

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(p(x), "b n (h d) -> b h n d", h=self.heads) for p in (self.q, self.k, self.v))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            rows = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
            self.rows = rows.detach()
            mixed = F.dropout(rows, self.dropout, self.training) @ v
        return self.out(rearrange(mixed, "b h n d -> b n (h d)"))


class WrittenBlock(nn.Module):
    def __init__(self, dim: int, heads: int, fused: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = WrittenAttention(dim, heads, fused, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class WrittenGPT(nn.Module):
    """A GPT as people write it by hand."""

    def __init__(self, fused: bool, depth: int = 3, dim: int = DIM, heads: int = HEADS, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, dim), nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(WrittenBlock(dim, heads, fused, dropout) for _ in range(depth))
        self.head = nn.Linear(dim, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# -- torch


def encoder(batch_first: bool, norm_first: bool, depth: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 64, dropout=0.1, batch_first=batch_first, norm_first=norm_first)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def decoder(batch_first: bool, norm_first: bool, depth: int = 2) -> nn.Module:
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 64, dropout=0.1, batch_first=batch_first, norm_first=norm_first)
    return nn.TransformerDecoder(layer, depth)


def sequence_first(batch_first: bool, *shape: int) -> tuple[int, ...]:
    return shape if batch_first else (shape[1], shape[0], *shape[2:])


def encoder_case(batch_first: bool, norm_first: bool) -> Case:
    def call(step: int) -> Call:
        return (hidden(step, *sequence_first(batch_first, BATCH, TOKENS, DIM)),), {}

    names = tuple(f"layers.{i}" for i in range(2))
    attentions = tuple(Attends(f"{name}.self_attn", i, HEADS, TOKENS, TOKENS) for i, name in enumerate(names))
    return Case(
        _layout("encoder", batch_first, norm_first), lambda: encoder(batch_first, norm_first), call, names, attentions, "", batch_first
    )


def decoder_case(batch_first: bool, norm_first: bool) -> Case:
    def call(step: int) -> Call:
        target = hidden(step, *sequence_first(batch_first, BATCH, TOKENS, DIM))
        memory = hidden(step + 1000, *sequence_first(batch_first, BATCH, MEMORY, DIM))
        return (target, memory), {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(TOKENS)}

    names = tuple(f"layers.{i}" for i in range(2))
    attentions = tuple(
        site
        for i, name in enumerate(names)
        for site in (
            Attends(f"{name}.self_attn", i, HEADS, TOKENS, TOKENS, causal=True),
            Attends(f"{name}.multihead_attn", i, HEADS, TOKENS, MEMORY, cross=True),
        )
    )
    return Case(
        _layout("decoder", batch_first, norm_first), lambda: decoder(batch_first, norm_first), call, names, attentions, "", batch_first
    )


def _layout(name: str, batch_first: bool, norm_first: bool) -> str:
    return f"{name}-{'batch' if batch_first else 'token'}_first-{'pre' if norm_first else 'post'}_norm"


def transformer_case() -> Case:
    def call(step: int) -> Call:
        source, target = hidden(step, BATCH, MEMORY, DIM), hidden(step + 1000, BATCH, TOKENS, DIM)
        return (source, target), {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(TOKENS)}

    above = tuple(f"encoder.layers.{i}" for i in range(2))
    below = tuple(f"decoder.layers.{i}" for i in range(2))
    encoding = tuple(Attends(f"{name}.self_attn", i, HEADS, MEMORY, MEMORY) for i, name in enumerate(above))
    decoding = tuple(
        site
        for i, name in enumerate(below, start=2)
        for site in (
            Attends(f"{name}.self_attn", i, HEADS, TOKENS, TOKENS, causal=True),
            Attends(f"{name}.multihead_attn", i, HEADS, TOKENS, MEMORY, cross=True),
        )
    )
    build = lambda: nn.Transformer(DIM, HEADS, 2, 2, 64, dropout=0.1, batch_first=True)  # noqa: E731
    return Case("transformer", build, call, (*above, *below), (*encoding, *decoding))


def written_case(fused: bool) -> Case:
    names = tuple(f"blocks.{i}" for i in range(3))
    how = "sdpa" if fused else "softmax"
    attentions = tuple(Attends(f"{name}.attention", i, HEADS, TOKENS, TOKENS, causal=True, how=how) for i, name in enumerate(names))
    return Case(f"gpt-{'sdpa' if fused else 'softmax'}", lambda: WrittenGPT(fused), lambda step: ((words(step),), {}), names, attentions)


def pure_case(residual: bool) -> Case:
    names = tuple(f"layers.{i}" for i in range(3))
    attentions = tuple(Attends(name, i, HEADS, TOKENS, TOKENS) for i, name in enumerate(names))
    build = lambda: PureAttention(DIM, 3, HEADS, residual=residual)  # noqa: E731
    name = f"pure-{'residual' if residual else 'plain'}"
    return Case(name, build, lambda step: ((hidden(step, BATCH, TOKENS, DIM),), {}), names, attentions)


# -- other libraries


def images(step: int) -> Call:
    return (hidden(step, BATCH, 3, 16, 16),), {}


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(16, 4, 2, HEADS, DIM, 64, dropout=0.1, attention_dropout=0.1, num_classes=5)
    nn.init.normal_(model.heads.head.weight, std=0.1)  # it starts at zero, and so would every gradient
    return model


def timm_vit(fused: bool, depth: int = 2) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(16, 4, embed_dim=DIM, depth=depth, num_heads=HEADS, num_classes=5, proj_drop_rate=0.1, attn_drop_rate=0.1)
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


def vit_case(library: str, build: Callable[[], nn.Module], name: str, block: str, attention: str, how: str = "sdpa") -> Case:
    names = tuple(block.format(i) for i in range(2))
    attentions = tuple(Attends(f"{name}.{attention}", i, HEADS, 17, 17, how=how) for i, name in enumerate(names))
    return Case(name, build, images, names, attentions, library)


SIZES = {"hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 64, "vocab_size": WORDS}


def bert(kernel: str, depth: int = 2) -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**{**SIZES, "num_hidden_layers": depth}, max_position_embeddings=32, attn_implementation=kernel))


def gpt2(kernel: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=DIM, n_layer=2, n_head=HEADS, n_positions=32, vocab_size=WORDS, attn_implementation=kernel, use_cache=False)
    return GPT2LMHeadModel(config)


def llama(kernel: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_key_value_heads=2, attention_dropout=0.1, attn_implementation=kernel, use_cache=False)
    return LlamaForCausalLM(config)


def padded(step: int) -> Call:
    """Sequences of different lengths, padded on the right."""
    return (), {"input_ids": words(step), "attention_mask": lengths_mask((TOKENS, 6, 8))}


def lengths_mask(lengths: Sequence[int], tokens: int = TOKENS, left: bool = False) -> Tensor:
    """1 at real tokens."""
    place = torch.arange(tokens)
    mask = torch.stack([place >= tokens - n if left else place < n for n in lengths])
    return mask.long()


def hf_case(name: str, build: Callable[[str], nn.Module], kernel: str, block: str, attention: str, causal: bool) -> Case:
    names = tuple(block.format(i) for i in range(2))
    how = "sdpa" if kernel == "sdpa" else "softmax"
    attentions = tuple(Attends(f"{n}.{attention}", i, HEADS, TOKENS, TOKENS, causal=causal, how=how) for i, n in enumerate(names))
    return Case(f"{name}-{kernel}", lambda: build(kernel), padded, names, attentions, "transformers")


OWN: tuple[Case, ...] = (
    *(encoder_case(batch_first, norm_first) for batch_first in (True, False) for norm_first in (True, False)),
    *(decoder_case(batch_first, norm_first) for batch_first in (True, False) for norm_first in (True, False)),
    transformer_case(),
    *(written_case(fused) for fused in (True, False)),
    *(pure_case(residual) for residual in (True, False)),
)

OTHERS: tuple[Case, ...] = (
    vit_case("torchvision", torchvision_vit, "torchvision-vit", "encoder.layers.encoder_layer_{}", "self_attention"),
    vit_case("timm", lambda: timm_vit(True), "timm-vit-fused", "blocks.{}", "attn"),
    vit_case("timm", lambda: timm_vit(False), "timm-vit-unfused", "blocks.{}", "attn", "softmax"),
    *(hf_case("bert", bert, kernel, "encoder.layer.{}", "attention.self", False) for kernel in ("sdpa", "eager")),
    *(hf_case("gpt2", gpt2, kernel, "transformer.h.{}", "attn", True) for kernel in ("sdpa", "eager")),
    *(hf_case("llama", llama, kernel, "model.layers.{}", "self_attn", True) for kernel in ("sdpa", "eager")),
)

CASES = (*OWN, *OTHERS)


QUICK = ("encoder-token_first-post_norm", "decoder-batch_first-pre_norm", "gpt-sdpa", "gpt-softmax", "pure-residual")
"""One model of each kind for the quick run: layouts, cross attention, fused and written out, sums made outside."""


def each(cases: Sequence[Case] = CASES, quick: Sequence[str] = QUICK) -> Any:
    """Parametrise a test with `case`. Models of other libraries, and those that `quick` lacks, are left out of the quick run."""

    def marks(case: Case) -> list[Any]:
        return [pytest.mark.zoo] * bool(case.library) + [pytest.mark.slow] * (case.name not in quick)

    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks(case)) for case in cases])


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
