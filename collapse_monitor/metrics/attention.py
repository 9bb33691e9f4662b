"""What the rows of one attention look like: sharp or uniform, alike or not, moving or stuck.

`weights` is the distribution the attention used, before dropout. `mask` is True at visible keys and broadcasts to it; a weight at an
invisible key never enters, and a key that no row sees is as good as deleted. Every row is divided by its sum over the visible keys: rows
thinned by dropout, or with a sink column taken out by the mask, are read as the distribution they are proportional to, so no range is
exceeded; read the distribution before dropout to get the true value. Rows that see nothing are left out.
"""

from __future__ import annotations

import math

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from collapse_monitor.metrics.inputs import divide, full_precision, read_rows, report

SINK_KEYS = 4
"""A sink is looked for among this many first keys (Xiao et al. 2023 keep four)."""


@full_precision
def attention_uniformity(
    weights: Float[Tensor, "*batch head query key"], mask: Bool[Tensor, " ..."] | None = None
) -> Float[Tensor, "*batch head"]:
    r"""Row entropy over its largest possible value: mean over rows of $-\sum_j p_j \log p_j / \log n_i$, $n_i$ visible keys.

    Range 0 to 1, dimensionless: 1 uniform, 0 one-hot. Healthy attention is near 1 at initialisation, so neither end is a fault by itself.
    Rows with fewer than two visible keys are left out. nan without a row that sees two keys, for NaN, Inf or a negative weight at a
    visible key. Cost O(rows x keys). Source: Zhai et al. 2023, arXiv 2303.06296.

    Raises:
        TypeError: `weights` is not floating or `mask` not boolean.
        ValueError: fewer than three axes, or a mask that does not broadcast.

    >>> attention_uniformity(torch.full((2, 3, 4), 0.25))
    tensor([1., 1.])
    """
    rows = read_rows(weights, mask)
    entropy = -(rows.weights * torch.where(rows.weights > 0, rows.weights, 1).log()).sum(-1)
    choosing = rows.keys >= 2
    return report(_mean(entropy / rows.keys.clamp(min=2).log(), choosing), rows.readable, weights)


@full_precision
def effective_keys(
    weights: Float[Tensor, "*batch head query key"], mask: Bool[Tensor, " ..."] | None = None
) -> Float[Tensor, "*batch head"]:
    r"""Number of keys a row attends to: mean over rows of $1 / \sum_j p_j^2$, the exponential of the Rényi-2 entropy.

    Range 1 to the number of keys; 1 is one-hot. A row with one visible key counts as 1. Undefined cases and cost as
    `attention_uniformity`. Source: Giorlandino & Goldt 2025, arXiv 2505.24333 (its inverse is their Y_2).

    Raises:
        TypeError: `weights` is not floating or `mask` not boolean.
        ValueError: fewer than three axes, or a mask that does not broadcast.

    >>> effective_keys(torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]]))
    tensor([1.5000])
    """
    rows = read_rows(weights, mask)
    return report(_mean(divide(torch.ones_like(rows.keys), rows.weights.square().sum(-1)), rows.live), rows.readable, weights)


@full_precision
def dominant_column(
    weights: Float[Tensor, "*batch head query key"], mask: Bool[Tensor, " ..."] | None = None
) -> Float[Tensor, "*batch head"]:
    r"""Mass of the most attended key: $\max_j$ of the mean over rows of $p_{ij}$.

    Range 1/keys to 1, dimensionless; 1 is collapse: every query attends to the same key. Rows that do not see the key count as 0.
    Undefined cases and cost as `attention_uniformity`. Source: Sanyal et al. 2024 (Inheritune), arXiv 2404.08634.

    Raises:
        TypeError: `weights` is not floating or `mask` not boolean.
        ValueError: fewer than three axes, or a mask that does not broadcast.

    >>> dominant_column(torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]))
    tensor([0.7500])
    """
    rows = read_rows(weights, mask)
    return report(rows.weights.sum(-2).amax(-1) / rows.live.sum(-1).clamp(min=1), rows.readable, weights)


