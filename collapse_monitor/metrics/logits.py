"""What enters the softmax, after scale, bias and softcap: how large, and how far apart within a row.

`mask` is True at visible keys and broadcasts to the logits; logits at invisible keys never enter, so pass it when they hold -inf.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from collapse_monitor.metrics.inputs import full_precision, promote, read_visible, report


@full_precision
def max_logit(logits: Float[Tensor, "*batch head query key"], mask: Bool[Tensor, " ..."] | None = None) -> Float[Tensor, "*batch head"]:
    """Largest logit at a visible key, with its sign.

    Range -inf to inf, in nats; high is collapse: above 100 one large model's training clipped, above 1e4 all that were studied diverged.
    Over sampled rows a lower bound. nan without a row that sees two keys, and for NaN or Inf at a visible key. Cost O(rows x keys).
    Source: Wortsman et al. 2023, arXiv 2309.14322.

    Raises:
        TypeError: `logits` is not floating or `mask` not boolean.
        ValueError: fewer than three axes, or a mask that does not broadcast.

    >>> max_logit(torch.tensor([[[1.0, -3.0], [2.0, 0.0]]]))
    tensor([2.])
    """
    values, visible, readable = _read_logits(logits, mask)
    return report(torch.where(visible, values, -torch.inf).amax((-2, -1)), readable, logits)


@full_precision
def logit_std(logits: Float[Tensor, "*batch head query key"], mask: Bool[Tensor, " ..."] | None = None) -> Float[Tensor, "*batch head"]:
    r"""Standard deviation of a row's logits over its visible keys (divisor n), then mean over rows.

    Range 0 to inf, in nats; neither end is a fault by itself: 0 is uniform attention, and for normal logits with deviation $s$ up to 1 the
    row entropy is $\log n - s^2/2$. Rows with fewer than two visible keys are left out. Undefined cases and cost as `max_logit`.
    Source: Giorlandino & Goldt 2025, arXiv 2505.24333 (their inverse temperature).

    Raises:
        TypeError: `logits` is not floating or `mask` not boolean.
        ValueError: fewer than three axes, or a mask that does not broadcast.

    >>> logit_std(torch.tensor([[[1.0, -1.0], [3.0, -3.0]]]))
    tensor([2.])
    """
    values, visible, readable = _read_logits(logits, mask)
    count = visible.sum(-1)
    centred = torch.where(visible, values - (values.sum(-1) / count.clamp(min=1))[..., None], 0)
    spread = torch.linalg.vector_norm(centred, dim=-1) / count.clamp(min=1).sqrt()
    choosing = count >= 2
    return report(torch.where(choosing, spread, 0).sum(-1) / choosing.sum(-1).clamp(min=1), readable, logits)


def _read_logits(
    logits: Float[Tensor, "*batch head query key"], mask: Bool[Tensor, " ..."] | None
) -> tuple[Float[Tensor, "*batch head query key"], Bool[Tensor, "*batch head query key"], Bool[Tensor, "*batch head"]]:
    """Logits with zero at invisible and non-finite places, what is visible, and the heads that can be read."""
    visible = read_visible(logits, mask, "logits")
    if 0 in logits.shape[-2:]:  # one row that sees nothing in place of none
        shape = [*logits.shape[:-2], max(logits.shape[-2], 1), max(logits.shape[-1], 1)]
        logits, visible = logits.new_zeros(shape), visible.new_zeros(shape)
    finite = logits.isfinite()
    values = promote(torch.where(visible & finite, logits, 0))
    readable = (finite | ~visible).all(-1).all(-1) & (visible.sum(-1) >= 2).any(-1)
    return values, visible, readable
