"""How many directions the tokens use: three ranks of one spectrum, and the centred rank over samples."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from collapse_monitor.metrics.inputs import Tokens, centre, check_float, divide, full_precision, read_tokens, report


@full_precision
def effective_rank(hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None) -> Float[Tensor, "*batch"]:
    r"""Exponential of the entropy of the singular values: $\exp(-\sum_i p_i \log p_i)$, $p_i = \sigma_i / \sum_j \sigma_j$.

    Range 1 to min(token, dim), dimensionless; 1 is collapse. Uncentred: identical tokens have rank 1. Singular values that rounding
    to the dtype of `hidden` could have made are dropped first (see `singular_values`). nan for fewer than two valid tokens, a zero
    matrix, NaN or Inf. Cost: one SVD, O(n d min(n, d)). Source: Roy & Vetterli 2007, EUSIPCO.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.

    >>> effective_rank(torch.eye(4))
    tensor(4.)
    """
    sigma, readable = singular_values(hidden, mask)
    return report(effective_rank_of(sigma), readable, hidden)


@full_precision
def stable_rank(hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None) -> Float[Tensor, "*batch"]:
    r"""Squared Frobenius norm over squared spectral norm: $\sum_i \sigma_i^2 / \sigma_1^2$.

    Range 1 to the rank, dimensionless; 1 is collapse. The smallest of the three ranks. Uncentred, same noise floor, undefined
    cases and cost as `effective_rank`. Source: Rudelson & Vershynin 2007, arXiv math/0503442.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.

    >>> stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0])))
    tensor(1.5000)
    """
    sigma, readable = singular_values(hidden, mask)
    return report(stable_rank_of(sigma), readable, hidden)


@full_precision
def participation_ratio(
    hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None
) -> Float[Tensor, "*batch"]:
    r"""Number of directions that carry the energy: $(\sum_i \sigma_i^2)^2 / \sum_i \sigma_i^4$.

    Range 1 to the rank, dimensionless; 1 is collapse. Lies between `stable_rank` and `effective_rank`. Uncentred, same noise floor,
    undefined cases and cost as `effective_rank`. Source: Gao et al. 2017, bioRxiv 214262.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.

    >>> participation_ratio(torch.ones(5, 3))
    tensor(1.)
    """
    sigma, readable = singular_values(hidden, mask)
    return report(participation_ratio_of(sigma), readable, hidden)


@full_precision
def pooled_rank(features: Float[Tensor, "sample dim"]) -> Float[Tensor, ""]:
    r"""Effective rank of the samples after their mean is taken off: how many directions tell samples apart.

    Range 1 to min(sample - 1, dim), dimensionless; 1 is dimensional collapse. The noise floor is that of the features before
    centring, so rounding noise of equal samples is no rank; equal samples read 1. nan for fewer than two samples, all zeros, NaN or Inf.
    Cost: one SVD, O(n d min(n, d)). Source: Garrido et al. 2023 (RankMe), arXiv 2210.02885, with the mean removed.

    Raises:
        TypeError: `features` is not floating.
        ValueError: `features` is not one matrix [sample, dim].

    >>> pooled_rank(torch.tensor([[3.0, 1.0], [5.0, 1.0], [4.0, 1.0]]))
    tensor(1.)
    """
    check_float(features, "features")
    if features.ndim != 2:
        raise ValueError(
            f"features has shape {list(features.shape)}; expected [sample, dim]: pass one row per sample, such as the mean of its tokens"
        )
    tokens = read_tokens(features, None, "features")
    sigma = torch.linalg.svdvals(centre(tokens.scaled, tokens.valid))
    # The mean keeps no rounding noise of its own, so the floor is that of the values as they came.
    return report(effective_rank_of(_above_noise(sigma, tokens, features.dtype)), tokens.readable, features)


def effective_rank_of(sigma: Float[Tensor, "*batch value"]) -> Float[Tensor, "*batch"]:
    """`effective_rank` of singular values; those that were dropped are zero."""
    share = divide(sigma, sigma.sum(-1, keepdim=True))
    return torch.exp(-(share * torch.where(share > 0, share, 1).log()).sum(-1))


def stable_rank_of(sigma: Float[Tensor, "*batch value"]) -> Float[Tensor, "*batch"]:
    """`stable_rank` of singular values; those that were dropped are zero."""
    return divide(sigma.square().sum(-1), sigma.amax(-1).square())


def participation_ratio_of(sigma: Float[Tensor, "*batch value"]) -> Float[Tensor, "*batch"]:
    """`participation_ratio` of singular values; those that were dropped are zero."""
    return divide(sigma.square().sum(-1).square(), sigma.pow(4).sum(-1))


def singular_values(
    hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None = None
) -> tuple[Float[Tensor, "*batch value"], Bool[Tensor, "*batch"]]:
    """Singular values above the noise floor (zero below it), up to a common factor, and where they can be read.

    Raises:
        TypeError: `hidden` is not floating or `mask` not boolean.
        ValueError: the shapes do not fit.
    """
    tokens = read_tokens(hidden, mask)
    sigma = torch.linalg.svdvals(tokens.scaled)  # NaN and Inf were taken out: LAPACK never sees them
    return _above_noise(sigma, tokens, hidden.dtype), tokens.readable


def noise_floor(norm: Float[Tensor, "*batch"], count: Float[Tensor, "*batch"], dim: int, dtype: torch.dtype) -> Float[Tensor, "*batch"]:
    r"""The largest singular value that rounding to `dtype` can make: $\frac{\epsilon}{2} \|X\|_F (1/\sqrt n + 1/\sqrt d) / \sqrt 3$.

    Rounding adds independent errors, uniform within half a unit in the last place; a matrix of them has norm sd (sqrt n + sqrt d).
    `norm` is that of the uncentred tokens, `count` the number n of valid ones.
    """
    return torch.finfo(dtype).eps / 2 * norm * (count.clamp(min=1).rsqrt() + dim**-0.5) / 3**0.5


def _above_noise(sigma: Float[Tensor, "*batch value"], tokens: Tokens, dtype: torch.dtype) -> Float[Tensor, "*batch value"]:
    norm = torch.linalg.vector_norm(tokens.scaled, dim=(-2, -1))
    return torch.where(sigma > noise_floor(norm, tokens.count, tokens.rows.shape[-1], dtype)[..., None], sigma, 0)
