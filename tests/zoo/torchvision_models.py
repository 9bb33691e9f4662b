"""Models of torchvision, small."""

from __future__ import annotations

from torch import nn

from tests.zoo.registry import BATCH, DIM, HEADS, Shelf, Truth, images, tensors

SHELF = Shelf("torchvision")
model = SHELF.model


@model(Truth(3, 3, queries=17, keys=17), images())
def vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 3, HEADS, DIM, 2 * DIM, dropout=0.1, attention_dropout=0.1, num_classes=5)


@model(Truth(4, 4, 2, 16, 16, how=("softmax",)), images(), note="shifted windows")
def swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.1, num_classes=5)


@model(Truth(4, 4, 2, 16, 16, how=("softmax",)), images(), note="cosine scores, post-norm")
def swin_v2() -> nn.Module:
    from torchvision.models import swin_transformer as swin

    return swin.SwinTransformer(
        [4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=5, block=swin.SwinTransformerBlockV2, downsample_layer=swin.PatchMergingV2
    )


@model(Truth(4, 8, 2, 16, 16, how=("softmax",)), images(64), note="windows and grids after a convolution")
def maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((64, 64), 16, 4, [16, 32], [2, 2], 8, 0.1, num_classes=5)


@model(Truth(2, 2, 1, 129, 33, how=("softmax",)), tensors((BATCH, 3, 4, 32, 32)), note="video: pooled attention over space and time")
def mvit() -> nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(1, 16, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    return MViT(
        (32, 32), 4, blocks, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True, proj_after_attn=True, num_classes=5
    )


@model(Truth(8, 0), images(64), note="no attention")
def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 32, 3), CNBlockConfig(32, 64, 3), CNBlockConfig(64, None, 2)], num_classes=5)
