"""Attention functions of other packages: which there are, and what their arguments mean. No other file knows them by name.

PyTorch cannot see into these kernels, so they are heard where they are called (see `capture.interception`), if their package is loaded.
What an argument means is declared; a call with an argument that is not declared here, at another value than its default, is not read.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collapse_monitor.capture.rows.kernel import Band, KernelCall, Source
from collapse_monitor.capture.sampling import Sampler

_OPERANDS = {"q": "q", "k": "k", "v": "v", "query": "q", "key": "k", "value": "v", "kv": "kv", "qkv": "qkv"}


@dataclass(frozen=True, slots=True)
class External:
    """One function: the modules it is found in, its name, and the names of its arguments.

    Attributes:
        operands: tensors [sequence, token, (group,) head, dim], or [token, head, dim] where `offsets` are given; `kv` and `qkv` hold
            two and three of them on the axis before the heads.
        offsets: where packed sequences of queries and of keys begin; `longest` are the lengths of the longest.
        bias: a mask, additive or an object that describes one.
        harmless: arguments that do not change the distribution before dropout.
    """

    modules: tuple[str, ...]
    name: str
    operands: tuple[str, ...]
    scale: str
    offsets: tuple[str, str] | None = None
    longest: tuple[str, str] | None = None
    causal: str = ""
    window: str = ""
    cap: str = ""
    slopes: str = ""
    sinks: tuple[str, ...] = ()
    bias: str = ""
    harmless: frozenset[str] = frozenset()


_FLASH: dict[str, Any] = {
    "modules": ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute", "flash_attn.cute.interface"),
    "scale": "softmax_scale",
    "causal": "causal",
    "window": "window_size",
    "cap": "softcap",
    "slopes": "alibi_slopes",
    "sinks": ("learnable_sink", "s_aux"),
    "harmless": frozenset(
        "dropout_p deterministic return_attn_probs return_softmax_lse return_lse num_splits pack_gqa sm_margin zero_tensors".split()
    ),
}
_SEPARATE: dict[str, Any] = {"offsets": ("cu_seqlens_q", "cu_seqlens_k"), "longest": ("max_seqlen_q", "max_seqlen_k")}
_COMMON: dict[str, Any] = {"offsets": ("cu_seqlens", "cu_seqlens"), "longest": ("max_seqlen", "max_seqlen")}

EXTERNALS = (
    External(name="flash_attn_func", operands=("q", "k", "v"), **_FLASH),
    External(name="flash_attn_kvpacked_func", operands=("q", "kv"), **_FLASH),
    External(name="flash_attn_qkvpacked_func", operands=("qkv",), **_FLASH),
    External(name="flash_attn_varlen_func", operands=("q", "k", "v"), **_SEPARATE, **_FLASH),
    External(name="flash_attn_varlen_kvpacked_func", operands=("q", "kv"), **_SEPARATE, **_FLASH),
    External(name="flash_attn_varlen_qkvpacked_func", operands=("qkv",), **_COMMON, **_FLASH),
    External(
        modules=("xformers.ops", "xformers.ops.fmha"),
        name="memory_efficient_attention",
        operands=("query", "key", "value"),
        scale="scale",
        bias="attn_bias",
        harmless=frozenset({"p", "op", "output_dtype"}),
    ),
)

_BANDS: Mapping[str, Band] = {
    "LowerTriangularMask": Band(after=0, at_end=False),
    "LowerTriangularFromBottomRightMask": Band(after=0),
    "BlockDiagonalCausalMask": Band(after=0, at_end=False),
    "BlockDiagonalCausalFromBottomRightMask": Band(after=0),
}
"""Masks that are a band of fixed form, within every block where they have blocks."""
_LOCAL: Mapping[str, bool] = {
    "LowerTriangularFromBottomRightLocalAttentionMask": True,
    "BlockDiagonalCausalLocalAttentionMask": False,
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": True,
}
"""Causal masks with a window, and whether they are aligned at the end."""


def present() -> dict[types.FunctionType, Callable[[Mapping[str, Any], Sampler], KernelCall]]:
    """The functions of loaded packages that can be heard, and for each what describes a call by its arguments. Nothing is imported."""
    found: dict[types.FunctionType, Callable[[Mapping[str, Any], Sampler], KernelCall]] = {}
    for record in EXTERNALS:
        for module in record.modules:
            held = vars(sys.modules[module]).get(record.name) if module in sys.modules else None
            function = inspect.unwrap(held) if callable(held) else None
            if isinstance(function, types.FunctionType) and function not in found:
                parameters = inspect.signature(function).parameters
                found[function] = partial(describe_call, record, {name: given.default for name, given in parameters.items()})
    return found


class _Arguments:
    """The arguments of one call; what has been asked for is understood."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], harmless: frozenset[str]) -> None:
        self._given, self._defaults, self._known = given, defaults, set(harmless)

    def take(self, name: str) -> Any:
        self._known.add(name)
        return self._given.get(name)

    def unknown(self) -> str | None:
        """An argument nobody asked for that is not at its default."""
        return next((name for name in self._given if name not in self._known and not self._at_default(name)), None)

    def _at_default(self, name: str) -> bool:
        value, default = self._given[name], self._defaults.get(name)
        return value is None or value is default or (isinstance(value, bool | int | float | str | tuple) and value == default)


