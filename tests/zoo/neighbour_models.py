"""Written here: a few keys for every token, own tokens beside others', and blocks whose attention has no module of its own."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.parts import Attention, Block, Mlp, Stack, written
from tests.zoo.registry import BATCH, DIM, HEADS, Shelf, Truth, hidden, images, tensors

SHELF = Shelf("written: neighbours")
model = SHELF.model
SOFTMAX = ("softmax",)
REACH = 2


def near(x: Tensor) -> Tensor:
    """The two tokens on either side: [batch, head, token, dim] -> [batch, head, token, dim, neighbour]."""
    return F.pad(x, (0, 0, REACH, REACH)).unfold(2, 2 * REACH + 1, 1)


@model(Truth(2, 2, keys=5, how=SOFTMAX), hidden(), quick=True, note="five neighbours of every token, cut by unfold")
def sliding_by_unfold() -> nn.Module:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bhnd,bhndw->bhnw", q, near(k)).mul(q.shape[-1] ** -0.5).softmax(-1)
        return torch.einsum("bhnw,bhndw->bhnd", weights, near(v))

    return Stack(*(Block(mix) for _ in range(2)))


@model(Truth(2, 2, keys=3, how=SOFTMAX), hidden(), note="three neighbours of every token, picked by an index")
def sliding_by_index() -> nn.Module:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = (torch.arange(q.shape[2])[:, None] + torch.arange(-1, 2)).clamp(0, q.shape[2] - 1)
        weights = (q[..., None, :] @ k[:, :, place].mT * q.shape[-1] ** -0.5).softmax(-1)
        return (weights @ v[:, :, place]).squeeze(-2)

    return Stack(*(Block(mix) for _ in range(2)))


class Patchwork(nn.Module):
    """Every position of an image looks at the nine around it: scores are sums of products, there is no matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keyval, self.out = nn.Conv2d(DIM, DIM, 1), nn.Conv2d(DIM, 2 * DIM, 1), nn.Conv2d(DIM, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        around = F.unfold(self.keyval(x), 3, padding=1)
        k, v = rearrange(around, "b (two h d near) n -> two b h d near n", two=2, h=HEADS, near=9)
        q = rearrange(self.query(x), "b (h d) r c -> b h d 1 (r c)", h=HEADS)
        weights = (q * k).sum(2, keepdim=True).mul(q.shape[2] ** -0.5).softmax(3)
        return x + self.out(rearrange((weights * v).sum(3), "b h d (r c) -> b (h d) r c", r=x.shape[2]))


@model(Truth(3, 3, queries=64, keys=9, how=SOFTMAX), images(), note="nine neighbours in an image, cut by unfold")
def sliding_in_an_image() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, DIM, 4, 4), nn.Sequential(*(Patchwork() for _ in range(3))))


class HeadsInTheBatch(nn.Module):
    """Heads are cut off the features and put one below the other along the batch; the queries are what is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x)
        below = lambda y: torch.cat(y.split(DIM // HEADS, 2), 0)  # noqa: E731
        mixed = written(below(q), below(self.key(x)), below(self.value(x)))
        x = q + torch.cat(mixed.split(len(x), 0), 2)
        return x + F.relu(self.out(x))


@model(Truth(3, 3, how=SOFTMAX), hidden(), quick=True, note="heads split off the features and joined along the batch")
def heads_in_the_batch() -> nn.Module:
    return Stack(*(HeadsInTheBatch() for _ in range(3)))


class Joint(nn.Module):
    """One attention over the own tokens and those of the encoder, projected together or apart."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.query, self.own, self.out, self.mlp = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM), Mlp()
        self.other = nn.Linear(DIM, 2 * DIM) if apart else None

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        if self.other is not None:
            pairs = torch.cat([self.own(x), self.other(memory)], 1)
        else:
            pairs = self.own(torch.cat([x, memory], 1))
        k, v = rearrange(pairs, "b n (two h d) -> two b h n d", two=2, h=HEADS)
        q = rearrange(self.query(x), "b n (h d) -> b h n d", h=HEADS)
        x = x + self.out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))
        return x + self.mlp(x)


class JointDecoder(nn.Module):
    """The decoder's blocks write their attention out themselves; those of the encoder have a module for it."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Joint(apart) for _ in range(3))

    def forward(self, memory: Tensor, x: Tensor) -> Tensor:
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return x


@model(
    Truth(5, 5, queries=16, keys=16, cross=3),
    tensors((BATCH, 16, DIM), (BATCH, 7, DIM)),
    quick=True,
    note="own tokens and the encoder's, most of them the encoder's, in one attention",
)
def joint_attention() -> nn.Module:
    return JointDecoder(apart=False)


@model(Truth(5, 5, queries=16, keys=16, cross=3), tensors((BATCH, 16, DIM), (BATCH, 7, DIM)), note="the same, projected apart")
def joint_attention_projected_apart() -> nn.Module:
    return JointDecoder(apart=True)


class Reading(nn.Module):
    """Keys and values are given; the attention is written out in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.out, self.mlp = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), Mlp()

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = rearrange(self.query(self.norm(x)), "b n (h d) -> b h n d", h=HEADS)
        x = x + self.out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))
        return x + self.mlp(x)


