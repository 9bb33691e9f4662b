"""An attention whose queries come in chunks: the rows are those of all chunks, chosen as if it were one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from collapse_monitor.once import find_sites, probe
from tests.capture.hearing import assert_rows, both_ways, hear, valid_positions
from tests.capture.models import BATCH, DIM, HEADS, hidden, lengths_mask
from tests.watching import flat, second_step, step_of, strict

TOKENS = 14
LIMITS = [None, 5, 2]
HEADS_FIRST = "b n (h d) -> b h n d"


class Attention(nn.Module):
    """Queries in chunks of `size`; `how` says how a chunk is cut out and attended with."""

    def __init__(self, how: str, size: int, causal: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.how, self.size, self.causal = how, size, causal
        self.truth: Tensor | None = None

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = (rearrange(p(x), HEADS_FIRST, h=HEADS) for p in (self.q, self.k, self.v))
        count = x.shape[1]
        visible = torch.ones(count, count, dtype=torch.bool)
        visible = visible.tril() if self.causal else visible
        if keep is not None:
            visible = visible & keep[:, None, None, :]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self.truth = F.scaled_dot_product_attention(q, k, torch.eye(count).expand(len(x), HEADS, -1, -1), attn_mask=visible)
        if self.how == "split":
            return self._joined([F.scaled_dot_product_attention(part, k, v) for part in q.split(self.size, 2)])
        if self.how == "before the projection":
            parts = [rearrange(self.q(part), HEADS_FIRST, h=HEADS) for part in x.split(self.size, 1)]
            return self._joined([F.scaled_dot_product_attention(part, k, v) for part in parts])
        return self._joined([self._chunk(q, k, v, visible, start) for start in range(0, count, self.size)])

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, start: int) -> Tensor:
        part, shown = q[:, :, start : start + self.size], visible[..., start : start + self.size, :]
        if self.how == "prefix":
            end = start + part.shape[2]
            return F.scaled_dot_product_attention(part, k[:, :, :end], v[:, :, :end], attn_mask=shown[..., :end])
        if self.how == "written":
            scores = (part @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~shown, -math.inf)
            return scores.softmax(-1) @ v
        return F.scaled_dot_product_attention(part, k, v, attn_mask=shown)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return self.out(rearrange(torch.cat(parts, 2), "b h n d -> b n (h d)"))


class Tower(nn.Module):
    def __init__(self, how: str, size: int = 4, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attend": Attention(how, size, causal), "mlp": nn.Linear(DIM, DIM)}) for _ in range(2))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block["attend"](x, None if attention_mask is None else attention_mask.bool())  # type: ignore[index]
            x = x + block["mlp"](x)  # type: ignore[index]
        return x


def call(step: int, tokens: int = TOKENS) -> Any:
    return (hidden(step, BATCH, tokens, DIM),), {}


KINDS = [("sliced", False), ("sliced", True), ("split", False), ("before the projection", False), ("prefix", True), ("written", True)]


@pytest.mark.parametrize("wanted", LIMITS)
@pytest.mark.parametrize(("how", "causal"), KINDS)
def test_rows_are_spread_over_all_chunks(how: str, causal: bool, wanted: int | None) -> None:
    model = Tower(how, causal=causal)
    for _, _, run in both_ways(model, call, limits=(None, None, wanted)):
        heard = run()
        assert len(heard.attention_of) >= 2
        for layer in range(2):
            truth: Any = model.blocks[layer]["attend"].truth  # type: ignore[index]
            observation = heard.rows(f"blocks.{layer}.attend")
            assert_rows(observation, truth, wanted)


def test_the_site_and_its_readings_are_those_of_one_call() -> None:
    chunked, whole = Tower("sliced", causal=True), Tower("sliced", size=TOKENS, causal=True)
    one, other = (second_step(model, call, max_queries=None) for model in (chunked, whole))
    assert [(site.name, site.heads, site.causal, site.cross) for site in one.sites] == [
        (site.name, site.heads, site.causal, site.cross) for site in other.sites
    ]
    for name in ("attention_uniformity", "head_similarity", "layer_similarity", "dominant_column", "max_logit", "branch_ratio"):
        assert flat(one, name) == pytest.approx(flat(other, name), rel=1e-4, abs=1e-6, nan_ok=True), name
    first = probe(chunked, *call(1)[0])
    assert first.notes == ()
    assert not any(map(math.isnan, flat(first, "attention_uniformity")))


def test_a_last_chunk_of_one_query_is_a_chunk() -> None:
    model = Tower("sliced", size=TOKENS - 1)
    assert probe(model, *call(0)[0]).notes == ()
    for _, _, run in both_ways(model, call, limits=(None, None, None)):
        heard = run()
        for layer in range(2):
            truth: Any = model.blocks[layer]["attend"].truth  # type: ignore[index]
            assert_rows(heard.rows(f"blocks.{layer}.attend"), truth, None)


def test_chunks_of_an_empty_batch_are_read_from_the_next_batch_on() -> None:
    model = Tower("sliced")
    monitor = strict(model)
    with monitor.observe(0):
        model(call(0)[0][0][:0])
    assert monitor.latest is not None
    assert "an empty tensor" in monitor.latest.missing["blocks.0"]
    assert not any(map(math.isnan, flat(step_of(monitor, model, 1, call(1)), "attention_uniformity")))


def test_queries_at_padding_are_left_out() -> None:
    model, lengths = Tower("sliced"), (TOKENS, 6, 9)
    mask = lengths_mask(lengths, TOKENS)
    padded: Callable[[int], Any] = lambda step: (call(step)[0], {"attention_mask": mask})  # noqa: E731
    for _, step, run in both_ways(model, padded, limits=(None, None, None)):
        heard = run()
        for layer in range(2):
            truth: Any = model.blocks[layer]["attend"].truth  # type: ignore[index]
            observation = heard.rows(f"blocks.{layer}.attend")
            valid = valid_positions(padded(step)[1], BATCH, TOKENS)
            index, visible = observation.query_index, observation.visible
            assert index is not None
            assert visible is not None
            for sequence, positions in enumerate(valid):
                rows = index if index.ndim == 1 else index[sequence]
                seen = visible.expand_as(observation.weights)[sequence].any(-1).any(0)
                read = [row for row, there in zip(rows.tolist(), seen, strict=True) if there]
                assert read == positions
                got = torch.where(visible.expand_as(observation.weights)[sequence], observation.weights[sequence], 0)[:, seen]
                torch.testing.assert_close(got, truth[sequence][:, read], atol=1e-5, rtol=0)


@pytest.mark.parametrize("tokens", [6, 30])
def test_another_number_of_chunks_is_read_as_far_as_it_goes(tokens: int) -> None:
    model = Tower("sliced")
    plan = hear(model, *call(0)).plan
    heard = hear(model, *call(1, tokens), plan)
    for layer in range(2):
        truth: Any = model.blocks[layer]["attend"].truth  # type: ignore[index]
        observation = heard.rows(f"blocks.{layer}.attend")
        assert observation.query_index is not None
        rows = observation.query_index.tolist()
        assert rows == list(range(min(tokens, 16)))[: len(rows)]
        assert len(rows) >= min(tokens, TOKENS)
        torch.testing.assert_close(observation.weights, truth[:, :, rows], atol=1e-5, rtol=0)


def test_keys_of_another_sequence_may_be_as_many_as_a_chunk_has_queries() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            q, k, v = (rearrange(p(of), HEADS_FIRST, h=HEADS) for p, of in ((self.q, x), (self.k, memory), (self.v, memory)))
            mixed = torch.cat([F.scaled_dot_product_attention(part, k, v) for part in q.split(4, 2)], 2)
            return x + rearrange(mixed, "b h n d -> b n (h d)")

    torch.manual_seed(0)
    for _, _, run in both_ways(Cross(), lambda step: ((hidden(step, BATCH, TOKENS, DIM), hidden(9, BATCH, 4, DIM)), {})):
        heard = run()
        (observation,) = [rows for key, rows in heard.attention_of.items() if key in heard.names.values()]
        assert observation.weights.shape == (BATCH, HEADS, TOKENS, 4)
        assert observation.visible is None


class Twice(nn.Module):
    """Two maps over the same queries, one taken from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        (q1, q2), (k1, k2) = (rearrange(p(x), "b n (two h d) -> two b h n d", two=2, h=HEADS) for p in (self.q, self.k))
        v = rearrange(self.v(x), HEADS_FIRST, h=HEADS)
        mixed = F.scaled_dot_product_attention(q1, k1, v) - 0.3 * F.scaled_dot_product_attention(q2, k2, v)
        return x + rearrange(mixed, "b h n d -> b n (h d)")


def test_two_maps_over_the_same_queries_are_no_chunks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), Twice(), Twice())
    for batch in (1, 2):
        heard = hear(model, (hidden(0, batch, TOKENS, DIM),), {})
        assert heard.plan is not None
        assert [plan.chunks for plan in heard.plan.attentions] == [(), ()]
        assert probe(model, hidden(0, batch, TOKENS, DIM)).notes == ("of several maps in one attention the first is read: 1, 2",)
        assert [site.query_length for site in find_sites(model, hidden(0, batch, TOKENS, DIM)) if site.kind == "attention"] == [TOKENS] * 2
