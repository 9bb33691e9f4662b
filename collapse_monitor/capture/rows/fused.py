"""One face for every kernel that hides its distribution: what it was called with, and its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from collapse_monitor.capture.packing import is_jagged
from collapse_monitor.capture.rows.flex import FlexCall, flex_rows
from collapse_monitor.capture.rows.folding import Folding
from collapse_monitor.capture.rows.kernel import KernelCall, Source, kernel_rows
from collapse_monitor.capture.rows.sdpa import SdpaCall, sdpa_rows
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.observation import AttentionObservation

HIDDEN = frozenset({"sdpa", "flex", "external"})
"""Kinds of attention whose distribution is worked out again from the arguments of the call."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedCall:
    """A call of such a kernel.

    Attributes:
        query: what has to be readable for rows to be worked out.
        sources: what q and v were handed over in.
        rows: works the rows out, given how leading axes fold; called without gradients.
        lengths: of queries and keys, where the shapes of the operands do not tell; `folding` likewise.
        sequences: how many lie behind each other on the query axis, if they do.
        unreadable: why there are no rows.
    """

    query: Tensor
    sources: tuple[Source, Source]
    rows: Callable[[Folding, Sampler], AttentionObservation]
    lengths: tuple[int, int] | None = None
    folding: Folding | None = None
    sequences: int | None = None
    unreadable: str = ""


def fused_call(how: str, args: tuple[Any, ...], kwargs: dict[str, Any], sampler: Sampler) -> FusedCall:
    """The call of a kernel of this kind."""
    if how == "flex":
        flex = FlexCall.of(args, kwargs)
        return FusedCall(flex.query, (Source(flex.query), Source(flex.value)), lambda _, own: flex_rows(flex, own))
    if how == "external":
        kernel: KernelCall = args[0]
        return _of_kernel(kernel, kernel.folding)
    call = SdpaCall.of(args, kwargs)
    if is_jagged(call.query) and is_jagged(call.key) and is_jagged(call.value):
        return _of_kernel(KernelCall.of_jagged(call, sampler), None)
    sources = (Source(call.query), Source(call.value))
    return FusedCall(call.query, sources, lambda folding, own: sdpa_rows(call, folding, own))


def _of_kernel(call: KernelCall, folding: Folding | None) -> FusedCall:
    return FusedCall(
        call.query,
        call.sources,
        lambda known, own: kernel_rows(call, known, own),
        (call.query_length, call.key_length),
        folding,
        None if call.packing is None else len(call.packing[0].starts),
        call.unreadable,
    )
