"""The record that describes one metric: what it reads, how, in which range, and which end is collapse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Reads = Literal[
    "hidden",  # compute(hidden [*batch token dim], mask [*batch token] or None) -> [*batch]: a block's output
    "transition",  # compute(input, output, mask) -> [*batch]: a block's input and output, as above
    "branch",  # compute(branch, stream) -> scalar: the operands of the addition where attention joins the stream
    "attention",  # compute(weights [*batch head query key], mask broadcastable or None) -> [*batch head]
    "logits",  # compute(logits, mask) -> [*batch head]: what enters the softmax
    "attention_pair",  # compute(weights, previous, mask) -> [*batch head]: this site's rows and those of the previous site
    "attention_batch",  # compute(weights [batch head query key], mask) -> [head]: several sequences at once
    "gradient",  # compute(gradient [*batch token dim]) -> scalar: dL/d(block output)
    "qv_gradient",  # compute(query gradient, value gradient) -> scalar: dL/dq and dL/dv as the kernel got them
    "parameter_gradients",  # compute(list of gradients) -> scalar: of a block's parameters
    "qv_weight_gradient",  # compute(query weight gradient, value weight gradient) -> scalar
    "features",  # compute(features [sample dim]) -> scalar: sequence means over many sequences
    "qk_weights",  # compute(query weight [*head head_dim dim], key weight) -> [*head]
    "value_weights",  # compute(value weight [*head head_dim dim]) -> [*head]
]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: the series name and the docs anchor, lower case with underscores.
        reads: what `compute` is given; the catalogue in `Reads` lists the signatures.
        compute: a pure function of tensors.
        range: smallest and largest possible value.
        collapse: the end that means collapse, or None when neither does.
        unit: of the value; empty for a dimensionless one.
        reference: the paper the definition is from.

    Raises:
        ValueError: `name` or `reads` is not allowed; the message says what is.
    """

    name: str
    reads: Reads
    compute: Callable[..., Any]
    range: tuple[float, float] = (float("-inf"), float("inf"))
    collapse: Literal["low", "high"] | None = None
    unit: str = ""
    reference: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name != self.name.lower():
            raise ValueError(
                f"Metric name {self.name!r}: use a lower-case identifier such as 'token_similarity', it becomes the series name"
            )
        if self.reads not in get_args(Reads):
            raise ValueError(f"Metric {self.name!r} reads {self.reads!r}; allowed: {', '.join(get_args(Reads))}")
        if not callable(self.compute):
            raise ValueError(f"Metric {self.name!r}: compute must be a function of tensors, got {type(self.compute).__name__}")
