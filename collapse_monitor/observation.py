"""What capture hands over and measure consumes: tensors with a mask, alive only during one window.

Every tensor here is detached. Sample tensors own their memory: the model may overwrite its own in place at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from collapse_monitor.metrics import Reads

Key = tuple[object, ...]
"""Address of an execution within one forward. Equal between windows as long as the model runs the same way."""


ROW_READS: tuple[Reads, ...] = ("attention", "logits", "attention_pair", "attention_batch")
"""What is read from the rows of an attention."""


@dataclass(slots=True, eq=False)
class TokenSample:
    """Some tokens of some sequences at one point of the residual stream, in the dtype the model used.

    `mask` is False at padding of the sample itself (a sequence with fewer valid tokens than others); None: all valid.
    Samples that show the same tensor of the model are the same object, so that equal work is done once.
    """

    hidden: Float[Tensor, "sequence token dim"]
    mask: Bool[Tensor, "sequence token"] | None = None


@dataclass(slots=True, eq=False)
class BlockObservation:
    """One execution of a block. `input` is None where the token sets of input and output differ or the input was not seen."""

    output: TokenSample
    input: TokenSample | None = None


@dataclass(slots=True, eq=False)
class AttentionObservation:
    """The distribution one attention really used, on sampled query rows, in fp32 or better.

    `weights` are before dropout, sink columns taken out and renormalised; windows of one image are separate entries of
    `sequence`. `visible` is True at visible keys; None: all. Rows that belong to no valid query see no key.
    `logits` is what entered the softmax, after scale, bias and softcap, before the mask. `sink` is the mass that went to sink columns.
    `same_rows` is equal for two observations whose rows are the same queries over the same keys.
    """

    weights: Float[Tensor, "sequence head query key"]
    visible: Bool[Tensor, "#sequence #head #query key"] | None = None
    logits: Float[Tensor, "sequence head query key"] | None = None
    sink: Float[Tensor, "sequence head query"] | None = None
    query_index: Int[Tensor, "*sequence query"] | None = None
    same_rows: object = None
    cross: bool = False


@dataclass(slots=True, eq=False)
class WeightObservation:
    """The weights that make q, k and v of one attention, laid out as in `nn.Linear`; views of parameters, not to be changed or kept.

    With grouped queries the rows of a key or value head stand once for each of its queries. `unknown` says, by what a metric reads,
    why it cannot be read here.
    """

    query: Float[Tensor, "head head_dim dim"] | None = None
    key: Float[Tensor, "head head_dim dim_k"] | None = None
    value: Float[Tensor, "head value_dim dim_v"] | None = None
    unknown: Mapping[Reads, str] = field(default_factory=dict)


class Receiver(Protocol):
    """Takes observations as they are made. Called with gradients and autocast off; must not keep an attention's tensors."""

    def asks(self, *reads: Reads) -> bool:
        """Whether one of these is read by any metric: what nobody reads need not be worked out."""

    def attention(self, key: Key, observation: AttentionObservation) -> None:
        """One attention execution: reduce it to scalars per head now."""

    def block(self, key: Key, observation: BlockObservation) -> None:
        """One block execution: keep the sample, it is evaluated when the window closes."""

    def branch(self, key: Key, branch: Float[Tensor, ...], stream: Float[Tensor, ...]) -> None:
        """The operands of the addition where the attention `key` joined the stream (samples)."""

    def gradient(self, key: Key, gradient: Float[Tensor, ...]) -> None:
        """dL/d(output) of a block; reduced now."""

    def qv_gradient(self, key: Key, role: str, gradient: Float[Tensor, ...]) -> None:
        """dL/dq or dL/dv (`role` is "q" or "v") of an attention, as its kernel got them; reduced now."""


def reason_against(tensor: object, axes: int | None = None) -> str | None:
    """Why a tensor cannot be read, or None if it can: dense, floating, with values, of this process, with so many axes."""
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__} in place of a tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout})"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside torch.vmap or torch.func, without values of its own: read the model outside of it, with probe()"
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return "a tensor on the meta device, without values"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}, which this process does not hold as a plain tensor"
    if tensor.is_quantized or not tensor.is_floating_point():
        return f"a tensor of {tensor.dtype}, not floating point"
    if tensor.numel() == 0:
        return f"an empty tensor of shape {list(tensor.shape)}"
    if axes is not None and tensor.ndim != axes:
        return f"a tensor of {tensor.ndim} axes, {axes} expected"
    return None
