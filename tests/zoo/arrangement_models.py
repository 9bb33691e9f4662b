"""Written here: the ways in which people arrange blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.parts import Attention, Block, Mlp, Stack, fused_causal, written
from tests.zoo.registry import BATCH, DIM, HEADS, TOKENS, WORDS, Call, Shelf, Truth, hidden, images, tensors, words

SHELF = Shelf("written: arrangement")
model = SHELF.model


class LanguageModel(nn.Module):
    """Embedding, whatever is in between, and a head; the blocks sit in a dictionary that is never called."""

    def __init__(self, blocks: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"embed": nn.Embedding(WORDS, DIM), "blocks": blocks, "norm": nn.LayerNorm(DIM), "head": nn.Linear(DIM, WORDS)}
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.parts["embed"](ids)
        for block in self.parts["blocks"].values():  # type: ignore[operator]
            x = block(x)
        return self.parts["head"](self.parts["norm"](x))


@model(Truth(3, 3, causal=True), words(), quick=True)
def dictionary_of_blocks() -> nn.Module:
    return LanguageModel(nn.ModuleDict({name: Block(fused_causal) for name in ("first", "second", "third")}))


class Nested(nn.Module):
    """ModuleLists in ModuleLists; a block is ([norm, attention], [norm, mlp]) and nobody calls it."""

    def __init__(self) -> None:
        super().__init__()
        pair = lambda inner: nn.ModuleList([nn.LayerNorm(DIM), inner])  # noqa: E731
        self.layers = nn.ModuleList(nn.ModuleList([pair(Attention()), pair(Mlp())]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for norm, inner in layer:  # type: ignore[attr-defined]
                x = x + inner(norm(x))
        return x


@model(Truth(3, 3), hidden(), quick=True, note="blocks are nested ModuleLists that are never called")
def nested_lists() -> nn.Module:
    return Nested()


class SideBySide(nn.Module):
    """One list per kind of part."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(3))
        self.attentions = nn.ModuleList(Attention(written) for _ in range(3))
        self.mlps = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, attention, mlp in zip(self.norms, self.attentions, self.mlps, strict=True):
            x = x + attention(norm(x))
            x = x + mlp(x)
        return x


@model(Truth(3, 3, how=("softmax",)), hidden(), note="attentions and MLPs in lists of their own")
def lists_side_by_side() -> nn.Module:
    return SideBySide()


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage_1a, self.stage_2a, self.stage_3a, self.stage_4a = (Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.stage_4a(self.stage_3a(self.stage_2a(self.stage_1a(x))))


@model(Truth(4, 4), hidden(), note="blocks are attributes with numbers in their names")
def numbered_attributes() -> nn.Module:
    return Numbered()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block = nn.Linear(DIM, DIM), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(4):
            x = self.block(x)
        return x


@model(Truth(4, 4), hidden(), note="one block, four executions")
def one_block_again_and_again() -> nn.Module:
    return Shared()


@model(Truth(6, 6), hidden(), note="three blocks, run twice in turn")
def list_run_twice() -> nn.Module:
    body = Stack(*(Block() for _ in range(3)))
    return nn.Sequential(nn.Linear(DIM, DIM), body, nn.LayerNorm(DIM), body)


class Pair(NamedTuple):
    hidden: Tensor
    extra: Tensor | None


@dataclass
class Named:
    hidden: Tensor


class Returning(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *, stream: Tensor) -> Any:  # type: ignore[override]
        x = super().forward(stream)
        return {"tuple": (x, None), "dict": {"hidden": x}, "pair": Pair(x, None), "record": Named(x), "list": [x]}[self.kind]


class Unpacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returning(kind) for kind in ("tuple", "dict", "pair", "record", "list"))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            result = block(stream=x)
            x = result["hidden"] if isinstance(result, dict) else result.hidden if isinstance(result, Named) else result[0]
        return x


@model(Truth(5, 5), hidden(), note="blocks take keywords and return tuples, dictionaries, records")
def blocks_returning_structures() -> nn.Module:
    return Unpacking()


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        left = left + self.attention(right)
        return left, right + self.mlp(left)


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reversible() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x, x.flip(1)
        for block in self.blocks:
            left, right = block(left, right)
        return left + right


@model(Truth(3, 3), hidden(), note="two residual streams")
def reversible_streams() -> nn.Module:
    return TwoStreams()


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(DIM), Attention(fused_causal), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.attention(h) + self.mlp(h)


@model(Truth(3, 3, causal=True), hidden(), note="attention and MLP beside each other")
def parallel_branches() -> nn.Module:
    return Stack(*(Parallel() for _ in range(3)))


