"""What attention selects, what passes through blocks, what samples share: named right, at the right layer, never on a healthy run."""

from __future__ import annotations

from typing import Any

import pytest

from collapse_monitor.records import Alert
from tests.judge.courses import names, phase, verdict

LAYERS, HEADS = 4, 2
Layers = tuple[int, ...]


def maps(**metrics: list[float]) -> dict[str, list[list[float]]]:
    """Attention metrics, one value per layer, alike for all heads."""
    return {name: [[value] * HEADS for value in values] for name, values in metrics.items()}


def course(changed: dict[str, list[float]] | None = None, blocks: dict[str, Any] | None = None, checks: int = 20) -> list[dict[str, Any]]:
    """A model whose attention selects, with some readings otherwise."""
    attention = {
        "attention_uniformity": [0.7] * LAYERS,
        "sink_mass": [0.1] * LAYERS,
        "head_similarity": [0.5] * LAYERS,
        "layer_similarity": [0.4] * LAYERS,
        "input_dependence": [0.25] * LAYERS,
        "dominant_column": [0.15] * LAYERS,
        **(changed or {}),
    }
    readings = {
        "branch_ratio": 0.4,
        "gradient_norm": [1.2, 1.1, 1.0, 1.0],
        "qk_to_v_gradient": 0.3,
        "pooled_rank": 20.0,
        "dead_tokens": 0.0,
        "stable_rank": 6.0,
        **(blocks or {}),
    }
    return phase(checks, attention=maps(**attention), blocks=readings)


def told(changed: dict[str, list[float]] | None = None, blocks: dict[str, Any] | None = None) -> list[tuple[str, str, str, Layers]]:
    return names(verdict(course(), course(changed, blocks, checks=6)))


def at(layer: int, value: float, usual: float) -> list[float]:
    return [value if index == layer else usual for index in range(LAYERS)]


def test_a_healthy_run_is_left_alone() -> None:
    assert verdict(course(checks=60)) == []


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("uniform_attention", {"attention_uniformity": at(2, 0.999, 0.7), "input_dependence": at(2, 0.001, 0.25)}),
        ("head_redundancy", {"head_similarity": at(2, 1.0, 0.5)}),
        ("attention_stagnation", {"layer_similarity": at(2, 0.99, 0.4)}),
        ("input_independent_attention", {"input_dependence": at(2, 0.001, 0.25)}),
        ("single_column_attention", {"dominant_column": at(2, 0.98, 0.15)}),
    ],
)
def test_maps(name: str, changed: dict[str, list[float]]) -> None:
    assert told(changed) == [(name, "firing", "warning", (2,))]


def test_attention_that_was_uniform_all_along_is_healthy() -> None:
    uniform = {
        "attention_uniformity": [0.999] * LAYERS,
        "head_similarity": [1.0] * LAYERS,
        "layer_similarity": [1.0] * LAYERS,
        "input_dependence": [0.0] * LAYERS,
    }
    assert verdict(course(uniform, checks=60)) == []


def test_uniform_maps_are_alike_in_every_respect_and_named_once() -> None:
    everything = {
        "attention_uniformity": at(1, 0.9999, 0.7),
        "head_similarity": at(1, 1.0, 0.5),
        "layer_similarity": at(1, 0.99, 0.4),
        "input_dependence": at(1, 0.0, 0.25),
    }
    assert told(everything) == [("uniform_attention", "firing", "warning", (1,))]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("head_redundancy", {"head_similarity": at(2, 1.0, 0.5)}),
        ("attention_stagnation", {"layer_similarity": at(2, 0.99, 0.4)}),
        ("input_independent_attention", {"input_dependence": at(2, 0.001, 0.25)}),
        ("single_column_attention", {"dominant_column": at(2, 0.98, 0.15)}),
    ],
)
def test_what_maps_were_from_the_start_is_noted_when_it_lasts(name: str, changed: dict[str, list[float]]) -> None:
    (event,) = verdict(course(changed, checks=12))
    assert (event.rule, event.severity, event.layers) == (name, "info", (2,))
    assert verdict(course(changed, checks=7)) == []


def test_samples_that_lie_in_one_direction_from_the_start_are_noted() -> None:
    alike = course(blocks={"pooled_rank": at(2, 1.05, 20)}, checks=12)
    assert [(event.rule, event.severity.value, event.layers) for event in verdict(alike)] == [("dimensional_collapse", "info", (2,))]
    assert verdict(alike, every=5) == []  # 55 steps: early training passes through it


@pytest.mark.parametrize(("name", "before"), [("vanishing_gradient", 1e-4), ("exploding_gradient", 1e4)])
def test_one_block_that_spoils_gradients_from_the_start_is_named(name: str, before: float) -> None:
    (event,) = verdict(course(blocks={"gradient_norm": [1.3 * before, 1.1 * before, 1.0, 0.9]}, checks=3))
    assert (event.rule, event.layers, event.metric) == (name, (2,), "gradient_gain")