class SharedKeys(nn.Module):
    """The second half of the layers shares one set of keys and values, made by the first half."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.keyval = nn.Linear(DIM, 2 * DIM)
        self.second = nn.ModuleList(Reading() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.first:
            x = block(x)
        k, v = rearrange(self.keyval(x), "b n (two h d) -> two b h n d", two=2, h=HEADS)
        for block in self.second:
            x = block(x, k, v)
        return x


@model(Truth(4, 4), hidden(), note="keys and values made once for the second half of the layers")
def shared_keys_and_values() -> nn.Module:
    return SharedKeys()


class Naming(nn.Module):
    """A class token alone asks all tokens, in blocks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keyval, self.out, self.mlp = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM), Mlp()

    def forward(self, token: Tensor, x: Tensor) -> Tensor:
        k, v = rearrange(self.keyval(torch.cat([token, x], 1)), "b n (two h d) -> two b h n d", two=2, h=HEADS)
        q = rearrange(self.query(token), "b n (h d) -> b h n d", h=HEADS)
        token = token + self.out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))
        return token + self.mlp(token)


class ClassBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.naming = nn.ModuleList(Naming() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        token = repeat(self.token, "n d -> b n d", b=len(x))
        for block in self.naming:
            token = block(token, x)
        return token


@model(Truth(4, 4, cross=None), hidden(), note="blocks for the class token alone, their attention written out")
def class_blocks() -> nn.Module:
    return ClassBlocks()


class Hourglass(nn.Module):
    """Numbered blocks down and up, half as many tokens in the middle, whose block has a name without a number."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle, self.up2, self.up1 = (Block() for _ in range(5))
        self.shrink, self.grow = nn.Linear(2 * DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.down1(x)
        low = self.down2(self.shrink(rearrange(wide, "b (n two) d -> b n (two d)", two=2)))
        low = self.up2(self.middle(low) + low)
        return self.up1(wide + rearrange(self.grow(low), "b n (two d) -> b (n two) d", two=2))


@model(Truth(5, 5), hidden(), note="an hourglass of numbered blocks, the middle one without a number")
def hourglass() -> nn.Module:
    return Hourglass()


class Seeing(nn.Module):
    """Convolutions, and an attention that pools: nothing is added to anything."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.pool = nn.Conv2d(3, DIM, 8, 8), nn.Conv2d(DIM, DIM, 3, padding=1), Attention()

    def forward(self, x: Tensor) -> Tensor:
        h = rearrange(F.relu(self.conv(self.stem(x))), "b d r c -> b (r c) d")
        return self.pool(torch.cat([h.mean(1, keepdim=True), h], 1))[:, 0]


@model(Truth(0, 1, queries=17, keys=17), images(), note="an attention pool after convolutions: no block carries a stream")
def convolutions_with_attention_pool() -> nn.Module:
    return Seeing()


class Absorbing(Attention):
    """A column of scores made from every token, with no key behind it, takes some of the weight away."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Linear(DIM, HEADS)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        k, v = rearrange(self.keyval(x), "b n (two h d) -> two b h n d", two=2, h=self.heads)
        q = rearrange(self.query(x), "b n (h d) -> b h n d", h=self.heads)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), float("-inf"))
        absorbed = rearrange(self.sink(x), "b n h -> b h n 1")
        weights = torch.cat([scores, absorbed], -1).softmax(-1)[..., :-1]
        return self.out(rearrange(weights @ v, "b h n d -> b n (h d)"))


class Absorbed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Absorbing()


@model(Truth(3, 3, causal=True, how=SOFTMAX), hidden(), quick=True, note="sinks made from every token")
def sinks_of_every_token() -> nn.Module:
    return Stack(*(Absorbed() for _ in range(3)))


class TwoNorms(nn.Module):
    """Queries and keys are normalised apart, outside the attention, which takes both as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.asking, self.asked, self.attention, self.mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.asking(x), self.asked(x))
        return x + self.mlp(x)


@model(Truth(3, 3), hidden(), note="queries and keys normalised apart")
def norms_apart() -> nn.Module:
    return Stack(*(TwoNorms() for _ in range(3)))


