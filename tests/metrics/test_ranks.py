"""Ranks: closed forms, the chain of inequalities, invariances, and a noise floor that cuts rounding and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from collapse_monitor import metrics
from collapse_monitor.metrics.ranks import noise_floor

RANKS = ["effective_rank", "stable_rank", "participation_ratio"]
ALL_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator(seed), dtype=torch.float64)).Q


def with_spectrum(sigma: list[float], tokens: int, dim: int, seed: int = 0) -> Tensor:
    left, right = orthogonal(tokens, seed), orthogonal(dim, seed + 1)
    return left[:, : len(sigma)] @ torch.diag(torch.tensor(sigma, dtype=torch.float64)) @ right[: len(sigma)]


matrices = st.builds(
    lambda tokens, dim, seed, residual: (
        torch.randn(1, dim, generator=generator(seed), dtype=torch.float64)
        + residual * torch.randn(tokens, dim, generator=generator(seed + 1), dtype=torch.float64)
    ),
    tokens=st.integers(2, 12),
    dim=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    residual=st.sampled_from([0.0, 1e-8, 1e-3, 0.1, 1.0, 100.0]),
)


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize(("tokens", "dim"), [(8, 24), (24, 8), (8, 8)])
def test_equal_singular_values_count_as_one_each(name: str, rank: int, tokens: int, dim: int) -> None:
    value = getattr(metrics, name)(with_spectrum([2.5] * rank, tokens, dim))
    assert value.item() == pytest.approx(rank, rel=1e-12)


def test_values_of_a_known_spectrum() -> None:
    hidden = with_spectrum([4.0, 2.0, 1.0, 1.0], 6, 9)
    entropy = -sum(p * math.log(p) for p in (0.5, 0.25, 0.125, 0.125))
    assert metrics.effective_rank(hidden).item() == pytest.approx(math.exp(entropy), rel=1e-12)
    assert metrics.stable_rank(hidden).item() == pytest.approx(22 / 16, rel=1e-12)
    assert metrics.participation_ratio(hidden).item() == pytest.approx(22**2 / (256 + 16 + 1 + 1), rel=1e-12)


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_identical_tokens_have_rank_one_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    token = torch.randn(1, 64, generator=generator(0)).to(dtype)
    assert getattr(metrics, name)(token.expand(32, 64)).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_noise_is_no_rank(name: str, dtype: torch.dtype) -> None:
    """Multiples of one token, rounded: rank 1 with the noise of the dtype on top. Without a floor float32 alone would read more than 1."""
    generate = generator(1)
    direction = torch.randn(1, 64, generator=generate, dtype=torch.float64)
    hidden = (1 + torch.rand(48, 1, generator=generate, dtype=torch.float64)) * direction
    assert torch.linalg.matrix_rank(hidden.to(dtype).double(), rtol=1e-15) > 1
    assert getattr(metrics, name)(hidden.to(dtype)).item() == pytest.approx(1, abs=2e-3)


def test_the_floor_is_the_norm_of_rounding_noise() -> None:
    exact = torch.randn(8, 64, 128, generator=generator(2), dtype=torch.float64)
    noise = torch.linalg.matrix_norm(exact - exact.bfloat16().double(), 2)
    floor = noise_floor(torch.linalg.matrix_norm(exact), torch.full((8,), 64.0, dtype=torch.float64), 128, torch.bfloat16)
    # Values are spread over a binade, so the error is below half a unit of its upper end: between half the floor and the floor.
    assert ((noise / floor > 0.5) & (noise / floor < 1)).all()


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_real_rank_in_bf16_is_not_cut(mean: float) -> None:
    sigma = [0.85**i for i in range(32)]
    exact = with_spectrum(sigma, 32, 64) * 40 + mean
    rounded = metrics.effective_rank(exact.bfloat16()).item()
    assert rounded == pytest.approx(metrics.effective_rank(exact).item(), rel=5e-3)
    cut = torch.linalg.svdvals(exact.bfloat16().double())
    cut = cut[cut > torch.finfo(torch.bfloat16).eps * cut[0]]  # the usual tolerance loses real directions here
    assert len(cut) < 32


@settings(max_examples=60, deadline=None)
@given(hidden=matrices)
def test_chain_of_ranks(hidden: Tensor) -> None:
    assume(hidden.abs().max() > 0)
    stable, participation, effective = (
        getattr(metrics, name)(hidden).item() for name in ("stable_rank", "participation_ratio", "effective_rank")
    )
    slack = 1 + 1e-9
    assert stable * slack >= 1
    assert stable <= participation * slack
    assert participation <= effective * slack
    assert effective <= int(torch.linalg.matrix_rank(hidden, rtol=1e-16)) * slack
    assert int(torch.linalg.matrix_rank(hidden, rtol=1e-16)) <= min(hidden.shape)


@settings(max_examples=40, deadline=None)
@given(hidden=matrices, seed=st.integers(0, 10_000), exponent=st.integers(-150, 150))
def test_ranks_do_not_see_rotation_or_scale(hidden: Tensor, seed: int, exponent: int) -> None:
    turned = orthogonal(hidden.shape[0], seed) @ hidden @ orthogonal(hidden.shape[1], seed + 1)
    for name in RANKS:
        value = getattr(metrics, name)(hidden).item()
        assert getattr(metrics, name)(turned).item() == pytest.approx(value, rel=1e-6)
        assert getattr(metrics, name)(hidden * 10.0**exponent).item() == pytest.approx(value, rel=1e-6)


def test_pooled_rank_is_centred() -> None:
    spread = with_spectrum([3.0, 3.0, 3.0], 16, 8)
    spread = spread - spread.mean(0)
    offset = 1000 * torch.ones(8, dtype=torch.float64)
    assert metrics.pooled_rank(spread + offset).item() == pytest.approx(metrics.pooled_rank(spread).item(), rel=1e-8)
    assert metrics.pooled_rank(torch.eye(9, dtype=torch.float64)).item() == pytest.approx(8, rel=1e-9)  # one direction is the mean's


def test_pooled_rank_of_independent_samples() -> None:
    """2048 samples of width 64: 63.75 is the published value for independent normal features."""
    features = torch.randn(2048, 64, generator=generator(3), dtype=torch.float64)
    assert metrics.pooled_rank(features).item() == pytest.approx(63.75, abs=0.05)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_pooled_rank_of_equal_samples_is_one(dtype: torch.dtype) -> None:
    assert metrics.pooled_rank(torch.full((64, 32), 0.1).to(dtype)).item() == pytest.approx(1)
    noisy = (0.1 * (1 + 2**-30 * torch.randn(64, 32, generator=generator(4), dtype=torch.float64))).float()
    assert metrics.pooled_rank(noisy).item() == pytest.approx(1, abs=0.01)


@pytest.mark.usefixtures("unchecked_shapes")
def test_pooled_rank_wants_one_matrix() -> None:
    with pytest.raises(ValueError, match=r"features has shape \[2, 3, 4\]; expected \[sample, dim\]: pass one row per sample"):
        metrics.pooled_rank(torch.zeros(2, 3, 4))
