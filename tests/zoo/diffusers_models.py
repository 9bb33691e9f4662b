"""Denoisers of diffusers, small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.registry import BATCH, DIM, HEADS, Inputs, Shelf, Truth, constant, named, normal

SHELF = Shelf("diffusers")
TEXT, WIDTH = 5, 24  # tokens of the prompt and their width
IMAGE = normal(BATCH, 4, 8, 8)
PROMPT = normal(BATCH, TEXT, WIDTH)
TIME = constant(torch.tensor([3, 7]))
HALF_TIME = constant(torch.tensor([0.3, 0.7]))
VIDEO = normal(BATCH, 4, 2, 8, 8)  # (batch, channel, frame, row, column)
SEEN = constant(torch.ones(BATCH, TEXT))


def put(
    kind: str, truth: Truth, inputs: Inputs, *, name: str = "", note: str = "", change: Callable[[Any], Any] | None = None, **options: Any
) -> None:
    def build() -> nn.Module:
        import diffusers

        model = getattr(diffusers, kind)(**options)
        if change is not None:
            change(model)
        return model

    SHELF.model(truth, inputs, name=name or kind, note=note)(build)


SIZES = {"num_attention_heads": HEADS, "attention_head_dim": 8}
UNET = {
    "sample_size": 8, "layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 4, "cross_attention_dim": WIDTH,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip


def unfused(model: Any) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    model.set_attn_processor(AttnProcessor())


def patches(blocks: int, sites: int, tokens: int = 16, **other: Any) -> Truth:
    return Truth(blocks, sites, queries=tokens, keys=tokens, **other)


conditioned = named(sample=IMAGE, timestep=TIME, encoder_hidden_states=PROMPT)
put(
    "UNet2DConditionModel",
    Truth(4, 8, 8, 64, 64, cross=4),
    conditioned,
    note="one block down, one in the middle, two up",
    attention_head_dim=8,
    **UNET,
)
put(
    "UNet2DConditionModel",
    Truth(4, 8, 8, 64, 64, cross=4, how=("softmax",)),
    conditioned,
    name="UNet2DConditionModel-written",
    note="softmax written out",
    change=unfused,
    attention_head_dim=8,
    **UNET,
)
put(
    "DiTTransformer2DModel",
    patches(3, 3),
    named(hidden_states=IMAGE, timestep=TIME, class_labels=constant(torch.tensor([1, 2]))),
    in_channels=4,
    out_channels=8,
    num_layers=3,
    sample_size=8,
    patch_size=2,
    norm_num_groups=4,
    num_embeds_ada_norm=10,
    **SIZES,
)
put(
    "SD3Transformer2DModel",
    patches(3, 3, 21),
    named(hidden_states=IMAGE, encoder_hidden_states=PROMPT, pooled_projections=normal(BATCH, 16), timestep=TIME),
    note="image and text in one sequence",
    sample_size=8,
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=3,
    joint_attention_dim=WIDTH,
    caption_projection_dim=DIM,
    pooled_projection_dim=16,
    pos_embed_max_size=16,
    **SIZES,
)
put(
    "FluxTransformer2DModel",
    patches(4, 4, 21),
    named(
        hidden_states=normal(BATCH, 16, 4),
        encoder_hidden_states=PROMPT,
        pooled_projections=normal(BATCH, 16),
        timestep=HALF_TIME,
        img_ids=constant(torch.zeros(16, 3)),
        txt_ids=constant(torch.zeros(TEXT, 3)),
    ),
    note="two blocks of two streams, two of one",
    patch_size=1,
    in_channels=4,
    num_layers=2,
    num_single_layers=2,
    joint_attention_dim=WIDTH,
    pooled_projection_dim=16,
    axes_dims_rope=(2, 2, 4),
    **SIZES,
)
put(
    "PixArtTransformer2DModel",
    patches(3, 6, cross=3),
    named(
        hidden_states=IMAGE,
        encoder_hidden_states=PROMPT,
        timestep=TIME,
        added_cond_kwargs=constant({"resolution": None, "aspect_ratio": None}),
    ),
    in_channels=4,
    out_channels=8,
    num_layers=3,
    norm_num_groups=4,
    cross_attention_dim=DIM,
    sample_size=8,
    patch_size=2,
    caption_channels=WIDTH,
    **SIZES,
)
put(
    "Transformer2DModel",
    patches(2, 4, 64, cross=2),
    named(hidden_states=normal(BATCH, DIM, 8, 8), encoder_hidden_states=PROMPT),
    note="(B, C, H, W) in and out",
    in_channels=DIM,
    num_layers=2,
    norm_num_groups=4,
    cross_attention_dim=WIDTH,
    **SIZES,
)
put(
    "AuraFlowTransformer2DModel",
    patches(3, 3, 16 + TEXT + 8),
    named(hidden_states=IMAGE, encoder_hidden_states=PROMPT, timestep=HALF_TIME),
    note="eight registers beside the text",
    sample_size=8,
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_mmdit_layers=1,
    num_single_dit_layers=2,
    joint_attention_dim=WIDTH,
    caption_projection_dim=DIM,
    pos_embed_max_size=16,
    **SIZES,
)
put(
    "CogVideoXTransformer3DModel",
    patches(2, 2, TEXT + 32),
    named(hidden_states=normal(BATCH, 2, 4, 8, 8), encoder_hidden_states=PROMPT, timestep=TIME),
    note="video and text in one sequence",
    in_channels=4,
    out_channels=4,
    time_embed_dim=8,
    text_embed_dim=WIDTH,
    num_layers=2,
    sample_width=8,
    sample_height=8,
    sample_frames=5,
    max_text_seq_length=TEXT,
    **SIZES,
)
put(
    "LatteTransformer3DModel",
    patches(4, 6, cross=2),
    named(hidden_states=VIDEO, timestep=TIME, encoder_hidden_states=PROMPT),
    note="space and time in turn",
    in_channels=4,
    out_channels=8,
    num_layers=2,
    cross_attention_dim=DIM,
    sample_size=8,
    patch_size=2,
    caption_channels=WIDTH,
    video_length=2,
    norm_type="ada_norm_single",
    num_embeds_ada_norm=10,
    norm_elementwise_affine=False,
    **SIZES,
)
put(
    "LTXVideoTransformer3DModel",
    patches(2, 4, cross=2),
    named(
        hidden_states=normal(BATCH, 16, 4),
        encoder_hidden_states=PROMPT,
        timestep=TIME,
        encoder_attention_mask=SEEN,
        num_frames=constant(1),
        height=constant(4),
        width=constant(4),
    ),
    in_channels=4,
    out_channels=4,
    cross_attention_dim=DIM,
    num_layers=2,
    caption_channels=WIDTH,
    **SIZES,
)
put(
    "WanTransformer3DModel",
    patches(2, 4, 32, cross=2, heads=2),
    named(hidden_states=VIDEO, timestep=TIME, encoder_hidden_states=PROMPT),
    note="video",
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=WIDTH,
    freq_dim=16,
    ffn_dim=32,
    num_layers=2,
    rope_max_seq_len=32,
)
put(
    "SanaTransformer2DModel",
    Truth(2, 2, 2, 64, TEXT, cross=2),
    named(hidden_states=IMAGE, encoder_hidden_states=PROMPT, timestep=TIME),
    note="linear self-attention is not read, cross attention is",
    in_channels=4,
    out_channels=4,
    num_layers=2,
    num_cross_attention_heads=2,
    cross_attention_head_dim=16,
    cross_attention_dim=DIM,
    caption_channels=WIDTH,
    sample_size=8,
    **SIZES,
)
put(
    "PriorTransformer",
    Truth(2, 2, 2, TEXT + 4, TEXT + 4, causal=True),
    named(
        hidden_states=normal(BATCH, 16),
        timestep=TIME,
        proj_embedding=normal(BATCH, 16),
        encoder_hidden_states=normal(BATCH, TEXT, 16),
        attention_mask=constant(torch.ones(BATCH, TEXT, dtype=torch.bool)),
    ),
    note="causal over text, time and image",
    num_attention_heads=2,
    attention_head_dim=8,
    num_layers=2,
    embedding_dim=16,
    num_embeddings=TEXT,
    additional_embeddings=4,
)
put(
    "StableAudioDiTModel",
    patches(2, 4, 17, cross=2),
    named(hidden_states=normal(BATCH, 4, 16), timestep=HALF_TIME, encoder_hidden_states=PROMPT, global_hidden_states=normal(BATCH, 1, 12)),
    note="grouped queries in the cross attention",
    sample_size=16,
    in_channels=4,
    num_layers=2,
    num_key_value_attention_heads=2,
    out_channels=4,
    cross_attention_dim=16,
    time_proj_dim=8,
    global_states_input_dim=12,
    cross_attention_input_dim=WIDTH,
    **SIZES,
)
put(
    "ChromaTransformer2DModel",
    patches(4, 4, 21),
    named(
        hidden_states=normal(BATCH, 16, 4),
        encoder_hidden_states=PROMPT,
        timestep=HALF_TIME,
        img_ids=constant(torch.zeros(16, 3)),
        txt_ids=constant(torch.zeros(TEXT, 3)),
    ),
    patch_size=1,
    in_channels=4,
    num_layers=2,
    num_single_layers=2,
    joint_attention_dim=WIDTH,
    axes_dims_rope=(2, 2, 4),
    approximator_num_channels=8,
    approximator_hidden_dim=16,
    approximator_layers=1,
    **SIZES,
)
put(
    "QwenImageTransformer2DModel",
    patches(2, 2, 21),
    named(
        hidden_states=normal(BATCH, 16, 4),
        encoder_hidden_states=PROMPT,
        encoder_hidden_states_mask=constant(torch.ones(BATCH, TEXT, dtype=torch.bool)),
        timestep=HALF_TIME,
        img_shapes=constant([[(1, 4, 4)]] * BATCH),
    ),
    patch_size=1,
    in_channels=4,
    out_channels=4,
    num_layers=2,
    joint_attention_dim=WIDTH,
    axes_dims_rope=(2, 2, 4),
    **SIZES,
)
put(
    "UNet2DModel",
    Truth(4, 4, 4, 16, 16),
    named(sample=normal(BATCH, 3, 8, 8), timestep=TIME),
    note="attention between residual convolutions",
    sample_size=8,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(16, 32),
    norm_num_groups=4,
    attention_head_dim=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
put(
    "UNet3DConditionModel",
    Truth(9, 18, 8, 2, 2, cross=4),
    named(sample=VIDEO, timestep=TIME, encoder_hidden_states=PROMPT),
    note="time first, then space and time in turn",
    sample_size=8,
    block_out_channels=(16, 32),
    layers_per_block=1,
    norm_num_groups=4,
    cross_attention_dim=WIDTH,
    attention_head_dim=8,
    down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
    up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
)
put(
    "AutoencoderKL",
    Truth(2, 2, 1, 64, 64),
    named(sample=normal(BATCH, 3, 16, 16)),
    note="one attention in the middle of encoder and decoder",
    block_out_channels=(16, 16),
    norm_num_groups=4,
    sample_size=16,
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
)
put(
    "HunyuanVideoTransformer3DModel",
    Truth(5, 5, queries=TEXT, keys=TEXT),
    named(
        hidden_states=VIDEO,
        timestep=TIME,
        encoder_hidden_states=PROMPT,
        encoder_attention_mask=SEEN,
        pooled_projections=normal(BATCH, 16),
        guidance=constant(torch.tensor([1000.0, 1000.0])),
    ),
    note="the text is refined first",
    in_channels=4,
    out_channels=4,
    num_layers=2,
    num_single_layers=2,
    num_refiner_layers=1,
    patch_size=2,
    patch_size_t=1,
    text_embed_dim=WIDTH,
    pooled_projection_dim=16,
    rope_axes_dim=(2, 2, 4),
    **SIZES,
)
put(
    "CogView3PlusTransformer2DModel",
    patches(2, 2, 16 + TEXT),
    named(
        hidden_states=IMAGE,
        encoder_hidden_states=PROMPT,
        timestep=TIME,
        original_size=constant(torch.ones(BATCH, 2)),
        target_size=constant(torch.ones(BATCH, 2)),
        crop_coords=constant(torch.zeros(BATCH, 2)),
    ),
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=2,
    text_embed_dim=WIDTH,
    time_embed_dim=8,
    condition_dim=4,
    pos_embed_max_size=8,
    sample_size=8,
    **SIZES,
)
