"""Gradients are those of the formulas, and nothing that is masked or undefined sends one."""

from __future__ import annotations

import pytest
import torch

from collapse_monitor import metrics
from tests.metrics.samples import ROWS, SHARES, TOKENS, arguments, hidden_states, maps

SMOOTH = [metric for metric in metrics.DEFAULT_METRICS if metric.name not in SHARES and metric.reads != "parameter_gradients"]


@pytest.mark.parametrize("metric", SMOOTH, ids=lambda metric: metric.name)
def test_gradients_are_those_of_the_formula(metric: metrics.Metric) -> None:
    given_tensors = tuple(tensor.double().requires_grad_() for tensor in arguments(metric))
    assert torch.autograd.gradcheck(metric.compute, given_tensors)


@pytest.mark.parametrize("metric", [metric for metric in TOKENS if metric.name not in SHARES], ids=lambda metric: metric.name)
def test_masked_and_undefined_sequences_send_no_gradient(metric: metrics.Metric) -> None:
    """A penalty over a ragged batch: NaN in padding, in a bad sequence, and sequences that are undefined, must not spoil the step."""
    hidden = hidden_states(5, 6, 4)
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[0, 4:] = False
    hidden[0, 4:] = torch.nan
    hidden[1, 2, 1] = torch.inf
    hidden[2] = 0
    mask[3, 1:] = False
    hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(metric.compute(hidden, mask).nansum(), hidden)
    assert gradient.isfinite().all()
    assert (gradient[0, :4] != 0).any()
    assert (gradient[4] != 0).any()
    assert not gradient[0, 4:].any()
    assert not gradient[1:4].any()


@pytest.mark.parametrize("metric", [metric for metric in TOKENS if metric.name not in SHARES], ids=lambda metric: metric.name)
def test_the_gradient_at_full_collapse_is_finite(metric: metrics.Metric) -> None:
    hidden = torch.ones(6, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(metric.compute(hidden), hidden)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("metric", ROWS, ids=lambda metric: metric.name)
def test_invisible_weights_get_no_gradient(metric: metrics.Metric) -> None:
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    visible[0] = False
    weights = maps(2, 3, 4, 4)
    weights[..., ~visible] = torch.nan
    weights.requires_grad_()
    (gradient,) = torch.autograd.grad(metric.compute(weights, visible).nansum(), weights)
    assert gradient.isfinite().all()
    assert gradient.any()
    assert not gradient[..., ~visible].any()