def describe_call(record: External, defaults: Mapping[str, Any], given: Mapping[str, Any], sampler: Sampler) -> KernelCall:
    """What a call means. Views of its operands are made with torch functions, so that whoever records these can follow them.

    Args:
        record: the function that was called.
        defaults: the defaults of its arguments.
        given: its arguments by name.
        sampler: keeps what does not change within a window.

    Raises:
        ValueError: q, k and v are not where the record says.
    """
    arguments = _Arguments(given, defaults, record.harmless)
    query, key, value = _operands(record, arguments)
    fields, reason = _options(record, arguments, sampler)
    packed = record.offsets is not None or "packing" in fields
    parts = [source.part() for source in (query, key, value)]
    if packed and parts[0].ndim == 4 and len(parts[0]) != 1:
        reason = "its packed sequences are several per row"
    token_axis = parts[0].ndim - 3 if packed else 1
    q, k, v = (part.movedim(token_axis if part.ndim > 2 else 0, -2) for part in parts)
    scale = arguments.take(record.scale)
    if (unknown := arguments.unknown()) is not None:
        reason = f"its argument {unknown!r} is not understood"
    return KernelCall(
        q,
        k,
        v,
        1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        (query, value),
        token_axis=token_axis,
        unreadable=f"{record.name}: {reason}" if reason else "",
        **fields,
    )


def _operands(record: External, arguments: _Arguments) -> tuple[Source, Source, Source]:
    found: dict[str, Source] = {}
    for name in record.operands:
        tensor = arguments.take(name)
        if not isinstance(tensor, Tensor) or tensor.ndim < 3:
            raise ValueError(f"{record.name}: {name} is no tensor of at least three axes")
        roles = _OPERANDS[name]
        if len(roles) == 1:
            found[roles] = Source(tensor)
        elif tensor.ndim < 4 or tensor.shape[-3] != len(roles):
            raise ValueError(f"{record.name}: {name} of shape {tuple(tensor.shape)} does not hold {len(roles)} operands")
        else:
            found.update({role: Source(tensor, tensor.ndim - 3, index) for index, role in enumerate(roles)})
    return found["q"], found["k"], found["v"]


def _options(record: External, arguments: _Arguments, sampler: Sampler) -> tuple[dict[str, Any], str]:
    """Fields of the call, and why it cannot be read."""
    fields: dict[str, Any] = {}
    reason = ""
    if record.offsets is not None and record.longest is not None:
        offsets = [arguments.take(name) for name in record.offsets]
        longest = [arguments.take(name) for name in record.longest]
        if all(isinstance(tensor, Tensor) for tensor in offsets):
            fields["packing"] = tuple(map(sampler.packing_between, offsets, longest))
        else:
            reason = f"{' and '.join(record.offsets)} do not say where its sequences begin"
    before, after = _window(arguments.take(record.window)) if record.window else (None, None)
    if arguments.take(record.causal):
        after = 0
    if before is not None or after is not None:
        fields["band"] = Band(before, after)
    fields["cap"] = float(arguments.take(record.cap) or 0)
    fields["slopes"] = arguments.take(record.slopes)
    fields["sink"] = next((sink for sink in map(arguments.take, record.sinks) if sink is not None), None)
    if record.bias:
        described, reason = _bias(arguments.take(record.bias), sampler)
        fields.update(described)
    return fields, reason


def _window(given: Any) -> tuple[int | None, int | None]:
    """Positions before and after; negative ones and None stand for any number."""
    sides = given if isinstance(given, tuple | list) else (given, given)
    before, after = (None if side is None or side < 0 else int(side) for side in sides)
    return before, after


def _bias(bias: Any, sampler: Sampler) -> tuple[dict[str, Any], str]:
    """What a mask says, and why it cannot be read. Some kinds of masks are tensors that hold nothing of what they mean."""
    kind = type(bias).__name__
    fields: dict[str, Any] = {}
    if bias is None:
        return fields, ""
    if type(bias) in (Tensor, torch.nn.Parameter):
        return {"mask": bias}, ""
    blocks: list[Any] = [getattr(bias, side, None) for side in ("q_seqinfo", "k_seqinfo")]
    if kind in _BANDS:
        fields["band"] = _BANDS[kind]
    elif kind in _LOCAL and isinstance(window := getattr(bias, "_window_size", None), int):
        fields["band"] = Band(window - 1, 0, at_end=_LOCAL[kind])
    elif kind == "LocalAttentionFromBottomRightMask":
        fields["band"] = Band(bias.window_left, bias.window_right)
    elif kind == "LowerTriangularMaskWithTensorBias" and type(added := getattr(bias, "_bias", None)) is Tensor:
        fields |= {"band": Band(after=0, at_end=False), "mask": added}
    elif kind != "BlockDiagonalMask":
        return fields, f"a mask of type {kind} is not understood"
    if kind.startswith("BlockDiagonal"):
        if any(not isinstance(getattr(block, "seqstart", None), Tensor) for block in blocks):
            return fields, f"a {kind} that does not say where its blocks begin"
        fields["packing"] = tuple(sampler.packing_between(block.seqstart, getattr(block, "max_seqlen", None)) for block in blocks)
    return fields, ""
