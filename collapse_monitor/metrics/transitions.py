"""What one block did to its tokens: how much closer it drew them, and how far it moved them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from collapse_monitor.metrics.inputs import check_float, divide, frobenius_norm, full_precision, read_tokens, report
from collapse_monitor.metrics.tokens import directions, residual_share


@full_precision
def contraction(
    input: Float[Tensor, "*batch token_in dim_in"],
    output: Float[Tensor, "*batch token dim"],
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch"]:
    r"""Factor by which a block shrinks the relative residual: `relative_residual(output) / relative_residual(input)`.

    Range 0 to inf, dimensionless; below 1 the block draws tokens together, 0 is collapse. nan where either residual is, and where the
    input has none left to shrink. Without a mask the two may differ in tokens and width. Cost O(n d).
    Source: Dong et al. 2021, arXiv 2103.03404.

    Raises:
        TypeError: a tensor is not floating or `mask` not boolean.
        ValueError: the batches differ, or the mask does not fit both.

    >>> contraction(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[3.0, 3.0], [4.0, 4.0]]))
    tensor(0.2000)
    """
    before, after = read_tokens(input, mask, "input"), read_tokens(output, mask, "output")
    _check_batches(input, output)
    left = residual_share(before)
    return report(divide(residual_share(after), left), before.readable & after.readable & (left > 0), input, output)


@full_precision
def block_influence(
    input: Float[Tensor, "*batch token_in dim_in"],
    output: Float[Tensor, "*batch token dim"],
    mask: Bool[Tensor, "*batch token"] | None = None,
) -> Float[Tensor, "*batch"]:
    r"""How far a block turns its tokens: mean over tokens of $1 - \cos(x_i, y_i)$, computed as $\|\hat x_i - \hat y_i\|^2 / 2$.

    Range 0 to 2, dimensionless; 0 is collapse: the block is bypassed. Tokens that are zero on either side are left out; nan if none is
    left, where the token sets or widths differ, for fewer than two valid tokens, NaN or Inf. Cost O(n d).
    Source: Men et al. 2024 (ShortGPT), arXiv 2403.03853.

    Raises:
        TypeError: a tensor is not floating or `mask` not boolean.
        ValueError: the batches differ, or the mask does not fit.

    >>> block_influence(torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    tensor(0.5000)
    """
    after = read_tokens(output, mask, "output")
    check_float(input, "input")
    _check_batches(input, output)
    if input.shape != output.shape:
        return report(torch.zeros_like(after.scale), torch.zeros_like(after.finite), input, output)
    before = read_tokens(input, mask, "input")
    (x, x_nonzero), (y, y_nonzero) = directions(before.rows), directions(after.rows)
    compared = x_nonzero & y_nonzero
    turned = torch.where(compared, (x - y).square().sum(-1) / 2, 0).sum(-1) / compared.sum(-1).clamp(min=1)
    return report(turned, before.readable & after.readable & compared.any(-1), input, output)


@full_precision
def branch_ratio(branch: Float[Tensor, " ..."], stream: Float[Tensor, " ..."]) -> Float[Tensor, ""]:
    r"""Norm of what attention adds over the norm of the stream it is added to: $\|f(x)\|_F / \|x\|_F$.

    Range 0 to inf, dimensionless; 0 is collapse: attention is bypassed. Take the operands of the addition itself, after LayerScale, gate
    and dropout. nan for a zero or empty stream, NaN or Inf; 0 for a zero branch. Falls with depth even in healthy Pre-LN models.
    Cost O(n d). Source: Sun et al. 2025, arXiv 2502.05795.

    Raises:
        TypeError: a tensor is not floating.

    >>> branch_ratio(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 50.0]))
    tensor(0.1000)
    """
    numerator, denominator = frobenius_norm(branch, "branch"), frobenius_norm(stream, "stream")
    return report(divide(numerator, denominator), numerator.isfinite() & (denominator > 0) & denominator.isfinite(), branch, stream)


def _check_batches(input: Tensor, output: Tensor) -> None:
    if input.shape[:-2] != output.shape[:-2]:
        raise ValueError(
            f"input has shape {list(input.shape)}, output {list(output.shape)}; the batch axes before [token, dim] must be equal: "
            "pass the same sequences of both"
        )
