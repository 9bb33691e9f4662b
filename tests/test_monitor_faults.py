"""A metric, a sink or a rule that fails never stops the run: one warning, a reason, and everything else goes on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from collapse_monitor.judge import DEFAULT_RULES
from collapse_monitor.metrics import DEFAULT_METRICS, Metric
from collapse_monitor.monitor import Monitor
from collapse_monitor.testing import MemorySink
from tests.watching import gpt, step_of, warnings_in


class Fault(Exception):
    pass


def failing_after(calls: int, value: Any) -> Any:
    """Works for some calls (those of validation included), then raises."""
    seen = [0]

    def compute(*_: Any) -> Tensor:
        seen[0] += 1
        if seen[0] > calls:
            raise Fault("no such luck")
        return value

    return compute


READS: dict[str, Any] = {
    "hidden": torch.zeros(2),
    "attention": torch.zeros(2, 3),
    "gradient": torch.zeros(()),
    "parameter_gradients": torch.zeros(()),
}


@pytest.mark.parametrize("reads", list(READS))
def test_a_failing_metric_is_one_warning_and_a_reason(reads: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, sink = gpt(), MemorySink()
    mine = Metric("mine", reads, failing_after(1, READS[reads]))
    monitor = Monitor(model, every=1, budget=None, metrics=[*DEFAULT_METRICS, mine], sinks=[sink])
    for step in range(3):
        snapshot = step_of(monitor, model, step)
        assert "no such luck" in snapshot.missing["mine"]
        assert all(math.isnan(value) for value in snapshot.series("mine"))
        assert all(value > 1 for value in snapshot.series("effective_rank"))
    assert sink.steps == [0, 1, 2]
    (warning,) = warnings_in(caplog)
    assert "mine" in warning
    assert "no such luck" in warning


def test_a_failing_metric_raises_if_asked_to() -> None:
    model = gpt()
    mine = Metric("mine", "hidden", failing_after(1, READS["hidden"]))
    monitor = Monitor(model, every=1, budget=None, metrics=[mine], on_error="raise")
    with pytest.raises(Fault, match="no such luck"):
        step_of(monitor, model, 0)


def test_a_metric_whose_shape_is_wrong_only_later_is_a_fault_too(caplog: pytest.LogCaptureFixture) -> None:
    model = gpt()
    mine = Metric("mine", "hidden", lambda hidden, mask: torch.zeros(2) if hidden.shape[-1] == 7 else torch.zeros(1, 1))
    monitor = Monitor(model, every=1, budget=None, metrics=["effective_rank", mine])
    snapshot = step_of(monitor, model, 0)
    assert "expected a tensor of shape" in snapshot.missing["mine"]
    assert len(warnings_in(caplog)) == 1


class FailingSink:
    def __init__(self, fails: str) -> None:
        self.fails, self.written, self.closed = fails, 0, False

    def write(self, snapshot: Any, alerts: Any) -> None:
        self.written += 1
        if self.fails == "write":
            raise Fault("disk full")

    def close(self) -> None:
        self.closed = True
        if self.fails == "close":
            raise Fault("disk gone")


def test_a_failing_sink_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    model, broken, sound = gpt(), FailingSink("write"), MemorySink()
    monitor = Monitor(model, every=1, budget=None, sinks=[broken, sound])
    for step in range(3):
        step_of(monitor, model, step)
    monitor.close()
    assert sound.steps == [0, 1, 2]
    assert sound.closed
    assert [text for text in warnings_in(caplog) if "disk full" in text]
    assert len(warnings_in(caplog)) == 1


def test_a_failing_sink_raises_if_asked_to() -> None:
    model = gpt()
    monitor = Monitor(model, every=1, budget=None, sinks=[FailingSink("write")], on_error="raise")
    with pytest.raises(Fault, match="disk full"):
        step_of(monitor, model, 0)


def test_a_sink_that_fails_to_close_does_not_stop_the_end_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    model, sound = gpt(), MemorySink()
    monitor = Monitor(model, every=1, budget=None, sinks=[FailingSink("close"), sound])
    step_of(monitor, model, 0)
    monitor.close()
    monitor.close()
    assert sound.closed
    assert len(warnings_in(caplog)) <= 1


def test_a_failing_rule_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def my_rule(snapshot: Any, history: Any) -> list[Any]:
        raise Fault("bad rule")

    model, sink = gpt(), MemorySink()
    monitor = Monitor(model, every=1, budget=None, rules=[my_rule, *DEFAULT_RULES], sinks=[sink])
    for step in range(3):
        step_of(monitor, model, step)
    assert sink.steps == [0, 1, 2]
    (warning,) = warnings_in(caplog)
    assert "bad rule" in warning
    assert "my_rule" in warning


def test_a_failing_rule_raises_if_asked_to() -> None:
    def my_rule(snapshot: Any, history: Any) -> list[Any]:
        raise Fault("bad rule")

    model = gpt()
    monitor = Monitor(model, every=1, budget=None, rules=[my_rule], on_error="raise")
    with pytest.raises(Fault, match="bad rule"):
        step_of(monitor, model, 0)


def test_a_failing_token_mask_reads_on_without_it(caplog: pytest.LogCaptureFixture) -> None:
    def mask(args: Any, kwargs: Any) -> Tensor:
        raise Fault("no mask")

    model = gpt()
    monitor = Monitor(model, every=1, budget=None, token_mask=mask)
    for step in range(2):
        assert all(value > 1 for value in step_of(monitor, model, step).series("effective_rank"))
    (warning,) = warnings_in(caplog)
    assert "no mask" in warning
