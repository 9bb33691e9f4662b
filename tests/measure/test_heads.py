"""Readings of attention sites equal the public metrics."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from collapse_monitor import metrics
from collapse_monitor.measure.rows import LARGEST_PAIRS, compared_rows
from collapse_monitor.observation import AttentionObservation
from tests.measure.windows import OF_ROWS, normal, same, snapshot_of

KINDS = ["all", "causal", "right padding", "left padding", "window", "any", "one key"]


def visible_keys(kind: str, sequences: int, heads: int, queries: int, keys: int) -> Tensor | None:
    key, query = torch.arange(keys), torch.arange(queries)[:, None] * keys // queries
    length = torch.arange(1, sequences + 1)[:, None, None, None] * keys // (sequences + 1)
    masks = {
        "all": None,
        "causal": (key <= query)[None, None],
        "right padding": key < length,
        "left padding": (key >= length) & (key <= query),
        "window": ((key - query).abs() <= keys // 4).expand(sequences, heads, queries, keys),
        "any": normal(sequences, heads, queries, keys, seed=11) > 0.3,
        "one key": (key == query)[None, None],
    }
    return masks[kind]


def observed(kind: str, shape: tuple[int, int, int, int], spread: float = 1.0, seed: int = 0) -> AttentionObservation:
    """Rows of a softmax; what stands at invisible keys is not to be read."""
    visible, logits = visible_keys(kind, *shape), spread * normal(*shape, seed=seed).float()
    if visible is None:
        return AttentionObservation(logits.softmax(-1), None, logits, same_rows="rows")
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    poison = [values.masked_fill(~visible, torch.nan) for values in (weights, logits)]
    return AttentionObservation(poison[0], visible, poison[1], same_rows="rows")


def by_public_functions(observation: AttentionObservation, previous: AttentionObservation) -> dict[str, list[float]]:
    given = {"logits": (observation.logits,), "attention_pair": (observation.weights, previous.weights)}
    expected = {}
    for metric in OF_ROWS:
        value = metric.compute(*given.get(metric.reads, (observation.weights,)), observation.visible).double()
        expected[metric.name] = (value.nanmean(0) if value.ndim == 2 else value).tolist()
    return expected


def assert_equal(observation: AttentionObservation, previous: AttentionObservation) -> None:
    snapshot = snapshot_of(metrics=OF_ROWS, attentions=[previous, observation])
    for name, expected in by_public_functions(observation, previous).items():
        got = snapshot.heads(name)[1]
        assert len(got) == len(expected)
        assert all(same(*pair, 1e-5, 1e-6) for pair in zip(got, expected, strict=True)), (name, got, expected)


@pytest.mark.parametrize("spread", [1e-2, 1.0, 30.0])
@pytest.mark.parametrize("shape", [(3, 4, 8, 16), (2, 1, 5, 33), (1, 3, 6, 6)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_public_functions(kind: str, shape: tuple[int, int, int, int], spread: float) -> None:
    assert_equal(observed(kind, shape, spread, seed=1), observed(kind, shape, spread, seed=2))


def test_one_mask_for_all_queries() -> None:
    """A key mask broadcast over queries counts every row as a viewer."""
    observation, previous = (observed("right padding", (3, 2, 5, 12), seed=seed) for seed in (1, 2))
    assert observation.visible is not None
    assert observation.visible.shape == (3, 1, 1, 12)
    assert_equal(observation, previous)


def test_fp64_rows() -> None:
    observation, previous = observed("causal", (2, 2, 6, 12), seed=1), observed("causal", (2, 2, 6, 12), seed=2)
    assert_equal(*(replace_dtype(each) for each in (observation, previous)))


def replace_dtype(observation: AttentionObservation) -> AttentionObservation:
    assert observation.logits is not None
    return replace(observation, weights=observation.weights.double(), logits=observation.logits.double())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -0.5])
def test_unlawful_weights(value: float) -> None:
    """One head of one sequence is spoilt; what compares heads or sequences cannot be read for others either."""
    observation, previous = observed("all", (2, 3, 5, 9), seed=1), observed("all", (2, 3, 5, 9), seed=2)
    observation.weights[0, 1, 2, 4] = value
    snapshot = snapshot_of(metrics=OF_ROWS, attentions=[previous, observation])
    expected = by_public_functions(observation, previous)
    for name in ("attention_uniformity", "effective_keys", "dominant_column", "sink_mass", "dobrushin", "layer_similarity"):
        assert all(same(*pair, 1e-5, 1e-6) for pair in zip(snapshot.heads(name)[1], expected[name], strict=True)), name
    assert math.isnan(snapshot.heads("input_dependence")[1][1])
    assert all(same(*pair, 1e-5, 1e-6) for pair in zip(snapshot.heads("head_similarity")[1], expected["head_similarity"], strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_unlawful_logits(value: float) -> None:
    observation = observed("causal", (2, 3, 5, 9))
    assert observation.logits is not None
    observation.logits[:, 1, 4, 0] = value
    snapshot = snapshot_of(metrics=OF_ROWS, attentions=[observation])
    for name in ("max_logit", "logit_std"):
        assert [math.isnan(reading) for reading in snapshot.heads(name)[0]] == [False, True, False]


def test_known_maps() -> None:
    """Closed forms: uniform, one-hot to one key, identity, causal uniform."""
    uniform, sink = torch.full((2, 2, 8, 8), 1 / 8), torch.eye(8)[0].expand(2, 2, 8, 8)
    readings = snapshot_of(
        metrics=OF_ROWS, attentions=[AttentionObservation(each) for each in (uniform, sink, torch.eye(8).expand(2, 2, 8, 8))]
    )
    assert same(readings.heads("attention_uniformity")[0][0], 1, 1e-6)
    assert [heads[0] for heads in readings.heads("attention_uniformity")[1:]] == [0, 0]
    assert [round(heads[0], 4) for heads in readings.heads("effective_keys")] == [8, 1, 1]
    assert [round(heads[0], 4) for heads in readings.heads("dominant_column")] == [1 / 8, 1, 1 / 8]
    assert [round(heads[0], 4) for heads in readings.heads("sink_mass")] == [1 / 8, 1, 1 / 8]
    assert [round(heads[0], 4) for heads in readings.heads("dobrushin")] == [0, 0, 1]
    assert [round(heads[0], 4) for heads in readings.heads("head_similarity")] == [1, 1, 1]
    assert [round(heads[0], 4) for heads in readings.heads("input_dependence")] == [0, 0, 0]
    causal = torch.ones(64, 64).tril().bool()
    snapshot = snapshot_of(
        metrics=OF_ROWS, attentions=[AttentionObservation((causal / causal.sum(-1, keepdim=True))[None, None], causal[None, None])]
    )
    assert same(snapshot.heads("sink_mass")[0][0], sum(1 / k for k in range(1, 65)) / 64, 1e-5)
    assert same(snapshot.heads("attention_uniformity")[0][0], 1, 1e-5)


class TestLayerSimilarity:
    first, second = observed("all", (2, 2, 6, 12), seed=1), observed("all", (2, 2, 6, 12), seed=2)

    def readings(self, *observations: AttentionObservation) -> list[list[float]]:
        return snapshot_of(metrics=OF_ROWS, attentions=list(observations)).heads("layer_similarity")

    def test_the_first_attention_has_none_and_says_so(self) -> None:
        snapshot = snapshot_of(metrics=OF_ROWS, attentions=[self.first, self.second])
        assert [math.isnan(heads[0]) for heads in snapshot.heads("layer_similarity")] == [True, False]
        assert "layer.0.attention/layer_similarity" in snapshot.missing
        assert "layer.1.attention/layer_similarity" not in snapshot.missing

    def test_cross_attention_is_passed_over(self) -> None:
        cross = replace(observed("all", (2, 2, 6, 12), seed=3), cross=True)
        got = self.readings(self.first, cross, self.second)
        assert math.isnan(got[1][0])
        assert got[2] == self.readings(self.first, self.second)[1]

    @pytest.mark.parametrize(
        "other",
        [
            replace(second, same_rows="other rows"),
            observed("all", (2, 3, 6, 12), seed=2),
            observed("all", (2, 2, 6, 10), seed=2),
            observed("causal", (2, 2, 6, 12), seed=2),
        ],
        ids=["rows", "heads", "keys", "mask"],
    )
    def test_only_equal_attentions_are_compared(self, other: AttentionObservation) -> None:
        assert all(math.isnan(reading) for reading in self.readings(self.first, other)[1])

    def test_equal_masks_need_not_be_one_object(self) -> None:
        pair = [observed("causal", (2, 2, 6, 12), seed=seed) for seed in (1, 2)]
        assert not math.isnan(self.readings(*pair)[1][0])


@pytest.mark.parametrize(("maps", "queries"), [(1, 16), (48, 16), (4, 1024), (768, 16), (10**6, 16), (3, 1)])
def test_compared_rows_are_spread_evenly(maps: int, queries: int) -> None:
    some = compared_rows(maps, queries)
    assert 1 <= len(some) <= queries
    assert some[-1] < queries
    assert maps * len(some) ** 2 <= max(LARGEST_PAIRS, 4 * maps)
    assert abs(some[0] - (queries - 1 - some[-1])) <= 1


def test_many_windows_compare_fewer_rows() -> None:
    """Windows of one image are sequences of their own; the distances that leave the device stay bounded."""
    observation = observed("causal", (200, 6, 16, 16))
    full = metrics.dobrushin(observation.weights, observation.visible).double().nanmean(0)
    got = snapshot_of(metrics=OF_ROWS, attentions=[observation]).heads("dobrushin")[0]
    assert all(0.6 * float(bound) < reading <= float(bound) + 1e-6 for reading, bound in zip(got, full, strict=True))
