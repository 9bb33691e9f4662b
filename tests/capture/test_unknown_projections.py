"""Where it is not known which weights made q, k or v, a reason is given: never a number of some other weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from collapse_monitor.capture.weights import read_weights
from tests.capture.hearing import hear
from tests.capture.projected import HEAD, HEADS, WIDTH, Attention, Separate, Stack, Weights, heads_of


class Gated(Separate):
    def project(self, x: Tensor) -> Weights:
        q, k, v = super().project(x)
        return q * torch.sigmoid(q), k, v


class GatedByData(Separate):
    def set_up(self) -> None:
        super().set_up()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def project(self, x: Tensor) -> Weights:
        q, k, v = super().project(x)
        return q, k, v * heads_of(self.gate(x))


class Activated(Separate):
    def project(self, x: Tensor) -> Weights:
        q, k, v = super().project(x)
        return q, F.relu(k), v


class ScaledFeatures(Separate):
    """Every feature of the keys has a learned scale, as adapters add it; one for a whole head is part of the softmax's scale."""

    def set_up(self) -> None:
        super().set_up()
        self.gain, self.temperature = nn.Parameter(torch.ones(HEAD)), nn.Parameter(torch.ones(HEADS, 1, 1))

    def project(self, x: Tensor) -> Weights:
        q, k, v = super().project(x)
        return q * self.temperature, k * self.gain, v


class Mixed(Separate):
    """Neighbouring tokens are convolved after the projection."""

    def set_up(self) -> None:
        super().set_up()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def project(self, x: Tensor) -> Weights:
        return heads_of(self.mix(self.q(x).transpose(1, 2)).transpose(1, 2)), heads_of(self.k(x)), heads_of(self.v(x))


class Convolved(Separate):
    """The projection itself looks at neighbours."""

    def set_up(self) -> None:
        super().set_up()
        self.v = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def project(self, x: Tensor) -> Weights:
        return heads_of(self.q(x)), heads_of(self.k(x)), heads_of(self.v(x.transpose(1, 2)).transpose(1, 2))


class TwoStreams(Separate):
    """The first tokens have projections of their own, as in a diffusion transformer that joins text and image."""

    def set_up(self) -> None:
        super().set_up()
        self.q2, self.k2, self.v2 = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def project(self, x: Tensor) -> Weights:
        first, rest = x[:, :3], x[:, 3:]
        pairs = ((self.q2, self.q), (self.k2, self.k), (self.v2, self.v))
        return tuple(heads_of(torch.cat((one(first), other(rest)), dim=1)) for one, other in pairs)


class LastToken(TwoStreams):
    """The same, hidden behind the last token alone."""

    def project(self, x: Tensor) -> Weights:
        pairs = ((self.q2, self.q), (self.k2, self.k), (self.v2, self.v))
        return tuple(heads_of(torch.cat((other(x[:, :1]), one(x[:, 1:2]), other(x[:, 2:])), dim=1)) for one, other in pairs)


class NormedLatent(Attention):
    """q, k and v from a latent that is normalised first: no matrix multiplies the stream."""

    def set_up(self) -> None:
        self.down, self.between, self.up = nn.Linear(WIDTH, 8), nn.RMSNorm(8), nn.Linear(8, 3 * WIDTH)

    def project(self, x: Tensor) -> Weights:
        return tuple(map(heads_of, self.up(self.between(self.down(x))).chunk(3, dim=-1)))


class TwoInputs(Separate):
    """Queries are a sum of projections of different tensors: content and position."""

    def set_up(self) -> None:
        super().set_up()
        self.of_position = nn.Linear(WIDTH, WIDTH)

    def project(self, x: Tensor) -> Weights:
        q, k, v = super().project(x)
        return q + heads_of(self.of_position(torch.tanh(x))), k, v


