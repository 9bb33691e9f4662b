"""Baselines against closed forms, what freezes and resets them, and that memory does not grow."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapse_monitor.judge import DEFAULT_RULES, Baseline, History, Judge
from collapse_monitor.judge.baseline import Track, from_scale, to_scale
from collapse_monitor.judge.engine import MOST_ALERTS
from collapse_monitor.judge.thresholds import SCALES, SMALLEST_DEVIATION, WARMUP_CHECKS, WINDOW_CHECKS
from collapse_monitor.records import Snapshot
from tests.judge.courses import phase, verdict
from tests.synthetic import make_snapshot


def fill(history: History, values: list[float], metric: str = "effective_rank", frozen: tuple[int, ...] = ()) -> None:
    history.baseline(metric)
    for value in values:
        history.record(make_snapshot(history.checks, blocks={metric: value}), frozen)


def test_nothing_is_known_before_the_warm_up_is_over() -> None:
    history = History()
    fill(history, [20.0] * (WARMUP_CHECKS - 1))
    assert history.baseline("effective_rank").at(0) is None
    assert not history.baseline("effective_rank").beyond(np.full(4, 1.0), -1, 5).any()
    fill(history, [20.0])
    assert history.baseline("effective_rank").at(0) == pytest.approx(20)


def test_a_baseline_is_the_mean_in_its_scale() -> None:
    history = History(warmup=4)
    fill(history, [2.0, 8.0, 4.0, 4.0])
    baseline = history.baseline("effective_rank")
    assert baseline.at(1) == pytest.approx(4)  # geometric mean
    assert baseline.deviation[1] == pytest.approx(np.std(np.log([2, 8, 4, 4])))
    assert baseline.shift(np.full(4, 8.0))[1] == pytest.approx(math.log(2))


def test_it_forgets_with_its_window() -> None:
    history = History()
    fill(history, [1.0, -1.0] * (WINDOW_CHECKS // 2), "outlier_tokens")
    fill(history, [1.0] * WINDOW_CHECKS, "outlier_tokens")
    assert history.baseline("outlier_tokens").at(0) == pytest.approx(1 - (1 - 1 / WINDOW_CHECKS) ** WINDOW_CHECKS)


def test_a_change_needs_both_its_size_and_its_sigmas() -> None:
    still = Baseline("log", np.log([10.0]), np.array([0.05]))
    noisy = Baseline("log", np.log([10.0]), np.array([1.0]))
    half = np.array([5.0])
    assert still.beyond(half, -math.log(1.9), 5).all()
    assert not still.beyond(half, -math.log(2.1), 5).any()  # not large enough
    assert not noisy.beyond(half, -math.log(1.9), 5).any()  # not remarkable enough
    assert not still.beyond(np.array([20.0]), -math.log(1.9), 5).any()  # the other way
    assert still.beyond(np.array([20.0]), math.log(1.9), 5).all()


def test_a_deviation_has_a_floor() -> None:
    history = History(warmup=2)
    fill(history, [3.0] * 5)
    assert history.baseline("effective_rank").deviation[0] == SMALLEST_DEVIATION["log"]


def test_frozen_layers_keep_what_was_normal() -> None:
    history = History(warmup=2)
    fill(history, [10.0] * 5)
    fill(history, [1.0] * 50, frozen=(1,))
    baseline = history.baseline("effective_rank")
    assert baseline.at(1) == pytest.approx(10)
    assert baseline.at(0) == pytest.approx(1, rel=1)


def test_missing_readings_teach_nothing() -> None:
    history = History(warmup=3)
    fill(history, [10.0, math.nan, math.nan, 10.0])
    assert history.baseline("effective_rank").at(0) is None
    fill(history, [10.0])
    assert history.baseline("effective_rank").at(0) == pytest.approx(10)


def test_an_alert_freezes_its_layer_and_only_that() -> None:
    judge = Judge(DEFAULT_RULES)
    broken = {"rank": [30, 1.0, 12, 12], "similarity": 0.4}
    verdict(phase(20), phase(300, **broken), judge=judge)
    rank, similarity = judge.history.baseline("rank_share"), judge.history.baseline("token_similarity")
    assert rank.at(1) == pytest.approx(30 / 64)
    assert rank.at(2) == pytest.approx(12 / 64, rel=0.01)
    assert similarity.at(1) == pytest.approx(0.3)
    assert similarity.at(2) == pytest.approx(0.4, rel=0.01)


def test_another_model_starts_afresh() -> None:
    history = History(warmup=2)
    fill(history, [10.0] * 5)
    grown = make_snapshot(5, layers=6)
    history.read(grown)
    assert history.baseline("effective_rank").at(0) is None
    assert verdict(phase(20), phase(20, layers=6, similarity=0.95), phase(5, layers=2)) == []


def test_steps_and_lasting() -> None:
    history = History()
    course = [True, True, False, True, True, True]
    found = []
    for check, value in enumerate(course):
        snapshot = make_snapshot(10 * check)
        checks, steps = history.lasting("it", np.array([value]), snapshot.step)
        again = history.lasting("it", np.array([value]), snapshot.step)  # a second look at the same step counts once
        assert (checks, steps) == again
        found.append((int(checks[0]), int(steps[0])))
        history.record(snapshot)
    assert found == [(1, 0), (2, 10), (0, 0), (1, 0), (2, 10), (3, 20)]
    assert history.steps(make_snapshot(70)) == 70


def test_recent_checks_oldest_first() -> None:
    history = History()
    history.recent("effective_rank")
    for step in range(40):
        history.record(make_snapshot(step, rank=float(step)))
    assert [(step, values[0]) for step, values in history.recent("effective_rank")] == [(step, float(step)) for step in range(24, 40)]


@given(st.sampled_from(sorted(set(SCALES.values()) | {"linear"})), st.floats(1e-3, 0.999))
def test_scales_have_inverses(scale: str, value: float) -> None:
    there = to_scale(np.array([value]), scale)  # type: ignore[arg-type]
    assert from_scale(there, scale)[0] == pytest.approx(value)  # type: ignore[arg-type]


def test_scales_at_their_ends() -> None:
    assert np.isfinite(to_scale(np.array([1.0, 1.0000001]), "gap")).all()
    assert np.isfinite(to_scale(np.array([0.0]), "log")).all()
    assert np.isnan(to_scale(np.array([-1.0, np.nan]), "log")).all()
    assert to_scale(np.array([-5.0]), "log1p")[0] == 0


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_healthy_noise_and_drift_raise_nothing(seed: int) -> None:
    """A hundred checks of ten per cent noise on slow random walks, for every layer and head by itself."""
    random = np.random.default_rng(seed)
    layers, heads, checks = 6, 2, 120

    def walk(start: float, low: float, high: float, *shape: int) -> np.ndarray:
        drift = np.cumsum(random.normal(0, 0.02, (checks, *shape)), axis=0)
        return np.clip(start * np.exp(drift + random.normal(0, 0.1, drift.shape)), low, high)

    courses = {"similarity": 1 - walk(0.5, 0.03, 1.2, layers), "rank": walk(20, 3, 60, layers), "contraction": walk(0.9, 0.4, 2, layers)}
    per_head = {
        "attention_uniformity": 1 - walk(0.3, 0.05, 0.9, layers, heads),
        "max_logit": walk(8, 0, 60, layers, heads),
        "logit_std": walk(2, 0, 6, layers, heads),
    }
    course = [
        {
            "layers": layers,
            **{name: values[check] for name, values in courses.items()},
            "attention": {name: values[check] for name, values in per_head.items()},
        }
        for check in range(checks)
    ]
    assert verdict(course) == []


def tracked(values: Iterable[float]) -> Track:
    track = Track("log", (1,), 0)
    for step, value in enumerate(values):
        track.update(step, np.array([value]), np.zeros(1, dtype=bool))
    return track


@pytest.mark.parametrize("checks", [5, 20, 80, 320])
def test_a_fall_to_a_tenth_is_told_however_slow_it_is(checks: int) -> None:
    """A drift widens the deviation as it moves the middle: what tells it is the anchor. Noise of 2 % all the while."""
    random = np.random.default_rng(0)
    healthy = np.exp(0.02 * random.normal(size=60))
    fall = np.exp(-math.log(10) * np.arange(1, checks + 1) / checks + 0.02 * random.normal(size=checks))
    track, told = tracked(healthy), []
    for step, value in enumerate([*fall, *([0.1] * 40)]):
        told.append(bool(track.baseline(16).beyond(np.array([value]), -math.log(3), 5).all()))
        track.update(60 + step, np.array([value]), np.zeros(1, dtype=bool))
    assert True in told
    assert told.index(True) > 0.3 * checks


def test_over_thousands_of_checks_a_drift_becomes_the_baseline() -> None:
    course = np.exp(-math.log(10) * np.arange(4000) / 4000)
    assert not tracked(course).baseline(16).beyond(np.array([0.1]), -math.log(3), 5).any()


def test_a_fall_within_a_few_checks_does_not_widen_the_range_until_it_lies_inside() -> None:
    """Without a limit to what one reading teaches, five checks of a ramp make the deviation .6, and five of those reach below it."""
    random = np.random.default_rng(0)
    ramp = [1.0, 0.75, 0.5, 0.35, 0.25]
    course = [*np.exp(0.02 * random.normal(size=60)), *ramp, *([0.2] * 8)]
    normal = tracked(course).baseline(16)
    assert normal.value[0] > 0.8
    assert normal.beyond(np.array([0.2]), -math.log(2.5), 5).all()


def test_the_anchor_survives_a_resume_and_stands_still_while_frozen() -> None:
    track = tracked([1.0] * 40)
    again = Track.from_state(json.loads(json.dumps(track.state_dict())), 0)
    assert again.anchor == pytest.approx(math.log(1.0))
    for step in range(40):
        again.update(step, np.array([0.1]), np.ones(1, dtype=bool))
    assert (again.anchor, again.mean) == (track.anchor, track.mean)


def size_of_state(judge: Judge, checks: int) -> int:
    """Characters of the state after so many checks of a run that collapses and recovers every 50 of them, without what was said."""
    while judge.history.checks < checks:
        check = judge.history.checks
        judge.check(make_snapshot(check, similarity=1.0 if check % 50 > 40 else 0.3, rank=20 + math.sin(check)))
    return len(json.dumps({**judge.state_dict(), "alerts": []}, allow_nan=False))


@pytest.mark.parametrize("checks", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_state_does_not_grow(checks: int) -> None:
    judge = Judge(DEFAULT_RULES)
    early = size_of_state(judge, 400)
    assert size_of_state(judge, checks) == pytest.approx(early, rel=0.05)
    assert len(judge.alerts) < MOST_ALERTS


def test_what_a_verdict_on_48_layers_costs() -> None:
    """Calls of the interpreter, the same on a busy machine: about 1800, which took half a millisecond of one core."""
    judge = Judge(DEFAULT_RULES)
    snapshots = [make_snapshot(check * 50, layers=48, heads=16, rank=20 + check / 100) for check in range(60)]
    for snapshot in snapshots[:-1]:
        judge.check(snapshot)
    assert judge.alerts == []
    assert calls_of(judge.check, snapshots[-1]) < 3000


def calls_of(function: Callable[[Snapshot], object], snapshot: Snapshot) -> int:
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(snapshot)
    finally:
        sys.setprofile(None)
    return calls
