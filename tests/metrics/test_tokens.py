"""Token metrics: closed forms, published values and identities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collapse_monitor import metrics
from collapse_monitor.metrics import find_outliers
from collapse_monitor.metrics.tokens import fingerprint


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthogonal(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(size, size, seed=seed)).Q


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_identical_tokens_read_collapse_exactly(dtype: torch.dtype) -> None:
    hidden = normal(1, 48, dtype=dtype).expand(7, 48)
    assert metrics.token_similarity(hidden).item() == 1
    assert metrics.relative_residual(hidden).item() == 0
    assert metrics.composite_residual(hidden).item() == 0
    assert metrics.residual_norm(hidden).item() == 0
    assert metrics.dead_tokens(hidden).item() == 1


@pytest.mark.parametrize("n", [2, 3, 8, 50])
def test_orthogonal_tokens(n: int) -> None:
    hidden = 3 * torch.eye(n, n + 2, dtype=torch.float64)
    assert metrics.token_similarity(hidden).item() == pytest.approx(0, abs=1e-15)
    assert metrics.relative_residual(hidden).item() == pytest.approx(math.sqrt(1 - 1 / n))
    assert metrics.composite_residual(hidden).item() == pytest.approx(2 * (1 - 1 / n))  # 1.75 at 8: not bounded by 1
    assert metrics.residual_norm(hidden).item() == pytest.approx(3 * math.sqrt(1 - 1 / n))
    assert metrics.dead_tokens(hidden).item() == 0


def test_opposite_tokens_read_the_smallest_similarity() -> None:
    simplex = torch.eye(5, dtype=torch.float64) - 1 / 5
    assert metrics.token_similarity(simplex).item() == pytest.approx(-1 / 4)
    assert metrics.relative_residual(simplex).item() == pytest.approx(1)


def test_independent_tokens() -> None:
    hidden = normal(4, 256, 512)
    assert metrics.token_similarity(hidden).abs().max() < 2e-3
    torch.testing.assert_close(
        metrics.relative_residual(hidden), torch.full((4,), math.sqrt(1 - 1 / 256), dtype=torch.float64), rtol=1e-3, atol=0
    )


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(2, 20), dim=st.integers(1, 20), seed=st.integers(0, 10_000), residual=st.sampled_from([1e-8, 1e-4, 0.1, 1.0, 10.0])
)
def test_similarity_and_residual_of_equal_norm_tokens(tokens: int, dim: int, seed: int, residual: float) -> None:
    """relative_residual^2 = (1 - cos)(n - 1)/n, exactly; at 1e-8 it holds because both keep their digits."""
    hidden = torch.nn.functional.normalize(normal(1, dim, seed=seed) + residual * normal(tokens, dim, seed=seed + 1), dim=-1)
    similarity, share = metrics.token_similarity(hidden).item(), metrics.relative_residual(hidden).item()
    assert share**2 == pytest.approx((1 - similarity) * (tokens - 1) / tokens, rel=1e-9, abs=3e-16)
    assert -1 / (tokens - 1) - 1e-12 <= similarity <= 1


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), exponent=st.integers(-150, 150))
def test_invariances(seed: int, exponent: int) -> None:
    hidden = normal(1, 6, seed=seed) + normal(9, 6, seed=seed + 1)
    turned, scaled = hidden @ orthogonal(6, seed + 2), hidden * 10.0**exponent
    for name in ("token_similarity", "relative_residual", "outlier_tokens", "dead_tokens"):
        value = getattr(metrics, name)(hidden).item()
        assert getattr(metrics, name)(turned).item() == pytest.approx(value, rel=1e-9, abs=1e-12)
        assert getattr(metrics, name)(scaled).item() == pytest.approx(value, rel=1e-9, abs=1e-12)
    for name in ("composite_residual", "massive_activation"):
        assert getattr(metrics, name)(scaled).item() == pytest.approx(getattr(metrics, name)(hidden).item(), rel=1e-9)
    assert metrics.residual_norm(turned).item() == pytest.approx(metrics.residual_norm(hidden).item(), rel=1e-9)
    assert metrics.residual_norm(scaled).item() == pytest.approx(metrics.residual_norm(hidden).item() * 10.0**exponent, rel=1e-9)


def test_similarity_ignores_the_length_of_each_token() -> None:
    hidden, lengths = normal(9, 6) + 1, 10.0 ** torch.arange(-160.0, 200.0, 40.0, dtype=torch.float64)[:, None]
    assert metrics.token_similarity(hidden * lengths).item() == pytest.approx(metrics.token_similarity(hidden).item(), rel=1e-12)


def test_zero_tokens_are_left_out_of_the_similarity() -> None:
    hidden = normal(6, 4)
    padded = torch.cat([hidden, torch.zeros(3, 4, dtype=torch.float64)])
    assert metrics.token_similarity(padded).item() == pytest.approx(metrics.token_similarity(hidden).item(), rel=1e-12)
    assert metrics.token_similarity(torch.eye(3)[:, :1] * 5).isnan()  # one token left


def test_massive_activation() -> None:
    hidden = torch.full((6, 5), -0.2)
    hidden[2, 3] = 2000.0  # the case of the paper: about 2000 against .2
    assert metrics.massive_activation(hidden).item() == pytest.approx(1e4, rel=1e-6)
    assert metrics.massive_activation(torch.tensor([[1.0, 2.0], [-3.0, 5.0]])).item() == pytest.approx(5 / 2.5)
    assert metrics.massive_activation(torch.eye(4)).isnan()  # most values are zero: nothing to compare with


def test_nonfinite_counts_values() -> None:
    hidden = torch.ones(2, 4, 5)
    hidden[0, 1, 2], hidden[0, 3, 0], hidden[1, 0] = torch.nan, -torch.inf, torch.inf
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    torch.testing.assert_close(metrics.nonfinite(hidden, mask), torch.tensor([1 / 15, 5 / 20]))
    assert metrics.nonfinite(torch.tensor([[torch.nan, 0.0]])).item() == 0.5  # one token is enough
    assert metrics.nonfinite(torch.zeros(3, 2)).item() == 0
    assert metrics.nonfinite(hidden, torch.zeros(2, 4, dtype=torch.bool)).isnan().all()


def test_dead_tokens() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    zero, nearly_a = torch.zeros(2), torch.tensor([1.0, 2.0 + 2**-22])
    assert metrics.dead_tokens(torch.stack([a, b, a, a, zero])).item() == pytest.approx(4 / 5)
    assert metrics.dead_tokens(torch.stack([a, nearly_a, b])).item() == 0
    assert metrics.dead_tokens(torch.stack([zero, -zero, a])).item() == pytest.approx(2 / 3)
    assert metrics.dead_tokens(torch.tensor([[0.0, 1.0], [-0.0, 1.0]])).item() == 1  # a signed zero is no difference
    assert metrics.dead_tokens(torch.zeros(3, 2)).item() == 1
    mask = torch.tensor([True, True, False, True])
    assert metrics.dead_tokens(torch.stack([a, b, a, zero]), mask).item() == pytest.approx(1 / 3)  # a masked twin is no twin


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.lists(st.integers(-1, 1), min_size=3, max_size=3), min_size=2, max_size=12),
    scale=st.sampled_from([1.0, 0.1, 1e-40, 3e38]),
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dead_tokens_finds_every_twin(values: list[list[int]], scale: float, dtype: torch.dtype) -> None:
    expected = sum(values.count(token) > 1 or not any(token) for token in values) / len(values)
    hidden = (torch.tensor(values, dtype=torch.float64) * scale).to(dtype)
    assert metrics.dead_tokens(hidden).item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_fingerprints_of_small_integers_do_not_collide(dtype: torch.dtype) -> None:
    """Twins are looked for among neighbours of equal fingerprint: tokens that differ must not stand between them."""
    tokens = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0], dtype=dtype)] * 6)
    assert len(fingerprint(tokens).unique()) == 5**6


def test_outliers() -> None:
    hidden = normal(2, 8, 16)
    hidden[0, 3] *= 100
    hidden[1, 5], hidden[1, 6] = 1e9, torch.nan
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:7] = False
    torch.testing.assert_close(metrics.outlier_tokens(hidden, mask), torch.tensor([1 / 8, 0], dtype=torch.float64))
    assert find_outliers(hidden, mask).nonzero().tolist() == [[0, 3]]
    assert not find_outliers(hidden)[1].any()  # a sequence with NaN has no known outliers
    assert metrics.outlier_tokens(torch.zeros(4, 2)).item() == 0
    assert find_outliers(torch.zeros(2, 0, 3)).shape == (2, 0)


def test_one_massive_token_hides_the_others() -> None:
    """127 healthy tokens and one of norm 100 x: stable rank 1.0, about 70 without it."""
    hidden = normal(128, 768)
    hidden[0] *= 100
    assert metrics.stable_rank(hidden).item() < 1.03
    assert metrics.stable_rank(hidden, ~find_outliers(hidden)).item() == pytest.approx(127 / (1 + math.sqrt(127 / 768)) ** 2, rel=0.05)
