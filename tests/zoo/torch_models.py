"""Transformers of torch.nn itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.registry import BATCH, DIM, HEADS, TOKENS, Call, Shelf, Truth, hidden, tensors

MEMORY = 7
SHELF = Shelf("torch")
model = SHELF.model


def encoder_layer(**options: bool) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, batch_first=options.pop("batch_first", True), **options)


@model(Truth(3, 3), hidden(), quick=True)
def encoder_post_norm() -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(), 3)


@model(Truth(3, 3), tensors((TOKENS, BATCH, DIM)), note="(token, batch, dim)")
def encoder_tokens_first() -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(batch_first=False, norm_first=True), 3, enable_nested_tensor=False)


def padded_and_causal(generator: torch.Generator) -> Call:
    padding = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [8]])
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    source = torch.randn(BATCH, TOKENS, DIM, generator=generator)
    return (source,), {"mask": future, "src_key_padding_mask": padding, "is_causal": True}


@model(Truth(2, 2, causal=True), padded_and_causal, note="causal and padded")
def encoder_padded() -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(norm_first=True), 2, enable_nested_tensor=False)


def causal_target(generator: torch.Generator) -> Call:
    target, memory = torch.randn(BATCH, TOKENS, DIM, generator=generator), torch.randn(BATCH, MEMORY, DIM, generator=generator)
    return (target, memory), {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(TOKENS)}


@model(Truth(3, 6, causal=True, cross=3), causal_target)
def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, HEADS, 2 * DIM, batch_first=True, norm_first=True), 3)


@model(Truth(5, 8, queries=MEMORY, keys=MEMORY, cross=3), tensors((BATCH, MEMORY, DIM), (BATCH, TOKENS, DIM)))
def encoder_decoder() -> nn.Module:
    return nn.Transformer(DIM, HEADS, 2, 3, 2 * DIM, batch_first=True)


class Asking(nn.Module):
    """A block around nn.MultiheadAttention, with whatever options it has."""

    def __init__(self, weights: bool, **options: object) -> None:
        super().__init__()
        self.weights = weights
        self.norm = nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, HEADS, dropout=0.1, batch_first=True, **options)  # type: ignore[arg-type]
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=self.weights)[0]
        return x + self.mlp(x)


@model(Truth(3, 3, how=("softmax",)), hidden(), quick=True, note="need_weights=True")
def attention_with_weights() -> nn.Module:
    return nn.Sequential(*(Asking(True) for _ in range(3)))


@model(Truth(2, 2, keys=TOKENS + 2), hidden(), note="add_bias_kv and add_zero_attn: two more keys")
def attention_with_extra_keys() -> nn.Module:
    return nn.Sequential(*(Asking(False, add_bias_kv=True, add_zero_attn=True) for _ in range(2)))


class Reading(nn.Module):
    """Queries of one width over a memory of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, kdim=12, vdim=20, batch_first=True)
        self.mlp = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        x = x + self.attention(x, keys, values, need_weights=False)[0]
        return x + self.mlp(x)


class ReadingStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Reading() for _ in range(2))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, keys, values)
        return x


@model(
    Truth(2, 2, keys=MEMORY, cross=2),
    tensors((BATCH, TOKENS, DIM), (BATCH, MEMORY, 12), (BATCH, MEMORY, 20)),
    note="kdim and vdim of their own",
)
def attention_over_other_widths() -> nn.Module:
    return ReadingStack()


@model(Truth(1, 1), hidden(), note="the model itself is the block")
def single_layer() -> nn.Module:
    return encoder_layer()
