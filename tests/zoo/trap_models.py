"""Written here: normalisations that are no attention over tokens, and mixing that has no distribution."""

from __future__ import annotations

import torch
from einops import einsum, rearrange, reduce
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.parts import Block, Mlp, Stack, fused_causal, written
from tests.zoo.registry import BATCH, DIM, HEADS, WORDS, Shelf, Truth, hidden, images, tensors, words

SHELF = Shelf("written: no attention")
model = SHELF.model
SOFTMAX = ("softmax",)


class Router(nn.Module):
    """A dense mixture of experts: the softmax over experts averages their outputs, which are data."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(DIM, 3), nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        share = self.route(x).softmax(-1)
        return einsum(share, torch.stack([expert(x) for expert in self.experts], 2), "b n e, b n e d -> b n d")


@model(Truth(2, 2, causal=True), hidden(), quick=True, note="a router that mixes expert outputs")
def mixture_of_experts() -> nn.Module:
    return Stack(*(Block(fused_causal, mlp=Router()) for _ in range(2)))


class TopRouter(nn.Module):
    """Tokens are sent to the two best experts and gathered again."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(DIM, 4, bias=False), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = rearrange(x, "b n d -> (b n) d")
        share, chosen = self.route(flat).softmax(-1).topk(2, -1)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            result = result.index_add(0, token, expert(flat[token]) * share[token, place, None])
        return result.view_as(x)


@model(Truth(2, 2, how=SOFTMAX), hidden(), note="a router that sends tokens to the two best experts")
def sparse_experts() -> nn.Module:
    return Stack(*(Block(written, mlp=TopRouter()) for _ in range(2)))


class Squeeze(nn.Module):
    """A gate per channel, softmax over two branches: squeeze-excite and selective kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Conv2d(DIM, DIM, 3, padding=1, groups=4), nn.Conv2d(DIM, DIM, 5, padding=2, groups=4)
        self.gate, self.scale = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.small(x), self.large(x)
        pooled = reduce(one + two, "b d r c -> b d", "mean")
        share = rearrange(self.gate(pooled), "b (two d) -> two b d 1 1", two=2).softmax(0)
        return (share[0] * one + share[1] * two) * self.scale(pooled).sigmoid()[..., None, None]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, DIM, 4, 4), Squeeze(), Squeeze())
        self.body, self.head = Stack(Block(), Block()), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(rearrange(self.stem(x), "b d r c -> b (r c) d"))
        return F.log_softmax(self.head(x.mean(1)), -1)


@model(Truth(2, 2, queries=64, keys=64), images(), note="squeeze-excite and selective kernels before the blocks")
def channel_gates() -> nn.Module:
    return Gated()


class Contrasting(nn.Module):
    """InfoNCE over the batch, inside forward, and a read-out of a learned memory bank."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.bank = Stack(Block(written), Block(written)), nn.Parameter(torch.randn(20, DIM))

    def forward(self, x: Tensor) -> Tensor:
        one, two = (F.normalize(self.body(view).mean(1), dim=-1) for view in (x, x.flip(1)))
        logits = one @ two.T / 0.1
        contrast = F.cross_entropy(logits, torch.arange(len(x))) - logits.softmax(-1).diagonal().log().mean()
        return contrast + ((one @ self.bank.T).softmax(-1) @ self.bank).square().mean()


@model(Truth(4, 4, how=SOFTMAX), hidden(), quick=True, note="InfoNCE and a memory bank inside forward")
def contrastive_loss() -> nn.Module:
    return Contrasting()


class Distilling(nn.Module):
    """A vocabulary softmax times the embedding matrix, an entropy and a divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.body, self.teacher = Stack(Block(fused_causal), Block(fused_causal)), nn.Linear(DIM, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self.embed(ids))
        logits = x @ self.embed.weight.T
        share = logits.softmax(-1)
        expected = share @ self.embed.weight
        loss = F.kl_div(logits.log_softmax(-1), self.teacher(x.detach()).softmax(-1), reduction="batchmean")
        return loss - (share * logits.log_softmax(-1)).sum(-1).mean() + F.mse_loss(expected, x.detach())


@model(Truth(2, 2, causal=True), words(), note="expected embedding, entropy and divergence over the vocabulary")
def vocabulary_softmax() -> nn.Module:
    return Distilling()


class Channels(nn.Module):
    """Cross-covariance attention: features look at features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.mlp = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(self.norm(x)), "b n (three h d) -> three b h d n", three=3, h=HEADS)
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(-1)
        x = x + self.out(rearrange(weights @ v, "b h d n -> b n (h d)"))
        return x + self.mlp(x)