def test_heads_that_come_to_park_on_a_sink_are_no_alarm() -> None:
    parked = {
        "sink_mass": at(1, 0.97, 0.1),
        "dominant_column": at(1, 0.97, 0.15),
        "head_similarity": at(1, 1.0, 0.5),
        "input_dependence": at(1, 0.001, 0.25),
    }
    assert told(parked) == []


def test_a_column_explains_heads_that_are_alike() -> None:
    column = {"dominant_column": at(2, 0.97, 0.15), "head_similarity": at(2, 1.0, 0.5), "input_dependence": at(2, 0.001, 0.25)}
    assert told(column) == [("single_column_attention", "firing", "warning", (2,))]


@pytest.mark.parametrize(
    ("name", "layer", "blocks"),
    [
        ("bypassed_attention", 1, {"branch_ratio": at(1, 1e-4, 0.4)}),
        ("vanishing_gradient", 2, {"gradient_norm": [1.2e-3, 1.1e-3, 1, 1]}),
        ("exploding_gradient", 2, {"gradient_norm": [1.2e3, 1.1e3, 1, 1]}),
        ("dimensional_collapse", 3, {"pooled_rank": at(3, 1.8, 20)}),
        ("dead_tokens", 1, {"dead_tokens": at(1, 0.5, 0)}),
    ],
)
def test_flow_and_samples(name: str, layer: int, blocks: dict[str, Any]) -> None:
    assert told(blocks=blocks) == [(name, "firing", "warning", (layer,))]


def test_the_message_says_that_the_gradient_is_lost_in_this_block() -> None:
    (alert,) = verdict(course(), course(blocks={"gradient_norm": [1.2e-3, 1.1e-3, 1, 1]}, checks=3))
    assert "gradient_gain of layer 2 is 0.0011 (baseline 1.1, bound 0.05). The gradient that this block passes back" in alert.message


def test_gradients_that_fade_a_little_in_each_block() -> None:
    events = verdict(course(blocks={"gradient_norm": [1e-9, 1e-6, 1e-3, 1]}))
    assert names(events) == [("vanishing_gradient", "firing", "warning", (0, 1))]


def test_gradients_of_queries_and_keys_alone_are_no_vanishing_gradient() -> None:
    collapsed = {"gradient_norm": [1e-3, 1e-3, 1, 1], "qk_to_v_gradient": [1e-7] * LAYERS}
    assert told(blocks=collapsed) == []


def test_gradients_that_shrink_everywhere_are_a_model_that_has_learnt() -> None:
    assert told(blocks={"gradient_norm": 1e-5}) == []


def test_a_gate_that_starts_closed_is_a_note() -> None:
    events = verdict(course(blocks={"branch_ratio": at(1, 1e-6, 0.4)}))
    assert names(events) == [("bypassed_attention", "firing", "info", (1,))]


def test_rank_collapse_explains_what_follows_from_it() -> None:
    collapsed = phase(
        4,
        similarity=[0.3, 0.9999, 1.0, 1.0],
        contraction=[0.9, 0.01, 0.9, 0.9],
        rank=[30, 1.1, 1, 1],
        attention=maps(attention_uniformity=[0.7, 0.7, 1, 1], input_dependence=[0.25, 0.25, 0, 0], head_similarity=[0.5, 0.5, 1, 1]),
        blocks={"gradient_norm": [1e-2, 1, 1, 1], "dead_tokens": [0, 0, 0.9, 0.9], "pooled_rank": [20, 1.1, 1, 1]},
    )
    assert names(verdict(course(), collapsed)) == [("rank_collapse", "firing", "critical", (1, 2, 3))]


class TestOverfitting:
    @staticmethod
    def run(losses: list[tuple[float, float | None]]) -> list[Alert]:
        logged = [{"train_loss": train} | ({} if held_out is None else {"val_loss": held_out}) for train, held_out in losses]
        return verdict([{**readings, "context": context} for readings, context in zip(course(checks=len(losses)), logged, strict=True)])

    def test_it_is_named_and_no_collapse(self) -> None:
        losses = [(2 - check / 20, 2.1 - check / 40 if check < 20 else 1.6 + (check - 20) / 20) for check in range(40)]
        (alert,) = self.run(losses)
        assert (alert.rule, alert.state, alert.severity.value, alert.layers) == ("overfitting", "firing", "info", ())
        assert "in the run as a whole" in alert.message
        assert "This is not a collapse" in alert.message

    def test_validation_may_be_logged_now_and_then(self) -> None:
        losses = [(2 - check / 20, None if check % 4 else (2.1 if check < 20 else 2.6)) for check in range(40)]
        assert [alert.rule for alert in self.run(losses)] == ["overfitting"]

    def test_a_gap_alone_is_none(self) -> None:
        assert self.run([(1 - check / 50, 2 - check / 50) for check in range(40)]) == []

    def test_without_losses_nothing_is_said(self) -> None:
        assert self.run([(1.0, None)] * 40) == []
