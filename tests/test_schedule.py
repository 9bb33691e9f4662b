"""When to look: the user's grid, and a budget that is kept. The clock here is the test's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from collapse_monitor import schedule as module
from collapse_monitor.schedule import Schedule


@dataclass
class Clock:
    """Seconds that pass only when told to."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class Run:
    """A training run in which a step takes `step_seconds` and a sample `sample_seconds` more."""

    schedule: Schedule
    clock: Clock
    step_seconds: float = 0.03
    sample_seconds: float = 0.02
    sampled: list[int] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)

    def steps(self, first: int, last: int, micro_batches: int = 1) -> list[int]:
        """Run the steps; those that were sampled."""
        start = len(self.sampled)
        for step in range(first, last):
            for _ in range(micro_batches):
                if self.schedule.wants(step):
                    self.sampled.append(step)
                    self.clock.now += self.sample_seconds
                    sentence = self.schedule.charge(self.sample_seconds)
                    if sentence:
                        self.sentences.append(sentence)
                self.clock.now += self.step_seconds
        return self.sampled[start:]

    def share(self, first: int, last: int, micro_batches: int = 1) -> float:
        """Seconds of samples over seconds of training, for these steps."""
        samples = len(self.steps(first, last, micro_batches))
        return samples * self.sample_seconds / ((last - first) * micro_batches * self.step_seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_without_a_budget_the_grid_is_kept_whatever_it_costs(clock: Clock) -> None:
    run = Run(Schedule(10, None), clock, sample_seconds=5.0)
    assert run.steps(0, 50) == [0, 10, 20, 30, 40]
    assert not run.sentences


def test_a_cheap_sample_leaves_the_grid_as_asked(clock: Clock) -> None:
    run = Run(Schedule(50, 0.01), clock, sample_seconds=0.014)
    assert run.steps(0, 5000) == list(range(0, 5000, 50))


@pytest.mark.parametrize("every", [1, 5, 50])
@pytest.mark.parametrize("sample_seconds", [0.02, 0.2, 2.0])
def test_the_budget_is_kept_once_it_binds(clock: Clock, every: int, sample_seconds: float) -> None:
    run = Run(Schedule(every, 0.01), clock, sample_seconds=sample_seconds)
    run.steps(0, 20_000)
    asked = sample_seconds / (every * run.step_seconds)
    share = run.share(20_000, 80_000)
    assert share <= 0.0105
    assert share >= 0.5 * min(asked, 0.01), "and what it allows is used"


def test_the_sentence_says_what_changed_and_why(clock: Clock) -> None:
    run = Run(Schedule(1, 0.01), clock)
    run.steps(0, 1000)
    assert run.sentences == [
        "sampling every 67 steps instead of 1: a sampled step costs 20.0 ms more, a training step takes 30.0 ms, "
        "and the budget is 1.0% of training time (budget=None switches this off)"
    ]
    assert run.schedule.every == 67


def test_samples_stay_on_the_stretched_grid(clock: Clock) -> None:
    run = Run(Schedule(1, 0.01), clock)
    run.steps(0, 1000)
    assert all(step % 67 == 0 for step in run.steps(1000, 3000))


def test_a_run_that_becomes_slower_is_sampled_as_asked_again(clock: Clock) -> None:
    run = Run(Schedule(10, 0.01), clock)
    run.steps(0, 5000)
    assert run.schedule.every == 67
    run.step_seconds = 1.0
    run.steps(5000, 8000)
    assert run.schedule.every == 10


def test_the_time_of_a_step_is_that_of_all_its_micro_batches(clock: Clock) -> None:
    """Four micro-batches of 30 ms are one step of 120 ms: the same budget allows four times as many samples per step."""
    run = Run(Schedule(1, 0.01), clock)
    run.steps(0, 1000, micro_batches=4)
    assert run.schedule.every == 17
    assert 0.008 <= run.share(1000, 5000, micro_batches=4) <= 0.0105


def test_steps_that_are_counted_in_strides(clock: Clock) -> None:
    """A step number that advances by 100 each time, such as a count of samples seen."""
    schedule = Schedule(100, 0.01)
    sampled = 0
    for call in range(2000):
        if schedule.wants(100 * call):
            sampled += call >= 1000
            clock.now += 0.02
            schedule.charge(0.02)
        clock.now += 0.03
    assert schedule.every == pytest.approx(6667, abs=2)
    assert sampled == pytest.approx(15, abs=1)


@pytest.mark.parametrize("asked", [lambda step: True, lambda step: step % 3 == 0])
def test_a_function_of_the_user_is_held_to_the_budget_too(clock: Clock, asked: Callable[[int], bool]) -> None:
    run = Run(Schedule(asked, 0.01), clock)
    run.steps(0, 2000)
    assert run.schedule.every is None
    assert 0.005 <= run.share(2000, 12_000) <= 0.0105
    assert all(asked(step) for step in run.sampled)


def test_the_first_sample_which_learns_the_model_is_not_held_against_the_run(clock: Clock) -> None:
    schedule = Schedule(50, 0.01)
    assert schedule.wants(0)
    clock.now += 30.0
    assert schedule.charge(30.0, once=True) is None
    run = Run(schedule, clock, sample_seconds=0.014)
    run.steps(1, 10_000)
    assert schedule.every == 50
    assert not run.sentences


def test_a_pause_is_no_training_time(clock: Clock) -> None:
    """Validation every 1000 steps, a minute long: not counted as time in which samples are free."""
    run = Run(Schedule(1, 0.01), clock)
    for thousand in range(5):
        run.steps(1000 * thousand, 1000 * (thousand + 1))
        clock.now += 60.0
    assert run.schedule.every == 67


def test_what_a_sample_costs_after_its_window_counts(clock: Clock) -> None:
    schedule = Schedule(1, 0.01)
    sampled_before = False
    for step in range(2000):
        sampled = schedule.wants(step)
        if sampled_before:
            clock.now += 0.01
            schedule.charge_late(0.01)
        if sampled:
            clock.now += 0.01
            schedule.charge(0.01)
        clock.now += 0.03
        sampled_before = sampled
    assert schedule.every == 67


def test_a_step_that_trained_nothing_is_made_up_for(clock: Clock) -> None:
    schedule = Schedule(10, None)
    assert schedule.wants(0)
    schedule.retract()
    assert schedule.wants(1)
    assert not schedule.wants(2)


def test_going_back_samples_anew(clock: Clock) -> None:
    schedule = Schedule(10, None)
    assert [step for step in (0, 1, 10, 11, 3, 4, 10, 11) if schedule.wants(step)] == [0, 10, 3, 10]


def test_the_stretch_survives_a_resumption(clock: Clock) -> None:
    run = Run(Schedule(1, 0.01), clock)
    run.steps(0, 1000)
    resumed = Schedule(1, 0.01)
    resumed.load_state_dict(json.loads(json.dumps(run.schedule.state_dict())))
    assert resumed.every == 67
    assert [step for step in range(1000, 1200) if resumed.wants(step)] == [1005, 1072, 1139]


def test_weights_are_due_with_one_sample_in_ten(clock: Clock) -> None:
    schedule = Schedule(1, None)
    assert [sample for sample in range(31) if schedule.weights_due()] == [0, 10, 20, 30]


def test_the_cost_of_weights_counts_as_its_share_of_every_sample(clock: Clock) -> None:
    """20 ms a sample and 100 ms more for one in ten are 30 ms a sample, for which a step of 30 ms allows one in a hundred."""
    schedule = Schedule(1, 0.01)
    for step in range(20_000):
        if schedule.wants(step):
            rare = 0.1 if schedule.weights_due() else 0.0
            if rare:
                schedule.spread(rare)
            clock.now += 0.02 + rare
            schedule.charge(0.02 + rare)
        clock.now += 0.03
    assert schedule.every in (100, 101)  # rounded up