class Local(nn.Module):
    """Keys and values of a block's own tokens, asked by queries that were made once, before all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.keyval, self.out = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, q: Tensor) -> Tensor:
        k, v = rearrange(self.keyval(x), "b n (two h d) -> two b h n d", two=2, h=HEADS)
        return self.out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class GloballyAsked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(DIM), Local(), Mlp()

    def forward(self, x: Tensor, q: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), q)
        return x + self.mlp(x)


class GlobalQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.summary = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.blocks = nn.ModuleList(GloballyAsked() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = rearrange(self.summary(x), "b n (h d) -> b h n d", h=HEADS)
        for block in self.blocks:
            x = block(x, q)
        return x


@model(Truth(2, 2, cross=2), hidden(), note="one set of queries for all blocks, made before them")
def global_queries() -> nn.Module:
    return GlobalQueries()


class ThreeFactors(nn.Module):
    """Weights per head, and one einsum for the map, the values and the output weights together."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(HEADS, DIM, 8) * 0.1) for _ in range(3))
        self.out, self.norm, self.mlp = nn.Parameter(torch.randn(HEADS, 8, DIM) * 0.1), nn.LayerNorm(DIM), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bthe", self.norm(x), weight) for weight in (self.query, self.key, self.value))
        weights = torch.einsum("bthe,bshe->bhts", q, k).mul(8**-0.5).softmax(-1)
        x = x + torch.einsum("bhts,bshe,hed->btd", weights, v, self.out)
        return x + self.mlp(x)


@model(Truth(3, 3, how=SOFTMAX), hidden(), note="map, values and output weights in one einsum")
def three_factors() -> nn.Module:
    return Stack(*(ThreeFactors() for _ in range(3)))


class Nearest(nn.Module):
    """Every point looks at the five nearest ones, picked by a number for the sequence and five positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keyval, self.out, self.mlp = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM), Mlp()

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        pairs = self.keyval(x)[torch.arange(len(x))[:, None, None], near]
        k, v = rearrange(pairs, "b n near (two h d) -> two b h n near d", two=2, h=HEADS)
        q = rearrange(self.query(x), "b n (h d) -> b h n 1 d", h=HEADS)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out(rearrange(weights @ v, "b h n 1 d -> b n (h d)"))
        return x + self.mlp(x)


class Cloud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers = nn.Linear(3, DIM), nn.ModuleList(Nearest() for _ in range(3))

    def forward(self, points: Tensor) -> Tensor:
        near = torch.cdist(points, points).topk(5, largest=False).indices
        x = self.enter(points)
        for layer in self.layers:
            x = layer(x, near)
        return x


@model(Truth(3, 3, keys=5, how=SOFTMAX), tensors((BATCH, 12, 3)), quick=True, note="the nearest five points of a cloud")
def nearest_points() -> nn.Module:
    return Cloud()


class Recalling(nn.Module):
    """A recurrent decoder: after every word its state asks the source once."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.source, self.cell = nn.Linear(DIM, DIM), nn.GRU(DIM, DIM, batch_first=True), nn.GRUCell(2 * DIM, DIM)
        self.key = nn.Linear(DIM, DIM, bias=False)

    def forward(self, source: Tensor, words: Tensor) -> Tensor:
        memory, state = self.source(self.enter(source))
        state, context, told = state[0], torch.zeros_like(state[0]), []
        for word in self.enter(words).unbind(1):
            state = self.cell(torch.cat([word, context], -1), state)
            weights = (self.key(memory) @ state[..., None]).squeeze(-1).softmax(-1)
            context = (weights[:, None] @ memory).squeeze(1)
            told.append(context)
        return torch.stack(told, 1)


@model(
    Truth(3, 3, heads=1, queries=1, cross=3, how=SOFTMAX),
    tensors((BATCH, 12, DIM), (BATCH, 3, DIM)),
    note="a recurrent decoder asks its source at every step",
)
def recurrent_decoder() -> nn.Module:
    return Recalling()


class Resampling(nn.Module):
    """Latents ask the picture and themselves in one attention, layer after layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.mlp = nn.LayerNorm(DIM), Attention(), Mlp()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        z = z + self.attention(self.before(z), torch.cat([x, self.before(z)], 1))
        return z + self.mlp(z)


class Resampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.latents = nn.Conv2d(3, DIM, 8, 8), nn.Parameter(torch.randn(6, DIM))
        self.layers = nn.ModuleList(Resampling() for _ in range(3))

    def forward(self, image: Tensor) -> Tensor:
        x = rearrange(self.patches(image), "b d r c -> b (r c) d")
        z = repeat(self.latents, "n d -> b n d", b=len(x))
        for layer in self.layers:
            z = layer(z, x)
        return z


@model(Truth(3, 3, queries=6, keys=22, cross=3), images(), note="latents ask a picture and themselves")
def resampler() -> nn.Module:
    return Resampler()
