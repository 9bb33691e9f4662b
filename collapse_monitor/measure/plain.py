"""Which tensors can be measured, and why the others cannot."""

from __future__ import annotations

import torch
from torch import Tensor


def reason_against(tensor: object, axes: int | None = None) -> str | None:
    """Why a tensor cannot be measured, or None if it can: dense, floating, with values, of this process, with so many axes."""
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__} in place of a tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}, which this process does not hold as a plain tensor"
    if tensor.device.type == "meta":
        return "a tensor on the meta device, without values"
    if tensor.is_quantized or not tensor.is_floating_point():
        return f"a tensor of {tensor.dtype}, not floating point"
    if tensor.numel() == 0:
        return f"an empty tensor of shape {list(tensor.shape)}"
    if axes is not None and tensor.ndim != axes:
        return f"a tensor of {tensor.ndim} axes, {axes} expected"
    return None
