"""Where the learning signal goes: norms of gradients, and the ratio that tells rank collapse from vanishing gradients.

Give gradients of the unscaled loss. A zero gradient is a reading (0), not an undefined case.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from collapse_monitor.metrics.inputs import divide, frobenius_norm, full_precision, report


@full_precision
def gradient_norm(gradient: Float[Tensor, " ..."]) -> Float[Tensor, ""]:
    r"""Frobenius norm of the loss gradient at the output of a block: $\|\partial L / \partial x\|_F$.

    Range 0 to inf, in units of the loss over the stream; 0 is a vanished gradient. nan for no values, NaN or Inf. Cost O(n d).
    Source: Noci et al. 2022, arXiv 2206.03126.

    Raises:
        TypeError: `gradient` is not floating.

    >>> gradient_norm(torch.tensor([[3.0, 4.0]]))
    tensor(5.)
    """
    norm = frobenius_norm(gradient, "gradient")
    return report(norm, ~norm.isnan(), gradient)


@full_precision
def qk_to_v_gradient(query_gradient: Float[Tensor, " ..."], value_gradient: Float[Tensor, " ..."]) -> Float[Tensor, ""]:
    r"""Gradient that reaches the queries over that which reaches the values: $\|\partial L/\partial q\|_F / \|\partial L/\partial v\|_F$.

    Range 0 to inf, in units of value over query; 0 is collapse. With tokens whose residual is epsilon the query's gradient falls as
    epsilon squared and the value's not at all, while vanishing gradients take both: the ratio tells the two apart. nan for a value gradient
    of zero, no values, NaN or Inf. Cost O(n d). Source: Noci et al. 2022, arXiv 2206.03126.

    Raises:
        TypeError: a gradient is not floating.

    >>> qk_to_v_gradient(torch.tensor([0.0, 3.0]), torch.tensor([3.0, 4.0]))
    tensor(0.6000)
    """
    return _ratio(query_gradient, value_gradient)


@full_precision
def parameter_gradient_norm(gradients: Iterable[Float[Tensor, " ..."]]) -> Float[Tensor, ""]:
    r"""Norm of all gradients of a block's parameters together: $\sqrt{\sum_i \|g_i\|_F^2}$.

    Range 0 to inf, in units of the loss over a parameter; 0 is a vanished gradient. nan for no gradients or values, NaN or Inf in any.
    Cost O(parameters). Source: Noci et al. 2022, arXiv 2206.03126.

    Raises:
        TypeError: a gradient is not a floating tensor.

    >>> parameter_gradient_norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    listed = list(gradients)
    norms = [frobenius_norm(gradient, f"gradients[{index}]") for index, gradient in enumerate(listed) if not _is_empty(gradient)]
    if not norms:
        return torch.tensor(torch.nan, dtype=torch.float32)
    norm = frobenius_norm(torch.stack([each.to(norms[0].device) for each in norms]), "gradients")
    return report(norm, ~norm.isnan(), *listed)


@full_precision
def qk_to_v_weight_gradient(query_gradient: Float[Tensor, " ..."], value_gradient: Float[Tensor, " ..."]) -> Float[Tensor, ""]:
    r"""The ratio of `qk_to_v_gradient` over the weights that made q and v: $\|\partial L/\partial W_Q\|_F / \|\partial L/\partial W_V\|_F$.

    Range 0 to inf, dimensionless; 0 is collapse of the tokens this layer reads: it falls as their residual squared. Seen with random
    weights: .17 in all of 128 layers with DeepNorm; .46 in the first and 3e-8 in the last of 128 Post-LN layers. Undefined cases and cost
    as `qk_to_v_gradient`. Source: Noci et al. 2022, arXiv 2206.03126.

    Raises:
        TypeError: a gradient is not floating.

    >>> qk_to_v_weight_gradient(torch.eye(2), 2 * torch.eye(2))
    tensor(0.5000)
    """
    return _ratio(query_gradient, value_gradient)


def _ratio(query_gradient: Tensor, value_gradient: Tensor) -> Tensor:
    query, value = frobenius_norm(query_gradient, "query_gradient"), frobenius_norm(value_gradient, "value_gradient")
    return report(divide(query, value), ~query.isnan() & ~value.isnan() & (value > 0), query_gradient, value_gradient)


def _is_empty(gradient: object) -> bool:
    return isinstance(gradient, Tensor) and gradient.numel() == 0
