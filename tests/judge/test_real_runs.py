"""The verdict on real training: a byte-level GPT that first learns what all tokens share, and the same with a fault in one place."""

from __future__ import annotations

from collections.abc import Callable
from pydoc_data import topics

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import collapse_monitor as cm
from collapse_monitor.testing import TinyGPT, tiny_gpt

pytestmark = pytest.mark.slow

STEPS, CONTEXT, EVERY = 100, 32, 5

FAULT = 80


def small_embeddings(model: TinyGPT) -> None:
    """As language models start: what a block adds is then large beside its input, and tokens become alike for a while."""
    with torch.no_grad():
        model.embed.weight *= 0.02
        model.position.weight *= 0.02


def batches(seed: int) -> Callable[[], Tensor]:
    text = torch.tensor(list("".join(topics.topics.values()).encode()[:200_000]))
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        starts = torch.randint(0, len(text) - CONTEXT - 1, (16,), generator=generator)
        return torch.stack([text[start : start + CONTEXT + 1] for start in starts])

    return draw


def train(model: TinyGPT, lr: float, fault: Callable[[TinyGPT], None] | None = None, at: int = FAULT) -> cm.Monitor:
    draw = batches(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with cm.Monitor(model, every=EVERY, budget=None) as monitor:
        for step in range(STEPS):
            if fault is not None and step == at:
                fault(model)
            tokens = draw()
            with monitor.observe(step):
                logits = model(tokens[:, :-1])
                F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor


@pytest.mark.parametrize(("lr", "seed"), [(1e-3, 0), (5e-3, 1)])
def test_a_healthy_run_is_left_alone(lr: float, seed: int) -> None:
    model = tiny_gpt(vocabulary=256, context=CONTEXT, seed=seed)
    small_embeddings(model)
    monitor = train(model, lr)
    assert monitor.alerts == []
    assert monitor.latest is not None
    assert max(monitor.latest.series("token_similarity")) < 0.9


def test_without_residual_connections_it_collapses() -> None:
    monitor = train(tiny_gpt(vocabulary=256, context=CONTEXT, residual=False), 1e-3)
    first = monitor.alerts[0]
    assert (first.rule, first.severity) == ("rank_collapse", "critical")
    assert first.layers[-1] == 3
    assert first.layers[0] <= 2
    assert [finding.phenomenon for finding in monitor.findings] == ["rank_collapse"]


def test_tokens_that_become_their_mean_are_found_in_the_block_where_they_do() -> None:
    def mix(model: TinyGPT) -> None:
        model.blocks[2].register_forward_hook(lambda _module, _args, output: output.mean(1, keepdim=True).expand_as(output))

    monitor = train(tiny_gpt(vocabulary=256, context=CONTEXT), 1e-3, mix)
    (alert,) = monitor.alerts
    assert (alert.rule, alert.severity, alert.layers) == ("rank_collapse", "critical", (2, 3))
    assert FAULT <= alert.since <= FAULT + EVERY


def test_query_and_key_weights_times_twelve() -> None:
    def sharpen(model: TinyGPT) -> None:
        with torch.no_grad():
            model.blocks[1].attention.qkv.weight[:64] *= 12

    monitor = train(tiny_gpt(vocabulary=256, context=CONTEXT), 1e-3, sharpen)
    assert "attention_entropy_collapse" in {alert.rule for alert in monitor.alerts}
    assert {alert.layers for alert in monitor.alerts} == {(1,)}
    assert all(FAULT <= alert.since <= FAULT + EVERY for alert in monitor.alerts)
