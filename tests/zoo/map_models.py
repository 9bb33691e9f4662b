"""Written here: the ways in which people compute attention."""

from __future__ import annotations

import math

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.zoo.parts import Attention, Block, Mix, Mlp, Stack, fused, written
from tests.zoo.registry import BATCH, DIM, HEADS, TOKENS, Call, Shelf, Truth, hidden, tensors

SHELF = Shelf("written: attention")
model = SHELF.model
SOFTMAX = ("softmax",)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.shape[-1] ** -0.5


def stack_of(mix: Mix, depth: int = 2) -> nn.Module:
    return Stack(*(Block(mix) for _ in range(depth)))


class Functional(nn.Module):
    """Holds no weights; the softmax is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.normalise, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.drop(self.normalise(scores_of(q, k))) @ v


@model(Truth(2, 2, how=SOFTMAX), hidden(), quick=True)
def softmax_module() -> nn.Module:
    return Stack(*(Block(Functional()) for _ in range(2)))


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="torch.softmax of einops.einsum")
def einops_throughout() -> nn.Module:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = einsum(q, k, "b h i d, b h j d -> b h i j") / math.sqrt(q.shape[-1])
        return einsum(torch.softmax(scores, dim=-1), v, "b h i j, b h j d -> b h i d")

    return stack_of(mix)


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="softmax over axis 1 of (query, key, batch, head)")
def keys_on_axis_one() -> nn.Module:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bhid,bhjd->ijbh", q, k).mul(q.shape[-1] ** -0.5).softmax(dim=1)
        return torch.einsum("ijbh,bhjd->bhid", weights, v)

    return stack_of(mix)


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="softmax over axis 2 of (batch, head, key, query)")
def keys_before_queries() -> nn.Module:
    return stack_of(lambda q, k, v: ((k @ q.mT) * q.shape[-1] ** -0.5).softmax(2).mT @ v)


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="baddbmm and bmm of batch times heads")
def batched_products() -> nn.Module:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one, two, three = (rearrange(t, "b h n d -> (b h) n d") for t in (q, k, v))
        scores = torch.baddbmm(torch.zeros(1, 1, 1), one, two.mT, beta=0, alpha=q.shape[-1] ** -0.5)
        return rearrange(torch.bmm(scores.softmax(-1), three), "(b h) n d -> b h n d", h=q.shape[1])

    return stack_of(mix)


@model(Truth(2, 2, how=("exp",)), hidden(), note="exp, and the sum divided out of the result")
def normalised_at_the_end() -> nn.Module:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, k)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return (weights @ v) / weights.sum(-1, keepdim=True)

    return stack_of(mix)


@model(Truth(2, 2, how=("exp",)), hidden(), note="exp of log_softmax")
def log_softmax() -> nn.Module:
    return stack_of(lambda q, k, v: scores_of(q, k).log_softmax(-1).exp() @ v)


@model(Truth(2, 2, how=("exp",)), hidden(), note="one more in the denominator: rows sum to less than 1")
def softmax_plus_one() -> nn.Module:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = scores_of(q, k).exp()
        return weights / (1 + weights.sum(-1, keepdim=True)) @ v

    return stack_of(mix)


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="weights times values, then a sum")
def weighted_sum() -> nn.Module:
    return stack_of(lambda q, k, v: (scores_of(q, k).softmax(-1)[..., None] * v[:, :, None]).sum(-2))


@model(Truth(2, 2, causal=True, how=SOFTMAX), hidden(), note="ALiBi, built from distances")
def alibi() -> nn.Module:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1)
        bias = -slopes[:, None, None] * (place[:, None] - place).abs()
        future = place[None] > place[:, None]
        return (scores_of(q, k) + bias).masked_fill(future, -math.inf).softmax(-1) @ v

    return stack_of(mix)


@model(Truth(2, 2, causal=True), hidden(), note="ALiBi as the float mask of the kernel")
def alibi_as_mask() -> nn.Module:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        bias = -0.1 * (place[:, None] - place).to(q).masked_fill(place[None] > place[:, None], math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return stack_of(mix)


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="tanh soft cap")
def soft_cap() -> nn.Module:
    return stack_of(lambda q, k, v: (5 * torch.tanh(scores_of(q, k) / 5)).softmax(-1) @ v)


class Sinks(nn.Module):
    """A learned logit per head that takes mass away."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.randn(HEADS))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sink = repeat(self.sink, "h -> b h n 1", b=len(q), n=q.shape[2])
        return torch.cat([scores_of(q, k), sink], -1).softmax(-1)[..., :-1] @ v


