"""The tensors and models that tests are built on hold what they promise, measured here without the package's own metrics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from collapse_monitor.records import Alert, Severity, Snapshot
from collapse_monitor.testing import MemorySink, PureAttention, assert_healthy, collapsed_tokens, tiny_gpt, tiny_vit, tokens_of_rank


@pytest.mark.parametrize("rank", [1, 7, 16])
@pytest.mark.parametrize(("tokens", "dim"), [(16, 32), (32, 16)])
def test_tokens_of_rank_have_that_many_equal_singular_values(rank: int, tokens: int, dim: int) -> None:
    hidden = tokens_of_rank(rank, tokens=tokens, dim=dim, batch=3, dtype=torch.float64)
    singular = torch.linalg.svdvals(hidden)
    torch.testing.assert_close(singular[:, :rank], torch.full((3, rank), (tokens * dim / rank) ** 0.5, dtype=torch.float64))
    assert singular[:, rank:].abs().sum() < 1e-12


@pytest.mark.parametrize("rank", [0, 17])
def test_a_rank_out_of_reach_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank} is out of reach for 16 tokens of width 32: choose 1 to 16"):
        tokens_of_rank(rank, tokens=16, dim=32)


@pytest.mark.parametrize("residual", [0.0, 1e-6, 1e-3, 0.5, 1.0])
def test_collapsed_tokens_have_the_residual_asked_for(residual: float) -> None:
    hidden = collapsed_tokens(residual, tokens=16, dim=8, batch=2, dtype=torch.float64)
    measured = (hidden - hidden.mean(1, keepdim=True)).norm(dim=(1, 2)) / hidden.norm(dim=(1, 2))
    torch.testing.assert_close(measured, torch.full((2,), residual, dtype=torch.float64), rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(hidden.square().mean((1, 2)), torch.ones(2, dtype=torch.float64))


def test_impossible_residuals_and_single_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="lies between 0 .* and 1"):
        collapsed_tokens(1.5)
    with pytest.raises(ValueError, match="use at least 2"):
        collapsed_tokens(0.5, tokens=1)


def _residual(hidden: torch.Tensor) -> float:
    return ((hidden - hidden.mean(1, keepdim=True)).norm() / hidden.norm()).item()


def test_pure_attention_collapses_and_its_residual_twin_does_not() -> None:
    hidden = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        assert _residual(PureAttention(depth=4).double()(hidden)) < 1e-3
        assert _residual(PureAttention(depth=4, residual=True).double()(hidden)) > 0.5


@pytest.mark.parametrize("build", [tiny_vit, tiny_gpt])
def test_models_are_seeded_and_leave_the_global_generator_alone(build: type[nn.Module]) -> None:
    before = torch.get_rng_state()
    first, again, other = build(), build(), build(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_a_causal_model_does_not_look_ahead() -> None:
    ids = torch.arange(16)[None]
    changed = ids.clone()
    changed[0, 10] = 40
    with torch.no_grad():
        difference = (tiny_gpt()(ids) - tiny_gpt()(changed)).abs().amax(-1)[0]
    assert difference[:10].max() == 0
    assert difference[10:].min() > 0


def test_memory_sink_keeps_what_it_was_given() -> None:
    sink = MemorySink()
    alert = Alert("rule", "firing", Severity.WARNING, 7, 5, (1,), "metric", 1.0, None, 0.5, "text")
    for step, alerts in ((3, []), (7, [alert])):
        sink.write(Snapshot(step=step, sites=(), blocks={}, attention={}), alerts)
    assert (sink.steps, sink.alerts, sink.closed) == ([3, 7], [alert], False)
    sink.close()
    assert sink.closed


def test_assert_healthy_returns_the_snapshot_of_a_healthy_model() -> None:
    snapshot = assert_healthy(tiny_vit(), torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert len(snapshot.series("token_similarity")) == 4


def test_assert_healthy_names_the_rule_the_layers_and_shows_the_table() -> None:
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model = tiny_vit(residual=False, depth=6)
    with pytest.raises(AssertionError, match="TinyViT is not healthy") as caught:
        assert_healthy(model, images)
    assert "collapse" in str(caught.value)
    assert "blocks.5" in str(caught.value)