@full_precision
def sink_mass(weights: Float[Tensor, "*batch head query key"], mask: Bool[Tensor, " ..."] | None = None) -> Float[Tensor, "*batch head"]:
    r"""Mass of the strongest of the first four keys: largest mean of $p_{ij}$ over the rows that see key j.

    Range 0 to 1, dimensionless; high is an attention sink, which is information and no fault. The first keys are the first ones that any
    row sees, so left padding does not hide them. Causal uniform attention over n keys reads $H_n / n$. A key that few rows see is
    read from these few. Undefined cases and cost as `attention_uniformity`. Source: Gu et al. 2024, arXiv 2410.10781.

    Raises:
        TypeError: `weights` is not floating or `mask` not boolean.
        ValueError: fewer than three axes, or a mask that does not broadcast.

    >>> sink_mass(torch.tensor([[[0.9, 0.1], [0.7, 0.3]]]))
    tensor([0.8000])
    """
    rows = read_rows(weights, mask)
    viewers = rows.visible.sum(-2)
    first = (viewers > 0) & ((viewers > 0).cumsum(-1) <= SINK_KEYS)
    mass = torch.where(first, rows.weights.sum(-2) / viewers.clamp(min=1), 0)
    return report(mass.amax(-1), rows.readable, weights)


@full_precision
def dobrushin(weights: Float[Tensor, "*batch head query key"], mask: Bool[Tensor, " ..."] | None = None) -> Float[Tensor, "*batch head"]:
    r"""Largest total variation between two rows: $\frac12 \max_{i,k} \|p_i - p_k\|_1$, over rows that see at least half of the keys.

    Range 0 to 1, dimensionless; 0 is collapse: the layer gives every query the same mixture. Bounds how much of the spread of the values
    survives the mixing. Causal uniform attention reads 1 - 1/n over all rows (no mask), about 1/2 over those that see half of the keys.
    nan for fewer than two such rows; other undefined cases as `attention_uniformity`. Cost O(rows^2 x keys), without a tensor of that
    size. Source: Dobrushin 1956, doi 10.1137/1101006.

    Raises:
        TypeError: `weights` is not floating or `mask` not boolean.
        ValueError: fewer than three axes, or a mask that does not broadcast.

    >>> dobrushin(torch.eye(3)[None])
    tensor([1.])
    """
    rows = read_rows(weights, mask)
    seen = rows.visible.any(-2).sum(-1)
    compared = rows.live & (2 * rows.keys >= seen[..., None])
    distances = torch.cdist(rows.weights, rows.weights, p=1) / 2
    largest = torch.where(compared[..., :, None] & compared[..., None, :], distances, 0).amax((-2, -1))
    return report(largest, rows.readable & (compared.sum(-1) >= 2), weights)