@model(Truth(3, 0), hidden(), note="cross-covariance attention: over features, not tokens")
def channel_attention() -> nn.Module:
    return Stack(*(Channels() for _ in range(3)))


class Linear(nn.Module):
    """Kernel attention: no matrix of weights exists."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return (q @ (k.mT @ v)) / (q @ k.sum(2)[..., None])


@model(Truth(3, 0), hidden(), note="linear attention: there is no matrix of weights")
def linear_attention() -> nn.Module:
    return Stack(*(Block(Linear()) for _ in range(3)))


@model(Truth(3, 0), hidden(), note="sigmoid attention: rows are not normalised")
def sigmoid_attention() -> nn.Module:
    return Stack(*(Block(lambda q, k, v: (q @ k.mT).sigmoid() / q.shape[2] @ v) for _ in range(3)))


class Mixer(nn.Module):
    """Tokens are mixed by a weight matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens, self.mlp = nn.LayerNorm(DIM), nn.Linear(12, 12), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).mT).mT
        return x + self.mlp(x)


@model(Truth(4, 0), hidden(), note="MLP-Mixer")
def token_mixer() -> nn.Module:
    return Stack(*(Mixer() for _ in range(4)))


class Scanning(nn.Module):
    """A gated recurrence over time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter, self.leave = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        value, decay, gate = self.enter(self.norm(x)).chunk(3, -1)
        state, states = torch.zeros_like(value[:, 0]), []
        for now, keep in zip(value.unbind(1), decay.sigmoid().unbind(1), strict=True):
            state = keep * state + (1 - keep) * now
            states.append(state)
        return x + self.leave(torch.stack(states, 1) * F.silu(gate))


@model(Truth(3, 0), hidden(), note="gated recurrence")
def recurrence() -> nn.Module:
    return Stack(*(Scanning() for _ in range(3)))


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + torch.fft.fft2(x).real)
        return x + self.mlp(x)


@model(Truth(3, 0), hidden(), note="Fourier mixing")
def fourier() -> nn.Module:
    return Stack(*(Fourier() for _ in range(3)))


class Pooled(nn.Module):
    """A linear layer scores the tokens, their weighted mean is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score, self.head = Stack(Block(), Block()), nn.Linear(DIM, 1), nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        share = self.score(x).softmax(1)
        return self.head((share.mT @ x)[:, 0])


@model(Truth(2, 2), hidden(), note="a pooling gate of one linear layer is listed, not read")
def sequence_pooling() -> nn.Module:
    return Pooled()


class Probing(nn.Module):
    """A learned query pools the tokens: an attention outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.probe = Stack(Block(), Block()), nn.Parameter(torch.randn(1, 1, DIM))
        self.pool = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.pool(self.probe.expand(len(x), -1, -1), x, x, need_weights=False)[0][:, 0]


@model(Truth(2, 3, cross=1), hidden(), note="a learned query pools the tokens, outside the blocks")
def attention_pooling() -> nn.Module:
    return Probing()


class Pointing(nn.Module):
    """A pointer network: the weights themselves are the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.q, self.k = Stack(Block(), Block()), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return (self.q(x) @ self.k(x).mT).softmax(-1)


@model(Truth(2, 2), hidden(), note="a pointer: nothing is averaged with its weights")
def pointer() -> nn.Module:
    return Pointing()


@model(Truth(0, 0), tensors((BATCH, 3, 32, 32)), note="no Transformer at all")
def plain_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    )


@model(Truth(3, 0), hidden(), note="MLP-Mixer in one list with what is around it")
def mixer_in_a_sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), Mixer(), Mixer(), Mixer(), nn.LayerNorm(DIM), nn.Linear(DIM, 5))
