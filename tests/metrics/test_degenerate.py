"""What holds for every metric: masks delete, undefined is nan, nothing raises, every dtype works."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from collapse_monitor import metrics
from tests.metrics.samples import ROWS, SHARES, TOKENS, TRANSITIONS, arguments, hidden_states, maps

each_token_metric = pytest.mark.parametrize("metric", TOKENS, ids=lambda metric: metric.name)
each_transition = pytest.mark.parametrize("metric", TRANSITIONS, ids=lambda metric: metric.name)
each_row_metric = pytest.mark.parametrize("metric", ROWS, ids=lambda metric: metric.name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
each_bad_value = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])


def tensors(result: Tensor, expected: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(result, expected, equal_nan=True, **(tolerance or {"rtol": 1e-9, "atol": 1e-12}))


# --- masks


@each_token_metric
@settings(max_examples=15, deadline=None)
@given(valid=st.lists(st.booleans(), min_size=9, max_size=9), rubbish=st.sampled_from([torch.nan, torch.inf, -1e300, 0.0]))
def test_a_token_mask_equals_deletion(metric: metrics.Metric, valid: list[bool], rubbish: float) -> None:
    mask, hidden = torch.tensor(valid), hidden_states(9, 5)
    hidden[2] = hidden[7]  # so that dead tokens can be hidden by the mask
    expected = metric.compute(hidden[mask])
    tensors(metric.compute(torch.where(mask[:, None], hidden, rubbish), mask), expected)


@each_transition
@settings(max_examples=15, deadline=None)
@given(valid=st.lists(st.booleans(), min_size=9, max_size=9), rubbish=st.sampled_from([torch.nan, torch.inf, -1e300, 0.0]))
def test_a_transition_mask_equals_deletion(metric: metrics.Metric, valid: list[bool], rubbish: float) -> None:
    mask, before, after = torch.tensor(valid), hidden_states(9, 5), hidden_states(9, 5, seed=5)
    expected = metric.compute(before[mask], after[mask])
    soiled = [torch.where(mask[:, None], each, rubbish) for each in (before, after)]
    tensors(metric.compute(*soiled, mask), expected)


@each_row_metric
@settings(max_examples=15, deadline=None)
@given(
    queries=st.lists(st.booleans(), min_size=6, max_size=6),
    keys=st.lists(st.booleans(), min_size=8, max_size=8),
    rubbish=st.sampled_from([torch.nan, torch.inf, -1.0, 0.5]),
)
def test_an_attention_mask_equals_deletion(metric: metrics.Metric, queries: list[bool], keys: list[bool], rubbish: float) -> None:
    query, key, weights = torch.tensor(queries), torch.tensor(keys), maps(2, 3, 6, 8)
    visible = query[:, None] & key
    tensors(metric.compute(torch.where(visible, weights, rubbish), visible), metric.compute(weights[..., query, :][..., key]))


@pytest.mark.parametrize("name", ["layer_similarity", "input_dependence"])
def test_masks_of_pairs_and_batches_equal_deletion(name: str) -> None:
    query, key = torch.tensor([True, False, True, True, False, True]), torch.tensor([False, True, True, True, True, False, True, True])
    visible = query[:, None] & key
    given_maps = [maps(2, 3, 6, 8, seed=seed) for seed in range(2 if name == "layer_similarity" else 1)]
    metric = getattr(metrics, name)
    expected = metric(*(each[..., query, :][..., key] for each in given_maps))
    tensors(metric(*(torch.where(visible, each, torch.nan) for each in given_maps), mask=visible), expected)


# --- undefined


@each_token_metric
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 5, 3), (0, 0, 3)], ids=str)
def test_an_empty_batch_gives_an_empty_answer(metric: metrics.Metric, shape: tuple[int, ...]) -> None:
    assert metric.compute(torch.zeros(shape)).shape == shape[:-2]


@each_token_metric
@pytest.mark.parametrize("tokens", [0, 1])
def test_too_few_tokens_are_undefined(metric: metrics.Metric, tokens: int) -> None:
    hidden = torch.ones(2, 6, 4)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[:, 2 : 2 + tokens] = True
    for value in (metric.compute(hidden, mask), metric.compute(hidden[:, :tokens])):
        assert value.shape == (2,)
        if metric.name == "nonfinite" and tokens:
            assert value.tolist() == [0, 0]  # one token is enough to hold a NaN
        else:
            assert value.isnan().all()


@each_token_metric
@each_dtype
def test_a_zero_matrix_is_undefined_but_its_shares_are_not(metric: metrics.Metric, dtype: torch.dtype) -> None:
    value = metric.compute(torch.zeros(2, 4, 3, dtype=dtype))
    if metric.name in SHARES:
        assert value.tolist() == [float(metric.name == "dead_tokens")] * 2
    else:
        assert value.isnan().all()


@each_token_metric
@each_dtype
@each_bad_value
def test_a_bad_valid_value_spoils_its_sequence_and_no_other(metric: metrics.Metric, dtype: torch.dtype, bad: float) -> None:
    hidden = hidden_states(3, 6, 5).to(dtype)
    clean = metric.compute(hidden)
    hidden[1, 4, 2] = bad
    value = metric.compute(hidden)
    tensors(value[[0, 2]], clean[[0, 2]])
    assert value[1].item() == pytest.approx(1 / 30) if metric.name == "nonfinite" else value[1].isnan()


@each_transition
@each_bad_value
@pytest.mark.parametrize("side", [0, 1])
def test_a_bad_value_on_either_side_of_a_block_is_undefined(metric: metrics.Metric, bad: float, side: int) -> None:
    pair = [hidden_states(3, 6, 5), hidden_states(3, 6, 5, seed=5)]
    pair[side][1, 4, 2] = bad
    assert metric.compute(*pair).isnan().tolist() == [False, True, False]


@each_row_metric
@each_dtype
@each_bad_value
def test_a_bad_visible_value_spoils_its_head(metric: metrics.Metric, dtype: torch.dtype, bad: float) -> None:
    weights = maps(2, 3, 4, 5).to(dtype)
    weights[1, 2, 3, 0] = bad
    spoiled = torch.zeros(2, 3, dtype=torch.bool)
    spoiled[1, :] = metric.name == "head_similarity"  # a head is compared with all others
    spoiled[1, 2] = True
    assert torch.equal(metric.compute(weights).isnan(), spoiled)


@each_bad_value
def test_a_bad_value_spoils_comparisons_of_maps(bad: float) -> None:
    weights, other = maps(2, 3, 4, 5), maps(2, 3, 4, 5, seed=1)
    weights[1, 2, 3, 0] = bad
    assert metrics.layer_similarity(weights, other).isnan().nonzero().tolist() == [[1, 2]]
    assert metrics.layer_similarity(other, weights).isnan().nonzero().tolist() == [[1, 2]]
    assert metrics.input_dependence(weights).isnan().tolist() == [False, False, True]


@each_row_metric
@pytest.mark.parametrize("shape", [(2, 3, 0, 5), (2, 3, 5, 0), (2, 3, 4, 1), (2, 3, 0, 0)], ids=str)
def test_rows_without_a_choice_are_undefined(metric: metrics.Metric, shape: tuple[int, ...]) -> None:
    for weights, mask in [(torch.ones(shape), None), (torch.ones(2, 3, 4, 5), torch.eye(4, 5, dtype=torch.bool))]:
        value = metric.compute(weights, mask)
        assert value.shape == (2, 3)
        assert value.isnan().all()
    assert metric.compute(torch.ones(0, 3, 4, 5)).shape == (0, 3)
    assert metric.compute(torch.ones(2, 0, 4, 5)).shape == (2, 0)


@pytest.mark.parametrize("shape", [(2, 3, 0, 5), (2, 3, 5, 0), (2, 3, 4, 1)], ids=str)
def test_comparisons_of_rows_without_a_choice_are_undefined(shape: tuple[int, ...]) -> None:
    assert metrics.layer_similarity(torch.ones(shape), torch.ones(shape)).isnan().all()
    assert metrics.input_dependence(torch.ones(shape)).isnan().all()
    assert metrics.input_dependence(torch.ones(0, 3, 4, 5)).isnan().all()


@pytest.mark.parametrize("features", [torch.zeros(0, 4), torch.ones(1, 4), torch.zeros(5, 4), torch.full((5, 4), torch.nan)], ids=str)
def test_pooled_rank_is_undefined_without_samples(features: Tensor) -> None:
    assert metrics.pooled_rank(features).isnan()


# --- dtypes and scales


@each_token_metric
@each_dtype
def test_token_metrics_promote(metric: metrics.Metric, dtype: torch.dtype) -> None:
    """A narrow dtype is read exactly as its values in float64; only the noise floor of the ranks knows where they come from."""
    hidden = hidden_states(2, 8, 16).to(dtype)
    value = metric.compute(hidden)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(value.double(), metric.compute(hidden.double()), rtol=1e-6, atol=1e-7)


@each_row_metric
@each_dtype
def test_row_metrics_promote(metric: metrics.Metric, dtype: torch.dtype) -> None:
    weights = maps(2, 3, 4, 5).to(dtype)
    value = metric.compute(weights)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(value.double(), metric.compute(weights.double()), rtol=1e-6, atol=1e-7)


@each_token_metric
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1e38), (torch.float32, 1e-37), (torch.float64, 1e300), (torch.float64, 1e-300), (torch.float16, 1e4)],
)
def test_the_ends_of_a_dtype_neither_overflow_nor_vanish(metric: metrics.Metric, dtype: torch.dtype, scale: float) -> None:
    hidden = (hidden_states(8, 6) / 3).to(dtype)
    value, scaled = metric.compute(hidden).item(), metric.compute((hidden * scale).to(dtype)).item()
    assert scaled == pytest.approx(value * (scale if metric.name == "residual_norm" else 1), rel=2e-3)


@pytest.mark.parametrize(
    "metric", [m for m in metrics.DEFAULT_METRICS if m.reads not in ("parameter_gradients",)], ids=lambda metric: metric.name
)
def test_autocast_changes_nothing(metric: metrics.Metric) -> None:
    given_tensors = arguments(metric)
    expected = metric.compute(*given_tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = metric.compute(*given_tensors)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(value, expected)


@pytest.mark.parametrize("metric", metrics.DEFAULT_METRICS, ids=lambda metric: metric.name)
def test_metrics_are_pure(metric: metrics.Metric) -> None:
    """Arguments stay as they are, the global generator too, and a second call gives the same bits."""
    given_tensors = arguments(metric)
    copies = [tensor.clone() for tensor in given_tensors]
    state = torch.get_rng_state()
    call = (lambda: metric.compute(given_tensors)) if metric.reads == "parameter_gradients" else (lambda: metric.compute(*given_tensors))
    assert torch.equal(call(), call())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given_tensors, copies, strict=True))


@pytest.mark.parametrize("metric", metrics.DEFAULT_METRICS, ids=lambda metric: metric.name)
def test_values_lie_in_the_declared_range(metric: metrics.Metric) -> None:
    low, high = metric.range
    for seed in range(5):
        given_tensors = arguments(metric, seed)
        value = metric.compute(given_tensors) if metric.reads == "parameter_gradients" else metric.compute(*given_tensors)
        assert ((value >= low - 1e-6) & (value <= high + 1e-6)).all()
