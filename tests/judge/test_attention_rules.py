"""Entropy collapse and logit explosion: by the layer's heads, apart from sinks, pointers and large biases."""

from __future__ import annotations

import math

import pytest

from tests.judge.courses import EVERY, HEALTHY, names, phase, verdict

# Query and key weights of block 2 times 12: measured on a trained digit ViT.
SHARP = {"uniformity": [0.8, 0.8, 0.03, 0.8], "logit_std": [1.5, 1.5, 60.0, 1.5], "max_logit": [5, 5, 90, 5]}


class TestEntropyCollapse:
    def test_against_the_own_baseline(self) -> None:
        (event,) = verdict(HEALTHY, phase(4, uniformity=[0.8, 0.8, 0.2, 0.8], logit_std=[1.5, 1.5, 8.0, 1.5], max_logit=[5, 5, 28, 5]))
        assert (event.rule, event.severity, event.layers) == ("attention_entropy_collapse", "warning", (2,))
        assert (event.value, event.bound, event.baseline) == (pytest.approx(0.2), 0.25, pytest.approx(0.8))
        assert event.since == len(HEALTHY) * EVERY

    def test_one_hot_from_the_first_step_on(self) -> None:
        assert names(verdict(phase(4, **SHARP))) == [("attention_entropy_collapse", "firing", "critical", (2,))]

    def test_a_single_sharp_head_points(self) -> None:
        one = [[0.02, 0.8, 0.8, 0.8]] * 4
        large = [[40.0, 1.0, 1.0, 1.0]] * 4
        assert verdict(phase(4, heads=4), phase(20, heads=4, attention={"attention_uniformity": one, "logit_std": large})) == []

    def test_a_layer_of_one_head_is_never_critical(self) -> None:
        assert names(verdict(phase(20, heads=1), phase(4, heads=1, **SHARP))) == [
            ("attention_entropy_collapse", "firing", "warning", (2,)),
        ]

    def test_half_of_the_heads_is_a_collapse(self) -> None:
        half = [[0.02, 0.03, 0.8, 0.8]] * 4
        large = [[40.0, 40.0, 1.0, 1.0]] * 4
        (event,) = verdict(phase(20, heads=4), phase(4, heads=4, attention={"attention_uniformity": half, "logit_std": large}))
        assert (event.severity, event.layers, event.value) == ("warning", (0, 1, 2, 3), pytest.approx(0.025))

    def test_sinks_are_sharp_without_large_logits(self) -> None:
        assert verdict(HEALTHY, phase(20, uniformity=0.04, sink_mass=0.95, logit_std=2.5, max_logit=12)) == []

    def test_a_sink_with_large_logits_as_a_whole_is_none(self) -> None:
        assert names(verdict(HEALTHY, phase(4, **{**SHARP, "sink_mass": 0.5}))) == [
            ("attention_entropy_collapse", "firing", "critical", (2,))
        ]

    def test_pointers_of_a_copy_task(self) -> None:
        assert verdict(HEALTHY, phase(20, uniformity=0.01, logit_std=3.3, max_logit=15)) == []

    def test_without_logits_sinks_are_left_out_and_the_rest_counts(self) -> None:
        blind = ["logit_std", "max_logit"]
        assert verdict(phase(20, without=blind), phase(4, uniformity=0.04, sink_mass=0.9, without=blind)) == []
        assert names(verdict(phase(20, without=blind), phase(4, uniformity=[0.8, 0.04, 0.8, 0.8], without=blind))) == [
            ("attention_entropy_collapse", "firing", "critical", (1,))
        ]

    def test_uniform_attention_is_no_alarm(self) -> None:
        assert verdict(phase(30, uniformity=1.0, max_logit=0.1, logit_std=0.01), HEALTHY, phase(30, uniformity=1.0)) == []

    def test_healthy_sharpening(self) -> None:
        course = [
            {"uniformity": 1.0 - 0.7 * check / 100, "logit_std": 0.2 + 5 * check / 100, "max_logit": 1 + check / 4} for check in range(100)
        ]
        assert verdict(course) == []

    def test_cross_attention_learns_alignments(self) -> None:
        rows = [[0.8, 0.8], [0.01, 0.01]] * 4
        std = [[1.5, 1.5], [20.0, 20.0]] * 4
        assert verdict(phase(20, cross=True), phase(10, cross=True, attention={"attention_uniformity": rows, "logit_std": std})) == []

    def test_behind_a_rank_collapse_it_is_an_echo(self) -> None:
        same = {"similarity": [0.3, 1.0, 1.0, 1.0], "contraction": [0.9, 0.0, 0.9, 0.9], "rank": [30, 1, 1, 1]}
        assert names(verdict(HEALTHY, phase(4, **same, **SHARP))) == [("rank_collapse", "firing", "critical", (1, 2, 3))]


class TestLogitExplosion:
    def test_against_the_own_baseline_with_the_head(self) -> None:
        logits = [[5.0, 5.0], [5.0, 5.0], [5.0, 250.0], [5.0, 5.0]]
        (event,) = verdict(HEALTHY, phase(4, attention={"max_logit": logits}))
        assert (event.rule, event.severity, event.layers) == ("logit_explosion", "warning", (2,))
        assert (event.value, event.bound, event.baseline) == (250.0, 100.0, pytest.approx(5.0))
        assert event.finding is not None
        assert event.finding.heads == (1,)
        assert "max_logit of layer 2 head 1 is 250 (baseline 5, bound 100)" in event.message

    def test_a_thousand_is_critical(self) -> None:
        assert names(verdict(HEALTHY, phase(4, max_logit=[5, 2000, 5, 5]))) == [("logit_explosion", "firing", "critical", (1,))]

    def test_healthy_growth(self) -> None:
        assert verdict([{"max_logit": 2 + 58 * check / 100} for check in range(100)]) == []

    def test_slow_growth_meets_the_absolute_bound(self) -> None:
        course = [{"max_logit": 300 * 1.01**check, "logit_std": 15 * 1.01**check} for check in range(380)]
        events = [event for event in verdict(course) if event.rule == "logit_explosion"]
        assert [event.severity for event in events] == ["warning", "critical"]
        assert 1000 <= events[0].value < 1100

    def test_a_large_bias_of_the_keys_shifts_rows_and_changes_nothing(self) -> None:
        assert verdict(phase(40, max_logit=5000, logit_std=3)) == []

    def test_from_the_first_step_on(self) -> None:
        assert names(verdict(phase(4, max_logit=2e4, logit_std=500)))[0] == ("logit_explosion", "firing", "critical", (0, 1, 2, 3))

    def test_infinite_logits(self) -> None:
        assert names(verdict(HEALTHY, phase(4, max_logit=[5, math.inf, 5, 5]))) == [("logit_explosion", "firing", "critical", (1,))]

    def test_in_cross_attention_too(self) -> None:
        rows = [[5.0, 5.0]] * 7 + [[400.0, 400.0]]
        assert names(verdict(phase(20, cross=True), phase(4, cross=True, attention={"max_logit": rows}))) == [
            ("logit_explosion", "firing", "warning", (3,))
        ]
