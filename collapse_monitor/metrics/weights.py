"""What the projections of an attention can do at all, read from their parameters."""

from __future__ import annotations

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from collapse_monitor.metrics.inputs import check_float, divide, full_precision, promote, report

SQUARINGS = 20
"""Power iteration begins with the power 2**20 of a small matrix: singular values closer than about 1e-6 are not told apart."""

ROUNDS = 2
"""Rounds of power iteration on the factors themselves after that; they take out what squaring the weights cost in digits."""


@full_precision
def qk_spectral_norm(
    query_weight: Float[Tensor, "*head head_dim dim"], key_weight: Float[Tensor, "*head head_dim dim_k"]
) -> Float[Tensor, "*head"]:
    r"""Largest logit two unit tokens can get: $\|W_Q^\top W_K\|_2 / \sqrt{\mathrm{head\_dim}}$.

    Range 0 to inf, in nats per squared unit of the stream; high is collapse: it bounds how sharp attention can become. The scale
    $1/\sqrt{head\_dim}$ of the softmax is included; for another scale s multiply by $s \sqrt{head\_dim}$. Weights are laid out as in
    `nn.Linear`: q = W_Q x. With grouped queries repeat the key's weights. Biases, rotary embeddings and QK-norm are not part of it.
    Zero weights read 0, NaN and Inf nan. Cost O(head_dim^2 dim) per head: power iteration on the thin factors, no dim x dim matrix.
    Source: Zhai et al. 2023, arXiv 2303.06296 (their sigma, without the scale).

    Raises:
        TypeError: a weight is not floating.
        ValueError: the two do not fit together.

    >>> qk_spectral_norm(torch.diag(torch.tensor([2.0, 1.0, 0.0, 0.0])), torch.diag(torch.tensor([3.0, 9.0, 0.0, 0.0])))
    tensor(4.5000)
    """
    _check_weight(query_weight, "query_weight")
    _check_weight(key_weight, "key_weight")
    if query_weight.shape[:-1] != key_weight.shape[:-1]:
        raise ValueError(
            f"query_weight has shape {list(query_weight.shape)}, key_weight {list(key_weight.shape)}; expected [*head, head_dim, dim] "
            "with equal heads and head_dim: split the projections into heads, and repeat the key's for grouped queries"
        )
    query, query_scale, query_finite = _read(query_weight)
    key, key_scale, key_finite = _read(key_weight)
    left, right = _top_pair(query.detach(), key.detach())
    # With both directions fixed the value, and its gradient, are those of the largest singular value.
    norm = ((query @ left) * (key @ right)).sum((-2, -1))
    return report(norm * query_scale * key_scale * query_weight.shape[-2] ** -0.5, query_finite & key_finite, query_weight, key_weight)


@full_precision
def value_condition(value_weight: Float[Tensor, "*head head_dim dim"]) -> Float[Tensor, "*head"]:
    r"""Condition number of a head's value projection: $\sigma_1 / \sigma_{\min(\mathrm{head\_dim}, \mathrm{dim})}$.

    Range 1 to inf, dimensionless; high is collapse: the head can write few directions. inf when the smallest singular value is zero;
    beyond 1e7 in float32 it is rounding noise. nan for zero weights, NaN or Inf. Cost: one SVD per head, O(head_dim^2 dim).
    Source: this package.

    Raises:
        TypeError: the weight is not floating.
        ValueError: fewer than two axes, or an empty one.

    >>> value_condition(torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.5, 0.0]]))
    tensor(4.)
    """
    _check_weight(value_weight, "value_weight")
    value, _, finite = _read(value_weight)
    sigma = torch.linalg.svdvals(value)  # NaN and Inf were taken out: LAPACK never sees them
    largest, smallest = sigma[..., 0], sigma[..., -1]
    condition = torch.where(smallest > 0, divide(largest, smallest), torch.inf)
    return report(condition, finite & (largest > 0), value_weight)


def _top_pair(
    query: Float[Tensor, "*head head_dim dim"], key: Float[Tensor, "*head head_dim dim_k"]
) -> tuple[Float[Tensor, "*head dim 1"], Float[Tensor, "*head dim_k 1"]]:
    """First left and right singular vector of query^T key. The start is the power of a matrix, so it depends on no random vector."""
    power = (query @ query.mT) @ (key @ key.mT)  # its eigenvalues are the squared singular values
    for _ in range(SQUARINGS):
        power = _unit(power)
        power = power @ power
    longest = reduce(power.square(), "... row column -> ... column", "sum").argmax(-1)
    start = power.gather(-1, longest[..., None, None].expand(*power.shape[:-1], 1))
    right = _unit(key.mT @ start)
    for _ in range(ROUNDS):
        left = _unit(query.mT @ (key @ right))
        right = _unit(key.mT @ (query @ left))
    return left, right


def _unit(matrix: Float[Tensor, "*head row column"]) -> Float[Tensor, "*head row column"]:
    return divide(matrix, torch.linalg.matrix_norm(matrix, keepdim=True))


def _read(
    weight: Float[Tensor, "*head head_dim dim"],
) -> tuple[Float[Tensor, "*head head_dim dim"], Float[Tensor, "*head"], Bool[Tensor, "*head"]]:
    """The weights with largest value 1, what they were divided by, and whether they are finite (all zero if not)."""
    finite = weight.isfinite().all(-1).all(-1)
    values = promote(torch.where(finite[..., None, None], weight, 0))
    peak = values.detach().abs().amax((-2, -1))
    return divide(values, peak[..., None, None]), peak, finite


def _check_weight(weight: Tensor, name: str) -> None:
    check_float(weight, name)
    if weight.ndim < 2 or 0 in weight.shape[-2:]:
        raise ValueError(
            f"{name} has shape {list(weight.shape)}; expected [*head, head_dim, dim], none of the last two empty: split it into heads first"
        )
