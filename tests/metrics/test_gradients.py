"""Gradient metrics: norms, undefined cases, and the law that gives the ratio its meaning."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from collapse_monitor import metrics


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gradient_norm_is_the_norm_over_all_values() -> None:
    assert metrics.gradient_norm(torch.full((2, 8, 9), 0.5)).item() == pytest.approx(0.5 * 12)
    assert metrics.gradient_norm(torch.zeros(2, 3)).item() == 0  # vanished: a reading, not an undefined case
    assert metrics.gradient_norm(torch.full((10_000,), 6e4).half()).item() == pytest.approx(6e6, rel=1e-4)  # beyond float16
    assert metrics.gradient_norm(torch.full((100,), 1e-30)).item() == pytest.approx(1e-29, rel=1e-6)  # its squares are beyond float32
    assert metrics.gradient_norm(torch.full((100,), 1e-200, dtype=torch.float64)).item() == pytest.approx(1e-199, rel=1e-12)
    assert metrics.gradient_norm(torch.full((100,), 1e200, dtype=torch.float64)).item() == pytest.approx(1e201, rel=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_broken_gradients_read_nan(bad: float) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        broken, fine = torch.tensor([1.0, bad], dtype=dtype), torch.ones(2, dtype=dtype)
        assert metrics.gradient_norm(broken).isnan()
        assert metrics.parameter_gradient_norm([fine, broken]).isnan()
        for ratio in (metrics.qk_to_v_gradient, metrics.qk_to_v_weight_gradient):
            assert ratio(broken, fine).isnan()
            assert ratio(fine, broken).isnan()


def test_ratios() -> None:
    for ratio in (metrics.qk_to_v_gradient, metrics.qk_to_v_weight_gradient):
        assert ratio(3 * torch.ones(4, 4), torch.ones(8, 2)).item() == pytest.approx(3)
        assert ratio(torch.zeros(4), torch.ones(4)).item() == 0
        assert ratio(torch.ones(4), torch.zeros(4)).isnan()
        assert ratio(torch.ones(0), torch.ones(4)).isnan()


def test_parameter_gradient_norm_is_that_of_all_tensors_together() -> None:
    gradients = [normal(4, 5), normal(7, seed=1), normal(2, 3, 2, seed=2)]
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    assert metrics.parameter_gradient_norm(gradients).item() == pytest.approx(expected, rel=1e-12)
    assert metrics.parameter_gradient_norm([gradient.float() for gradient in gradients]).dtype == torch.float32
    assert metrics.parameter_gradient_norm([torch.zeros(3), torch.zeros(0)]).item() == 0
    assert metrics.parameter_gradient_norm([]).isnan()
    assert metrics.parameter_gradient_norm([torch.zeros(0)]).isnan()


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_missing_gradient_is_refused() -> None:
    with pytest.raises(TypeError, match=r"gradients\[1\] is a NoneType; expected a floating tensor"):
        metrics.parameter_gradient_norm([torch.ones(1), None])


@pytest.mark.parametrize("causal", [False, True])
def test_the_query_gradient_falls_as_the_square_of_the_residual(causal: bool) -> None:
    """Tokens 1 m' + epsilon R: dL/dW_Q falls as epsilon squared and dL/dW_V does not fall, so the ratio has slope 2."""
    dim, tokens = 32, 16
    mean, noise, target = normal(1, dim), normal(tokens, dim, seed=1), normal(tokens, dim, seed=2)
    initial = [normal(dim, dim, seed=3 + i) / math.sqrt(dim) for i in range(3)]
    hidden_mask = torch.ones(tokens, tokens, dtype=torch.bool).tril() if causal else torch.ones(tokens, tokens, dtype=torch.bool)
    logs = []
    for epsilon in (1e-2, 1e-3):
        query, key, value = (weight.clone().requires_grad_() for weight in initial)
        x = mean + epsilon * noise
        logits = (x @ query.T) @ (x @ key.T).T / math.sqrt(dim)
        out = logits.masked_fill(~hidden_mask, -torch.inf).softmax(-1) @ (x @ value.T)
        gradients = torch.autograd.grad((out * target).sum(), (query, key, value))
        logs.append([metrics.qk_to_v_weight_gradient(gradient, gradients[2]).log10().item() for gradient in gradients[:1]])
    assert logs[0][0] - logs[1][0] == pytest.approx(2, abs=0.02)
