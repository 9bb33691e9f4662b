"""Steps, repeats and resumption; what the user logs; what is muted; what closing means."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collapse_monitor.monitor import Monitor
from collapse_monitor.records import Condition, Severity, Snapshot
from collapse_monitor.testing import MemorySink
from tests.watching import GPT, gpt, step_of, strict, warnings_in

pytestmark = pytest.mark.slow


def sampled_steps(every: int | Callable[[int], bool], steps: list[int]) -> list[int]:
    model, sink = gpt(), MemorySink()
    monitor = Monitor(model, every=every, budget=None, sinks=[sink])
    for step in steps:
        with monitor.observe(step):
            model(*GPT.call(step)[0])
    monitor.close()
    return sink.steps


def test_a_step_is_sampled_when_the_count_of_intervals_changes() -> None:
    assert sampled_steps(5, list(range(12))) == [0, 5, 10]
    assert sampled_steps(5, [3, 4, 5, 6, 7, 9, 11, 13]) == [3, 5, 11]
    assert sampled_steps(1, [0, 1, 2]) == [0, 1, 2]
    assert sampled_steps(lambda step: step in (1, 4), list(range(6))) == [1, 4]


def test_micro_batches_of_one_step_are_one_sample(caplog: pytest.LogCaptureFixture) -> None:
    assert sampled_steps(1, [0, 0, 0, 1, 1, 1, 2, 2, 2]) == [0, 1, 2]
    assert sampled_steps(2, [0, 0, 1, 1, 2, 2, 3, 3]) == [0, 2]
    assert sampled_steps(lambda step: True, [0, 0, 1, 1]) == [0, 1]
    assert not warnings_in(caplog)


def test_a_step_written_in_an_earlier_run_is_measured_and_not_written_again(caplog: pytest.LogCaptureFixture) -> None:
    model, sink = gpt(), MemorySink()
    monitor = Monitor(model, every=1, budget=None, sinks=[sink])
    monitor.load_state_dict({"written": 4})
    for step in (4, 5):
        assert step_of(monitor, model, step).step == step
    assert sink.steps == [5]
    assert warnings_in(caplog) == ["step 4 is not above the last written step 4: measured, not written"]


def test_a_step_that_goes_back_is_measured_and_not_written(caplog: pytest.LogCaptureFixture) -> None:
    model, sink = gpt(), MemorySink()
    monitor = Monitor(model, every=1, budget=None, sinks=[sink])
    for step in (7, 8, 3, 4, 9):
        assert step_of(monitor, model, step).step == step
    assert sink.steps == [7, 8, 9]
    assert len(warnings_in(caplog)) == 1


def test_a_resumed_run_goes_on_where_it_was() -> None:
    model, sink = gpt(), MemorySink()
    before = Monitor(model, every=2, budget=None)
    for step in range(5):
        with before.observe(step):
            model(*GPT.call(step)[0])
    state = json.loads(json.dumps(before.state_dict()))
    after = Monitor(model, every=2, budget=None, sinks=[sink])
    after.load_state_dict(state)
    assert after.state_dict() == state
    for step in range(3, 9):
        with after.observe(step):
            model(*GPT.call(step)[0])
    after.close()
    assert sink.steps == [6, 8], "neither written again nor sampled off the grid"


def test_a_state_with_parts_missing_is_taken_as_far_as_it_goes() -> None:
    model = gpt()
    monitor = strict(model)
    monitor.load_state_dict({})
    monitor.load_state_dict({"written": 5})
    assert step_of(monitor, model, 6).step == 6


def always(snapshot: Snapshot, history: Any) -> list[Condition]:
    return [Condition(layer, "effective_rank", 0.0, 1.0, severity=Severity.WARNING, message="always") for layer in (0, 1, 2)]


def test_alerts_reach_sinks_and_survive_a_resumption() -> None:
    model, sink = gpt(), MemorySink()
    monitor = strict(model, rules=[always], sinks=[sink])
    for step in range(8):
        step_of(monitor, model, step)
    assert monitor.alerts
    assert sink.alerts == monitor.alerts
    assert monitor.alerts[0].rule == "always"
    assert monitor.alerts[0].layers == (0, 1, 2)
    resumed = strict(model, rules=[always])
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    for step in range(8, 12):
        step_of(resumed, model, step)
    assert not [alert for alert in resumed.alerts if alert.step >= 8], "what already fires does not fire again"


@pytest.mark.parametrize(("mute", "layers"), [((), (0, 1, 2)), (("always",), None), (("always:0,2",), (1,)), ((("always", (0,)),), (1, 2))])
def test_a_muted_rule_is_silent_at_the_named_layers(mute: Any, layers: tuple[int, ...] | None) -> None:
    model = gpt()
    monitor = strict(model, rules=[always], mute=mute)
    for step in range(8):
        step_of(monitor, model, step)
    assert [alert.layers for alert in monitor.alerts] == ([] if layers is None else [layers])


def test_what_the_user_logs_is_beside_the_next_snapshot() -> None:
    model, sink = gpt(), MemorySink()
    monitor = strict(model, sinks=[sink])
    monitor.log(0, train_loss=torch.tensor(1.5, requires_grad=True))
    step_of(monitor, model, 0)
    step_of(monitor, model, 1)
    monitor.log(1, train_loss=2.5, val_loss=3)
    step_of(monitor, model, 2)
    contexts = [dict(snapshot.context) for snapshot in sink.snapshots]
    assert contexts == [{"train_loss": 1.5}, {}, {"train_loss": 2.5, "val_loss": 3.0}]


def test_what_is_logged_after_the_window_belongs_to_that_step() -> None:
    """As in the quick start: observe, optimise, log."""
    model, sink = gpt(), MemorySink()
    monitor = strict(model, sinks=[sink], on_error="warn")
    for step in range(3):
        with monitor.observe(step):
            loss = model(*GPT.call(step)[0]).square().mean()
            loss.backward()
        monitor.log(step, train_loss=float(step))
    monitor.close()
    assert [dict(snapshot.context) for snapshot in sink.snapshots] == [{"train_loss": float(step)} for step in range(3)]


def test_a_closed_monitor_watches_no_more() -> None:
    model, sink = gpt(), MemorySink()
    with strict(model, sinks=[sink]) as monitor:
        step_of(monitor, model, 0)
    assert sink.closed
    with monitor.observe(1):
        model(*GPT.call(1)[0])
    assert sink.steps == [0]
    assert monitor.latest is not None
    assert monitor.latest.step == 0
