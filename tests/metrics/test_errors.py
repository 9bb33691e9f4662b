"""Bad arguments get one clear error: what, got, allowed, next step."""

from __future__ import annotations

import pytest
import torch

from collapse_monitor import metrics
from tests.metrics.samples import ROWS, TOKENS


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("metric", TOKENS, ids=lambda metric: metric.name)
def test_wrong_tokens_are_refused(metric: metrics.Metric) -> None:
    hidden = torch.zeros(2, 4, 3)
    with pytest.raises(
        TypeError, match=r"hidden has dtype torch.int64; expected a floating dtype .* not indices, or convert with .float\(\)"
    ):
        metric.compute(hidden.long())
    with pytest.raises(TypeError, match="hidden is a list; expected a floating tensor: convert it with torch.as_tensor"):
        metric.compute([[1.0, 2.0]])
    with pytest.raises(
        ValueError, match=r"hidden has shape \[3\]; expected \[\*batch, token, dim\] with dim >= 1: pass one matrix of tokens"
    ):
        metric.compute(torch.zeros(3))
    with pytest.raises(ValueError, match=r"hidden has shape \[3, 0\]; expected \[\*batch, token, dim\] with dim >= 1"):
        metric.compute(torch.zeros(3, 0))
    with pytest.raises(
        ValueError, match=r"mask has shape \[2, 3\], but hidden has shape \[2, 4, 3\]; expected \[2, 4\]: one value per token"
    ):
        metric.compute(hidden, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask has dtype torch.float32; expected a boolean tensor, .* convert 0/1 with mask.bool\(\)"):
        metric.compute(hidden, torch.ones(2, 4))
    with pytest.raises(TypeError, match="mask has type list; expected a boolean tensor"):
        metric.compute(hidden, [True, False])
    with pytest.raises(ValueError, match=r"mask is on meta, hidden on cpu: move the mask with mask.to\(hidden.device\)"):
        metric.compute(hidden, torch.ones(2, 4, dtype=torch.bool, device="meta"))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("metric", ROWS, ids=lambda metric: metric.name)
def test_wrong_rows_are_refused(metric: metrics.Metric) -> None:
    name = "logits" if metric.reads == "logits" else "weights"
    with pytest.raises(TypeError, match=f"{name} has dtype torch.bool; expected a floating dtype"):
        metric.compute(torch.ones(2, 3, 4, 5, dtype=torch.bool))
    with pytest.raises(
        ValueError, match=rf"{name} has shape \[4, 5\]; expected \[\*batch, head, query, key\]: add an axis of one head with {name}\[None\]"
    ):
        metric.compute(torch.ones(4, 5))
    message = rf"mask has shape \[2, 5\], which does not broadcast to {name} of shape \[2, 3, 4, 5\]; .* for a mask of keys"
    with pytest.raises(ValueError, match=message):
        metric.compute(torch.ones(2, 3, 4, 5), torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="does not broadcast"):
        metric.compute(torch.ones(3, 4, 5), torch.ones(2, 3, 4, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask has dtype torch.int64; expected a boolean tensor"):
        metric.compute(torch.ones(2, 3, 4, 5), torch.ones(4, 5).long())
