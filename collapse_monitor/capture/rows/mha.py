"""Looking inside `F.multi_head_attention_forward`, which otherwise arrives as one opaque call."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

_NOT_OVERRIDDEN = {name: lambda *_: False for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")}


@functools.cache
def transparent_multi_head_attention() -> Callable[..., Any]:
    """The same code as `F.multi_head_attention_forward`, but for the early hand-over to active function modes.

    Called while a mode is active, the softmax or the fused kernel inside reaches that mode; results are bit-identical.
    """
    original = F.multi_head_attention_forward
    clone = types.FunctionType(
        original.__code__,
        {**original.__globals__, **_NOT_OVERRIDDEN},
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    clone.__kwdefaults__ = original.__kwdefaults__
    return clone
