"""Models of open_clip, small."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.registry import BATCH, DIM, HEADS, Call, Shelf, Truth

SHELF = Shelf("open_clip")
model = SHELF.model
LENGTH = 9


def pair(generator: torch.Generator) -> Call:
    return (torch.randn(BATCH, 3, 32, 32, generator=generator), torch.randint(1, 99, (BATCH, LENGTH), generator=generator)), {}


VISION = {"width": DIM, "head_width": 8, "patch_size": 8, "image_size": 32}
TEXT = {"context_length": LENGTH, "vocab_size": 99, "width": DIM, "heads": HEADS, "layers": 2}


@model(Truth(5, 5, queries=17, keys=17), pair, note="vision, then causal text")
def clip() -> nn.Module:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    return CLIP(embed_dim=16, vision_cfg=CLIPVisionCfg(layers=3, **VISION), text_cfg=CLIPTextCfg(**TEXT))


@model(Truth(5, 5, queries=17, keys=17), pair, note="the text tower is a module of its own")
def custom_text_clip() -> nn.Module:
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP

    return CustomTextCLIP(embed_dim=16, vision_cfg=CLIPVisionCfg(layers=3, **VISION), text_cfg=CLIPTextCfg(**TEXT))


@model(Truth(5, 6, queries=17, keys=17, cross=1), pair, note="learned queries pool the image")
def attention_pooled_clip() -> nn.Module:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=3, attentional_pool=True, attn_pooler_queries=6, attn_pooler_heads=HEADS, **VISION)
    return CLIP(embed_dim=16, vision_cfg=vision, text_cfg=CLIPTextCfg(**TEXT))
