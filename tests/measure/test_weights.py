"""Readings of projections against dense singular values, down to the edge of what they resolve."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from collapse_monitor.measure import Window
from collapse_monitor.measure.precision import gram_in_parts, product
from collapse_monitor.measure.weights import condition, largest_logit
from collapse_monitor.metrics import Metric, qk_spectral_norm, select, value_condition
from collapse_monitor.observation import AttentionObservation, WeightObservation
from collapse_monitor.records import Snapshot
from tests.measure.windows import Dispatched, attention_key, normal, sites_of


def of_spectrum(rows: int, columns: int, condition: float, seed: int = 0) -> Tensor:
    """A matrix with singular values from 1 down to 1 / condition."""
    left = torch.linalg.qr(normal(rows, rows, seed=seed))[0]
    right = torch.linalg.qr(normal(columns, rows, seed=seed + 1))[0]
    return (left * torch.logspace(0, -math.log10(condition), rows, dtype=torch.float64)) @ right.T


def dense(query: Tensor, key: Tensor) -> np.ndarray:
    """The largest singular value of the dim x dim matrix itself."""
    return torch.linalg.matrix_norm(query.double().mT @ key.double(), 2).numpy() / math.sqrt(query.shape[-2])


QK = {
    "random": (normal(6, 16, 64), normal(6, 16, 48, seed=1)),
    "wide head": (normal(2, 24, 8), normal(2, 24, 12, seed=1)),
    "rank one": (normal(3, 16, 1) * normal(3, 1, 64, seed=1), normal(3, 16, 1, seed=2) * normal(3, 1, 64, seed=3)),
    "nearly orthogonal": (
        torch.cat([normal(2, 8, 64), 1e-3 * normal(2, 8, 64, seed=1)], dim=1),
        torch.cat([1e-3 * normal(2, 8, 64, seed=2), normal(2, 8, 64, seed=3)], dim=1),
    ),
    "ill-conditioned": tuple(torch.stack([of_spectrum(16, 64, c, seed) for c in (1e2, 1e6)]) for seed in (0, 7)),
    "equal singular values": (torch.eye(8, 32)[None], torch.eye(8, 32)[None]),
    "tiny": (1e-9 * normal(2, 16, 32), 1e-9 * normal(2, 16, 32, seed=1)),
    "huge": (1e8 * normal(2, 16, 32), 1e8 * normal(2, 16, 32, seed=1)),
    "one feature": (normal(3, 1, 8), normal(3, 1, 8, seed=1)),
}


@pytest.mark.parametrize("name", QK)
def test_largest_logit_is_that_of_the_dense_matrix(name: str) -> None:
    query, key = (side.float() for side in QK[name])
    np.testing.assert_allclose(largest_logit(query, key).numpy(), dense(query, key), rtol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("target", [1.0, 3.0, 30.0, 1e3, 1e4])
def test_condition_number_from_gram_matrices(target: float, exact: bool) -> None:
    weight = of_spectrum(16, 200, target)[None].float()
    parts = gram_in_parts(weight, exact)
    expected = np.linalg.cond(weight.double().numpy())
    np.testing.assert_allclose(condition(sum(part.double().numpy() for part in parts)), expected, rtol=2e-3 if target > 1e3 else 1e-4)


def test_beyond_its_resolution_the_condition_number_is_infinite() -> None:
    """Exactly singular, singular but for rounding, and far too small to be seen: noise is no reading."""
    low = (normal(1, 16, 8) @ normal(1, 8, 64, seed=1)).float()
    repeated = normal(1, 16, 64).float()
    repeated[:, 3] = repeated[:, 5]
    for weight in (low, repeated, of_spectrum(16, 64, 1e6)[None].float()):
        for exact in (True, False):
            assert condition(sum(part.double().numpy() for part in gram_in_parts(weight, exact))).tolist() == [math.inf]


def test_products_keep_fp32_where_the_device_would_not() -> None:
    left, right = normal(2, 8, 300).float(), normal(2, 300, 5, seed=1).float()
    truth = left.double() @ right.double()
    scale = (left.double().norm(dim=-1, keepdim=True) * right.double().norm(dim=-2, keepdim=True)).max()
    for exact in (True, False):
        assert (product(left, right, exact).double() - truth).abs().max() < 1e-6 * scale


# -- in a window


def read(found: dict[int, WeightObservation], names: list[str | Metric], sites: int = 3) -> Snapshot:
    return closed(opened(names, sites), found, sites)


def opened(names: list[str | Metric], sites: int) -> Window:
    """A window in which every attention was heard."""
    window = Window(select(names))
    for index in range(sites):
        window.attention(attention_key(index), AttentionObservation(torch.full((1, 2, 3, 3), 1 / 3)))
    return window


def closed(window: Window, found: dict[int, WeightObservation], sites: int) -> Snapshot:
    window.weights((attention_key(index), observation) for index, observation in found.items())
    assert window.faults == []
    return window.launch(0, sites_of(attentions=sites, heads=2), {}).snapshot()


def weights(seed: int = 0, heads: int = 2, rows: int = 4, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(normal(heads, rows, dim, seed=seed + role).float() for role in range(3))


BOTH: list[str | Metric] = ["qk_spectral_norm", "value_condition"]


def test_every_site_gets_the_values_of_its_own_weights() -> None:
    """Sites of equal shape are stacked, others are not; the order of the sites does not matter."""
    given = {0: weights(0), 2: weights(20), 1: weights(10, rows=3, dim=7), 3: weights(30, rows=9, dim=5)}
    snapshot = read({index: WeightObservation(*sides) for index, sides in given.items()}, BOTH, sites=4)
    for index, (query, key, value) in given.items():
        np.testing.assert_allclose(snapshot.heads("qk_spectral_norm")[index], qk_spectral_norm(query, key), rtol=1e-5)
        np.testing.assert_allclose(snapshot.heads("value_condition")[index], value_condition(value), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    query, key, value = (side.to(dtype) for side in weights())
    snapshot = read({0: WeightObservation(query, key, value)}, BOTH)
    np.testing.assert_allclose(snapshot.heads("qk_spectral_norm")[0], qk_spectral_norm(query, key), rtol=1e-5)
    np.testing.assert_allclose(snapshot.heads("value_condition")[0], value_condition(value), rtol=1e-4)


def test_undefined_weights_are_told_from_good_ones() -> None:
    query, key, value = weights()
    broken, zero = query.clone(), torch.zeros_like(value)
    broken[0, 1, 2] = math.nan
    snapshot = read({0: WeightObservation(query, key, value), 1: WeightObservation(broken, key, zero)}, BOTH, sites=2)
    assert math.isnan(snapshot.heads("qk_spectral_norm")[1][0])
    np.testing.assert_allclose(snapshot.heads("qk_spectral_norm")[1][1], qk_spectral_norm(query, key)[1], rtol=1e-5)
    assert np.isnan(snapshot.heads("value_condition")[1]).all()
    assert not np.isnan(snapshot.heads("value_condition")[0]).any()
    missing = {place: reason for place, reason in snapshot.missing.items() if place.endswith("value_condition")}
    assert missing == {"layer.1.attention/value_condition": "the weights are all zero, or hold NaN or Inf"}


def test_zero_queries_read_zero() -> None:
    query, key, _ = weights()
    assert read({0: WeightObservation(torch.zeros_like(query), key)}, ["qk_spectral_norm"]).heads("qk_spectral_norm")[0] == [0.0, 0.0]


def test_unknown_and_unread_weights_say_why() -> None:
    query, key, value = weights()
    unknown = WeightObservation(None, None, value, {"qk_weights": "its queries: relu stands between"})
    snapshot = read({0: WeightObservation(query, key, value), 1: unknown}, BOTH, sites=2)
    assert snapshot.missing["layer.1.attention/qk_spectral_norm"] == "its queries: relu stands between"
    assert np.isnan(snapshot.heads("qk_spectral_norm")[1]).all()
    assert not np.isnan(snapshot.heads("value_condition")[1]).any()
    later = opened(BOTH, 2).launch(1, sites_of(attentions=2, heads=2), {}).snapshot()
    assert {later.missing[name] for name in ("qk_spectral_norm", "value_condition")} == {"weights are not read on this step"}
    assert np.isnan(later.heads("value_condition")).all()


def test_weights_that_cannot_be_measured_are_refused() -> None:
    query, key, value = weights()
    found = {0: WeightObservation(query, key[:, :2], value.int()), 1: WeightObservation(query, key, value)}
    snapshot = read(found, BOTH, sites=2)
    assert "of different heads" in snapshot.missing["layer.0.attention/qk_spectral_norm"]
    assert "not floating point" in snapshot.missing["layer.0.attention/value_condition"]


def test_a_metric_of_the_user_is_given_the_weights() -> None:
    def share(query: Tensor, key: Tensor) -> Tensor:
        return query.square().sum((-2, -1)) / (query.square().sum((-2, -1)) + key.square().sum((-2, -1)))

    given = {index: weights(10 * index) for index in range(3)}
    snapshot = read({index: WeightObservation(*sides) for index, sides in given.items()}, [Metric("query_share", "qk_weights", share)])
    for index, (query, key, _) in given.items():
        np.testing.assert_allclose(snapshot.heads("query_share")[index], share(query, key), rtol=1e-6)


def test_cost_does_not_grow_with_depth_and_nothing_is_decomposed_or_widened() -> None:
    counts = []
    for depth in (2, 2, 24):  # what torch sets up once comes first
        window = Window(select(BOTH))
        observations = [(attention_key(index), WeightObservation(*weights(index))) for index in range(depth)]
        with Dispatched() as dispatched:
            window.weights(observations)
            window.launch(0, sites_of(attentions=depth, heads=2), {})
        counts.append(len(dispatched.names))
        assert torch.float64 not in dispatched.dtypes
        assert not [name for name in dispatched.names if any(word in name for word in ("svd", "eig", "qr", "cholesky"))]
    assert counts[1] == counts[2] <= 260


def test_weights_are_left_alone() -> None:
    given = weights()
    copies = [side.clone() for side in given]
    read({0: WeightObservation(*given)}, BOTH)
    assert all(torch.equal(side, copy) for side, copy in zip(given, copies, strict=True))
