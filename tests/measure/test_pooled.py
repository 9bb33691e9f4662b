"""The rank over sequence means of recent steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from collapse_monitor import metrics
from collapse_monitor.measure import PooledFeatures, Window
from collapse_monitor.metrics import Metric, select
from collapse_monitor.observation import BlockObservation, TokenSample
from collapse_monitor.records import Snapshot
from tests.measure.windows import block_key, normal, same, see_chain, sites_of

POOLED = select(["pooled_rank"])


def step(history: PooledFeatures | None, *hidden: Tensor, chosen: tuple[Metric, ...] = POOLED, mask: Tensor | None = None) -> Snapshot:
    """One step whose blocks put out these tokens."""
    window = Window(chosen, history)
    for index, tokens in enumerate(hidden):
        window.block(block_key(index), BlockObservation(TokenSample(tokens, mask)))
    snapshot = window.launch(0, sites_of(len(hidden)), {}).snapshot()
    assert window.faults == []
    return snapshot


def tokens(seed: int, sequences: int = 4, dim: int = 20, offset: float = 1.0) -> Tensor:
    """Sequences around means of their own, far from zero."""
    return (offset + normal(sequences, 1, dim, seed=seed) + 0.1 * normal(sequences, 6, dim, seed=seed + 100)).float()


def test_it_equals_the_public_function() -> None:
    history, seen = PooledFeatures(), []
    for index in range(5):
        hidden = [tokens(index), tokens(index + 50)]
        seen.append(torch.stack(hidden))
        snapshot = step(history, *hidden)
        if index < 3:
            assert all(math.isnan(value) for value in snapshot.series("pooled_rank"))
            assert snapshot.missing == {"pooled_rank": "fewer sequences seen so far than a rank can be read from"}
    means = torch.cat(seen, 1).mean(2)
    expected = [float(metrics.pooled_rank(block)) for block in means]
    assert all(same(*pair, 1e-5) for pair in zip(snapshot.series("pooled_rank"), expected, strict=True))


@pytest.mark.parametrize("dim", [8, 200])
def test_it_keeps_the_newest(dim: int) -> None:
    history, seen = PooledFeatures(capacity=18, fewest=16), []
    for index in range(9):
        seen.append(tokens(index, sequences=3, dim=dim))
        snapshot = step(history, seen[-1])
    expected = float(metrics.pooled_rank(torch.cat(seen).mean(1)[-18:]))
    assert same(snapshot.series("pooled_rank")[0], expected, 1e-5)
    assert sum(queue.numel() for queue in history._queues.values()) == 18 * dim


def test_dimensional_collapse_is_seen_behind_a_large_mean() -> None:
    """Samples along one line, a thousandth of the mean apart."""
    history, line = PooledFeatures(), normal(20, seed=3)
    for index in range(5):
        hidden = 1 + 1e-3 * normal(4, 1, 1, seed=index) * line
        snapshot = step(history, hidden.expand(4, 6, 20).float())
    assert same(snapshot.series("pooled_rank")[0], 1, 0.02)


def test_equal_samples_read_one() -> None:
    history = PooledFeatures()
    for _ in range(4):
        snapshot = step(history, tokens(0)[:1].expand(4, 6, 20))
    assert snapshot.series("pooled_rank") == [1]


def test_padding_and_outliers_do_not_enter_the_means() -> None:
    history, seen = PooledFeatures(), []
    mask = torch.arange(6) < 5
    for index in range(4):
        hidden = tokens(index)
        seen.append(hidden[:, 1:5].mean(1))
        hidden[:, 0] *= 1000
        hidden[:, 5] = torch.nan
        snapshot = step(history, hidden, mask=mask.expand(4, 6))
    assert same(snapshot.series("pooled_rank")[0], float(metrics.pooled_rank(torch.cat(seen))), 1e-5)


def test_a_broken_sequence_is_passed_over() -> None:
    history, seen = PooledFeatures(), []
    for index in range(6):
        hidden = tokens(index)
        seen.append(hidden.mean(1)[1 if index == 2 else 0 :])
        if index == 2:
            hidden[0, 3, 4] = torch.inf
        snapshot = step(history, hidden)
    assert same(snapshot.series("pooled_rank")[0], float(metrics.pooled_rank(torch.cat(seen))), 1e-5)


@pytest.mark.parametrize("change", [[tokens(9, dim=24)], [tokens(9), tokens(8)]], ids=["width", "blocks"])
def test_it_starts_anew_when_the_model_changes(change: list[Tensor]) -> None:
    history = PooledFeatures()
    for index in range(4):
        assert math.isnan(step(history, tokens(index)).series("pooled_rank")[0]) == (index < 3)
    for index in range(4):
        snapshot = step(history, *change)
        assert math.isnan(snapshot.series("pooled_rank")[0]) == (index < 3)
    assert len(history._queues) == 1


def test_the_number_of_sequences_may_change() -> None:
    history = PooledFeatures()
    for index, sequences in enumerate((4, 1, 3, 4, 2, 4)):
        snapshot = step(history, tokens(index, sequences=sequences))
    assert not math.isnan(snapshot.series("pooled_rank")[0])


def test_it_has_no_effect_when_not_asked_for() -> None:
    history = PooledFeatures()
    snapshot = step(history, tokens(0), chosen=select(["effective_rank"]))
    assert history._queues == {}
    assert "pooled_rank" not in snapshot.metrics


def test_own_metrics_read_the_queue() -> None:
    history = PooledFeatures(fewest=8)
    own = (Metric("samples", "features", lambda features: features.new_tensor(float(len(features)))),)
    assert [step(history, tokens(index), chosen=own).series("samples") for index in range(3)] == [
        pytest.approx([math.nan], nan_ok=True),
        [8],
        [12],
    ]


def test_a_shared_output_is_pooled_once() -> None:
    """A wrapper and the block inside it put out the same tensor."""
    history, sample = PooledFeatures(fewest=2), TokenSample(tokens(0))
    window = Window(POOLED, history)
    for index in range(2):
        window.block(block_key(index), BlockObservation(sample))
    first, second = window.launch(0, sites_of(2), {}).snapshot().series("pooled_rank")
    assert first == second > 1
    assert sum(queue.shape[0] for queue in history._queues.values()) == 1


def test_clear() -> None:
    history = PooledFeatures()
    window = Window(POOLED, history)
    see_chain(window, [TokenSample(tokens(seed)) for seed in range(3)])
    window.launch(0, sites_of(2), {})
    assert history._queues
    history.clear()
    assert history._queues == {}
