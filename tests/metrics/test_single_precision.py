"""The way of devices without float64, taken on the CPU: maths in float32, where the care that float64 makes superfluous shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from collapse_monitor import metrics
from collapse_monitor.metrics import inputs


@pytest.fixture(autouse=True)
def _no_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "wide_dtype", lambda tensor: torch.float32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_double(monkeypatch: pytest.MonkeyPatch, metric: metrics.Metric, *arguments: Tensor) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "wide_dtype", lambda tensor: torch.float64)
        return metric.compute(*arguments)


@pytest.mark.parametrize("residual", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("metric", [each for each in metrics.DEFAULT_METRICS if each.reads == "hidden"], ids=lambda metric: metric.name)
def test_token_metrics_keep_their_digits(monkeypatch: pytest.MonkeyPatch, metric: metrics.Metric, residual: float) -> None:
    hidden = 3 + normal(2, 1, 24) + residual * normal(2, 32, 24, seed=1)
    expected = in_double(monkeypatch, metric, hidden)
    torch.testing.assert_close(metric.compute(hidden), expected, rtol=5e-4, atol=0)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 10.0])
@pytest.mark.parametrize(
    "metric", [each for each in metrics.DEFAULT_METRICS if each.reads in ("attention", "attention_batch")], ids=lambda metric: metric.name
)
def test_attention_metrics_keep_their_digits(monkeypatch: pytest.MonkeyPatch, metric: metrics.Metric, spread: float) -> None:
    weights = (spread * normal(2, 3, 16, 64)).softmax(-1)
    torch.testing.assert_close(metric.compute(weights), in_double(monkeypatch, metric, weights), rtol=2e-4, atol=0)


def test_autocast_does_not_reach_the_products() -> None:
    weights, query, key = normal(2, 3, 16, 64).softmax(-1), normal(4, 8, 32), normal(4, 8, 32, seed=1)
    expected = metrics.head_similarity(weights), metrics.qk_spectral_norm(query, key)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(metrics.head_similarity(weights), expected[0])
        assert torch.equal(metrics.qk_spectral_norm(query, key), expected[1])
        assert (weights @ weights.mT).dtype == torch.bfloat16  # autocast is on


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_gradients_beyond_the_squares_of_float32(scale: float) -> None:
    assert metrics.gradient_norm(torch.full((100,), scale)).item() == pytest.approx(10 * scale, rel=1e-5)
    assert metrics.qk_to_v_gradient(torch.full((100,), 3 * scale), torch.full((100,), scale)).item() == pytest.approx(3, rel=1e-5)