class JoinedFeatures(Separate):
    """Half of the features of every key come from another projection."""

    def set_up(self) -> None:
        super().set_up()
        self.rest = nn.Linear(WIDTH, WIDTH // 2)

    def project(self, x: Tensor) -> Weights:
        q, k, v = super().project(x)
        return q, torch.cat((k[..., : HEAD // 2], heads_of(self.rest(x))), dim=-1), v


class TalkingHeads(Separate):
    def set_up(self) -> None:
        super().set_up()
        self.mix = nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x))
        scores = self.mix((q @ k.mT * HEAD**-0.5).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.out(rearrange(scores.softmax(-1) @ v, "b h n d -> b n (h d)"))


class MixedFeatures(Separate):
    """A second weight mixes the features of all heads after the projection."""

    def set_up(self) -> None:
        super().set_up()
        self.turn = nn.Linear(WIDTH, WIDTH, bias=False)

    def project(self, x: Tensor) -> Weights:
        q, k, v = super().project(x)
        return heads_of(F.elu(rearrange(q, "b h n d -> b n (h d)")) @ self.turn.weight.softmax(-1)), k, v


class NormedWeight(Separate):
    def set_up(self) -> None:
        super().set_up()
        self.v = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class NoProjection(Separate):
    def project(self, x: Tensor) -> Weights:
        return heads_of(x), heads_of(self.k(x)), heads_of(self.v(x))


class LearnedQueries(Separate):
    def set_up(self) -> None:
        super().set_up()
        self.queries = nn.Parameter(torch.randn(1, HEADS, 4, HEAD))

    def forward(self, x: Tensor) -> Tensor:
        _, k, v = self.project(self.norm(x))
        found = F.scaled_dot_product_attention(self.queries.expand(len(x), -1, -1, -1), k, v)
        return x + self.out(rearrange(found, "b h n d -> b n (h d)")).mean(1, keepdim=True)


CASES: list[tuple[Callable[[], Attention], dict[str, str]]] = [
    (Gated, {"query": "multiplied by another function of the data"}),
    (GatedByData, {"value": "multiplied by another function of the data"}),
    (Activated, {"key": "relu"}),
    (ScaledFeatures, {"key": "a parameter scales each of its features"}),
    (Mixed, {"query": "conv1d"}),
    (Convolved, {"value": "conv1d"}),
    (TwoStreams, dict.fromkeys(("query", "key", "value"), "tokens of different origin")),
    (LastToken, dict.fromkeys(("query", "key", "value"), "tokens of different origin")),
    (NormedLatent, dict.fromkeys(("query", "key", "value"), "latent")),
    (TwoInputs, {"query": "sum of projections of different tensors"}),
    (JoinedFeatures, {"key": "several projections"}),
    (TalkingHeads, {"query": "heads are mixed", "key": "heads are mixed"}),
    (MixedFeatures, {"query": "softmax"}),
    (NormedWeight, {"value": "computed by"}),
    (NoProjection, {"query": ""}),
    (LearnedQueries, {"query": "a parameter"}),
]


@pytest.mark.parametrize(("kind", "expected"), CASES, ids=lambda item: getattr(item, "__name__", ""))
def test_a_reason_takes_the_place_of_a_number(kind: type[Attention], expected: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = Stack(kind)
    plan = hear(model, (torch.randn(3, 8, WIDTH),), {}).plan
    assert plan is not None
    assert len(plan.attentions) == 2
    for attention, layer in zip(plan.attentions, model.layers, strict=True):
        assert dict(attention.projections.reasons).keys() == expected.keys()
        for role, words in expected.items():
            assert words in dict(attention.projections.reasons)[role]
        observed = read_weights(model, attention.projections)
        for role, module in zip(("query", "key", "value"), "qkv", strict=True):
            weight = getattr(observed, role)
            if role in expected:
                assert weight is None
            else:
                torch.testing.assert_close(weight, rearrange(getattr(layer, module).weight, "(h d) c -> h d c", h=HEADS).detach())
        lacking = {
            "qk_weights": {"query", "key"} & expected.keys(),
            "value_weights": {"value"} & expected.keys(),
            "qv_weight_gradient": {"query", "value"} & expected.keys(),
        }
        assert observed.unknown.keys() == {reads for reads, roles in lacking.items() if roles}