@model(Truth(2, 2, how=SOFTMAX), hidden(), quick=True, note="attention sinks: a column that is cut off")
def sinks() -> nn.Module:
    return Stack(*(Block(Sinks()) for _ in range(2)))


class TalkingHeads(nn.Module):
    """Heads are mixed before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(HEADS, HEADS, 1), nn.Linear(HEADS, HEADS)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = self.before(scores_of(q, k)).softmax(-1)
        weights = rearrange(self.after(rearrange(weights, "b h i j -> b i j h")), "b i j h -> b h i j")
        return weights @ v


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="talking heads: the softmax output is what is read")
def talking_heads() -> nn.Module:
    return Stack(*(Block(TalkingHeads()) for _ in range(2)))


class Differential(nn.Module):
    """The difference of two maps over halves of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.amount = nn.Parameter(torch.tensor(0.3))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
        return (scores_of(q1, k1).softmax(-1) - self.amount * scores_of(q2, k2).softmax(-1)) @ v


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="differential attention: the first of two maps is read")
def differential() -> nn.Module:
    return Stack(*(Block(Differential()) for _ in range(2)))


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(DIM, DIM // HEADS, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = scores_of(self.query(x), self.key(x))
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return F.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ self.value(x)


class HeadPerModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Single() for _ in range(HEADS))
        self.out, self.norm, self.mlp = nn.Linear(DIM, DIM), nn.LayerNorm(DIM), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.out(torch.cat([head(h) for head in self.heads], -1))
        return x + self.mlp(x)


@model(Truth(3, 3, causal=True, how=SOFTMAX), hidden(), quick=True, note="a module per head: together one attention")
def one_module_per_head() -> nn.Module:
    return nn.Sequential(*(HeadPerModule() for _ in range(3)))


@model(Truth(2, 2, queries=4, how=SOFTMAX), hidden(), note="four queries at a time; the rows of all chunks are read")
def chunked_queries() -> nn.Module:
    return stack_of(lambda q, k, v: torch.cat([scores_of(part, k).softmax(-1) @ v for part in q.split(4, 2)], 2))


class Prefix(nn.Module):
    """Everybody sees the first four tokens, the others only what is before them."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        visible = (place[None] <= place[:, None]) | (place[None] < 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


@model(Truth(2, 2), hidden(), note="prefix language model")
def prefix_visible() -> nn.Module:
    return Stack(*(Block(Prefix()) for _ in range(2)))


class Documents(nn.Module):
    """Several documents in one row, told apart by their numbers; none looks into another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(DIM), "attention": Attention(), "mlp": Mlp()}) for _ in range(2))

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        visible = (document[:, None, :, None] == document[:, None, None, :]) & (place[None] <= place[:, None])
        for block in self.blocks:
            attention: Attention = block["attention"]  # type: ignore[index, assignment]
            attention.mix = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
            x = x + attention(block["norm"](x))  # type: ignore[index]
            x = x + block["mlp"](x)  # type: ignore[index]
        return x


def packed(generator: torch.Generator) -> Call:
    document = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 3 + [2] * 6])
    return (torch.randn(BATCH, TOKENS, DIM, generator=generator), document), {}


@model(Truth(2, 2, causal=True), packed, quick=True, note="packed documents, block-diagonal mask")
def packed_documents() -> nn.Module:
    return Documents()


