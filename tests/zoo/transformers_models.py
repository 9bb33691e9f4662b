"""Models of transformers, small, built from their configurations."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.zoo.registry import BATCH, DIM, HEADS, TOKENS, Inputs, Shelf, Truth, constant, ids, named, normal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHELF = Shelf("transformers")
LATER = 7  # tokens of a decoder
EAGER, SDPA = ("softmax",), ("sdpa",)

TEXT = {"vocab_size": 99, "hidden_size": DIM, "num_hidden_layers": 3, "num_attention_heads": HEADS, "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PAIR = {
    "vocab_size": 99, "d_model": DIM, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {"vocab_size": 99, "d_model": DIM, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": HEADS}
VISION = {
    "hidden_size": DIM,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
GPT = {"vocab_size": 99, "n_embd": DIM, "n_layer": 3, "n_head": HEADS, "n_positions": 64}
SPEECH = {
    "hidden_size": DIM, "num_hidden_layers": 3, "num_attention_heads": HEADS, "intermediate_size": 64, "conv_dim": [8, 8], "conv_stride": [4, 4],
    "conv_kernel": [8, 4], "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}  # fmt: skip

tokens = named(input_ids=ids())
padded = named(input_ids=ids(), attention_mask=constant(torch.tensor([[1] * TOKENS, [1] * 8 + [0] * 4])))
both = named(input_ids=ids(), decoder_input_ids=ids(LATER))
picture = named(pixel_values=normal(BATCH, 3, 32, 32))
large_picture = named(pixel_values=normal(BATCH, 3, 64, 64))
sound = named(input_values=normal(BATCH, 320))

Options = dict[str, Any] | Callable[[], dict[str, Any]]


def put(
    kind: str,
    options: Options,
    truth: Truth,
    inputs: Inputs = tokens,
    *,
    kernels: Sequence[str | None] = (None,),
    model: str = "",
    note: str = "",
    change: Callable[[Any], None] | None = None,
    name: str = "",
) -> None:
    """A model by the name of its configuration, without "Config"; once per attention kernel of the library, where it has them."""
    for kernel in kernels:
        how = {"eager": EAGER, "sdpa": SDPA, None: truth.how}[kernel]

        def build(kernel: str | None = kernel) -> nn.Module:
            import transformers

            config = getattr(transformers, f"{kind}Config")(**(options() if callable(options) else options))
            choice = {"attn_implementation": kernel} if kernel else {}
            made = (
                getattr(transformers, model)._from_config(config, **choice)
                if model
                else transformers.AutoModel.from_config(config, **choice)
            )
            if change is not None:
                change(made)
            return made

        what = Truth(**{**{f: getattr(truth, f) for f in truth.__dataclass_fields__}, "how": how})
        title = name or kind
        SHELF.model(what, inputs, name=f"{title}-{kernel}" if len(kernels) > 1 else title, note=note)(build)


KERNELS = ("eager", "sdpa")
ENCODER, CAUSAL = Truth(3, 3), Truth(3, 3, causal=True)
WRITTEN, CAUSAL_WRITTEN = Truth(3, 3, how=EAGER), Truth(3, 3, causal=True, how=EAGER)
CROSSING = Truth(5, 8, cross=3)

# -- encoders of text
put("Bert", TEXT, ENCODER, padded, kernels=KERNELS, note="padded")
put(
    "Bert",
    {**TEXT, "is_decoder": True, "add_cross_attention": True},
    Truth(3, 6, causal=True, cross=3),
    named(input_ids=ids(), encoder_hidden_states=normal(BATCH, LATER, DIM)),
    name="BertDecoder",
    note="with cross attention",
)
put("RobertaPreLayerNorm", TEXT, ENCODER)
put("MegatronBert", TEXT, WRITTEN)
put("Data2VecText", TEXT, ENCODER)
put("RemBert", {**TEXT, "input_embedding_size": 16, "output_embedding_size": 16}, WRITTEN)
put("IBert", TEXT, WRITTEN, note="quantisation-aware")
put("Albert", {**TEXT, "embedding_size": 16}, ENCODER, note="one layer, three executions")
put("LayoutLM", TEXT, ENCODER)
put(
    "Lilt",
    {**TEXT, "channel_shrink_ratio": 2, "hidden_size": 24, "num_attention_heads": 4},
    Truth(3, 3, how=EAGER),
    named(input_ids=ids(), bbox=constant(torch.zeros(BATCH, TOKENS, 4, dtype=torch.long))),
    note="text and layout streams add their scores",
)
put("Splinter", TEXT, WRITTEN)
put("Luke", {**TEXT, "entity_vocab_size": 10, "entity_emb_size": 16}, WRITTEN)
put(
    "VisualBert",
    {**TEXT, "visual_embedding_dim": 16},
    Truth(3, 3, queries=TOKENS + 4, keys=TOKENS + 4, how=EAGER),
    named(input_ids=ids(), visual_embeds=normal(BATCH, 4, 16)),
    note="words and regions in one sequence",
)
put("NomicBert", TEXT, ENCODER)
put("EuroBert", GROUPED, ENCODER)
put(
    "ModernBert",
    {**TEXT, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "local_attention": 6},
    ENCODER,
    note="local and global layers in turn",
)
put(
    "DebertaV2",
    {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16},
    WRITTEN,
    note="disentangled positions",
)
put("Longformer", {**TEXT, "attention_window": [4] * 3}, Truth(3, 3, keys=5, how=EAGER), note="sliding chunks: a window of five keys")
put(
    "XLNet",
    {"vocab_size": 99, "d_model": DIM, "n_layer": 3, "n_head": HEADS, "d_inner": 64},
    WRITTEN,
    note="relative positions, (token, batch, dim)",
)
put("XLM", {"vocab_size": 99, "emb_dim": DIM, "n_layers": 3, "n_heads": HEADS}, WRITTEN, note="lists side by side")
put("BigBird", {**TEXT, "attention_type": "original_full"}, WRITTEN)
put("SqueezeBert", {**TEXT, "embedding_size": DIM}, WRITTEN, note="(batch, dim, token)")
put("ConvBert", {**TEXT, "head_ratio": 2}, Truth(3, 3, 2, how=EAGER), note="span convolutions are no attention")
put("FNet", {k: v for k, v in TEXT.items() if k != "num_attention_heads"}, Truth(3, 0), note="Fourier mixing")

# -- decoders of text
put("GPT2", GPT, CAUSAL, padded, kernels=KERNELS, note="padded")
put(
    "GPTNeo",
    {
        "vocab_size": 99,
        "hidden_size": DIM,
        "num_layers": 4,
        "num_heads": HEADS,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 4,
        "max_position_embeddings": 64,
    },
    Truth(4, 4, causal=True, how=EAGER),
    note="global and local in turn",
)
put("GPTNeoXJapanese", TEXT, CAUSAL_WRITTEN)
put("GPTBigCode", GPT, CAUSAL, note="multi-query")
put("ImageGPT", {**GPT, "vocab_size": 99}, CAUSAL_WRITTEN)
put("Bloom", {"vocab_size": 99, "hidden_size": DIM, "n_layer": 3, "n_head": HEADS}, CAUSAL_WRITTEN, note="ALiBi")
put("Mpt", {"vocab_size": 99, "d_model": DIM, "n_layers": 3, "n_heads": HEADS, "max_seq_len": 64}, CAUSAL_WRITTEN, note="ALiBi")
put(
    "XGLM",
    {"vocab_size": 99, "d_model": DIM, "num_layers": 3, "attention_heads": HEADS, "ffn_dim": 64, "max_position_embeddings": 64},
    CAUSAL_WRITTEN,
    note="masks by a maximum",
)
put("BioGpt", TEXT, CAUSAL)
put("OPT", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": DIM}, CAUSAL, padded, kernels=KERNELS)
put("Llama", GROUPED, CAUSAL, padded, kernels=KERNELS, note="grouped queries, rotary positions")
put("Mistral", {**GROUPED, "sliding_window": 4}, CAUSAL, kernels=KERNELS, note="sliding window")
put("Qwen3", GROUPED, CAUSAL, kernels=KERNELS, note="QK norm")
put(
    "Gemma2",
    {**GROUPED, "sliding_window": 4, "attn_logit_softcapping": 20.0},
    CAUSAL_WRITTEN,
    kernels=("eager",),
    note="soft cap, local and global",
)
put("Gemma3Text", {**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}, CAUSAL)
put("GptOss", {**GROUPED, **EXPERTS, "sliding_window": 4}, CAUSAL_WRITTEN, kernels=("eager",), note="sinks, mixture of experts")
put("Cohere2", {**GROUPED, "sliding_window": 4}, CAUSAL)
put("Olmo3", {**GROUPED, "sliding_window": 4}, CAUSAL)
put("Exaone4", {**GROUPED, "sliding_window": 4}, CAUSAL)
put("Starcoder2", GROUPED, CAUSAL)
put("Persimmon", TEXT, CAUSAL)
put("Nemotron", GROUPED, CAUSAL)
put("SeedOss", GROUPED, CAUSAL)
put("Arcee", GROUPED, CAUSAL)
put("Apertus", GROUPED, CAUSAL)
put("BitNet", GROUPED, CAUSAL)
put("Helium", GROUPED, CAUSAL)
put("Falcon", {**TEXT, "multi_query": True, "new_decoder_architecture": False}, CAUSAL, note="multi-query, parallel branches")
put("Mixtral", {**GROUPED, **EXPERTS}, CAUSAL, note="mixture of experts")
put("Qwen3Moe", {**GROUPED, **EXPERTS}, CAUSAL, note="mixture of experts")
put("Olmoe", {**GROUPED, **EXPERTS}, CAUSAL, note="mixture of experts")
put("GraniteMoe", {**GROUPED, **EXPERTS}, CAUSAL, note="mixture of experts")
put("Phimoe", {**GROUPED, **EXPERTS}, CAUSAL, note="mixture of experts")
put(
    "DeepseekV3",
    {
        **TEXT,
        "num_key_value_heads": HEADS,
        "kv_lora_rank": 8,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    CAUSAL,
    kernels=KERNELS,
    note="latent attention: keys wider than values",
)
put("DiffLlama", {k: v for k, v in GROUPED.items() if k != "head_dim"}, CAUSAL_WRITTEN, kernels=("eager",), note="differential attention")
put(
    "Qwen3Next",
    {
        **GROUPED,
        **EXPERTS,
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    Truth(4, 1, causal=True),
    note="three layers of four are linear",
)
put(
    "Jamba",
    {
        **GROUPED,
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 4,
        "num_experts": 2,
        "expert_layer_period": 2,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_d_conv": 2,
        "mamba_dt_rank": 4,
    },
    Truth(4, 1, causal=True),
    note="state-space layers and one attention",
)
put("Lfm2", {**GROUPED, "layer_types": ["conv", "full_attention", "conv"]}, Truth(3, 1, causal=True), note="convolutions and one attention")
put("Mamba", {"vocab_size": 99, "hidden_size": DIM, "num_hidden_layers": 3, "state_size": 4}, Truth(3, 0), note="state space, no attention")
put(
    "Rwkv",
    {
        "vocab_size": 99,
        "hidden_size": DIM,
        "num_hidden_layers": 3,
        "attention_hidden_size": DIM,
        "intermediate_size": 64,
        "context_length": 64,
    },
    Truth(3, 0),
    note="a recurrence that is called attention",
)
put("Llama", GROUPED, CAUSAL, name="Llama-checkpointed", model="LlamaForCausalLM", change=lambda made: made.gradient_checkpointing_enable())
put("GPT2", GPT, CAUSAL, named(input_ids=ids(), labels=ids()), name="GPT2-loss", model="GPT2LMHeadModel", note="returns the loss")
