"""Arithmetic that does not depend on the run's own settings: autocast, TF32, the default dtype."""

from __future__ import annotations

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
    if products_are_exact(rows.device.type) if exact is None else exact:
        return torch.bmm(rows, rows.mT)
    high = rows.bfloat16().float()
    rest = rows - high
    middle = rest.bfloat16().float()
    low = rest - middle
    cross = torch.bmm(high, middle.mT) + torch.bmm(high, low.mT)
    return torch.bmm(high, high.mT) + (cross + cross.mT) + torch.bmm(middle, middle.mT)


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
