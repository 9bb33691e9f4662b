"""What a sampled step costs, in operations and bytes: exact numbers, so they are pinned."""

from __future__ import annotations

import pytest
import torch

from collapse_monitor.measure import Pending, PooledFeatures, Window
from collapse_monitor.metrics import DEFAULT_METRICS
from collapse_monitor.observation import AttentionObservation, TokenSample
from tests.measure.windows import Dispatched, attention_key, block_key, normal, see_chain, sites_of

PER_ATTENTION = 40  # the bar; branch and gradients included
DECOMPOSITIONS = ("eig", "svd", "qr", "cholesky", "lstsq", "solve", "inv")


def launch_blocks(
    depth: int, window: Window | None = None, dtype: torch.dtype = torch.float32, masked: bool = False
) -> tuple[Dispatched, Pending]:
    """Blocks with everything the catalogue reads of them, and parameters with gradients."""
    window = window or Window(DEFAULT_METRICS)
    mask = torch.arange(12) < torch.tensor([[12], [8]]) if masked else None
    see_chain(window, [TokenSample(normal(2, 12, 16, seed=seed).to(dtype), mask) for seed in range(depth + 1)])
    gradients = {block_key(index): [torch.ones(4, dtype=dtype)] * 5 for index in range(depth)}
    with Dispatched() as dispatched:
        window.parameters(gradients, {})
        pending = window.launch(0, sites_of(depth), {})
    return dispatched, pending


def observation(masked: str = "") -> AttentionObservation:
    logits = normal(3, 4, 8, 16).float()
    if not masked:
        return AttentionObservation(logits.softmax(-1), None, logits, same_rows=1)
    visible = torch.arange(16) <= 2 * torch.arange(8)[:, None]
    visible = visible[None, None] if masked == "causal" else visible.expand(3, 4, 8, 16).clone()
    return AttentionObservation(logits.masked_fill(~visible, -torch.inf).softmax(-1), visible, logits, same_rows=1)


def test_operations_for_blocks_do_not_grow_with_depth() -> None:
    for masked in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            launch_blocks(2, dtype=dtype, masked=masked)  # what torch sets up once, at the first call
            shallow, deep = (launch_blocks(depth, dtype=dtype, masked=masked)[0].names for depth in (4, 24))
            assert shallow == deep


def test_operations_with_pooled_features_do_not_grow_with_depth() -> None:
    counts = []
    for depth in (4, 24):
        history = PooledFeatures(capacity=4, fewest=2)
        for _ in range(3):
            dispatched, _ = launch_blocks(depth, Window(DEFAULT_METRICS, history))
        counts.append(dispatched.names)
    assert counts[0] == counts[1]


def test_number_of_operations_for_blocks() -> None:
    """For all block metrics of the catalogue, whatever the depth; older releases of torch dispatch some functions in more parts."""
    assert len(launch_blocks(12)[0].names) <= 170
    assert len(launch_blocks(12, masked=True)[0].names) <= 220


@pytest.mark.parametrize(("masked", "most"), [("", 20), ("causal", 26), ("per head", 26)])
def test_operations_for_an_attention(masked: str, most: int) -> None:
    """Of all that belongs to one attention site, once the site before it is there to compare with."""
    window = Window(DEFAULT_METRICS)
    window.attention(attention_key(0), observation(masked))
    seen, hidden = observation(masked), normal(2, 12, 16).float()
    with Dispatched() as dispatched:
        window.attention(attention_key(1), seen)
        window.branch(attention_key(1), hidden, hidden)
        window.qv_gradient(attention_key(1), "q", hidden)
        window.qv_gradient(attention_key(1), "v", hidden)
    assert len(dispatched.names) <= most <= PER_ATTENTION, dispatched.names


def test_attention_sites_add_no_operations_at_the_end() -> None:
    counts = []
    for number in (5, 12):
        window = Window(DEFAULT_METRICS)
        for index in range(number):
            window.attention(attention_key(index), observation("per head"))
        with Dispatched() as dispatched:
            window.launch(0, sites_of(attentions=number), {})
        counts.append(len(dispatched.names))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_decomposition_and_no_fp64_on_the_device(dtype: torch.dtype) -> None:
    history = PooledFeatures(fewest=2)
    dispatched, _ = launch_blocks(4, Window(DEFAULT_METRICS, history), dtype, masked=True)
    window, observations = Window(DEFAULT_METRICS), [observation("per head") for _ in range(2)]
    with Dispatched() as of_rows:
        for index, seen in enumerate(observations):
            window.attention(attention_key(index), seen)
        window.launch(0, sites_of(attentions=2), {})
    for mode in (dispatched, of_rows):
        assert torch.float64 not in mode.dtypes
        assert not [name for name in mode.names if any(part in name for part in DECOMPOSITIONS)]


def test_nothing_waits_for_the_device() -> None:
    """No operation that would copy a number to the host before the step is over, and one buffer that is copied after it."""
    dispatched, pending = launch_blocks(4, masked=True)
    assert not [
        name for name in dispatched.names if name.startswith(("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"))
    ]
    assert pending.copies == 1


def test_bytes() -> None:
    """Per sequence the packed Gram matrix, a few numbers per token, and some per sequence."""
    _, small = launch_blocks(1)
    _, large = launch_blocks(11)
    per_block = (large.bytes - small.bytes) / 10
    gram, per_token = 12 * 13 / 2, 12 * 6
    assert 2 * 4 * gram < per_block < 2 * 4 * (gram + per_token + 20)


def test_large_stacks_are_evaluated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = launch_blocks(5)[1].snapshot()
    monkeypatch.setattr("collapse_monitor.measure.stack.LARGEST_STACK", 2 * 2 * 12 * 16)
    parts = launch_blocks(5)[1].snapshot()
    for name in whole.blocks:
        assert parts.series(name) == pytest.approx(whole.series(name), nan_ok=True), name
