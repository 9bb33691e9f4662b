"""Arithmetic that does not depend on the run's own settings: autocast, TF32, the default dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@contextmanager
def undisturbed(*device_types: str) -> Iterator[None]:
    """No gradients and no autocast on these kinds of device."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in set(device_types):
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def only_where(mask: Bool[Tensor, "*#shape"], values: Float[Tensor, "*shape"], other: float) -> Float[Tensor, "*shape"]:
    """`torch.where` with a number, which as it is makes an fp64 tensor of it."""
    return torch.where(mask, values, values.new_full((), other))


def gram(rows: Float[Tensor, "batch row column"], exact: bool | None = None) -> Float[Tensor, "batch row row"]:
    """`rows @ rows.T` of every matrix in full fp32, also where the user allowed TF32 or bfloat16 for his own products.

    The settings are process-wide, so they are read and never set. Where they allow less than fp32 (or `exact` is False), each value
    is split into three bfloat16 ones whose products any of these modes forms without error.
    """
    if rows.dtype == torch.float64 or (products_are_exact(rows.device.type) if exact is None else exact):
        return torch.bmm(rows, rows.mT)
    high, middle, low = _in_three(rows)
    cross = torch.bmm(high, middle.mT) + torch.bmm(high, low.mT)
    return torch.bmm(high, high.mT) + (cross + cross.mT) + torch.bmm(middle, middle.mT)


def product(
    left: Float[Tensor, "batch row inner"], right: Float[Tensor, "batch inner column"], exact: bool | None = None
) -> Float[Tensor, "batch row column"]:
    """`left @ right` of every pair in full fp32 in the same way; fp64 stays fp64."""
    if left.dtype == torch.float64 or (products_are_exact(left.device.type) if exact is None else exact):
        return torch.bmm(left, right)
    (high, middle, low), (high_r, middle_r, low_r) = _in_three(left), _in_three(right)
    cross = torch.bmm(high, middle_r) + torch.bmm(middle, high_r) + torch.bmm(high, low_r) + torch.bmm(low, high_r)
    return torch.bmm(high, high_r) + cross + torch.bmm(middle, middle_r)


def _in_three(values: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    high = values.bfloat16().float()
    rest = values - high
    middle = rest.bfloat16().float()
    return high, middle, rest - middle


def gram_in_parts(
    rows: Float[Tensor, "batch row column"], exact: bool | None = None
) -> tuple[Float[Tensor, "batch row row"], Float[Tensor, "batch row row"]]:
    """`rows @ rows.T` as a sum of two: together they know it some hundred times better than fp32 does.

    The first is the Gram matrix of the values rounded to so few bits that fp32 forms it without any error.
    """
    bits = (24 - math.ceil(math.log2(max(rows.shape[-1], 2)))) // 2
    peak = rows.abs().amax(-1, keepdim=True)
    step = torch.exp2(torch.floor(torch.log2(torch.where(peak > 0, peak, torch.ones_like(peak)))) + 1 - bits)
    coarse = (rows / step).round() * step
    fine = rows - coarse
    cross = product(coarse, fine.mT, exact)
    return torch.bmm(coarse, coarse.mT), cross + cross.mT + gram(fine, exact)


def products_are_exact(device_type: str) -> bool:
    """Whether a product of two fp32 matrices keeps fp32 on this kind of device."""
    backend = {"cuda": "cuda", "cpu": "mkldnn"}.get(device_type)
    if backend is None:
        return True
    setting = getattr(getattr(torch.backends, backend), "matmul", None)
    precision = getattr(setting, "fp32_precision", None)
    if precision is not None:
        return precision in ("none", "ieee")
    return torch.get_float32_matmul_precision() == "highest"
