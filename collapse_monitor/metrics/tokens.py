"""What became of the tokens of one sequence: are they alike, small, dead or dominated by a few values.

Raw functions: every valid token counts, nothing is centred or divided by size. A masked token is as good as deleted.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from collapse_monitor.metrics.inputs import Tokens, centre, divide, full_precision, median, read_tokens, report

OUTLIER_FACTOR = 10.0
"""A token is an outlier when its norm exceeds this many times the median norm of its sequence."""


@full_precision
def token_similarity(
    hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None
) -> Float[Tensor, "*batch"]:
    r"""Mean cosine between all pairs of distinct tokens: $(\|\sum_i \hat x_i\|^2 - n) / (n(n-1))$.

    Range -1/(n-1) to 1, dimensionless; 1 is collapse. Above .5 the equal form $1 - \sum_i \|\hat x_i - \bar x\|^2 / (n-1)$ is used, which
    keeps the digits of 1 minus the value. Zero tokens are left out; nan for fewer than two others, NaN or Inf. Cost O(n d): no n x n
    matrix. Source: Shi et al. 2022, arXiv 2202.08625.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.

    >>> token_similarity(torch.ones(5, 3))
    tensor(1.)
    """
    tokens = read_tokens(hidden, mask)
    unit, nonzero = directions(tokens.rows)
    count = nonzero.sum(-1)
    pairs = (count * (count - 1)).clamp(min=1)
    sum_form = (unit.sum(-2).square().sum(-1) - count) / pairs
    centred_form = 1 - centre(unit, nonzero).square().sum((-2, -1)) / (count - 1).clamp(min=1)
    return report(torch.where(sum_form < 0.5, sum_form, centred_form), tokens.readable & (count >= 2), hidden)


@full_precision
def relative_residual(
    hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None
) -> Float[Tensor, "*batch"]:
    r"""Share of the tokens that is not their mean: $\|X - 1\bar x^\top\|_F / \|X\|_F$.

    Range 0 to 1, dimensionless; 0 is collapse: all tokens the same vector. nan for fewer than two valid tokens, a zero matrix, NaN or
    Inf. Cost O(n d). Source: Dong et al. 2021, arXiv 2103.03404, in the Frobenius norm of Shi et al. 2022, arXiv 2202.08625.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.

    >>> relative_residual(torch.eye(2))
    tensor(0.7071)
    """
    tokens = read_tokens(hidden, mask)
    return report(residual_share(tokens), tokens.readable, hidden)


@full_precision
def composite_residual(
    hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None
) -> Float[Tensor, "*batch"]:
    r"""`relative_residual` in $\sqrt{\|\cdot\|_1 \|\cdot\|_\infty}$, largest column sum times largest row sum of absolute values.

    Range 0 to 2(1 - 1/n), dimensionless; 0 is collapse. May exceed 1: 8 orthogonal tokens of equal length read 1.75.
    For comparison with published curves; `relative_residual` is the better number. Undefined cases and cost as there.
    Source: Dong et al. 2021, arXiv 2103.03404.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.

    >>> composite_residual(torch.eye(8))
    tensor(1.7500)
    """
    tokens = read_tokens(hidden, mask)
    return report(divide(_composite(centre(tokens.scaled, tokens.valid)), _composite(tokens.scaled)), tokens.readable, hidden)


@full_precision
def residual_norm(hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None) -> Float[Tensor, "*batch"]:
    r"""Root mean square distance of a token from the mean token: $\|X - 1\bar x^\top\|_F / \sqrt n$.

    Range 0 to inf, in units of the stream; 0 is collapse. Depends on the scale of the stream: read it beside `relative_residual`.
    Undefined cases and cost as there. Source: Wu et al. 2024, arXiv 2405.18781.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.

    >>> residual_norm(torch.tensor([[3.0, 0.0], [-3.0, 0.0]]))
    tensor(3.)
    """
    tokens = read_tokens(hidden, mask)
    residual = torch.linalg.vector_norm(centre(tokens.scaled, tokens.valid), dim=(-2, -1)) / tokens.count.clamp(min=1).sqrt()
    return report(residual * tokens.scale, tokens.readable, hidden)


@full_precision
def massive_activation(
    hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None
) -> Float[Tensor, "*batch"]:
    r"""Largest over median absolute value: $\max |x| / \mathrm{median} |x|$.

    Range 1 to inf, dimensionless; high means that a few values carry the stream. nan for fewer than two valid tokens, a median of zero,
    NaN or Inf. Cost: one sort, O(n d log(n d)). Source: Sun et al. 2024, arXiv 2402.17762.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.

    >>> massive_activation(torch.tensor([[1.0, -2.0], [500.0, 2.0]]))
    tensor(250.)
    """
    tokens = read_tokens(hidden, mask)
    sizes = rearrange(tokens.rows.abs(), "... token dim -> ... (token dim)")
    middle = median(sizes, tokens.valid.repeat_interleave(hidden.shape[-1], -1))
    return report(divide(sizes.amax(-1), middle), tokens.readable & (middle > 0), hidden)


@full_precision
def nonfinite(hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None) -> Float[Tensor, "*batch"]:
    """Share of the values that are NaN or Inf.

    Range 0 to 1, dimensionless; anything above 0 is a fault. Defined from one valid token on, and for a zero matrix. No gradient. Cost
    O(n d). Source: this package.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.

    >>> nonfinite(torch.tensor([[1.0, torch.nan], [torch.inf, 1.0]]))
    tensor(0.5000)
    """
    tokens = read_tokens(hidden, mask)
    broken = (~hidden.isfinite()).to(tokens.count.dtype).mean(-1)
    return report(torch.where(tokens.valid, broken, 0).sum(-1) / tokens.count.clamp(min=1), tokens.count >= 1, hidden)


@full_precision
def dead_tokens(hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None) -> Float[Tensor, "*batch"]:
    """Share of the tokens that are zero or have an identical twin in their sequence.

    Range 0 to 1, dimensionless; 1 is collapse (all tokens identical, or all zero). Compared value by value, without tolerance. nan for
    fewer than two valid tokens, NaN or Inf; a zero matrix is 1. No gradient. Cost O(n d + n log n). Source: this package.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.

    >>> dead_tokens(torch.tensor([[0.0, 0.0], [1.0, 2.0], [1.0, 2.0], [2.0, 1.0]]))
    tensor(0.7500)
    """
    tokens = read_tokens(hidden, mask)
    prints = torch.where(tokens.valid, fingerprint(tokens.rows), torch.iinfo(torch.int64).max)
    order = prints.argsort(stable=True, dim=-1)
    rows = tokens.rows.gather(-2, order[..., None].expand(tokens.rows.shape))
    valid = tokens.valid.gather(-1, order)
    same_as_next = (rows[..., 1:, :] == rows[..., :-1, :]).all(-1) & valid[..., 1:] & valid[..., :-1]
    edge = torch.zeros_like(valid[..., :1])
    dead = (torch.cat([edge, same_as_next], -1) | torch.cat([same_as_next, edge], -1) | (rows == 0).all(-1)) & valid
    return report(dead.sum(-1) / tokens.count.clamp(min=1), tokens.finite & (tokens.count >= 2), hidden)


@full_precision
def outlier_tokens(hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None) -> Float[Tensor, "*batch"]:
    """Share of the tokens whose norm exceeds ten times the median norm of their sequence.

    Range 0 to 1/2, dimensionless; neither end is collapse: a class or first token that carries massive activations is common in healthy
    models, but it hides the other tokens from every rank. nan for fewer than two valid tokens, NaN or Inf. No gradient. Cost O(n d).
    Source: Sun et al. 2024, arXiv 2402.17762.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.

    >>> outlier_tokens(torch.tensor([[900.0], [1.0], [2.0], [3.0]]))
    tensor(0.2500)
    """
    tokens = read_tokens(hidden, mask)
    share = find_outliers(hidden, mask).sum(-1) / tokens.count.clamp(min=1)
    return report(share, tokens.finite & (tokens.count >= 2), hidden)


def find_outliers(
    hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None
) -> Bool[Tensor, "*batch token"]:
    """True at the valid tokens that `outlier_tokens` counts; all False in a sequence with NaN or Inf.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.
    """
    tokens = read_tokens(hidden, mask)
    norms = torch.linalg.vector_norm(tokens.scaled, dim=-1)
    outliers: Tensor = tokens.valid & (norms > OUTLIER_FACTOR * median(norms, tokens.valid)[..., None])
    return outliers[..., : hidden.shape[-2]]


def residual_share(tokens: Tokens) -> Float[Tensor, "*batch"]:
    """The value of `relative_residual` where the tokens are readable."""
    residual = torch.linalg.vector_norm(centre(tokens.scaled, tokens.valid), dim=(-2, -1))
    return divide(residual, torch.linalg.vector_norm(tokens.scaled, dim=(-2, -1)))


def directions(rows: Float[Tensor, "*batch token dim"]) -> tuple[Float[Tensor, "*batch token dim"], Bool[Tensor, "*batch token"]]:
    """Rows of length one, and which of them are not zero. Scaled row by row first, so no length overflows or vanishes."""
    peak = rows.detach().abs().amax(-1, keepdim=True)
    scaled = divide(rows, peak)
    return divide(scaled, torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)), peak.squeeze(-1) > 0


def _composite(rows: Float[Tensor, "*batch token dim"]) -> Float[Tensor, "*batch"]:
    product = rows.abs().sum(-2).amax(-1) * rows.abs().sum(-1).amax(-1)
    return torch.where(product > 0, torch.where(product > 0, product, 1).sqrt(), 0)


def fingerprint(rows: Float[Tensor, "*batch token dim"]) -> Int[Tensor, "*batch token"]:
    """A 64-bit number per token, equal for equal tokens: integer sums do not depend on the order of addition."""
    as_integer = torch.int64 if rows.dtype == torch.float64 else torch.int32
    bits = (rows.detach() + 0.0).view(as_integer).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    bits = bits + torch.arange(rows.shape[-1], device=rows.device) * -7046029254386353131  # the same value differs by position
    for factor in (-4658895280553007687, -7723592293110705685):  # odd: no bit is lost; the shift carries high bits, all that
        bits = (bits ^ (bits >> 31)) * factor  # half-precision values have, down to the low ones
    return (bits ^ (bits >> 33)).sum(-1)
