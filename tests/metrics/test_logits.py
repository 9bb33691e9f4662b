"""What enters the softmax: closed forms and the convention of the deviation."""

from __future__ import annotations

import math

import pytest
import torch

from collapse_monitor import metrics


def test_max_is_signed() -> None:
    logits = torch.tensor([[[-5.0, -3.0], [-900.0, -4.0]]])
    assert metrics.max_logit(logits).item() == -3
    assert metrics.max_logit(logits, torch.tensor([[True, False], [True, True]])).item() == -4


def test_std_divides_by_the_number_of_keys() -> None:
    logits = torch.tensor([[[0.0, 2.0, 0.0], [1.0, 7.0, 4.0]]])
    visible = torch.tensor([[True, True, False], [True, True, True]])
    assert metrics.logit_std(logits, visible).item() == pytest.approx((1 + math.sqrt(6)) / 2)


def test_rows_with_one_key_have_no_spread() -> None:
    causal = torch.ones(2, 2, dtype=torch.bool).tril()
    assert metrics.logit_std(torch.tensor([[[9.0, 0.0], [1.0, 3.0]]]), causal).item() == 1


def test_std_does_not_see_a_shift_of_a_row() -> None:
    logits = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(0))
    shift = torch.tensor([0.0, 1e4, -1e4, 3.0, 5e3, 7.0, 1e2, 1.0])[:, None]
    torch.testing.assert_close(metrics.logit_std(logits + shift), metrics.logit_std(logits), rtol=1e-3, atol=0)  # float32 logits of 1e4


def test_deviation_predicts_the_entropy() -> None:
    logits = 0.5 * torch.randn(4, 64, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    deficit = math.log(512) * (1 - metrics.attention_uniformity(logits.softmax(-1)))
    torch.testing.assert_close(metrics.logit_std(logits).square() / 2, deficit, rtol=0.03, atol=0)


def test_masked_minus_infinity_is_harmless_and_visible_infinity_is_not() -> None:
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    logits = torch.zeros(2, 4, 4).masked_fill(~causal, -torch.inf)
    assert metrics.max_logit(logits, causal).tolist() == [0, 0]
    assert metrics.logit_std(logits, causal).tolist() == [0, 0]
    assert metrics.max_logit(logits).isnan().all()
    logits[1, 2, 1] = torch.inf
    assert metrics.max_logit(logits, causal).isnan().tolist() == [False, True]
