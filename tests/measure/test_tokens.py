"""Readings of blocks equal the public metrics and an independent fp64 reference."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from collapse_monitor import metrics
from collapse_monitor.observation import BlockObservation, TokenSample
from tests.measure.windows import OF_TOKENS, block_readings, normal, same, snapshot_of
from tests.metrics import reference

ALL_TOKENS = ("massive_activation", "nonfinite", "dead_tokens", "outlier_tokens")  # outliers enter these
RESIDUALS = [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6]


def tokens(residual: float, tokens: int, dim: int, seed: int = 0) -> Tensor:
    """Two sequences of one vector plus `residual` times independent values; these alone at residual 1."""
    noise = normal(2, tokens, dim, seed=seed)
    return noise if residual == 1 else normal(2, 1, dim, seed=seed + 1) + residual * noise


def by_public_functions(hidden: Tensor, mask: Tensor | None) -> dict[str, float]:
    """Outliers deleted, the public function of every sequence, mean over sequences."""
    valid = torch.ones(hidden.shape[:-1], dtype=torch.bool) if mask is None else mask
    counted = valid & ~metrics.find_outliers(hidden, mask)
    values = {metric.name: metric.compute(hidden, valid if metric.name in ALL_TOKENS else counted) for metric in OF_TOKENS}
    return {name: float(value.double().nanmean()) for name, value in values.items()}


def assert_equal(hidden: Tensor, mask: Tensor | None = None, rel: float = 1e-5) -> None:
    got, expected = block_readings(hidden, mask), by_public_functions(hidden, mask)
    wrong = [name for name in expected if not same(got[name], expected[name], rel, 1e-7)]
    assert not wrong, {name: (got[name], expected[name]) for name in wrong}


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("shape", [(24, 40), (16, 16), (40, 12)], ids=str)
def test_reference(shape: tuple[int, int], residual: float) -> None:
    """The bar is 1e-4; fp32 on the device leaves less than 2e-6."""
    hidden = tokens(residual, *shape).float()
    got = block_readings(hidden)
    xs = [sequence.double().numpy() for sequence in hidden]
    eps = torch.finfo(torch.float32).eps
    for name in ("effective_rank", "stable_rank", "participation_ratio"):
        assert same(got[name], np.mean([getattr(reference, name)(x, eps) for x in xs]), 2e-6)
    for name in ("relative_residual", "composite_residual", "residual_norm", "massive_activation"):
        assert same(got[name], np.mean([getattr(reference, name)(x) for x in xs]), 2e-6)
    assert same(got["token_similarity"], np.mean([1 - reference.token_dissimilarity(x) for x in xs]), 2e-6, 1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("residual", [1.0, 1e-2, 1e-6])
def test_dtypes(dtype: torch.dtype, residual: float) -> None:
    """fp64 tokens keep what they are beyond fp32: the first token is subtracted before they are rounded."""
    assert_equal(tokens(residual, 24, 20).to(dtype))
    assert_equal(tokens(residual, 20, 24).to(dtype))


def test_fp64_tokens_below_the_resolution_of_fp32() -> None:
    assert_equal(tokens(1e-11, 12, 20))


@pytest.mark.parametrize("factor", [1e-30, 1e-12, 1e12, 1e30])
def test_scale(factor: float) -> None:
    """Squares of these values leave the range of fp32."""
    assert_equal((tokens(1e-3, 12, 20) * factor).float())


@pytest.mark.parametrize("dim", [40, 8])
def test_mask_is_deletion(dim: int) -> None:
    hidden, mask = tokens(0.3, 20, dim).float(), torch.arange(20) < torch.tensor([[13], [20]])
    hidden[~mask] = torch.nan
    assert_equal(hidden, mask)
    alone = block_readings(hidden[:1, :13])
    assert same(block_readings(hidden[:1], mask[:1])["effective_rank"], alone["effective_rank"], 1e-6)


def test_padding_anywhere() -> None:
    mask = normal(2, 20, seed=5) > 0
    assert_equal(tokens(0.3, 20, 30).float().masked_fill(~mask[..., None], torch.inf), mask)


def test_a_massive_first_token_is_left_out() -> None:
    """With it, healthy tokens read stable rank 1.0."""
    hidden = tokens(1.0, 24, 40).float()
    healthy = block_readings(hidden[:, 1:])
    hidden[:, 0] *= 1000
    got = block_readings(hidden)
    assert float(metrics.stable_rank(hidden).mean()) < 1.01
    for name in ("stable_rank", "effective_rank", "relative_residual", "token_similarity"):
        assert same(got[name], healthy[name], 1e-5)
    assert same(got["outlier_tokens"], 1 / 24, 1e-6)
    assert got["massive_activation"] > 1000
    assert_equal(hidden)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("shape", [(24, 40), (40, 12)], ids=str)
def test_exact_rank(shape: tuple[int, int], rank: int) -> None:
    """The rounding noise of the fp32 product is not read as rank: a spectrum of equal values reads the number of them."""
    left, right = (torch.linalg.qr(normal(2, size, rank, seed=size)).Q for size in shape)
    got = block_readings((left @ right.mT).float())
    assert same(got["effective_rank"], rank, 5e-3)
    assert same(got["stable_rank"], rank, 1e-5)
    assert same(got["participation_ratio"], rank, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_identical_tokens(dtype: torch.dtype) -> None:
    got = block_readings(normal(2, 1, 20).to(dtype).expand(2, 12, 20).contiguous())
    assert got["effective_rank"] == got["stable_rank"] == got["participation_ratio"] == 1
    assert got["relative_residual"] == got["composite_residual"] == got["residual_norm"] == 0
    assert got["dead_tokens"] == 1
    assert same(got["token_similarity"], 1, 1e-7)


def test_dead_tokens() -> None:
    hidden = tokens(1.0, 12, 20).bfloat16()
    hidden[0, 3] = 0
    hidden[0, 4] *= 0
    hidden[0, 7] = hidden[0, 9]
    hidden[1, 2, :10] = 0
    hidden[1, 5] = hidden[1, 2]
    hidden[1, 5, :10] *= -1  # negative zeros are zeros
    hidden[1, 8] = hidden[1, 6].flip(-1)  # the same values at other places are no twin
    assert_equal(hidden)
    assert same(block_readings(hidden)["dead_tokens"], 6 / 24, 1e-6)


def test_tokens_that_differ_in_one_bit_are_no_twins() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        hidden = torch.ones(1, 65, 64, dtype=dtype)
        hidden[0, range(64), range(64)] += torch.finfo(dtype).eps
        assert block_readings(hidden)["dead_tokens"] == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite(value: float) -> None:
    """The sequence that holds it cannot be read, the other one can."""
    hidden = tokens(0.3, 12, 20).float()
    hidden[0, 2, 5] = hidden[0, 3, :2] = value
    got, healthy = block_readings(hidden), block_readings(hidden[1:])
    assert same(got["nonfinite"], 3 / (2 * 12 * 20), 1e-6)
    for name in set(healthy) - {"nonfinite"}:
        assert same(got[name], healthy[name], 1e-6), name
    assert_equal(hidden)
    broken = block_readings(hidden[:1])
    assert all(math.isnan(reading) for name, reading in broken.items() if name != "nonfinite")


@pytest.mark.parametrize(
    "hidden",
    [torch.zeros(2, 4, 8), torch.ones(2, 1, 8), torch.full((2, 4, 8), torch.nan), torch.ones(2, 4, 1), torch.eye(4)[None]],
    ids=["zero", "one token", "nan", "one channel", "orthogonal"],
)
def test_degenerate(hidden: Tensor) -> None:
    assert_equal(hidden)
    assert_equal(hidden, torch.zeros(hidden.shape[:2], dtype=torch.bool))


@pytest.mark.parametrize("masked", [False, True])
def test_the_median_of_large_samples_is_an_estimate(masked: bool) -> None:
    hidden = tokens(1.0, 64, 96).float()
    mask = torch.arange(64) < torch.tensor([[64], [23]]) if masked else None
    estimate, exact = block_readings(hidden, mask)["massive_activation"], by_public_functions(hidden, mask)["massive_activation"]
    assert same(estimate, exact, 0.05)


def test_transitions() -> None:
    before, after = tokens(1.0, 12, 20).float(), (tokens(1.0, 12, 20) + 1e-3 * tokens(1.0, 12, 20, seed=7)).bfloat16()
    mask = torch.arange(12) < torch.tensor([[12], [9]])
    before[0, 3] = 0
    after[1, 2] *= 100
    blocks = [BlockObservation(TokenSample(after, mask), TokenSample(before, mask))]
    snapshot = snapshot_of(blocks=blocks)
    counted = mask & ~metrics.find_outliers(after, mask) & ~metrics.find_outliers(before, mask)
    assert same(snapshot.series("block_influence")[0], float(metrics.block_influence(before, after, counted).mean()), 1e-5)
    outlier_free = [metrics.relative_residual(side, mask & ~metrics.find_outliers(side, mask)) for side in (after, before)]
    assert same(snapshot.series("contraction")[0], float((outlier_free[0] / outlier_free[1]).mean()), 1e-5)


def test_contraction_over_another_number_of_tokens() -> None:
    before, after = tokens(0.3, 12, 20).float(), tokens(0.1, 6, 40).float()
    snapshot = snapshot_of(blocks=[BlockObservation(TokenSample(after), TokenSample(before))])
    assert same(snapshot.series("contraction")[0], float(metrics.contraction(before, after).mean()), 1e-5)
    assert math.isnan(snapshot.series("block_influence")[0])
    assert snapshot.missing["block_influence"] == "the input of the block was not seen, or has other tokens than its output"


def test_blocks_of_mixed_shapes_and_dtypes() -> None:
    """Each gets its own stack; values and order stay."""
    shapes = [(12, 20, torch.float32), (6, 40, torch.float32), (12, 20, torch.bfloat16), (12, 20, torch.float32)]
    samples = [TokenSample(tokens(0.3, length, dim, seed).to(dtype)) for seed, (length, dim, dtype) in enumerate(shapes)]
    snapshot = snapshot_of(blocks=[BlockObservation(after, before) for before, after in pairwise(samples)])
    for name in ("effective_rank", "relative_residual", "token_similarity"):
        expected = [float(getattr(metrics, name)(sample.hidden).mean()) for sample in samples[1:]]
        assert all(same(*pair, 1e-5) for pair in zip(snapshot.series(name), expected, strict=True))
    assert snapshot.attainable_rank == (6, 12, 12)
    assert snapshot.tokens == (6, 12, 12)
    assert [math.isnan(value) for value in snapshot.series("block_influence")] == [True, True, False]


def test_tokens_and_attainable_rank_count_what_was_read() -> None:
    hidden, mask = tokens(1.0, 12, 8).float(), torch.arange(12) < torch.tensor([[12], [5]])
    hidden[0, 0] *= 1000
    snapshot = snapshot_of(blocks=[BlockObservation(TokenSample(hidden, mask))])
    assert snapshot.tokens == ((11 + 5) / 2,)
    assert snapshot.attainable_rank == (round((8 + 5) / 2),)