class EveryOther(nn.Module):
    """Encoder and decoder by hand; only every second layer of the decoder looks at the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, DIM), nn.Embedding(WORDS, DIM)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block(fused_causal) for _ in range(4))
        self.readers = nn.ModuleDict({str(i): Attention() for i in (1, 3)})
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        memory, x = self.source(ids), self.target(ids[:, :8])
        for block in self.encoder:
            memory = block(memory)
        for i, block in enumerate(self.decoder):
            if str(i) in self.readers:
                x = x + self.readers[str(i)](x, memory)
            x = block(x)
        return self.head(x)


@model(Truth(6, 8, cross=2), words(), quick=True, note="cross attention in every second layer, outside the block")
def encoder_decoder_every_other() -> nn.Module:
    return EveryOther()


class Latents(nn.Module):
    """Perceiver: a few latents read a long input, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, DIM))
        self.layers = nn.ModuleList(nn.ModuleList([Block(memory=16), Block()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        z = repeat(self.latents, "n d -> b n d", b=len(x))
        for read, think in self.layers:  # type: ignore[misc]
            z = think(read(z, x))
        return z


@model(Truth(4, 4, queries=5, keys=20, cross=2), tensors((BATCH, 20, 16)), note="latents read the input")
def perceiver() -> nn.Module:
    return Latents()


class Hybrid(nn.Module):
    """A gated convolution over time, of the same width as a block, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=2, groups=DIM)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.enter(self.norm(x)).chunk(2, -1)
        value = rearrange(self.conv(rearrange(value, "b n d -> b d n"))[..., : x.shape[1]], "b d n -> b n d")
        return x + self.leave(value * F.silu(gate))


@model(Truth(5, 2, causal=True), hidden(), note="three of five layers have no attention")
def hybrid_of_convolution_and_attention() -> nn.Module:
    return Stack(Hybrid(), Block(fused_causal), Hybrid(), Block(fused_causal), Hybrid())


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.enter = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@model(Truth(3, 3), hidden(), note="checkpointed, reentrant")
def checkpointed_reentrant() -> nn.Module:
    return Recomputed(True)


@model(Truth(3, 3), hidden(), note="checkpointed")
def checkpointed() -> nn.Module:
    return Recomputed(False)


class Depth(nn.Module):
    """Stochastic depth: branches of single sequences are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            keep = (torch.rand(len(x), 1, 1) > 0.3).to(x)
            x = x + keep * (block(x) - x)
        return x


@model(Truth(3, 3), hidden(), note="stochastic depth")
def stochastic_depth() -> nn.Module:
    return Depth()


class Adapted(nn.Module):
    """A linear layer with a low-rank update beside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down, self.up = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


@model(Truth(3, 3), hidden(), note="LoRA by hand; the weights below are frozen")
def low_rank_adapters() -> nn.Module:
    stack = Stack(*(Block() for _ in range(3)))
    for block in stack.blocks:
        block.attention.query = Adapted(block.attention.query)  # type: ignore[union-attr]
    return stack


class Wrapper(nn.Module):
    """What distributed training puts around a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@model(Truth(3, 3, causal=True), words(), note="wrapped twice")
def wrapped() -> nn.Module:
    return Wrapper(Wrapper(LanguageModel(nn.ModuleDict({str(i): Block(fused_causal) for i in range(3)}))))


class Twin(nn.Module):
    """One tower for two views."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Stack(*(Block() for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        one, other = (self.tower(view).mean(1) for view in (x, x.flip(-1)))
        return F.cosine_similarity(one, other)


@model(Truth(4, 4), hidden(), note="two passes of one tower")
def siamese() -> nn.Module:
    return Twin()


class Windows(nn.Module):
    """A block on [batch, row, column, dim] whose attention stays inside windows, every second time shifted."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.norm, self.attention, self.mlp = shift, nn.LayerNorm(DIM), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[1] // 4
        h = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        h = self.attention(rearrange(h, "b (r p) (c q) d -> (b r c) (p q) d", p=4, q=4))
        h = rearrange(h, "(b r c) (p q) d -> b (r p) (c q) d", r=rows, c=rows, p=4)
        x = x + torch.roll(h, (self.shift, self.shift), (1, 2))
        return x + self.mlp(x)


class Pyramid(nn.Module):
    """Stages of windows, with half as many rows and columns and twice the features after each."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, 4, 4)
        self.stages = nn.ModuleList(nn.Sequential(Windows(0), Windows(2)) for _ in range(2))
        self.merge = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = rearrange(self.patches(x), "b d r c -> b r c d")
        x = self.stages[0](x)
        x = self.merge(rearrange(x, "b (r p) (c q) d -> b r c (p q d)", p=2, q=2))
        return self.stages[1](x).mean((1, 2))


@model(Truth(4, 4, queries=16, keys=16), images(), quick=True, note="(B, H, W, C), windows, every second one shifted")
def shifted_windows() -> nn.Module:
    return Pyramid()


class Axial(nn.Module):
    """Attention along the rows, then along the columns, of [batch, dim, row, column]."""

    def __init__(self) -> None:
        super().__init__()
        self.along_rows, self.along_columns = Attention(), Attention()
        self.mlp = nn.Conv2d(DIM, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[2]
        h = self.along_rows(rearrange(x, "b d r c -> (b r) c d"))
        x = x + rearrange(h, "(b r) c d -> b d r c", r=rows)
        h = self.along_columns(rearrange(x, "b d r c -> (b c) r d"))
        x = x + rearrange(h, "(b c) r d -> b d r c", c=x.shape[3])
        return x + self.mlp(x)


@model(Truth(2, 4, queries=8, keys=8), images(), note="rows, then columns, of (B, C, H, W)")
def axial() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, DIM, 4, 4), Axial(), Axial())


class Horseshoe(nn.Module):
    """Down, a middle, and up again with skips; the middle is a block of the same class."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(2))
        self.middle = Block()
        self.up = nn.ModuleList(Block() for _ in range(2))
        self.fuse = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = self.middle(x)
        for fuse, block in zip(self.fuse, self.up, strict=True):
            x = block(fuse(torch.cat([x, skips.pop()], -1)))
        return x


@model(Truth(5, 5), hidden(), note="U-shaped, the middle outside the lists")
def horseshoe() -> nn.Module:
    return Horseshoe()


class Flat(nn.Module):
    """No modules at all: weights in lists, attention in functions."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.ParameterList(torch.randn(3 * DIM, DIM) * 0.1 for _ in range(3))
        self.leave = nn.ParameterList(torch.randn(DIM, DIM) * 0.1 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for enter, leave in zip(self.enter, self.leave, strict=True):
            q, k, v = rearrange(F.linear(x, enter), "b n (three h d) -> three b h n d", three=3, h=HEADS)
            x = x + F.linear(rearrange(written(q, k, v), "b h n d -> b n (h d)"), leave)
        return x


@model(Truth(3, 3, how=("softmax",)), hidden(), quick=True, note="nothing but parameters and functions")
def no_modules() -> nn.Module:
    return Flat()


class Pure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@model(Truth(4, 4), hidden(), note="attention and nothing else")
def pure_attention() -> nn.Module:
    return Pure()


class Towers(nn.Module):
    """Image and text of different widths, joined by a fusion stack with cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words = nn.Conv2d(3, DIM, 8, 8), nn.Embedding(WORDS, 24)
        self.vision = Stack(Block(), Block())
        self.text = nn.ModuleList(Block(written, dim=24, heads=3) for _ in range(2))
        self.fusion = nn.ModuleList(nn.ModuleDict({"own": Attention(), "other": Attention(memory=24), "mlp": Mlp()}) for _ in range(2))

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        x, y = rearrange(self.patches(image), "b d r c -> b (r c) d"), self.words(ids)
        x = self.vision(x)
        for block in self.text:
            y = block(y)
        for layer in self.fusion:
            x = x + layer["own"](x)  # type: ignore[index]
            x = x + layer["other"](x, y)  # type: ignore[index]
            x = x + layer["mlp"](x)  # type: ignore[index]
        return x


def image_and_words(generator: torch.Generator) -> Call:
    return (torch.randn(BATCH, 3, 32, 32, generator=generator), torch.randint(0, WORDS, (BATCH, TOKENS), generator=generator)), {}


@model(
    Truth(6, 8, queries=16, keys=16, cross=2, how=("sdpa", "softmax")),
    image_and_words,
    quick=True,
    note="two towers of different width and a fusion stack",
)
def two_towers() -> nn.Module:
    return Towers()


class Remembering(nn.Module):
    """Keys and values reach back into a memory; blocks are lists of parts, one of which is called twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(6, DIM))
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(DIM), Attention(), Mlp()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, attention, mlp in self.layers:  # type: ignore[misc]
            memory = repeat(self.memory, "n d -> b n d", b=len(x))
            x = x + attention(norm(x), torch.cat([norm(memory), norm(x)], 1))
            x = x + mlp(x)
        return x


@model(Truth(2, 2, keys=TOKENS + 6), hidden(), note="a memory joined to the keys is no other sequence")
def joined_memory() -> nn.Module:
    return Remembering()
