"""Models of vit-pytorch, small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.registry import BATCH, DIM, HEADS, Call, Inputs, Shelf, Truth, images, tensors

SHELF = Shelf("vit-pytorch")
SOFTMAX = ("softmax",)
IMAGE = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": DIM, "depth": 3, "heads": HEADS, "mlp_dim": 64, "dim_head": 8}
VIDEO = {**IMAGE, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2}
del VIDEO["patch_size"]
frames = tensors((BATCH, 3, 4, 32, 32))


def put(name: str, module: str, kind: str, truth: Truth, inputs: Inputs | None = None, note: str = "", **options: Any) -> None:
    def build() -> nn.Module:
        from importlib import import_module

        return getattr(import_module(f"vit_pytorch.{module}"), kind)(**options)

    SHELF.model(truth, inputs or images(), name=name, note=note)(build)


def patches(tokens: int, **other: Any) -> Truth:
    return Truth(3, 3, queries=tokens, keys=tokens, **{"how": SOFTMAX, **other})


put("ViT", "vit", "ViT", patches(17), dropout=0.1, emb_dropout=0.1, **IMAGE)
put("SimpleViT", "simple_vit", "SimpleViT", patches(16), **IMAGE)
put("SimpleViT-flash", "simple_flash_attn_vit", "SimpleViT", patches(16, how=("sdpa",)), **IMAGE)
put("SimpleViT-registers", "simple_vit_with_register_tokens", "SimpleViT", patches(20), **IMAGE)
put("SimpleViT-patch-dropout", "simple_vit_with_patch_dropout", "SimpleViT", patches(8), note="half of the patches are dropped", **IMAGE)
put("SimpleViT-qk-norm", "simple_vit_with_qk_norm", "SimpleViT", patches(16), **IMAGE)
put(
    "SimpleViT-hyper-connections",
    "simple_vit_with_hyper_connections",
    "SimpleViT",
    patches(20),
    note="four residual streams",
    num_residual_streams=4,
    **IMAGE,
)
put("SimpleViT-value-residual", "simple_vit_with_value_residual", "SimpleViT", patches(16), **IMAGE)
put("SimpleViT-relative", "simple_vit_with_relative_proj_pos_bias", "SimpleViT", patches(16), **IMAGE)
put(
    "SimpleViT-fft",
    "simple_vit_with_fft",
    "SimpleViT",
    patches(32),
    note="patches of the image and of its spectrum",
    freq_patch_size=8,
    **IMAGE,
)
put("SimpleViT-orthogonal-residual", "simple_vit_orthog_residual_update", "SimpleViT", patches(16), **IMAGE)
put("SimpleUViT", "simple_uvit", "SimpleUViT", Truth(4, 4, queries=20, keys=20, how=SOFTMAX), note="U-shaped", **{**IMAGE, "depth": 4})
put("ViT-1d", "vit_1d", "ViT", patches(9), tensors((BATCH, 3, 64)), seq_len=64, **{k: v for k, v in IMAGE.items() if k != "image_size"})
put("ViT-3d", "vit_3d", "ViT", patches(33), frames, note="video", **VIDEO)
put("ViT-5", "vit_5", "ViT", patches(21), **IMAGE)
put("ViT-small-data", "vit_for_small_dataset", "ViT", patches(17), note="tokens do not see themselves", **IMAGE)
put("ViT-keel", "vit_with_keel_post_ln", "ViT", patches(17), **IMAGE)
put("nViT", "normalized_vit", "nViT", patches(16, how=("sdpa",)), note="everything on the sphere", **IMAGE)
put("DeepViT", "deepvit", "DeepViT", patches(17), note="re-attention: heads mixed after the softmax", **IMAGE)
put(
    "CaiT",
    "cait",
    "CaiT",
    Truth(5, 5, queries=16, keys=16, cross=None, how=SOFTMAX),
    note="talking heads, then class attention",
    cls_depth=2,
    **IMAGE,
)
put(
    "CCT",
    "cct",
    "CCT",
    Truth(2, 2, queries=64, keys=64, how=SOFTMAX),
    note="sequence pooling is not read",
    img_size=32,
    embedding_dim=DIM,
    n_conv_layers=1,
    kernel_size=3,
    stride=2,
    padding=1,
    num_layers=2,
    num_heads=HEADS,
    mlp_ratio=2.0,
    num_classes=5,
)
put(
    "PiT",
    "pit",
    "PiT",
    Truth(3, 3, 2, 226, 226, how=SOFTMAX),
    images(64),
    image_size=64,
    patch_size=8,
    num_classes=5,
    dim=16,
    depth=(2, 1),
    heads=(2, 4),
    mlp_dim=32,
    dim_head=8,
)
put(
    "CvT",
    "cvt",
    "CvT",
    Truth(4, 4, 1, 64, 16, how=SOFTMAX),
    note="projections are strided convolutions",
    num_classes=5,
    s1_emb_dim=16,
    s2_emb_dim=16,
    s3_emb_dim=16,
    s1_heads=1,
    s2_heads=2,
    s3_heads=2,
    s1_depth=1,
    s2_depth=1,
    s3_depth=2,
)
put(
    "MaxViT",
    "max_vit_with_registers",
    "MaxViT",
    Truth(2, 4, 1, 53, 53, how=SOFTMAX),
    images(112),
    note="windows and grids with registers",
    num_classes=5,
    dim=16,
    dim_conv_stem=8,
    dim_head=16,
    depth=(1, 1),
    window_size=7,
    dropout=0.0,
)
put(
    "ScalableViT",
    "scalable_vit",
    "ScalableViT",
    Truth(4, 8, 1, 1024, 16, how=SOFTMAX),
    images(128),
    note="reduced keys, then windows",
    num_classes=5,
    dim=16,
    heads=(1, 2, 2, 2),
    depth=(1, 1, 1, 1),
    ssa_dim_key=(8, 8, 8, 8),
    reduction_factor=(8, 4, 2, 1),
    window_size=(16, 8, 4, None),
)
put("RvT", "rvt", "RvT", patches(17), note="rotary positions in two dimensions", **IMAGE)
put(
    "XCiT",
    "xcit",
    "XCiT",
    Truth(5, 2, 4, 1, 17, cross=None, how=SOFTMAX),
    note="channel attention, then class attention",
    cls_depth=2,
    **IMAGE,
)
put(
    "ParallelViT",
    "parallel_vit",
    "ViT",
    Truth(3, 6, queries=17, keys=17, how=SOFTMAX),
    note="two attentions beside each other",
    num_parallel_branches=2,
    **IMAGE,
)
put(
    "ViViT",
    "vivit",
    "ViViT",
    Truth(4, 4, queries=17, keys=17),
    frames,
    note="space, then time",
    spatial_depth=2,
    temporal_depth=2,
    **{k: v for k, v in VIDEO.items() if k != "depth"},
)
put(
    "ViViT-factorised",
    "vivit",
    "ViViT",
    Truth(2, 4, queries=17, keys=17),
    frames,
    note="space and time in each block",
    spatial_depth=2,
    temporal_depth=2,
    variant="factorized_self_attention",
    **{k: v for k, v in VIDEO.items() if k != "depth"},
)
put(
    "PatchMerger",
    "vit_with_patch_merger",
    "ViT",
    Truth(4, 5, queries=16, keys=16, cross=1, how=SOFTMAX),
    note="learned queries merge the patches half-way",
    patch_merge_layer=2,
    patch_merge_num_tokens=4,
    **{**IMAGE, "depth": 4},
)


def wrapped(
    name: str, truth: Truth, wrap: Callable[[Any], nn.Module], inputs: Inputs | None = None, note: str = "", **options: Any
) -> None:
    def build() -> nn.Module:
        from vit_pytorch import ViT

        return wrap(ViT(**{**IMAGE, **options}))

    SHELF.model(truth, inputs or images(), name=name, note=note)(build)


def mae(encoder: Any) -> nn.Module:
    from vit_pytorch import MAE

    return MAE(encoder=encoder, decoder_dim=DIM, decoder_depth=2, decoder_heads=2, decoder_dim_head=8, masking_ratio=0.5)


def adapter(vit: Any) -> nn.Module:
    from vit_pytorch.learnable_memory_vit import Adapter
    from vit_pytorch.learnable_memory_vit import ViT as Frozen

    return Adapter(vit=Frozen(**IMAGE), num_classes=2, num_memories_per_layer=5)


def recorder(vit: Any) -> nn.Module:
    from vit_pytorch.recorder import Recorder

    return Recorder(vit)


class FirstOfTwo(nn.Module):
    """A recorder returns its maps as well."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def labelled(generator: torch.Generator) -> Call:
    return (torch.randn(BATCH, 3, 32, 32, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)), {}


def distilled(vit: Any) -> nn.Module:
    from vit_pytorch import SimpleViT
    from vit_pytorch.distill import DistillableViT, DistillWrapper

    return DistillWrapper(student=DistillableViT(**IMAGE), teacher=SimpleViT(**{**IMAGE, "depth": 2}), temperature=3, alpha=0.5)


wrapped("MAE", Truth(5, 5, queries=8, keys=8, how=SOFTMAX), mae, note="half of the patches, and a decoder", pool="mean")
wrapped("memory-adapter", Truth(3, 3, queries=18, keys=23, how=SOFTMAX), adapter, note="five memory tokens joined in each layer")
wrapped("recorder", patches(17), lambda vit: FirstOfTwo(recorder(vit)), note="foreign hooks on every attention")
wrapped("distillation", Truth(5, 5, queries=16, keys=16, how=SOFTMAX), distilled, labelled, note="the teacher runs without gradients")
