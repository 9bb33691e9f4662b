"""Attention metrics: closed forms, known laws of random logits, and a table of synthetic maps that each metric must tell apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from collapse_monitor import metrics

N = 64
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def causal_softmax(logits: Tensor) -> Tensor:
    return logits.masked_fill(~CAUSAL, -torch.inf).softmax(-1)


def uniform_rows(visible: Tensor) -> Tensor:
    return visible.double() / visible.sum(-1, keepdim=True)


def test_uniform_attention() -> None:
    weights = uniform_rows(torch.ones(2, 3, 16, 16))
    ones = torch.ones(2, 3, dtype=torch.float64)
    torch.testing.assert_close(metrics.attention_uniformity(weights), ones)
    torch.testing.assert_close(metrics.effective_keys(weights), 16 * ones)
    torch.testing.assert_close(metrics.dominant_column(weights), ones / 16)
    torch.testing.assert_close(metrics.sink_mass(weights), ones / 16)
    torch.testing.assert_close(metrics.dobrushin(weights), 0 * ones)
    torch.testing.assert_close(metrics.head_similarity(weights), ones)
    torch.testing.assert_close(metrics.layer_similarity(weights, weights), ones)
    torch.testing.assert_close(metrics.input_dependence(weights), 0 * ones[0])


def test_one_hot_attention() -> None:
    """Head h of sequence b attends to the key h + b places further: all maps differ everywhere."""
    weights = torch.stack([torch.stack([torch.eye(16).roll(h + 3 * b, -1) for h in range(3)]) for b in range(4)])
    ones = torch.ones(4, 3)
    torch.testing.assert_close(metrics.attention_uniformity(weights), 0 * ones)
    torch.testing.assert_close(metrics.effective_keys(weights), ones)
    torch.testing.assert_close(metrics.dominant_column(weights), ones / 16)
    torch.testing.assert_close(metrics.dobrushin(weights), ones)
    torch.testing.assert_close(metrics.head_similarity(weights), 0 * ones)
    torch.testing.assert_close(metrics.layer_similarity(weights, weights.roll(1, 1)), 0 * ones)
    torch.testing.assert_close(metrics.input_dependence(weights), ones[0])


def test_single_column() -> None:
    weights = torch.zeros(1, 8, 8)
    weights[..., 5] = 1
    assert metrics.dominant_column(weights).item() == 1
    assert metrics.dobrushin(weights).item() == 0
    assert metrics.sink_mass(weights).item() == 0  # the sixth key is no first key


def test_causal_uniform_attention() -> None:
    weights = uniform_rows(CAUSAL)[None]
    harmonic = sum(1 / i for i in range(1, N + 1))
    assert metrics.attention_uniformity(weights, CAUSAL).item() == pytest.approx(1)
    assert metrics.attention_uniformity(weights).item() < 0.8  # without its mask it looks sharp
    assert metrics.effective_keys(weights, CAUSAL).item() == pytest.approx((N + 1) / 2)
    assert metrics.sink_mass(weights, CAUSAL).item() == pytest.approx(harmonic / N)
    assert metrics.sink_mass(weights, CAUSAL).item() == pytest.approx(0.07412, abs=5e-6)  # published
    assert metrics.dobrushin(weights).item() == pytest.approx(1 - 1 / N)
    assert metrics.dobrushin(weights, CAUSAL).item() == pytest.approx(1 / 2)  # of the rows that see half of the keys


def test_sink_looks_at_the_rows_that_see_the_key() -> None:
    to_first = torch.zeros(1, N, N)
    to_first[..., 0] = 1
    assert metrics.sink_mass(to_first, CAUSAL).item() == 1
    to_third = torch.eye(N)[None].clone()
    to_third[:, 3:] = 0
    to_third[:, 3:, 2] = 1
    assert metrics.sink_mass(to_third, CAUSAL).item() == pytest.approx(1)  # rows 3..64 see it and all attend to it
    assert metrics.dominant_column(to_third, CAUSAL).item() == pytest.approx((N - 2) / N)


def test_left_padding_does_not_hide_the_sink() -> None:
    weights = torch.full((1, 1, 6, 12), torch.nan)
    visible = torch.zeros(1, 1, 6, 12, dtype=torch.bool)
    visible[..., 6:] = True
    weights[..., 6:] = 0.04
    weights[..., 6] = 0.8
    assert metrics.sink_mass(weights, visible).item() == pytest.approx(0.8)


@pytest.mark.parametrize(("tokens", "spread"), [(256, 0.25), (256, 0.5), (256, 1.0), (512, 1.0)])
def test_entropy_of_normal_logits(tokens: int, spread: float) -> None:
    """log n - s^2/2 within .02 nats and n sum p^2 = exp(s^2) within 5 % for deviations up to 1."""
    weights = (spread * normal(8, tokens, tokens)).softmax(-1)
    entropy = metrics.attention_uniformity(weights) * math.log(tokens)
    assert (entropy - (math.log(tokens) - spread**2 / 2)).abs().max() < 0.02
    inverse = weights.square().sum(-1).mean() * tokens
    assert inverse.item() == pytest.approx(math.exp(spread**2), rel=0.05)
    assert metrics.effective_keys(weights).mean().item() == pytest.approx(tokens / math.exp(spread**2), rel=0.08)


@pytest.mark.parametrize(("factor", "share"), [(2, 1 / 2), (3, 2 / 3)])
def test_condensation_of_sharp_logits(factor: float, share: float) -> None:
    """Beyond s_c = sqrt(2 log n) few keys hold the mass: sum p^2 tends to 1 - s_c / s."""
    tokens = 512
    weights = (factor * math.sqrt(2 * math.log(tokens)) * normal(4, tokens, tokens, seed=1)).softmax(-1)
    assert weights.square().sum(-1).mean().item() == pytest.approx(share, abs=0.08)
    assert 1 < metrics.effective_keys(weights).mean().item() < 1 / (share - 0.15) ** 2


def synthetic_maps() -> dict[str, Tensor]:
    """Causal maps [8 sequences, 4 heads, 64, 64] of one fault each."""
    logits = 2 * normal(8, 4, N, N)
    sink = normal(8, 4, N, N, seed=1)
    sink[..., 0] += 9
    return {
        "healthy": causal_softmax(logits),
        "uniform": causal_softmax(0 * logits),
        "one_hot": causal_softmax(50 * logits),
        "sink": causal_softmax(sink),
        "identical_heads": causal_softmax(logits[:, :1].expand_as(logits)),
        "input_independent": causal_softmax(logits[:1].expand_as(logits)),
        "diagonal": torch.eye(N, dtype=torch.float64).expand(8, 4, N, N),
    }


@pytest.mark.parametrize(
    ("fault", "uniformity", "sink", "heads", "dependence"),
    [  # published table of the synthetic maps; dependence in nats over 8 sequences
        ("healthy", 0.62, 0, 0.27, 0.99),
        ("uniform", 1.00, 0, 1.00, 0.0),
        ("one_hot", 0.02, 0, 0.08, 1.9),
        ("sink", 0.06, 1, 1.00, 0.02),
        ("identical_heads", 0.62, 0, 1.00, 0.99),
        ("input_independent", 0.62, 0, 0.28, 0.0),
        ("diagonal", 0.00, 0, 1.00, 0.0),
    ],
)
def test_table_of_faults(fault: str, uniformity: float, sink: int, heads: float, dependence: float) -> None:
    weights = synthetic_maps()[fault]
    assert metrics.attention_uniformity(weights, CAUSAL).mean().item() == pytest.approx(uniformity, abs=0.04)
    assert (metrics.sink_mass(weights, CAUSAL) > 0.3).double().mean().item() == sink
    assert metrics.head_similarity(weights, CAUSAL).mean().item() == pytest.approx(heads, abs=0.03)
    assert metrics.input_dependence(weights, CAUSAL).mean().item() * math.log(8) == pytest.approx(dependence, abs=0.12)


def test_dobrushin_bounds_what_mixing_leaves() -> None:
    """osc(P x) <= delta(P) osc(x), and delta(P Q) <= delta(P) delta(Q)."""
    first, second = (3 * normal(50, 12, 12, seed=2)).softmax(-1), (3 * normal(50, 12, 12, seed=3)).softmax(-1)
    values = normal(50, 12, 1, seed=4)

    def spread(x: Tensor) -> Tensor:
        return (x.amax(-2) - x.amin(-2)).squeeze(-1)

    delta = metrics.dobrushin(first)
    assert (spread(first @ values) <= delta * spread(values) + 1e-12).all()
    assert (metrics.dobrushin(first @ second) <= delta * metrics.dobrushin(second) + 1e-12).all()


def test_head_similarity_of_one_head_is_undefined() -> None:
    assert metrics.head_similarity(torch.eye(4)[None]).isnan().all()


def test_a_head_that_sees_nothing_is_left_out() -> None:
    weights = torch.stack([torch.eye(4), torch.eye(4), torch.eye(4).flip(0)])
    visible = torch.ones(3, 4, 4, dtype=torch.bool)
    visible[2] = False
    torch.testing.assert_close(metrics.head_similarity(weights, visible), torch.tensor([1.0, 1.0, torch.nan]), equal_nan=True)


@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (2, 3, 4, 5), (2, 4, 5, 5), (3, 5, 5)])
def test_layer_similarity_of_other_shapes_is_undefined(shape: tuple[int, ...]) -> None:
    value = metrics.layer_similarity(torch.ones(2, 3, 5, 5), torch.ones(shape), torch.ones(5, 5, dtype=torch.bool))
    assert value.shape == (2, 3)
    assert value.isnan().all()


def test_layer_similarity_without_a_common_row_is_undefined() -> None:
    weights, previous = torch.zeros(2, 1, 2, 3)
    weights[0, 0], previous[0, 1] = 1 / 3, 1 / 3
    assert metrics.layer_similarity(weights, previous).isnan().all()


def test_input_dependence_compares_only_rows_with_equal_keys() -> None:
    weights = torch.stack([torch.eye(4), torch.eye(4).flip(0)])[:, None]
    visible = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    visible[0, 0, 0, 3] = False  # row 0 cannot be compared, the others still differ fully
    assert metrics.input_dependence(weights, visible).item() == pytest.approx(1)
    weights[1, 0, 1:] = weights[0, 0, 1:]  # now all comparable rows are equal
    assert metrics.input_dependence(weights, visible).item() == pytest.approx(0, abs=1e-7)
    visible[0, :, :, 3] = False
    assert metrics.input_dependence(weights, visible).isnan().all()
    assert metrics.input_dependence(weights[:1]).isnan().all()


def test_rows_after_dropout_keep_every_range() -> None:
    """Kept weights are scaled up by dropout; taken at face value uniform rows would read above 1."""
    keep = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) > 0.2
    weights = torch.full((2, 3, 32, 32), 1 / 32) * keep / 0.8
    raw = -(weights * weights.clamp(min=1e-30).log()).sum(-1) / math.log(32)
    assert raw.max() > 1
    uniformity = metrics.attention_uniformity(weights)
    expected = keep.sum(-1).double().log().mean(-1) / math.log(32)  # each row is uniform over the keys it kept
    torch.testing.assert_close(uniformity.double(), expected, rtol=1e-6, atol=0)
    for name in ("attention_uniformity", "dominant_column", "sink_mass", "dobrushin", "head_similarity"):
        assert ((getattr(metrics, name)(weights) >= 0) & (getattr(metrics, name)(weights) <= 1)).all()


def test_rows_are_read_up_to_a_factor() -> None:
    weights = (2 * normal(2, 3, 8, 9)).softmax(-1)
    factors = torch.rand(2, 3, 8, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    for name in (
        "attention_uniformity",
        "effective_keys",
        "dominant_column",
        "sink_mass",
        "dobrushin",
        "head_similarity",
        "input_dependence",
    ):
        torch.testing.assert_close(getattr(metrics, name)(factors * weights), getattr(metrics, name)(weights))


def test_rows_that_see_nothing_do_not_look_uniform() -> None:
    """Written-out attention leaves exactly uniform rows where everything is masked; they are padding, not attention."""
    weights = torch.eye(6)[None].clone()
    weights[:, 3:] = 1 / 6
    visible = torch.ones(1, 6, 6, dtype=torch.bool)
    visible[:, 3:] = False
    assert metrics.attention_uniformity(weights, visible).item() == 0
    assert metrics.effective_keys(weights, visible).item() == 1


def test_negative_weights_are_no_distribution() -> None:
    weights = torch.full((2, 4, 4), 0.25)
    weights[1, 0] = torch.tensor([-0.5, 0.5, 0.5, 0.5])
    torch.testing.assert_close(metrics.attention_uniformity(weights), torch.tensor([1.0, torch.nan]), equal_nan=True)


def test_masks_broadcast() -> None:
    weights = normal(2, 3, 4, 5).softmax(-1)
    keys = torch.tensor([True, True, True, False, True])
    full = metrics.attention_uniformity(weights, keys.expand(2, 3, 4, 5))
    for mask in (keys, keys[None], keys[None, None, None], keys.expand(4, 5), keys.expand(3, 1, 5)):
        torch.testing.assert_close(metrics.attention_uniformity(weights, mask), full)


@pytest.mark.usefixtures("unchecked_shapes")
def test_input_dependence_wants_a_batch() -> None:
    with pytest.raises(ValueError, match=r"weights has shape \[3, 4, 4\]; expected \[batch, head, query, key\]"):
        metrics.input_dependence(torch.ones(3, 4, 4))
