"""Attentions that project in different ways, and for each of them its weights per head, taken apart by hand."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F

from tests.capture.models import BATCH, HEADS, TOKENS, Call, case_named, hidden, words

WIDTH, HEAD = 24, 6
Weights = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Projected:
    """A model, its call, and the weights [head, head_dim, dim] of q, k and v of a site, cut out of its parameters by the test."""

    name: str
    build: Callable[[], nn.Module]
    truth: Callable[[nn.Module, str], Weights]
    call: Callable[[int], Call] = lambda step: ((hidden(step, BATCH, TOKENS, WIDTH),), {})
    library: str = ""
    sites: tuple[str, ...] = ("layers.0", "layers.1")

    def elements(self, model: nn.Module, site: str) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of q, k and v as places in all parameters laid end to end: what the truth cuts out of a model full of numbers."""
        numbered = copy.deepcopy(model)
        count = 0
        for parameter in numbered.parameters():
            parameter.data = torch.arange(count, count + parameter.numel(), dtype=torch.float64).reshape(parameter.shape)
            count += parameter.numel()
        q, k, v = (side.detach().long() for side in self.truth(numbered, site))
        return q, k, v

    def model(self, seed: int = 0) -> nn.Module:
        if self.library:
            pytest.importorskip(self.library)
        torch.manual_seed(seed)
        model = self.build().train()
        for name, parameter in model.named_parameters():
            if "bias" in name:  # biases are no part of it, and zero at the start in most models
                nn.init.normal_(parameter)
        return model


