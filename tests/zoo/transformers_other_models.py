"""Models of transformers, small: encoder and decoder, images, sound, several modalities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.registry import BATCH, DIM, HEADS, TOKENS, Call, Truth, constant, ids, named, normal
from tests.zoo.transformers_models import (
    CROSSING,
    EAGER,
    KERNELS,
    LATER,
    PAIR,
    SPEECH,
    T5,
    TEXT,
    VISION,
    both,
    large_picture,
    picture,
    put,
    sound,
)

# -- encoder and decoder
put("Bart", PAIR, CROSSING, both, kernels=KERNELS)
put("PLBart", PAIR, CROSSING, both)
put("Mvp", PAIR, Truth(5, 8, cross=3, how=EAGER), both)
put(
    "FSMT",
    {**PAIR, "src_vocab_size": 99, "tgt_vocab_size": 99, "langs": ["a", "b"]},
    Truth(5, 8, cross=3, how=EAGER),
    both,
    note="(token, batch, dim)",
)
put(
    "NllbMoe",
    {**PAIR, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    Truth(5, 8, cross=3, how=EAGER),
    both,
    note="mixture of experts",
)
put(
    "PegasusX",
    {**PAIR, "block_size": 4, "num_global_tokens": 2},
    Truth(5, 8, queries=2, keys=2 + TOKENS, cross=3, how=EAGER),
    both,
    note="global tokens and blocks; the global map is read",
)
put("T5", T5, Truth(5, 8, cross=3), both, kernels=KERNELS, note="relative bias, no scale")
put(
    "SwitchTransformers",
    {**T5, "num_decoder_layers": 2, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    Truth(4, 6, cross=2, how=EAGER),
    both,
    note="mixture of experts",
)
put(
    "Whisper",
    {**PAIR, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32},
    Truth(5, 8, queries=20, keys=20, cross=3),
    named(input_features=normal(BATCH, 8, 40), decoder_input_ids=ids(LATER)),
    kernels=KERNELS,
)
put(
    "Speech2Text",
    {
        **PAIR,
        "input_feat_per_channel": 8,
        "input_channels": 1,
        "conv_channels": 16,
        "max_source_positions": 40,
        "max_target_positions": 40,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    },
    Truth(5, 8, queries=10, keys=10, cross=3, how=EAGER),
    named(input_features=normal(BATCH, 40, 8), decoder_input_ids=ids(LATER)),
)
put(
    "Moonshine",
    {
        "vocab_size": 99,
        "hidden_size": DIM,
        "intermediate_size": 64,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 3,
        "encoder_num_attention_heads": HEADS,
        "decoder_num_attention_heads": HEADS,
        "max_position_embeddings": 64,
    },
    Truth(5, 8, queries=7, keys=7, cross=3),
    named(input_values=normal(BATCH, 3200), decoder_input_ids=ids(LATER)),
)

# -- images
put("ViT", VISION, Truth(3, 3, queries=17, keys=17), picture, kernels=KERNELS)
put("Beit", {**VISION, "use_relative_position_bias": True}, Truth(3, 3, queries=17, keys=17), picture, note="relative position bias")
put("Data2VecVision", VISION, Truth(3, 3, queries=17, keys=17), picture)
put("Dinov2WithRegisters", VISION, Truth(3, 3, queries=21, keys=21), picture)
put("DINOv3ViT", {**VISION, "num_register_tokens": 4}, Truth(3, 3, queries=21, keys=21), picture)
put("ViTMAE", {**VISION, "mask_ratio": 0.5}, Truth(3, 3, queries=9, keys=9), picture, note="half of the patches")
put("ViTMSN", VISION, Truth(3, 3, queries=17, keys=17), picture)
put(
    "VitDet",
    {**VISION, "window_size": 2, "window_block_indices": [0, 1]},
    Truth(3, 3, queries=4, keys=4, how=EAGER),
    picture,
    note="windows, then all; (B, C, H, W)",
)
put(
    "Swin",
    {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    Truth(4, 4, 2, 16, 16),
    picture,
    kernels=("sdpa",),
)
put(
    "Swin2SR",
    {"image_size": 32, "patch_size": 1, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 8},
    Truth(4, 4, 2, 64, 64, how=EAGER),
    picture,
    note="cosine scores",
)
put(
    "PvtV2",
    {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [8, 16, 16, 32],
        "num_attention_heads": [1, 2, 2, 4],
        "sr_ratios": [4, 2, 1, 1],
        "mlp_ratios": [2, 2, 2, 2],
        "image_size": 64,
    },
    Truth(4, 4, 1, 256, 16, how=EAGER),
    large_picture,
    note="keys reduced in space",
)
put(
    "Segformer",
    {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "num_attention_heads": [1, 2, 2, 4], "sr_ratios": [4, 2, 1, 1]},
    Truth(4, 4, 1, 256, 16),
    large_picture,
    note="keys reduced in space",
)
put("Aimv2Vision", VISION, Truth(3, 4, queries=16, keys=16, cross=1), picture, model="Aimv2VisionModel", note="attention pool")
put(
    "SiglipVision",
    VISION,
    Truth(3, 4, queries=16, keys=16, cross=1, how=("sdpa", "softmax")),
    picture,
    model="SiglipVisionModel",
    note="attention pool",
)
put(
    "VideoMAE",
    {**VISION, "num_frames": 4, "tubelet_size": 2},
    Truth(3, 3, queries=32, keys=32),
    named(pixel_values=normal(BATCH, 4, 3, 32, 32)),
    note="video",
)
put(
    "Vivit",
    {**VISION, "num_frames": 4, "tubelet_size": [2, 8, 8]},
    Truth(3, 3, queries=33, keys=33),
    named(pixel_values=normal(BATCH, 4, 3, 32, 32)),
    note="video",
)
put(
    "Timesformer",
    {**VISION, "num_frames": 3},
    Truth(3, 6, queries=3, keys=3, how=EAGER),
    named(pixel_values=normal(BATCH, 3, 3, 32, 32)),
    note="time, then space in each block",
)
put("PoolFormer", {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 16, 32]}, Truth(5, 0), large_picture, note="pooling, no attention")

# -- sound, time series
put("Wav2Vec2", SPEECH, Truth(3, 3, queries=19, keys=19), sound, kernels=KERNELS)
put("UniSpeech", SPEECH, Truth(3, 3, queries=19, keys=19), sound)
put("Data2VecAudio", SPEECH, Truth(3, 3, queries=19, keys=19), sound)
put(
    "WavLM",
    {**SPEECH, "num_buckets": 16, "max_bucket_distance": 16},
    Truth(3, 3, queries=19, keys=19, how=EAGER),
    sound,
    note="gated relative bias",
)
put(
    "Wav2Vec2Conformer",
    {**SPEECH, "position_embeddings_type": "relative"},
    Truth(3, 3, queries=19, keys=19),
    sound,
    note="attention between convolutions",
)
put(
    "AST",
    {
        "hidden_size": DIM,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "intermediate_size": 64,
        "patch_size": 8,
        "frequency_stride": 8,
        "time_stride": 8,
        "max_length": 32,
        "num_mel_bins": 16,
    },
    Truth(3, 3, queries=10, keys=10),
    named(input_values=normal(BATCH, 32, 16)),
)
put(
    "PatchTST",
    {
        "num_input_channels": 2,
        "context_length": 32,
        "patch_length": 8,
        "patch_stride": 4,
        "d_model": DIM,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "ffn_dim": 64,
    },
    Truth(3, 3, queries=7, keys=7),
    named(past_values=normal(BATCH, 32, 2)),
    note="channels folded into the batch",
)


def series(generator: torch.Generator) -> Call:
    past, future = torch.randn(BATCH, 10, generator=generator), torch.randn(BATCH, 4, generator=generator)
    times = {
        "past_time_features": torch.randn(BATCH, 10, 1, generator=generator),
        "future_time_features": torch.randn(BATCH, 4, 1, generator=generator),
    }
    return (), {"past_values": past, "past_observed_mask": torch.ones(BATCH, 10), "future_values": future, **times}


SERIES = {"prediction_length": 4, "context_length": 8, "d_model": DIM, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "lags_sequence": [1, 2], "num_time_features": 1}  # fmt: skip
put("TimeSeriesTransformer", SERIES, Truth(4, 6, 2, 8, 8, cross=2, how=EAGER), series, kernels=("eager",))

# -- images with text, detection


def text_and_vision(text: str, vision: str, **more: Any) -> Callable[[], dict[str, Any]]:
    small = {**TEXT, "max_position_embeddings": 16, "num_hidden_layers": 2, "projection_dim": 16, "bos_token_id": 97, "eos_token_id": 98}
    return lambda: {text: small, vision: {**VISION, "projection_dim": 16}, "projection_dim": 16, **more}


image_and_text = named(input_ids=ids(), pixel_values=normal(BATCH, 3, 32, 32))
put(
    "CLIP",
    text_and_vision("text_config", "vision_config"),
    Truth(5, 5, queries=17, keys=17),
    image_and_text,
    kernels=KERNELS,
    note="vision, then causal text",
)
put(
    "Siglip",
    text_and_vision("text_config", "vision_config"),
    Truth(5, 6, queries=16, keys=16, cross=1, how=("sdpa", "softmax")),
    image_and_text,
)
put("AltCLIP", text_and_vision("text_config", "vision_config"), Truth(5, 5, queries=17, keys=17), image_and_text)
put(
    "Git",
    lambda: {**TEXT, "vision_config": {**VISION}},
    Truth(6, 6, queries=17, keys=17, how=EAGER),
    image_and_text,
    note="vision, then causal text over both",
)
put(
    "Vilt",
    {**VISION, "vocab_size": 99, "max_position_embeddings": 16},
    Truth(3, 3, queries=TOKENS + 17, keys=TOKENS + 17, how=EAGER),
    named(
        input_ids=ids(),
        pixel_values=normal(BATCH, 3, 32, 32),
        token_type_ids=constant(torch.zeros(BATCH, TOKENS, dtype=torch.long)),
        pixel_mask=constant(torch.ones(BATCH, 32, 32)),
    ),
    note="words and patches in one sequence",
)
put(
    "Blip2QFormer",
    {**TEXT, "encoder_hidden_size": DIM, "cross_attention_frequency": 2},
    Truth(3, 5, queries=6, keys=6, cross=2),
    named(query_embeds=normal(BATCH, 6, DIM), encoder_hidden_states=normal(BATCH, LATER, DIM)),
    model="Blip2QFormerModel",
    note="cross attention in every second layer",
)
put(
    "Perceiver",
    {
        "num_latents": 6,
        "d_latents": DIM,
        "d_model": 24,
        "num_blocks": 1,
        "num_self_attends_per_block": 3,
        "num_self_attention_heads": HEADS,
        "num_cross_attention_heads": 1,
    },
    Truth(4, 4, 1, 6, 20, cross=1, how=EAGER),
    named(inputs=normal(BATCH, 20, 24)),
    note="the layer in which latents read the input is a block too",
)


def detector() -> dict[str, Any]:
    import transformers

    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"])
    sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("attention_heads", HEADS), ("ffn_dim", 64))}
    return {
        "use_timm_backbone": False,
        "backbone_config": backbone,
        "d_model": DIM,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "num_queries": 6,
        **sides,
    }


put(
    "Detr",
    detector,
    Truth(5, 8, queries=4, keys=4, cross=3, how=EAGER),
    large_picture,
    kernels=("eager",),
    note="object queries are weights",
)
put("TableTransformer", detector, Truth(5, 8, queries=4, keys=4, cross=3, how=EAGER), large_picture, note="object queries are weights")
put(
    "DeformableDetr",
    lambda: {**detector(), "num_feature_levels": 1, "encoder_n_points": 2, "decoder_n_points": 2},
    Truth(3, 3, queries=6, keys=6, how=EAGER),
    large_picture,
    kernels=("eager",),
    note="deformable attention has no keys and is not read",
)
