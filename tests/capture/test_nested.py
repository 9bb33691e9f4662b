"""Nested tensors in the jagged layout: every sequence is read at its own length, as if it had come alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from collapse_monitor.capture.plan import Plan
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.capture.selection import Selection
from collapse_monitor.capture.window import Observed
from collapse_monitor.once import find_sites, probe
from tests.capture.hearing import Heard, assert_rows, hear, strided
from tests.capture.models import DIM, HEADS, hidden
from tests.watching import flat, strict

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")

LENGTHS = (4, 11, 7)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.truth: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, DIM // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if not x.is_nested:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self.truth.append(F.scaled_dot_product_attention(q, k, torch.eye(x.shape[1]).expand(1, HEADS, -1, -1)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def parts(step: int) -> list[Tensor]:
    return [hidden(100 * step + number, length, DIM) for number, length in enumerate(LENGTHS)]


def jagged(step: int) -> Tensor:
    return torch.nested.nested_tensor(parts(step), layout=torch.jagged)


def heard_with_backward(model: nn.Module, step: int, plan: Plan | None, limits: tuple[int | None, int | None, int | None]) -> Heard:
    heard = Heard()
    observed = Observed(
        model, plan, Sampler(*limits), heard, lambda what, error: heard.faults.append((what, error)), Selection(model, None, None, "train")
    )
    with observed:
        model(jagged(step)).values().square().sum().backward()
    assert not heard.faults, heard.faults
    assert not observed.missing
    heard.plan = observed.plan
    heard.names = {(site.kind, site.name): key for key, site in observed.sites.items()}
    return heard


@pytest.mark.parametrize("wanted", [None, 4])
def test_every_sequence_is_read_as_if_it_came_alone(wanted: int | None) -> None:
    model, plan = Tower(), None
    for step in range(2):
        heard = heard_with_backward(model, step, plan, (None, wanted, wanted))
        plan = heard.plan
        for block in model.blocks:
            block.attention.truth.clear()  # type: ignore[union-attr]
        alone = [hear(model, (part[None],), {}) for part in parts(step)]
        for layer, block in enumerate(model.blocks):
            rows, sample = heard.rows(f"blocks.{layer}.attention"), heard.sample(f"blocks.{layer}")
            maps: Any = block.attention.truth  # type: ignore[union-attr]
            branch, stream = heard.joined(f"blocks.{layer}.attention")
            for sequence, (truth, own) in enumerate(zip(maps, alone, strict=True)):
                length = LENGTHS[sequence]
                assert_one(rows, sequence, truth, wanted)
                chosen = strided(list(range(length)), wanted)
                for observed, single in (
                    (sample.output, own.sample(f"blocks.{layer}").output),
                    (sample.input, own.sample(f"blocks.{layer}").input),
                ):
                    assert observed is not None
                    assert single is not None
                    assert observed.mask is not None
                    assert int(observed.mask[sequence].sum()) == len(chosen)
                    torch.testing.assert_close(observed.hidden[sequence, : len(chosen)], single.hidden[0, chosen], atol=1e-5, rtol=1e-5)
                for together, single in zip((branch, stream), own.joined(f"blocks.{layer}.attention"), strict=True):
                    torch.testing.assert_close(together[sequence, : len(chosen)], single[0, chosen], atol=1e-5, rtol=1e-5)
                    assert not together[sequence, len(chosen) :].any()


def assert_one(rows: Any, sequence: int, truth: Tensor, wanted: int | None) -> None:
    length = truth.shape[-1]
    count = len(strided(list(range(length)), wanted))
    single = type(rows)(
        rows.weights[sequence : sequence + 1, :, :count, :length],
        rows.visible[sequence : sequence + 1, :, :count, :length],
        rows.logits[sequence : sequence + 1, :, :count, :length],
        query_index=rows.query_index[sequence, :count],
    )
    assert_rows(single, truth, wanted)
    assert not rows.visible[sequence, :, :, length:].any()
    assert not rows.visible[sequence, :, count:].any()


def keep(states: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    output.retain_grad()
    states.append(output)


def test_gradients_are_those_of_the_sequences_together() -> None:
    model = Tower()
    plan = None
    for step in range(2):
        heard = heard_with_backward(model, step, plan, (None, None, None))
        plan = heard.plan
        hidden_states: list[Tensor] = []
        handle = model.blocks[0].register_forward_hook(partial(keep, hidden_states))
        for part in parts(step):
            model(part[None]).square().sum().backward()
        handle.remove()
        truth = torch.cat([state.grad[0] for state in hidden_states if state.grad is not None])
        torch.testing.assert_close(heard.gradient_of[heard.names["block", "blocks.0"]], truth, atol=1e-5, rtol=1e-4)
        assert {role for _, role in heard.operand_of} == {"q", "v"}


def test_lengths_and_readings_of_the_snapshot() -> None:
    model = Tower()
    sites = [site for site in find_sites(model, jagged(0)) if site.kind == "attention"]
    assert [(site.heads, site.query_length, site.key_length, site.causal, site.cross) for site in sites] == [
        (HEADS, 11, 11, False, False)
    ] * 2
    monitor = strict(model, max_tokens=None, max_queries=None)
    for step in range(2):
        with monitor.observe(step):
            model(jagged(step)).values().square().sum().backward()
        snapshot = monitor.latest
        assert snapshot is not None
        alone = [probe(model, part[None]) for part in parts(step)]
        for name in ("token_similarity", "effective_rank", "attention_uniformity"):
            mean = torch.tensor([flat(one, name) for one in alone]).mean(0)
            torch.testing.assert_close(torch.tensor(flat(snapshot, name)), mean, atol=1e-4, rtol=1e-4, msg=name)
        for name in ("gradient_norm", "qk_to_v_gradient", "branch_ratio"):
            assert not any(map(math.isnan, flat(snapshot, name))), name
    monitor.close()


@pytest.mark.zoo
def test_images_of_several_sizes() -> None:
    """A published model for them; what the kernel was given says what its rows are."""
    navit = pytest.importorskip("vit_pytorch.na_vit_nested_tensor").NaViT
    torch.manual_seed(0)
    model = navit(
        image_size=64, patch_size=16, num_classes=5, dim=DIM, depth=2, heads=HEADS, dim_head=8, mlp_dim=64, token_dropout_prob=0.1
    )
    images = [torch.randn(3, *size) for size in ((64, 64), (32, 64), (64, 48))]
    kernel, maps = F.scaled_dot_product_attention, []

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            maps.append(
                [(one @ other.mT / one.shape[-1] ** 0.5).softmax(-1)[None] for one, other in zip(q.unbind(), k.unbind(), strict=True)]
            )
        return kernel(q, k, v, **options)

    plan = None
    for _ in range(2):
        maps.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", attend)
            heard = hear(model, (images,), {}, plan)
        plan = heard.plan
        assert plan is not None
        assert [site.site.name for site in plan.attentions] == ["transformer.layers.0.0", "transformer.layers.1.0", "attn_pool"]
        for site, truths in zip(plan.attentions, maps, strict=True):
            rows = heard.rows(site.site.name)
            for sequence, truth in enumerate(truths):
                queries, keys = truth.shape[2:]
                torch.testing.assert_close(rows.weights[sequence, :, :queries, :keys], truth[0], atol=1e-5, rtol=0)
