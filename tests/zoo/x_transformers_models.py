"""Models of x-transformers, small: one architecture, many options."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.registry import BATCH, DIM, HEADS, TOKENS, Call, Shelf, Truth, hidden, images, words

SHELF = Shelf("x-transformers")
SIZES = {"dim": DIM, "depth": 3, "heads": HEADS, "attn_dim_head": 8}
SOFTMAX = ("softmax",)


def language_model(causal: bool, around: dict[str, Any], options: dict[str, Any]) -> nn.Module:
    from x_transformers import Decoder, Encoder, TransformerWrapper

    layers = (Decoder if causal else Encoder)(**SIZES, **options)
    return TransformerWrapper(num_tokens=99, max_seq_len=64, attn_layers=layers, **around)


def put(
    name: str,
    *,
    causal: bool = True,
    note: str = "",
    around: dict[str, Any] | None = None,
    truth: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    what = Truth(**{"blocks": 3, "sites": 3, "causal": causal, "how": SOFTMAX, **(truth or {})})
    SHELF.model(what, words(), name=name, note=note)(lambda: language_model(causal, around or {}, options))


FUSED = {"how": ("sdpa",)}
put("decoder", attn_dropout=0.1)
put("decoder-flash", attn_flash=True, rotary_pos_emb=True, truth=FUSED)
put("encoder", causal=False)
put("encoder-flash", causal=False, attn_flash=True, truth=FUSED)
put("alibi", alibi_pos_bias=True)
put("t5-positions", rel_pos_bias=True)
put("dynamic-positions", dynamic_pos_bias=True, note="positions from a small network")
put("multi-query-flash", attn_one_kv_head=True, attn_flash=True, truth=FUSED)
put("grouped-queries", attn_kv_heads=2)
put("talking-heads", attn_pre_talking_heads=True, attn_post_talking_heads=True)
put("sparse-top-k", attn_sparse_topk=4)
put("memory-keys", causal=False, attn_num_mem_kv=4, note="four learned keys", truth={"keys": TOKENS + 4})
put("memory-tokens", causal=False, around={"num_memory_tokens": 5}, truth={"queries": TOKENS + 5, "keys": TOKENS + 5})
put("sinks", attn_head_learned_sink=True, note="learned sink logits")
put("gated-values", attn_gate_values=True)
put("gated-residual", gate_residual=True)
put("soft-clamp", attn_softclamp_logits=True)
put("qk-norm", attn_qk_norm=True, attn_qk_norm_scale=10)
put("post-norm", causal=False, pre_norm=False)
put("sandwich-macaron", macaron=True, sandwich_norm=True, note="a feed-forward before and after")
put("residual-attention", residual_attn=True, note="scores added from the layer before")
put("value-residual", add_value_residual=True)
put("shifted-tokens", shift_tokens=1)
put("weight-tied", weight_tie_layers=True, note="one layer, three executions")
put("laser", attn_laser=True)
put("sigmoid", attn_sigmoid=True, note="rows are not normalised", truth={"sites": 0})


def pair(generator: torch.Generator) -> Call:
    return (torch.randint(0, 99, (BATCH, TOKENS), generator=generator), torch.randint(0, 99, (BATCH, 8), generator=generator)), {}


@SHELF.model(Truth(8, 8, cross=3, how=SOFTMAX), pair, note="every attention is an entry of the list, and so a block")
def encoder_decoder() -> nn.Module:
    from x_transformers import XTransformer

    side = {"num_tokens": 99, "heads": HEADS, "max_seq_len": 64, "attn_dim_head": 8}
    return XTransformer(
        dim=DIM, **{f"enc_{k}": v for k, v in {**side, "depth": 2}.items()}, **{f"dec_{k}": v for k, v in {**side, "depth": 3}.items()}
    )


@SHELF.model(Truth(3, 3, queries=16, keys=16, how=SOFTMAX), images())
def image_encoder() -> nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    return ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=Encoder(**SIZES))


@SHELF.model(Truth(3, 3, causal=True, how=SOFTMAX), words(), note="shifts the ids and returns the loss")
def autoregressive_loss() -> nn.Module:
    from x_transformers import AutoregressiveWrapper

    return AutoregressiveWrapper(language_model(True, {}, {}))


@SHELF.model(Truth(3, 3, how=SOFTMAX), hidden(), note="vectors in, vectors out")
def continuous() -> nn.Module:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    return ContinuousTransformerWrapper(dim_in=DIM, dim_out=DIM, max_seq_len=64, attn_layers=Encoder(**SIZES))
