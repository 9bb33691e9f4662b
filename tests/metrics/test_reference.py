"""Agreement with the slow reference to 1e-4 relative, from independent tokens down to residuals of 1e-6."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from collapse_monitor import metrics
from tests.metrics import reference

RESIDUALS = [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6]
SHAPES = [(20, 12), (12, 20)]


def tokens_with_residual(residual: float, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Three sequences of one common vector plus `residual` times independent values (only these at residual 1)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    common = torch.randn(3, 1, shape[1], generator=generator, dtype=torch.float64)
    return (noise if residual == 1 else common + residual * noise).to(dtype)


def ragged_mask(hidden: Tensor) -> Tensor:
    """All tokens valid in the first sequence, a tail or a head padded in the others."""
    position = torch.arange(hidden.shape[1])
    return torch.stack([position >= 0, position < hidden.shape[1] - 3, position >= 2])


def agrees(measured: Tensor, expected: list[float]) -> None:
    """1e-4 relative is the bar of the package; float64 inside does much better than that."""
    torch.testing.assert_close(measured.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("residual", RESIDUALS)
def test_token_metrics(residual: float, shape: tuple[int, int], dtype: torch.dtype) -> None:
    hidden = tokens_with_residual(residual, shape, dtype)
    mask = ragged_mask(hidden)
    kept = [sequence[rows].double().numpy() for sequence, rows in zip(hidden, mask, strict=True)]
    eps = torch.finfo(dtype).eps
    for name in ("effective_rank", "stable_rank", "participation_ratio"):
        agrees(getattr(metrics, name)(hidden, mask), [getattr(reference, name)(x, eps) for x in kept])
    for name in ("relative_residual", "composite_residual", "residual_norm", "massive_activation", "dead_tokens", "outlier_tokens"):
        agrees(getattr(metrics, name)(hidden, mask), [getattr(reference, name)(x) for x in kept])
    agrees(metrics.token_similarity(hidden, mask), [1 - reference.token_dissimilarity(x) for x in kept])
    agrees(metrics.pooled_rank(hidden[0]), reference.pooled_rank(kept[0], eps))


@pytest.mark.parametrize("residual", RESIDUALS)
def test_one_minus_the_similarity_keeps_its_digits(residual: float) -> None:
    """1 - cos is 1e-12 at a residual of 1e-6, below what float32 can show; float64 tokens show it."""
    hidden = tokens_with_residual(residual, (20, 12), torch.float64)
    expected = torch.tensor([reference.token_dissimilarity(x.numpy()) for x in hidden], dtype=torch.float64)
    torch.testing.assert_close(1 - metrics.token_similarity(hidden), expected, rtol=5e-4, atol=0)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_transition_metrics(residual: float) -> None:
    before, after = (tokens_with_residual(residual, (20, 12), torch.float32, seed) for seed in (1, 2))
    after = before + residual * after  # so the turn of a token is as small as its residual
    mask = ragged_mask(before)
    pairs = [(x[rows].double().numpy(), y[rows].double().numpy()) for x, y, rows in zip(before, after, mask, strict=True)]
    agrees(metrics.contraction(before, after, mask), [reference.contraction(x, y) for x, y in pairs])
    agrees(metrics.block_influence(before, after, mask), [reference.block_influence(x, y) for x, y in pairs])


def visible_keys(kind: str) -> Tensor:
    """Masks [batch, head, query, key] of three sequences and two heads over 9 queries and 12 keys."""
    mask = torch.ones(3, 2, 9, 12, dtype=torch.bool)
    query, key = torch.arange(9)[:, None], torch.arange(12)
    if kind == "causal":
        mask &= key <= query + 3
    elif kind == "first rows see one key or none":
        mask &= key < query
    elif kind == "padded":
        mask[0, :, :, :3] = False
        mask[1, :, :, 9:] = False
        mask[1, :, 7:] = False
    elif kind == "window":
        mask &= (key - query).abs() <= 4
    return mask


def as_rows(values: Tensor, visible: Tensor) -> list[list[list[reference.Row]]]:
    return [
        [
            [{int(key): float(row[key]) for key in seen.nonzero()} for row, seen in zip(head, head_seen, strict=True)]
            for head, head_seen in zip(sequence, sequence_seen, strict=True)
        ]
        for sequence, sequence_seen in zip(values, visible, strict=True)
    ]


def softmax_rows(spread: float, visible: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(visible.shape, generator=generator, dtype=torch.float64)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights.masked_fill(~visible, torch.nan).to(dtype)  # whatever stands at an invisible key must not matter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [1e-6, 1e-3, 0.3, 2.0, 20.0])
@pytest.mark.parametrize("kind", ["all", "causal", "first rows see one key or none", "padded", "window"])
def test_attention_metrics(kind: str, spread: float, dtype: torch.dtype) -> None:
    visible = visible_keys(kind)
    weights, previous = (softmax_rows(spread, visible, dtype, seed) for seed in (3, 4))
    rows, rows_before = as_rows(weights, visible), as_rows(previous, visible)
    for name in ("attention_uniformity", "effective_keys", "dominant_column", "sink_mass", "dobrushin"):
        agrees(getattr(metrics, name)(weights, visible), [[getattr(reference, name)(head) for head in maps] for maps in rows])
    agrees(metrics.head_similarity(weights, visible), [[reference.head_similarity(maps, h) for h in range(2)] for maps in rows])
    expected = [[reference.layer_similarity(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(rows, rows_before, strict=True)]
    agrees(metrics.layer_similarity(weights, previous, visible), expected)


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 0.3, 2.0, 20.0])
@pytest.mark.parametrize("kind", ["all", "causal", "first rows see one key or none", "window"])
def test_input_dependence(kind: str, spread: float) -> None:
    visible = visible_keys(kind)
    weights = softmax_rows(spread, visible, torch.float64, seed=5)
    rows = as_rows(weights, visible)
    if spread < 1e-5 and np.finfo(np.longdouble).eps > 1e-18:
        pytest.skip("the reference cancels digits: with 53 bits it cannot follow to 1e-6")
    expected = [reference.input_dependence([maps[h] for maps in rows]) for h in range(2)]
    torch.testing.assert_close(metrics.input_dependence(weights, visible), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=0)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("kind", ["all", "causal", "first rows see one key or none", "padded", "window"])
def test_logit_metrics(kind: str, scale: float) -> None:
    visible = visible_keys(kind)
    logits = scale * torch.randn(visible.shape, generator=torch.Generator().manual_seed(6)) + 7
    rows = as_rows(logits, visible)
    logits = logits.masked_fill(~visible, torch.inf)
    for name in ("max_logit", "logit_std"):
        agrees(getattr(metrics, name)(logits, visible), [[getattr(reference, name)(head) for head in maps] for maps in rows])
