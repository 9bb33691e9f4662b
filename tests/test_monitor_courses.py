"""What runs inside a window: blocks run again, left out or called one by one, other models, several forwards and backwards, none at all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from collapse_monitor.monitor import Monitor
from collapse_monitor.testing import PureAttention
from tests.capture.hearing import calls_of, named
from tests.capture.models import BATCH, DIM, HEADS, TOKENS, WrittenGPT, hidden, loss_of
from tests.watching import GPT, assert_similarity, gpt, same_readings, step_of, strict, warnings_in


class Shared(nn.Module):
    """ALBERT: one block, run several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.block, self.times = nn.TransformerEncoderLayer(DIM, HEADS, 64, batch_first=True), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.block(x)
        return x


def test_a_shared_block_is_one_site_per_execution() -> None:
    torch.manual_seed(0)
    model = Shared(3)
    monitor = strict(model)
    for step in range(2):
        with calls_of({"block": model.block}) as calls:
            snapshot = step_of(monitor, model, step, ((hidden(step, BATCH, TOKENS, DIM),), {}))
        assert [site.name for site in snapshot.block_sites] == ["block", "block@1", "block@2"]
        assert [site.name for site in snapshot.attention_sites] == ["block.self_attn", "block.self_attn@1", "block.self_attn@2"]
        assert [site.layer for site in snapshot.attention_sites] == [0, 1, 2]
        assert_similarity(snapshot, [call[2] for call in calls["block"]])
        assert all(value > 0 for value in snapshot.series("gradient_norm"))


class Skips(nn.Module):
    """Stochastic depth by a Python if: the test says which blocks run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = WrittenGPT(fused=True)
        self.runs = [True, True, True]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner.embed(ids)
        for block, runs in zip(self.inner.blocks, self.runs, strict=True):
            if runs:
                x = block(x)
        return self.inner.head(x)


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_skipped_block_is_missing_by_name_and_keeps_no_value(skipped: int) -> None:
    model = Skips()
    monitor = strict(model)
    blocks = named(model, [f"inner.blocks.{i}" for i in range(3)])
    for step in range(4):
        model.runs = [step % 2 == 0 or i != skipped for i in range(3)]
        with calls_of(blocks) as calls:
            snapshot = step_of(monitor, model, step)
        assert len(snapshot.block_sites) == 3
        for i, name in enumerate(blocks):
            names = ("effective_rank", "gradient_norm", "parameter_gradient_norm", "attention_uniformity", "block_influence", "contraction")
            values = [snapshot.series(metric)[i] for metric in names]
            if model.runs[i]:
                assert not any(map(math.isnan, values))
                assert name not in snapshot.missing
            else:
                assert all(map(math.isnan, values)), "no earlier value, no neighbour's value"
                assert "not called" in snapshot.missing[name]
                assert "not called" in snapshot.missing[f"{name}.attention"]
        ran = [name for name in blocks if calls[name]]
        seen = [value for value in snapshot.series("token_similarity") if not math.isnan(value)]
        assert len(seen) == len(ran)


class AddsOutside(nn.Module):
    """Residual branches whose sums the caller makes, some of them left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = PureAttention(DIM, 3, HEADS).layers
        self.runs = [True, True, True]
        self.sums: list[Tensor | None] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sums = []
        for layer, runs in zip(self.layers, self.runs, strict=True):
            if runs:
                x = x + layer(x)
            self.sums.append(x.detach().clone() if runs else None)
        return x


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_a_sum_outside_a_skipped_branch_is_not_taken_for_that_of_another(skipped: int) -> None:
    model = AddsOutside()
    monitor = strict(model)
    for step in range(4):
        model.runs = [step % 2 == 0 or i != skipped for i in range(3)]
        snapshot = step_of(monitor, model, step, ((hidden(step, BATCH, TOKENS, DIM),), {}))
        for i, total in enumerate(model.sums):
            assert math.isnan(snapshot.series("token_similarity")[i]) == (total is None)
            assert math.isnan(snapshot.heads("branch_ratio")[i][0]) == (total is None)
        known = [i for i, total in enumerate(model.sums) if total is not None]
        assert_similarity(snapshot, [model.sums[i] for i in known], only=known)


