"""Models of timm, small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.zoo.registry import DIM, HEADS, Shelf, Truth, images

SHELF = Shelf("timm")
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": DIM, "depth": 3, "num_heads": HEADS}
WINDOWS = {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}


def put(name: str, architecture: str, truth: Truth, *, size: int = 32, note: str = "", fused: bool | None = None, **options: Any) -> None:
    """A registered architecture with other sizes; `fused` chooses the kernel where the library leaves a choice."""

    def build() -> nn.Module:
        import timm
        from timm.layers import set_fused_attn

        set_fused_attn(fused is not False)
        try:
            return timm.create_model(architecture, num_classes=5, **options)
        finally:
            set_fused_attn(True)

    SHELF.model(truth, images(size), name=name, note=note)(build)


def put_class(name: str, module: str, kind: str, truth: Truth, options: Callable[[], dict[str, Any]], *, size: int, note: str = "") -> None:
    """A class of the library with sizes that its registered architectures fix."""

    def build() -> nn.Module:
        from importlib import import_module

        return getattr(import_module(f"timm.models.{module}"), kind)(num_classes=5, **options())

    SHELF.model(truth, images(size), name=name, note=note)(build)


def block_of(name: str) -> Any:
    from timm.models import vision_transformer

    return getattr(vision_transformer, name)


def patches(tokens: int = 17, **other: Any) -> Truth:
    return Truth(3, 3, queries=tokens, keys=tokens, **other)


SOFTMAX, BOTH = ("softmax",), ("sdpa", "softmax")

put("vit", "vit_tiny_patch16_224", patches(), **VIT)
put("vit-written", "vit_tiny_patch16_224", patches(how=SOFTMAX), fused=False, note="softmax written out", **VIT)
put("vit-relative", "vit_relpos_small_patch16_224", patches(16), note="relative position bias as a mask", **VIT)
put("vit-shared-relative", "vit_srelpos_small_patch16_224", patches(16), **VIT)
put("vit-rope", "vit_small_patch16_rope_224", patches(), **VIT)
put("vit-registers", "vit_small_patch14_reg4_dinov2", patches(21), note="four registers and a class token", **VIT)
put("vit-dinov3", "vit_small_patch16_dinov3", patches(21), **VIT)
put("vit-perception-encoder", "vit_pe_core_tiny_patch16_384", Truth(3, 4, queries=17, keys=17, cross=1), note="attention pool", **VIT)
put("vit-siglip", "vit_base_patch16_siglip_224", Truth(3, 4, queries=16, keys=16, cross=1), note="attention pool", **VIT)
put(
    "vit-hybrid",
    "vit_small_r26_s32_224",
    patches(5),
    size=64,
    note="a ResNet before the blocks",
    img_size=64,
    embed_dim=DIM,
    depth=3,
    num_heads=HEADS,
)
put("aimv2", "aimv2_large_patch14_224", patches(16), **VIT)
put("flexivit", "flexivit_small", patches(), **VIT)
put("deit-distilled", "deit_tiny_distilled_patch16_224", patches(18), **VIT)
put("beit", "beit_base_patch16_224", patches(), **VIT)
put("beit3", "beit3_base_patch16_224", patches(), **VIT)
put("eva02", "eva02_small_patch14_336", patches(), **VIT)
put("eva-giant", "eva_giant_patch14_224", patches(), **VIT)
put("cait", "cait_xxs24_224", Truth(5, 5, queries=16, keys=16, how=BOTH), note="talking heads, then class attention", **VIT)
put(
    "naflexvit",
    "naflexvit_base_patch16_map",
    Truth(3, 4, queries=17, keys=17, cross=1),
    note="attention pool",
    patch_size=8,
    embed_dim=DIM,
    depth=3,
    num_heads=HEADS,
)
put("swin", "swin_tiny_patch4_window7_224", Truth(4, 4, 2, 16, 16, how=SOFTMAX), note="shifted windows", **WINDOWS)
put("swin-v2", "swinv2_tiny_window8_256", Truth(4, 4, 2, 16, 16, how=SOFTMAX), note="cosine scores", **WINDOWS)
put("swin-v2-cr", "swinv2_cr_tiny_224", Truth(4, 4, 2, 16, 16, how=SOFTMAX), size=64, **{**WINDOWS, "img_size": 64})
put(
    "pvt-v2",
    "pvt_v2_b0",
    Truth(4, 4, 1, 64, 1),
    note="keys reduced in space",
    embed_dims=(16, 16, 32, 32),
    depths=(1, 1, 1, 1),
    num_heads=(1, 2, 2, 2),
)
put(
    "pvt-v2-linear",
    "pvt_v2_b2_li",
    Truth(4, 4, 1, 256, 49),
    size=64,
    note="keys pooled to 7 x 7",
    embed_dims=(16, 16, 32, 32),
    depths=(1, 1, 1, 1),
    num_heads=(1, 2, 2, 2),
)
put(
    "twins-pcpvt",
    "twins_pcpvt_small",
    Truth(4, 4, 1, 256, 4),
    size=64,
    img_size=64,
    embed_dims=(16, 16, 32, 32),
    depths=(1, 1, 1, 1),
    num_heads=(1, 2, 2, 2),
)
put(
    "tnt",
    "tnt_s_legacy_patch16_224",
    Truth(2, 4, 2, 4, 4, how=SOFTMAX),
    note="pixels inside patches",
    img_size=32,
    patch_size=8,
    embed_dim=DIM,
    inner_dim=8,
    depth=2,
    num_heads_inner=2,
    num_heads_outer=4,
)
put(
    "pit",
    "pit_ti_distilled_224",
    Truth(4, 4, 2, 731, 731),
    size=224,
    note="pooling between stages",
    base_dims=(8, 8, 8),
    depth=(1, 2, 1),
    heads=(2, 2, 2),
)
put("convit", "convit_tiny", Truth(3, 3, queries=16, keys=16, how=SOFTMAX), note="gated position attention: content map is read", **VIT)
put("mobilevit", "mobilevit_xxs", Truth(9, 9, 4, 64, 64), size=128, note="patches unfolded")
put("mobilevit-v2", "mobilevitv2_050", Truth(9, 0), size=64, note="separable attention: scores of one linear layer")
put(
    "tiny-vit",
    "tiny_vit_5m_224",
    Truth(3, 3, 1, 49, 49),
    size=224,
    embed_dims=(16, 16, 32, 32),
    depths=(1, 1, 1, 1),
    num_heads=(1, 1, 2, 2),
)
put(
    "sam2-hiera",
    "sam2_hiera_tiny",
    Truth(5, 5, 1, 64, 64),
    size=64,
    note="pooled queries inside windows",
    embed_dim=16,
    stages=(1, 2, 1, 1),
    num_heads=1,
)
put("hiera", "hiera_small_224", Truth(5, 5, 1, 64, 64), size=224, note="mask units", embed_dim=16, num_heads=1, stages=(1, 2, 1, 1))
put(
    "xcit",
    "xcit_nano_12_p16_224",
    Truth(3, 1, 4, 1, 5),
    note="channel attention, then class attention",
    img_size=32,
    patch_size=16,
    embed_dim=DIM,
    depth=2,
    num_heads=HEADS,
    cls_attn_layers=1,
)
put(
    "davit",
    "davit_tiny",
    Truth(4, 4, 1, 49, 49),
    size=64,
    note="windows, and channel attention that is not read",
    embed_dims=(16, 16, 32, 32),
    depths=(1, 1, 1, 1),
    num_heads=(1, 1, 2, 2),
)
put("edgenext", "edgenext_xx_small", Truth(12, 0), size=64, note="convolutions and channel attention")
put(
    "coatnet",
    "coatnet_0_rw_224",
    Truth(2, 2, 1, 196, 196),
    size=224,
    note="two stages of convolutions, two of attention",
    img_size=224,
    depths=(1, 1, 1, 1),
    embed_dim=(32, 32, 32, 32),
)
put(
    "maxvit",
    "maxvit_tiny_tf_224",
    Truth(4, 8, 1, 49, 49),
    size=224,
    note="windows and grids",
    img_size=224,
    depths=(1, 1, 1, 1),
    embed_dim=(32, 32, 32, 32),
)
put("convnext", "convnext_atto", Truth(12, 0), note="no attention")
put(
    "levit",
    "levit_128s",
    Truth(3, 5, 2, 196, 196, how=SOFTMAX),
    size=224,
    note="two more attentions downsample",
    embed_dim=(16, 24, 32),
    num_heads=(2, 3, 4),
    depth=(1, 1, 1),
    key_dim=8,
)
put(
    "visformer",
    "visformer_tiny",
    Truth(2, 2, 2, 196, 196, how=SOFTMAX),
    size=224,
    note="the convolutions of the first stage are no blocks with attention",
    img_size=224,
    embed_dim=32,
    depth=(0, 1, 1),
    num_heads=2,
)

SHELF.model(patches(), images(), name="vit-parallel-scaling", note="one projection for attention and MLP")(
    lambda: __import__("timm").create_model("vit_tiny_patch16_224", num_classes=5, block_fn=block_of("ParallelScalingBlock"), **VIT)
)
SHELF.model(Truth(3, 6, queries=17, keys=17), images(), name="vit-parallel-things", note="two attentions beside each other")(
    lambda: __import__("timm").create_model("vit_tiny_patch16_224", num_classes=5, block_fn=block_of("ParallelThingsBlock"), **VIT)
)

put_class(
    "caformer",
    "metaformer",
    "MetaFormer",
    Truth(4, 2, 1, 16, 16),
    lambda: {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64), **_caformer()},
    size=64,
    note="two stages of convolutions, two of attention",
)
put_class(
    "mvit-v2", "mvitv2", "MultiScaleVit", Truth(4, 4, 1, 256, 16, how=SOFTMAX), lambda: _mvit(), size=64, note="keys pooled by convolutions"
)
put_class(
    "nest",
    "nest",
    "Nest",
    Truth(4, 4, 2, 196, 196),
    lambda: {"img_size": 224, "embed_dims": (16, 16, 16), "num_heads": (2, 2, 2), "depths": (1, 1, 2)},
    size=224,
    note="nested blocks of patches",
)
put_class(
    "mlp-mixer",
    "mlp_mixer",
    "MlpMixer",
    Truth(3, 0),
    lambda: {"img_size": 32, "patch_size": 8, "num_blocks": 3, "embed_dim": DIM},
    size=32,
    note="no attention",
)
put_class(
    "focalnet",
    "focalnet",
    "FocalNet",
    Truth(5, 0),
    lambda: {"embed_dim": 16, "depths": (1, 1, 2, 1)},
    size=64,
    note="focal modulation, no attention",
)
put_class(
    "poolformer",
    "metaformer",
    "MetaFormer",
    Truth(5, 0),
    lambda: {"depths": (1, 1, 2, 1), "dims": (16, 16, 32, 32)},
    size=64,
    note="pooling, no attention",
)


def _caformer() -> dict[str, Any]:
    from timm.models.metaformer import Attention, LayerNorm2dNoBias, LayerNormNoBias, SepConv

    mixers = [SepConv, SepConv, Attention, Attention]
    return {"token_mixers": mixers, "norm_layers": [LayerNorm2dNoBias, LayerNorm2dNoBias, LayerNormNoBias, LayerNormNoBias]}


def _mvit() -> dict[str, Any]:
    from timm.models.mvitv2 import MultiScaleVitCfg

    return {"cfg": MultiScaleVitCfg(depths=(1, 1, 1, 1), embed_dim=16), "img_size": (64, 64)}
