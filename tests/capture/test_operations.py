"""Dispatched operations of a sampled step: exact, so that a test can hold them. They are what a monitor costs on an accelerator."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from collapse_monitor.capture.sampling import Sampler, default_layout
from collapse_monitor.metrics import DEFAULT_METRICS, Metric
from collapse_monitor.monitor import Monitor
from tests.capture.models import WrittenGPT, bert, encoder, lengths_mask, loss_of, words
from tests.watching import Dispatched

OF_BLOCKS = ("hidden", "transition", "features")
OF_ATTENTION = ("attention", "logits", "attention_pair", "attention_batch", "branch", "qv_gradient")
PER_ATTENTION = 40
"""The most that one attention may add to a sampled step, its rows, its branch and its gradients together."""


def reading(*reads: str) -> list[Metric]:
    return [metric for metric in DEFAULT_METRICS if metric.reads in reads]


def gpt(depth: int, fused: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return WrittenGPT(fused, depth=depth).train()


def extra(model: nn.Module, metrics: list[Metric], inputs: Any = None) -> Counter[str]:
    """What a sampled step dispatches more than the same step without the monitor, once the plan is known.

    Reading the numbers on the host is not counted: it happens when they have arrived, and dispatches nothing to the device.
    """
    args, kwargs = inputs or ((words(0, batch=6),), {})
    monitor = Monitor(model, every=1, budget=None, metrics=metrics)
    for step in range(2):
        with monitor.observe(step):
            loss_of(model(*args, **kwargs)).backward()
        model.zero_grad()
        assert monitor.latest is not None
    with Dispatched() as watched:
        with monitor.observe(2):
            loss_of(model(*args, **kwargs)).backward()
        model.zero_grad()
    with Dispatched() as plain:
        loss_of(model(*args, **kwargs)).backward()
        model.zero_grad()
    return watched.names - plain.names


def total(depth: int, metrics: list[Metric], fused: bool = True) -> int:
    return sum(extra(gpt(depth, fused), metrics).values())


@pytest.mark.slow
def test_block_metrics_cost_the_same_from_4_to_24_layers_but_for_the_samples() -> None:
    """Without any metric the samples are taken all the same: the rest is what the metrics cost."""
    shallow, deep = (total(depth, reading(*OF_BLOCKS)) - total(depth, []) for depth in (4, 24))
    assert shallow == deep > 0


def test_a_sample_is_one_operation() -> None:
    sampler, hidden = Sampler(), torch.randn(6, 100, 32)
    sampler.tokens(hidden, default_layout(3))  # its indices are made once
    with Dispatched() as dispatched, torch.no_grad():
        sampler.tokens(hidden, default_layout(3))
    assert sum(dispatched.names.values()) == 1


@pytest.mark.slow
def test_gradient_norms_add_one_operation_per_layer() -> None:
    shallow, deep = (total(depth, reading("gradient")) - total(depth, []) for depth in (4, 24))
    assert deep - shallow == 20


@pytest.mark.slow
def test_parameter_gradients_cost_the_same_from_4_to_24_layers() -> None:
    metrics = reading("parameter_gradients", "qv_weight_gradient")
    shallow, deep = (total(depth, metrics) - total(depth, []) for depth in (4, 24))
    assert shallow == deep > 0


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False], ids=["sdpa", "softmax"])
def test_an_attention_adds_at_most_forty_operations(fused: bool) -> None:
    """The block's own sample is counted with it, and every metric of the catalogue is asked for."""
    shallow, deep = (total(depth, list(DEFAULT_METRICS), fused) for depth in (4, 24))
    assert (deep - shallow) / 20 <= PER_ATTENTION


@pytest.mark.slow
def test_an_attention_of_torchs_encoder_adds_at_most_forty_operations() -> None:
    inputs = (torch.randn(6, 10, 32, generator=torch.Generator().manual_seed(0)),), {}
    shallow, deep = (sum(extra(encoder(True, True, depth).train(), reading(*OF_ATTENTION), inputs).values()) for depth in (2, 6))
    assert (deep - shallow) / 4 <= PER_ATTENTION


@pytest.mark.zoo
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_an_attention_under_a_padding_mask_adds_a_few_more(kernel: str) -> None:
    """The padding of branches and rows is taken out, and every attention is given a mask of its own."""
    inputs = (), {"input_ids": words(0, batch=3), "attention_mask": lengths_mask((10, 6, 8))}
    counts = []
    for depth in (2, 4):
        model = bert(kernel, depth).train()
        counts.append(sum(extra(model, reading(*OF_ATTENTION), inputs).values()))
    assert (counts[1] - counts[0]) / 2 <= 1.15 * PER_ATTENTION


def test_a_layer_adds_at_most_forty_operations() -> None:
    """The same on two small models, for the quick run."""
    shallow, deep = (total(depth, list(DEFAULT_METRICS)) for depth in (2, 4))
    assert (deep - shallow) / 2 <= PER_ATTENTION


def test_an_unsampled_step_dispatches_nothing() -> None:
    model = gpt(2)
    monitor = Monitor(model, every=10, budget=None)
    counts = []
    for step in range(3):
        with Dispatched() as dispatched, monitor.observe(step):
            loss_of(model(words(0, batch=4))).backward()
        model.zero_grad()
        assert monitor.latest is not None
        counts.append(dispatched.names)
    with Dispatched() as dispatched:
        loss_of(model(words(0, batch=4))).backward()
    assert counts[2] == dispatched.names


def test_nothing_is_copied_to_the_host_one_by_one() -> None:
    """`aten._local_scalar_dense` is `.item()`: it would wait for the device."""
    names = extra(gpt(4), list(DEFAULT_METRICS))
    assert names["aten._local_scalar_dense.default"] == 0