class Grouped(nn.Module):
    """Two key heads for four query heads."""

    def __init__(self, kernel: bool) -> None:
        super().__init__()
        self.kernel = kernel
        self.norm, self.mlp, self.out = nn.LayerNorm(DIM), Mlp(), nn.Linear(DIM, DIM)
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = rearrange(self.q(h), "b n (h d) -> b h n d", h=HEADS)
        k, v = rearrange(self.kv(h), "b n (two h d) -> two b h n d", two=2, h=HEADS // 2)
        if self.kernel:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            grouped = rearrange(q, "b (h g) n d -> b h g n d", g=2)
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = torch.einsum("bhgid,bhjd->bhgij", grouped, k) * q.shape[-1] ** -0.5
            mixed = torch.einsum("bhgij,bhjd->bhgid", scores.masked_fill(future, -1e9).softmax(-1), v).flatten(1, 2)
        x = x + self.out(rearrange(mixed, "b h n d -> b n (h d)"))
        return x + self.mlp(x)


@model(Truth(2, 2, causal=True), hidden(), note="grouped queries in the kernel")
def grouped_queries_fused() -> nn.Module:
    return nn.Sequential(Grouped(True), Grouped(True))


@model(Truth(2, 2, causal=True, how=SOFTMAX), hidden(), note="grouped queries written out, five axes")
def grouped_queries_written() -> nn.Module:
    return nn.Sequential(Grouped(False), Grouped(False))


class Rotated(nn.Module):
    """Rotary positions and normalised queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(DIM // HEADS), nn.RMSNorm(DIM // HEADS)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angle = torch.arange(q.shape[2])[:, None] * 10.0 ** -torch.arange(q.shape[-1] // 2)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        q, k = (
            t * cos + torch.cat([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1) * sin
            for t in (self.q_norm(q), self.k_norm(k))
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@model(Truth(2, 2, causal=True), hidden(), note="rotary positions, QK norm")
def rotary() -> nn.Module:
    return Stack(*(Block(Rotated()) for _ in range(2)))


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="distances instead of products: cdist")
def distance_scores() -> nn.Module:
    return stack_of(lambda q, k, v: (-torch.cdist(q, k)).softmax(-1) @ v)


@model(Truth(2, 2, causal=True), hidden(), note="sliding window of three tokens")
def sliding_window() -> nn.Module:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < 3))

    return stack_of(mix)


@model(Truth(2, 2, heads=1, how=SOFTMAX), hidden(), note="one head, no head axis")
def single_head() -> nn.Module:
    return Stack(*(Block(written, heads=1) for _ in range(2)))


class Aten(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten.scaled_dot_product_attention(q, k, v)


@model(Truth(2, 2), hidden(), note="the operator of the dispatcher, called directly")
def dispatcher_operator() -> nn.Module:
    return Stack(*(Block(Aten()) for _ in range(2)))


class Slots(nn.Module):
    """Slot attention: a softmax over slots, then an average over inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(4, DIM))
        self.q, self.k, self.v, self.cell = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.GRUCell(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        slots = repeat(self.slots, "n d -> b n d", b=len(x))
        k, v = self.k(x), self.v(x)
        for _ in range(3):
            weights = scores_of(self.q(slots), k).softmax(1)
            update = (weights / weights.sum(-1, keepdim=True)) @ v
            slots = self.cell(update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return slots


@model(Truth(3, 3, heads=1, queries=4, cross=3, how=SOFTMAX), hidden(), note="slot attention: the softmax runs over the slots")
def slots() -> nn.Module:
    return Slots()


class Flexible(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        if self.causal:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu")
            return flex_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - 0.1 * (h + 1) * (i - j).abs())  # type: ignore[return-value]


@model(Truth(2, 2, causal=True, how=("flex",)), hidden(), trains=False, note="flex_attention with a block mask")
def flex_causal() -> nn.Module:
    return Stack(*(Block(Flexible(True)) for _ in range(2)))


@model(Truth(2, 2, how=("flex",)), hidden(), trains=False, note="flex_attention with a score function")
def flex_distances() -> nn.Module:
    return Stack(*(Block(Flexible(False)) for _ in range(2)))


class Gathered(nn.Module):
    """Every query looks at the four keys that score best."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, k)
        worst = scores.topk(4, -1).values[..., -1:]
        return scores.masked_fill(scores < worst, -math.inf).softmax(-1) @ v


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="the best four keys only")
def best_keys() -> nn.Module:
    return Stack(*(Block(Gathered()) for _ in range(2)))


class Relative(nn.Module):
    """Positions of Transformer-XL: a second product with embeddings of distances, skewed into place."""

    def __init__(self) -> None:
        super().__init__()
        self.distance = nn.Parameter(torch.randn(HEADS, 2 * TOKENS - 1, DIM // HEADS) * 0.1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        place = torch.arange(n)
        table = self.distance[:, place[:, None] - place + n - 1]
        scores = scores_of(q, k) + torch.einsum("bhid,hijd->bhij", q, table)
        return scores.softmax(-1) @ v


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="embeddings of distances")
def relative_positions() -> nn.Module:
    return Stack(*(Block(Relative()) for _ in range(2)))


class Compressed(nn.Module):
    """Linformer: keys and values are projected along the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(TOKENS, 5, bias=False), nn.Linear(TOKENS, 5, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fused(q, self.keys(k.mT).mT, self.values(v.mT).mT)


@model(Truth(2, 2, keys=5), hidden(), note="keys projected from twelve tokens to five")
def compressed_keys() -> nn.Module:
    return Stack(*(Block(Compressed()) for _ in range(2)))


class Latent(nn.Module):
    """Keys and values come from a narrow bottleneck; one rotary key is shared by all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.out = nn.LayerNorm(DIM), Mlp(), nn.Linear(HEADS * 8, DIM)
        self.query, self.down, self.up = nn.Linear(DIM, HEADS * 12), nn.Linear(DIM, 8 + 4), nn.Linear(8, HEADS * 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = rearrange(self.query(h), "b n (h d) -> b h n d", h=HEADS)
        latent, shared = self.down(h).split([8, 4], -1)
        k, v = rearrange(self.up(latent), "b n (h d) -> b h n d", h=HEADS).chunk(2, -1)
        k = torch.cat([k, repeat(shared, "b n d -> b h n d", h=HEADS)], -1)
        x = x + self.out(rearrange(F.scaled_dot_product_attention(q, k, v, is_causal=True), "b h n d -> b n (h d)"))
        return x + self.mlp(x)


@model(Truth(2, 2, causal=True), hidden(), note="latent attention: keys wider than values")
def latent_keys() -> nn.Module:
    return nn.Sequential(Latent(), Latent())


class CrossedStreams(nn.Module):
    """Two sequences that look at each other with shared scores, once along each axis."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.left, self.right = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = scores_of(self.one(x), self.two(y))
        return x + scores.softmax(-1) @ self.right(y), y + scores.softmax(-2).mT @ self.left(x)


class CrossedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossedStreams() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x, y = layer(x, y)
        return x, y


@model(
    Truth(2, 2, heads=1, keys=7, cross=2, how=SOFTMAX),
    tensors((BATCH, TOKENS, DIM), (BATCH, 7, DIM)),
    note="one matrix of scores, normalised along both axes: one attention",
)
def shared_scores() -> nn.Module:
    return CrossedStack()


class Additive(nn.Module):
    """Bahdanau: a small network scores every pair of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.score, self.mlp = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 1), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.tanh(self.query(x)[:, :, None] + self.key(x)[:, None])
        x = x + self.score(pairs)[..., 0].softmax(-1) @ x
        return x + self.mlp(x)


@model(Truth(2, 2, heads=1, how=SOFTMAX), hidden(), note="additive scores")
def additive_scores() -> nn.Module:
    return Stack(Additive(), Additive())


class Graph(nn.Module):
    """A dense graph attention: source and target each have a score, heads on the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.mlp = nn.Linear(DIM, DIM), Mlp()
        self.source, self.target = nn.Parameter(torch.randn(HEADS, DIM // HEADS)), nn.Parameter(torch.randn(HEADS, DIM // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        v = rearrange(self.value(x), "b n (h d) -> b n h d", h=HEADS)
        source, target = (v * self.source).sum(-1), (v * self.target).sum(-1)
        weights = F.leaky_relu(source[:, :, None] + target[:, None], 0.2).softmax(2)
        x = x + rearrange(torch.einsum("bijh,bjhd->bihd", weights, v), "b n h d -> b n (h d)")
        return x + self.mlp(x)


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="dense graph attention")
def dense_graph() -> nn.Module:
    return Stack(Graph(), Graph())


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="products and sums instead of matrix products")
def products_and_sums() -> nn.Module:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q[:, :, :, None] * k[:, :, None]).sum(-1) * q.shape[-1] ** -0.5
        return (scores.softmax(-1)[..., None] * v[:, :, None]).sum(3)

    return stack_of(mix)
