"""Situations of real training code: each is read rightly, or named as not read. Never a wrong number, never a stale one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.capture.hearing import calls_of, named
from tests.capture.models import BATCH, DIM, HEADS, TOKENS, bert, gpt2, hidden, lengths_mask, llama, loss_of, words
from tests.watching import GPT, assert_similarity, flat, gpt, same_readings, step_of, strict

FROM_BACKWARD = ("gradient_norm", "qk_to_v_gradient")


class Checkpointed(nn.Module):
    """The same GPT, its blocks recomputed in backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner.embed(ids) + self.inner.position.weight[: ids.shape[1]]
        for block in self.inner.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.inner.head(x)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_checkpointed_blocks_are_heard_once_and_alike(reentrant: bool) -> None:
    model, plain = Checkpointed(gpt(), reentrant), gpt()
    monitor, alone = strict(model), strict(plain)
    for step in range(3):
        torch.manual_seed(step)
        snapshot = step_of(monitor, model, step)
        torch.manual_seed(step)
        expected = step_of(alone, plain, step)
        assert [site.name for site in snapshot.block_sites] == [f"inner.{site.name}" for site in expected.block_sites]
        readings = set(expected.metrics) - (set(FROM_BACKWARD) if reentrant else set())
        for name in readings:
            assert flat(snapshot, name) == pytest.approx(flat(expected, name), rel=1e-4, nan_ok=True), name
        for name in FROM_BACKWARD if reentrant else ():
            for got, true in zip(flat(snapshot, name), flat(expected, name), strict=True):
                assert math.isnan(got) or got == pytest.approx(true, rel=1e-4), "missing, or right"


@pytest.mark.zoo
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("build", [bert, gpt2, llama])
def test_checkpointing_of_hugging_face(build: Callable[[str], nn.Module], reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = build("sdpa").train()
    torch.manual_seed(0)
    model = build("sdpa").train()
    switch_on = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch_on({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    monitor, alone = strict(model), strict(plain)
    for step in range(2):
        call = (), {"input_ids": words(step), "attention_mask": lengths_mask((TOKENS, 6, 8))}
        torch.manual_seed(step)
        snapshot = step_of(monitor, model, step, call)
        torch.manual_seed(step)
        expected = step_of(alone, plain, step, call)
        assert [site.name for site in snapshot.sites] == [site.name for site in expected.sites]
        for name in ("effective_rank", "token_similarity", "attention_uniformity", "max_logit", "branch_ratio"):
            assert flat(snapshot, name) == pytest.approx(flat(expected, name), rel=1e-4), name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_forward_without_gradients_is_read(mode: Callable[[], Any]) -> None:
    model, twin = gpt().eval(), gpt().eval()
    monitor, alone = strict(model), strict(twin)
    for step in range(3):
        with monitor.observe(step), mode():
            model(*GPT.call(step)[0])
        snapshot, expected = monitor.latest, step_of(alone, twin, step)
        assert snapshot is not None
        assert same_readings(snapshot, expected, but=(*FROM_BACKWARD, "parameter_gradient_norm", "qk_to_v_weight_gradient"))
        assert all(math.isnan(value) for value in snapshot.series("gradient_norm"))
        assert snapshot.missing["gradient_norm"] == "backward did not run inside the observed window"


def test_evaluation_mode_is_read_too() -> None:
    model = gpt().eval()
    assert all(value > 1 for value in step_of(strict(model), model, 0).series("effective_rank"))


def test_autocast_is_read_in_the_precision_the_model_used() -> None:
    model = gpt()
    monitor = strict(model)
    for step in range(2):
        blocks = named(model, ["blocks.0", "blocks.1", "blocks.2"])
        with calls_of(blocks) as calls, monitor.observe(step), torch.autocast("cpu", dtype=torch.bfloat16):
            loss_of(model(*GPT.call(step)[0])).backward()
        snapshot = monitor.latest
        assert snapshot is not None
        assert_similarity(snapshot, [calls[name][0][2] for name in blocks])
        assert all(0 < value <= 1 for value in flat(snapshot, "attention_uniformity"))


def test_a_model_in_bfloat16_is_read() -> None:
    model = gpt().to(torch.bfloat16)
    monitor = strict(model)
    for step in range(2):
        blocks = named(model, ["blocks.0", "blocks.1", "blocks.2"])
        with calls_of(blocks) as calls:
            snapshot = step_of(monitor, model, step)
        assert_similarity(snapshot, [calls[name][0][2] for name in blocks])
        assert all(value > 0 for value in snapshot.series("gradient_norm"))


def test_an_edit_in_place_after_the_block_comes_too_late_to_be_read() -> None:
    class Edits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(DIM, HEADS, 64, batch_first=True) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                x.mul_(3).relu_()
            return x

    torch.manual_seed(0)
    model = Edits()
    monitor = strict(model)
    layers = named(model, ["layers.0", "layers.1", "layers.2"])
    for step in range(2):
        with calls_of(layers) as calls:
            snapshot = step_of(monitor, model, step, ((hidden(step, BATCH, TOKENS, DIM),), {}))
        assert_similarity(snapshot, [calls[name][0][2] for name in layers])


@pytest.mark.parametrize("known", [False, True], ids=["discovery", "lean"])
def test_batches_of_other_sizes_and_lengths_are_read(known: bool) -> None:
    model = gpt()
    monitor = strict(model)
    if known:
        step_of(monitor, model, 0)
    for step, (batch, tokens) in enumerate(((1, 10), (5, 3), (2, 40), (3, 1), (3, 10)), start=1):
        blocks = named(model, ["blocks.0", "blocks.1", "blocks.2"])
        with calls_of(blocks) as calls:
            snapshot = step_of(monitor, model, step, ((words(step, batch, tokens),), {}))
        assert snapshot.tokens == (float(tokens),) * 3
        if tokens == 1:
            assert all(map(math.isnan, snapshot.series("token_similarity")))
            assert "token_similarity" in " ".join(snapshot.missing)
        else:
            outputs = [calls[name][0][2] for name in blocks]
            chosen = [0, 1, 3, 4][:4] if batch == 5 else list(range(batch))
            assert_similarity(snapshot, [output[chosen] for output in outputs])


def test_nan_and_infinity_are_counted_not_hidden() -> None:
    model = gpt()
    monitor = strict(model)
    step_of(monitor, model, 0)
    with torch.no_grad():
        model.blocks[1].mlp[0].weight[0, 0] = float("nan")
    snapshot = step_of(monitor, model, 1)
    assert snapshot.series("nonfinite")[0] == 0
    assert snapshot.series("nonfinite")[1] == 1
    assert math.isnan(snapshot.series("effective_rank")[1])