class Attention(nn.Module):
    """Common end: q, k, v as [batch, head, token, dim] in, the stream out. Subclasses say how they project."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.set_up()

    def set_up(self) -> None:
        raise NotImplementedError

    def project(self, x: Tensor) -> Weights:
        raise NotImplementedError

    def weights(self) -> Weights:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x))
        return x + self.out(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


class Stack(nn.Module):
    def __init__(self, kind: type[Attention], depth: int = 2) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return x


def own(name: str, kind: type[Attention]) -> Projected:
    return Projected(name, lambda: Stack(kind), lambda model, site: model.get_submodule(site).weights())


def per_head(rows: list[list[int]], weight: Tensor) -> Tensor:
    """weight [out, in] -> [head, head_dim, in] by lists of row numbers."""
    return torch.stack([torch.stack([weight[row] for row in head]) for head in rows])


def blocks(first: int, heads: int = HEADS, size: int = HEAD) -> list[list[int]]:
    """Rows of heads that lie one after the other, from `first`."""
    return [[first + head * size + feature for feature in range(size)] for head in range(heads)]


def heads_of(x: Tensor, heads: int = HEADS) -> Tensor:
    return rearrange(x, "b n (h d) -> b h n d", h=heads)


class Separate(Attention):
    def set_up(self) -> None:
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def project(self, x: Tensor) -> Weights:
        return heads_of(self.q(x)), heads_of(self.k(x)), heads_of(self.v(x))

    def weights(self) -> Weights:
        return tuple(per_head(blocks(0), module.weight) for module in (self.q, self.k, self.v))


class Fused(Attention):
    """One weight for all three, rows of q first."""

    def set_up(self) -> None:
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def weights(self) -> Weights:
        return tuple(per_head(blocks(part * WIDTH), self.qkv.weight) for part in range(3))


class Split(Fused):
    def project(self, x: Tensor) -> Weights:
        q, k, v = self.qkv(x).split(WIDTH, dim=2)
        return tuple(t.view(*t.shape[:2], HEADS, HEAD).transpose(1, 2) for t in (q, k, v))


class Chunked(Fused):
    def project(self, x: Tensor) -> Weights:
        return tuple(map(heads_of, self.qkv(x).chunk(3, dim=-1)))


class Unbound(Fused):
    """As in timm: reshape, permute, unbind; the batch is folded with the heads for bmm-like kernels."""

    def project(self, x: Tensor) -> Weights:
        return self.qkv(x).reshape(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)


class Sliced(Fused):
    """Slices of the weight itself, before the product."""

    def project(self, x: Tensor) -> Weights:
        parts = (self.qkv.weight[:WIDTH], self.qkv.weight[WIDTH : 2 * WIDTH], self.qkv.weight[2 * WIDTH :])
        return tuple(heads_of(F.linear(x, part)) for part in parts)


class Transposed(Attention):
    """Weights as [in, out], used by `@`."""

    def set_up(self) -> None:
        self.qkv = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 5)

    def project(self, x: Tensor) -> Weights:
        return tuple(map(heads_of, (x @ self.qkv).chunk(3, dim=-1)))

    def weights(self) -> Weights:
        return tuple(per_head(blocks(part * WIDTH), self.qkv.T) for part in range(3))


class Interleaved(Attention):
    """[batch, token, head, 3, dim]: the three of one head lie side by side."""

    def set_up(self) -> None:
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def project(self, x: Tensor) -> Weights:
        return tuple(self.qkv(x).view(*x.shape[:2], HEADS, 3, HEAD)[..., part, :].transpose(1, 2) for part in range(3))

    def weights(self) -> Weights:
        rows = [[[(head * 3 + part) * HEAD + d for d in range(HEAD)] for head in range(HEADS)] for part in range(3)]
        return tuple(per_head(part, self.qkv.weight) for part in rows)


class Strided(Attention):
    """[batch, token, dim, head, 3]: features of one head lie far apart."""

    def set_up(self) -> None:
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def project(self, x: Tensor) -> Weights:
        return tuple(rearrange(self.qkv(x), "b n (d h p) -> p b h n d", h=HEADS, p=3))

    def weights(self) -> Weights:
        rows = [[[(d * HEADS + head) * 3 + part for d in range(HEAD)] for head in range(HEADS)] for part in range(3)]
        return tuple(per_head(part, self.qkv.weight) for part in rows)


class Grouped(Attention):
    """Two heads of k and v for four of q, handed to the kernel as they are."""

    repeats = staticmethod(lambda t: t)

    def set_up(self) -> None:
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def project(self, x: Tensor) -> Weights:
        k, v = self.kv(x).chunk(2, dim=-1)
        return heads_of(self.q(x)), self.repeats(heads_of(k, 2)), self.repeats(heads_of(v, 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.out(rearrange(mixed, "b h n d -> b n (h d)"))

    def weights(self) -> Weights:
        shared = [[[first + group * HEAD + d for d in range(HEAD)] for group in (0, 0, 1, 1)] for first in (0, 2 * HEAD)]
        return (per_head(blocks(0), self.q.weight), *(per_head(rows, self.kv.weight) for rows in shared))


class Repeated(Grouped):
    repeats = staticmethod(lambda t: t.repeat_interleave(2, dim=1))


class Expanded(Grouped):
    repeats = staticmethod(lambda t: t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(t.shape[0], HEADS, *t.shape[2:]))


class GroupedFused(Attention):
    """Per group: two queries, a key, a value in one weight."""

    def set_up(self) -> None:
        self.qkv = nn.Linear(WIDTH, 8 * HEAD)

    def project(self, x: Tensor) -> Weights:
        t = rearrange(self.qkv(x), "b n (g r d) -> b n g r d", g=2, d=HEAD)
        q = rearrange(t[..., :-2, :], "b n g r d -> b (g r) n d")
        k, v = (repeat(part, "b n g 1 d -> b (g r) n d", r=2) for part in (t[..., [-2], :], t[..., [-1], :]))
        return q, k, v

    def weights(self) -> Weights:
        def rows(place: Callable[[int], int]) -> list[list[int]]:
            return [[(head // 2 * 4 + place(head)) * HEAD + d for d in range(HEAD)] for head in range(HEADS)]

        return tuple(per_head(rows(place), self.qkv.weight) for place in (lambda h: h % 2, lambda h: 2, lambda h: 3))


class OneKey(Attention):
    """Multi-query attention by einsum, softmax written out: k and v have no head axis."""

    def set_up(self) -> None:
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HEAD), nn.Linear(WIDTH, HEAD)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = torch.einsum("bhid,bjd->bhij", heads_of(self.q(y)) / math.sqrt(HEAD), self.k(y))
        mixed = torch.einsum("bhij,bjd->bhid", scores.softmax(-1), self.v(y))
        return x + self.out(rearrange(mixed, "b h n d -> b n (h d)"))

    def weights(self) -> Weights:
        return per_head(blocks(0), self.q.weight), *(module.weight.expand(HEADS, -1, -1) for module in (self.k, self.v))


class Einsum(Attention):
    """A weight [dim, head, head_dim] per role; scores [batch, head, query, key] by einsum."""

    def set_up(self) -> None:
        self.q, self.k, self.v = (nn.Parameter(torch.randn(WIDTH, HEADS, HEAD) / 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnc,chd->bnhd", self.norm(x), weight) for weight in (self.q, self.k, self.v))
        weights = (torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(HEAD)).softmax(-1)
        return x + self.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))

    def weights(self) -> Weights:
        return tuple(rearrange(weight, "c h d -> h d c") for weight in (self.q, self.k, self.v))


class Folded(Attention):
    """Batch and heads in one axis, bmm, dropout on the map, softmax over the first axis of transposed scores."""

    def set_up(self) -> None:
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(module(self.norm(x)), "b n (h d) -> (b h) n d", h=HEADS) for module in (self.q, self.k, self.v))
        transposed = torch.baddbmm(torch.zeros(1), k, q.transpose(1, 2), beta=0, alpha=HEAD**-0.5)
        weights = F.dropout(transposed.softmax(dim=1), 0.1).transpose(1, 2)
        return x + self.out(rearrange(torch.bmm(weights, v), "(b h) n d -> b n (h d)", h=HEADS))

    def weights(self) -> Weights:
        return tuple(per_head(blocks(0), module.weight) for module in (self.q, self.k, self.v))


class Pointwise(Attention):
    """A convolution with a kernel of one token is a linear map of each token."""

    def set_up(self) -> None:
        self.qkv = nn.Conv1d(WIDTH, 3 * WIDTH, 1)

    def project(self, x: Tensor) -> Weights:
        return tuple(rearrange(self.qkv(x.transpose(1, 2)), "b (p h d) n -> p b h n d", p=3, h=HEADS))

    def weights(self) -> Weights:
        return tuple(per_head(blocks(part * WIDTH), self.qkv.weight[..., 0]) for part in range(3))


def angles(tokens: int, dim: int) -> Tensor:
    return torch.arange(tokens)[:, None] / 100 ** (torch.arange(dim // 2) * 2 / dim)


class Rotated(Attention):
    """QK-norm, then the two halves of a head rotated against each other, as in Llama; a part of the features is left alone."""

    def set_up(self) -> None:
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.q_gain, self.k_gain = nn.Parameter(torch.ones(HEAD)), nn.Parameter(torch.ones(HEAD))

    def rotate(self, t: Tensor) -> Tensor:
        turned, kept = t[..., :4], t[..., 4:]
        angle = torch.cat([angles(t.shape[2], 4)] * 2, dim=-1)
        first, second = turned.chunk(2, dim=-1)
        return torch.cat((turned * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin(), kept), dim=-1)

    def project(self, x: Tensor) -> Weights:
        q, k, v = heads_of(self.q(x)), heads_of(self.k(x)), heads_of(self.v(x))
        q, k = (t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * gain for t, gain in ((q, self.q_gain), (k, self.k_gain)))
        return self.rotate(q), self.rotate(k), v

    def weights(self) -> Weights:
        return tuple(per_head(blocks(0), module.weight) for module in (self.q, self.k, self.v))


class RotatedPairs(Rotated):
    """Neighbouring features rotated against each other, through complex numbers; `nn` norms."""

    def set_up(self) -> None:
        super().set_up()
        self.gain = nn.RMSNorm(HEAD)

    def rotate(self, t: Tensor) -> Tensor:
        turn = torch.polar(torch.ones(t.shape[2], HEAD // 2), angles(t.shape[2], HEAD))
        return torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * turn).flatten(-2)

    def project(self, x: Tensor) -> Weights:
        q, k, v = heads_of(self.q(x)), heads_of(self.k(x)), heads_of(self.v(x))
        return self.rotate(self.gain(q)), self.rotate(self.gain(k)), v


class WrittenInto(Rotated):
    """The rotated part is written back into q and k in place."""

    def rotate(self, t: Tensor) -> Tensor:
        result = t.clone()
        result[..., :4] = super().rotate(t)[..., :4]
        return result


class Extended(Separate):
    """A learned key and value in front of the others, and projections computed under another view of the tokens."""

    def set_up(self) -> None:
        super().set_up()
        self.k_first, self.v_first = nn.Parameter(torch.randn(1, HEADS, 1, HEAD)), nn.Parameter(torch.randn(1, HEADS, 1, HEAD))

    def project(self, x: Tensor) -> Weights:
        q, k, v = (heads_of(module(x.flatten(0, 1)).unflatten(0, x.shape[:2])) for module in (self.q, self.k, self.v))
        first = (t.expand(len(x), -1, -1, -1) for t in (self.k_first, self.v_first))
        return q, *(torch.cat((one, t), dim=2) for one, t in zip(first, (k, v), strict=True))


class Adapted(Attention):
    """A fused projection with two low-rank terms: one on all rows, one (scaled down, subtracted) on the queries alone by slices."""

    def set_up(self) -> None:
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.qkv.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 3 * WIDTH, bias=False)
        self.c, self.d = nn.Parameter(torch.randn(WIDTH, 2) / 5), nn.Parameter(torch.randn(2, 3 * WIDTH) / 5)
        self.drop = nn.Dropout(0.1)

    def project(self, x: Tensor) -> Weights:
        total = self.qkv(x) + self.b(self.a(self.drop(x))) * 1.5 - (x @ self.c @ self.d) / 4
        return tuple(map(heads_of, (0.5 * total).chunk(3, dim=-1)))

    def weights(self) -> Weights:
        total = self.qkv.weight + 1.5 * self.b.weight @ self.a.weight - (self.c @ self.d).T / 4
        return tuple(per_head(blocks(part * WIDTH), total) for part in range(3))


class LowRank(Attention):
    """q, k and v from a narrow latent without anything between: the two weights are one projection."""

    def set_up(self) -> None:
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, 3 * WIDTH)

    def project(self, x: Tensor) -> Weights:
        return tuple(map(heads_of, self.up(self.down(x)).chunk(3, dim=-1)))

    def weights(self) -> Weights:
        return tuple(per_head(blocks(part * WIDTH), self.up.weight @ self.down.weight) for part in range(3))


class OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEAD) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).mT * HEAD**-0.5).softmax(-1) @ self.v(x)


class Apart(Attention):
    """Every head a module of its own."""

    def set_up(self) -> None:
        self.heads = nn.ModuleList(OneHead() for _ in range(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.out(torch.cat([head(y) for head in self.heads], dim=-1))

    def weights(self) -> Weights:
        return tuple(torch.stack([getattr(head, role).weight for head in self.heads]) for role in "qkv")


class Shared(Attention):
    """The stream is cut into heads first, and one small weight projects each of them."""

    def set_up(self) -> None:
        self.q, self.k, self.v = (nn.Linear(HEAD, HEAD, bias=False) for _ in range(3))

    def project(self, x: Tensor) -> Weights:
        return tuple(module(x.view(*x.shape[:2], HEADS, HEAD)).transpose(1, 2) for module in (self.q, self.k, self.v))

    def weights(self) -> Weights:
        return tuple(module.weight.expand(HEADS, -1, -1) for module in (self.q, self.k, self.v))


OWN = tuple(
    own(kind.__name__, kind)
    for kind in (
        Separate, Split, Chunked, Unbound, Sliced, Transposed, Interleaved, Strided, Grouped, Repeated, Expanded, GroupedFused,
        OneKey, Einsum, Folded, Pointwise, Rotated, RotatedPairs, WrittenInto, Extended, Adapted, LowRank, Apart, Shared,
    )
)  # fmt: skip


# -- torch and other libraries: width 32, four heads of eight


def packed(attribute: str) -> Callable[[nn.Module, str], Weights]:
    """[3 * dim, dim] with the rows of q first."""

    def truth(model: nn.Module, site: str) -> Weights:
        weight = getattr(model.get_submodule(site), attribute)
        weight = weight.weight if isinstance(weight, nn.Module) else weight
        return tuple(per_head(blocks(part * 32, 4, 8), weight) for part in range(3))

    return truth


def columns(model: nn.Module, site: str) -> Weights:
    """[dim, 3 * dim], as GPT-2 keeps it."""
    weight = model.get_submodule(site).c_attn.weight
    return tuple(per_head(blocks(part * 32, 4, 8), weight.T) for part in range(3))


def named(*names: str) -> Callable[[nn.Module, str], Weights]:
    """Linear layers of their own; fewer heads of k and v stand for several of q."""

    def truth(model: nn.Module, site: str) -> Weights:
        weights = [model.get_submodule(site).get_submodule(name).weight for name in names]
        rows = [[[head * (len(weight) // 8) // 4 * 8 + d for d in range(8)] for head in range(4)] for weight in weights]
        return tuple(per_head(part, weight) for part, weight in zip(rows, weights, strict=True))

    return truth


def of_case(name: str, truth: Callable[[nn.Module, str], Weights]) -> Projected:
    case = case_named(name)
    return Projected(name, case.build, truth, case.call, case.library, tuple(site.name for site in case.attentions))


def adapted_gpt2() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=6, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        model = get_peft_model(case_named("gpt2-sdpa").build(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # it starts at zero, where its part would not show
            nn.init.normal_(parameter, std=0.1)
    return model


def adapted(model: nn.Module, site: str) -> Weights:
    layer = model.get_submodule(f"base_model.model.{site}.c_attn")
    low = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    total = layer.base_layer.weight.T + 6 / 4 * low
    return tuple(per_head(blocks(part * 32, 4, 8), total) for part in range(3))


GPT2_SITES = ("transformer.h.0.attn", "transformer.h.1.attn")

TORCH = (
    of_case("encoder-batch_first-pre_norm", packed("in_proj_weight")),
    of_case("encoder-token_first-post_norm", packed("in_proj_weight")),
    of_case("decoder-batch_first-pre_norm", packed("in_proj_weight")),
    of_case("decoder-token_first-post_norm", packed("in_proj_weight")),
    of_case("gpt-sdpa", named("q", "k", "v")),
    of_case("gpt-softmax", named("q", "k", "v")),
)
LIBRARIES = (
    of_case("timm-vit-fused", packed("qkv")),
    of_case("timm-vit-unfused", packed("qkv")),
    of_case("torchvision-vit", packed("in_proj_weight")),
    *(of_case(f"bert-{kernel}", named("query", "key", "value")) for kernel in ("sdpa", "eager")),
    *(of_case(f"gpt2-{kernel}", columns) for kernel in ("sdpa", "eager")),
    *(of_case(f"llama-{kernel}", named("q_proj", "k_proj", "v_proj")) for kernel in ("sdpa", "eager")),
    Projected("gpt2-lora", adapted_gpt2, adapted, lambda s: ((), {"input_ids": words(s)}), "peft", GPT2_SITES),
)


COMPOSED = ("Adapted", "LowRank", "gpt2-lora")
"""Their projections are sums or products of weights; those of all others lie in the weights as they are."""


def each_projected(composed: bool = True) -> Any:
    """Parametrise a test with `case`: all of them, or those whose projections lie in the weights as they are."""
    cases = [case for case in (*OWN, *TORCH, *LIBRARIES) if composed or case.name not in COMPOSED]
    marks = {case.name: [pytest.mark.zoo] for case in LIBRARIES}
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks.get(case.name, [])) for case in cases])
