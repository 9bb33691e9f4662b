"""What a block did to its tokens: closed forms and undefined cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from collapse_monitor import metrics


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("factor", [0.0, 1e-6, 0.5, 1.0])
def test_contraction_of_centred_tokens_shrunk_towards_their_mean(factor: float) -> None:
    """Tokens 1 + r with orthogonal mean and residual: the share is a / sqrt(1 + a^2) with a the ratio of the two norms."""
    common, noise = torch.zeros(2, 6, 4, dtype=torch.float64), normal(2, 6, 4)
    common[..., 0] = 1
    noise[..., 0] = 0
    noise = noise - noise.mean(1, keepdim=True)
    ratio = noise.norm(dim=(1, 2)) / common.norm(dim=(1, 2))

    def share(a: Tensor) -> Tensor:
        return a / (1 + a * a).sqrt()

    measured = metrics.contraction(common + noise, common + factor * noise)
    torch.testing.assert_close(measured, share(factor * ratio) / share(ratio), rtol=1e-9, atol=1e-15)


def test_contraction_without_anything_left_to_contract() -> None:
    assert metrics.contraction(torch.ones(4, 3), torch.eye(4, 3)).isnan()
    assert metrics.contraction(torch.eye(4, 3), torch.ones(4, 3)).item() == 0
    assert metrics.contraction(torch.zeros(4, 3), torch.eye(4, 3)).isnan()
    assert metrics.contraction(torch.eye(4), torch.eye(2, 3)).item() == pytest.approx((1 / 2) ** 0.5 / (3 / 4) ** 0.5)


@pytest.mark.parametrize("angle", [1e-9, 1e-4, 0.3, 1.5, 3.0])
def test_block_influence_is_one_minus_the_cosine_of_the_turn(angle: float) -> None:
    angles = torch.tensor(angle, dtype=torch.float64)
    turn = torch.stack([torch.stack([angles.cos(), -angles.sin()]), torch.stack([angles.sin(), angles.cos()])])
    hidden = normal(3, 5, 2)
    expected = 2 * (angles / 2).sin() ** 2  # 1 - cos without cancellation
    torch.testing.assert_close(metrics.block_influence(hidden, 7 * hidden @ turn), expected.expand(3), rtol=1e-6, atol=0)


def test_block_influence_of_a_bypass_an_inversion_and_a_dead_token() -> None:
    hidden = normal(5, 4)
    assert metrics.block_influence(hidden, 3 * hidden).item() == pytest.approx(0, abs=1e-15)
    assert metrics.block_influence(hidden, -hidden).item() == pytest.approx(2)
    output = -hidden.clone()
    output[2] = 0
    assert metrics.block_influence(hidden, output).item() == pytest.approx(2)  # the zero token has no direction
    assert metrics.block_influence(hidden, torch.zeros_like(hidden)).isnan()


def test_block_influence_is_undefined_between_different_token_sets() -> None:
    """Patch merging halves the tokens: nothing corresponds any more, and that is no error."""
    mask = torch.ones(2, 4, dtype=torch.bool)
    for before in (normal(2, 8, 3), normal(2, 4, 6)):
        value = metrics.block_influence(before, normal(2, 4, 3), mask)
        assert value.shape == (2,)
        assert value.isnan().all()


def test_branch_ratio() -> None:
    stream = normal(2, 5, 4)
    assert metrics.branch_ratio(0.25 * stream, stream).item() == pytest.approx(0.25)
    assert metrics.branch_ratio(torch.zeros(3), torch.ones(3)).item() == 0  # a gate at zero: bypassed, not undefined
    for branch, other in [
        (torch.ones(3), torch.zeros(3)),
        (torch.tensor([torch.nan]), torch.ones(1)),
        (torch.ones(1), torch.tensor([torch.inf])),
    ]:
        assert metrics.branch_ratio(branch, other).isnan()
    assert metrics.branch_ratio(torch.zeros(0), torch.zeros(0)).isnan()
    assert metrics.branch_ratio(torch.full((9,), 6e4).half(), torch.full((9,), 3e4).half()).item() == pytest.approx(
        2
    )  # no overflow in float16


@pytest.mark.usefixtures("unchecked_shapes")
def test_batches_must_be_the_same_sequences() -> None:
    for metric in (metrics.contraction, metrics.block_influence):
        with pytest.raises(
            ValueError, match=r"input has shape \[2, 4, 3\], output \[3, 4, 3\]; the batch axes .* pass the same sequences of both"
        ):
            metric(torch.zeros(2, 4, 3), torch.zeros(3, 4, 3))
    with pytest.raises(ValueError, match=r"mask has shape \[2, 4\], but input has shape \[2, 8, 3\]; expected \[2, 8\]"):
        metrics.contraction(torch.zeros(2, 8, 3), torch.zeros(2, 4, 3), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"input has dtype torch.int64"):
        metrics.block_influence(torch.zeros(2, 4, 3).long(), torch.zeros(2, 4, 3))
