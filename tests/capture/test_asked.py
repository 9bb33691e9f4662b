"""Nothing is worked out that no metric reads."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.capture.selection import Selection
from collapse_monitor.capture.window import Observed
from collapse_monitor.metrics import Metric
from tests.capture.hearing import Heard, hear
from tests.capture.models import case_named
from tests.watching import GPT, Dispatched, flat, gpt, step_of, strict


def operations_of(model: nn.Module, reads: set[str]) -> Counter[str]:
    """Of a lean window in which this is read."""
    args, kwargs = GPT.call(0)
    plan = hear(model, args, kwargs).plan
    receiver = Heard(reads=frozenset(reads))
    faults: list[object] = []
    observed = Observed(model, plan, Sampler(), receiver, lambda *fault: faults.append(fault), Selection(model, None, None, "train"))
    with torch.no_grad(), Dispatched() as operations, observed:
        model(*args, **kwargs)
    assert not faults
    assert not observed.missing
    assert bool(receiver.attention_of) == bool(reads & {"attention", "logits", "attention_pair", "attention_batch"})
    assert bool(receiver.branch_of) == ("branch" in reads)
    assert receiver.block_of
    return operations.names


@pytest.mark.parametrize("name", ["gpt-sdpa", "gpt-softmax"])
def test_rows_that_nobody_reads_cost_nothing(name: str) -> None:
    model = case_named(name).model().eval()
    blocks = operations_of(model, {"hidden"})
    for reads in ("attention", "logits", "attention_pair", "attention_batch"):
        rows = operations_of(model, {"hidden", reads})
        assert sum(rows.values()) >= sum(blocks.values()) + 3 * 5, "a window with rows takes more, in each of three layers"
    assert sum(operations_of(model, {"hidden", "branch"}).values()) > sum(blocks.values())


def test_attentions_are_not_missed_where_only_blocks_are_asked_for() -> None:
    model = gpt()
    monitor = strict(model, metrics=["token_similarity", "gradient_norm"])
    for step in range(2):
        snapshot = step_of(monitor, model, step)
        assert snapshot.missing == {}
        assert not any(map(math.isnan, flat(snapshot, "token_similarity") + flat(snapshot, "gradient_norm")))
    monitor.close()


def test_readings_of_blocks_and_gradients_are_the_same_without_the_rows() -> None:
    alone, whole = gpt(), gpt()
    one, other = strict(alone, metrics=["token_similarity", "qk_to_v_gradient", "branch_ratio"]), strict(whole)
    for step in range(2):
        torch.manual_seed(step)
        few = step_of(one, alone, step)
        torch.manual_seed(step)
        all_of_them = step_of(other, whole, step)
        for name in ("token_similarity", "qk_to_v_gradient", "branch_ratio"):
            assert flat(few, name) == pytest.approx(flat(all_of_them, name), rel=1e-5)


def test_a_metric_of_ones_own_gets_its_rows() -> None:
    def last(weights: Tensor, mask: Tensor | None) -> Tensor:
        return F.relu(weights)[..., -1].mean(-1)

    monitor = strict(gpt(), metrics=["token_similarity", Metric("last_key", "attention", last, (0, 1))])
    snapshot = [step_of(monitor, monitor.model, step) for step in range(2)][-1]
    assert not any(map(math.isnan, flat(snapshot, "last_key")))
    monitor.close()
