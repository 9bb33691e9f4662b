"""Projections against dense decompositions."""

from __future__ import annotations

import math

import pytest
import torch
from einops import einsum
from torch import Tensor

from collapse_monitor import metrics


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_norm(query: Tensor, key: Tensor) -> Tensor:
    product = einsum(query, key, "... h row, ... h column -> ... row column")
    return torch.linalg.matrix_norm(product, 2) / math.sqrt(query.shape[-2])


@pytest.mark.parametrize("shape", [(12, 16, 64), (2, 3, 8, 24), (4, 1, 10), (3, 20, 6), (5, 7)])
@pytest.mark.parametrize("seed", range(3))
def test_qk_spectral_norm_against_dense_svd(shape: tuple[int, ...], seed: int) -> None:
    query, key = normal(*shape, seed=seed), normal(*shape[:-1], shape[-1] + 3, seed=seed + 10)
    torch.testing.assert_close(metrics.qk_spectral_norm(query, key), dense_norm(query, key), rtol=1e-8, atol=0)
    measured = metrics.qk_spectral_norm(query.bfloat16(), key.bfloat16())
    torch.testing.assert_close(measured.double(), dense_norm(query.bfloat16().double(), key.bfloat16().double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-8, 1e-6, 1e-4, 1e-2, 0.5])
def test_close_singular_values(gap: float) -> None:
    """Power iteration is slow where the two largest values are close; there it does not matter which one it finds."""
    left, right = (torch.linalg.qr(normal(40, 8, seed=seed)).Q.T for seed in (0, 1))
    sigma = torch.tensor([1.0, 1 - gap, 0.3, 0.2, 0.1, 0.05, 0.01, 0.0], dtype=torch.float64)
    assert metrics.qk_spectral_norm(sigma[:, None] * left, right).item() == pytest.approx(1 / math.sqrt(8), rel=2e-6)


def test_strong_directions_that_do_not_meet() -> None:
    """The largest direction of W_Q meets the smallest of W_K: their product is far below the product of their norms."""
    ladder = 10.0 ** torch.arange(0.0, -8.0, -1.0, dtype=torch.float64)
    left, right = (torch.linalg.qr(normal(40, 8, seed=seed)).Q.T for seed in (0, 1))
    query, key = ladder[:, None] * left, (ladder.flip(0) * torch.linspace(1, 2, 8, dtype=torch.float64))[:, None] * right
    torch.testing.assert_close(metrics.qk_spectral_norm(query, key), dense_norm(query, key), rtol=1e-5, atol=0)


def test_qk_spectral_norm_bounds_the_logits_of_unit_tokens() -> None:
    query, key = normal(3, 8, 24), normal(3, 8, 24, seed=1)
    tokens = torch.nn.functional.normalize(normal(500, 24, seed=2), dim=-1)
    logits = (tokens @ query.mT) @ (tokens @ key.mT).mT / math.sqrt(8)
    assert (logits.abs().amax((-2, -1)) <= metrics.qk_spectral_norm(query, key)).all()


def test_scale_and_degenerate_weights() -> None:
    query, key = normal(3, 4, 9), normal(3, 4, 9, seed=1)
    value = metrics.qk_spectral_norm(query, key)
    torch.testing.assert_close(metrics.qk_spectral_norm(1e150 * query, 1e-120 * key), 1e30 * value)
    assert metrics.qk_spectral_norm(0 * query, key).tolist() == [0, 0, 0]
    query[1, 2, 3] = torch.nan
    assert metrics.qk_spectral_norm(query, key).isnan().tolist() == [False, True, False]
    assert metrics.qk_spectral_norm(torch.zeros(0, 4, 9), torch.zeros(0, 4, 9)).shape == (0,)


def test_unused_head_dimensions_do_not_hide_the_others() -> None:
    query, key = normal(3, 4, 9), normal(3, 4, 9, seed=1)
    query[:, 0], key[:, 0], key[:, 1] = 0, 0, 1e-200
    torch.testing.assert_close(metrics.qk_spectral_norm(query, key), dense_norm(query, key), rtol=1e-8, atol=0)


def test_gradient_of_the_spectral_norm() -> None:
    query, key = normal(2, 3, 5).requires_grad_(), normal(2, 3, 5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(metrics.qk_spectral_norm, (query, key))


@pytest.mark.parametrize("shape", [(6, 4, 16), (2, 3, 16, 4), (5, 7)])
def test_value_condition_against_dense_svd(shape: tuple[int, ...]) -> None:
    weight = normal(*shape)
    sigma = torch.linalg.svd(weight, full_matrices=False).S
    torch.testing.assert_close(metrics.value_condition(weight), sigma[..., 0] / sigma[..., -1])
    torch.testing.assert_close(metrics.value_condition(1e-200 * weight), sigma[..., 0] / sigma[..., -1])


def test_value_condition_of_singular_weights() -> None:
    assert metrics.value_condition(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])).item() == torch.inf
    assert metrics.value_condition(torch.zeros(2, 3)).isnan()
    assert metrics.value_condition(torch.tensor([[torch.inf, 1.0]])).isnan()
    assert metrics.value_condition(torch.linalg.qr(normal(9, 4)).Q.T).item() == pytest.approx(1)


@pytest.mark.usefixtures("unchecked_shapes")
def test_weights_of_other_shapes_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"query_weight has shape \[12, 16, 64\], key_weight \[4, 16, 64\].*repeat the key's for grouped queries"
    ):
        metrics.qk_spectral_norm(torch.zeros(12, 16, 64), torch.zeros(4, 16, 64))
    with pytest.raises(ValueError, match=r"value_weight has shape \[64\]; expected \[\*head, head_dim, dim\]"):
        metrics.value_condition(torch.zeros(64))
    with pytest.raises(TypeError, match=r"key_weight has dtype torch.int8; expected a floating dtype"):
        metrics.qk_spectral_norm(torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.int8))
