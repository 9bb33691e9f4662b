"""Masks, biases, scales and layouts of the kernel call: the kernel itself, given the identity for its values, says what its rows are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.capture.hearing import assert_rows, both_ways, calls_of, hear
from tests.capture.models import BATCH, DIM, HEADS, TOKENS, encoder, hidden, lengths_mask
from tests.capture.test_rows import true_rows_of

LENGTHS = (TOKENS, 6, 8)
LIMITS = [pytest.param(None, id="all_rows"), pytest.param(4, id="sampled_rows")]


class KernelCall(nn.Module):
    """Projections, then one call of the kernel with whatever options; remembers what the kernel does to the identity."""

    def __init__(self, options: dict[str, Any], heads: int = HEADS, key_heads: int = HEADS, layout: str = "b n (h d) -> b h n d") -> None:
        super().__init__()
        size = DIM // heads
        self.q, self.k, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, key_heads * size), nn.Linear(DIM, key_heads * size)
        self.options, self.heads, self.key_heads, self.layout = options, heads, key_heads, layout
        self.truth: Tensor | None = None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        other = x if memory is None else memory
        q = rearrange(self.q(x), self.layout, h=self.heads)
        k, v = (rearrange(p(other), self.layout, h=self.key_heads) for p in (self.k, self.v))
        with torch.no_grad(), torch._C.DisableTorchFunction():
            identity = torch.eye(k.shape[-2], dtype=k.dtype).expand(*k.shape[:-1], -1)
            self.truth = F.scaled_dot_product_attention(q, k, identity, **self.options)
        mixed = F.scaled_dot_product_attention(q, k, v, **self.options)
        return rearrange(mixed, "b h n d -> b n (h d)") if mixed.ndim == 4 else mixed


def floating(visible: Tensor, hide: float) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, hide)


CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
PADDED = lengths_mask(LENGTHS).bool()
PER_HEAD = torch.rand(1, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(5)) > 0.4
PER_HEAD[..., 0] = True
BIAS = torch.randn(1, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(6))

MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "is_causal": {"is_causal": True},
    "scale": {"scale": 0.9},
    "bool": {"attn_mask": CAUSAL},
    "bool_keys": {"attn_mask": PADDED[:, None, None, :]},
    "bool_batch": {"attn_mask": PADDED[:, None, None, :] & CAUSAL},
    "bool_head": {"attn_mask": PER_HEAD},
    "bool_full": {"attn_mask": PER_HEAD & PADDED[:, None, None, :]},
    "bool_row": {"attn_mask": PADDED[1:2]},
    "float_inf": {"attn_mask": floating(CAUSAL, float("-inf"))},
    "float_min": {"attn_mask": floating(PADDED[:, None, None, :] & CAUSAL, torch.finfo(torch.float32).min)},
    "float_1e4": {"attn_mask": floating(CAUSAL, -1e4)},
    "float_1e9": {"attn_mask": floating(CAUSAL, -1e9)},
    "bias": {"attn_mask": BIAS},
    "bias_masked": {"attn_mask": BIAS.masked_fill(~CAUSAL, float("-inf"))},
}


@pytest.mark.parametrize("wanted", LIMITS)
@pytest.mark.parametrize("mask", list(MASKS))
def test_every_kind_of_mask(mask: str, wanted: int | None) -> None:
    torch.manual_seed(0)
    model = KernelCall(MASKS[mask])
    for _, _, run in both_ways(model, lambda step: ((hidden(step, BATCH, TOKENS, DIM),), {}), limits=(None, None, wanted)):
        heard = run()
        (observation,) = heard.attention_of.values()
        assert model.truth is not None
        assert_rows(observation, model.truth, wanted)


def test_a_causal_call_with_more_keys_is_aligned_at_the_top_left() -> None:
    torch.manual_seed(0)
    model = KernelCall({"is_causal": True})
    for _, _, run in both_ways(model, lambda step: ((hidden(step, BATCH, 5, DIM), hidden(step + 50, BATCH, 8, DIM)), {})):
        (observation,) = run().attention_of.values()
        assert model.truth is not None
        assert model.truth[0, 0, 0].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
        assert_rows(observation, model.truth, None)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_queries(key_heads: int) -> None:
    torch.manual_seed(0)
    model = KernelCall({"enable_gqa": True, "is_causal": True}, key_heads=key_heads)
    for _, _, run in both_ways(model, lambda step: ((hidden(step, BATCH, TOKENS, DIM),), {})):
        (observation,) = run().attention_of.values()
        assert model.truth is not None
        assert_rows(observation, model.truth, None)


def test_heads_folded_into_the_batch() -> None:
    torch.manual_seed(0)
    model = KernelCall({"is_causal": True}, layout="b n (h d) -> (b h) n d")
    for _, _, run in both_ways(model, lambda step: ((hidden(step, BATCH, TOKENS, DIM),), {})):
        (observation,) = run().attention_of.values()
        assert model.truth is not None
        assert_rows(observation, rearrange(model.truth, "(b h) q k -> b h q k", h=HEADS), None)


def test_heads_before_the_batch() -> None:
    torch.manual_seed(0)
    model = KernelCall({}, layout="b n (h d) -> h b n d")
    for _, _, run in both_ways(model, lambda step: ((hidden(step, BATCH, TOKENS, DIM),), {})):
        (observation,) = run().attention_of.values()
        assert model.truth is not None
        assert_rows(observation, rearrange(model.truth, "h b q k -> b h q k"), None)


def test_a_row_that_may_look_nowhere_has_no_visible_key() -> None:
    torch.manual_seed(0)
    mask = CAUSAL.clone()
    mask[3] = False
    model = KernelCall({"attn_mask": mask})
    for _, _, run in both_ways(model, lambda step: ((hidden(step, BATCH, TOKENS, DIM),), {})):
        (observation,) = run().attention_of.values()
        assert observation.visible is not None
        assert not observation.visible[..., 3, :].any()
        assert observation.visible[..., 4, :].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_rows_are_in_single_precision_or_better(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = KernelCall({"is_causal": True}).to(dtype)
    for _, _, run in both_ways(model, lambda step: ((hidden(step, BATCH, TOKENS, DIM).to(dtype),), {})):
        (observation,) = run().attention_of.values()
        assert observation.weights.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        sums = observation.weights.sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-6, rtol=0)
        assert model.truth is not None
        torch.testing.assert_close(observation.weights.to(dtype), model.truth, atol=4 * torch.finfo(dtype).eps, rtol=0)


def test_autocast_does_not_reach_the_rows() -> None:
    torch.manual_seed(0)
    model = KernelCall({})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        heard = hear(model, (hidden(0, BATCH, TOKENS, DIM),), {})
    (observation,) = heard.attention_of.values()
    sums = observation.weights.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-6, rtol=0)


def padding(kind: str, left: bool) -> Tensor:
    pad = ~lengths_mask(LENGTHS, left=left).bool()
    return pad if kind == "bool" else torch.zeros(pad.shape).masked_fill(pad, float("-inf"))


@pytest.mark.slow
@pytest.mark.parametrize("wanted", LIMITS)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("causal", [False, True], ids=["padding", "padding_and_causal"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "token_first"])
def test_key_padding_masks_of_torch(kind: str, left: bool, causal: bool, wanted: int | None, batch_first: bool) -> None:
    torch.manual_seed(0)
    model = encoder(batch_first, True).train()
    twin = encoder(batch_first, True).train()
    twin.load_state_dict(model.state_dict())
    mask = None if not causal else (~CAUSAL if kind == "bool" else floating(CAUSAL, float("-inf")))
    options: dict[str, Any] = {"src_key_padding_mask": padding(kind, left), "mask": mask}
    valid = [[i for i in range(TOKENS) if row[i]] for row in lengths_mask(LENGTHS, left=left)]
    shape = (BATCH, TOKENS, DIM) if batch_first else (TOKENS, BATCH, DIM)
    call: Callable[[int], Any] = lambda step: ((hidden(step, *shape),), options)  # noqa: E731
    attentions = {f"layers.{i}.self_attn": model.get_submodule(f"layers.{i}.self_attn") for i in range(2)}
    for _, _, run in both_ways(model, call, limits=(None, None, wanted)):
        with calls_of(attentions) as calls:
            heard = run()
        for name, seen in calls.items():
            args, kwargs, _ = seen[0]
            with torch.no_grad():
                truth = true_rows_of(twin.get_submodule(name), args, kwargs)
            assert_rows(heard.rows(name), truth, wanted, valid)