@full_precision
def head_similarity(
    weights: Float[Tensor, "*batch head query key"], mask: Bool[Tensor, " ..."] | None = None
) -> Float[Tensor, "*batch head"]:
    r"""How much a head's map looks like the others': mean over heads g of $\cos(\mathrm{vec} P_h, \mathrm{vec} P_g)$.

    Range 0 to 1, dimensionless; 1 is collapse: redundant heads. Uniform and sink heads are alike without being redundant: read it beside
    `attention_uniformity` and `sink_mass`. Heads without a row that sees two keys are left out; nan for a single head, and for all heads
    of a sequence if one holds a NaN, Inf or negative weight. Cost O(heads^2 x rows x keys). Source: Li et al. 2018, arXiv 1810.10183.

    Raises:
        TypeError: `weights` is not floating or `mask` not boolean.
        ValueError: fewer than three axes, or a mask that does not broadcast.

    >>> head_similarity(torch.stack([torch.eye(2), torch.eye(2), torch.eye(2).flip(0)]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    rows = read_rows(weights, mask)
    maps = rearrange(torch.where(rows.readable[..., None, None], rows.weights, 0), "... head query key -> ... head (query key)")
    maps = divide(maps, torch.linalg.vector_norm(maps, dim=-1, keepdim=True))
    cosines = einsum(maps, maps, "... head cell, ... other cell -> ... head other")
    others = rows.readable.sum(-1, keepdim=True) - 1
    own = cosines.diagonal(dim1=-2, dim2=-1)
    readable = rows.readable & rows.finite.all(-1, keepdim=True) & (others >= 1)
    return report((cosines.sum(-1) - own) / others.clamp(min=1), readable, weights)


@full_precision
def layer_similarity(
    weights: Float[Tensor, "*batch head query key"],
    previous: Float[Tensor, "*previous head_before query_before key_before"],
    mask: Bool[Tensor, " ..."] | None = None,
) -> Float[Tensor, "*batch head"]:
    r"""How much a head looks at the same keys as that head one layer before: mean over rows of $\cos(p_i, p'_i)$.

    Range 0 to 1, dimensionless; 1 is collapse: attention does not change from layer to layer. Meant for two self-attentions with the same
    `mask`. nan where the shapes differ and in the undefined cases of `attention_uniformity` of either. Cost O(rows x keys).
    Source: Zhou et al. 2021 (DeepViT), arXiv 2103.11886, by rows in place of columns.

    Raises:
        TypeError: a tensor is not floating or `mask` not boolean.
        ValueError: fewer than three axes, or a mask that does not broadcast.

    >>> layer_similarity(torch.eye(2)[None], torch.eye(2)[None])
    tensor([1.])
    """
    rows = read_rows(weights, mask)
    comparable = weights.shape == getattr(previous, "shape", None)
    before = read_rows(previous, mask if comparable else None, "previous")
    if not comparable:
        return report(torch.zeros_like(rows.keys.sum(-1)), torch.zeros_like(rows.finite), weights, previous)
    lengths = torch.linalg.vector_norm(rows.weights, dim=-1) * torch.linalg.vector_norm(before.weights, dim=-1)
    cosines = divide((rows.weights * before.weights).sum(-1), lengths)
    both = rows.live & before.live
    return report(_mean(cosines, both), rows.readable & before.readable & both.any(-1), weights, previous)


@full_precision
def input_dependence(weights: Float[Tensor, "batch head query key"], mask: Bool[Tensor, " ..."] | None = None) -> Float[Tensor, " head"]:
    r"""How much attention depends on the sequence: mean over rows of $(H(\bar p) - \overline{H(p_b)}) / \log B$, means over B sequences.

    Range 0 to 1, dimensionless; 0 is collapse: every sequence gets the same map, fixed or uniform. Only rows whose visible keys are the
    same in all sequences count; nan without such a row that sees two keys, for one sequence, and for NaN, Inf or a negative weight in any
    sequence. Summed as $\sum_j \bar p_j g(p_j / \bar p_j - 1)$ with $g(u) = (1 + u) \log(1 + u) - u$, all terms of which are positive: no
    digits cancel. Cost O(batch x rows x keys). Source: the generalised Jensen-Shannon divergence, Lin 1991, doi 10.1109/18.61115.

    Raises:
        TypeError: `weights` is not floating or `mask` not boolean.
        ValueError: not four axes, or a mask that does not broadcast.

    >>> input_dependence(torch.stack([torch.eye(2), torch.eye(2).flip(0)])[:, None])
    tensor([1.])
    """
    if getattr(weights, "ndim", 4) != 4:
        raise ValueError(
            f"weights has shape {list(weights.shape)}; expected [batch, head, query, key]: the sequences are compared along the first axis"
        )
    rows = read_rows(weights, mask)
    batch = weights.shape[0]
    if batch < 2:
        return report(rows.keys.new_zeros(weights.shape[1]), rows.finite.new_zeros(weights.shape[1]), weights)
    shared = (rows.visible == rows.visible[:1]).all(0).all(-1) & rows.live.all(0)
    mean = rows.weights.mean(0)
    excess = divide(rows.weights - mean, mean)
    inside = excess > -1  # at a weight of zero the term is -u = 1
    terms = torch.where(inside, (1 + excess) * torch.where(inside, excess, 0).log1p(), 0) - excess
    divergence = (mean * terms).sum(-1).mean(0) / math.log(batch)
    readable = rows.finite.all(0) & (shared & (rows.keys[0] >= 2)).any(-1)
    return report(_mean(divergence, shared), readable, weights)


def _mean(values: Float[Tensor, "*batch query"], counted: Bool[Tensor, "*batch query"]) -> Float[Tensor, "*batch"]:
    return torch.where(counted, values, 0).sum(-1) / counted.sum(-1).clamp(min=1)