def test_a_block_that_was_skipped_in_the_first_forward_is_known_by_name() -> None:
    model = Skips()
    model.runs = [True, False, True]
    snapshot = step_of(strict(model), model, 0)
    assert [site.name for site in snapshot.block_sites] == [f"inner.blocks.{i}" for i in range(3)]
    assert math.isnan(snapshot.series("effective_rank")[1])
    assert "did not run" in snapshot.missing["inner.blocks.1"]


def test_of_two_forwards_in_one_window_the_first_counts() -> None:
    model, twin = gpt(), gpt()
    monitor, alone = strict(model), strict(twin)
    for step in range(2):
        torch.manual_seed(step)
        with monitor.observe(step):
            first = loss_of(model(*GPT.call(step)[0]))
            second = loss_of(model(*GPT.call(step + 50)[0]))
            (first + 0 * second).backward()
        torch.manual_seed(step)
        expected = step_of(alone, twin, step)
        assert monitor.latest is not None
        assert same_readings(monitor.latest, expected, but=("parameter_gradient_norm",))
        model.zero_grad()


def test_of_two_backwards_in_one_window_the_first_counts() -> None:
    model = gpt()
    monitor = strict(model)
    for step in range(2):
        with monitor.observe(step):
            loss = loss_of(model(*GPT.call(step)[0]))
            loss.backward(retain_graph=True)
            (100 * loss).backward()
        assert monitor.latest is not None
        model.zero_grad()
        torch.manual_seed(0)
    twin = gpt()
    snapshot = step_of(strict(twin), twin, 0)
    assert max(monitor.latest.series("gradient_norm")) < 10 * max(snapshot.series("gradient_norm"))


def test_a_backward_before_the_forward_does_not_end_the_window() -> None:
    """Another network's loss first, as in adversarial training."""
    model, other = gpt(), nn.Linear(3, 1)
    monitor = strict(model)
    for step in range(2):
        with monitor.observe(step):
            other(torch.ones(2, 3)).sum().backward()
            loss_of(model(*GPT.call(step)[0])).backward()
        assert monitor.latest is not None
        assert monitor.latest.step == step
        assert all(value > 0 for value in monitor.latest.series("gradient_norm"))


def test_another_model_before_the_forward_is_not_heard() -> None:
    """A teacher, in distillation."""
    model, teacher, twin = gpt(), gpt(3).eval(), gpt()
    monitor, alone = strict(model), strict(twin)
    for step in range(2):
        torch.manual_seed(step)
        with monitor.observe(step):
            with torch.no_grad():
                teacher(*GPT.call(step)[0])
            loss_of(model(*GPT.call(step)[0])).backward()
        model.zero_grad()
        torch.manual_seed(step)
        assert monitor.latest is not None
        assert same_readings(monitor.latest, step_of(alone, twin, step))


def test_parts_called_one_by_one_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    """A training step that never calls the model itself."""
    model = gpt()
    monitor = strict(model)
    blocks = named(model, ["blocks.0", "blocks.1", "blocks.2"])
    for step in range(3):
        with calls_of(blocks) as calls, monitor.observe(step):
            x = model.embed(*GPT.call(step)[0])
            for block in model.blocks:
                x = block(x)
            loss_of(model.head(x)).backward()
        snapshot = monitor.latest
        assert snapshot is not None
        assert [site.name for site in snapshot.block_sites] == list(blocks)
        assert_similarity(snapshot, [calls[name][0][2] for name in blocks])
        assert all(value > 0 for value in snapshot.series("gradient_norm"))
    assert not warnings_in(caplog)


def test_a_model_that_is_not_called_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = gpt()
    monitor = Monitor(model, every=1, budget=None)
    for step in range(3):
        with monitor.observe(step):
            pass
    (warning,) = warnings_in(caplog)
    assert "the model was not called inside the observed window: put its forward into `with monitor.observe(step):`" in warning
    assert monitor.latest is None


def test_a_later_window_without_a_forward_gives_no_stale_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    model = gpt()
    monitor = Monitor(model, every=1, budget=None)
    first = step_of(monitor, model, 0)
    with monitor.observe(1):
        pass
    assert monitor.latest is first
    assert len(warnings_in(caplog)) == 1
